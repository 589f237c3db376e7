"""The search against exhaustive search, its bound, its timing against the simulator, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.cluster import cluster_from_dict, load_cluster
from hetero_megatron.cluster.dump import document
from hetero_megatron.cluster.subset import shrink, with_more, without
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.lower_bounds import work_bound
from hetero_megatron.planner.estimate.pipeline_time import (
    Link,
    _bisect,
    closed_form,
    closed_forms,
    count_splits,
    seconds,
    splits,
)
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.report.comparison import Comparisons, summarize
from hetero_megatron.planner.report.text import summary_json
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.incumbent import simulate_best
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
)
from hetero_megatron.plans import plan_from_dict, to_dict, validate
from hetero_megatron.schedule import Costs, generate, lower, simulate
from hetero_megatron.spec import load_model
from tests.support.planner_reference import Case, Exhaustive, random_case, unequal_directions
from tests.support.selection import quick

SLOW = (0, 26, 5, 7, 9, 11, 12, 16, 17, 19, 23)  # seconds to a minute of exhaustive search each
TIMES = st.floats(0.01, 10)
LINK = st.tuples(st.floats(0, 5), st.floats(0, 5))  # there and back
LINKS = {
    "intra_node": {"bandwidth": "100 GB/s", "latency": "5 us"},
    "inter_node": {"bandwidth": "25 GB/s", "latency": "10 us"},
}


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(TIMES, TIMES, LINK), min_size=1, max_size=6), st.integers(1, 14),
)  # fmt: skip
def test_timing_is_the_simulators(rows: list[tuple[float, float, Link]], m: int) -> None:
    f, b, x = (list(column) for column in zip(*rows))
    x = x[:-1]
    there, back = ([link[i] for link in x] for i in (0, 1))
    exact = simulate(lower(generate("1f1b", len(f), m)), Costs(f, b, there, link_back=back)).step_seconds
    assert seconds(f, b, x, m) == pytest.approx(exact, rel=1e-12)
    assert closed_form(f, b, x, m, "any") <= closed_form(f, b, x, m) <= exact * (1 + 1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_layers_are_split_exactly(stages: int, m: int, seed: int) -> None:
    """Bisection with its dynamic program against listing all splits."""
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(stages, 11))
    rows = []
    for _ in range(stages):
        row = rng.random() * 0.2 + (rng.random() + 0.1) * np.arange(layers + 1)
        row[rng.integers(layers // 2, layers + 2) :] = np.inf
        rows.append(row)
    links = [(float(a), float(b)) for a, b in rng.random((stages - 1, 2)) * 0.1]
    ways, found = splits(layers, stages), _bisect(rows, links, m)
    assert len(ways) == count_splits(layers, stages)
    times = np.stack([row[ways[:, s]] for s, row in enumerate(rows)], axis=1)
    least = closed_forms(times, links, m, "any").min(initial=math.inf)
    assert math.isinf(least) == (found is None)
    if found is not None:
        assert sum(found[1]) == layers
        assert found[0] <= least * (1 + 2e-4)


def _search(case: Case, **options: object) -> tuple[float, float]:
    """(step seconds of the plan by the scorer, bound by the work); inf where nothing fits."""
    space = SearchSpace((case.size,) if case.size else None, case.recompute, offload="never", more_schedules="never")
    scorer = make_scorer(PlanningProblem(case.model, case.cluster, case.seq_length, 1))
    try:
        result = search(
            PlanningProblem(
                case.model, case.cluster, case.seq_length, case.batch, SearchOptions(space=space, **options)
            ),
            scorer=scorer,
        )
    except UserError:
        return math.inf, 0.0
    for choice in (result.best, *result.others):
        validate(choice.plan, case.model, choice.cluster, dtype="bf16")
        assert not choice.prediction.over
    best = min(scorer.score(c.template).step_seconds for c in (result.best, *result.others))  # type: ignore[union-attr]
    return best, work_bound(scorer, case.model, case.batch)


@pytest.mark.parametrize("seed", quick([i for i in range(30) if i not in SLOW], (1, 3, 8, 18, 22, 29), (13, 24)))
def test_as_good_as_exhaustive_search(seed: int) -> None:
    """A sample; benchmarks/bench_planner_optimal.py runs hundreds."""
    case = random_case(100 + seed, "open")
    mine, bound = _search(case)
    scorer = make_scorer(PlanningProblem(case.model, case.cluster, case.seq_length, 1))
    best = Exhaustive(case, scorer, mine if math.isfinite(mine) else math.inf).run()
    if math.isfinite(mine):
        assert mine <= 1.01 * best
        assert bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", quick([6, 7, 10, 25, 28, 37, 38], (6,), (10, 28)))
def test_links_of_unequal_directions(seed: int) -> None:
    """As good as exhaustive search, and the bound holds by prediction, which knows nothing of the search's prices."""
    case = unequal_directions(random_case(100 + seed, "open"), seed)
    mine, bound = _search(case)
    scorer = make_scorer(PlanningProblem(case.model, case.cluster, case.seq_length, 1))
    reference = Exhaustive(case, scorer, mine * 1.01)
    best = reference.run()
    if math.isfinite(mine):
        assert mine <= 1.01 * best and bound <= best * (1 + 1e-9)
    if reference.found is not None:
        row = [(best, 0, reference.found)]
        problem = PlanningProblem(case.model, case.cluster, case.seq_length, case.batch)
        (choice,) = simulate_best(row, problem, scorer)
        assert choice.step_seconds == pytest.approx(best, rel=0.01)
        assert bound <= choice.step_seconds * 1.001


