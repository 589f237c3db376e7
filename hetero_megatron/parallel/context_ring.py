"""Attention of one group's queries to the keys and values of all groups, which pass by in blocks.

Forward sends a block's keys and values along its chain of groups. Backward sends them again, followed one round
later by the sum of the gradients so far, which ends at the block's owner. A rank holds at most two foreign blocks
of keys and values (one in use, one arriving) and, in backward, three of their gradients (received, computed,
leaving), whatever the length of the sequence. Gradients travel and add up in at least fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hetero_megatron.comm import Comm, Handle
from hetero_megatron.layout import Transfer
from hetero_megatron.ops.block_attention import BlockAttention, RowTile, accumulators
from hetero_megatron.plan.context_plan import Hop, RingSchedule, StageContext, head_hop

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, or their gradients: [b, tokens, kv_heads, d] each
Peers = list[tuple[int, slice]]  # (rank, local key-value heads), in an order that both sides share
PIECES = 16  # messages between two ranks for one block; part of the tag


class HeadHops:
    """Which heads this rank exchanges with whom when a block moves from one group to another; cached."""

    def __init__(self, context: StageContext, rank: int) -> None:
        self.context, self.rank = context, rank
        self._groups = {g.index: g for g in context.groups}
        self._first = context.member(rank).computed.kv_heads[0]
        self._cache: dict[tuple[int, int], tuple[Transfer, Transfer]] = {}

    def peers(self, source: int, to: int, gradients: bool, sending: bool) -> Peers:
        if (source, to) not in self._cache:
            heads = self.context.spec.num_kv_heads
            self._cache[source, to] = head_hop(self._groups[source], self._groups[to], heads)
        pieces = self._cache[source, to][gradients]
        mine = pieces.sends(self.rank) if sending else pieces.receives(self.rank)
        return [
            (p.dst if sending else p.src, slice(p.box.lo[0] - self._first, p.box.hi[0] - self._first)) for p in mine
        ]


@dataclass(frozen=True)
class Program:
    """One rank's part for one mask: the rounds, and the tiles of its queries with every block."""

    comm: Comm
    group: int
    schedule: RingSchedule
    hops: HeadHops
    tiles: list[list[RowTile]]
    attention: BlockAttention

    def own_blocks(self, t: int) -> tuple[int, ...]:
        """Own blocks to compute before the arrival of round ``t - 1``."""
        return self.schedule.own[self.group][t]

    def next_group(self, hop: Hop, t: int) -> int:
        """Where the gradient of the block of ``hop``, computed in round t, goes."""
        if hop.last:
            return self.schedule.blocks[hop.block].group
        return next(h.to for h in self.schedule.rounds[t + 1] if h.block == hop.block)


class Messages:
    """Sends and receives of one kind (keys and values, or gradients), cut by heads."""

    def __init__(self, program: Program, gradients: bool, like: torch.Tensor, dtype: torch.dtype) -> None:
        self.program, self.gradients = program, gradients
        self.b, _, self.heads, self.d = like.shape
        self.like, self.dtype = like, dtype

    def _tag(self, t: int, seen: dict[int, int], peer: int) -> int:
        k = seen[peer] = seen.get(peer, -1) + 1
        assert k < PIECES, f"more than {PIECES} messages to rank {peer} for one block"
        return (2 * t + self.gradients) * PIECES + k

    def send(self, pair: Pair, source: int, to: int, t: int) -> list[Handle]:
        """Start sending this rank's heads of a block from group ``source`` to group ``to``."""
        seen: dict[int, int] = {}
        return [
            self.program.comm.isend(torch.stack([x[:, :, heads] for x in pair]), peer, self._tag(t, seen, peer))
            for peer, heads in self.program.hops.peers(source, to, self.gradients, sending=True)
        ]

    def receive(self, block: int, source: int, to: int, t: int) -> Arrival:
        """Post the receives of this rank's heads of a block."""
        a, b = self.program.schedule.blocks[block].at
        seen: dict[int, int] = {}
        parts = []
        for peer, heads in self.program.hops.peers(source, to, self.gradients, sending=False):
            shape = (2, self.b, b - a, heads.stop - heads.start, self.d)
            buffer = torch.empty(shape, dtype=self.dtype, device=self.like.device)
            parts.append((heads, self.program.comm.irecv(buffer, peer, self._tag(t, seen, peer))))
        return Arrival(parts, (2, self.b, b - a, self.heads, self.d), self.dtype, self.like.device)


