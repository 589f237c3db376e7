"""Megatron's expert-parallel flags are uniform divisions of experts in a plan, on Megatron's ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.plans import plan_from_dict, to_dict
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.moe_models import MOE_FAMILIES

SPEC = from_hf_config(MOE_FAMILIES["mixtral"])  # 4 experts, 2 layers
KEYS = {"tp": "tensor_model", "cp": "context", "ep": "expert_model", "pp": "pipeline_model", "etp": "expert_tensor"}


def flags(world: int, **sizes: int) -> MegatronParallel:
    named: dict[str, Any] = {f"{KEYS[k]}_parallel_size": v for k, v in sizes.items()}
    return MegatronParallel(world_size=world, seq_length=16, **named)


def megatron_groups(world: int, tp: int = 1, cp: int = 1, ep: int = 1, pp: int = 1, etp: int | None = None) -> set[Any]:
    """Megatron's rank generator (core/parallel_state.py): of experts the order is tp-ep-dp-pp, so a stage's ranks run
    through expert tensor, expert, and expert data parallel. {(ranks that share an expert's columns, first expert)}."""
    etp, count = tp if etp is None else etp, 4
    return {
        (tuple(pp_rank * world // pp + (edp * ep + e) * etp + t for t in range(etp)), e * count // ep)
        for pp_rank in range(pp) for edp in range(world // pp // (ep * etp)) for e in range(ep)
    }  # fmt: skip


CASES = [
    (4, {"ep": 4}), (4, {"ep": 2}), (8, {"ep": 4, "pp": 2}), (8, {"tp": 2, "ep": 2}), (8, {"tp": 2, "ep": 4, "etp": 1}),
    (4, {"tp": 2, "ep": 2, "etp": 1}), (8, {"tp": 2, "cp": 2, "ep": 2, "etp": 1}), (8, {"cp": 2, "ep": 4}),
    (4, {"tp": 2, "ep": 1, "etp": 1}), (8, {"tp": 1, "ep": 2, "etp": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("world", "sizes"), CASES, ids=str)
def test_experts_are_where_megatron_has_them(world: int, sizes: dict[str, int]) -> None:
    plan = from_megatron(flags(world, **sizes), SPEC)
    found = {
        (member.ranks, member.experts[0])
        for p in plan.pipelines for s in p.stages for group in s.experts for member in group.members
    }  # fmt: skip
    assert found == megatron_groups(world, **sizes)
    assert sorted(r for p in plan.pipelines for s in p.stages for r in s.ranks) == list(range(world))
    dp = world // (sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("pp", 1))
    assert plan.global_batch_size == dp, "one sequence per data-parallel replica"
    assert plan_from_dict(to_dict(plan), SPEC).fingerprint() == plan.fingerprint()


def test_without_expert_parallelism_it_is_the_plain_plan() -> None:
    for sizes in ({"tp": 2}, {"tp": 2, "ep": 1, "etp": 2}, {"cp": 2}):
        assert all(not s.experts for p in from_megatron(flags(4, **sizes), SPEC).pipelines for s in p.stages)


def test_stages_without_experts_have_no_groups() -> None:
    kinds = (replace(SPEC.layer(0), mlp="dense"), SPEC.layer(0))
    plan = from_megatron(flags(4, ep=2, pp=2), replace(SPEC, layer_kinds=kinds))
    first, second = plan.pipelines[0].stages
    assert not first.experts and second.experts and first.dp_split == second.dp_split == (1, 1)


@pytest.mark.parametrize(("world", "sizes", "field"), [
    (3, {"ep": 3}, "--expert-model-parallel-size"), (2, {"ep": 4}, "--expert-model-parallel-size"),
    (6, {"tp": 3, "ep": 2, "etp": 1}, "--expert-model-parallel-size"),
    (2, {"etp": 0}, "--expert-tensor-parallel-size"), (2, {"ep": 0}, "--expert-model-parallel-size"),
])  # fmt: skip
def test_sizes_that_do_not_fit(world: int, sizes: dict[str, int], field: str) -> None:
    with pytest.raises(UserError) as caught:
        from_megatron(flags(world, **sizes), SPEC)
    assert caught.value.field == field and caught.value.accepted


def test_replicas_that_share_experts_must_be_neighbours() -> None:
    with pytest.raises(UserError) as caught:
        from_megatron(replace(flags(4, ep=2, pp=2), use_tp_pp_dp_mapping=True), SPEC)
    assert caught.value.field == "--use-tp-pp-dp-mapping"
    assert from_megatron(replace(flags(4, tp=2, ep=2, etp=1), use_tp_pp_dp_mapping=True), SPEC).pipelines


def test_a_dense_model_has_no_experts_to_divide() -> None:
    dense = replace(SPEC, moe=None, layer_kinds=(replace(SPEC.layer(0), mlp="dense"),))
    for sizes in ({"ep": 2}, {"etp": 1}):
        with pytest.raises(UserError, match="no mixture of experts"):
            from_megatron(flags(2, **sizes), dense)