@pytest.mark.parametrize("seed", [1, 2, 7])
def test_least_after_a_pipeline_is_never_too_much(seed: int) -> None:
    """The reference skips plans by it, so it is checked against the evaluation of plans of one and two pipelines."""
    case = random_case(seed, "open")
    scorer = make_scorer(PlanningProblem(case.model, case.cluster, case.seq_length, 1))
    kinds = [StageTemplate(g, 1, 1) for g, n in enumerate(scorer.pool.counts) for _ in range(n)]
    half = case.model.num_layers // 2
    shapes = [(replace(a, layers=half), replace(b, layers=case.model.num_layers - half)) for a in kinds for b in kinds]
    shapes += [(replace(a, layers=case.model.num_layers),) for a in kinds]
    checked = 0
    for first, second in itertools.combinations_with_replacement(shapes, 2):
        for stages in ((first,), (first, second)):
            parts = tuple(PipelineReplicas(PipelineTemplate(1, s), 1, 2) for s in stages)
            score = scorer.score(PlanTemplate(parts))
            if score is None:
                continue
            for part, seconds_ in zip(parts, score.pipelines, strict=True):
                links = [(0.0, 0.0)] * (len(part.shape.stages) - 1)
                after = scorer.bounds.sync_tail(part.shape, links, len(parts))
                assert seconds_ + after <= score.step_seconds * (1 + 1e-9)
                checked += 1
    assert checked > 5


def _mixed() -> dict[str, object]:
    return {
        "nodes": [
            {"name": "ampere", "count": 1, "chip": "A100-80-SXM", "chips_per_node": 4},
            {"name": "ada", "count": 2, "chip": "L40S", "chips_per_node": 2},
        ],
        "links": LINKS,
    }


@pytest.mark.slow
def test_programs_search_a_larger_cluster_deterministically() -> None:
    cluster, model = cluster_from_dict(_mixed()), dataclasses.replace(load_model("llama2-7b"), num_layers=10)
    options = SearchOptions(space=SearchSpace(more_schedules="never"))
    a, b = (search(PlanningProblem(model, cluster, 2048, 32, options)) for _ in range(2))
    assert a.method == "programs"
    assert a.best.plan.fingerprint() == b.best.plan.fingerprint()
    again = plan_from_dict(to_dict(a.best.plan), model, a.best.cluster, "bf16")
    assert again.fingerprint() == a.best.plan.fingerprint()
    asked = Comparisons(every=True)
    summary = summarize(a, PlanningProblem(model, cluster, 2048, 32, options), asked)
    assert summary.uniform is not None
    assert summary.uniform.step_seconds >= a.best.step_seconds * (1 - 1e-9)
    assert summary.bound is not None
    assert summary.bound.seconds <= a.best.step_seconds
    assert [b.name for b in summary.alone] == ["A100-80-SXM", "L40S"]
    assert summary.speedup_ratio is not None
    assert summary_json(summary)["idle_ranks"] == list(a.best.idle)


@pytest.mark.slow
def test_no_slower_than_the_best_type_alone() -> None:
    """Under an adaptive schedule, 24 RTX 4090 alone beat what is best under 1F1B on all 40 chips of three types."""
    model, cluster = load_model("llama2-13b"), load_cluster("examples/clusters/papers/hexiscale_1.yaml")
    alone = without(cluster, [g.name for g in cluster.nodes if g.chip != "RTX4090"])
    whole, part = (search(PlanningProblem(model, c, 4096, 256)).best.step_seconds for c in (cluster, alone))
    assert whole <= part * (1 + 1e-9)


