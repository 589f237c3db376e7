"""Adam in host memory against torch's AdamW, and its states in checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.checkpoint.native import open_checkpoint
from hetero_megatron.checkpoint.state import load_tensors
from hetero_megatron.comm import Comm
from hetero_megatron.errors import UserError
from hetero_megatron.parallel.host_adam import check_offload, cpu_adam, refuse_old_lock
from hetero_megatron.plans import Plan, locate, plan_from_dict, stage_at
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.runtime import Runtime
from tests.distributed.checkpoint.test_checkpoint import build, save, start, steps, weights
from tests.support.parity import Case, build_optimizer, fixed_case
from tests.support.pool import shared_pool
from tests.support.small_plans import LLAMA, pipe, plan, stage

HOST = {"optimizer": {"offload": True}}
OFFLOADED = plan(
    [pipe(2, 2, stage([0, 1], [0, 2], tp=2, **HOST), stage([2], [2, 3])), pipe(1, 2, stage([3], [0, 3], **HOST))],
    schedule="zero-bubble",
)
RESIDENT = plan([
    pipe(2, 2, stage([0, 1], [0, 2], tp=2, weights={}, **HOST), stage([2], [2, 3])),
    pipe(1, 2, stage([3], [0, 3], weights={}, **HOST)),
])  # fmt: skip
PLAIN = plan([pipe(2, 2, stage([0], [0, 3])), pipe(1, 2, stage([1, 2], [0, 3], tp=2))])


def test_what_cannot_be_offloaded_is_refused() -> None:
    chosen = plan_from_dict(OFFLOADED, start(fixed_case(LLAMA, OFFLOADED))[0])
    check_offload(chosen, "adam", "bf16")
    for optimizer, dtype in (("sgd", "fp32"), ("adam", "fp64")):
        with pytest.raises(UserError, match="optimizer.offload"):
            check_offload(chosen, optimizer, dtype)


def test_a_lock_that_a_killed_process_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    lock = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    refuse_old_lock()  # somebody compiles right now
    os.utime(lock, (0, 0))
    with pytest.raises(UserError, match=f"{lock}.*remove that file"):
        cpu_adam([{"params": [torch.zeros(2)]}], (0.9, 0.95), 1e-8)


def run(
    comm: Comm, case: Case, chosen: Plan, spec: ModelSpec, initial: Any, load: str | None, path: str | None
) -> dict[str, Any]:
    original, adam = build_optimizer(case), None
    if comm.rank in chosen.ranks and stage_at(chosen, locate(chosen, comm.rank)).optimizer.offload:
        adam = lambda groups: cpu_adam(groups, (0.9, 0.95), 1e-8)  # noqa: E731
    runtime = build_with(comm, case, chosen, spec, initial, adam or original)
    if runtime is None:
        return {}
    assert runtime.optimizer is not None
    size, first = chosen.global_batch_size, 0
    if load is not None:
        found = open_checkpoint(load, runtime.world)
        assert found is not None
        load_tensors(found, runtime.optimizer, spec, runtime.world, True)
        first = 3
    seen = steps(runtime, case, size, first, 3)
    if path is not None:
        save(runtime, path, 3, asynchronous=False)
    kinds = {type(runtime.optimizer.inner).__name__, str(runtime.optimizer.masters[0][0].device)}
    with runtime.whole_weights():
        return {"steps": seen, "weights": weights(runtime), "kinds": kinds}


def build_with(comm: Comm, case: Case, chosen: Plan, spec: ModelSpec, initial: Any, factory: Any) -> Runtime | None:
    import tests.distributed.checkpoint.test_checkpoint as module

    before = module.build_optimizer
    module.build_optimizer = lambda _: factory
    try:
        return build(comm, case, chosen, spec, initial)
    finally:
        module.build_optimizer = before


@pytest.mark.exhaustive  # DeepSpeed compiles its extension the first time, for minutes
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("spelled", [OFFLOADED, RESIDENT], ids=["states", "weights, too"])
def test_host_adam_equals_torch_adam_and_resumes_as_it(spelled: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    cpu_adam(
        [{"params": [torch.zeros(4)], "decay": True}], (0.9, 0.95), 1e-8
    )  # compiled once, before the ranks want it
    case = fixed_case(LLAMA, spelled, dtype=dtype, lr=1e-3)
    spec, initial, wrong = start(case)
    host, plain = plan_from_dict(spelled, spec), plan_from_dict(PLAIN, spec)
    pool = shared_pool()
    torch_way = pool.run(run, case, plain, spec, initial, None, str(tmp_path / "plain"))
    host_way = pool.run(run, case, host, spec, initial, None, str(tmp_path / "host"))
    tolerance = {"fp32": 1e-5, "bf16": 2e-2}[dtype]
    assert "DeepSpeedCPUAdam" in host_way[0]["kinds"] and "AdamW" in host_way[2]["kinds"]
    np.testing.assert_allclose(host_way[0]["steps"], torch_way[0]["steps"], rtol=tolerance)
    # Saved in host memory, resumed on the device, and the other way round.
    there = pool.run(run, case, plain, spec, wrong, str(tmp_path / "host"), None)
    back = pool.run(run, case, host, spec, wrong, str(tmp_path / "plain"), None)
    np.testing.assert_allclose(there[0]["steps"], back[0]["steps"], rtol=10 * tolerance)
