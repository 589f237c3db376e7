"""One sample: what a dataset returns for a global sample index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np


class Sample(NamedTuple):
    """``tokens`` int64 [seq_length + 1]; ``documents`` int32 [n], ascending starts in ``tokens[:-1]``, first 0.

    ``loss_mask``: bool [seq_length], True where the prediction of the next token counts; None: everywhere.
    """

    tokens: np.ndarray
    documents: np.ndarray
    loss_mask: np.ndarray | None = None


class Dataset(Protocol):
    """Samples by global index, independent of the caller."""

    def __getitem__(self, index: int) -> Sample: ...


@runtime_checkable
class Stream(Dataset, Protocol):
    """A dataset that is read in order: it has a state to save.

    ``kind``: ``streams`` of text or ``conversations``, whose states differ.
    """

    @property
    def kind(self) -> str: ...

    def state_dict(self, sample: int) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
