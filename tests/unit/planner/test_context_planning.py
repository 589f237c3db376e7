"""The context scheduler with cluster files, rates, plan files and the command line."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_megatron.cli import main, plan_context
from hetero_megatron.cluster import cluster_from_dict, load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.planner.context.cluster import problem_from_cluster
from hetero_megatron.planner.context.problem import ContextOptions, one_stage_plan, plan_stage
from hetero_megatron.planner.context.scheduler import schedule_context
from hetero_megatron.plans import Pipeline, Plan, capabilities, dump_yaml, plan_from_dict, to_dict
from hetero_megatron.plans.validate import validate
from hetero_megatron.predictor.cost.cost_options import StageChoice
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.spec import load_model
from tests.support.paths import ROOT

MIXED = {
    "nodes": [
        {"name": "h", "chip": "H100-SXM", "chips_per_node": 4, "count": 2},
        {"name": "a", "chip": "A100-80-SXM", "chips_per_node": 2},
    ],
    "links": {"inter_node": {"bandwidth": "50 GB/s", "latency": "10 us"}},
}


@pytest.fixture
def context_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation as in the version whose runtime has context groups."""
    monkeypatch.setitem(capabilities.TABLE, "context", replace(capabilities.TABLE["context"], supported=True))


@pytest.mark.parametrize(("tp", "seq_length"), [(1, 65536), (1, 65537), (2, 40001)])
def test_choices_are_valid_plans_and_survive_the_file(context_runs: None, tp: int, seq_length: int) -> None:
    model = replace(load_model("llama3-8b"), max_position_embeddings=1 << 20)
    cluster = cluster_from_dict(MIXED)
    problem = problem_from_cluster(model, cluster, seq_length, tp=tp, options=ContextOptions(shard_states=True))
    choice = schedule_context(problem)
    plan = one_stage_plan(problem, choice.layout, 4)
    validate(plan, model, cluster, dtype="bf16")
    again = plan_from_dict(to_dict(plan), model, cluster)
    assert again.fingerprint() == plan.fingerprint() and dump_yaml(again) == dump_yaml(plan)
    stage = plan.pipelines[0].stages[0]
    shares = {
        m.ranks: n for g in choice.layout.groups for m, n in zip((problem.members[i] for i in g.members), g.tokens)
    }
    assert {unit.ranks: unit.num_tokens for unit in stage.units} == shares
    assert (stage.kv is None) == (len(choice.layout.groups) == 1)


@pytest.mark.parametrize("seed", range(4))
def test_any_choice_of_random_stages_parses(context_runs: None, seed: int) -> None:
    rng = random.Random(seed)
    model = replace(load_model("tiny"), max_position_embeddings=1 << 20)
    cluster = cluster_from_dict(MIXED)
    ranks = sorted(rng.sample(range(10), rng.randint(1, 10)))
    problem = problem_from_cluster(model, cluster, rng.randint(100, 30000), ranks=ranks)
    place = {rank: i for i, rank in enumerate(ranks)}  # a plan numbers its ranks from 0
    stage = plan_stage(problem, schedule_context(problem).layout, ranks=place)
    plan = Plan(problem.seq_length, 1, "1f1b", (Pipeline(1, 1, (stage,)),))
    assert plan_from_dict(to_dict(plan), model).fingerprint() == plan.fingerprint()
    assert sum(unit.num_tokens for unit in stage.units) == problem.seq_length


def test_one_rank_costs_what_the_stage_cost_model_says() -> None:
    """Without context parallelism, seconds agree with the planner's cost of the same stage (embedding and fixed host
    seconds of an action left out)."""
    model = load_model("llama3-8b")
    cluster = cluster_from_dict({"nodes": [{"name": "h", "chip": "H100-SXM", "chips_per_node": 8}]})
    costs = CostModel(model, cluster, 8192)
    for tp, recompute in ((1, "none"), (1, "full"), (8, "none")):
        stage = StageChoice("H100-SXM", tp, 1, 32, embed=False, head=False, recompute=recompute)
        expected = costs.forward_seconds(stage, 1) + costs.backward_seconds(stage, 1)
        options = ContextOptions(recompute=recompute, head=False, shard_states=True)
        problem = problem_from_cluster(model, cluster, 8192, ranks=range(tp), tp=tp, options=options)
        problem = replace(problem, members=tuple(replace(m, memory=1e15) for m in problem.members))
        # TP collectives' latency is the difference for tp = 8; sharding states over one member moves nothing.
        assert schedule_context(problem).seconds == pytest.approx(expected, rel=0.03), (tp, recompute)


