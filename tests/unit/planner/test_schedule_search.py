"""Schedules searched together with layers and micro-batches: against brute force where no chip can hold the model
alone; and what adaptive schedules are told about the reduction of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.schedule_search import adapted, interleaved
from hetero_megatron.planner.search.schedule_times import least_seconds, pipeline_times
from hetero_megatron.plans import Plan, plan_from_dict, validate
from hetero_megatron.predictor.cost.cost_options import StageChoice
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.stage_cost import StageCosts
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.schedule import generate
from hetero_megatron.schedule.chunk_times import ChunkedTimes, time_chunk_orders
from hetero_megatron.schedule.stage_orders import PipelineTimes, chunk_orders_of
from tests.support.planner_cases import MODEL, SEQ, cluster, plan, stages
from tests.support.selection import quick

SMALL = replace(MODEL, num_layers=6)


def placed(ranks: list[int], cut: int) -> list[dict[str, object]]:
    layers = [[0, cut], [cut, SMALL.num_layers]]
    return [{"ranks": [r], "layers": part} for r, part in zip(ranks, layers, strict=True)]


def every_schedule(plain: Plan, costs: CostModel) -> Iterator[Plan | None]:
    yield plain
    yield replace(plain, schedule="zero-bubble")
    for cut in (interleaved(plain, chunks) for chunks in (2, 3)):
        yield cut
        yield None if cut is None else replace(cut, schedule="zero-bubble")
    yield adapted(plain, predict(plain, SMALL, costs.cluster, costs=costs), costs)


def replicas(costs: CostModel, batch: int) -> float:
    """Seconds of the fastest plan of one or two replicas of one stage, over all divisions of the batch."""
    best = float("inf")
    for mine in range(batch + 1):
        parts = [(n, stages(SMALL.num_layers, first_rank=r)) for r, n in enumerate((mine, batch - mine)) if n]
        if parts[0][1][0]["ranks"] == [0]:  # the second chip alone is slower than the first alone
            found = predict(plan_from_dict(plan(*parts), SMALL), SMALL, costs.cluster, costs=costs)
            best = min(best, found.step_seconds)
    return best


def brute_force(costs: CostModel, batch: int) -> float:
    """Seconds of the fastest plan of one pipeline over two chips: all orders, cuts, micro-batches and schedules."""
    best = float("inf")
    for size in (n for n in (1, 2, 3, 4) if batch % n == 0):
        for order in ([0, 1], [1, 0]):
            for cut in range(1, SMALL.num_layers):
                spelled = plan((batch // size, placed(order, cut)), mbs=size)
                try:
                    plain = plan_from_dict(spelled, SMALL)
                    validate(plain, SMALL, costs.cluster, dtype="fp32")
                except UserError:
                    continue
                for made in every_schedule(plain, costs):
                    if made is not None:
                        found = predict(made, SMALL, costs.cluster, costs=costs)
                        best = min(best, found.step_seconds if not found.over else best)
    return best


@pytest.mark.parametrize(
    "case",
    quick(
        itertools.product([(1.0, 1.0), (1.0, 1.7), (2.5, 1.0)], [4, 8]),
        [((1.0, 1.7), 8)],
        [((1.0, 1.0), 4), ((2.5, 1.0), 4)],
    ),
)
def test_small_pipelines_are_as_fast_as_the_fastest_of_all(case: tuple[tuple[float, ...], int]) -> None:
    speeds, batch = case
    choice, plenty = StageChoice("c0", 1, 1, SMALL.num_layers, True, True), cluster(speeds=speeds, model=SMALL)
    alone = CostModel(SMALL, plenty, SEQ, "fp32").memory_bytes(choice, 1, 1, 2).total  # more than there will be
    where = cluster(speeds=speeds, model=SMALL, memory=f"{int(alone)} B")
    options = SearchOptions(dtype="fp32", space=SearchSpace(more_schedules="always"))
    found = search(PlanningProblem(SMALL, where, SEQ, batch, options))
    costs = CostModel(SMALL, where, SEQ, "fp32")
    assert found.best.step_seconds <= brute_force(costs, batch) * (1 + 1e-6)


@pytest.mark.parametrize(
    "case",
    quick(
        itertools.product([(1.0, 1.3), (1.0, 1.7), (1.0, 2.4)], [3, 4]),
        [((1.0, 1.7), 4)],
        [((1.0, 1.3), 3)],
    ),
)
def test_pipelines_are_tried_where_replicas_are_faster_under_1f1b(case: tuple[tuple[float, ...], int]) -> None:
    speeds, batch = case
    where = cluster(speeds=speeds, model=SMALL)
    options = SearchOptions(dtype="fp32", space=SearchSpace(more_schedules="always"))
    found = search(PlanningProblem(SMALL, where, SEQ, batch, options)).best
    costs = CostModel(SMALL, where, SEQ, "fp32")
    pipelines, alone = brute_force(costs, batch), replicas(costs, batch)
    assert found.step_seconds <= min(pipelines, alone) * (1 + 1e-6)
    if (speeds, batch) == ((1.0, 1.7), 4):
        assert pipelines < 0.9 * alone and len(found.plan.pipelines) == 1  # the case that needs this


def test_adaptive_schedules_know_the_reduction_of_gradients() -> None:
    """Two replicas over a slow link: what is left of the reduction after a stage's last action is its tail."""
    where = cluster(nodes=4, beta=2e-7, model=SMALL)
    spelled = plan(*((4, stages(3, 3, first_rank=2 * p)) for p in range(2)))
    plain, costs = plan_from_dict(spelled, SMALL), CostModel(SMALL, where, SEQ, "fp32")
    found, prices = predict(plain, SMALL, where, costs=costs), StageCosts(plain, costs)
    assert 0.5 * found.parts["gradients"] <= max(found.tails.values()) <= 2 * found.parts["gradients"]
    assert found.parts["gradients"] > 0
    pipeline = plain.pipelines[0]
    tails = [max(found.tails[r] for r in s.ranks) for s in pipeline.stages]
    times = pipeline_times(found, pipeline, prices.of(pipeline), costs, tails)
    assert isinstance(times, PipelineTimes) and [s.tail_seconds for s in times.stages] == tails


