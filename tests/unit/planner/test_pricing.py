"""The search ranks by the times that the prediction judges by; what an exchange costs its hosts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hetero_megatron.calibration.exchange import fit_phases
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.search.graph_partition import layer_seconds
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.placement import place, to_plan
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
)
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.predictor.cost.layer_cost import CostModel, CostOptions
from hetero_megatron.predictor.simulate.grad_sync import GradSync
from hetero_megatron.predictor.simulate.stage_cost import PreparedPlan
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import load_model
from hetero_megatron.spec.flops import parameter_count
from tests.support.planner_cases import MODEL, SEQ, cluster, plan, stages

BYTES = 4 * parameter_count(MODEL)
HOST = {
    "pack_beta": 1.5 / BYTES, "add_beta": 2.0 / BYTES, "unpack_beta": 1.0 / BYTES, "exchange_seconds": 0.02,
    "accumulate_beta": 0.5 / BYTES, "message_seconds": 0.01, "step_seconds": 0.1,
}  # fmt: skip


def random_candidate(rng: random.Random, pool: DevicePool) -> PlanTemplate:
    """Pipelines of unlike stages on some of the chips, as the search could make them."""
    counts, parts = list(pool.counts), []
    while sum(counts) and (not parts or rng.random() < 0.7):
        units: list[tuple[int, int]] = []
        for _ in range(rng.randint(1, min(4, sum(counts)))):
            g = rng.choice([g for g, n in enumerate(counts) if n])
            units.append((g, 1))
            counts[g] -= 1
            if not sum(counts):
                break
        cuts = sorted(rng.sample(range(1, MODEL.num_layers), len(units) - 1))
        sizes = [b - a for a, b in zip([0, *cuts], [*cuts, MODEL.num_layers])]
        shape = tuple(StageTemplate(g, tp, 1, n, rng.choice(["none", "full"])) for (g, tp), n in zip(units, sizes))
        parts.append(PipelineReplicas(PipelineTemplate(1, shape), 1, rng.randint(1, 10)))
    return PlanTemplate(tuple(parts), "1f1b", rng.choice(["stage", "pipeline"]))


@pytest.mark.parametrize("per_node", [1, 2])
def test_the_search_and_the_prediction_agree(per_node: int) -> None:
    there = cluster(per_node=per_node, beta=8 / BYTES, alpha=0.03, speeds=(1.0, 0.5, 0.3), **HOST)
    scorer = make_scorer(PlanningProblem(MODEL, there, SEQ, 1, SearchOptions(dtype="fp32")))
    rng = random.Random(per_node)
    errors = []
    for _ in range(10):
        candidate = random_candidate(rng, scorer.pool)
        placed = place(candidate, scorer.pool)
        assert placed is not None
        concrete = to_plan(placed, there, SEQ, MODEL.num_heads)
        exact = predict(concrete, MODEL, there, "fp32", scorer.costs).step_seconds
        errors.append(abs(scorer.score_placed(placed).step_seconds / exact - 1))
    assert sum(errors) / len(errors) < 0.005 and max(errors) < 0.02


def test_directions_of_a_boundary_are_priced_apart() -> None:
    """Activations go one way, gradients the other; whether there or back is the slow one makes a difference."""
    for slow in ([0, 1], [1, 0]):
        there = cluster(speeds=(1.0, 1.0), alpha=0.0)
        a, b = (f"n{i}" for i in slow)
        beta = 25 / (4 * SEQ * MODEL.hidden_size)  # a micro-batch takes 25 s
        one_way = {"from": a, "to": b, "alpha": 0.0, "beta": beta}
        there = replace(there, rates={**there.rates, "links": [*there.rates["links"], one_way]})
        scorer = make_scorer(PlanningProblem(MODEL, there, SEQ, 1, SearchOptions(dtype="fp32")))
        shape = PipelineTemplate(1, (StageTemplate(0, 1, 1, 6), StageTemplate(1, 1, 1, 5)))
        placed = place(PlanTemplate((PipelineReplicas(shape, 1, 6),)), scorer.pool)
        assert placed is not None
        exact = predict(to_plan(placed, there, SEQ, MODEL.num_heads), MODEL, there, "fp32", scorer.costs)
        assert scorer.score_placed(placed).step_seconds == pytest.approx(exact.step_seconds, rel=1e-3)


def test_pipelines_share_the_cards_of_a_node_not_its_slow_links() -> None:
    """Two pipelines over the same three nodes: the cards do 1e-2 of a link's time, so each has its link to itself."""
    beta = 25 / (4 * SEQ * MODEL.hidden_size)  # a micro-batch takes 25 s
    rows = ((["n0", "n1"], beta), (["n0", "n2"], beta / 100), (["n1", "n2"], beta / 100))
    links = [{"between": pair, "alpha": 0.0, "beta": seconds} for pair, seconds in rows]
    there = cluster(speeds=(1.0, 1.0, 1.0), per_node=2, alpha=0.0)
    there = replace(there, rates={**there.rates, "links": [*there.rates["links"], *links]})
    scorer = make_scorer(PlanningProblem(MODEL, there, SEQ, 1, SearchOptions(dtype="fp32")))
    shape = PipelineTemplate(1, tuple(StageTemplate(g, 1, 1, n) for g, n in enumerate((4, 4, 3))))
    placed = place(PlanTemplate((PipelineReplicas(shape, 2, 6),), "1f1b", "stage"), scorer.pool)
    assert placed is not None
    exact = predict(to_plan(placed, there, SEQ, MODEL.num_heads), MODEL, there, "fp32", scorer.costs)
    assert scorer.score_placed(placed).step_seconds == pytest.approx(exact.step_seconds, rel=0.01)


