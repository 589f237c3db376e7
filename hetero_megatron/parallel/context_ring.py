"""Attention of one group's queries to the keys and values of all groups, which pass by in blocks.

Forward sends a block's keys and values along its chain of groups. Backward sends them again, followed one round
later by the sum of the gradients so far, which ends at the block's owner. A rank holds at most two foreign blocks
of keys and values (one in use, one arriving) and, in backward, three of their gradients (received, computed,
leaving), whatever the length of the sequence. Gradients travel and add up in at least fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetero_megatron.comm import Comm, Work
from hetero_megatron.layout import Transfer
from hetero_megatron.layout.mask import Interval
from hetero_megatron.ops.attention_op import add_sinks, attn_delta, sink_gradient
from hetero_megatron.ops.block_attention import BlockAttention, RowTile, accumulators
from hetero_megatron.ops.dropout import ScoreDropout
from hetero_megatron.plans.context_plan import Hop, RingSchedule, StageContext, head_hop

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
        routed = pieces.sends(self.rank) if sending else pieces.receives(self.rank)
        return [
            (p.dst if sending else p.src, slice(p.box.lo[0] - self._first, p.box.hi[0] - self._first)) for p in routed
        ]


@dataclass(frozen=True)
class RingProgram:
    """One rank's part for one mask: the rounds, and the tiles of its queries with every block."""

    comm: Comm
    group: int
    schedule: RingSchedule
    hops: HeadHops
    tiles: list[list[RowTile]]
    attention: BlockAttention

    def own_blocks(self, t: int) -> tuple[int, ...]:
        """Own blocks to compute before the arrival of round ``t - 1``."""
        return self.schedule.local_blocks[self.group][t]

    def next_group(self, hop: Hop, t: int) -> int:
        """Where the gradient of the block of ``hop``, computed in round t, goes."""
        if hop.last:
            return self.schedule.blocks[hop.block].group
        return next(h.to for h in self.schedule.rounds[t + 1] if h.block == hop.block)


def part_of_block(x: torch.Tensor, at: Sequence[Interval]) -> torch.Tensor:
    """[b, places, heads, d] of the places ``at``: a view where they are one run."""
    parts = [x[:, a:b] for a, b in at]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class Messages:
    """Sends and receives of one kind (keys and values, or gradients), cut by heads.

    Every rank posts the same sequence of batches, one per kind and round. Inside a batch the lower rank of a pair
    sends before it receives, the higher one the other way round: so the two agree also where the transport keeps
    the order of a pair's messages (queues of a device), not only where tags tell them apart.
    """

    def __init__(self, program: RingProgram, gradients: bool, like: torch.Tensor, dtype: torch.dtype) -> None:
        self.program, self.gradients = program, gradients
        self.b, _, self.heads, self.d = like.shape
        self.like, self.dtype = like, dtype

    def post(
        self, t: int, sends: Sequence[tuple[Pair, int, int]], receives: Sequence[tuple[int, int, int]]
    ) -> tuple[list[Work], list[Arrival]]:
        """Start a batch: blocks (pair, from group, to group) and (block, from group, to group)."""
        comm, hops = self.program.comm, self.program.hops
        out: list[tuple[int, torch.Tensor]] = []
        for pair, source, to in sends:
            for peer, heads in hops.peers(source, to, self.gradients, sending=True):
                out.append((peer, torch.stack([x[:, :, heads] for x in pair])))
        expected: list[list[tuple[int, slice, torch.Tensor]]] = []
        for block, source, to in receives:
            peers = hops.peers(source, to, self.gradients, sending=False)
            expected.append([(peer, heads, self._buffer(block, heads)) for peer, heads in peers])
        handles: list[Work] = []
        arrived: dict[int, Work] = {}  # by the buffer's id
        for peer in sorted({p for p, _ in out} | {p for part in expected for p, _, _ in part}):
            outgoing = [buffer for p, buffer in out if p == peer]
            incoming = [buffer for part in expected for p, _, buffer in part if p == peer]
            assert len(outgoing) <= PIECES and len(incoming) <= PIECES, f"too many messages with rank {peer} at once"
            for step in ("send", "receive") if comm.rank < peer else ("receive", "send"):
                if step == "send":
                    handles += [comm.isend(x, peer, self._tag(t, k)) for k, x in enumerate(outgoing)]
                else:
                    arrived |= {id(x): comm.irecv(x, peer, self._tag(t, k)) for k, x in enumerate(incoming)}
        arrivals = [
            Arrival(
                [(heads, arrived[id(buffer)]) for _, heads, buffer in part], self._shape(block), self.dtype, self.like
            )
            for part, (block, _, _) in zip(expected, receives, strict=True)
        ]
        return handles, arrivals

    def _tag(self, t: int, k: int) -> int:
        return (2 * t + self.gradients) * PIECES + k

    def _shape(self, block: int) -> tuple[int, ...]:
        return (2, self.b, self.program.schedule.blocks[block].size, self.heads, self.d)

    def _buffer(self, block: int, heads: slice) -> torch.Tensor:
        shape = (*self._shape(block)[:3], heads.stop - heads.start, self.d)
        return torch.empty(shape, dtype=self.dtype, device=self.like.device)


