"""What a model with a role of its own says of the samples of a batch: sent from the ranks with its head to those with
the trained model's for the same samples, by layout transfer. A teacher says the log-probabilities of its likeliest next
tokens, a reference those of whole answers.

Who sends what to whom: :mod:`hetero_megatron.plans.roles`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetero_megatron.comm import Comm, Work
from hetero_megatron.layout import Box, Transfer
from hetero_megatron.pipeline.likeliest import unpacked
from hetero_megatron.plans import Plan
from hetero_megatron.plans.roles import HeadPart, head_parts, score_transfer

# By the global indices of the samples of a micro-batch: [b, s, words] int32, of a teacher ``Likeliest.packed_rows``.
Rows = Mapping[tuple[int, ...], torch.Tensor]


class TeacherScores:
    """The teacher's scores of the batch that a student works on.

    Attributes:
        top_k: k of the rows; rows: of this rank's micro-batches.
    """

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self.rows: Rows = {}

    def of(self, samples: tuple[int, ...], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of b s positions: ids int64 [b s, k], log-probabilities [b s, k] and [b s] of all others, of ``like``'s
        dtype."""
        ids, logps, others = unpacked(self.rows[samples].flatten(0, 1))
        return ids.long(), logps.to(like.dtype), others.to(like.dtype)

    def empty(self, positions: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same for a rehearsal, where there are no scores and nothing that is computed counts."""
        zeros = torch.zeros(positions, self.top_k + 1, dtype=like.dtype, device=like.device)
        return zeros[:, :-1].long(), zeros[:, :-1], zeros[:, -1]


def packed_answers(
    numbers: tuple[int, ...], by_sample: tuple[int, ...], logps: Mapping[int, tuple[float, float]], slots: int
) -> torch.Tensor:
    """Log-probabilities of the answers of a micro-batch as rows, [b, slots, 6] int32: the i-th pair or example of a
    sample is at position i, the bits of its number and of two log-probabilities in fp64; elsewhere the number is -1.

    Args:
        numbers: of pairs or examples, in the order of the samples; by_sample: how many each sample has.
        logps: by number, at least those; slots: tokens of a sample, of which an answer has at least one.
    """
    rows = torch.full((len(by_sample), slots, 3), -1, dtype=torch.int64)
    of_sample = iter(numbers)
    for row, count in zip(rows, by_sample, strict=True):
        for place in range(count):
            number = next(of_sample)
            row[place, 0] = number
            row[place, 1:] = torch.tensor(logps[number], dtype=torch.float64).view(torch.int64)
    return rows.view(torch.int32)


def unpacked_answers(rows: Rows) -> dict[int, tuple[float, float]]:
    """By number, what :func:`packed_answers` packed."""
    logps_of_number: dict[int, tuple[float, float]] = {}
    for part in rows.values():
        values = part.cpu().contiguous().view(torch.int64).flatten(0, 1)
        values = values[values[:, 0] >= 0]
        logps = values[:, 1:].contiguous().view(torch.float64).tolist()
        logps_of_number |= {number: (a, b) for number, (a, b) in zip(values[:, 0].tolist(), logps, strict=True)}
    return logps_of_number


class ScoreTransfer:
    """Of one rank, of either model; all ranks with a head call :meth:`send` or :meth:`receive` for every batch.

    Args:
        source, target: plans of the role and of the model that is trained; words: of 4 bytes, of each position.
        whole: what is said is of whole samples, and all ranks with tokens of one know and need it.
    """

    def __init__(self, comm: Comm, source: Plan, target: Plan, words: int, whole: bool = False) -> None:
        self._comm, self._plans, self._width, self._whole = comm, (source, target), words, whole
        self._transfers: dict[int, Transfer] = {}
        self._connected: set[int] = set()
        self._sent: list[Work] = []

    def send(self, rows: Rows, first_sample: int, batch_size: int) -> None:
        """Start to send ``rows``, which are copied: of this rank's micro-batches of the batch. Then :meth:`finish`, or
        the next one, waits."""
        self.finish()
        parts = head_parts(self._plans[0], batch_size, self._whole).get(self._comm.rank, [])
        for peer, boxes in self._boxes(batch_size, sends=True).items():
            pieces = []
            for box in boxes:
                part, where = _place(parts, box)
                pieces.append(rows[_samples(part, first_sample)][where].reshape(-1))
            self._sent.append(self._comm.isend(torch.cat(pieces), peer, 0))

    def finish(self) -> None:
        """Wait until what was sent has left."""
        while self._sent:
            self._sent.pop().wait()

    def receive(self, first_sample: int, batch_size: int) -> Rows:
        """What was said of this rank's micro-batches."""
        incoming = [
            (boxes, self._comm.irecv(self._empty(sum(box.size for box in boxes), self._width).view(-1), peer, 0))
            for peer, boxes in self._boxes(batch_size, sends=False).items()
        ]
        parts = head_parts(self._plans[1], batch_size, self._whole).get(self._comm.rank, [])
        rows = {part: self._empty(part.end - part.begin, sum(b - a for a, b in part.tokens), self._width)
                for part in parts}  # fmt: skip
        for boxes, work in incoming:
            buffer = work.wait()
            assert buffer is not None
            for box, piece in zip(boxes, buffer.split([box.size * self._width for box in boxes]), strict=True):
                part, where = _place(parts, box)
                rows[part][where] = piece.view(*box.shape, self._width)
        return {_samples(part, first_sample): values for part, values in rows.items()}

    def _boxes(self, batch_size: int, sends: bool) -> dict[int, list[Box]]:
        """By peer, what goes to it, or comes from it."""
        if batch_size not in self._transfers:
            self._transfers[batch_size] = score_transfer(*self._plans, batch_size, self._whole)
        moves, rank = self._transfers[batch_size], self._comm.rank
        by_peer: dict[int, list[Box]] = {}
        for piece in moves.sends(rank) if sends else moves.receives(rank):
            by_peer.setdefault(piece.dst if sends else piece.src, []).append(piece.box)
        if new := by_peer.keys() - self._connected:  # batches of another size may have other peers
            self._connected |= new
            self._comm.connect(new)
        return by_peer

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self._comm.device)


def _place(parts: list[HeadPart], box: Box) -> tuple[HeadPart, tuple[slice, slice]]:
    for part in parts:
        if (where := part.slices(box)) is not None:
            return part, where
    raise AssertionError(f"{box} is in none of {parts}")


def _samples(part: HeadPart, first_sample: int) -> tuple[int, ...]:
    return tuple(range(first_sample + part.begin, first_sample + part.end))
