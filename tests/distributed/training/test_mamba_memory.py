"""Memory formulas of stages with Mamba-2, against dry runs of their ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_megatron.dry_run.one_rank import run_rank
from hetero_megatron.plans.memory.of_plan import estimate_memory
from tests.distributed.training.test_hybrid_memory import FULL, LINEAR, check_stages, configured
from tests.support.moe_models import MAMBAS
from tests.support.selection import quick
from tests.support.small_plans import stage

MODEL = MAMBAS["granite_hybrid"] | {
    "hidden_size": 64, "shared_intermediate_size": 96, "vocab_size": 160, "num_hidden_layers": 6,
    "max_position_embeddings": 256, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_n_groups": 1,
    "layer_types": [LINEAR] * 3 + [FULL, LINEAR, FULL],
}  # fmt: skip


@pytest.mark.parametrize("recompute", quick(["none", "selective", "elementwise", "full"], [], ["none"]))
def test_each_stage_holds_what_its_own_layers_keep(recompute: str, tmp_path: Path) -> None:
    """Two ranks of the first one have copies of the one group's B and C."""
    check_stages(tmp_path, MODEL, recompute, 0.98)


SINGLE = MAMBAS["nemotron_h"] | {
    "hidden_size": 64, "intermediate_size": 384, "vocab_size": 160, "max_position_embeddings": 256, "n_groups": 1,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32,
    "layers_block_type": [LINEAR, "mlp", LINEAR, "mlp", FULL, "mlp"],
}  # fmt: skip


@pytest.mark.parametrize("recompute", quick(["none", "selective", "elementwise", "full"], [], ["elementwise"]))
def test_layers_of_one_block_each(recompute: str, tmp_path: Path) -> None:
    """Stages of Mamba-2 and MLP, of MLP and attention, and of one MLP."""
    check_stages(tmp_path, SINGLE, recompute, 0.98)


EXPERTS = SINGLE | {
    "layers_block_type": [LINEAR, "moe", LINEAR, "moe", FULL, "moe"], "n_routed_experts": 5, "num_experts_per_tok": 5,
    "moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 192,
}  # fmt: skip


@pytest.mark.parametrize("recompute", quick(["none", "selective", "elementwise", "full"], [], ["none", "elementwise"]))
def test_layers_of_experts_without_gates(recompute: str, tmp_path: Path) -> None:
    check_stages(tmp_path, EXPERTS, recompute, 0.98)


@pytest.mark.slow
def test_divided_experts_without_gates(tmp_path: Path) -> None:
    """One rank has two of them, the other three."""
    divided = [{"ranks": [0, 1], "experts": [[0, 2], [2, 5]]}]
    run = configured(tmp_path, EXPERTS, [stage([0, 1], [0, 6], tp=2, experts=divided)])
    for rank, estimate in estimate_memory(run.plan, run.spec, run.dtype).items():
        dry = run_rank(run, rank)
        assert dry.parameters == estimate.weights
        assert 0.98 * dry.peak <= estimate.total <= 1.11 * dry.peak, estimate.total / dry.peak


@pytest.mark.slow
def test_members_of_context_groups_hold_what_their_own_tokens_keep(tmp_path: Path) -> None:
    """In zigzag order, where backward is of one of a member's two runs after the other."""
    model = MODEL | {"num_hidden_layers": 2, "layer_types": [FULL, LINEAR], "mamba_n_groups": 2}
    run = configured(tmp_path, model, [stage(
        [0, 1, 2], [0, 2], tp_split=[[1, 1], [1]], kv={"block": 64}, order="zigzag", context=[
            {"ranks": [[0, 1]], "tokens": [128], "heads": [4]}, {"ranks": [2], "tokens": [64], "heads": [4]}],
    )])  # fmt: skip
    estimate, dry = estimate_memory(run.plan, run.spec, run.dtype)[1], run_rank(run, 1)
    assert 0.995 * dry.peak <= estimate.total <= 1.11 * dry.peak, estimate.total / dry.peak