class Arrival:
    """Posted receives of one block."""

    def __init__(
        self, parts: list[tuple[slice, Work]], shape: tuple[int, ...], dtype: torch.dtype, like: torch.Tensor
    ) -> None:
        self._parts, self._shape, self._dtype, self._device = parts, shape, dtype, like.device

    def keys(self) -> Pair:
        """All heads of keys and values; every head comes from one rank."""
        if len(self._parts) == 1:
            whole_buffer = self._parts[0][1].wait()
            assert whole_buffer is not None and tuple(whole_buffer.shape) == self._shape
            return whole_buffer[0], whole_buffer[1]
        gathered = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        for heads, handle in self._parts:
            part = handle.wait()
            assert part is not None
            gathered[:, :, :, heads] = part
        return gathered[0], gathered[1]

    def add_to(self, dk: torch.Tensor, dv: torch.Tensor, at: Sequence[Interval]) -> None:
        """Add partial gradients, which come from any number of ranks, at the places ``at``."""
        for heads, handle in self._parts:
            part = handle.wait()
            assert part is not None
            start = 0
            for a, b in at:
                dk[:, a:b, heads] += part[0][:, start : start + b - a]
                dv[:, a:b, heads] += part[1][:, start : start + b - a]
                start += b - a


@dataclass(frozen=True)
class RingBlock:
    """A block that is here in round t: an own one (``hop`` None), or the one that ``hop`` brought."""

    t: int
    block: int
    hop: Hop | None
    pair: Pair


class KeyValueRing:
    """One pass of all blocks by this rank."""

    def __init__(self, program: RingProgram, k: torch.Tensor, v: torch.Tensor) -> None:
        self.program, self.k, self.v = program, k, v
        self.messages = Messages(program, False, k, k.dtype)

    def blocks(self, end_of_round: Callable[[int], None] | None = None) -> Iterator[RingBlock]:
        """Blocks, while others are under way; ``end_of_round(t)`` is called in every round, whatever it brought."""
        program, rounds = self.program, len(self.program.schedule.rounds)
        sends, arriving = self._post(0, None)
        for t in range(-1, rounds):
            for block in program.own_blocks(t + 1):
                yield RingBlock(t, block, None, self._own_block(block))
            if t < 0:
                continue
            hop = program.schedule.arrival(t, program.group)
            pair = arriving[0].keys() if arriving else None
            for handle in sends:
                handle.wait()
            sends, arriving = self._post(t + 1, pair)
            if hop is not None and pair is not None:
                yield RingBlock(t, hop.block, hop, pair)
            if end_of_round is not None:
                end_of_round(t)
        for handle in sends:
            handle.wait()

    def _own_block(self, block: int) -> Pair:
        return part_of_block(self.k, self._at(block)), part_of_block(self.v, self._at(block))

    def _at(self, block: int) -> tuple[Interval, ...]:
        return self.program.schedule.blocks[block].at

    def _post(self, t: int, held: Pair | None) -> tuple[list[Work], list[Arrival]]:
        """Start what arrives in round t: my receive; my sends of own blocks, or of the one that arrived before."""
        program = self.program
        hops = program.schedule.rounds[t] if t < len(program.schedule.rounds) else ()
        sends: list[tuple[Pair, int, int]] = []
        for hop in hops:
            if hop.source == program.group:
                is_own = program.schedule.blocks[hop.block].group == program.group
                pair = self._own_block(hop.block) if is_own else held
                assert pair is not None, f"{hop} before its block is here"
                sends.append((pair, hop.source, hop.to))
        receives = [(hop.block, hop.source, hop.to) for hop in hops if hop.to == program.group]
        return self.messages.post(t, sends, receives)


