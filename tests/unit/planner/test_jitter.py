"""What unsteady chips add to a step, against drawing what their actions take many times."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.report.comparison import why_slower
from hetero_megatron.planner.search.driver import search
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.predictor.simulate.uncertainty import STEPS, expected_delay
from hetero_megatron.schedule import generate
from tests.support.planner_cases import MODEL, SEQ, cluster, plan, stages
from tests.support.selection import quick

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
    options = SearchOptions(dtype="fp32", space=SearchSpace(more_schedules="never"))
    found = search(PlanningProblem(MODEL, cluster(2, jitter=0.1), SEQ, 8, options)).best
    parts = found.prediction.parts
    assert parts["jitter"] > 0
    for name in parts:
        other = replace(found, prediction=replace(found.prediction, parts={**parts, name: parts[name] + 1.0}))
        assert why_slower(found, other).endswith("takes 1 s longer")


def drawn_step(layers: list[int], micro_batches: int, jitter: float, rng: random.Random) -> float:
    """Seconds of a step of 1F1B each of whose actions is drawn: t seconds of work are a gamma process."""
    rows = generate("1f1b", len(layers), micro_batches).stages
    ends: dict[tuple[str, int, int], float] = {}
    clocks, done = [0.0] * len(layers), [0] * len(layers)
    while any(at < len(row) for at, row in zip(done, rows)):
        for s, row in enumerate(rows):
            while done[s] < len(row):
                kind, m, _ = row[done[s]]
                first = s == (0 if kind == "F" else len(layers) - 1)
                needs = (kind, s - 1 if kind == "F" else s + 1, m)
                if not first and needs not in ends:
                    break
                planned = layers[s] * (1 if kind == "F" else 2)
                took = rng.gammavariate(planned / jitter**2, jitter**2)
                clocks[s] = ends[kind, s, m] = max(clocks[s], 0.0 if first else ends[needs]) + took
                done[s] += 1
    return max(clocks)


@pytest.mark.parametrize("layers", [[6, 5], [3, 3, 3, 2], [8, 1, 1, 1], pytest.param([1] * 11, marks=pytest.mark.slow)])
@pytest.mark.parametrize("jitter", quick([0.1, 0.3], [0.3]))
def test_stages_wait_for_one_another(layers: list[int], jitter: float) -> None:
    steady, unsteady = cluster(len(layers)), cluster(len(layers), jitter=jitter)
    one = plan_from_dict(plan((16, stages(*layers))), MODEL, steady)
    seconds = predict(one, MODEL, steady, "fp32").step_seconds
    late = predict(one, MODEL, unsteady, "fp32").step_seconds - seconds
    rng = random.Random(0)
    drawn = [drawn_step(layers, 16, jitter, rng) for _ in range(1000)]
    assert late == pytest.approx(np.mean(drawn) - seconds, abs=3 * float(np.std(drawn)) / STEPS**0.5)
    assert late > 0.05 * seconds or len(layers) < 11 or jitter < 0.3


def test_a_step_waits_for_the_unluckiest_pipeline() -> None:
    steady, unsteady = cluster(8), cluster(8, jitter=0.3)

    def late(pipelines: int) -> float:
        rows = [(16, stages(6, 5, first_rank=2 * p)) for p in range(pipelines)]
        spelled = plan_from_dict(plan(*rows), MODEL, steady)
        return predict(spelled, MODEL, unsteady, "fp32").parts["jitter"]

    rng = random.Random(0)
    drawn = np.array([drawn_step([6, 5], 16, 0.3, rng) for _ in range(4000)])
    assert late(4) - late(1) == pytest.approx(drawn.reshape(-1, 4).max(axis=1).mean() - drawn.mean(), rel=0.25)


def test_members_of_a_context_group_wait_for_one_another_every_time() -> None:
    steady, unsteady = cluster(2), cluster(2, jitter=0.1)
    heads = MODEL.num_heads // 2
    group = {"ranks": [0, 1], "tokens": [SEQ // 2] * 2, "heads": [heads] * 2}
    stage = {"ranks": [0, 1], "layers": [0, 11], "context": [group]}
    one = plan_from_dict(plan((16, [stage])), MODEL, steady)
    before, after = (predict(one, MODEL, c, "fp32") for c in (steady, unsteady))
    (timeline,) = before.timelines
    forward, backward = (timeline.ends[0][i] - timeline.starts[0][i] for i in (0, 1))
    # E[max] of two normal variables, for each action
    late = 16 * 0.1 * (forward**0.5 + backward**0.5) / np.pi**0.5
    assert after.step_seconds - before.step_seconds == pytest.approx(late, rel=0.1)


def test_ranks_of_a_tp_group_march_in_step() -> None:
    one = plan_from_dict(plan((16, stages(11, tp=2))), MODEL, cluster(1, 2))
    assert predict(one, MODEL, cluster(1, 2, jitter=0.1), "fp32").parts["jitter"] == pytest.approx(0.0, abs=1e-9)