@pytest.mark.parametrize("chunks, sizes", [(2, (6, 5)), (3, (6, 5)), (2, (1, 10))])
def test_chunked_schedules_are_made_for_what_is_predicted(chunks: int, sizes: tuple[int, int]) -> None:
    """With the seconds that chunks are told to take, messages of the host included, a schedule takes what the step
    simulator says; what is made is faster, and not below the bound."""
    where = cluster(speeds=(1.0, 1.7), beta=3e-7, alpha=0.2, message_seconds=0.05)
    costs = CostModel(MODEL, where, SEQ, "fp32")
    plain = plan_from_dict(plan((5, stages(*sizes))), MODEL)
    cut = interleaved(plain, chunks)
    assert cut is not None and [s.num_layers for s in cut.pipelines[0].stages] == list(sizes)
    assert (interleaved(plain, 3) is None) == (1 in sizes)  # two of three chunks would be empty
    found = predict(cut, MODEL, where, costs=costs)
    priced, pipeline = StageCosts(cut, costs).of(cut.pipelines[0]), cut.pipelines[0]
    times = pipeline_times(found, pipeline, priced, costs, [0.0, 0.0])
    assert isinstance(times, ChunkedTimes)
    orders = chunk_orders_of(generate("interleaved", 2, 5, chunks))
    assert time_chunk_orders(times, orders) == pytest.approx(found.pipeline_seconds[0], rel=0.02)
    made = adapted(cut, predict(plain, MODEL, where, costs=costs), costs)
    assert made is not None and made.pipelines[0].chunks == chunks
    validate(made, MODEL, where, dtype="fp32")
    after = predict(made, MODEL, where, costs=costs)
    assert 0 < least_seconds(made, costs) <= least_seconds(made, costs, after) <= after.pipeline_seconds[0] * (1 + 1e-9)
    assert after.pipeline_seconds[0] < found.pipeline_seconds[0]


@pytest.mark.parametrize("kind", ["layers", "copies"])
def test_equal_pipelines_stay_equal_whatever_else_is_searched(kind: str) -> None:
    """Where the fastest plans are unlike ones, with unequal shares of the states, or schedules made for them."""
    unlike = cluster(model=SMALL, speeds=(1.0, 1.7, 1.3, 2.0), memory="13 MiB")
    space = SearchSpace(
        more_schedules="always", schedule_effort=0.02, equal_pipelines=kind, recompute="none", micro_batch_sizes=(1,),
        inner_dp=False, max_tp=1,
    )  # fmt: skip
    options = SearchOptions(dtype="fp32", space=space)
    result = search(PlanningProblem(SMALL, unlike, SEQ, 7, options))
    for plan_found in (result.best, *result.others):
        pipelines = plan_found.plan.pipelines
        assert len({tuple(s.layers for s in p.stages) for p in pipelines}) == 1
        assert len({p.num_micro_batches for p in pipelines}) <= (1 if kind == "copies" else 2)
        assert {s.optimizer.share for p in pipelines for s in p.stages} == {1}
    typo = replace(options, space=replace(space, equal_pipelines="layer"))
    with pytest.raises(UserError, match="equal_pipelines"):
        search(PlanningProblem(SMALL, unlike, SEQ, 7, typo))
