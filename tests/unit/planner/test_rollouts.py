"""What sampled answers cost: time of a rollout and of the step that it is for, weights on their way, and memory of a
generator; runs, ``predict`` and the API say the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hetero_megatron as hm
from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.main import main
from hetero_megatron.cluster import Cluster, load_cluster
from hetero_megatron.monitoring import record
from hetero_megatron.plans import Plan, dump_yaml, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.forward_only import ForwardRole, role_of
from hetero_megatron.plans.memory.forward_only import with_role
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.rates import LayerRow, model_fingerprint
from hetero_megatron.predictor.simulate.rollouts import RolloutCosts, _few, predict_rollouts, weight_seconds
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec, load_model
from hetero_megatron.spec.grpo import Grpo
from hetero_megatron.training.config import RoleConfig
from hetero_megatron.utils.yaml_document import from_data

CLUSTER = """
version: 1
nodes: [{name: big, chip: card, chips_per_node: 2}, {name: old, chip: aged, chips_per_node: 2}]
chips:
  card: {memory: 80 GiB, tflops: {bf16: 300, fp32: 150}, memory_bandwidth: 2000 GB/s}
  aged: {memory: 24 GiB, tflops: {bf16: 300, fp32: 150}, memory_bandwidth: 500 GB/s}
links: {intra_node: {bandwidth: 100 GB/s, latency: 10 us}, inter_node: {bandwidth: 1.25 GB/s, latency: 30 us}}
"""
SEQ, SIZE, NEW = 512, 16, 256


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return load_cluster(str(tmp_path / "cluster.yaml"))


def pipelines(rows: int, *stages: tuple[int | list[int], list[int]]) -> list[dict[str, Any]]:
    spelled = [{"ranks": ranks, "layers": layers, "tp": len(ranks) if isinstance(ranks, list) else 1}
               for ranks, layers in stages]  # fmt: skip
    return [{"micro_batch_size": rows, "num_micro_batches": SIZE // rows, "stages": spelled}]


def made(spec: ModelSpec, cluster: Cluster, generator: list[dict[str, Any]]) -> tuple[Plan, ForwardRole]:
    data = {"seq_length": SEQ, "global_batch_size": SIZE, "pipelines": pipelines(4, ([0, 1], [0, spec.num_layers])),
            "roles": {"generator": {"pipelines": generator}}}  # fmt: skip
    plan = plan_from_dict(data, spec, cluster, roles={"generator": spec})
    return plan, role_of(plan, spec, "generator", spec, 0, cluster)


def test_a_token_takes_as_long_as_reading_weights_and_cache(cluster: Cluster) -> None:
    """On chips with a quarter of the bandwidth four times as long; stages work in turn, and batches of rows, too."""
    spec = replace(load_model("llama2-7b"), num_layers=8)
    costs = RolloutCosts(spec, cluster, SEQ, "bf16", 0.06, NEW)
    of = {}
    for name, generator in (
        ("aged", pipelines(1, (2, [0, 8]))), ("two", pipelines(1, (2, [0, 4]), (3, [4, 8]))),
        ("more", pipelines(16, (2, [0, 8]))), ("tp", pipelines(1, ([2, 3], [0, 8]))),
    ):  # fmt: skip
        _, role = made(spec, cluster, generator)
        (of[name],) = costs.pipelines(role.compiled.plan, None)
    quick = plan_from_dict({"seq_length": SEQ, "global_batch_size": SIZE, "pipelines": pipelines(1, (0, [0, 8]))},
                           spec, cluster)  # fmt: skip
    (fast,) = costs.pipelines(quick, None)
    weights = 2.0 * (8 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096)
    assert of["aged"].token >= weights / 500e9 and fast.token < 0.3 * of["aged"].token
    assert of["aged"].token < of["two"].token < 1.1 * of["aged"].token
    assert of["tp"].token < 0.7 * of["aged"].token
    assert of["aged"].seconds == pytest.approx(SIZE * (of["aged"].prompts + NEW * of["aged"].token))
    cache = 15 * 2 * 8 * 4096 * (SEQ - NEW / 2) * 2
    assert of["more"].token - of["aged"].token >= cache / 500e9 and of["more"].seconds < of["aged"].seconds / 4


def test_who_waits_for_whom(cluster: Cluster) -> None:
    spec = replace(load_model("llama2-7b"), num_layers=4)
    plan, role = made(spec, cluster, pipelines(16, (2, [0, 4])))
    options = CostOptions()

    def of(g: Grpo, generator: ForwardRole | None = role) -> Any:
        return predict_rollouts(plan, spec, cluster, "bf16", options, g, generator)

    turns, ahead = of(Grpo(max_new_tokens=NEW)), of(Grpo(max_new_tokens=NEW, ahead=True))
    costs = RolloutCosts(spec, cluster, SEQ, "bf16", 0.06, NEW).costs
    weights = weight_seconds(CompiledPlan(plan, spec), role.compiled, costs)
    assert weights >= 2 * 4 * (4 * 4096**2 + 3 * 4096 * 11008) / 1.25e9  # over the link between the nodes
    said = turns.role
    assert said.sent == pytest.approx(weights) and said.waits == 0
    assert turns.step_seconds == pytest.approx(said.seconds + said.sent + said.step_seconds)
    assert ahead.step_seconds == pytest.approx(max(said.seconds, said.step_seconds) + said.sent)
    assert "waits for the" in str(ahead.role) and "before a step" in str(turns.role)
    rare = of(Grpo(max_new_tokens=NEW, sync_every=4))
    assert turns.step_seconds - rare.step_seconds == pytest.approx(0.75 * weights)
    twice = of(Grpo(max_new_tokens=NEW, iterations=2))
    assert twice.step_seconds == pytest.approx(said.step_seconds + (said.seconds + said.sent) / 2)
    own = of(Grpo(max_new_tokens=NEW), None)
    assert own.role.ranks == (0, 1) and own.role.sent == 0 and 2 not in own.memory
    assert set(turns.memory) == {0, 1, 2} and turns.busy[2] == pytest.approx(said.seconds)


def test_memory_of_a_generator() -> None:
    """Weights, and keys and values of the rows that are sampled at once; as many bytes more as there are more rows."""
    spec = replace(load_model("llama2-7b"), num_layers=4)
    of = {}
    for rows in (4, 8):
        data = {"seq_length": SEQ, "global_batch_size": SIZE, "pipelines": pipelines(4, (0, [0, 4])),
                "roles": {"generator": {"pipelines": pipelines(rows, ([1, 2], [0, 3]), (3, [3, 4]))}}}  # fmt: skip
        plan = plan_from_dict(data, spec, roles={"generator": spec})
        of[rows] = with_role({}, plan, role_of(plan, spec, "generator", spec, 0), "bf16", 1 << 30, None)
    cache = 2 * 4 * 4096 * SEQ * 2  # of 4 rows in a layer
    grows = {rank: of[8][rank].second_model - of[4][rank].second_model for rank in (1, 2, 3)}
    assert grows == {1: 3 * cache // 2, 2: 3 * cache // 2, 3: cache}
    assert all(of[8][rank].activations > of[4][rank].activations for rank in grows)


def test_runs_and_predict_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = load_model("tiny")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    cluster = load_cluster(str(tmp_path / "cluster.yaml"))
    plan, _ = made(spec, cluster, pipelines(8, (2, [0, spec.num_layers])))
    (tmp_path / "plan.yaml").write_text(dump_yaml(plan))
    words = ["predict", "--plan", f"{tmp_path}/plan.yaml", "--cluster", f"{tmp_path}/cluster.yaml", "--model", "tiny"]
    words += ["--dtype", "fp32", "--json"]
    assert main([*words, "--grpo", "--generator-ahead", "--max-new-tokens", str(NEW)]) == 0
    told = json.loads(capsys.readouterr().out)
    g = Grpo(max_new_tokens=NEW, ahead=True)
    flags = f"--mock-data --model tiny --train-iters 1 --lr 1e-3 --seq-length {SEQ} --micro-batch-size 1"
    run = replace(configure(flags.split(), {"WORLD_SIZE": "1"}), plan=plan, cluster=cluster, grpo=g)
    run = replace(run, role=RoleConfig("generator", "", run.spec))
    prediction, says = record.expectation(run)
    assert prediction is not None and told["step_seconds"] == pytest.approx(prediction.step_seconds)
    assert told["role"]["name"] == "generator" and told["role"]["ranks"] == [2] and str(prediction.role) in says
    read = hm.Plan.read(from_data(plan_data(plan)), hm.Cluster.read(f"{tmp_path}/cluster.yaml"), hm.Model.of(spec),
                        dtype="fp32", beside={"generator": hm.Model.of(spec)})  # fmt: skip
    again = hm.predict(read, hm.Cluster.read(f"{tmp_path}/cluster.yaml"), rollouts=g)
    assert again.step_seconds == told["step_seconds"] and "generator on rank 2" in again.explain()
    for flags, refused in (
        (["--generator-ahead"], "roles.generator"),
        (["--grpo", "--max-new-tokens", str(SEQ)], "leaves no room for a prompt"),
        (["--grpo", "--max-new-tokens", "4", "--preference", "dpo"], "not known beside"),
    ):
        assert main([*words, *flags]) == 2
        assert refused in capsys.readouterr().err


def plan_data(plan: Plan) -> dict[str, Any]:
    from hetero_megatron.plans.dump import to_dict

    return to_dict(plan)


def test_few_tokens_are_on_the_line_through_the_smallest_measured_sizes() -> None:
    """Of each TP degree: a layer has costs that do not shrink with its tokens."""
    rows = [LayerRow("m", 1, size, 64, seconds, 1.0) for size, seconds in ((2, 0.016), (1, 0.010), (4, 0.1))]
    found = _few([*rows, LayerRow("m", 2, 1, 64, 0.5, 1.0), LayerRow("n", 1, 1, 8, 1.0, 1.0)], {("n", 1)})
    assert [(row.micro_batch_size, row.seq_length) for row in found] == [(1, 1), (64, 1)]
    assert [row.forward for row in found] == pytest.approx([0.010 - 63 * 0.006 / 64, 0.010])


def test_chips_that_train_and_sample_have_room_for_both(tmp_path: Path, cluster: Cluster) -> None:
    """In turn: keys, values and what a generator of as many rows works with, where a step's activations are less."""
    spec = replace(load_model("llama2-7b"), num_layers=4)
    whole = pipelines(SIZE, (2, [0, 4]))
    data = {"seq_length": SEQ, "global_batch_size": SIZE, "pipelines": pipelines(1, (0, [0, 4]))}
    plan = plan_from_dict(data | {"roles": {"generator": {"pipelines": whole}}}, spec, cluster,
                          roles={"generator": spec})  # fmt: skip
    role = role_of(plan, spec, "generator", spec, 0, cluster)
    trained = predict(plan, spec, cluster, "bf16").memory[0]
    apart = predict_rollouts(plan, spec, cluster, "bf16", CostOptions(), Grpo(max_new_tokens=NEW), role).memory[2]
    needs = apart.activations + apart.second_model - trained.weights
    assert needs >= 2 * 4 * 4096 * SEQ * 2 * SIZE and needs > trained.activations

    def in_turn(rows: int, on: Cluster) -> Any:
        g = Grpo(max_new_tokens=NEW, rows=rows)
        return predict_rollouts(plan, spec, on, "bf16", CostOptions(), g, None)

    assert in_turn(SIZE, cluster).memory[0] == replace(trained, activations=needs)
    assert in_turn(1, cluster).memory[0] == trained
    between = trained.total + (needs - trained.activations) // 2  # usable: more than training needs, less than both
    memory = f"{round(between / (1 - CostOptions.margin) / 2**20)} MiB"
    (tmp_path / "less.yaml").write_text(CLUSTER.replace("80 GiB", memory))
    less = load_cluster(str(tmp_path / "less.yaml"))
    assert [over.rank for over in in_turn(SIZE, less).over] == [0] and not in_turn(1, less).over


