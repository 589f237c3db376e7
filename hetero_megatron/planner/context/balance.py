"""Shares for a given grouping: heads by attention speed, tokens of groups and of members by their cost; and a lower
bound on the time of any layout, from the chips' speeds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_megatron.planner.context.cost import ContextCosts, kv_heads
from hetero_megatron.planner.context.groupings import Grouping, even_block
from hetero_megatron.planner.context.memory import head_bytes, ring_bytes, token_bytes
from hetero_megatron.planner.context.problem import ContextLayout, ContextProblem, MemberGroup
from hetero_megatron.planner.estimate.lower_bounds import work_seconds
from hetero_megatron.planner.shares import min_max_shares, min_max_tokens
from hetero_megatron.utils.cached_method import cached_method

Floats = npt.NDArray[np.float64]


class Balancer:
    """Balances groupings of one problem; equal groups are computed once."""

    def __init__(self, costs: ContextCosts) -> None:
        self.costs, self.problem = costs, costs.problem

    def balance(self, grouping: Grouping, block: int) -> ContextLayout | None:
        """Integer shares that equalise the groups' times; None where they do not fit in memory.

        Args:
            block: most tokens in a block of the ring.
        """
        problem, alike_groups = self.problem, [self.costs.alike(group) for group in grouping]
        heads = [self.heads(group) for group in alike_groups]
        buffer = ring_bytes(problem, block) if len(grouping) > 1 else 0.0
        caps = np.array([self.cap(g, h, buffer) for g, h in zip(alike_groups, heads, strict=True)])
        totals = self._group_tokens(alike_groups, heads, caps)
        if totals is None:
            return None
        built = []
        for group, alike_group, h, total in zip(grouping, alike_groups, heads, totals, strict=True):
            tokens = self.tokens(alike_group, h, total, buffer)
            if tokens is None:
                return None
            if total:
                built.append(MemberGroup(group, tokens, h))
        return self._with_idle(built, grouping, even_block(totals, block))

    def _with_idle(self, built: list[MemberGroup], grouping: Grouping, block: int) -> ContextLayout:
        """The layout with members without work appended to the first group, with zeros."""
        used_members = {m for group in built for m in group.members}
        spare = tuple(m for group in grouping for m in group if m not in used_members)
        if spare:
            first_group, zeros = built[0], (0,) * len(spare)
            built[0] = MemberGroup(first_group.members + spare, first_group.tokens + zeros, first_group.heads + zeros)
        return ContextLayout(tuple(built), "ring", block) if len(built) > 1 else ContextLayout(tuple(built), "a2a")

    @cached_method
    def heads(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """Query heads per member by speed, the exact min-max solution."""
        return tuple(min_max_shares(self.problem.model.num_heads, self.costs.pair[list(group)]).tolist())

    def _room(self, group: tuple[int, ...], heads: tuple[int, ...], total: float, buffer: float) -> Floats:
        """[members] own tokens that fit if the group has ``total``, at the worst moment; negative where not even the
        group's keys do."""
        h = np.array(heads, dtype=np.float64)
        kv = np.array(kv_heads(heads, self.costs.per_kv), dtype=np.float64)
        free = self.costs.limits[list(group)] - kv * buffer
        moments = zip(head_bytes(self.problem, h, kv), token_bytes(self.problem, len(group) == 1), strict=True)
        room: Floats = np.minimum(*((free - total * of_group) / per_token for of_group, per_token in moments))
        return room

    @cached_method
    def cap(self, group: tuple[int, ...], heads: tuple[int, ...], buffer: float) -> float:
        """Most tokens that a group can hold (by bisection: room for own tokens shrinks as the group's tokens grow)."""
        low, high = 0.0, float(self.problem.seq_length)
        if (self._room(group, heads, 0.0, buffer) < 0).any():
            high = 0.0
        middle = high
        while high - low >= 0.5:
            room = self._room(group, heads, middle, buffer)
            fits = (room >= 0).all() and float(room.sum()) >= middle
            low, high = (middle, high) if fits else (low, middle)
            middle = (low + high) / 2
        return low

    @cached_method
    def tokens(
        self, group: tuple[int, ...], heads: tuple[int, ...], total: int, buffer: float
    ) -> tuple[int, ...] | None:
        """Tokens per member of a group that owns ``total``; None where they do not fit."""
        room = np.maximum(self._room(group, heads, total, buffer), 0)
        return min_max_tokens(total, self.problem.unit, self.costs.linear[list(group)], room)

    def _group_tokens(
        self, groups: list[tuple[int, ...]], heads: list[tuple[int, ...]], caps: Floats
    ) -> tuple[int, ...] | None:
        """At most ``caps`` tokens per group that equalise the groups' times."""
        total = self.problem.seq_length
        if len(groups) == 1:
            return (total,) if caps[0] >= total else None
        rows = [self._slope(g, h, total / len(groups)) for g, h in zip(groups, heads, strict=True)]
        slope, fixed = np.array(rows).T
        return min_max_tokens(total, self.problem.unit, slope, caps, fixed)

    @cached_method
    def _slope(self, group: tuple[int, ...], heads: tuple[int, ...], mean: float) -> tuple[float, float]:
        """(seconds per token, fixed seconds) of forward and backward of one layer on a group that owns about ``mean``
        tokens."""
        options, speed = self.problem.options, 1 / self.costs.linear[list(group)]
        runs, core_recomputes = options.forwards, options.core_again
        seconds = self.costs.parts(group, tuple((speed / speed.sum() * mean).tolist()), heads)
        empty_seconds = self.costs.parts(group, (0.0,) * len(group), heads)
        core_seconds = (runs + core_recomputes) * seconds.attention + seconds.attention_backward
        fixed = (runs + 1) * (empty_seconds.scatter + empty_seconds.collect)
        other_seconds = (
            runs * seconds.linear + seconds.linear_backward + (runs + 1) * (seconds.scatter + seconds.collect) - fixed
        )
        other_seconds += 3 * seconds.head / self.problem.layers
        return (core_seconds + other_seconds) / mean, fixed


def speed_bound(problem: ContextProblem) -> float:
    """Lower bound (s) on a micro-batch of a stage."""
    members, layers, options = problem.members, problem.layers, problem.options
    runs, core_again = options.forwards, options.core_again
    linear_work = layers * (runs + 2) * problem.linear_flops + 3 * problem.head_flops
    attention_work = layers * problem.pair_flops * problem.model.num_heads
    linear = [linear_work / m.gemm_flops + layers * (runs + 1) * m.token_seconds for m in members]
    attention = [attention_work * (runs + core_again + m.attention_backward) / m.attention_flops for m in members]
    host = runs * min(m.layer_seconds for m in members) + min(m.layer_backward_seconds for m in members)
    return max(work_seconds(np.array(linear), np.array(attention), float(problem.seq_length)), layers * host)