class Arrival:
    """Posted receives of one block."""

    def __init__(
        self, parts: list[tuple[slice, Handle]], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._parts, self._shape, self._dtype, self._device = parts, shape, dtype, device

    def keys(self) -> Pair:
        """All heads of keys and values; every head comes from one rank."""
        if len(self._parts) == 1:
            only = self._parts[0][1].wait()
            assert only is not None and tuple(only.shape) == self._shape
            return only[0], only[1]
        whole = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        for heads, handle in self._parts:
            part = handle.wait()
            assert part is not None
            whole[:, :, :, heads] = part
        return whole[0], whole[1]

    def add_to(self, pair: Pair) -> None:
        """Add partial gradients, which come from any number of ranks."""
        for heads, handle in self._parts:
            part = handle.wait()
            assert part is not None
            pair[0][:, :, heads] += part[0]
            pair[1][:, :, heads] += part[1]


class KeyValueRing:
    """One pass of all blocks by this rank."""

    def __init__(self, program: Program, k: torch.Tensor, v: torch.Tensor) -> None:
        self.program, self.k, self.v = program, k, v
        self.messages = Messages(program, False, k, k.dtype)

    def blocks(self, on_round: Callable[[int], None] | None = None) -> Iterator[tuple[int, int, Hop | None, Pair]]:
        """(round, block, hop that brought it or None for own blocks, keys and values), while others are under way.

        ``on_round`` is called at the start of every round, also of those in which this rank computes nothing.
        """
        program, rounds = self.program, len(self.program.schedule.rounds)
        arriving, sends = self._post(0, None)
        for t in range(-1, rounds):
            for block in program.own_blocks(t + 1):
                yield t, block, None, self._own(block)
            if t < 0:
                continue
            if on_round is not None:
                on_round(t)
            hop = program.schedule.arrival(t, program.group)
            pair = arriving.keys() if arriving is not None else None
            for handle in sends:
                handle.wait()
            arriving, sends = self._post(t + 1, pair)
            if hop is not None and pair is not None:
                yield t, hop.block, hop, pair
        for handle in sends:
            handle.wait()

    def _own(self, block: int) -> Pair:
        a, b = self.program.schedule.blocks[block].at
        return self.k[:, a:b], self.v[:, a:b]

    def _post(self, t: int, held: Pair | None) -> tuple[Arrival | None, list[Handle]]:
        """Start what arrives in round t: my receive; my sends of own blocks, or of the one that arrived before."""
        program = self.program
        sends: list[Handle] = []
        if t >= len(program.schedule.rounds):
            return None, sends
        arriving = None
        for hop in program.schedule.rounds[t]:
            if hop.to == program.group:
                arriving = self.messages.receive(hop.block, hop.source, hop.to, t)
        for hop in program.schedule.rounds[t]:
            if hop.source == program.group:
                own = program.schedule.blocks[hop.block].group == program.group
                pair = self._own(hop.block) if own else held
                assert pair is not None, f"{hop} before its block is here"
                sends += self.messages.send(pair, hop.source, hop.to, t)
        return arriving, sends


class GradientRing:
    """Gradients of keys and values on their way to the owners of the blocks, one round behind the keys."""

    def __init__(self, program: Program, dk: torch.Tensor, dv: torch.Tensor) -> None:
        self.program, self.dk, self.dv = program, dk, dv
        self.messages = Messages(program, True, dk, dk.dtype)
        self.sends: list[Handle] = []
        self.returning: dict[int, list[tuple[int, Arrival]]] = {}  # by the round after which they are waited for

    def begin(self, hop: Hop, t: int) -> tuple[Pair, Arrival | None]:
        """Zeros for the gradient of the block that ``hop`` brought, and the sum so far, which is on its way."""
        a, b = self.program.schedule.blocks[hop.block].at
        shape = (self.dk.shape[0], b - a, *self.dk.shape[2:])
        pair = (self.dk.new_zeros(shape), self.dv.new_zeros(shape))
        first = hop.source == self.program.schedule.blocks[hop.block].group
        return pair, None if first else self.messages.receive(hop.block, hop.source, hop.to, t)

    def finish(self, hop: Hop, t: int, pair: Pair, before: Arrival | None) -> None:
        """Add the sum so far and send it on."""
        if before is not None:
            before.add_to(pair)
        for handle in self.sends:
            handle.wait()
        self.sends = self.messages.send(pair, hop.to, self.program.next_group(hop, t), t + 1)

    def on_round(self, t: int) -> None:
        """Take what came back in the last rounds; post the receives of own blocks whose last hop is in this one.

        They must be posted even if this rank computes nothing in round t: the sender may wait for it.
        """
        self.take_returns(t - 1)
        for hop in self.program.schedule.rounds[t]:
            owner = self.program.schedule.blocks[hop.block].group
            if hop.last and owner == self.program.group:
                arrival = self.messages.receive(hop.block, hop.to, owner, t + 1)
                self.returning.setdefault(t + 1, []).append((hop.block, arrival))

    def take_returns(self, t: int) -> None:
        """Add what came back up to round t to the gradients of the own blocks."""
        for due in sorted(r for r in self.returning if r <= t):
            for block, arrival in self.returning.pop(due):
                a, b = self.program.schedule.blocks[block].at
                arrival.add_to((self.dk[:, a:b], self.dv[:, a:b]))

    def end(self) -> None:
        self.take_returns(len(self.program.schedule.rounds) + 1)
        for handle in self.sends:
            handle.wait()


class RingAttention(torch.autograd.Function):
    """q [b, group tokens, heads, d], k, v [b, group tokens, kv_heads, d], program -> out like q."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, program: Program) -> torch.Tensor:
        out, lse = accumulators(q)
        for _, block, _, pair in KeyValueRing(program, k, v).blocks():
            program.attention.forward(q, *pair, program.tiles[block], out, lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.program = program
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        program: Program = ctx.program
        dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
        ring = GradientRing(program, dk, dv)
        for t, block, hop, pair in KeyValueRing(program, k, v).blocks(ring.on_round):
            if hop is None:
                a, b = program.schedule.blocks[block].at
                target, before = (dk[:, a:b], dv[:, a:b]), None
            else:
                target, before = ring.begin(hop, t)
            program.attention.backward(grad, q, *pair, out, lse, program.tiles[block], (dq, *target))
            if hop is not None:
                ring.finish(hop, t, target, before)
        ring.end()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None
