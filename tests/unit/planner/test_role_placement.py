"""Where a teacher or a reference goes: the placement is never slower than the plain ones, and is what its file says."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

import hetero_megatron as hm
from hetero_megatron.api.roles import place_role
from hetero_megatron.cli.main import main
from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.cluster.subset import shrink
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.whatif.forward_plans import ForwardPlans, ForwardQuestion
from hetero_megatron.planner.whatif.role_placement import RoleSearch
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.forward_only import ForwardRole, role_of
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.simulate.beside import predict_beside, role_costs

OPTIONS = SearchOptions(dtype="fp32", space=SearchSpace(more_schedules="never"))
CLUSTER = "examples/clusters/testbed.yaml"
WORDS = f"plan --model tiny --cluster {CLUSTER} --seq-length 128 --global-batch-size 8 --dtype fp32 --quiet "
WORDS = (WORDS + "--more-schedules never --micro-batch-size 1").split()


def old_chips(cluster: hm.Cluster, model: hm.Model, other: hm.Model, length: int, batch: int) -> float:
    """Seconds of a step with the role on the slow chips, both by the search of what is left and the forward plans."""
    described = cluster.described
    asked = ForwardQuestion("teacher", other.spec, length, batch, "fp32", CostOptions(), 129)
    slow = frozenset(rank.rank for rank in described.ranks if rank.chip == "small")
    found = RoleSearch(PlanningProblem(model.spec, described, length, batch, OPTIONS), asked).on_ranks(slow)
    assert frozenset(found.ranks) == slow and found.plan is not None
    return found.step_seconds


@pytest.mark.slow
def test_the_placement_is_never_slower_than_plain_ones(tmp_path: Path) -> None:
    """Of all roles on all chips, and of old chips with the role; its file is predicted as it says."""
    cluster, model = hm.Cluster.read(CLUSTER), hm.Model("tiny")
    for layers in (3, 24):
        config = {"model_type": "llama", "vocab_size": 257, "hidden_size": 128, "intermediate_size": 352,
                  "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 4,
                  "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4}  # fmt: skip
        teacher = hm.Model(config)
        placed = place_role(model, cluster, "teacher", teacher, seq_length=128, global_batch_size=8, dtype="fp32",
                            more_schedules="never")  # fmt: skip
        seconds = {one.way: one.step_seconds for one in placed.placement.alternatives}
        assert placed.step_seconds == min(seconds.values()) and len(seconds) == 3
        assert placed.step_seconds <= 1.001 * old_chips(cluster, model, teacher, 128, 8), (layers, seconds)
        best = search(PlanningProblem(model.spec, cluster.described, 128, 8, OPTIONS)).best
        role = role_of(best.plan, model.spec, "teacher", teacher.spec, 0, cluster.described)
        everywhere = predict_beside(best.plan, model.spec, cluster.described, "fp32", CostOptions(), role)
        assert placed.step_seconds <= 1.001 * everywhere.step_seconds, (layers, seconds)
        (tmp_path / "plan.yaml").write_text(placed.file)
        again = hm.Plan.read(tmp_path / "plan.yaml", cluster, model, dtype="fp32", beside={"teacher": teacher})
        way = placed.placement.best.way
        assert bool(again.canonical.roles) == (way == "own chips") and way in str(placed)
        if way != "file":
            assert hm.predict(again, cluster).step_seconds == pytest.approx(placed.step_seconds, rel=0.02)


@pytest.mark.slow
def test_the_command_places_a_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On its own chips or in a file, which more passes over the data make cheaper; files and pages are written."""
    found = []
    for passes in ("0.5", "100000"):
        out, page = tmp_path / f"{passes}.yaml", tmp_path / "page.html"
        words = [*WORDS, "--reference-hf", "tiny", "--preference", "kto", "--epochs", passes, "--json"]
        assert main([*words, "--out", str(out), "--html", str(page)]) == 0
        told = json.loads(capsys.readouterr().out)
        assert {row["way"] for row in told["alternatives"]} == {"own chips", "file"}
        assert "Placements" in page.read_text()
        found.append((told["alternatives"][0]["way"], told["step_seconds"]))
    assert found[1][0] == "file" and found[1][1] < found[0][1]
    assert (tmp_path / "100000.reference.yaml").exists() and "roles" not in out.read_text()


