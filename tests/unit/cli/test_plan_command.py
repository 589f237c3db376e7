"""The plan command: time limits and Ctrl-C of real processes, objectives beside speed, and what the report says."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hetero_megatron.cli.main import main
from hetero_megatron.cluster import cluster_from_dict, load_cluster
from hetero_megatron.cluster.subset import shrink
from hetero_megatron.errors import INTERRUPTED, UserError
from hetero_megatron.planner.estimate.lower_bounds import most_tokens, work_bound
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace, TimeBudget
from hetero_megatron.planner.report.comparison import BRIEF, best_uniform, summarize
from hetero_megatron.planner.report.text import _memory_lines, format_summary, summary_json
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.incumbent import SimulatedPlan
from hetero_megatron.planner.template.plan_template import PlanTemplate
from hetero_megatron.planner.whatif import objective
from hetero_megatron.planner.whatif.objective import Deadline, search_objective
from hetero_megatron.plans import load_plan, plan_from_dict
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import load_model
from tests.support import planner_cases
from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT

CHIPS = ["H100-SXM", "A100-80-SXM", "L40S", "MI300X", "A100-40-SXM", "H200-SXM"]
MODEL = replace(load_model("llama2-7b"), num_layers=4)

FEW = SearchSpace(micro_batch_sizes=(1,), recompute="none", more_schedules="never", inner_dp=False)
PLAIN = SearchSpace(more_schedules="never")


def there(*rows: tuple[str, int, int], costs: dict[str, float] | None = None) -> dict[str, Any]:
    """(chip, nodes, chips of a node) of each node group; ``costs`` per hour by chip."""
    return {
        "version": 1,
        "nodes": [
            {"name": f"n{i}", "chip": chip, "count": count, "chips_per_node": each}
            for i, (chip, count, each) in enumerate(rows)
        ],
        "chips": {chip: {"cost_per_hour": cost} for chip, cost in (costs or {}).items()},
        "links": {
            "intra_node": {"bandwidth": "100 GB/s", "latency": "5 us"},
            "inter_node": {"bandwidth": "25 GB/s", "latency": "10 us"},
        },
    }


def command(folder: Path, data: dict[str, Any], model: str, *more: str) -> list[str]:
    (folder / "c.yaml").write_text(yaml.safe_dump(data))
    words = ["--cluster", str(folder / "c.yaml"), "--seq-length", "2048", "--global-batch-size", "256", *more]
    return ["plan", "--model", model, *words, "--out", str(folder / "p.yaml")]


def start(words: list[str], program: Sequence[str] = ("-m", "hetero_megatron.cli.main")) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *words], cwd=ROOT, env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # background jobs ignore it
    )  # fmt: skip


LARGE = there(*((chip, 16, 8) for chip in CHIPS[:4]))


def test_ctrl_c_in_the_search_leaves_the_best_plan_so_far(tmp_path: Path) -> None:
    process = start(command(tmp_path, LARGE, "llama2-70b", "--no-baselines"))
    assert process.stderr is not None
    assert any(line.startswith("search: ") for line in process.stderr)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "Traceback" not in err, err
    assert "cut short, the best so far" in out
    load_plan(tmp_path / "p.yaml", load_model("llama2-70b"), load_cluster(tmp_path / "c.yaml"), "bf16")


def test_ctrl_c_at_the_first_sign_of_a_plan_leaves_that_plan() -> None:
    def tell(text: str) -> None:
        said.append(text)
        raise KeyboardInterrupt

    said: list[str] = []
    cluster, watch = cluster_from_dict(there(("A100-80-SXM", 2, 4), ("L40S", 2, 4))), TimeBudget()
    found = search(PlanningProblem(MODEL, cluster, 1024, 16, SearchOptions(space=FEW)), progress=tell, budget=watch)
    assert len(said) == 1 and watch.interrupted and not found.complete
    assert 0 < found.best.step_seconds <= 1.1 * float(said[0].split()[0])


@pytest.mark.slow
def test_ctrl_c_in_the_report_leaves_the_plan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "page")  # nobody reads it, so the report does not end by itself however fast the machine is
    small = there(("H100-SXM", 1, 2), ("A100-80-SXM", 1, 2))
    words = command(tmp_path, small, "llama2-7b", "--quiet", "--no-baselines", "--html", str(tmp_path / "page"))
    process = start([*words, "--micro-batch-size", "1", "--more-schedules", "never"])
    assert process.stdout is not None and process.stdout.readline().startswith("# llama2-7b")
    assert any(line.startswith("best plan: ") for line in process.stdout), "what is known without comparisons"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED and "Traceback" not in err, err
    assert f"error: interrupted in the report; the plan is in {tmp_path / 'p.yaml'}" in err
    load_plan(tmp_path / "p.yaml", load_model("llama2-7b"), load_cluster(tmp_path / "c.yaml"), "bf16")


def test_ctrl_c_in_the_search_of_a_training_run_starts_nothing(tmp_path: Path) -> None:
    """Not with the best plan so far, as ``plan`` does: each rank would have another one."""
    _, _, model, *words = command(tmp_path, LARGE, "llama2-70b")[:-2]
    words = ["--auto-plan", "--model", model, *words, "--mock-data", "--train-iters", "1", "--lr", "1e-3"]
    process = start(words, ["pretrain_gpt.py"])
    assert process.stderr is not None and process.stderr.readline().startswith("searching for a plan on 512 chips")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (INTERRUPTED, "", "error: interrupted\n")


def test_a_time_limit_leaves_the_best_plan_so_far(tmp_path: Path) -> None:
    words = command(tmp_path, there(*((c, 2, 4) for c in CHIPS[:3])), "llama2-7b", "--json", "--time-limit", "0.01")
    words += ["--micro-batch-size", "1", "--compare"]
    process = start(words)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert not report["complete"] and report["alone"] == [] and "time is up" in report["alone_skipped"]
    plan = load_plan(tmp_path / "p.yaml", load_model("llama2-7b"), load_cluster(tmp_path / "c.yaml"), "bf16")
    assert plan.fingerprint() == report["fingerprint"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "space", "length"),
    [
        ([("A100-80-SXM", 1, 1), ("L40S", 1, 1)], SearchSpace(), 1024),  # enumeration, and more schedules
        ([("A100-80-SXM", 2, 4), ("L40S", 2, 4)], PLAIN, 1024),  # programs
        pytest.param([(chip, 1, 2) for chip in [*CHIPS, "Gaudi2"]], PLAIN, 1024, id="islands", marks=pytest.mark.slow),
        pytest.param(
            [("A100-80-SXM", 2, 1), ("L40S", 2, 1)], replace(PLAIN, context="always"), 4096, marks=pytest.mark.slow
        ),
        pytest.param(
            [("A100-80-SXM", 2, 4), ("L40S", 2, 4)], replace(PLAIN, offload="always"), 1024, marks=pytest.mark.slow
        ),
    ],
)
def test_no_part_of_a_search_goes_on_when_it_is_to_stop(rows: Any, space: SearchSpace, length: int) -> None:
    cluster, options, watch = cluster_from_dict(there(*rows)), SearchOptions(space=space), TimeBudget(0.0)
    full = search(PlanningProblem(MODEL, cluster, length, 16, options))
    result = search(PlanningProblem(MODEL, cluster, length, 16, options), budget=watch)
    assert full.complete and not result.complete and watch.cut
    assert result.evaluated <= 8 < full.evaluated, "uniform plans, of which one is enough"
    assert not result.context_tried and not result.alone and not result.others
    assert result.best.step_seconds >= full.best.step_seconds * (1 - 1e-9)


def test_a_search_without_time_does_not_say_that_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_megatron.planner.search.driver.simulate_best", lambda *_: [])
    options = SearchOptions(space=SearchSpace(context="never", offload="never"))
    with pytest.raises(UserError, match="--time-limit: none of the plans found by then fits"):
        search(
            PlanningProblem(MODEL, cluster_from_dict(there(("L40S", 2, 1))), 1024, 8, options), budget=TimeBudget(0.0)
        )


def test_ctrl_c_is_caught_once_and_not_in_the_report() -> None:
    watch, done = TimeBudget(), []
    with watch.catching():
        raise KeyboardInterrupt
    assert watch.over() and watch.cut
    with pytest.raises(KeyboardInterrupt), watch.catching():
        raise KeyboardInterrupt

    def once() -> int:
        done.append(1)
        if len(done) == 1:
            raise KeyboardInterrupt
        return len(done)

    assert TimeBudget().finish(once) == 2
    with pytest.raises(KeyboardInterrupt), TimeBudget().uncaught().catching():
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        TimeBudget().uncaught().stop()


def test_a_limit_holds_for_all_parts_of_the_cluster_together() -> None:
    data = there(("H100-SXM", 4, 2), ("L40S", 4, 2), costs={"H100-SXM": 8.0, "L40S": 1.0})
    result = search_objective(PlanningProblem(MODEL, cluster_from_dict(data), 1024, 8), budget=TimeBudget(0.0))
    assert not result.complete and result.parts.startswith("1 of 15 parts") and "cut short" in result.parts


def test_the_bound_for_many_clusters_is_that_of_each() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 4, (12, 3))
    counts[counts.sum(axis=1) == 0] = 1
    whole = cluster_from_dict(there(*((chip, 1, 3) for chip in CHIPS[:3])))
    costs = make_scorer(PlanningProblem(MODEL, whole, 2048, 1)).costs
    found = most_tokens(costs, CHIPS[:3], counts.astype(float))
    for row, most in zip(counts, found):
        keep = [r.rank for r in whole.ranks if r.local < row[CHIPS.index(r.chip)]]
        scorer = make_scorer(PlanningProblem(MODEL, shrink(whole, keep), 2048, 1))
        assert most == pytest.approx(4 * 2048 / work_bound(scorer, MODEL, 4), rel=1e-6)


@pytest.mark.slow
def test_small_and_single_type_parts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six types, the cheapest far from the largest: by size its parts were never among those searched."""
    monkeypatch.setattr(objective, "MOST_SEARCHED", 5)
    prices = dict.fromkeys(CHIPS, 40.0) | {"L40S": 0.5}
    cluster = cluster_from_dict(there(*((chip, 1, 1) for chip in CHIPS), costs=prices))
    options = SearchOptions(space=FEW)
    result = search_objective(PlanningProblem(MODEL, cluster, 1024, 8, options))
    best = result.best.tokens_per_cost
    assert best is not None and result.parts
    for chip in CHIPS:
        part = shrink(cluster, [r.rank for r in cluster.ranks if r.chip == chip])
        alone = search(PlanningProblem(MODEL, part, 1024, 8, options)).best.tokens_per_cost
        assert alone is not None and best >= alone * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("share", [None, 0.9, 0.45])
