"""One sample: what a dataset returns for a global sample index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    from hetero_megatron.data.indexed import TokenStore

class LikeliestTokens(NamedTuple):
    """What a teacher said of the s positions of a sample: its k likeliest tokens ``ids`` [s, k] int32, their
    log-probabilities ``logps`` [s, k] and that of all others together, ``rest`` [s]; fp32."""

    ids: np.ndarray
    logps: np.ndarray
    rest: np.ndarray


class Sample(NamedTuple):
    """``tokens`` int64 [seq_length + 1]; ``documents`` int32 [n], ascending starts in ``tokens[:-1]``, first 0.

    ``loss_mask``: bool [seq_length], True where the prediction of the next token counts; None: everywhere.
    ``pairs``: of preference pairs, the number of each in the data; pair i of the sample is documents 2 i (chosen) and
    2 i + 1 (rejected).
    ``teacher``: of data that bring what a teacher said.
    ``desired``: the samples' documents are single answers, numbered by ``pairs``, and these are their labels;
    ``mismatched``: the same prompts, in the same order, each with another example's answer.
    ``judged``: of a sampled answer, its advantage and the weight of each of its tokens.
    """

    tokens: np.ndarray
    documents: np.ndarray
    loss_mask: np.ndarray | None = None
    pairs: tuple[int, ...] | None = None
    teacher: LikeliestTokens | None = None
    desired: tuple[bool, ...] | None = None
    mismatched: Sample | None = None
    judged: tuple[float, float] | None = None


def document_starts(tokens: np.ndarray, starts: np.ndarray, eod: int | None) -> np.ndarray:
    """Starts of documents in ``tokens[:-1]``, int32: 0, the known ``starts``, and every position after an ``eod``.

    An end-of-document token belongs to the document that it ends.
    """
    starts_found = [np.zeros(1, np.int64), starts]
    if eod is not None:
        starts_found.append(np.flatnonzero(tokens == eod) + 1)
    merged = np.unique(np.concatenate(starts_found))
    return merged[merged < len(tokens) - 1].astype(np.int32)


class Dataset(Protocol):
    """Samples by global index, independent of the caller."""

    def __getitem__(self, index: int) -> Sample: ...


@runtime_checkable
class StoredDataset(Dataset, Protocol):
    """Samples of stored documents, in epochs: packed text or packed conversations.

    ``documents``: the first and the last one's number in ``store``, half-open.
    """

    store: TokenStore
    documents: tuple[int, int]

    def num_epochs(self, num_samples: int) -> int: ...


@runtime_checkable
class Blend(Dataset, Protocol):
    """Samples of several data sets in turn."""

    datasets: Sequence[Dataset]


@runtime_checkable
class Stream(Dataset, Protocol):
    """A dataset that is read in order: it has a state to save.

    ``kind``: ``streams`` of text or ``conversations``, whose states differ.
    """

    @property
    def kind(self) -> str: ...

    def state_dict(self, sample: int) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