@pytest.mark.parametrize("slow", ["small", "large"])
def test_node_groups_of_one_chip_have_links_and_nodes_of_their_own(slow: str) -> None:
    """Nodes of two and of four equal chips, with slow links inside one kind of them: TP 4 over two small nodes is not
    as fast as inside a large one."""
    model = load_model("llama2-7b")
    there = cluster_from_dict({
        "version": 1,
        "nodes": [{"name": "small", "chip": "A100-80-SXM", "chips_per_node": 2, "count": 4},
                  {"name": "large", "chip": "A100-80-SXM", "chips_per_node": 4, "count": 2}],
        "links": {"inter_node": {"bandwidth": "5 GB/s", "latency": "20 us"}},
        "rates": {"links": [{"within": slow, "alpha": 1e-5, "beta": 1e-10}]},
    })  # fmt: skip
    scorer = make_scorer(PlanningProblem(model, there, 2048, 1))
    groups = {group.home: g for g, group in enumerate(scorer.pool.groups)}
    ways = [((home, tp, 1),) for home in groups for tp in (1, 2, 4)]
    ways += [(("small", 4, 1), ("large", 4, 1)), (("large", 1, 2), ("small", 1, 2)), (("small", 2, 2), ("small", 2, 2))]
    for way in ways:
        layers = model.num_layers // len(way)
        shape = PipelineTemplate(2, tuple(StageTemplate(groups[home], tp, dp, layers, "full") for home, tp, dp in way))
        placed = place(PlanTemplate((PipelineReplicas(shape, 1, 8),), "1f1b", "stage"), scorer.pool)
        assert placed is not None
        exact = predict(to_plan(placed, there, 2048, model.num_heads), model, there, "bf16", scorer.costs)
        assert scorer.score_placed(placed).step_seconds == pytest.approx(exact.step_seconds, rel=0.01), way


def test_what_a_tp_group_alone_adds_up_is_priced() -> None:
    """One micro-batch on one pipeline: its ranks hold next to nothing alike, yet add up all their gradients (6 %)."""
    model = load_model("llama2-7b")
    there = cluster_from_dict({
        "version": 1, "nodes": [{"name": "n", "chip": "H100-SXM", "chips_per_node": 4, "count": 2}],
        "links": {"inter_node": {"bandwidth": "25 GB/s"}},
    })  # fmt: skip
    scorer = make_scorer(PlanningProblem(model, there, 2048, 1))
    for layers in ((32,), (16, 16)):
        shape = PipelineTemplate(1, tuple(StageTemplate(0, 4, 1, n) for n in layers))
        placed = place(PlanTemplate((PipelineReplicas(shape, 1, 1),), "1f1b", "stage"), scorer.pool)
        assert placed is not None
        exact = predict(to_plan(placed, there, 2048, model.num_heads), model, there, "bf16", scorer.costs)
        assert scorer.score_placed(placed).step_seconds == pytest.approx(exact.step_seconds, rel=0.015)


@pytest.mark.parametrize("dense", [True, False])
def test_hosts_pack_sum_and_unpack(dense: bool) -> None:
    """Two replicas, by hand: half of everything is packed, all of it summed, half of it written; in a dense bucket
    only summed."""
    there = cluster(per_node=1, beta=1e-30, **HOST)
    found = plan_from_dict(plan((1, stages(11)), (1, stages(11, first_rank=1))), MODEL)
    costs = CostModel(MODEL, there, SEQ, "fp32")
    sync = GradSync(found, costs)
    (bucket,) = sync.buckets
    (((action,),),) = [sync.structure.actions(bucket, False)]
    assert bucket.dense
    if dense:
        there, back = (sync.host_seconds(action.content, bucket.dense, 4, spread) for spread in (False, True))
        before, after, packed, written = (x[0] for x in (*there, *back))
        assert before == packed == written == pytest.approx(0.02)
        assert after == pytest.approx(2.0 / 2 * 2 + 0.04, rel=0.02)
        return
    bucket.__dict__["dense"] = False
    before, after = (of_rank[0] for of_rank in sync.host_seconds(action.content, bucket.dense, 4, False))
    assert before == pytest.approx(1.5 / 2 + 0.02, rel=0.02) and after == pytest.approx(2.0 / 2 * 2 + 0.04, rel=0.02)
    before, after = (of_rank[1] for of_rank in sync.host_seconds(action.content, bucket.dense, 4, True))
    assert before == pytest.approx(1.5 / 2 + 0.02, rel=0.02) and after == pytest.approx(1.0 / 2 + 0.02, rel=0.02)
    compiled = CompiledPlan(found, MODEL)
    compiled.buckets[0].__dict__["dense"] = False
    parts = predict(found, MODEL, there, "fp32", costs, prepared=PreparedPlan(compiled)).parts
    # One micro-batch of 11 layers, 1 s forward and 2 s backward each, the first backward cheaper.
    assert parts["pipelines"] == pytest.approx(33 - 0.5, rel=1e-3)
    assert parts["gradients"] == pytest.approx(0.77 + 2.04 + 2 * 0.01, rel=0.02)
    assert parts["parameters"] == pytest.approx(0.77 + 0.52 + 0.01, rel=0.02)


