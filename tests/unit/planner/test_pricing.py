"""The search ranks by the times that the prediction judges by; what an exchange costs its hosts."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from hetero_megatron.calibration.exchange import fit_phases
from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.search.graph_partition import layer_seconds
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
    place,
    to_plan,
)
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.memory.uniform_stages import UniformStageMemory
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.rates import NUMBERS
from hetero_megatron.predictor.simulate.grad_sync import GradSync
from hetero_megatron.predictor.simulate.stage_cost import PreparedPlan
from hetero_megatron.predictor.simulate.step import StepSimulator, predict
from hetero_megatron.spec import Lora, ModelSpec, adapted, load_model
from hetero_megatron.spec.flops import parameter_count
from hetero_megatron.spec.lora import all_linear
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
    assert sum(errors) / len(errors) < 0.0005 and max(errors) < 0.002


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


# What a step's seconds depend on, each so that it is a part of them that can be seen; all at once by other names below.
CHIP = {
    "gemm_flops": 1e8, "attention_flops": 3e7, "bytes_per_second": 2e8, "gemm_half": 30.0, "layer_seconds": 0.02,
    "layer_backward_seconds": 0.05, "action_seconds": 0.02, "message_seconds": 0.01, "step_seconds": 0.1,
    "pack_beta": 1.5 / BYTES, "add_beta": 2.0 / BYTES, "unpack_beta": 1.0 / BYTES, "exchange_seconds": 0.02,
    "accumulate_beta": 0.5 / BYTES, "score_seconds": 1e-7, "gradient_speed": 0.9,
}  # fmt: skip
LINK = {"alpha": 0.03, "beta": 8 / BYTES, "message_seconds": 0.02}
COLLECTIVES = {"all_to_all": (0.05, 12 / BYTES), "exchange": (0.04, 9 / BYTES)}
HOSTS = {"host_bandwidth": 1e7, "host_memory_bandwidth": 5e7}
# Added to a chosen plan; of schedules that split backwards, which are simulated; a term of memory, below.
ELSEWHERE = {"jitter", "split_seconds", "overhead_bytes"}


def _slower(name: str, times: float, bare: bool) -> tuple[Cluster, CostOptions]:
    """Two nodes of two chips each of three kinds, where one rate is so many times as high. ``bare``: of a kind of chip
    whose layers take as long as their launches, and with links on which nothing of the hosts was measured."""
    where, _, key = name.rpartition(".")

    def value(group: str, rate: str, known: float) -> float:
        return known * times if (where, key) == (group, rate) else known

    chip = {rate: value("", rate, known) for rate, known in CHIP.items()}
    if bare:
        chip |= {"layer_seconds": value("", "layer_seconds", 0.4), "gemm_flops": value("", "gemm_flops", 1e9)}
        chip["layer_backward_seconds"] = value("", "layer_backward_seconds", 0.9)
    chips = {}
    for i, speed in enumerate((1.0, 2.0, 3.0)):
        rates = {**chip, **{k: speed * chip[k] for k in ("gemm_flops", "attention_flops", "bytes_per_second")}}
        chips[f"c{i}"] = {"memory": "64 GiB", "dtypes": ["fp32"], "rates": {"fp32": rates},
                          "communicators": {"each": "1 B", "peer": "1 B"}}  # fmt: skip
    of_links = {rate: known for rate, known in LINK.items() if not bare or rate != "message_seconds"}
    link: dict[str, Any] = {rate: value("link", rate, known) for rate, known in of_links.items()}
    link["collectives"] = {
        kind: {rate: value(kind, rate, x) for rate, x in zip(("alpha", "beta"), pair, strict=True)}
        for kind, pair in COLLECTIVES.items()
    }
    names = ["n0", "n1", "n2"]
    links = [{"within": a, **link} for a in names] + [{"between": [a, b], **link} for a in names for b in names]
    nodes = [{"name": n, "count": 2, "chip": f"c{i}", "chips_per_node": 2} for i, n in enumerate(names)]
    there = cluster_from_dict({"nodes": nodes, "chips": chips, "rates": {"links": links}})
    return there, CostOptions(**{rate: value("options", rate, known) for rate, known in HOSTS.items()})


def _templates() -> list[PlanTemplate]:
    """Two equal pipelines, two unlike ones, TP groups, and inner replicas beside an offloaded optimizer."""
    def made(*parts: tuple[int, int, int, tuple[StageTemplate, ...]], order: str = "stage") -> PlanTemplate:
        return PlanTemplate(
            tuple(PipelineReplicas(PipelineTemplate(size, s), copies, m) for size, copies, m, s in parts), "1f1b", order
        )

    row = (StageTemplate(0, 1, 1, 2), StageTemplate(1, 1, 1, 5, "full"), StageTemplate(2, 1, 1, 4, "selective"))
    groups = (StageTemplate(0, 2, 1, 4, "first", 2), StageTemplate(2, 2, 1, 7))
    inner = (StageTemplate(1, 1, 2, 5), StageTemplate(2, 1, 2, 6, offload=True))
    return [
        made((1, 2, 4, row)),
        made((1, 1, 3, row), (1, 1, 2, (StageTemplate(1, 1, 1, 11),)), order="pipeline"),
        made((1, 2, 2, groups)),
        made((2, 1, 3, inner), (1, 1, 2, (StageTemplate(0, 1, 1, 11, offload=True),))),
    ]


def _both(there: Cluster, options: CostOptions) -> list[tuple[float, float]]:
    """(seconds of the estimate, of the simulation) of each template."""
    scorer = make_scorer(PlanningProblem(MODEL, there, SEQ, 2, SearchOptions(dtype="fp32", costs=options)))
    found = []
    for template in _templates():
        placed = place(template, scorer.pool)
        assert placed is not None
        exact = StepSimulator(to_plan(placed, there, SEQ, MODEL.num_heads), scorer.costs).times.end
        found.append((scorer.score_placed(placed).step_seconds, exact))
    return found


def test_a_change_of_any_rate_moves_estimate_and_prediction_alike() -> None:
    """Each tripled, by itself. A rate that is added to the table of rates has to be added here."""
    assert set(NUMBERS) == {*CHIP, *ELSEWHERE}
    names = [*(f".{k}" for k in CHIP), *(f"link.{k}" for k in LINK), *(f"options.{k}" for k in HOSTS)]
    names += [f"{kind}.{rate}" for kind in COLLECTIVES for rate in ("alpha", "beta")]
    before = {bare: _both(*_slower("", 1.0, bare)) for bare in (False, True)}
    assert all(estimate == pytest.approx(exact, rel=1e-3) for rows in before.values() for estimate, exact in rows)
    for name in names:
        bare = name in (".layer_seconds", ".layer_backward_seconds", ".message_seconds")
        pairs = [*zip(before[bare], _both(*_slower(name, 3.0, bare)), strict=True)]
        assert any(abs(new[1] / old[1] - 1) > 2e-3 for old, new in pairs), f"{name} does not matter"
        for old, new in pairs:
            assert new[0] / old[0] == pytest.approx(new[1] / old[1], rel=3e-3), name


def test_parameters_that_come_beside_the_next_forward() -> None:
    """Estimated as they are simulated, and never later than where the step waits for them."""
    there, options = _slower("", 1.0, False)
    waiting, beside = (_both(there, replace(options, gather_ahead=ahead)) for ahead in (False, True))
    assert all(estimate == pytest.approx(exact, rel=2e-3) for estimate, exact in beside)
    saved = [before[1] - after[1] for before, after in zip(waiting, beside, strict=True)]
    assert min(saved) >= 0 and saved[0] > 1.0 and saved[2] == 0.0  # of TP groups, parameters are unpacked


def _bytes_over(
    model: ModelSpec = MODEL, seq: int = SEQ, dtype: str = "fp32", recompute: str = "", overhead: int = 0,
    communicators: tuple[str, str] = ("1 B", "1 B"), **options: int,
) -> list[tuple[int, int]]:  # fmt: skip
    """(of the estimate, of the simulation) of the templates whose stages have the same holders from end to end."""
    rates = {"gemm_flops": 1e12, "attention_flops": 1e12, "bytes_per_second": 1e11, "overhead_bytes": overhead}
    chip = {"memory": "1 B", "dtypes": ["fp32", "bf16"], "rates": {"fp32": rates, "bf16": rates},
            "communicators": dict(zip(("each", "peer"), communicators, strict=True))}  # fmt: skip
    there = cluster_from_dict({
        "nodes": [{"name": f"n{i}", "count": 2, "chip": f"c{i}", "chips_per_node": 2} for i in range(3)],
        "chips": {f"c{i}": chip for i in range(3)},
        "links": {"inter_node": {"bandwidth": "10 GB/s"}, "intra_node": {"bandwidth": "100 GB/s"}},
    })  # fmt: skip
    problem = PlanningProblem(model, there, seq, 2, SearchOptions(dtype=dtype, costs=CostOptions(**options)))
    scorer, found = make_scorer(problem), []
    for template in (_templates()[i] for i in (0, 3)):
        if recompute:
            parts = template.parts
            shapes = [[replace(s, recompute=recompute, first=0) for s in part.shape.stages] for part in parts]
            template = replace(template, parts=tuple(
                replace(part, shape=replace(part.shape, stages=tuple(stages)))
                for part, stages in zip(parts, shapes, strict=True)
            ))  # fmt: skip
        placed = place(template, scorer.pool)
        assert placed is not None
        exact = StepSimulator(to_plan(placed, there, seq, model.num_heads), scorer.costs)
        most = max(exact.memory[rank].total - exact.limits[rank] for rank in exact.memory)
        found.append((scorer.score_placed(placed).over, most))
    return found


def test_every_term_of_memory_is_the_same_in_estimate_and_prediction() -> None:
    """To the byte, over a chip without memory, and each term moves it."""
    adapters = {kind: adapted(MODEL, Lora(8, 8.0, all_linear(MODEL.gated), base_dtype=kind)) for kind in (None, "int8")}
    terms: dict[str, dict[str, Any]] = {
        "overhead": {"overhead": 1000}, "moments": {"moments": 1}, "activations": {"seq": 2 * SEQ},
        "weights and gradients": {"dtype": "bf16"}, "communicators": {"communicators": ("1 MiB", "1 B")},
        "peers of communicators": {"communicators": ("1 B", "1 MiB")}, "none": {"recompute": "none"},
        "selective": {"recompute": "selective"}, "adapters": {"model": adapters[None]},
        "adapters, int8 base": {"model": adapters["int8"]},
    }  # fmt: skip
    before = _bytes_over()
    for name, changes in terms.items():
        after = _bytes_over(**changes)
        assert after != before, f"{name} does not matter"
        assert all(estimate == exact for estimate, exact in after), name


def test_stages_that_train_nothing_have_states_too() -> None:
    """Beside adapters an embedding or a head alone, under every optimizer."""
    for base_dtype in (None, "int8"):
        spec = adapted(MODEL, Lora(8, 8.0, all_linear(MODEL.gated), base_dtype=base_dtype))
        for muon, moments, tp, layers in itertools.product((False, True), (1, 2), (1, 2), (0, 1, 2)):
            memory = UniformStageMemory(spec, 2, moments, muon=muon)
            for ends in itertools.product((False, True), repeat=2):
                trained = memory.trained(tp, layers, *ends)
                assert (trained == 0) == (layers == 0)
                weights, grads, states = memory.states(tp, layers, *ends, trained)
                assert min(weights, grads, states) >= 0 and (states == 0) == (trained == 0)
