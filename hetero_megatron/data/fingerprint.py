"""A short fingerprint of the data that a run reads."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from hetero_megatron.data.sample import Blend, Dataset, StoredDataset

if TYPE_CHECKING:
    from hetero_megatron.data.indexed import TokenStore

SAMPLES = 4  # the first ones: windows from all over the data, because they are shuffled
PLACES, WIDTH = 1024, 64  # of stored tokens: windows of so many, spread evenly; less are hashed as a whole


def corpus_fingerprint(dataset: Dataset | None, tokenizer: str) -> str:
    """16 hex digits of what is stored: how many documents, their sizes and tokens at about a thousand places each, all
    over it. Empty for data that are not stored (streams, mock data).

    Args:
        tokenizer: the tokenizer's fingerprint.
    """
    digest = hashlib.sha256(tokenizer.encode())
    parts = list(_stored(dataset))
    for store, (first, last) in parts:
        digest.update(repr((first, last, store.num_documents, store.num_tokens)).encode())
        for array in (store.offsets, store.tokens):
            digest.update(_spread(array).astype("<i8").tobytes())
    return digest.hexdigest()[:16] if parts else ""


def _stored(dataset: Dataset | None) -> Iterator[tuple[TokenStore, tuple[int, int]]]:
    """(store, first and last document) of each part of a blend."""
    if isinstance(dataset, Blend):
        for part in dataset.datasets:
            yield from _stored(part)
    elif isinstance(dataset, StoredDataset):
        yield dataset.store, dataset.documents


def _spread(array: np.ndarray) -> np.ndarray:
    """All of a short array, windows of a long one, its beginning and its end among them."""
    if len(array) <= PLACES * WIDTH:
        return np.asarray(array)
    starts = np.linspace(0, len(array) - WIDTH, PLACES).astype(np.int64)
    return np.concatenate([array[start : start + WIDTH] for start in starts])


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