@pytest.mark.slow
def test_a_model_that_fits_nowhere_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    big = {"model_type": "llama", "vocab_size": 257, "hidden_size": 4096, "intermediate_size": 11008,
           "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(big))
    assert main([*WORDS, "--teacher-hf", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "--teacher-hf" in err and "no placement fits" in err and "over by" in err and err.count("\n") == 1, err


def test_a_time_limit_is_no_reason_of_the_cluster() -> None:
    cluster, model = hm.Cluster.read(CLUSTER), hm.Model("tiny")
    placed = place_role(model, cluster, "teacher", model, seq_length=128, global_batch_size=8, dtype="fp32",
                        micro_batch_size=1, more_schedules="never", time_limit=1e-3)  # fmt: skip
    problems = {one.way: one.problem for one in placed.placement.alternatives}
    assert "time limit" in problems["own chips"] and "1 pass over the data" in placed.explain(), problems


def test_what_cannot_be_placed_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    teacher = ["--teacher-hf", "tiny"]
    for flags, field, says in (
        (["--teacher-hf", "gpt2"], "--teacher-hf", "another vocabulary"),
        ([*teacher, "--reference-hf", "tiny", "--preference", "dpo"], "--preference", "beside a teacher"),
        (["--reference-hf", "tiny"], "--reference-hf", "--preference"),
        ([*teacher, "--compare"], "--compare", "not known beside --teacher-hf"),
        (["--epochs", "3"], "--epochs", "without a second model"),
        ([*teacher, "--reference-hf", "tiny"], "--reference-hf", "beside a teacher"),
        (["--reference-hf", "tiny", "--preference", "dpo", "--score-top-k", "5"], "--score-top-k", "without a teacher"),
    ):
        assert main([*WORDS, *flags]) == 2
        err = capsys.readouterr().err
        assert field in err and says in err and err.count("\n") == 1, err


def test_forward_plans_are_as_fast_as_any_of_many() -> None:
    """Random pipelines over the same chips, with random layers and micro-batches."""
    cluster, spec, rng = hm.Cluster.read(CLUSTER).described, hm.Model("tiny").spec, random.Random(3)
    asked = ForwardQuestion("teacher", spec, 128, 8, "fp32", CostOptions(), 129)
    best = ForwardPlans(asked, cluster).best()
    assert hm.Plan(best.plan, hm.Model("tiny")).global_batch_size == 8
    for _ in range(30):
        ranks = rng.sample(range(4), 4)
        cuts = sorted(rng.sample(range(1, 4), rng.randrange(4)))
        runs = [ranks[a:b] for a, b in zip([0, *cuts], [*cuts, 4], strict=True)]
        shares = sorted(rng.sample(range(1, 8), len(runs) - 1))
        counts = [b - a for a, b in zip([0, *shares], [*shares, 8], strict=True)]
        pipelines = []
        for run, count in zip(runs, counts, strict=True):
            ends = [0, *sorted(rng.sample(range(1, 6), len(run) - 1)), 6]
            stages = [{"ranks": r, "layers": [a, b]} for r, a, b in zip(run, ends, ends[1:], strict=False)]
            pipelines.append({"micro_batch_size": 1, "num_micro_batches": count, "stages": stages})
        plan = plan_from_dict({"seq_length": 128, "global_batch_size": 8, "pipelines": pipelines}, spec, cluster)
        role = ForwardRole("teacher", CompiledPlan(plan, spec), 129)
        assert best.seconds <= 1.0001 * role_costs(role, cluster, "fp32", CostOptions()).seconds


def test_what_a_role_says_finds_room_on_the_ranks_that_train() -> None:
    """Where the best plan without it leaves too little, another one is taken, not another placement."""
    model, teacher = hm.Model("tiny").spec, hm.Model("tiny").spec

    def question(memory: int) -> tuple[PlanningProblem, RoleSearch]:
        cluster = emulated(memory)
        problem = PlanningProblem(model, cluster, 128, 8, OPTIONS)
        return problem, RoleSearch(problem, ForwardQuestion("teacher", teacher, 128, 8, "fp32", CostOptions(), 129))

    problem, roomy = question(1 << 30)
    best, found = search(problem.on(shrink(problem.cluster, [0]))).best, roomy.on_ranks(frozenset({1}))
    assert found.prediction is not None and found.prediction.memory[0].second_model > 1 << 17
    needed = best.prediction.memory[0].total + (1 << 16)  # less than with what the teacher says
    _, tight = question(math.ceil(needed / (1 - CostOptions().margin)))
    again = tight.on_ranks(frozenset({1}))
    assert again.prediction is not None and not again.prediction.over, again.problem
    assert again.step_seconds >= found.step_seconds and again.plan != found.plan


def emulated(memory: int) -> Cluster:
    """Two chips, of which the first has so many bytes."""
    sizes = {"a": f"{memory} B", "b": "1 GiB"}
    chips = {name: {"memory": size, "emulate": {"speed": 0.5}} for name, size in sizes.items()}
    nodes = [{"name": name, "chip": name} for name in chips]
    return cluster_from_dict({"version": 1, "nodes": nodes, "chips": chips,
                              "links": {"inter_node": {"bandwidth": "25 MB/s"}}})  # fmt: skip


@pytest.mark.slow
def test_a_generator_is_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Never slower than sampling in turn on all chips; the file is predicted as the report says."""
    for ahead in ([], ["--generator-ahead"]):
        out = tmp_path / "plan.yaml"
        flags = ["--grpo", "--max-new-tokens", "64", *ahead]
        assert main([*WORDS, *flags, "--json", "--out", str(out), "--html", str(tmp_path / "page.html")]) == 0
        told = json.loads(capsys.readouterr().out)
        seconds = {row["way"]: row["step_seconds"] for row in told["alternatives"]}
        assert told["step_seconds"] == min(seconds.values()) and seconds.keys() == {"own chips", "same chips"}
        asked = flags if told["alternatives"][0]["way"] == "own chips" else flags[:3]
        assert main(["predict", "--plan", str(out), "--cluster", CLUSTER, *asked, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(told["step_seconds"], rel=0.02)
        assert main([*WORDS, *flags]) == 0
        assert "generator: " in capsys.readouterr().out
    for flags, refused in (
        (["--grpo"], "--max-new-tokens"), (["--generator-ahead"], "has no effect without --grpo"),
        (["--grpo", "--max-new-tokens", "64", "--teacher-hf", "tiny"], "not known beside a teacher"),
        (["--grpo", "--max-new-tokens", "64", "--compare"], "not known beside --grpo"),
    ):
        assert main([*WORDS, *flags]) == 2
        told = capsys.readouterr().err.splitlines()
        assert refused in told[-1] and "Traceback" not in told[-1]
