"""A short fingerprint of the data that a run reads."""

from __future__ import annotations

import hashlib

from hetero_megatron.data.sample import Dataset

SAMPLES = 4  # the first ones: windows from all over the data, because they are shuffled


def data_fingerprint(dataset: Dataset | None) -> str:
    """16 hex digits that depend on documents, tokenizer, split, seed and sequence length; empty without a dataset."""
    if dataset is None:
        return ""
    digest = hashlib.sha256()
    for index in range(SAMPLES):
        sample = dataset[index]
        digest.update(sample.tokens.tobytes())
        if sample.loss_mask is not None:
            digest.update(sample.loss_mask.tobytes())
    return digest.hexdigest()[:16]