def test_no_part_is_better_by_the_objective_than_what_is_found(share: float | None) -> None:
    """Against searching every part, of plans that use all of its chips; with deadlines that a share of the speed of the
    whole cluster meets."""
    prices = {"H100-SXM": 4.0, "L40S": 1.0}
    cluster = cluster_from_dict(there(("H100-SXM", 2, 1), ("L40S", 2, 1), costs=prices))
    options, rows = SearchOptions(space=FEW), []
    for keep in itertools.product(range(3), repeat=2):
        ranks = [r.rank for r in cluster.ranks if int(r.node[-1]) < keep[int(r.group[-1])]]
        if ranks:
            best = search(PlanningProblem(MODEL, shrink(cluster, ranks), 1024, 8, options)).best
            cost = sum(prices[cluster.ranks[r].chip] for r in ranks)
            rows.append((best.prediction.tokens_per_second, cost, len(best.plan.ranks) == len(ranks)))
    fastest = max(speed for speed, _, _ in rows)
    due = None if share is None else Deadline(fastest * share * 3600, 1.0)
    found = search_objective(PlanningProblem(MODEL, cluster, 1024, 8, options), due)
    assert "no other can be better" in found.parts
    speed, cost = found.best.prediction.tokens_per_second, found.best.cost_per_hour
    assert cost is not None
    if due is None:
        assert speed / cost >= max(s / c for s, c, full in rows if full) * (1 - 1e-9)
    else:
        assert speed >= due.tokens_per_second
        assert cost <= min(c for s, c, full in rows if full and s >= due.tokens_per_second)