class GradientRing:
    """Gradients of keys and values on their way to the owners of the blocks, one round behind the keys."""

    def __init__(self, program: RingProgram, dk: torch.Tensor, dv: torch.Tensor) -> None:
        self.program, self.dk, self.dv = program, dk, dv
        self.messages = Messages(program, True, dk, dk.dtype)
        self.sends: list[Work] = []
        self.visiting_gradient: tuple[Hop, Pair] | None = None  # computed in this round
        self.so_far: Arrival | None = None  # the sum from the groups before, for the block of the next round
        self.returns: list[tuple[int, Arrival]] = []  # own blocks that come back

    def target(self, visit: RingBlock) -> Pair:
        """Where the gradient of a visiting block is added up."""
        block = self.program.schedule.blocks[visit.block]
        if visit.hop is None and len(block.at) == 1:
            ((a, b),) = block.at
            return self.dk[:, a:b], self.dv[:, a:b]
        shape = (self.dk.shape[0], block.size, *self.dk.shape[2:])
        pair = (self.dk.new_zeros(shape), self.dv.new_zeros(shape))
        if visit.hop is not None:
            self.visiting_gradient = (visit.hop, pair)
        return pair

    def computed(self, visit: RingBlock, pair: Pair) -> None:
        """The gradient of a visiting block is complete in ``pair``, which :meth:`target` gave."""
        block_index = self.program.schedule.blocks[visit.block].at
        if visit.hop is None and len(block_index) > 1:
            self._add_own(block_index, pair)

    def _add_own(self, at: Sequence[Interval], pair: Pair) -> None:
        start = 0
        for a, b in at:
            self.dk[:, a:b] += pair[0][:, start : start + b - a]
            self.dv[:, a:b] += pair[1][:, start : start + b - a]
            start += b - a

    def end_of_round(self, t: int) -> None:
        """Send on what was computed in round t with the sum so far; receive what round t + 1 continues, and own
        blocks whose last group was in round t."""
        program = self.program
        sends: list[tuple[Pair, int, int]] = []
        if self.visiting_gradient is not None:
            hop, pair = self.visiting_gradient
            if self.so_far is not None:
                self.so_far.add_to(*pair, ((0, pair[0].shape[1]),))
            sends.append((pair, hop.to, program.next_group(hop, t)))
        self.take_returns()
        for handle in self.sends:
            handle.wait()
        following = program.schedule.arrival(t + 1, program.group)
        continued = following is not None and following.source != program.schedule.blocks[following.block].group
        ends = [
            hop
            for hop in program.schedule.rounds[t]
            if hop.last and program.schedule.blocks[hop.block].group == program.group
        ]
        receives = [(hop.block, hop.to, program.group) for hop in ends]
        if continued and following is not None:
            receives.append((following.block, following.source, following.to))
        self.sends, arrivals = self.messages.post(t, sends, receives)
        self.returns = [(hop.block, arrival) for hop, arrival in zip(ends, arrivals)]
        self.so_far, self.visiting_gradient = arrivals[-1] if continued else None, None

    def take_returns(self) -> None:
        """Add what came back to the gradients of the own blocks."""
        for block, arrival in self.returns:
            arrival.add_to(self.dk, self.dv, self.program.schedule.blocks[block].at)
        self.returns = []

    def finish(self) -> None:
        self.take_returns()
        for handle in self.sends:
            handle.wait()


class RingAttention(torch.autograd.Function):
    """q [b, group tokens, heads, d], k, v [b, group tokens, kv_heads, d], sinks [heads] or None, program,
    dropout -> out like q."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, program: RingProgram,
        dropout: ScoreDropout | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out, lse = accumulators(q)
        for visit in KeyValueRing(program, k, v).blocks():
            program.attention.forward(q, *visit.pair, program.tiles[visit.block], out, lse, dropout)
        if sinks is not None:
            out, lse = add_sinks(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.program, ctx.dropout = program, dropout
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        program: RingProgram = ctx.program
        dq, dk, dv = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v))
        ring, delta = GradientRing(program, dk, dv), program.attention.kernel.delta(grad, out)
        for visit in KeyValueRing(program, k, v).blocks(ring.end_of_round):
            target = ring.target(visit)
            tiles = program.tiles[visit.block]
            program.attention.backward(grad, q, *visit.pair, out, lse, tiles, (dq, *target), delta, ctx.dropout)
            ring.computed(visit, target)
        ring.finish()
        dsinks = None if sinks is None else sink_gradient(attn_delta(grad, out)[0], lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None