def test_phases_are_told_apart() -> None:
    """The fit gives back the rates that made the rows, also where some of them were disturbed."""
    names, truth = ("pack_beta", "add_beta", "unpack_beta", "exchange_seconds"), (2e-9, 3e-9, 1e-9, 2e-4)
    moved = [
        [float(size * (column == i)) for i in range(3)] + [calls]
        for size in (1 << 20, 2 << 20, 3 << 20) for column, calls in ((0, 1.0), (1, 4.0), (2, 1.0))
    ]  # fmt: skip
    rows = [[*row, sum(n * rate for n, rate in zip(row, truth))] for row in moved] * 5
    found, spread = fit_phases(rows)
    assert [found[name] for name in names] == pytest.approx(truth, rel=1e-6) and spread < 1e-6
    disturbed = [[*row, 3 * seconds] if i % 11 == 0 else [*row, seconds] for i, (*row, seconds) in enumerate(rows)]
    found, _ = fit_phases(disturbed)
    assert [found[name] for name in names] == pytest.approx(truth, rel=0.1)
    without = [[*row, seconds - truth[3] * row[3]] for *row, seconds in rows]  # nothing fixed to be seen
    assert fit_phases(without)[0]["exchange_seconds"] == pytest.approx(0.0, abs=1e-9)


def test_chips_without_a_peak_are_weighed_by_measured_layers() -> None:
    """Graph partitioning weighs groups by this: chips measured 1 to 8 s per layer forward and twice that backward."""
    where = cluster(speeds=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0))
    scorer = make_scorer(PlanningProblem(MODEL, where, SEQ, 1, SearchOptions(dtype="fp32")))
    assert [layer_seconds(scorer, g) for g in range(8)] == pytest.approx([3 * s for s in range(1, 9)])


@pytest.mark.parametrize("name", ["exchange_seconds", "message_seconds", "step_seconds", "alpha", "beta"])
def test_a_change_of_one_rate_moves_estimate_and_prediction_alike(name: str) -> None:
    """Tripled, on pipelines side by side over unlike chips."""
    ratios = []
    for changed in (False, True):
        times = {key: 3.0 if changed and key == name else 1.0 for key in (*HOST, "alpha", "beta")}
        host = {key: times[key] * value for key, value in HOST.items()}
        link = {"beta": times["beta"] * 8 / BYTES, "alpha": times["alpha"] * 0.03}
        there = cluster(per_node=2, speeds=(1.0, 0.5, 0.3), **link, **host)
        scorer = make_scorer(PlanningProblem(MODEL, there, SEQ, 1, SearchOptions(dtype="fp32")))
        rng, rows = random.Random(5), []
        for _ in range(4):
            placed = place(random_candidate(rng, scorer.pool), scorer.pool)
            assert placed is not None
            exact = predict(to_plan(placed, there, SEQ, MODEL.num_heads), MODEL, there, "fp32", scorer.costs)
            rows.append((scorer.score_placed(placed).step_seconds, exact.step_seconds))
        ratios.append(rows)
    assert any(new[1] > old[1] for old, new in zip(*ratios, strict=True))
    for (estimate, exact), (new_estimate, new_exact) in zip(*ratios, strict=True):
        assert new_estimate / estimate == pytest.approx(new_exact / exact, rel=0.01)


def test_a_change_of_one_term_of_memory_moves_estimate_and_prediction_alike() -> None:
    """Bytes over a chip without memory, of three stages in a row."""
    shape = PipelineTemplate(1, tuple(StageTemplate(g, 1, 1, n) for g, n in ((0, 4), (1, 5), (2, 2))))
    template = PlanTemplate((PipelineReplicas(shape, 1, 4),))
    found = []
    for overhead, moments in ((0, 2), (1000, 2), (0, 1)):
        there = cluster(speeds=(1.0, 1.0, 1.0), memory="1 B", overhead_bytes=overhead)
        options = SearchOptions(dtype="fp32", costs=CostOptions(moments=moments))
        scorer = make_scorer(PlanningProblem(MODEL, there, SEQ, 4, options))
        placed = place(template, scorer.pool)
        assert placed is not None
        exact = predict(to_plan(placed, there, SEQ, MODEL.num_heads), MODEL, there, "fp32", scorer.costs)
        found.append((scorer.score_placed(placed).over, max(x.total for x in exact.memory.values())))
    (estimate, exact), *changed = found
    for new_estimate, new_exact in changed:
        assert new_exact != exact and new_estimate - estimate == new_exact - exact
