"""The launcher of an elastic job over random machines that are taken, without a word or told, and come, on simulated
time: it goes on as long as there are machines, and every token that was possible is trained or accounted for."""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from types import SimpleNamespace

import pytest

from benchmarks import bench_spot
from hetero_megatron.launch import in_place
from tests.support.selection import quick

ARGUMENTS = argparse.Namespace(start=300.0, save=600.0, detect=30.0, switch=15.0, verbose=False)
MOST, CHANGES = 6, 15
SEEDS = list(range(1, 201))


def changes(dice: random.Random) -> list[tuple[float, int]]:
    """Seconds, and how many machines are there from then on: some changes come while a machine starts, epochs change,
    or a loss is not noticed yet."""
    at, count, found = 0.0, 0, list[tuple[float, int]]()
    for _ in range(CHANGES):
        at += dice.choice([1.0, 5.0, 20.0, 200.0, 1000.0])
        count = dice.choice([n for n in range(MOST + 1) if n != count])
        found.append((at, count))
    return found


@pytest.mark.parametrize("seed", quick(SEEDS, SEEDS[:3], []))
@pytest.mark.parametrize("told", [False, True])
def test_the_launcher_goes_on_whoever_comes_and_goes(told: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "time", SimpleNamespace())  # which is given the simulated clock
    found, rates = changes(random.Random(seed)), [5e4 * n for n in range(MOST + 1)]
    lost = defaultdict[str, float](float)
    trace = bench_spot.Trace(found, found[-1][0] + 5000.0, MOST, seed)
    tokens, _ = bench_spot.elastic(trace, rates, ARGUMENTS, told, lost)
    assert tokens + sum(lost.values()) == pytest.approx(bench_spot.possible(trace, rates))
