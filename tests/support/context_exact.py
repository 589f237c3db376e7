"""Exact context schedules of small problems by brute force over integers: what the scheduler is checked against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product

from hetero_megatron.errors import UserError
from hetero_megatron.planner.context.cost import ContextCosts, LayoutCost
from hetero_megatron.planner.context.groupings import partitions
from hetero_megatron.planner.context.problem import ContextLayout, ContextProblem, MemberGroup

LIMIT = 2_000_000  # layouts


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All tuples of ``parts`` integers >= 0 with this sum."""
    for bars in combinations(range(total + parts - 1), parts - 1):
        ends = (-1, *bars, total + parts - 1)
        yield tuple(b - a - 1 for a, b in zip(ends[:-1], ends[1:], strict=True))


def exact_context(problem: ContextProblem, blocks: Sequence[int]) -> tuple[ContextLayout, LayoutCost]:
    """The best of all groupings x token shares (in units of ``problem.unit``) x head shares x ``blocks``.

    Groups without tokens are left out, as no ring passes through them; their members are idle in the first group.

    Raises:
        UserError: none fits, or there are too many to try.
    """
    units, rest = divmod(problem.seq_length, problem.unit)
    assert not rest, "the sequence is a multiple of the unit"
    costs, best = ContextCosts(problem), None
    for tried, layout in enumerate(_layouts(problem, units, blocks)):
        if tried >= LIMIT:
            raise UserError(
                "too many layouts for the exact solver", field="members", value=len(problem.members),
                accepted="fewer members, token units or heads",
            )  # fmt: skip
        found = costs.evaluate(layout)
        if found.fits and (best is None or found.seconds < best[1].seconds):
            best = (layout, found)
    if best is None:
        raise UserError("no layout fits in memory", field="seq_length", value=problem.seq_length)
    return best


def _layouts(problem: ContextProblem, units: int, blocks: Sequence[int]) -> Iterator[ContextLayout]:
    world, heads = len(problem.members), problem.model.num_heads
    for grouping in partitions(range(world)):
        if len(grouping) == 1:
            ways: list[tuple[str, int]] = [("a2a", 0)]
        else:
            ways = [("ring", b) for b in blocks]
        flat = [m for group in grouping for m in group]
        choices = [list(compositions(heads, len(group))) for group in grouping]
        for shares in compositions(units, world):
            tokens = dict(zip(flat, (n * problem.unit for n in shares), strict=True))
            if any(not sum(tokens[m] for m in group) for group in grouping):
                continue  # the same as a grouping in which these members are idle in another group
            for split in product(*choices):
                built = tuple(
                    MemberGroup(group, tuple(tokens[m] for m in group), h)
                    for group, h in zip(grouping, split, strict=True)
                )
                for transport, block in ways:
                    yield ContextLayout(built, transport, block)
