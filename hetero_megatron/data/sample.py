"""One sample: what a dataset returns for a global sample index."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np


class Sample(NamedTuple):
    """``tokens`` int64 [seq_length + 1]; ``documents`` int32 [n], ascending starts in ``tokens[:-1]``, first 0."""

    tokens: np.ndarray
    documents: np.ndarray


class Dataset(Protocol):
    """Samples by global index, independent of the caller."""

    def __getitem__(self, index: int) -> Sample: ...
