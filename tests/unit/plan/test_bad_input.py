"""Every bad plan or cluster file ends in one message that names the field, the line and what is wrong.

Fixtures say what is expected of them: ``# field:`` and ``# says:`` at the top, and ``<-- here`` on the
offending line.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hetero_megatron.cluster import load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plans import load_plan
from hetero_megatron.plans.canonical import SCHEDULES
from hetero_megatron.plans.importers.flagscale import FlagScaleParallel, from_flagscale
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.paths import FIXTURES

PLAN_FIXTURES = FIXTURES / "plans"
PLANS = sorted(PLAN_FIXTURES.glob("*.yaml"))
CLUSTERS = sorted((PLAN_FIXTURES / "clusters").glob("*.yaml"))


def small_spec(num_layers: int = 6, max_positions: int = 256, heads: int = 4) -> ModelSpec:
    return from_hf_config(
        {
            "model_type": "llama",
            "hidden_size": 16 * heads,
            "intermediate_size": 96,
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "vocab_size": 101,
            "max_position_embeddings": max_positions,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        },
        where="test",
    )


def check(path: Path, error: UserError, said: dict[str, str]) -> None:
    lines = [i for i, line in enumerate(path.read_text().splitlines(), 1) if "<-- here" in line]
    assert len(lines) == 1
    message = str(error)
    assert error.field == said["field"], message
    assert message.startswith(f"{path}:{lines[0]}: "), message
    assert said["says"] in message
    assert "\n" not in message and len(message) < 700


def expectations(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^# (\w+): ?(.*)$", path.read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_bad_plan(path: Path) -> None:
    said = expectations(path)
    cluster = load_cluster(PLAN_FIXTURES / said["cluster"]) if "cluster" in said else None
    with pytest.raises(UserError) as caught:
        load_plan(path, small_spec(), cluster, said.get("dtype"))
    check(path, caught.value, said)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_bad_cluster(path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_cluster(path)
    check(path, caught.value, expectations(path))


def test_there_are_enough_fixtures() -> None:
    assert len(PLANS) >= 35 and len(CLUSTERS) >= 35


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "", "a.yaml: the file is empty"),
        ("a.json", '{"seq_length": 32,\n "x" 1}', "a.json:2: not valid JSON"),
        ("a.json", '{\n\t"seq_lenght": 32}', "a.json:2: seq_lenght: unknown key"),
        ("a.yaml", "&a [*a]", "the alias 'a' is not defined before, or contains itself"),
        ("a.yaml", "- 1", "a.yaml:1: document = [1]: a mapping was expected"),
        ("a.yaml", "seq_length: \x00", "a.yaml: not valid YAML"),
        ("a.yaml", "[" * 100_000, "nested too deeply"),
    ],
)
def test_not_a_plan_at_all(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_plan(path, small_spec())
    assert says in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent.yaml: cannot read the file: No such file"):
        load_plan(tmp_path / "absent.yaml", small_spec())
    with pytest.raises(UserError, match="cannot read the file: it is a directory"):
        load_plan(tmp_path, small_spec())
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load_plan(tmp_path / "binary.yaml", small_spec())


MEGATRON = {
    "ranks": ({"world_size": 6}, "--tensor-model-parallel-size", "6 ranks are not a multiple of 2 x 2"),
    "global batch": ({"global_batch_size": 7}, "--global-batch-size", "4 or 8"),
    "ranks of many stages": ({"pipeline_model_parallel_size": 8}, "--pipeline-model-parallel-size", "of 2 x 8"),
    "context": ({"context_parallel_size": 3}, "--context-parallel-size", "multiple of 2 x 3 x 2"),
    "context type": ({"cp_comm_type": ["ring"]}, "--cp-comm-type", "p2p, a2a, a2a+p2p, allgather"),
    "hierarchy": (
        {"context_parallel_size": 2, "cp_comm_type": ["a2a+p2p"]},
        "--hierarchical-context-parallel-sizes",
        "needs it",
    ),
    "expert": ({"expert_model_parallel_size": 2}, "--expert-model-parallel-size", "no mixture of experts"),
    "zero": ({"micro_batch_size": 0}, "--micro-batch-size", "too small"),
    "virtual": (
        {"num_layers_per_virtual_pipeline_stage": 2},
        "--num-layers-per-virtual-pipeline-stage",
        "6 layers over 2 stages cannot be divided",
    ),
    "virtual stages": (
        {"num_virtual_stages_per_pipeline_rank": 2}, "--num-virtual-stages-per-pipeline-rank", "cannot be divided",
    ),
    "virtual twice": (
        {"num_virtual_stages_per_pipeline_rank": 3, "num_layers_per_virtual_pipeline_stage": 1},
        "--num-layers-per-virtual-pipeline-stage",
        "contradicts",
    ),
    "virtual of one stage": (
        {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_model_parallel_size": 1},
        "--num-virtual-stages-per-pipeline-rank",
        "several pipeline stages",
    ),
    "virtual with 1f1b": (
        {"num_virtual_stages_per_pipeline_rank": 3, "schedule": "1f1b"},
        "--num-virtual-stages-per-pipeline-rank",
        "the 1f1b schedule runs one range",
    ),
    "virtual beside a layout": (
        {"num_virtual_stages_per_pipeline_rank": 3, "pipeline_model_parallel_layout": "Ett|t|tt|tL"},
        "--num-virtual-stages-per-pipeline-rank",
        "has 2 virtual stages",
    ),
    "first": (
        {"decoder_first_pipeline_num_layers": 9},
        "--decoder-first-pipeline-num-layers",
        "leaves -3 of 6 layers for 1 of 2 pipeline stages. Accepted: first, last",
    ),
    "both": (
        {"decoder_first_pipeline_num_layers": 2, "account_for_loss_in_pipeline_split": True},
        "--account-for-loss-in-pipeline-split",
        "contradicts",
    ),
    "layout contradicts": (
        {"pipeline_model_parallel_layout": "Et*3|t*3L", "decoder_last_pipeline_num_layers": 2},
        "--decoder-last-pipeline-num-layers",
        "contradicts",
    ),
    "layout m": (
        {"pipeline_model_parallel_layout": "Et*3|t*3,m|L"},
        "--pipeline-model-parallel-layout",
        "'m'",
    ),
    "layout stages": (
        {"pipeline_model_parallel_layout": "Ett|tt|ttL"},
        "--pipeline-model-parallel-layout",
        "3 stages for 2 pipeline-parallel ranks",
    ),
    "layout count": (
        {"pipeline_model_parallel_layout": "Et*4|t*3L"},
        "--pipeline-model-parallel-layout",
        "7 decoder",
    ),
    "layout E": (
        {"pipeline_model_parallel_layout": "t*3|Et*3L"},
        "--pipeline-model-parallel-layout",
        "embedding",
    ),
    "layout L": ({"pipeline_model_parallel_layout": "Et*3|Lt*3"}, "--pipeline-model-parallel-layout", "loss"),
    "layout symbol": (
        {"pipeline_model_parallel_layout": "Ex*3|t*3L"},
        "--pipeline-model-parallel-layout",
        "'x'",
    ),
    "layout open": (
        {"pipeline_model_parallel_layout": "E(t|L"},
        "--pipeline-model-parallel-layout",
        "without ')'",
    ),
    "layout close": (
        {"pipeline_model_parallel_layout": "Et)|L"},
        "--pipeline-model-parallel-layout",
        "without '('",
    ),
    "layout star": (
        {"pipeline_model_parallel_layout": "Et*|L"},
        "--pipeline-model-parallel-layout",
        "without a number",
    ),
    "layout bomb": (
        {"pipeline_model_parallel_layout": "E((t*9999)*9999)*9999|L"},
        "--pipeline-model-parallel-layout",
        "absurd",
    ),
    "recompute of whole modules": (
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "shared_experts"]},
        "--recompute-modules", "other modules are recomputed with their layer",
    ),
    "recompute of norms alone": (
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
        "--recompute-modules", "recomputed together",
    ),
    "recompute of both kinds": (
        {"recompute_activations": True, "recompute_modules": ["core_attn", "layernorm", "mlp_act"]},
        "--recompute-modules", "not both",
    ),
    "granularity": ({"recompute_granularity": "some"}, "--recompute-granularity", "unknown granularity"),
    "method alone": (
        {"recompute_method": "block"},
        "--recompute-method",
        "needs --recompute-granularity full",
    ),
    "block": (
        {"recompute_granularity": "full", "recompute_method": "block"},
        "--recompute-num-layers",
        "block method needs it",
    ),
    "chunks": (
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        "--recompute-num-layers",
        "chunks of several layers",
    ),
    "sequence": ({"seq_length": 4096}, "--seq-length", "256 positions"),
}


@pytest.mark.parametrize("name", MEGATRON)
def test_bad_megatron_flags(name: str) -> None:
    changes, field, says = MEGATRON[name]
    good = {
        "world_size": 8,
        "seq_length": 64,
        "micro_batch_size": 2,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
    }
    with pytest.raises(UserError) as caught:
        from_megatron(MegatronParallel(**{**good, **changes}), small_spec())  # type: ignore[arg-type]
    assert caught.value.field == field
    assert says in str(caught.value)
    assert str(caught.value).startswith("command line: --")


FLAGSCALE = {
    "not fives": ({"hetero_process_meshes": [2, 1, 1, 1]}, "--hetero-process-meshes", "groups of five"),
    "cp and dp": (
        {"hetero_process_meshes": [1, 1, 1, 1, 1, 1, 2, 1, 2, 1]},
        "--hetero-process-meshes",
        "mesh 1 has context parallelism and 2 data-parallel ranks",
    ),
    "ep": ({"hetero_process_meshes": [1, 1, 2, 1, 2]}, "--hetero-process-meshes", "expert parallelism 2"),
    "dp": (
        {"hetero_process_meshes": [1, 1, 1, 2, 1, 1, 1, 1, 3, 1]},
        "--hetero-process-meshes",
        "data parallel 3",
    ),
    "world": ({"world_size": 5}, "--hetero-process-meshes", "use 4 ranks, 5 were started"),
    "types": ({"hetero_device_types": ["A"] * 3}, "--hetero-device-types", "3 names for 2 meshes"),
    "split length": (
        {"hetero_pipeline_layer_split": [6]},
        "--hetero-pipeline-layer-split",
        "1 entry for 2 pipeline stages",
    ),
    "split sum": ({"hetero_pipeline_layer_split": [2, 3]}, "--hetero-pipeline-layer-split", "sums to 5"),
    "recompute over micro-batches": (
        {"recompute_granularity_per_stage_micro_batch": [[1, 2, 0, 2, 1], [1, 4, 0]]},
        "--recompute-granularity-per-stage-micro-batch",
        "changes between micro-batches",
    ),
    "recompute count": (
        {"recompute_granularity_per_stage_micro_batch": [[2, 3, 1]]},
        "--recompute-granularity-per-stage-micro-batch",
        "covers 3 of 4 micro-batches",
    ),
    "recompute stages": (
        {"recompute_granularity_per_stage_micro_batch": [[1, 4, 1]]},
        "--recompute-granularity-per-stage-micro-batch",
        "1 stage of 2",
    ),
}


@pytest.mark.parametrize("name", FLAGSCALE)
def test_bad_flagscale_flags(name: str) -> None:
    changes, field, says = FLAGSCALE[name]
    good = {
        "seq_length": 64,
        "hetero_process_meshes": [2, 1, 1, 1, 1, 1, 1, 1, 2, 1],
        "hetero_pipeline_layer_split": [4, 2],
        "micro_batch_size": 2,
        "global_batch_size": 8,
    }
    with pytest.raises(UserError) as caught:
        from_flagscale(FlagScaleParallel(**{**good, **changes}), small_spec())  # type: ignore[arg-type]
    assert caught.value.field == field
    assert says in str(caught.value)


def test_every_schedule_is_in_the_capabilities_table() -> None:
    from hetero_megatron.plans.capabilities import TABLE, supports

    assert all(f"schedule.{name}" in TABLE for name in SCHEDULES)
    assert all(supports(f"schedule.{name}") for name in SCHEDULES) and supports("context")