@pytest.mark.slow
def test_the_report_is_of_the_cluster_that_the_plan_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its ranks are others than those of the whole cluster."""
    data = there(("H100-SXM", 2, 2), ("L40S", 2, 4), costs={"H100-SXM": 50.0, "L40S": 1.0})
    words = command(tmp_path, data, "llama2-7b", "--objective", "cost", "--quiet")
    words += ["--micro-batch-size", "1", "--compare"]
    assert main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    part = load_cluster(tmp_path / "p.yaml.cluster.yaml")
    assert set(part.chips) == {"L40S"} == {row["name"] for row in report["alone"]}
    assert report["uniform"]["chips"] == report["alone"][0]["chips"] == part.world_size
    assert set(report["idle_nodes"]) == {"n0-0", "n0-1", "n1-0", "n1-1"} - {r.node for r in part.ranks}
    plan = load_plan(tmp_path / "p.yaml", load_model("llama2-7b"), part, "bf16")
    assert report["cost_per_hour"] == len(plan.ranks) * 1.0
    assert report["tokens_per_cost"] == pytest.approx(report["tokens_per_second"] * 3600 / len(plan.ranks))
    assert main(words) == 0
    text = capsys.readouterr().out
    assert f"idle: {len(report['idle_nodes'])} nodes (n0-0, n0-1" in text and "tokens per currency unit" in text


def test_costs_are_said_whenever_they_are_known_and_what_a_deadline_leaves() -> None:
    data = there(("L40S", 1, 2), costs={"L40S": 3.0})
    cluster = cluster_from_dict(data)
    result = search(PlanningProblem(MODEL, cluster, 1024, 8))
    due = Deadline(result.best.prediction.tokens_per_second * 3600 * 2, 5.0)
    summary = summarize(result, PlanningProblem(MODEL, cluster, 1024, 8), BRIEF, due)
    report = summary_json(summary)
    cost = 3.0 * len(result.best.plan.ranks)
    assert report["cost_per_hour"] == cost and report["deadline"]["slack_hours"] == pytest.approx(3.0)
    assert report["deadline"]["cost"] == pytest.approx(2 * cost)
    assert f"cost: {cost:.4g} per hour" in format_summary(summary) and "3 of 5 h are left" in format_summary(summary)
    del data["chips"]
    free = cluster_from_dict(data)
    summary = summarize(search(PlanningProblem(MODEL, free, 1024, 8)), PlanningProblem(MODEL, free, 1024, 8), BRIEF)
    assert "cost" not in format_summary(summary) and "cost_per_hour" not in summary_json(summary)


@pytest.mark.slow
def test_chips_left_idle_by_a_search_that_was_cut_short_are_not_called_useless() -> None:
    cluster = cluster_from_dict(there(("H100-SXM", 1, 4), ("L40S", 1, 4)))
    options = SearchOptions(space=FEW)
    result = search(PlanningProblem(MODEL, cluster, 1024, 8, options))
    result.best = replace(result.best, idle=(7,))
    summary = summarize(result, PlanningProblem(MODEL, cluster, 1024, 8, options), BRIEF)
    for complete, words in ((False, "the search was cut short"), (True, "no plan that was tried is faster with them")):
        result.complete = complete
        text = format_summary(summary)
        assert "would not help" not in text and words in text


def test_memory_of_pipelines_that_differ_in_micro_batch_or_tp_is_shown_apart() -> None:
    layers = planner_cases.stages(11, tp=2)
    rows = [(1, 2, [{**layers[0], "tp": 2}]), (2, 1, planner_cases.stages(11, tp=2, first_rank=2))]
    one = [{**planner_cases.stages(11, first_rank=4)[0], "ranks": [4, 5], "dp_split": [1, 1]}]
    rows.append((2, 1, one))
    data = {
        "seq_length": planner_cases.SEQ, "global_batch_size": 6,
        "pipelines": [{"micro_batch_size": b, "num_micro_batches": m, "stages": s} for b, m, s in rows],
    }  # fmt: skip
    plan = plan_from_dict(data, planner_cases.MODEL)
    cluster = planner_cases.cluster(3, 2)
    found = predict(plan, planner_cases.MODEL, cluster, "fp32")
    lines = _memory_lines(SimulatedPlan(plan, cluster, PlanTemplate(()), found, ()), planner_cases.MODEL)
    assert [line.split()[0] for line in lines[: lines.index("")]] == ["stage", "0.0", "1.0", "2.0"]


@pytest.mark.parametrize(
    ("memory", "layers", "chips", "problem"),
    [("80 GiB", 3, 5, "no equal degrees divide 5 chips"), ("6 GiB", 4, 2, "no uniform plan fits into memory")],
)
def test_why_there_is_no_uniform_plan(memory: str, layers: int, chips: int, problem: str) -> None:
    model = replace(MODEL, num_layers=layers)
    data = there(("L40S", chips, 1))
    cluster = cluster_from_dict(data)
    problem_ = PlanningProblem(model, cluster, 1024, 1, SearchOptions(space=SearchSpace(offload="never")))
    result = search(problem_)
    if memory != "80 GiB":
        small = cluster_from_dict({**data, "chips": {"L40S": {"memory": memory}}})
        scorer = make_scorer(PlanningProblem(model, small, 1024, 1))
        result = replace(result, scorer=scorer)
    found, _ = best_uniform(result, problem_)
    assert problem in found.problem and math.isclose(found.tokens_per_second, 0.0)


def test_room_for_the_search_is_not_taken_from_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing that was found fits exactly, the search counts with more margin; limits do not."""
    module, left = importlib.import_module("hetero_megatron.planner.search.driver"), [1]
    judge = module.simulate_best

    def nothing_at_first(*words: Any) -> list[SimulatedPlan]:
        left[0] -= 1
        return [] if left[0] >= 0 else judge(*words)

    monkeypatch.setattr(module, "simulate_best", nothing_at_first)
    cluster = cluster_from_dict(there(("L40S", 2, 1)))
    options = SearchOptions(space=replace(FEW, context="never"))
    result = search(PlanningProblem(MODEL, cluster, 1024, 8, options))
    assert left[0] < 0 and result.scorer.costs.options == options.costs
    limit = int(cluster.chips["L40S"].memory * (1 - options.costs.margin))
    assert set(result.best.prediction.limits.values()) == {limit}


