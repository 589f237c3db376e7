"""How the heads of a layer are cut among the ranks of a TP group."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_megatron.layout import cut
from hetero_megatron.spec.gated_delta import GatedDelta
from hetero_megatron.spec.state_space import StateSpace

Interval = tuple[int, int]


def cut_in_groups(heads: Interval, group: int, tp_split: Sequence[int]) -> tuple[list[Interval], list[Interval]]:
    """(heads, groups of ``group`` heads) of each rank: cut at groups while there are at least as many as ranks, else at
    heads, and then ranks have copies of groups."""
    begin, end = heads
    aligned = begin % group == 0 and end % group == 0
    if aligned and (end - begin) // group >= len(tp_split):
        kv = [(a + begin // group, b + begin // group) for a, b in cut((end - begin) // group, tp_split)]
        return [(a * group, b * group) for a, b in kv], kv
    q = [(a + begin, b + begin) for a, b in cut(end - begin, tp_split)]
    return q, [(a // group, -(-b // group)) if b > a else (a // group, a // group) for a, b in q]


def state_heads(delta: GatedDelta | None, tp_split: Sequence[int]) -> tuple[list[Interval], list[Interval]]:
    """(key heads, value heads) of each rank. Those of the gated delta rule have no copies."""
    if delta is None:
        return [(0, 0)] * len(tp_split), [(0, 0)] * len(tp_split)
    each = delta.values_per_key
    if isinstance(delta, StateSpace):
        values, keys = cut_in_groups((0, delta.value_heads), each, tp_split)
        return keys, values
    keys = list(cut(delta.key_heads, tp_split))
    return keys, [(a * each, b * each) for a, b in keys]
