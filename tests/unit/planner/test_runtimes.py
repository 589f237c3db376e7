"""Plans for other runtimes: what is written is read back, by them and by us; the search against all their plans."""

from __future__ import annotations

import importlib.util
import json
import random
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from hetero_megatron.cli.main import main
from hetero_megatron.cluster import Cluster, load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.whatif.runtime_plans import best_for
from hetero_megatron.plans import Plan
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from hetero_megatron.plans.runtimes.degrees import layout, renumbered
from hetero_megatron.plans.runtimes.runtime import GivenSizes, nodes_of
from hetero_megatron.plans.runtimes.table import RUNTIMES, reordered, written
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec, load_model

ROOT = Path(__file__).parents[3]
MIXED = ROOT / "examples" / "clusters" / "mixed_small.yaml"

CLUSTER = """
version: 1
nodes:
  - {{name: a, chip: A100-80-SXM, count: {}, chips_per_node: {}}}
  - {{name: l, chip: L40S, chips_per_node: {}}}
links:
  inter_node: {{bandwidth: 25 GB/s, latency: 10 us}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Two nodes of four, one of four others."""
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
    path.write_text(CLUSTER.format(2, 4, 4))
    return load_cluster(path)


def drawn(name: str, seed: int, spec: ModelSpec, cluster: Cluster) -> tuple[Plan, tuple[str, ...]]:
    """(a random plan that the runtime can express, nodes in a random order)."""
    draw, runtime = random.Random(f"{name} {seed}"), RUNTIMES[name]
    nodes = list(dict.fromkeys(rank.node for rank in cluster.ranks))
    draw.shuffle(nodes)
    world = 4 * len(nodes)
    tp = draw.choice((1, 2, 4)) if runtime.tensor else 1
    pp = draw.choice([n for n in (1, 2, 3, 6) if world // tp % n == 0]) if runtime.pipeline else 1
    dp, size = world // (tp * pp), draw.choice((1, 2, 3))
    cuts = sorted(draw.sample(range(1, spec.num_layers), pp - 1))
    counts = [b - a for a, b in zip([0, *cuts], [*cuts, spec.num_layers], strict=True)]
    recompute, shard = draw.choice(runtime.recompute), draw.choice(runtime.weights)
    flags = MegatronParallel(
        world, draw.choice((512, 1024)), size, dp * size * draw.choice((1, 4)), tp, pp,
        pipeline_model_parallel_layout=None if len(set(counts)) == 1 else layout(counts),
        recompute_granularity={"none": None, "selective": "selective"}.get(recompute, "full"),
        recompute_method={"full": "uniform", "first": "block"}.get(recompute),
        recompute_num_layers={"full": 1, "first": max(1, max(counts) - 1)}.get(recompute),
        use_torch_fsdp2=dp > 1 and shard is not None,
        torch_fsdp2_no_reshard_after_forward=dp > 1 and shard is False,
    )  # fmt: skip
    return reordered(from_megatron(flags, spec), nodes, cluster), tuple(nodes)


def read(name: str, text: str, plan: Plan, nodes: tuple[str, ...], spec: ModelSpec, cluster: Cluster) -> Plan:
    size = plan.pipelines[0].micro_batch_size // len(plan.pipelines[0].stages[0].units)
    said = {"deepspeed": (plan.seq_length, None, None)}.get(name, (plan.seq_length, size, plan.global_batch_size))
    runtime_read = RUNTIMES[name].read
    assert runtime_read is not None
    given = GivenSizes(plan.world_size, spec.num_layers, *(said if name != "torchtitan" else ()))
    loaded = runtime_read(text, f"f.{ {'deepspeed': 'json', 'torchtitan': 'toml'}.get(name, 'yaml')}", given)
    assert loaded.dtype == "bf16"
    return reordered(from_megatron(loaded.flags, spec), nodes, cluster)


@pytest.mark.parametrize("name", ["torchtitan", "deepspeed", "accelerate"])
def test_round_trip(name: str, cluster: Cluster) -> None:
    spec = load_model("tiny")
    for seed in range(40):
        plan, nodes = drawn(name, seed, spec, cluster)
        text = written(name, plan, spec, cluster, "bf16")
        assert nodes_of(text) in ((), nodes)  # JSON has no comments
        assert read(name, text, plan, nodes, spec, cluster).fingerprint() == plan.fingerprint(), text


def test_flags_of_megatron(cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command, which reads them by its own table: the plan's step, whatever the order of nodes."""
    spec, path = load_model("tiny"), tmp_path / "flags.txt"
    for seed in range(8):
        plan, _ = drawn("megatron", seed, spec, cluster)
        path.write_text(written("megatron", plan, spec, cluster, "bf16"))
        assert main(["predict", "--from", str(path), "--model", "tiny", "--cluster", cluster.file, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["step_seconds"]
        assert found == predict(plan, spec, cluster).step_seconds, path.read_text()


def test_their_own_readers(cluster: Cluster, tmp_path: Path) -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # takes seconds

    spec = load_model("tiny")
    for seed in range(10):
        plan, _ = drawn("accelerate", seed, spec, cluster)
        path = tmp_path / "accelerate.yaml"
        path.write_text(written("accelerate", plan, spec, cluster, "bf16"))
        config = load_config_from_file(str(path))
        assert (config.num_processes, config.num_machines, config.mixed_precision) == (12, 3, "bf16")
        weights = plan.stages[0].weights
        assert weights is not None
        assert config.fsdp_config["fsdp_reshard_after_forward"] is weights.reshard_after_forward
        assert config.fsdp_config["fsdp_activation_checkpointing"] is (plan.stages[0].recompute.kind == "full")
        plan, _ = drawn("deepspeed", seed, spec, cluster)
        data = json.loads(written("deepspeed", plan, spec, cluster, "bf16"))
        stage = int(DeepSpeedZeroConfig(**data["zero_optimization"]).stage)
        assert stage == (1 if plan.stages[0].weights is None else 3)
        steps = data["train_micro_batch_size_per_gpu"] * data["gradient_accumulation_steps"] * 12
        assert data["train_batch_size"] == steps == plan.global_batch_size


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_torchtitan_knows_the_keys(cluster: Cluster) -> None:
    import tomllib

    from torchtitan.config.configs import ParallelismConfig, TrainingConfig

    spec = load_model("tiny")
    for seed in range(10):
        plan, _ = drawn("torchtitan", seed, spec, cluster)
        data = tomllib.loads(written("torchtitan", plan, spec, cluster, "bf16"))
        TrainingConfig(**data["training"])
        ParallelismConfig(**data["parallelism"])


@pytest.mark.slow
def test_torchtitan_reads_the_flags(cluster: Cluster) -> None:
    """By the parser of its command line, which replaced files in 0.3: what the comment says is what the file says."""
    import tomllib

    manager = pytest.importorskip("torchtitan.config.manager")
    pytest.importorskip("torchtitan.models.llama3.config_registry")
    spec = load_model("tiny")
    for seed in range(6):
        plan, _ = drawn("torchtitan", seed, spec, cluster)
        text = written("torchtitan", plan, spec, cluster, "bf16")
        (flags,) = [line.split(": ", 1)[1] for line in text.splitlines() if line.startswith("# from 0.3 on as flags")]
        debug = ["--module", "llama3", "--config", "llama3_debugmodel"]
        config, data = manager.ConfigManager().parse_args([*debug, *shlex.split(flags)]), tomllib.loads(text)
        parts = data["parallelism"].get("module_fqns_per_model_part")
        if parts:
            parts[-1][-1] = "lm_head"
        for section in ("training", "parallelism"):
            found = getattr(config, section)
            assert {key: getattr(found, key) for key in data[section]} == data[section]
        recompute = config.activation_checkpoint
        assert (recompute is not None) == (data["activation_checkpoint"]["mode"] == "full")
        assert recompute is None or "FullAC" in type(recompute).__qualname__


@pytest.mark.slow
def test_against_all_plans(tmp_path: Path) -> None:
    """Of three unlike chips: no plan that the runtime can express is more than 1 % faster than what is found."""
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.format(1, 1, 2))
    for name in RUNTIMES:
        problem = PlanningProblem(load_model("tiny"), load_cluster(path), 256, 6)
        assert best_for(RUNTIMES[name], problem).prediction.step_seconds <= 1.01 * exhaustive(name, problem), name


def exhaustive(name: str, problem: PlanningProblem) -> float:
    """Step seconds of the best of all plans over all ranks, in the order of the cluster file and the other way."""
    runtime, spec, best = RUNTIMES[name], problem.model, float("inf")
    nodes = list(dict.fromkeys(rank.node for rank in problem.cluster.ranks))
    world, batch = problem.cluster.world_size, problem.global_batch_size
    for order, tp, pp, size in product({tuple(nodes), tuple(nodes[::-1])}, (1, 2), range(1, 4), (1, 2, 4)):
        if world % (tp * pp) or batch % (world // (tp * pp) * size):
            continue
        if (tp > 1 and not runtime.tensor) or (pp > 1 and not runtime.pipeline):
            continue
        for counts in product(range(1, spec.num_layers + 1), repeat=pp):
            if sum(counts) != spec.num_layers:
                continue
            for kind, shard in product(runtime.recompute, runtime.weights):
                flags = MegatronParallel(
                    world, problem.seq_length, size, batch, tp, pp, pipeline_model_parallel_layout=layout(counts),
                    recompute_granularity={"none": None, "selective": "selective"}.get(kind, "full"),
                    use_torch_fsdp2=shard is not None, torch_fsdp2_no_reshard_after_forward=shard is False,
                )  # fmt: skip
                try:
                    plan = reordered(from_megatron(flags, spec), order, problem.cluster)
                    found = predict(plan, spec, problem.cluster)
                except UserError:
                    continue
                if not found.over:
                    best = min(best, found.step_seconds)
    return best


REFUSED: list[tuple[str, str | dict[str, Any], str]] = [
    ("deepspeed", {"zero_optimization": {"stage": 2}}, "zero_optimization.stage"),
    ("deepspeed", {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param"),
    ("deepspeed", {"zero_optimisation": {"stage": 3}}, "zero_optimization?"),
    ("deepspeed", {"zero_optimization": {"stage": 1}, "train_batch_size": 7}, "the file says 7"),
    ("deepspeed", {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "yes"}}, "bf16.enabled"),
    ("torchtitan", "[parallelism]\ntensor_parallel_degre = 2", "tensor_parallel_degree?"),
    ("torchtitan", "[parallelism]\ntensor_parallel_degree = 5", "no multiple"),
    ("torchtitan", "[parallelism]\ndata_parallel_replicate_degree = 2", "data_parallel_replicate_degree"),
    ("torchtitan", "[parallelism]\ncontext_parallel_degree = 2", "context_parallel_degree"),
    ("torchtitan", "[activation_checkpoint]\nmode = 'selective'", "activation_checkpoint.mode"),
    ("torchtitan", "[training]\nseq_len = true", "training.seq_len"),
    ("torchtitan", "[parallelism\n", "no TOML"),
    ("torchtitan", '[parallelism]\npipeline_parallel_degree = 2\nmodule_fqns_per_model_part = [["layers.0"], ["norm"]]',
     "module_fqns_per_model_part"),
    ("accelerate", "distributed_type: MULTI_GPU", "distributed_type"),
    ("accelerate", "distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}", "fsdp_version"),
    ("accelerate", "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard: 1}", "fsdp_reshard"),
    ("accelerate", "distributed_type: FSDP\nnum_processes: 3\nfsdp_config: {fsdp_version: 2}", "num_processes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data", "said"), REFUSED)
def test_refused_by_name(name: str, data: str | dict[str, Any], said: str) -> None:
    text = data if isinstance(data, str) else json.dumps({"train_micro_batch_size_per_gpu": 1, **data})
    mode = "[activation_checkpoint]\nmode = 'none'\n"
    if name == "torchtitan" and "activation_checkpoint" not in text:
        text = mode + text
    runtime_read = RUNTIMES[name].read
    assert runtime_read is not None
    suffix = {"deepspeed": "json", "torchtitan": "toml", "accelerate": "yaml"}[name]
    with pytest.raises(UserError) as error:
        runtime_read(text, f"f.{suffix}", GivenSizes(4, 4) if name == "torchtitan" else GivenSizes(4, 4, 256, 1, 8))
    assert said in str(error.value)


def test_what_a_runtime_cannot_say(cluster: Cluster) -> None:
    spec = load_model("tiny")
    flags = MegatronParallel(12, 512, 1, 12, 1, 2)
    plan = from_megatron(flags, spec)
    for name in ("deepspeed", "accelerate"):
        with pytest.raises(UserError, match="has no pipeline parallelism"):
            written(name, plan, spec, cluster, "bf16")
    with pytest.raises(UserError, match="weights"):  # torchtitan's replicas do not share optimizer state alone
        written("torchtitan", plan, spec, cluster, "bf16")
    order = list(range(12))
    order[0], order[11] = 11, 0
    with pytest.raises(UserError, match="ranks of a node one after another"):
        written("megatron", renumbered(plan, order), spec, cluster, "bf16")
    with pytest.raises(UserError, match="dtype"):
        written("megatron", plan, spec, cluster, "fp64")


@pytest.mark.slow
def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """plan --for NAME writes what predict --from reads, with the same step, never faster than the best of all."""
    asked = ["plan", "--model", "tiny", "--cluster", str(MIXED), "--seq-length", "256", "--global-batch-size", "8",
             "--quiet", "--json", "--more-schedules", "never"]  # fmt: skip
    for name, suffix in (("megatron", "sh"), ("torchtitan", "toml"), ("deepspeed", "json"), ("accelerate", "yaml")):
        path = tmp_path / f"config.{suffix}"
        assert main([*asked, "--for", name, "--export", f"{name}:{path}", "--out", str(tmp_path / "plan.yaml")]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["slower"] >= 1 and found["file"] == path.read_text()
        words = ["predict", "--from", str(path), "--model", "tiny", "--cluster", str(MIXED), "--json"]
        if name in ("deepspeed", "accelerate"):
            words += ["--seq-length", "256"]
        if name == "accelerate":
            size = path.read_text().split("per_device_train_batch_size ")[1].split(",")[0]
            words += ["--micro-batch-size", size, "--global-batch-size", "8"]
        if name == "deepspeed":
            words += ["--nodes", ",".join(_nodes(tmp_path / "plan.yaml"))]
        assert main(words) in (0, 1)
        assert json.loads(capsys.readouterr().out)["step_seconds"] == pytest.approx(found["step_seconds"], rel=1e-12)
    assert main([*asked, "--for", "megatron", "--export", "torchtitan:x"]) == 2
    assert "contradicts --for" in capsys.readouterr().err
    assert main([*asked, "--for", "megatron", "--compare"]) == 2


def _nodes(plan: Path) -> list[str]:
    """Nodes of the ranks of a plan's only stage."""
    ranks = load_cluster(MIXED).ranks
    used = yaml.safe_load(plan.read_text())["pipelines"][0]["stages"][0]["ranks"]
    first, _, last = str(used).strip("[]").partition("-")
    return list(dict.fromkeys(rank.node for rank in ranks if int(first) <= rank.rank <= int(last or first)))
