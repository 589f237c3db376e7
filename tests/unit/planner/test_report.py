"""The planner's report: plans that do not fit, plans for the loss of a node, and a bound that stops in time."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_megatron.cli.main import main
from hetero_megatron.cli.run_plans import configured, planner_for
from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.cluster.edit import without_nodes
from hetero_megatron.errors import UserError
from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace, TimeBudget
from hetero_megatron.planner.report.comparison import Comparisons, Summary, summarize
from hetero_megatron.planner.report.text import format_summary, summary_json
from hetero_megatron.planner.search.driver import SearchResult, search, search_types_alone
from hetero_megatron.planner.search.uniform import closed_seconds, uniform_plans
from hetero_megatron.planner.whatif.replan import WarmPlanner
from hetero_megatron.plans import Plan, load_plan, validate
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.predictor.simulate.step import Prediction, predict
from hetero_megatron.spec import load_model
from hetero_megatron.utils.text import format_bytes

MODEL, LENGTH, BATCH = load_model("llama2-7b"), 2048, 32
DATA: dict[str, Any] = {
    "version": 1,
    "nodes": [
        {"name": "ampere", "chip": "A100-80-SXM", "chips_per_node": 4},
        {"name": "ada", "count": 2, "chip": "L4", "chips_per_node": 2},
    ],
    "links": {"inter_node": {"bandwidth": "25 GB/s", "latency": "10 us"}},
}
OPTIONS = SearchOptions(top=3, space=SearchSpace(offload="never", more_schedules="never"))
PROBLEM = PlanningProblem(MODEL, cluster_from_dict(DATA), LENGTH, BATCH, OPTIONS)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return cluster_from_dict(DATA)


@pytest.fixture(scope="module")
def found(cluster: Cluster) -> SearchResult:
    """Of the whole cluster; read only."""
    return search(PROBLEM.on(cluster))


@pytest.fixture
def result(found: SearchResult) -> SearchResult:
    """The same for a test that adds to it."""
    return replace(found, alone=dict(found.alone))


@pytest.fixture(scope="module")
def summary(found: SearchResult, cluster: Cluster) -> Summary:
    return summarize(replace(found, alone=dict(found.alone)), PROBLEM.on(cluster), Comparisons(every=True))


@pytest.mark.slow
def test_rejected_plans_name_the_rank_and_the_bytes(summary: Summary, cluster: Cluster) -> None:
    """As the prediction of the plan that Megatron's flags give has them; all uniform plans are gone through here."""
    rows = list(uniform_plans(summary.result.pool, MODEL, BATCH))
    plans = {u.text(): from_megatron(u.flags(LENGTH, BATCH), MODEL) for u, _ in rows}
    over = {text: predict(plan, MODEL, cluster).over for text, plan in plans.items()}
    scorer = summary.result.scorer
    seconds = {u.text(): closed_seconds(scorer, candidate) for u, candidate in rows if over[u.text()]}
    text, report = format_summary(summary), summary_json(summary)["over_memory"]
    mine = [r for r in summary.rejected if not r.of]
    assert 1 <= len(mine) <= 3 and mine[0].step_seconds == min(seconds.values())
    for r in mine:
        assert (r.worst, r.step_seconds) == (over[r.text][0], seconds[r.text])
        where = next(
            f"pipeline {p}, stage {s}" for p, pipeline in enumerate(plans[r.text].pipelines)
            for s, stage in enumerate(pipeline.stages) if r.worst.rank in stage.ranks
        )  # fmt: skip
        assert f"{where}: rank {r.worst.rank} ({r.worst.chip}) needs" in text
        assert f"over by {format_bytes(r.worst.over)}" in text and r.worst.over > 0
    assert [(x["rank"], x["over"], x["need"] - x["limit"]) for x in report] == [
        (r.worst.rank, r.worst.over, r.worst.over) for r in summary.rejected
    ]