@pytest.mark.slow
def test_equal_nodes_are_interchangeable() -> None:
    """Names and the order of equal nodes change nothing."""
    model = dataclasses.replace(load_model("llama2-7b"), num_layers=6)
    one = _mixed()
    other = _mixed()
    other["nodes"] = [
        {"name": "x", "count": 1, "chip": "L40S", "chips_per_node": 2},
        {"name": "y", "count": 1, "chip": "A100-80-SXM", "chips_per_node": 4},
        {"name": "z", "count": 1, "chip": "L40S", "chips_per_node": 2},
    ]
    times = [
        search(
            PlanningProblem(model, cluster_from_dict(c), 2048, 16, SearchOptions())
        ).best.step_seconds
        for c in (one, other)
    ]
    assert times[0] == pytest.approx(times[1], rel=0.02)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch_size": 0}, "--global-batch-size = 0"),
        ({"seq_length": 5000}, "1 to 4096"),
        ({"space": SearchSpace(micro_batch_sizes=(4,)), "global_batch_size": 10}, "8 or 12"),
        (
            {"model": "llama2-70b", "space": SearchSpace(offload="never")},
            "1.129 TiB of states, and all chips together have",
        ),
        pytest.param(
            {"model": "gpt3-175b", "space": SearchSpace(weights="never")},
            "(the optimizer in host memory): 975.7 GiB of states, and all chips",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"model": "gpt3-175b", "space": SearchSpace(weights="never")}, "more node", marks=pytest.mark.exhaustive
        ),
        ({"dtype": "fp64", "chips": {"A100-80-SXM": {"dtypes": ["bf16"]}}}, "no chip of the cluster computes in fp64"),
    ],
)
def test_refusals_name_the_smallest_change(change: dict[str, object], words: str) -> None:
    cluster = cluster_from_dict({**_mixed(), "chips": change.get("chips", {})})
    model = load_model(str(change.get("model", "llama2-7b")))
    options = SearchOptions(space=change.get("space", SearchSpace()), dtype=str(change.get("dtype", "bf16")))  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        search(
            PlanningProblem(
                model, cluster, int(change.get("seq_length", 2048)), int(change.get("global_batch_size", 16)), options
            )
        )  # type: ignore[call-overload]
    assert words in str(caught.value)


def test_links_without_values_are_refused() -> None:
    cluster = cluster_from_dict({"nodes": [{"name": "a", "count": 2, "chip": "A100-80-SXM"}]})
    with pytest.raises(UserError, match=r"links\.inter_node"):
        search(PlanningProblem(load_model("llama2-7b"), cluster, 2048, 16))


def test_what_if() -> None:
    cluster = cluster_from_dict(_mixed())
    fewer = without(cluster, ["ada-1"])
    assert fewer.world_size == 6
    assert {r.node for r in fewer.ranks} == {"ampere", "ada-0"}
    assert with_more(cluster, "2xada").world_size == 12
    assert with_more(cluster, "1xH100-node").world_size == 16
    assert with_more(cluster, "3xA100-80-SXM").world_size == 20
    for bad in ("ada", "0xada", "2xNothing"):
        with pytest.raises(UserError):
            with_more(cluster, bad)
    with pytest.raises(UserError, match="no chip is left"):
        without(cluster, ["ampere", "ada"])
    with pytest.raises(UserError, match="did you mean"):
        without(cluster, ["ad"])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
def test_shrunk_clusters_keep_chips_nodes_and_links(keep: list[int]) -> None:
    data = _mixed()
    data["links"] = {
        **LINKS,
        "pairs": [
            {"between": ["ampere", "ada"], "bandwidth": "7 GB/s"},
            {"between": ["ada", "ada"], "bandwidth": "3 GB/s"},
        ],
    }
    cluster = cluster_from_dict(data)
    small = cluster_from_dict(document(shrink(cluster, sorted(keep))))
    old = sorted(keep)
    assert [r.chip for r in small.ranks] == [cluster.ranks[r].chip for r in old]
    assert [r.node for r in small.ranks] == [cluster.ranks[r].node for r in old]
    for i, a in enumerate(old):
        for j, b in enumerate(old):
            if i != j:
                assert small.link(i, j) == cluster.link(a, b)


