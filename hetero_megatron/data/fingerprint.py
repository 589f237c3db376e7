"""A short fingerprint of the data that a run reads."""

from __future__ import annotations

import hashlib

from hetero_megatron.data.sample import Dataset
from hetero_megatron.data.streaming import StreamingDataset

SAMPLES = 4  # the first ones: windows from all over the data, because they are shuffled


def data_fingerprint(dataset: Dataset | None) -> str:
    """16 hex digits that depend on documents, tokenizer, split, seed and sequence length; empty without a dataset, and
    for a stream, which would have to be read."""
    if dataset is None or isinstance(dataset, StreamingDataset):
        return ""
    digest = hashlib.sha256()
    for index in range(SAMPLES):
        digest.update(dataset[index].tokens.tobytes())
    return digest.hexdigest()[:16]