@pytest.mark.slow
def test_a_type_that_cannot_train_the_model_alone_says_what_it_lacks(summary: Summary) -> None:
    """Four L4 of 24 GiB, for 7B parameters with their optimizer: no division of them is enough."""
    alone = [r for r in summary.rejected if r.of]
    assert [b.name for b in summary.alone if b.problem] == ["L4"] == [r.of for r in alone]
    part = cluster_from_dict({**DATA, "nodes": DATA["nodes"][1:]})
    least = math.inf
    for uniform, _ in uniform_plans(make_scorer(PlanningProblem(MODEL, part, LENGTH, 1, OPTIONS)).pool, MODEL, BATCH):
        found = predict(from_megatron(uniform.flags(LENGTH, BATCH), MODEL), MODEL, part).over
        assert found
        least = min(least, found[0].over)
    assert alone[0].worst.over == pytest.approx(least, rel=0.02) and alone[0].worst.chip == "L4"
    assert f"L4 alone: {alone[0].text}" in format_summary(summary)


@pytest.mark.slow
def test_plans_for_the_loss_of_any_node(cluster: Cluster, found: SearchResult) -> None:
    """One per group of the file; it is a plan also where another node of the group is gone."""
    planner = WarmPlanner(PROBLEM.on(cluster), found)
    losses = {loss.node: loss for loss in planner.losses()}
    assert {node: loss.alike for node, loss in losses.items()} == {"ampere": 1, "ada-0": 2}
    assert losses["ampere"].plan is None and "fits in no plan" in losses["ampere"].problem
    loss = losses["ada-0"]
    assert loss.plan is not None and loss.warm and loss.step_seconds == planner.without(["ada-0"])[2]
    for gone in ("ada-0", "ada-1"):
        validate(loss.plan, MODEL, cluster_from_dict(without_nodes(DATA, {gone})), dtype="bf16")


@pytest.mark.slow
def test_where_no_known_pipeline_fits_what_is_left_it_is_searched(cluster: Cluster, found: SearchResult) -> None:
    planner = WarmPlanner(PROBLEM.on(cluster), found)
    planner.outlines = []
    loss = {loss.node: loss for loss in planner.losses()}["ada-0"]
    assert loss.plan is not None and not loss.warm and loss.cluster is not None
    best = search(PROBLEM.on(cluster_from_dict(without_nodes(DATA, {"ada-0"})))).best
    assert loss.step_seconds == best.step_seconds


@pytest.mark.slow
def test_the_command_writes_fallback_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(DATA))
    words = ["plan", "--model", "llama2-7b", "--cluster", str(tmp_path / "c.yaml"), "--seq-length", str(LENGTH)]
    words += ["--global-batch-size", str(BATCH), "--offload", "never", "--more-schedules", "never"]
    words += ["--micro-batch-size", "1", "--no-baselines", "--fallbacks"]
    assert main([*words, str(tmp_path / "c.yaml")]) == 2
    assert "--fallbacks" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "f"), "--quiet", "--json"]) == 0
    found = {loss["node"]: loss for loss in json.loads(capsys.readouterr().out)["losses"]}
    assert [path.name for path in (tmp_path / "f").iterdir()] == ["without-ada-0.yaml"]
    left = cluster_from_dict(without_nodes(DATA, {"ada-1"}))
    plan = load_plan(tmp_path / "f" / "without-ada-0.yaml", MODEL, left, "bf16")
    assert plan.global_batch_size == BATCH and found["ada-0"]["replan_seconds"] > 0
    assert found["ampere"]["plan"] is None and found["ampere"]["problem"]


