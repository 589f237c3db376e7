"""A run whose experts are balanced stops under one division of experts and goes on under any other: no expert, no bias
and no moment is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_megatron.comm import Comm
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.spec import ModelSpec
from tests.distributed.checkpoint.test_checkpoint import build, check_pair, save, start, steps
from tests.distributed.training.test_moe_balance import ALL, GROUPS, OLMOE
from tests.support.parity import Case, fixed_case
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

PLANS: dict[str, dict[str, Any]] = {
    "one_rank": plan([pipe(2, 2, stage([0], [0, 2]))]),
    "other_counts_and_a_rank_without": plan([pipe(2, 2, stage([0, 1, 2], [0, 2], tp=3, experts=[
        {"ranks": [2, 0, 1], "experts": [[0, 2], [], [2, 6]]}]))]),
    "replicated_over_a_pipeline": plan([
        pipe(2, 1, stage([0, 1], [0, 1], tp=1, experts=[{"ranks": [0, 1], "experts": [[0, 4], [3, 6]]}]),
             stage([2], [1, 2])),
        pipe(2, 1, stage([3], [0, 2])),
    ]),
}  # fmt: skip


def case_of(spelled: dict[str, Any], dtype: str = "fp64", **changes: Any) -> Case:
    return fixed_case(OLMOE, spelled, dtype=dtype, balancing=ALL, router=GROUPS, masked=True, **changes)


@pytest.mark.parametrize("name", quick(PLANS, ["replicated_over_a_pipeline"]))
def test_experts_and_bias_go_on_under_another_division(name: str, tmp_path: Path) -> None:
    uneven = plan([pipe(2, 2, stage([0, 1], [0, 2], tp=1, dp_split=[1, 1], experts=[
        {"ranks": [0, 1], "experts": [[0, 5], [5, 6]]}]))])  # fmt: skip
    check_pair(case_of(uneven), case_of(PLANS[name]), tmp_path)


def train_in_bf16(comm: Comm, case: Case, plan: Plan, spec: ModelSpec, initial: Any, path: str) -> Any:
    runtime = build(comm, case, plan, spec, initial)
    if runtime is None:
        return None
    seen = steps(runtime, case, plan.global_batch_size, 0, 3)
    save(runtime, path, 3, dtype="bf16").wait()
    biases = {n: p.detach() for n, p in runtime.sync.params.items() if "correction" in n}
    assert runtime.optimizer is not None
    owned = {n: m.clone() for n, _, m in runtime.optimizer.owned() if "correction" in n}
    dtypes = {str(p.dtype) for p in (*biases.values(), *owned.values())}
    return {"steps": seen, "bias": {n: b.float().numpy().copy() for n, b in biases.items()}, "dtypes": dtypes}


def test_in_bf16_the_bias_stays_in_fp32(tmp_path: Path) -> None:
    """Of every holder the same, moved by whole steps: bf16 would round steps of this size away."""
    case = case_of(PLANS["replicated_over_a_pipeline"], "bf16")
    spec, initial, _ = start(case)
    found = shared_pool().run(train_in_bf16, case, plan_from_dict(case.plan, spec), spec, initial, str(tmp_path))
    held: dict[str, list[np.ndarray]] = {}
    for seen in found[: case.ranks]:
        assert seen["dtypes"] == {"torch.float32"}
        for name, bias in seen["bias"].items():
            held.setdefault(name, []).append(bias)
    assert len(held) == 2
    for name, copies in held.items():
        assert len(copies) > 1 and all(np.array_equal(copies[0], other) for other in copies)
        moved = (copies[0] - initial[name].astype(np.float32)) / ALL.bias_rate
        assert np.abs(moved - moved.round()).max() < 1e-5 and np.abs(moved).max() >= 1