def test_calibrated_rates_change_the_shares() -> None:
    model = load_model("tiny")
    rates = {
        "chips": {"A100-80-SXM": {"bf16": {"gemm_flops": 4e14, "attention_flops": 3e14, "bytes_per_second": 2e12}}}
    }
    cold = problem_from_cluster(model, cluster_from_dict(MIXED), 2048)
    warm = problem_from_cluster(model, cluster_from_dict({**MIXED, "rates": rates}), 2048)
    assert warm.members[9].attention_flops == pytest.approx(3e14) and warm.members[0] == cold.members[0]
    assert cold.members[9].attention_flops < cold.members[0].attention_flops and cold.members[9].attention_flops < 2e14


def test_refusals_of_the_adapter() -> None:
    model, cluster = load_model("tiny"), cluster_from_dict(MIXED)
    with pytest.raises(UserError, match=r"no such rank.*0 to 9"):
        problem_from_cluster(model, cluster, 2048, ranks=[3, 10])
    with pytest.raises(UserError, match="at least one rank"):
        problem_from_cluster(model, cluster, 2048, ranks=[])
    with pytest.raises(UserError, match="node a gives 2 ranks, which TP groups of 4 do not divide"):
        problem_from_cluster(model, cluster, 2048, tp=4)
    with pytest.raises(UserError, match="has no fp64"):
        chips = {"H100-SXM": {"dtypes": ["bf16"]}}
        problem_from_cluster(model, cluster_from_dict({**MIXED, "chips": chips}), 2048, dtype="fp64")
    with pytest.raises(UserError, match=r"links\.inter_node"):
        problem_from_cluster(model, cluster_from_dict({"nodes": MIXED["nodes"]}), 2048)


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(MIXED))
    return str(path)


def test_command_prints_one_json_object_and_writes_the_plan(
    cluster_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], context_runs: None
) -> None:
    out = tmp_path / "plan.yaml"
    base = ["--model", "tiny", "--cluster", cluster_file, "--seq-length", "131072", "--global-batch-size", "2"]
    assert plan_context.main([*base, "--json", "--out", str(out)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["gain"] >= 1 and result["num_micro_batches"] == 2
    assert any("131072" in notice for notice in result["notices"])
    model = replace(load_model("tiny"), max_position_embeddings=131072)
    from hetero_megatron.plans import load_plan

    assert load_plan(out, model).fingerprint() == result["fingerprint"]
    assert plan_context.main(base) == 0
    shown = capsys.readouterr().out
    assert "best of equal Ring, Ulysses and USP" in shown and "context:" in shown


def test_command_refuses(cluster_file: str) -> None:
    base = ["--cluster", cluster_file, "--model"]
    with pytest.raises(UserError, match="learned positions"):
        plan_context.main([*base, "gpt2", "--seq-length", "4096"])
    with pytest.raises(UserError, match="multiple of the micro-batch of 2"):
        plan_context.main([*base, "tiny", "--seq-length", "512", "--micro-batch-size", "2", "--global-batch-size", "3"])
    with pytest.raises(UserError, match="weights, gradients and optimizer alone"):
        plan_context.main([*base, "llama2-70b", "--seq-length", "4096"])


def test_plan_command_hands_over(cluster_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--context-only", "--model", "tiny", "--cluster", cluster_file, "--seq-length", "2048", "--json"]
    assert main.main(words) == 0
    assert json.loads(capsys.readouterr().out)["gain"] >= 1
    assert main.main([*words, "--no-such-flag"]) == 2


CLUSTERS = ROOT / "examples" / "clusters"


@pytest.mark.parametrize("name", sorted(p.stem for p in CLUSTERS.glob("hexiseq_*.yaml")))
def test_published_clusters_have_the_chips_they_are_named_for(name: str) -> None:
    cluster = load_cluster(CLUSTERS / f"{name}.yaml")
    assert cluster.world_size == int(name.rsplit("_", 1)[1])
    model = replace(load_model("llama2-13b"), max_position_embeddings=1 << 20)
    problem = problem_from_cluster(model, cluster, 1 << 18, options=ContextOptions(shard_states=True))
    assert {m.attention_flops > 1e14 for m in problem.members} == {True}
