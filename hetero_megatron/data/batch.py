"""Samples as the tensors of one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from hetero_megatron.data.sample import Dataset, LikeliestTokens, Sample
from hetero_megatron.ops.dropout import Draws


@dataclass(frozen=True)
class BatchOptions:
    """Megatron's flags of the same names. ``eod`` is the token that ends a document."""

    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    eod: int | None = None


@dataclass(frozen=True)
class Pairs:
    """The preference pairs of a batch.

    Attributes:
        sides: int64 [b, s]: which answer of the batch a position belongs to: 2 i chosen, 2 i + 1 rejected of pair i;
            0 where nothing counts.
        numbers: of each pair in the data.
        lengths: tokens that count of each answer, [2 x pairs], in all of the sequence.
        desired: of single answers, which are numbered as pairs are and have one side each: their labels; empty: pairs.
        by_sample: how many pairs or single answers each sample has, in the order of ``numbers``.
    """

    sides: torch.Tensor
    numbers: tuple[int, ...]
    lengths: tuple[int, ...]
    desired: tuple[bool, ...] = ()
    by_sample: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ahead:
    """Of the positions of a batch, some number of tokens ahead: the tokens there and their labels, int64 [b, s], and
    which positions have such a target, bool [b, s]; of others, tokens and labels are 0."""

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class TeacherTokens:
    """What a teacher said of a batch, as :class:`~hetero_megatron.data.sample.LikeliestTokens` has it: ids int32 and
    logps [b, s, k], rest [b, s]."""

    ids: torch.Tensor
    logps: torch.Tensor
    rest: torch.Tensor


