"""Micro-batches on their way to a device: from pinned memory, on a stream of their own, ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch

from hetero_megatron.data.batch import Batch, JudgedAnswers, TeacherTokens
from hetero_megatron.platform.accelerator import Accelerator

AHEAD = 2  # micro-batches that are copied before they are asked for


@dataclass(frozen=True)
class _UnderWay:
    """A batch on the device, valid after an event; ``pinned`` is what is being copied."""

    batch: Batch
    event: Any
    tensors: tuple[torch.Tensor, ...]
    pinned: tuple[torch.Tensor, ...]


class Uploader:
    """Copies batches of one rank. The host is never held up."""

    def __init__(self, accelerator: Accelerator, device: torch.device) -> None:
        self._accelerator, self._device = accelerator, device
        self._stream = accelerator.stream()

    def start(self, batch: Batch) -> _UnderWay:
        sides = () if batch.pairs is None else (batch.pairs.sides,)
        ahead_tensors = [x for a in batch.ahead for x in (a.tokens, a.labels, a.mask)]
        stacked = torch.stack([batch.tokens, batch.labels, batch.positions, *sides])  # [3 or 4, b, s]
        table = None if batch.draws is None else batch.draws.table
        teacher_tensors = () if batch.teacher is None else (batch.teacher.ids, batch.teacher.logps, batch.teacher.rest)
        answers = () if batch.judged is None else (batch.judged.advantages, batch.judged.weights)
        pinned = tuple(
            self._pinned(x)
            for x in (stacked, batch.loss_mask, *ahead_tensors, *teacher_tensors, *answers, table)
            if x is not None
        )
        with self._accelerator.on_stream(self._stream):
            tensors = tuple(torch.empty(x.shape, dtype=x.dtype, device=self._device) for x in pinned)
            for to, source in zip(tensors, pinned, strict=True):
                to.copy_(source, non_blocking=True)
            event = self._accelerator.event()
            event.record(self._stream)
        tokens, labels, positions = tensors[0][:3].unbind()
        pairs = None if batch.pairs is None else replace(batch.pairs, sides=tensors[0][3])
        mask = tensors[1] if batch.loss_mask is not None else None
        moved = tensors[1 + (mask is not None) :][: len(ahead_tensors)]
        ahead_on_device = tuple(
            replace(a, tokens=moved[3 * k], labels=moved[3 * k + 1], mask=moved[3 * k + 2])
            for k, a in enumerate(batch.ahead)
        )
        rest = tensors[1 + (mask is not None) + len(ahead_tensors) :]
        teacher, judged = rest[: len(teacher_tensors)], rest[len(teacher_tensors) :][: len(answers)]
        counted, draws = batch.num_loss_tokens(), batch.draws
        if draws is not None and table is not None:
            draws = replace(draws, table=tensors[-1])
        device_batch = replace(
            batch, tokens=tokens, labels=labels, positions=positions, loss_mask=mask, counted=counted, draws=draws,
            pairs=pairs, ahead=ahead_on_device, teacher=TeacherTokens(*teacher) if teacher else None,
            judged=JudgedAnswers(*judged) if judged else None,
        )  # fmt: skip
        return _UnderWay(device_batch, event, tensors, pinned)

    def _pinned(self, values: torch.Tensor) -> torch.Tensor:
        memory = self._accelerator.host_memory(values.nbytes).view(values.dtype).view(values.shape)
        return memory.copy_(values)

    def join(self, upload: _UnderWay) -> Batch:
        """The batch, on the current stream."""
        stream = self._accelerator.current_stream()
        stream.wait_event(upload.event)
        self._accelerator.used_on(stream, *upload.tensors)
        return upload.batch


class UploadedBatches(Sequence[Batch | None]):
    """The micro-batches of a step by number; each is copied when one of the ``AHEAD`` before it is first asked for.

    Args:
        makers: of each micro-batch in host memory; None where this rank has no rows of it.
    """

    def __init__(self, makers: Sequence[Callable[[], Batch] | None], uploader: Uploader) -> None:
        self._makers, self._uploader = makers, uploader
        self._started: dict[int, _UnderWay] = {}
        self._joined: dict[int, Batch] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._makers)

    @overload
    def __getitem__(self, index: int) -> Batch | None: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Batch | None]: ...

    def __getitem__(self, index: int | slice) -> Batch | None | Sequence[Batch | None]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        if self._makers[index] is None:
            return None
        if index not in self._joined:
            while self._next < min(index + 1 + AHEAD, len(self)):
                self._start(self._next)
                self._next += 1
            self._joined[index] = self._uploader.join(self._started[index])
        return self._joined[index]

    def _start(self, index: int) -> None:
        make = self._makers[index]
        if make is not None:
            self._started[index] = self._uploader.start(make())
