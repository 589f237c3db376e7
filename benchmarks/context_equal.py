"""Equal layouts, ranked: which Ring, Ulysses and USP layouts to run for comparison."""

from __future__ import annotations

from collections import Counter

from hetero_megatron.planner.context.cost import ContextCosts, LayoutCost
from hetero_megatron.planner.context.groupings import equal_layouts
from hetero_megatron.planner.context.problem import ContextLayout, ContextProblem

Ranked = list[tuple[ContextLayout, LayoutCost]]


def kind_of(layout: ContextLayout) -> str:
    """ring | ulysses | usp, of an equal layout."""
    return layout.name.split()[0]


def ranked_equal(problem: ContextProblem) -> Ranked:
    """All legal equal layouts that fit in memory, the fastest by the model first."""
    costs = ContextCosts(problem)
    found = [(layout, costs.evaluate(layout)) for layout in equal_layouts(problem)]
    return sorted((one for one in found if one[1].fits), key=lambda one: one[1].order)


def few_equal(problem: ContextProblem, each: int) -> tuple[Ranked, int]:
    """The best ``each`` of every kind, with unlike placement or groups, each with its best block; and how
    many layouts are legal."""
    ranked = ranked_equal(problem)
    taken: Counter[str] = Counter()
    seen: set[str] = set()
    few: Ranked = []
    for layout, found in ranked:
        if layout.name not in seen and taken[kind_of(layout)] < each:
            seen.add(layout.name)
            taken[kind_of(layout)] += 1
            few.append((layout, found))
    return few, len(ranked)