@dataclass(frozen=True)
class JudgedAnswers:
    """Of the sampled answers that the rows of a batch hold: their advantages, and the weights of their tokens; fp64
    [b, 1]."""

    advantages: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """b sequences of s tokens.

    Attributes:
        tokens, labels, positions: int64 [b, s]; labels are the next tokens.
        loss_mask: bool [b, s], True where a token counts; None: all count.
        documents: start offsets per row, where attention must not cross documents; None: one document per row.
            They count tokens of the whole sequence, also in a batch that holds only some of its tokens.
        counted: tokens that count in the loss, where the mask is on a device; None: the mask says.
        draws: of dropout, in training; its sample is the global index of the first row.
        pairs: of preference pairs; None: rows are no pairs.
        ahead: for modules that predict further tokens, what is 1, 2, … tokens ahead; none: they do not run.
        samples: global index of each row, where somebody gave the rows.
        teacher: what it said, where the data bring that.
        mismatched: of labelled answers, the same prompts with others' answers; on the host, whole.
        judged: of sampled answers, one in each row.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor | None = None
    documents: list[list[int]] | None = None
    counted: int | None = None
    draws: Draws | None = None
    pairs: Pairs | None = None
    ahead: tuple[Ahead, ...] = ()
    samples: tuple[int, ...] = ()
    teacher: TeacherTokens | None = None
    mismatched: Batch | None = None
    judged: JudgedAnswers | None = None

    def num_loss_tokens(self) -> int:
        if self.counted is not None:
            return self.counted
        return self.labels.numel() if self.loss_mask is None else int(self.loss_mask.sum())

    def select(self, intervals: Sequence[tuple[int, int]]) -> Batch:
        """The tokens of some intervals of every sequence, concatenated; ``documents`` stay those of the whole
        sequences."""
        if tuple(intervals) == ((0, self.tokens.shape[1]),):
            return self

        def part(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[:, start:end] for start, end in intervals], dim=1) if intervals else x[:, :0]

        mask = None if self.loss_mask is None else part(self.loss_mask)
        tokens, labels, positions = map(part, (self.tokens, self.labels, self.positions))
        pairs = None if self.pairs is None else replace(self.pairs, sides=part(self.pairs.sides))
        ahead = tuple(replace(a, tokens=part(a.tokens), labels=part(a.labels), mask=part(a.mask)) for a in self.ahead)
        teacher = self.teacher
        teacher = None if teacher is None else TeacherTokens(part(teacher.ids), part(teacher.logps), part(teacher.rest))
        return replace(
            self, tokens=tokens, labels=labels, positions=positions, loss_mask=mask, pairs=pairs, ahead=ahead,
            teacher=teacher,
        )  # fmt: skip


def make_batch(dataset: Dataset, indices: Sequence[int], options: BatchOptions) -> Batch:
    """The batch of some global sample indices, in that order."""
    samples = [dataset[i] for i in indices]
    batch = _batch(samples, options)
    mismatched = [s.mismatched for s in samples if s.mismatched is not None]
    return replace(batch, samples=tuple(indices), mismatched=_batch(mismatched, options) if mismatched else None)


def _batch(samples: Sequence[Sample], options: BatchOptions) -> Batch:
    tokens = np.stack([s.tokens for s in samples])
    inputs, length = tokens[:, :-1], tokens.shape[1] - 1
    positions = np.tile(np.arange(length), (len(samples), 1))
    if options.reset_position_ids:
        positions = np.stack([_positions(s.documents, length) for s in samples])
    # As in Megatron: a position whose *input* is the end of a document predicts across a boundary and is masked.
    mask = torch.from_numpy(inputs != options.eod) if options.eod_mask_loss else None
    masks = [s.loss_mask for s in samples]
    if any(m is not None for m in masks):
        loss_mask = torch.from_numpy(np.stack([np.ones(length, bool) if m is None else m for m in masks]))
        mask = loss_mask if mask is None else loss_mask & mask
    documents = [s.documents.tolist() for s in samples] if options.reset_attention_mask else None
    return Batch(
        torch.from_numpy(np.ascontiguousarray(inputs)),
        torch.from_numpy(np.ascontiguousarray(tokens[:, 1:])),
        torch.from_numpy(np.ascontiguousarray(positions)),
        mask,
        documents,
        pairs=_pairs(samples, length) if samples and samples[0].pairs is not None else None,
        teacher=_teacher_tokens([s.teacher for s in samples if s.teacher is not None]),
        judged=_judged([s.judged for s in samples if s.judged is not None]),
    )


def _judged(every: Sequence[tuple[float, float]]) -> JudgedAnswers | None:
    if not every:
        return None
    return JudgedAnswers(*torch.tensor(every, dtype=torch.float64)[..., None].unbind(1))


def _teacher_tokens(every: Sequence[LikeliestTokens]) -> TeacherTokens | None:
    if not every:
        return None
    return TeacherTokens(*(torch.from_numpy(np.stack(arrays)) for arrays in zip(*every, strict=True)))


def _pairs(samples: Sequence[Sample], length: int) -> Pairs:
    """Of samples that all hold pairs."""
    sides, numbers, lengths = np.zeros((len(samples), length), np.int64), list[int](), list[int]()
    desired = list[bool]()
    for row, sample in zip(sides, samples, strict=True):
        assert sample.pairs is not None and sample.loss_mask is not None
        starts = [*sample.documents.tolist(), length]
        desired += sample.desired or ()
        for i in range((2 if sample.desired is None else 1) * len(sample.pairs)):
            answer_slice = slice(starts[i], starts[i + 1])
            row[answer_slice] = len(lengths)
            lengths.append(int(sample.loss_mask[answer_slice].sum()))
        numbers += sample.pairs
    counts = tuple(len(sample.pairs or ()) for sample in samples)
    return Pairs(torch.from_numpy(sides), tuple(numbers), tuple(lengths), tuple(desired), counts)


def _positions(documents: np.ndarray, length: int) -> np.ndarray:
    """0, 1, 2, … restarting at every document."""
    lengths = np.diff(np.append(documents, length))
    return np.arange(length) - np.repeat(documents, lengths)


_Key = tuple[int, ...]


class BatchLoader:
    """Maps global sample indices to their batch, with prefetching that never changes the result.

    Call ``advance(n)`` once per step, after fetching its batches: the same requests, ``n`` samples later, are then
    prepared in the background. A background error is raised by the request that it belongs to.

    Args:
        num_workers: threads; 0: no prefetching.
    """

    def __init__(self, dataset: Dataset, options: BatchOptions, num_workers: int = 2) -> None:
        self.dataset, self._options = dataset, options
        self._pool = ThreadPoolExecutor(num_workers, "data") if num_workers else None
        self._requests: list[_Key] = []
        self._prepared: dict[_Key, Future[Batch]] = {}

    def __call__(self, indices: Sequence[int]) -> Batch:
        key = tuple(indices)
        self._requests.append(key)
        future = self._prepared.pop(key, None)
        return make_batch(self.dataset, key, self._options) if future is None else future.result()

    def advance(self, samples: int) -> None:
        """A step of ``samples`` global samples was fetched: prepare the next one."""
        requests, self._requests = self._requests, []
        self.prefetch([[i + samples for i in key] for key in dict.fromkeys(requests)])

    def prefetch(self, requests: Sequence[Sequence[int]]) -> None:
        """Prepare these batches and drop prepared ones that were not fetched."""
        for future in self._prepared.values():
            future.cancel()
        self._prepared.clear()
        if self._pool is not None:
            for indices in requests:
                key = tuple(indices)
                self._prepared[key] = self._pool.submit(make_batch, self.dataset, key, self._options)

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def look_ahead(batch: Batch, depth: int) -> Batch:
    """A batch of whole sequences with what is 1, ..., ``depth`` tokens ahead. Made before a rank takes its own tokens
    of them, so that a target may lie in another rank's."""
    length = batch.labels.shape[1]
    ends = torch.full_like(batch.labels, length)  # [b, s], of the document of each position
    for row, starts in zip(ends, batch.documents or (), strict=False):
        edges = [*starts, length]
        for start, end in zip(edges, edges[1:]):
            row[start:end] = end
    places = torch.arange(length, device=ends.device)
    shifted = []
    for k in range(1, depth + 1):
        in_document = places + k < ends
        mask = in_document if batch.loss_mask is None else in_document & _shifted(batch.loss_mask, k)
        shifted.append(Ahead(_shifted(batch.labels, k - 1) * in_document, _shifted(batch.labels, k) * mask, mask))
    return replace(batch, ahead=tuple(shifted))


def _shifted(x: torch.Tensor, k: int) -> torch.Tensor:
    """Position i has what i + k had, [b, s]; the last ones have 0."""
    return torch.nn.functional.pad(x[:, k:], (0, k))


def with_targets_ahead(batch: Batch) -> Batch:
    """The batch whose rows are those of the main loss, then those of each module: labels and mask, [(1 + n) b, s]."""
    mask = batch.loss_mask if batch.loss_mask is not None else torch.ones_like(batch.labels, dtype=torch.bool)
    labels, masks = [batch.labels, *(a.labels for a in batch.ahead)], [mask, *(a.mask for a in batch.ahead)]
    return replace(batch, labels=torch.cat(labels), loss_mask=torch.cat(masks), counted=None)
