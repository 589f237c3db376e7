"""Who sends which tokens and heads to whom in context-parallel attention, and when. No torch.

Between layers every rank holds its own tokens and, after the projections, the heads of its TP share. Inside a
*group*, a ragged exchange turns that into all tokens of the group and the rank's own heads (``GroupExchange``).
Between groups keys and values travel in blocks of equal size (``ring_schedule``): a block visits the groups that
need it one after the other, every group receives at most one block per round and passes it on in the next, so no
rank ever holds more than two foreign blocks. Ownership says only where blocks come from, not how fast they go: a
ring is not held up by its largest shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hetero_megatron.layout import Box, Layout, Transfer, cut, transfer
from hetero_megatron.plans.canonical import Interval, Stage, Unit
from hetero_megatron.plans.shares import has_context, merged, tokens_at
from hetero_megatron.spec import ModelSpec, Share, shares

ALL_GROUPS = -1  # instead of a group's index


@dataclass(frozen=True)
class Member:
    """One rank of a stage's context groups.

    Attributes:
        group: index of its group; tokens: what its unit owns of each sequence.
        held: heads that its projections make; computed: heads that it computes attention for.
    """

    rank: int
    group: int
    tokens: tuple[Interval, ...]
    held: Share
    computed: Share


@dataclass(frozen=True)
class ContextGroup:
    """Ranks that divide the heads of common tokens."""

    index: int
    members: tuple[Member, ...]
    tokens: tuple[Interval, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(m.rank for m in self.members))

    @property
    def num_tokens(self) -> int:
        return sum(b - a for a, b in self.tokens)


@dataclass(frozen=True)
class StageContext:
    """The context groups of one inner replica of a stage, as one rank of it sees them."""

    spec: ModelSpec
    seq_length: int
    groups: tuple[ContextGroup, ...]
    transport: str
    block: int

    def member(self, rank: int) -> Member:
        return next(m for g in self.groups for m in g.members if m.rank == rank)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for g in self.groups for rank in g.ranks))

    @property
    def blocks(self) -> tuple[Block, ...]:
        """What travels round the ring. With a window whole runs: fewer groups need each."""
        return make_blocks(self.groups, self.block, mirrored=self.spec.widest_window is None)


def stage_contexts(spec: ModelSpec, stage: Stage, seq_length: int) -> list[StageContext]:
    """One per inner replica; none for a stage without context groups."""
    if not has_context(stage, seq_length):
        return []
    contexts = []
    for rows in stage.replicas:
        units = [u for u in stage.units if u.sequences == rows]
        groups = tuple(
            _group(spec, index, [u for u in units if u.group == index]) for index in sorted({u.group for u in units})
        )
        transport, block = (stage.kv.transport, stage.kv.block) if stage.kv else ("ring", 0)
        contexts.append(StageContext(spec, seq_length, groups, transport, block))
    return contexts


def _group(spec: ModelSpec, index: int, units: Sequence[Unit]) -> ContextGroup:
    members = []
    for unit in units:
        held_shares, computed_shares = shares(spec, unit.tp_split), shares(spec, unit.tp_split, unit.heads)
        members += [
            Member(r, index, unit.tokens, h, c)
            for r, h, c in zip(unit.ranks, held_shares, computed_shares, strict=True)
        ]
    return ContextGroup(index, tuple(members), merged([i for u in units for i in u.tokens]))


def context_groups(spec: ModelSpec, stage: Stage) -> list[tuple[int, ...]]:
    """The groups of ranks in which a stage's context parallelism uses collectives: keys and values in context groups,
    or in all of a replica's ranks, as what convolutions of linear attention look back at always does."""
    gather = stage.kv is not None and stage.kv.transport == "gather"
    ranks_of: dict[tuple[Interval, int], list[int]] = {}
    for unit in stage.units:
        for group in {0 if gather else unit.group, *((ALL_GROUPS,) if has_linear(spec, stage) else ())}:
            ranks_of.setdefault((unit.sequences, group), []).extend(unit.ranks)
    return [tuple(sorted(ranks)) for ranks in ranks_of.values()]


