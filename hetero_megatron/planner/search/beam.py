"""Pipelines of unlike make-up side by side, by a beam search over columns.

A column is a pipeline found for some number of chips of each group; it uses those chips and computes so many sequences
within the time limit. The search picks how many of each there are, so that the cluster's chips suffice and the most
sequences are computed; bisection on the limit finds the least one within which the batch is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.search.layers_program import LayersProgram, PipelineFamily, ProgramInputs
from hetero_megatron.planner.search.materialize import PipelineOutline

MOST_BUDGETS, MOST_COLUMNS, ROUNDS = 32, 200, 6
NEAR = 24  # taus of a column above its least
MOST_USED, BEAM = 32, 24  # columns that the beam search goes through, and its width


def budgets(counts: tuple[int, ...], families: Sequence[PipelineFamily]) -> list[tuple[int, tuple[int, ...]]]:
    """Unequal numbers of chips per group: for every pair of divisors of two groups' counts that gives pipelines of
    about the size of the best ones; the rest of the groups absent."""
    good = sorted({sum(f.budget) for f in families[:40]})
    low, high = (good[0] / 2, good[-1] * 2) if good else (1, sum(counts))
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
    return [(d, budget) for budget, d in rows[::step]]


def mixed(
    inputs: ProgramInputs,
    batch: int,
    families: Sequence[PipelineFamily],
    programs: Mapping[tuple[tuple[int, ...], int, int], LayersProgram],
) -> Iterator[list[PipelineOutline]]:
    """Combinations of columns, best first.

    Args:
        batch: sequences per step.
        families: found so far, best first.
        programs: that found them, by budget, micro-batch size and number of replicas.
    """
    if sum(n > 0 for n in inputs.counts) < 2 or not families:
        return
    size = families[0].size
    found: list[tuple[PipelineFamily, LayersProgram]] = []
    for f in families[:MOST_COLUMNS]:
        key = (tuple(n // f.replicas for n in inputs.counts), f.size, f.replicas)
        found.append((f, programs[key]))
    for d, budget in budgets(inputs.counts, families):
        program = LayersProgram(inputs, budget, size, d)
        found += [(f, program) for f in program.families(max(1.0, batch / (d * size)), NEAR)]
    seen: set[tuple[tuple[int, ...], int]] = set()
    columns = []
    for f, program in found:
        if (f.budget, f.size) not in seen:
            seen.add((f.budget, f.size))
            columns.append((f, program))
    usage = np.array([f.budget for f, _ in columns], float)
    high = families[0].seconds(max(1.0, batch / (families[0].replicas * families[0].size)))
    low, best = high / 2, None
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        counts = _solve(inputs.counts, batch, usage, [f.most(middle) for f, _ in columns])
        if counts is None:
            low = middle
        else:
            high, best = middle, counts
    if best is not None:
        yield [
            PipelineOutline(columns[i][1].trace(columns[i][0]), columns[i][0].size, int(n))
            for i, n in enumerate(best)
            if n
        ]


def _solve(
    chips: tuple[int, ...], batch: int, usage: NDArray[np.float64], sequences: list[int]
) -> list[int] | None:
    """How many pipelines of each column compute the batch; None when none are found.

    Beam search over the columns in the order of sequences per price of their chips: as many as fit, fewer, or none. A
    state is worth what it computes and, at most, what the chips that are left could at the best rate.
    """
    counts = np.array(chips, float)
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
                    if value >= batch:
                        return _counts(len(worth), (*chosen, (i, n)))
                    key = (rest, value)
                    if n or key not in found:
                        bound = value + best_rate * sum(p * c for p, c in zip(price, rest))
                        found[key] = (bound, value, rest, (*chosen, (i, n)) if n else chosen)
        beam = sorted(found.values(), key=lambda row: (-row[0], -row[1], row[3]))[:BEAM]
    return None


def _prices(usage: NDArray[np.float64], worth: NDArray[np.float64]) -> NDArray[np.float64]:
    """What a chip of each group is worth: sequences per chip of the best column that uses mostly this group."""
    share = usage / usage.sum(axis=1, keepdims=True)
    prices = np.max(share * (worth / usage.sum(axis=1))[:, None], axis=0)
    return np.asarray(np.maximum(prices, 1e-9))


def _counts(columns: int, chosen: tuple[tuple[int, int], ...]) -> list[int]:
    counts = [0] * columns
    for i, n in chosen:
        counts[i] += n
    return counts
