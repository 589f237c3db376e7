"""Shares for a given grouping: heads by attention speed, tokens of groups and of members by their cost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_megatron.planner.cached_method import cached_method
from hetero_megatron.planner.context.cost import ContextCosts, kv_heads
from hetero_megatron.planner.context.groupings import Grouping, even_block
from hetero_megatron.planner.context.integer_shares import min_max_shares, water_level
from hetero_megatron.planner.context.memory import head_bytes, kv_bytes, token_bytes
from hetero_megatron.planner.context.problem import ContextLayout, MemberGroup

Floats = npt.NDArray[np.float64]


class Balancer:
    """Balances groupings of one problem; equal groups are computed once."""

    def __init__(self, costs: ContextCosts) -> None:
        self.costs, self.problem = costs, costs.problem

    def balance(self, grouping: Grouping, transport: str, block: int, equal: bool = False) -> ContextLayout | None:
        """Integer shares that equalise the groups' times; None where they do not fit in memory.

        Args:
            block: most tokens in a block of the ring.
            equal: heads are divided equally, so that no member receives more than another; else by speed.
        """
        problem, alike = self.problem, [self.costs.alike(group) for group in grouping]
        heads = [self.heads(group, equal) for group in alike]
        empty = ContextLayout((), transport, block if transport == "ring" else 0)
        buffer = kv_bytes(problem, empty) if transport != "a2a" else 0.0
        caps = np.array([self.cap(g, h, buffer) for g, h in zip(alike, heads, strict=True)])
        units, rest = divmod(problem.seq_length, problem.unit)
        if int(np.floor(caps / problem.unit).sum()) < units + (rest > 0):
            return None
        travel = self._travel(grouping, heads, block) if transport == "ring" else 0.0
        totals = self._group_tokens(alike, heads, caps, travel)
        built = []
        for group, same, h, total in zip(grouping, alike, heads, totals, strict=True):
            tokens = self.tokens(same, h, total, buffer)
            if tokens is None:
                return None
            built.append(MemberGroup(group, tokens, h))
        if transport == "ring":
            block = even_block(totals, block)
        return self._with_idle([g for g in built if sum(g.tokens)], grouping, transport, block)

    def _with_idle(self, built: list[MemberGroup], grouping: Grouping, transport: str, block: int) -> ContextLayout:
        """The layout with members without work appended to the first group, with zeros."""
        used = {m for group in built for m in group.members}
        spare = tuple(m for group in grouping for m in group if m not in used)
        if spare:
            first, zeros = built[0], (0,) * len(spare)
            built[0] = MemberGroup(first.members + spare, first.tokens + zeros, first.heads + zeros)
        if len(built) == 1:
            return ContextLayout(tuple(built), "a2a")
        return ContextLayout(tuple(built), transport, block if transport == "ring" else 0)

    @cached_method
    def heads(self, group: tuple[int, ...], equal: bool) -> tuple[int, ...]:
        """Query heads per member; by speed, the exact min-max solution."""
        cost = np.ones(len(group)) if equal else self.costs.pair[list(group)]
        return tuple(min_max_shares(self.problem.model.num_heads, cost).tolist())

    def _limits(self, group: tuple[int, ...], heads: tuple[int, ...], buffer: float) -> tuple[Floats, Floats, float]:
        """(free bytes, bytes per token of the group, bytes per own token): member d may own (free_d - group's tokens x
        each_d) / per token."""
        h = np.array(heads, dtype=np.float64)
        kv = np.array(kv_heads(heads, self.costs.per_kv), dtype=np.float64)
        each, per_token = head_bytes(self.problem, h, kv), token_bytes(self.problem, len(group) == 1)
        return self.costs.limits[list(group)] - kv * buffer, each, per_token

    @cached_method
    def cap(self, group: tuple[int, ...], heads: tuple[int, ...], buffer: float) -> float:
        """Most tokens that a group can hold (by bisection: room for own tokens shrinks as the group's tokens grow)."""
        free, each, per_token = self._limits(group, heads, buffer)
        low, high = 0.0, float(self.problem.seq_length)
        if (free < 0).any():
            high = 0.0
        middle = high
        while high - low >= 0.5:
            room = free - middle * each
            good = (room >= 0).all() and float((room / per_token).sum()) >= middle
            low, high = (middle, high) if good else (low, middle)
            middle = (low + high) / 2
        return low

    @cached_method
    def tokens(
        self, group: tuple[int, ...], heads: tuple[int, ...], total: int, buffer: float
    ) -> tuple[int, ...] | None:
        """Tokens per member of a group that owns ``total``; None where they do not fit."""
        free, each, per_token = self._limits(group, heads, buffer)
        unit, room = self.problem.unit, np.maximum((free - total * each) / per_token, 0)
        units, rest = divmod(total, unit)
        cost = self.costs.linear[list(group)] * unit
        try:
            shares = min_max_shares(units, cost, np.floor(room / unit).astype(np.int64)) * unit
        except ValueError:
            return None
        if rest:  # the remainder below one unit goes to the member with room that finishes first
            fitting = [i for i in np.argsort((shares + rest) * cost) if shares[i] + rest <= room[i]]
            if not fitting:
                return None
            shares[fitting[0]] += rest
        return tuple(int(n) for n in shares)

    def _group_tokens(
        self, groups: list[tuple[int, ...]], heads: list[tuple[int, ...]], caps: Floats, travel: float
    ) -> list[int]:
        """At most ``caps`` tokens per group that equalise T_k = delay_k + S_k / rate_k (water-filling); ``travel``: as
        of :meth:`_travel`."""
        problem, count = self.problem, len(groups)
        if count == 1:
            return [problem.seq_length]
        slope, delay, lines = self._slopes(groups, heads)
        level = water_level(problem.seq_length, 1 / slope, np.minimum(caps, problem.seq_length), delay)
        totals = np.clip((level - delay) / slope, 0, caps)
        if travel > 0 and float((slope * totals - lines * totals).min()) < travel:
            # Where the ring takes longer than attention, only the rest of the layer depends on the share of tokens.
            waits = (slope - lines) * totals < travel
            slope2, delay2 = np.where(waits, lines, slope), delay + np.where(waits, travel, 0.0)
            level = water_level(problem.seq_length, 1 / slope2, np.minimum(caps, problem.seq_length), delay2)
            totals = np.clip((level - delay2) / slope2, 0, caps)
        unit = problem.unit
        # Rounded down to units; the remaining units go to the groups that finish first.
        whole = np.floor(totals / unit + 1e-9).astype(np.int64)
        cap_units = np.floor(caps / unit).astype(np.int64)
        whole = np.minimum(whole, cap_units)
        units, rest = divmod(problem.seq_length, unit)
        missing = units - int(whole.sum())
        while missing > 0:
            open_ = np.flatnonzero(whole < cap_units)
            order = open_[np.argsort(delay[open_] + (whole[open_] + 1) * unit * slope[open_], kind="stable")]
            whole[order[:missing]] += 1
            missing = units - int(whole.sum())
        result = [int(n) * unit for n in whole]
        if rest:
            room = [k for k in range(count) if result[k] + rest <= caps[k]]
            best = min(room or range(count), key=lambda k: delay[k] + (result[k] + rest) * slope[k])
            result[best] += rest
        return result

    def _slopes(self, groups: list[tuple[int, ...]], heads: list[tuple[int, ...]]) -> tuple[Floats, Floats, Floats]:
        """Per group, for forward and backward of one layer: (seconds per token, fixed seconds, seconds per token
        without attention)."""
        mean = self.problem.seq_length / len(groups)
        slope, delay, lines = np.array([self._slope(g, h, mean) for g, h in zip(groups, heads, strict=True)]).T
        return slope, delay, np.maximum(lines, slope * 1e-9)

    @cached_method
    def _slope(self, group: tuple[int, ...], heads: tuple[int, ...], mean: float) -> tuple[float, float, float]:
        """The same of one group that owns about ``mean`` tokens."""
        options, speed = self.problem.options, 1 / self.costs.linear[list(group)]
        runs, again = options.forwards, options.core_again
        part = self.costs.parts(group, tuple((speed / speed.sum() * mean).tolist()), heads)
        none = self.costs.parts(group, (0.0,) * len(group), heads)
        core = (runs + again) * part.attention + part.attention_backward
        fixed = (runs + 1) * (none.scatter + none.collect)
        rest = runs * part.linear + part.linear_backward + (runs + 1) * (part.scatter + part.collect) - fixed
        rest += 3 * part.head / self.problem.layers
        return (core + rest) / mean, fixed, rest / mean

    def _travel(self, groups: Grouping, heads: list[tuple[int, ...]], block: int) -> float:
        """Seconds per layer that keys and values travel in the ring, in all passes; independent of the shares."""
        if len(groups) == 1:
            return 0.0
        options = self.problem.options
        built = [MemberGroup(g, (0,) * len(g), h) for g, h in zip(groups, heads, strict=True)]
        rate, alpha, _ = self.costs.ring(built)
        runs = options.forwards + options.core_again
        foreign = self.problem.seq_length * (1 - 1 / len(groups))
        per_byte = 2 * self.costs.byte * (runs + 1 + options.wide / options.item)
        return foreign * rate * per_byte + (runs + 1) * alpha * foreign / max(block, 1)