def has_linear(spec: ModelSpec, stage: Stage) -> bool:
    """Whether some layer of the stage, modules that predict further tokens among them, has linear attention."""
    numbers = (*stage.layer_indices(), *(spec.predictions if stage.head else ()))
    return spec.delta is not None and any(spec.layer(i).linear for i in numbers)


@dataclass(frozen=True)
class Move:
    """One tensor that changes layout; layouts are over (token, head)."""

    before: Layout
    after: Layout
    pieces: Transfer

    def adjoint(self) -> Move:
        return Move(self.after, self.before, self.pieces.adjoint())


def head_moves(context: StageContext, group: ContextGroup) -> tuple[tuple[int, ...], Move, Move]:
    """(ranks, move of queries, move of keys and of values) into the heads of each rank.

    Queries arrive for the tokens of the group. So do keys with the ring; with ``gather`` all that some token of
    the group can see arrive at once.
    """
    gather = context.transport == "gather"
    members = [m for g in context.groups for m in g.members] if gather else list(group.members)
    tokens = {g.index: g.tokens for g in context.groups}
    visible = {g: seen_tokens(t) if gather else t for g, t in tokens.items()}
    s, spec = context.seq_length, context.spec
    query, key = (s, spec.num_heads), (s, spec.num_kv_heads)
    queries = move_between(
        layout_of(query, {m.rank: (m.tokens, m.held.q_heads) for m in members}),
        layout_of(query, {m.rank: (tokens[m.group], m.computed.q_heads) for m in members}),
    )
    keys = move_between(
        layout_of(key, {m.rank: (m.tokens, m.held.kv_heads) for m in members}),
        layout_of(key, {m.rank: (visible[m.group], m.computed.kv_heads) for m in members}),
    )
    return tuple(sorted(m.rank for m in members)), queries, keys


def seen_tokens(tokens: Sequence[Interval]) -> tuple[Interval, ...]:
    """All tokens that the last of these may see."""
    return ((0, tokens[-1][1]),) if tokens else ()


def layout_of(shape: tuple[int, int], held: dict[int, tuple[Sequence[Interval], Interval]]) -> Layout:
    """(tokens, heads) of each rank."""
    return Layout(shape, {r: tuple(Box((a, h0), (b, h1)) for a, b in tokens) for r, (tokens, (h0, h1)) in held.items()})


def move_between(before: Layout, after: Layout) -> Move:
    """What brings all of ``after`` there."""
    return Move(before, after, transfer(before, after))


@dataclass(frozen=True)
class Block:
    """Some of a group's tokens, whose keys and values travel together; ``at``: their places among the group's."""

    group: int
    at: tuple[Interval, ...]
    tokens: tuple[Interval, ...]

    @property
    def size(self) -> int:
        return sum(b - a for a, b in self.at)


@dataclass(frozen=True)
class Hop:
    """Block ``block`` arrives at group ``to`` from group ``source`` (its owner or the one before in its chain)."""

    block: int
    source: int
    to: int
    last: bool  # the chain ends here


@dataclass(frozen=True)
class RingSchedule:
    """``rounds[t]``: the hops that arrive in round t, at most one per group; ``local_blocks[g][t]``: blocks of group g
    that it computes itself then.

    These fill the rounds in which nothing arrives, so that every group computes one block per round.
    """

    blocks: tuple[Block, ...]
    rounds: tuple[tuple[Hop, ...], ...]
    local_blocks: dict[int, tuple[tuple[int, ...], ...]] = field(compare=False)

    def arrival(self, t: int, group: int) -> Hop | None:
        return next((hop for hop in self.rounds[t] if hop.to == group), None) if t < len(self.rounds) else None


