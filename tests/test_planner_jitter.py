"""What unsteady chips add to a step, against drawing their speeds many times."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.plan import plan_from_dict
from hetero_megatron.planner.jitter import expected_delay
from hetero_megatron.planner.predict import predict
from hetero_megatron.planner.search import SearchOptions, search
from hetero_megatron.planner.summary import _why
from hetero_megatron.schedule import Costs, generate, lower, simulate
from hetero_megatron.training.calibration.runs import jitter
from tests.planner_cases import MODEL, SEQ, cluster, plan, stages

DRAWS = 20_000
END = st.tuples(st.floats(0.5, 1.0), st.sampled_from([0.0, 0.01, 0.05, 0.2]))


@settings(max_examples=60, deadline=None)
@given(st.lists(END, min_size=1, max_size=40), st.integers(0, 99))
def test_the_delay_is_the_mean_of_the_largest(ends: list[tuple[float, float]], seed: int) -> None:
    drawn = np.random.default_rng(seed).standard_normal((DRAWS, len(ends)))
    planned, deviation = np.array(ends).T
    last = (planned + deviation * drawn).max(axis=1)
    unsure = 6 * last.std() / DRAWS**0.5
    cell = 0.04 * deviation.max()
    assert expected_delay(ends) == pytest.approx(last.mean() - planned.max(), abs=unsure + 0.1 * cell + 1e-12)


def test_steady_chips_are_not_late_and_more_of_the_unsteady_are_later() -> None:
    assert expected_delay([(1.0, 0.0), (0.9, 0.0)]) == 0.0
    delays = [expected_delay([(1.0, 0.1)] * n) for n in (1, 2, 8, 1000)]
    assert delays == sorted(delays) and delays[0] == pytest.approx(0.0, abs=1e-9)
    assert delays[1] == pytest.approx(0.1 / np.pi**0.5, rel=1e-3)


def test_a_step_waits_for_the_unluckiest_replica() -> None:
    steady, unsteady = cluster(4), cluster(4, jitter=0.1)
    replicas = plan_from_dict(plan(*[(16, stages(11, first_rank=r)) for r in range(4)]), MODEL, steady)
    seconds = predict(replicas, MODEL, steady, "fp32").step_seconds
    late = predict(replicas, MODEL, unsteady, "fp32")
    # E[max] of four normal variables
    assert late.step_seconds - seconds == pytest.approx(1.0294 * 0.1 * seconds**0.5, rel=0.01)
    assert late.parts["pipelines"] == pytest.approx(seconds)
    assert late.parts["jitter"] == pytest.approx(late.step_seconds - seconds)


def test_every_part_of_a_step_can_be_the_reason() -> None:
    found = search(MODEL, cluster(2, jitter=0.1), SEQ, 8, SearchOptions(dtype="fp32")).best
    parts = found.prediction.parts
    assert parts["jitter"] > 0
    for name in parts:
        other = replace(found, prediction=replace(found.prediction, parts={**parts, name: parts[name] + 1.0}))
        assert _why(found, other).endswith("takes 1 s longer")


@pytest.mark.parametrize("layers", [[6, 5], [3, 3, 3, 2], [8, 1, 1, 1]])
def test_a_pipeline_of_unsteady_stages(layers: list[int]) -> None:
    """Every rank's speed is drawn for each step; all its actions follow it."""
    share, busy = 0.05, [16 * 3 * n for n in layers]
    unsteady = cluster(len(layers), jitter=share * max(busy) ** 0.5)
    steady = cluster(len(layers))
    one = plan_from_dict(plan((16, stages(*layers))), MODEL, steady)
    seconds = predict(one, MODEL, steady, "fp32").step_seconds
    late = predict(one, MODEL, unsteady, "fp32").step_seconds - seconds
    schedule, rng = lower(generate("1f1b", len(layers), 16)), random.Random(0)
    drawn = []
    for _ in range(1500):
        speeds = [max(0.1, rng.gauss(1.0, share * (max(busy) / b) ** 0.5)) for b in busy]
        forward = [n * s for n, s in zip(layers, speeds)]
        costs = Costs(forward, [2 * f for f in forward], [0.0] * (len(layers) - 1))
        drawn.append(simulate(schedule, costs).step_seconds)
    assert late == pytest.approx(np.mean(drawn) - seconds, abs=0.01 * seconds)


def test_jitter_is_the_deviation_of_steps() -> None:
    rng = random.Random(1)
    runs = [[rng.gauss(t, 0.04 * t**0.5) for _ in range(n)] for n in (2, 6) for t in (0.1, 3.0) for _ in range(200)]
    assert jitter(runs) == pytest.approx(0.04, rel=0.15)
    runs[0] = [1.0, 9.0]  # an outlier
    assert jitter(runs) == pytest.approx(0.04, rel=0.15)
    assert jitter([[1.0], [2.0]]) == 0.0 and jitter([[1.0, 1.0]]) == 0.0
