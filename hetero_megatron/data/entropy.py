"""Unigram entropy: the loss of the best model that ignores context, which a trained model must undercut."""

from __future__ import annotations

import numpy as np

from hetero_megatron.data.packing import PackedDataset
from hetero_megatron.data.sample import Dataset


def unigram_entropy(source: np.ndarray | Dataset, num_samples: int = 256) -> float:
    """Entropy in nats of the tokens of an array, of all of a packed dataset, or of a dataset's first samples."""
    if isinstance(source, PackedDataset):
        tokens = source.all_tokens()
    elif isinstance(source, np.ndarray):
        tokens = source.ravel()
    else:
        tokens = np.concatenate([source[i].tokens[1:] for i in range(num_samples)])
    counts = np.zeros(int(tokens.max()) + 1, np.int64)
    for start in range(0, len(tokens), 2**24):  # bincount copies to int64
        counts += np.bincount(tokens[start : start + 2**24], minlength=len(counts))
    p = counts[counts > 0] / len(tokens)
    return float(-(p * np.log(p)).sum())
