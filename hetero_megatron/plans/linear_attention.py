"""How linear attention goes on from one member of a context group to the next: who hands what to whom. No torch.

A member's tokens are *runs*, intervals of the sequence. In the order of their tokens, those of all groups are a chain:
a run begins with the state that the run before it leaves, and its convolutions look back at the last tokens before it.
Neither grows with the length of runs. Heads are cut among the ranks of a member.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_megatron.layout import Box, Layout, Transfer, transfer
from hetero_megatron.plans.canonical import Interval
from hetero_megatron.plans.context_plan import Member, Move, StageContext, layout_of, move_between
from hetero_megatron.plans.shares import merged


@dataclass(frozen=True)
class TokenRun:
    """Tokens of a sequence that follow each other on one member; ``heads``: the value heads of its ranks."""

    tokens: Interval
    heads: Layout


def chain(context: StageContext) -> tuple[TokenRun, ...]:
    """All runs, in the order of their tokens."""
    assert context.spec.delta is not None
    held: dict[Interval, dict[int, tuple[Box, ...]]] = {}
    for member in _members(context):
        a, b = member.held.value_heads
        for tokens in member.tokens:
            held.setdefault(tokens, {})[member.rank] = (Box((a,), (b,)),)
    return tuple(TokenRun(tokens, Layout((context.spec.delta.value_heads,), held[tokens])) for tokens in sorted(held))


def state_moves(runs: Sequence[TokenRun]) -> tuple[Transfer, ...]:
    """How states move from each run to the next, over (value head,)."""
    return tuple(transfer(before.heads, after.heads) for before, after in zip(runs, runs[1:]))


def looked_at(context: StageContext, tokens: Sequence[Interval]) -> tuple[Interval, ...]:
    """``tokens``, and those before them at which convolutions look back."""
    assert context.spec.delta is not None
    past, ends = context.spec.delta.kernel - 1, (0, *(b for _, b in tokens))
    return merged([*tokens, *((max(a - past, end), a) for (a, _), end in zip(tokens, ends))])


def convolved(context: StageContext) -> tuple[Move, Move]:
    """From a member's own tokens to all that its convolutions look at, over (token, key head) and (token, value head).
    Of key heads that several ranks of a member have, each takes what another member has once."""
    delta, members = context.spec.delta, _members(context)
    assert delta is not None
    held = ((delta.key_heads, "key_heads"), (delta.value_heads, "value_heads"))
    keys, values = (
        move_between(
            layout_of((context.seq_length, count), {m.rank: (m.tokens, getattr(m.held, name)) for m in members}),
            layout_of(
                (context.seq_length, count),
                {m.rank: (looked_at(context, m.tokens), getattr(m.held, name)) for m in members},
            ),
        )
        for count, name in held
    )
    return keys, values


def place_among(tokens: Sequence[Interval], piece: Interval) -> slice:
    """Where ``piece`` is when the intervals ``tokens``, one of which contains it, are strung together."""
    start = 0
    for a, b in tokens:
        if a <= piece[0] and piece[1] <= b:
            return slice(start + piece[0] - a, start + piece[1] - a)
        start += b - a
    raise AssertionError(f"{piece} is not in one of {tokens}")


def passed_bytes(context: StageContext, item: int, wide: int) -> tuple[Mapping[tuple[int, int], int], ...]:
    """What a layer's forward moves of one sequence, by (source, destination): what convolutions look back at, then the
    states of the chain, move by move. Backward moves as much the other way.

    Args:
        item: bytes of an activation; wide: of an element of a state.
    """
    delta = context.spec.delta
    assert delta is not None
    keys, values = convolved(context)
    looked_at_bytes = _volumes(keys.pieces, 2 * delta.key_dim * item)
    for pair, size in _volumes(values.pieces, delta.value_dim * item).items():
        looked_at_bytes[pair] = looked_at_bytes.get(pair, 0) + size
    state = delta.key_dim * delta.value_dim * wide
    return looked_at_bytes, *(_volumes(move, state) for move in state_moves(chain(context)))


def _volumes(move: Transfer, size: int) -> dict[tuple[int, int], int]:
    volumes: dict[tuple[int, int], int] = {}
    for piece in move.pieces:
        if piece.src != piece.dst:
            volumes[piece.src, piece.dst] = volumes.get((piece.src, piece.dst), 0) + piece.box.size * size
    return volumes


def _members(context: StageContext) -> list[Member]:
    return [member for group in context.groups for member in group.members]