def make_blocks(groups: Sequence[ContextGroup], block: int, mirrored: bool = True) -> tuple[Block, ...]:
    """Each group's tokens in equal blocks of at most ``block`` tokens; 0: as the smallest group has.

    Args:
        mirrored: a block is a run from the front and one as far from the back. In zigzag order half of a group's
            queries then see half of any block, so that all blocks are equal work and no round waits for a heavy one.
            Else a block is one run: with a window, fewer groups need it.
    """
    sizes = [g.num_tokens for g in groups if g.num_tokens]
    limit = block or min(sizes, default=1)
    out = []
    for group in groups:
        length = group.num_tokens
        count = round(length / limit) if block == 0 else -(-length // limit)
        for a, b in cut(length, [1] * count) if count else ():
            front, back = (a - a // 2, b - b // 2), (length - b // 2, length - a // 2)
            pieces = merged((front, back)) if mirrored else ((a, b),)
            out.append(Block(group.index, pieces, tokens_at(group.tokens, pieces)))
    return tuple(out)


def ring_schedule(
    groups: Sequence[ContextGroup], blocks: Sequence[Block], needs: Callable[[ContextGroup, Block], bool]
) -> RingSchedule:
    """Rounds for all blocks: each starts in the first round in which no group of its chain is busy.

    Args:
        needs: whether some token of a group sees some token of a block (blocks that nobody needs do not travel).
    """
    order = {g.index: i for i, g in enumerate(groups)}
    chains: list[list[int]] = []
    for block in blocks:
        later_groups = [*groups[order[block.group] + 1 :], *groups[: order[block.group]]]
        chains.append([g.index for g in later_groups if needs(g, block)])
    busy: set[tuple[int, int]] = set()
    rounds: dict[int, list[Hop]] = {}
    for b in _turns(groups, blocks):
        chain, start = chains[b], 0
        while any((start + k, g) in busy for k, g in enumerate(chain)):
            start += 1
        source = blocks[b].group
        for k, g in enumerate(chain):
            busy.add((start + k, g))
            rounds.setdefault(start + k, []).append(Hop(b, source, g, k + 1 == len(chain)))
            source = g
    count = max(rounds, default=-1) + 1
    own_blocks = {g.index: _fill(g.index, blocks, busy, count) for g in groups}
    return RingSchedule(tuple(blocks), tuple(tuple(rounds.get(t, ())) for t in range(count)), own_blocks)


def _turns(groups: Sequence[ContextGroup], blocks: Sequence[Block]) -> list[int]:
    """Blocks in the order in which they are placed: groups take turns, those with most left first."""
    blocks_of = {g.index: [b for b, block in enumerate(blocks) if block.group == g.index] for g in groups}
    total = {g: len(rows) for g, rows in blocks_of.items()}
    keyed = [((k + 0.5) / total[g], g, b) for g, rows in blocks_of.items() for k, b in enumerate(rows)]
    return [b for _, _, b in sorted(keyed)]


def _fill(group: int, blocks: Sequence[Block], busy: set[tuple[int, int]], count: int) -> tuple[tuple[int, ...], ...]:
    """Own blocks per round: one before the first arrival (index 0), one per free round, the rest at the end."""
    unplaced = [b for b, block in enumerate(blocks) if block.group == group]
    rows: list[tuple[int, ...]] = [tuple(unplaced[:1])]
    unplaced = unplaced[1:]
    for t in range(count):
        free = (t, group) not in busy
        rows.append(tuple(unplaced[:1]) if free else ())
        unplaced = unplaced[1:] if free else unplaced
    rows[-1] = (*rows[-1], *unplaced)
    return tuple(rows)


def head_hop(source: ContextGroup, to: ContextGroup, num_kv_heads: int) -> tuple[Transfer, Transfer]:
    """How the key-value heads of one block move between two groups: (keys and values on, their gradients on).

    Boxes are over (head,). Keys are copied: every head that a rank of ``to`` computes with comes from one rank of
    ``source`` that has it. Gradients are partial sums: every head that a rank of ``source`` has goes to one rank
    of ``to`` that has it too.
    """
    a, b = (
        Layout((num_kv_heads,), {m.rank: (Box(m.computed.kv_heads[:1], m.computed.kv_heads[1:]),) for m in g.members})
        for g in (source, to)
    )
    return transfer(a, b), transfer(b, a).adjoint()