def test_planning_again_after_a_loss() -> None:
    """Any one node may go; the new plan is for the chips that are left and computes the same batch."""
    from hetero_megatron.planner.whatif.replan import WarmPlanner

    cluster, model = cluster_from_dict(_mixed()), load_model("llama2-7b")
    options = SearchOptions(top=3, space=SearchSpace(more_schedules="never"))
    planner = WarmPlanner(PlanningProblem(model, cluster, 2048, 32, options))
    for node in ("ada-0", "ada-1"):
        plan, own, step = planner.without([node])
        validate(plan, model, own, dtype="bf16")
        assert plan.global_batch_size == 32
        assert node not in {own.ranks[r].node for r in plan.ranks}
        assert step >= planner.result.best.step_seconds * 0.99
    plan, _, step = planner.without(["ada-1"])
    planner.prepare()
    again, _, prepared = planner.without(["ada-1"])
    assert (again.fingerprint(), prepared) == (plan.fingerprint(), step)
    with pytest.raises(UserError, match="no such node"):
        planner.without(["nothing"])


def test_export() -> None:
    """FlagScale's flags read back give the same stages; Sailor's dictionary names all chips."""
    import json

    from hetero_megatron.cli.flags.parse import parse
    from hetero_megatron.plans.export import flagscale, sailor

    cluster = cluster_from_dict(
        {
            "nodes": [
                {"name": "a", "count": 2, "chip": "A100-80-SXM", "chips_per_node": 2},
                {"name": "b", "count": 2, "chip": "L40S", "chips_per_node": 2},
            ],
            "links": LINKS,
        }
    )
    model = dataclasses.replace(load_model("llama2-7b"), num_layers=8)
    stages = [
        {"ranks": "0-1", "layers": [0, 5], "tp": 2, "chip": "A100-80-SXM"},
        {"ranks": 4, "layers": [5, 8], "chip": "L40S"},
    ]
    other = [
        {"ranks": "2-3", "layers": [0, 5], "tp": 2, "chip": "A100-80-SXM"},
        {"ranks": 5, "layers": [5, 8], "chip": "L40S"},
    ]
    pipelines = [{"micro_batch_size": 1, "num_micro_batches": 4, "stages": s} for s in (stages, other)]
    plan = plan_from_dict({"seq_length": 64, "global_batch_size": 8, "pipelines": pipelines}, model, cluster)
    words = flagscale(plan, cluster).split()
    args = parse(words)
    assert list(args["hetero_process_meshes"]) == [2, 1, 1, 2, 1, 1, 1, 1, 2, 1]
    assert list(args["hetero_pipeline_layer_split"]) == [5, 3]
    data = json.loads(sailor(plan, cluster))
    assert data["used_gpus"] == {"A100-80": 4, "L40S": 2}
    assert data["pipeline_list"][0]["dp"] == [2, 2]
    assert sum(map(len, data["pipeline_list"][0]["layers_per_stage"])) == model.num_layers + 2
    pipelines[1]["num_micro_batches"] = 2
    uneven = plan_from_dict({"seq_length": 64, "global_batch_size": 6, "pipelines": pipelines}, model, cluster)
    for export in (flagscale, sailor):
        with pytest.raises(UserError, match="one share of the batch"):
            export(uneven, cluster)


def test_objectives() -> None:
    from hetero_megatron.planner.whatif.objective import Deadline, search_objective

    data = _mixed()
    model = dataclasses.replace(load_model("llama2-7b"), num_layers=4)
    with pytest.raises(UserError, match="cost_per_hour"):
        search_objective(PlanningProblem(model, cluster_from_dict(data), 1024, 8))
    data["nodes"] = [
        {"name": "ampere", "count": 1, "chip": "A100-80-SXM", "chips_per_node": 1},
        {"name": "ada", "count": 1, "chip": "L40S", "chips_per_node": 1},
    ]
    data["chips"] = {"A100-80-SXM": {"cost_per_hour": 100.0}, "L40S": {"cost_per_hour": 1.0}}
    cluster = cluster_from_dict(data)
    fast = search(PlanningProblem(model, cluster, 1024, 8)).best
    cheap = search_objective(PlanningProblem(model, cluster, 1024, 8)).best
    assert cheap.tokens_per_cost > fast.tokens_per_cost
    assert cheap.cost_per_hour == 1.0
    speed = fast.prediction.tokens_per_second
    due = search_objective(PlanningProblem(model, cluster, 1024, 8), Deadline(speed * 3600 * 0.99, 1.0)).best
    assert due.prediction.tokens_per_second >= 0.99 * speed
    with pytest.raises(UserError, match="no plan found is that fast"):
        search_objective(PlanningProblem(model, cluster, 1024, 8), Deadline(speed * 7200, 1.0))


