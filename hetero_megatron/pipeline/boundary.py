"""The boundary between two neighbouring stages: any two meshes, each token crosses once.

Activations are [sequences, tokens, hidden]; the transfer between the two stages' layouts says which box goes
from whom to whom. The gradient takes the adjoint way back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_megatron.comm import Comm, Work
from hetero_megatron.layout import Box, Layout
from hetero_megatron.plans.compile import StageBoundary

MAX_PIECES = 256  # messages between two ranks for one action; part of the tag


class Boundary:
    """Both directions between stage ``s`` (upstream) and ``s + 1``, for one micro-batch size.

    Args:
        moves: the activation layouts of the two stages, and what goes from one to the other.

    Attributes:
        peers: ranks that this one exchanges messages with.
    """

    def __init__(self, comm: Comm, moves: StageBoundary) -> None:
        forward, backward = moves.forward, moves.forward.adjoint()
        own_rank = comm.rank
        self._comm = comm
        ends = [p.dst for p in forward.sends(own_rank)] + [p.src for p in forward.receives(own_rank)]
        self.peers = set(ends) - {own_rank}  # gradients take the same ways back
        self._layouts = (moves.upstream, moves.downstream)
        self._sends = (forward.sends(own_rank), backward.sends(own_rank))
        self._receives = (forward.receives(own_rank), backward.receives(own_rank))

    def send(self, x: torch.Tensor, backward: bool, tag: int) -> list[Work]:
        """Start sending this rank's activations [b, s, h] (or their gradient), one message per piece of a peer."""
        layout = self._layouts[1 if backward else 0]
        return [
            self._comm.isend(x[local].contiguous(), peer, tag * MAX_PIECES + k)
            for peer, local, k in self._numbered([(p.dst, p.box) for p in self._sends[backward]], layout)
        ]

    def rehearse_send(self, x: torch.Tensor, backward: bool) -> None:
        """All that :meth:`send` does on the device but sending; x: [b, s, h]."""
        layout = self._layouts[1 if backward else 0]
        for _, local, _ in self._numbered([(p.dst, p.box) for p in self._sends[backward]], layout):
            x[local].contiguous()

    def rehearse_receive(self, backward: bool, dtype: torch.dtype) -> torch.Tensor:
        """What :meth:`receive` would give, [b, s, h], of random numbers that nobody sent (tokens of zeros would all
        choose the same experts)."""
        layout = self._layouts[0 if backward else 1]
        parts: list[tuple[tuple[slice, ...], Work]] = []
        for _, local, _ in self._numbered([(p.src, p.box) for p in self._receives[backward]], layout):
            shape = [s.stop - s.start for s in local]
            buffer = torch.empty(shape, dtype=dtype, device=self._comm.device).normal_()
            parts.append((local, Work(self._comm, None, buffer, ())))
        return Receive(parts, local_shape(layout, self._comm.rank), dtype, self._comm.device).wait()

    def receive(self, backward: bool, tag: int, dtype: torch.dtype) -> Receive:
        """Post the receives of this rank's activation shard (or its gradient)."""
        layout = self._layouts[0 if backward else 1]
        parts: list[tuple[tuple[slice, ...], Work]] = []
        for peer, local, k in self._numbered([(p.src, p.box) for p in self._receives[backward]], layout):
            shape = [s.stop - s.start for s in local]
            buffer = torch.empty(shape, dtype=dtype, device=self._comm.device)
            parts.append((local, self._comm.irecv(buffer, peer, tag * MAX_PIECES + k)))
        return Receive(parts, local_shape(layout, self._comm.rank), dtype, self._comm.device)

    def _numbered(self, pieces: Sequence[tuple[int, Box]], layout: Layout) -> list[tuple[int, tuple[slice, ...], int]]:
        """(peer, local slices, number of the message between the two) per piece."""
        message_counts: dict[int, int] = {}
        out = []
        for peer, box in pieces:
            k = message_counts[peer] = message_counts.get(peer, -1) + 1
            assert k < MAX_PIECES, f"more than {MAX_PIECES} messages to rank {peer} in one action"
            out.append((peer, local_slices(layout.of(self._comm.rank), box), k))
        return out


class Receive:
    """Posted receives of one shard; ``wait`` assembles it."""

    def __init__(
        self,
        parts: list[tuple[tuple[slice, ...], Work]],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._parts, self._shape, self._dtype, self._device = parts, shape, dtype, device

    def wait(self) -> torch.Tensor:
        """The shard, [b, s, h]."""
        if len(self._parts) == 1:
            whole_part = self._parts[0][1].wait()
            assert whole_part is not None and tuple(whole_part.shape) == self._shape
            return whole_part
        shard = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        for local, handle in self._parts:
            part = handle.wait()
            assert part is not None
            shard[local] = part
        return shard


def local_shape(layout: Layout, rank: int) -> tuple[int, ...]:
    """Shape of a rank's shard: its boxes (same sequences, ascending tokens) strung together along tokens.

    A rank without boxes gets no tokens of all sequences: so a context member without tokens computes on them.
    """
    boxes = layout.of(rank)
    if not boxes:
        return (layout.shape[0], 0, layout.shape[2])
    return (boxes[0].shape[0], sum(b.shape[1] for b in boxes), layout.shape[2])


def local_slices(boxes: tuple[Box, ...], part: Box) -> tuple[slice, ...]:
    """Where ``part``, which lies in one of the rank's boxes, is in its shard."""
    offset = 0
    for box in boxes:
        if box.contains(part):
            rows, tokens, hidden = part.slices(box)
            return (rows, slice(tokens.start + offset, tokens.stop + offset), hidden)
        offset += box.shape[1]
    raise AssertionError(f"{part} is not in one of {boxes}")