@pytest.mark.slow
def test_an_export_leaves_out_what_its_format_cannot_say_and_is_refused_after_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Schedules, context groups, offload and unlike pipelines are not searched; what is asked for all the same is a
    refusal that leaves the report."""
    file, target = tmp_path / "cluster.yaml", tmp_path / "exported"
    data: dict[str, Any] = {
        "nodes": [{"name": "a", "count": 4, "chip": "c", "chips_per_node": 1}],
        "chips": {"c": {"memory": "1 GiB", "emulate": {"speed": 0.5}}},
        "links": {"inter_node": {"bandwidth": "1 GB/s", "latency": "1 us"}},
    }
    words = f"plan --model tiny --cluster {file} --seq-length 512 --global-batch-size 8 --dtype fp32 --quiet"
    for kind in ("flagscale", "sailor"):
        file.write_text(yaml.safe_dump(data))
        assert main([*words.split(), "--no-baselines", "--micro-batch-size", "1", "--export", f"{kind}:{target}"]) == 0
        assert "best plan:" in capsys.readouterr().out and target.read_text()
        for asked in ("--more-schedules always", "--offload always", "--context always"):
            assert main([*words.split(), "--export", f"{kind}:{target}", *asked.split()]) == 2
            assert asked.split()[0] in (told := capsys.readouterr().err) and "(--export)" in told
    target.unlink()
    data["nodes"].append({"name": "b", "count": 1, "chip": "d", "chips_per_node": 1})
    data["chips"]["d"] = {"memory": "1 GiB", "emulate": {"speed": 1.0}}
    file.write_text(yaml.safe_dump(data))
    for kind in ("flagscale", "sailor"):  # the best of all plans has unlike pipelines
        assert main([*words.split(), "--no-baselines", "--export", f"{kind}:{target}"]) == 0
        assert target.read_text() and "unequal pipelines" in capsys.readouterr().out
        target.unlink()
    words += " --recompute selective"
    assert main([*words.split(), "--out", str(tmp_path / "plan.yaml"), "--export", f"flagscale:{target}"]) == 2
    told = capsys.readouterr()
    assert "best plan:" in told.out and "compared with" in told.out and told.err.count("error:") == 1
    assert not target.exists() and (tmp_path / "plan.yaml").exists()