def test_command(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    import json
    from pathlib import Path

    import yaml

    from hetero_megatron.cli.main import main
    from hetero_megatron.plans import load_plan

    folder = Path(str(tmp_path))
    data = _mixed()
    data["nodes"][1]["count"] = 1  # type: ignore[index]
    data["nodes"][0]["chips_per_node"] = 2  # type: ignore[index]
    (folder / "c.yaml").write_text(yaml.safe_dump(data))
    words = ["plan", "--model", "llama2-7b", "--cluster", str(folder / "c.yaml"), "--seq-length", "1024"]
    words += ["--global-batch-size", "16", "--more-schedules", "never", "--quiet"]
    words += ["--out", str(folder / "p.yaml"), "--html", str(folder / "p.html")]
    assert main([*words, "--json", "--no-baselines"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bound"]["step_seconds"] <= report["step_seconds"]
    model = load_model("llama2-7b")
    cluster = cluster_from_dict(data)
    if not (folder / "p.yaml.cluster.yaml").exists():
        assert load_plan(folder / "p.yaml", model, cluster, "bf16").fingerprint() == report["fingerprint"]
    assert "best plan" in (folder / "p.html").read_text()
    assert main([*words, "--without", "nobody"]) == 2
    assert "no such node" in capsys.readouterr().err
    assert main([*words[:-4], "--objective", "deadline"]) == 2
    assert "--deadline-hours" in capsys.readouterr().err


def test_auto_plan(tmp_path: object) -> None:
    """pretrain_gpt.py's flags -> the plan that the search finds, the same on every rank."""
    from pathlib import Path

    import yaml

    from hetero_megatron.cli.configure import configure

    file = Path(str(tmp_path)) / "c.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "nodes": [{"name": "fast", "chip": "big"}, {"name": "slow", "chip": "small"}],
                "chips": {
                    "big": {"memory": "2 GiB", "emulate": {"speed": 0.6}},
                    "small": {"memory": "2 GiB", "emulate": {"speed": 0.3}},
                },
                "links": {"inter_node": {"bandwidth": "500 MB/s", "latency": "100 us"}},
            }
        )
    )
    words = "--model tiny --mock-data --train-iters 1 --seq-length 128 --global-batch-size 12 --lr 1e-3 --auto-plan"
    plans = [
        configure([*words.split(), "--cluster", str(file), "--dry-run"], {"RANK": rank}).plan for rank in ("0", "1")
    ]
    assert plans[0].fingerprint() == plans[1].fingerprint()
    assert plans[0].global_batch_size == 12
    shares = [p.batch_size for p in plans[0].pipelines]
    assert len(shares) < 2 or max(shares) > min(shares), "the fast chip gets more"


@pytest.mark.slow
def test_many_unlike_groups_are_cut_along_slow_links() -> None:
    """Eight kinds of nodes in two sites: pipelines stay inside a site."""
    chips = ["A100-80-SXM", "H100-SXM", "L40S", "MI300X", "A100-40-SXM", "H200-SXM", "Gaudi2", "A800-80-SXM"]
    names = [f"n{i}" for i in range(8)]
    slow = [
        {"between": [a, b], "bandwidth": "1 GB/s"}
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if i < 4 <= names.index(b)
    ]
    data = {
        "nodes": [{"name": n, "chip": c, "chips_per_node": 2} for n, c in zip(names, chips)],
        "links": {**LINKS, "pairs": slow},
    }
    model = dataclasses.replace(load_model("llama2-7b"), num_layers=8)
    options = SearchOptions(space=SearchSpace(more_schedules="never"))
    result = search(PlanningProblem(model, cluster_from_dict(data), 1024, 32, options))
    assert result.method == "islands"
    for pipeline in result.best.plan.pipelines:
        nodes = {int(result.best.cluster.ranks[r].node[1:]) for r in pipeline.ranks}
        assert max(nodes) < 4 or min(nodes) >= 4


@pytest.mark.slow
def test_more_nodes_are_never_slower() -> None:
    """Where gradients cross slow links, many pipelines reduce longer than they compute; the programs that propose
    pipelines know it."""
    model, options = load_model("llama2-13b"), SearchOptions(space=SearchSpace(more_schedules="never"))
    seconds = []
    for count in (16, 24, 32, 48, 64):
        nodes = [{"name": "a", "count": count, "chip": "A100-80-SXM", "chips_per_node": 8}]
        links = {"inter_node": {"bandwidth": "25 GB/s", "latency": "10 us"}}
        cluster = cluster_from_dict({"nodes": nodes, "links": links})
        seconds.append(search(PlanningProblem(model, cluster, 2048, 256, options)).best.step_seconds)
    assert seconds == sorted(seconds, reverse=True)