@pytest.mark.slow
def test_the_report_by_default_searches_nothing_and_predicts_one_uniform_plan(
    cluster: Cluster, result: SearchResult, summary: Summary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes longer than a part of the search's time is left to --compare."""
    predicted: list[Plan] = []

    def search_again(*_: Any, **__: Any) -> None:
        raise AssertionError("another search")

    def count(plan: Plan, *words: Any) -> Prediction:
        predicted.append(plan)
        return predict(plan, *words)

    monkeypatch.setattr("hetero_megatron.planner.search.driver.search", search_again)
    monkeypatch.setattr("hetero_megatron.planner.report.comparison.predict", count)
    brief = summarize(result, PROBLEM.on(cluster))
    assert len(predicted) == 1 and brief.uniform is not None and summary.uniform is not None
    assert brief.uniform.step_seconds >= summary.uniform.step_seconds
    assert predict(predicted[0], MODEL, cluster).step_seconds == brief.uniform.step_seconds
    assert not brief.alone and not brief.rejected and "--compare" in format_summary(brief)
    report = summary_json(brief)
    assert report["alone"] == [] and "--compare" in report["alone_skipped"]
    assert report["hethub_bound_tokens_per_second"] is None and report["uniform"]["text"] == brief.uniform.text
    assert "--compare" not in format_summary(summary) and summary_json(summary)["alone_skipped"] == ""


@pytest.mark.slow
def test_types_that_the_search_had_alone_are_compared_without_being_asked_for() -> None:
    one = cluster_from_dict({**DATA, "nodes": [{"name": "n", "chip": "A100-80-SXM", "chips_per_node": 8}]})
    result = search(PlanningProblem(MODEL, one, LENGTH, BATCH, OPTIONS))
    (alone,) = summarize(result, PlanningProblem(MODEL, one, LENGTH, BATCH, OPTIONS)).alone
    assert (alone.chips, alone.step_seconds) == (8, result.best.step_seconds)
    two = cluster_from_dict({**DATA, "nodes": [{"name": c, "chip": c} for c in ("A100-80-SXM", "H100-SXM")]})
    model = replace(MODEL, num_layers=4)
    result = search(PlanningProblem(model, two, LENGTH, 2, OPTIONS))
    found = summarize(result, PlanningProblem(model, two, LENGTH, 2, OPTIONS))
    assert not found.alone and "--compare" in found.skipped


@pytest.mark.slow
def test_a_type_whose_search_is_cut_short_is_not_compared(cluster: Cluster, result: SearchResult) -> None:
    over = TimeBudget(0.0)
    assert not search_types_alone(result, PROBLEM.on(cluster), over) and not result.alone
    late = summarize(result, PROBLEM.on(cluster), Comparisons(every=True), budget=over)
    assert not late.alone and "the time is up" in format_summary(late)
    whole = TimeBudget()
    assert search_types_alone(result, PROBLEM.on(cluster), whole)
    assert set(result.alone) == {"A100-80-SXM", "L4"} and isinstance(result.alone["L4"], UserError)


@pytest.mark.slow
def test_the_command_compares_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(DATA))
    words = ["plan", "--model", "llama2-7b", "--cluster", str(tmp_path / "c.yaml"), "--seq-length", str(LENGTH)]
    words += ["--global-batch-size", str(BATCH), "--offload", "never", "--micro-batch-size", "1", "--json"]
    words += ["--more-schedules", "never"]
    assert main(words) == 0
    brief, said = json.loads((captured := capsys.readouterr()).out), captured.err
    assert main([*words, "--compare"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert not said and (brief["fingerprint"], brief["alone"]) == (whole["fingerprint"], [])
    assert [row["name"] for row in whole["alone"]] == ["A100-80-SXM", "L4"] and whole["hetero_speedup_ratio"] > 0
    assert brief["bound"]["step_seconds"] == whole["bound"]["step_seconds"] <= whole["step_seconds"]
    assert main([*words, "--compare", "--no-baselines"]) == 2
    assert "--no-baselines" in capsys.readouterr().err


def test_the_launcher_takes_a_fallback_plan(tmp_path: Path) -> None:
    """The one for the loss of a node of three, whichever of the equal ones is gone."""
    data = yaml.safe_load(Path("examples/clusters/two_nodes.yaml").read_text())
    data["nodes"][1]["count"] = 2
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(data))
    words = ["plan", "--model", "tiny", "--cluster", str(tmp_path / "c.yaml"), "--seq-length", "64", "--dtype", "fp32"]
    words += ["--global-batch-size", "8", "--no-baselines", "--quiet", "--fallbacks", str(tmp_path / "f")]
    assert main([*words, "--out", str(tmp_path / "p.yaml")]) == 0
    files = sorted((tmp_path / "f").iterdir())
    assert [path.name for path in files] == ["without-fast.yaml", "without-slow-0.yaml"]
    flags = ["--model", "tiny", "--mock-data", "--train-iters", "1", "--lr", "1e-3"]
    setup = Setup(tmp_path / "p.yaml", (Seat("fast", 0), Seat("slow-0", 0), Seat("slow-1", 0)))
    config = configured(flags, setup.plan, tmp_path / "c.yaml", None)
    choose = planner_for(flags, config, setup, files[1:], tmp_path, False)
    for gone in ("slow-0", "slow-1"):
        (tmp_path / "left.yaml").write_text(yaml.safe_dump(without_nodes(data, {gone})))
        assert choose([Seat("fast", 0), Seat("slow", 0)], tmp_path / "left.yaml") == files[1]