def test_a_token_takes_what_generating_was_measured_to_take(tmp_path: Path) -> None:
    """Layers and what is besides, whatever training's layers take; between measured counts of rows on their line."""
    spec = replace(load_model("llama2-7b"), num_layers=8)
    fingerprint = model_fingerprint(spec)
    rates = {
        "layers": [[fingerprint, 1, size, 64, 0.5, 1.0] for size in (1, 2)], "action_seconds": 0.002,
        "decode_layers": [[fingerprint, 1, 1, 1, 0.003, 0.003], [fingerprint, 1, 8, 1, 0.010, 0.010]],
        "decode_head": [[fingerprint, 1, 1, 1, 0.02, 0.02], [fingerprint, 1, 8, 1, 0.04, 0.04]],
    }  # fmt: skip
    content = json.dumps({"chips": {"card": {"bf16": rates}}})
    (tmp_path / "cluster.yaml").write_text(f"{CLUSTER}rates: {content}\n")
    cluster = load_cluster(str(tmp_path / "cluster.yaml"))
    costs = RolloutCosts(spec, cluster, SEQ, "bf16", 0.06, NEW)
    for rows, layer, rest in ((1, 0.003, 0.02), (8, 0.010, 0.04), (4, 0.006, 0.02 + 0.02 * 3 / 7)):
        data = {"seq_length": SEQ, "global_batch_size": SIZE, "pipelines": pipelines(rows, (0, [0, 8]))}
        (price,) = costs.pipelines(plan_from_dict(data, spec, cluster), None)
        cache = rows * 2 * 8 * 4096 * (SEQ - NEW / 2) * 2 / (0.85 * 2000e9)
        assert price.token == pytest.approx(8 * layer + rest + cache, rel=1e-6)


def test_a_generator_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = load_model("tiny")
    (tmp_path / "cluster.yaml").write_text(CLUSTER.replace("24 GiB", "520 MiB"))
    plan, _ = made(spec, load_cluster(str(tmp_path / "cluster.yaml")), pipelines(16, (2, [0, spec.num_layers])))
    (tmp_path / "plan.yaml").write_text(dump_yaml(plan))
    (tmp_path / "rewards.py").write_text("def good(**_): ...")
    words = f"finetune --dry-run --grpo --model tiny --plan {tmp_path}/plan.yaml --cluster {tmp_path}/cluster.yaml"
    assert main([*words.split(), "--reward-function", f"{tmp_path}/rewards.py:good"]) == 2
    told = capsys.readouterr()
    assert "role generator" in told.out and "2 (aged) by up to" in told.err and told.err.count("\n") == 1
