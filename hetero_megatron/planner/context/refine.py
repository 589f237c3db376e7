"""Local refinement of a layout: moves tokens and heads away from the slowest group, one move at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hetero_megatron.planner.context.cost import ContextCosts, LayoutCost
from hetero_megatron.planner.context.problem import ContextLayout, MemberGroup
from hetero_megatron.planner.hill_climb import HillClimb

FEW = 8  # up to so many members all pairs are tried
EVALUATIONS = 600  # for up to FEW members; above, fewer in proportion
LEAST_GAIN = 1e-9


def refine(costs: ContextCosts, layout: ContextLayout) -> Iterator[ContextLayout]:
    """Yield layouts of decreasing cost. Steps of tokens are halved down to one unit; heads move one by one."""
    unit, world = costs.problem.unit, len(costs.problem.members)
    climb = HillClimb[ContextLayout](EVALUATIONS if world <= FEW else max(24, 8 * EVALUATIONS // world))
    best, current = costs.evaluate(layout), layout

    def improves(other: ContextLayout) -> bool:
        nonlocal best
        found = costs.evaluate(other)
        better = _better(found, best)
        best = found if better else best
        return better

    def neighbours(one: ContextLayout) -> Iterator[ContextLayout]:
        return _moves(costs, one, best, step)

    step = max(unit, max(sum(group.tokens) for group in layout.groups) // 8 // unit * unit)
    while True:
        for better in climb.run(current, neighbours, improves):
            current = better
            yield better
        if step == unit:
            return
        step = max(unit, step // 2 // unit * unit)


def _better(a: LayoutCost, b: LayoutCost) -> bool:
    """Less time, or equal time with less work in the groups, which lets the search cross plateaus."""
    if not a.fits:
        return False
    if not b.fits or a.seconds < b.seconds * (1 - LEAST_GAIN):
        return True
    return a.seconds <= b.seconds * (1 + 1e-12) and a.order[1] < b.order[1] * (1 - 1e-6)


def _moves(costs: ContextCosts, layout: ContextLayout, found: LayoutCost, step: int) -> Iterator[ContextLayout]:
    few = len(costs.problem.members) <= FEW
    order = sorted(range(len(layout.groups)), key=lambda k: -found.group_seconds[k])
    sources = order if few else order[:1]
    targets = order[::-1] if few else order[:-4:-1]
    for k in sources:
        for other in targets:
            yield from _tokens(costs, layout, k, other, step, few)
        yield from _heads(costs, layout, k, few)


def _tokens(
    costs: ContextCosts, layout: ContextLayout, source: int, target: int, step: int, few: bool
) -> Iterator[ContextLayout]:
    a, b = layout.groups[source], layout.groups[target]
    givers = _distinct(costs, a, few, slowest=True)
    takers = _distinct(costs, b, few, slowest=False)
    for i in givers:
        for j in takers:
            amount = min(step, a.tokens[i])
            if amount == 0 or (source == target and i == j):
                continue
            if source == target:
                yield _with(layout, {source: replace(a, tokens=_moved(a.tokens, i, j, amount))})
            elif amount < sum(a.tokens):
                less = replace(a, tokens=_moved(a.tokens, i, None, amount))
                yield _with(layout, {source: less, target: replace(b, tokens=_moved(b.tokens, None, j, amount))})


def _heads(costs: ContextCosts, layout: ContextLayout, k: int, few: bool) -> Iterator[ContextLayout]:
    group = layout.groups[k]
    if len(group.members) == 1:
        return
    per_kv = costs.per_kv
    for count in dict.fromkeys((1, per_kv)):
        for i in _distinct(costs, group, few, slowest=True):
            for j in _distinct(costs, group, few, slowest=False):
                if i != j and group.heads[i] >= count:
                    yield _with(layout, {k: replace(group, heads=_moved(group.heads, i, j, count))})


def _distinct(costs: ContextCosts, group: MemberGroup, few: bool, slowest: bool) -> list[int]:
    """Positions of members to move from or to: all of a small group, else the extremes of each type."""
    positions = range(len(group.members))
    if few or len(group.members) <= 3:
        return list(positions)
    load = [costs.linear[m] * s for m, s in zip(group.members, group.tokens, strict=True)]
    ordered = sorted(positions, key=lambda i: load[i], reverse=slowest)
    seen: dict[int, int] = {}
    for i in ordered:
        seen.setdefault(costs.type[group.members[i]], i)
    return list(seen.values())[:3]


def _moved(values: tuple[int, ...], source: int | None, target: int | None, amount: int) -> tuple[int, ...]:
    result = list(values)
    if source is not None:
        result[source] -= amount
    if target is not None:
        result[target] += amount
    return tuple(result)


def _with(layout: ContextLayout, changed: dict[int, MemberGroup]) -> ContextLayout:
    groups = tuple(changed.get(k, group) for k, group in enumerate(layout.groups))
    return replace(layout, groups=groups, name="")
