"""The trained weights on their way from the ranks of one plan to those of another one, by layout transfer: every box
that a rank of the target holds comes from ranks of the source that hold it, whatever both plans cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box, Piece
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.forward_only import weight_moves
from hetero_megatron.training.held_state import MOST_ELEMENTS, as_bytes

Named = tuple[str, Piece]


class WeightTransfer:
    """Of one rank, of either plan; all ranks of both call :meth:`send` or :meth:`receive` at the same time.

    Args:
        source, target: as of :func:`~hetero_megatron.plans.weight_moves.weight_moves`.
    """

    def __init__(self, comm: Comm, source: CompiledPlan, target: CompiledPlan) -> None:
        self._comm, self._source, self._target = comm, source, target
        self._connected = False

    @cached_property
    def _batches(self) -> Sequence[Sequence[Named]]:
        """What moves, so much at once that messages need little memory."""
        batches: list[list[Named]] = [[]]
        size = 0
        for name, pieces in weight_moves(self._source, self._target):
            if batches[-1] and size > MOST_ELEMENTS:
                batches.append([])
                size = 0
            batches[-1] += [(name, piece) for piece in pieces]
            size += sum(piece.box.size for piece in pieces)
        return batches

    def send(self, params: Mapping[str, torch.Tensor], boxes: Mapping[str, Box]) -> int:
        """Send what this rank of the source has to send, and wait until it has left.

        Args:
            params: by logical name, with the ``boxes`` that they are of their tensors.

        Returns:
            bytes.
        """
        self._connect()
        total = 0
        for batch in self._batches:
            parts: dict[int, list[torch.Tensor]] = {}
            for name, piece in batch:
                if piece.src == self._comm.rank:
                    values = params[name].detach()[piece.box.slices(boxes[name])]
                    parts.setdefault(piece.dst, []).append(as_bytes(values))
            messages = [(peer, torch.cat(of_peer)) for peer, of_peer in sorted(parts.items())]
            total += sum(message.numel() for _, message in messages)
            for work in [self._comm.isend(message, peer, 0) for peer, message in messages]:
                work.wait()
        return total

    @torch.no_grad()
    def receive(self, params: Mapping[str, torch.Tensor], boxes: Mapping[str, Box]) -> None:
        """Write what comes into the parameters of this rank of the target; arguments as of :meth:`send`."""
        self._connect()
        for batch in self._batches:
            places: dict[int, list[torch.Tensor]] = {}
            for name, piece in batch:
                if piece.dst == self._comm.rank:
                    places.setdefault(piece.src, []).append(params[name].detach()[piece.box.slices(boxes[name])])
            incoming = [
                (of_peer, self._comm.irecv(self._empty(sum(part.nbytes for part in of_peer)), peer, 0))
                for peer, of_peer in sorted(places.items())
            ]
            for of_peer, work in incoming:
                buffer = work.wait()
                assert buffer is not None
                for part, values in zip(of_peer, buffer.split([part.nbytes for part in of_peer]), strict=True):
                    part.copy_(values.clone().view(part.dtype).view(part.shape))  # a view would have to be aligned

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._comm.device)

    def _connect(self) -> None:
        if self._connected:
            return
        rank, self._connected = self._comm.rank, True
        pairs = ((piece.src, piece.dst) for batch in self._batches for _, piece in batch)
        self._comm.connect({a if rank == b else b for a, b in pairs if rank in (a, b)})
