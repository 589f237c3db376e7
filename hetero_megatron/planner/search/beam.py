"""Combinations of different pipelines, by a beam search over columns.

A column is a pipeline found for some number of chips of each group; it computes a known number of sequences within a
time limit. For a given limit the beam search chooses how many of each column to use so that the chips suffice and the
most sequences are computed. Bisection finds the least limit within which the batch is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.search.layers_program import LayersProgram, PipelineFamily, ProgramInputs

MOST_BUDGETS, MOST_COLUMNS, ROUNDS = 32, 200, 6
NEAR = 24  # bottleneck times tried per column, from its least on
MOST_USED, BEAM = 32, 24  # columns that the beam search considers, and its width
Programs = Mapping[tuple[tuple[int, ...], int, int], LayersProgram]  # by (budget, micro-batch size, replicas)


def mixed_columns(
    inputs: ProgramInputs, families: Sequence[PipelineFamily], programs: Programs
) -> Iterator[list[tuple[PipelineFamily, LayersProgram, int]]]:
    """Yield combinations as (family, its program, number of such pipelines); nothing for a single chip group.
    ``families``: pipelines found for equal chip budgets, best first."""
    if sum(n > 0 for n in inputs.counts) < 2 or not families:
        return
    columns = _columns(inputs, families, programs)
    usage = np.array([f.budget for f, _ in columns], float)
    first = families[0]
    high = first.seconds(max(1.0, inputs.batch / (first.replicas * first.size)))
    low, best = high / 2, None
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        counts = _solve(inputs, usage, [f.most(middle) for f, _ in columns])
        if counts is None:
            low = middle
        else:
            high, best = middle, counts
    if best is not None:
        yield [(*column, int(n)) for column, n in zip(columns, best) if n]


def _columns(
    inputs: ProgramInputs, families: Sequence[PipelineFamily], programs: Programs
) -> list[tuple[PipelineFamily, LayersProgram]]:
    """The families, and further ones for unequal budgets; one per budget and micro-batch size."""
    size, rows = families[0].size, list[tuple[PipelineFamily, LayersProgram]]()
    for f in families[:MOST_COLUMNS]:
        rows.append((f, programs[tuple(n // f.replicas for n in inputs.counts), f.size, f.replicas]))
    for replicas, budget in _budgets(inputs, families):
        program = LayersProgram(inputs, budget, size, replicas)
        rows += [(f, program) for f in program.families(max(1.0, inputs.batch / (replicas * size)), NEAR)]
    first: dict[tuple[tuple[int, ...], int], tuple[PipelineFamily, LayersProgram]] = {}
    for f, program in rows:
        first.setdefault((f.budget, f.size), (f, program))
    return list(first.values())


def _budgets(inputs: ProgramInputs, families: Sequence[PipelineFamily]) -> list[tuple[int, tuple[int, ...]]]:
    """(replicas, chips per group): combinations of two groups that give pipelines of about the size of the best ones.
    """
    counts = inputs.counts
    good = sorted({sum(f.budget) for f in families[:40]})
    low, high = good[0] / 2, good[-1] * 2
    found: dict[tuple[int, ...], int] = {}
    parts = [sorted({max(1, round(n / 2 ** (i / 2))) for i in range(2 * n.bit_length())}) for n in counts]
    for g in range(len(counts)):
        for h in range(g + 1, len(counts)):
            for a in parts[g]:
                for b in parts[h]:
                    if low <= a + b <= high:
                        budget = tuple(a if i == g else b if i == h else 0 for i in range(len(counts)))
                        found.setdefault(budget, max(1, sum(counts) // (a + b)))
    rows = sorted(found.items(), key=lambda row: (sum(row[0]), row[0]))
    step = max(1, len(rows) // MOST_BUDGETS)
    return [(replicas, budget) for budget, replicas in rows[::step]]


def _solve(inputs: ProgramInputs, usage: NDArray[np.float64], sequences: list[int]) -> list[int] | None:
    """Number of pipelines of each column that compute the batch; None when none are found. Beam search over the columns
    in the order of sequences per unit of chip price. A state's bound is what it computes plus what the remaining chips
    could compute at the best rate."""
    counts = np.array(inputs.counts, float)
    worth = np.array(sequences, float)
    keep = np.flatnonzero(worth > 0)
    if not len(keep):
        return None
    prices = _prices(usage[keep], worth[keep])
    rates = worth[keep] / np.maximum(usage[keep] @ prices, 1e-300)
    order = keep[np.argsort(-rates, kind="stable")][:MOST_USED]
    best_rate, price = float(rates.max()), prices.tolist()
    beam: list[tuple[float, float, tuple[float, ...], tuple[tuple[int, int], ...]]] = [
        (0.0, 0.0, tuple(counts.tolist()), ())
    ]
    for i in order.tolist():
        found = {}
        need, gain = usage[i].tolist(), float(worth[i])
        for _, total, left, chosen in beam:
            most = int(min(c // u for c, u in zip(left, need) if u))
            for n in {most, most - 1, most * 3 // 4, most // 2, 1, 0}:
                if 0 <= n <= most:
                    rest = tuple(c - n * u for c, u in zip(left, need))
                    value = total + n * gain
                    if value >= inputs.batch:
                        return _counts(len(worth), (*chosen, (i, n)))
                    key = (rest, value)
                    if n or key not in found:
                        bound = value + best_rate * sum(p * c for p, c in zip(price, rest))
                        found[key] = (bound, value, rest, (*chosen, (i, n)) if n else chosen)
        beam = sorted(found.values(), key=lambda row: (-row[0], -row[1], row[3]))[:BEAM]
    return None


def _prices(usage: NDArray[np.float64], worth: NDArray[np.float64]) -> NDArray[np.float64]:
    """Price of a chip of each group: sequences per chip of the best column that mostly uses this group."""
    share = usage / usage.sum(axis=1, keepdims=True)
    prices = np.max(share * (worth / usage.sum(axis=1))[:, None], axis=0)
    return np.asarray(np.maximum(prices, 1e-9))


def _counts(columns: int, chosen: tuple[tuple[int, int], ...]) -> list[int]:
    counts = [0] * columns
    for i, n in chosen:
        counts[i] += n
    return counts
