"""Any plan over ranks of unlike vendors gives the single-process result: nothing but the bridge joins them."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.spec import ModelSpec
from tests.support.parity import STEPS, Case, check_case, fixed_case, random_case, reference, run_rank
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, plan
from tests.support.vendors import build_emulated

SEED = int(os.environ.get("SEED", "34"))
COUNT = int(os.environ.get("N", "8"))
QUICK, SLOW = [0], [1, 2]  # of each kind
# So that most groups cross.
HOSTS = ("cpu", "walled", "walled", "cpu", "walled", "cpu", "cpu", "walled")
DEVICES = ("emulated", "walled", "emulated", "cpu", "walled", "emulated", "cpu", "emulated")


@pytest.fixture(scope="module")
def devices() -> tuple[str, ...]:
    """Ranks on an emulated device, on gloo, and on a library of their own."""
    build_emulated()
    return DEVICES


@pytest.mark.timeout(1800)  # building the device takes minutes
@pytest.mark.parametrize("index", quick(range(COUNT // 2), QUICK, SLOW))
def test_random_plan_over_unlike_devices_equals_one_process(index: int, devices: tuple[str, ...]) -> None:
    case = random_case(SEED + 1000 + index)
    check_case(replace(case, plan=case.plan | {"allow_bridge": True}), shared_pool(devices))


@pytest.mark.parametrize("index", quick(range(COUNT // 2), QUICK, SLOW))
def test_random_plan_over_islands_equals_one_process(index: int) -> None:
    case = random_case(SEED + index)
    check_case(replace(case, plan=case.plan | {"allow_bridge": True}), shared_pool(HOSTS))


def stage(ranks: list[int], layers: list[int], tp: int, **more: object) -> dict[str, object]:
    return {"ranks": ranks, "layers": layers, "tp": tp, **more}


def pipe(size: int, count: int, *stages: dict[str, object]) -> dict[str, object]:
    return {"micro_batch_size": size, "num_micro_batches": count, "stages": list(stages)}


ISLANDS = ("cpu", "cpu", "walled", "walled", "cpu", "walled", "cpu", "walled")
# Pipelines that stay inside an island, so that gradients and parameters are all that crosses.
TRAFFIC = {
    "two by two": [pipe(1, 2, stage([0], [0, 3], 1)), pipe(1, 1, stage([1], [0, 3], 1)),
                   pipe(2, 1, stage([2], [0, 3], 1)), pipe(1, 1, stage([3], [0, 3], 1))],
    "tp against stages": [pipe(1, 3, stage([0, 1], [0, 3], 2, tp_split=[1, 2])), pipe(1, 1, stage([4], [0, 3], 1)),
                          pipe(1, 2, stage([2, 3], [0, 1], 2), stage([5], [1, 3], 1))],
    "inner replicas": [pipe(5, 1, stage([0, 1, 4, 6], [0, 3], 1, dp_split=[1, 2, 1, 1])),
                       pipe(2, 1, stage([2, 3], [0, 2], 1, dp_split=[1, 1]), stage([5, 7], [2, 3], 2))],
    "all eight": [pipe(1, 1, stage([r], [0, 3], 1)) for r in range(8)],
    "two against one": [pipe(1, 1, stage([r], [0, 3], 1)) for r in (0, 1)] + [pipe(2, 2, stage([2], [0, 3], 1))],
}  # fmt: skip


def crossed(comm: Comm, case: Case, run: Plan, spec: ModelSpec, initial: dict[str, np.ndarray]) -> int:
    """Bytes that a rank sends to other islands."""
    before, islands = comm.sent_bytes.copy(), comm.islands
    run_rank(comm, case, run, spec, initial)
    assert islands is not None
    sent = {rank: size - before[rank] for rank, size in comm.sent_bytes.items()}
    return sum(size for rank, size in sent.items() if islands.of(rank) != islands.of(comm.rank))


@pytest.mark.parametrize("name", quick(TRAFFIC, ["tp against stages", "inner replicas"]))
def test_every_element_crosses_once_each_way(name: str) -> None:
    """Its partial sum towards the island of its owner, its new value back."""
    case = fixed_case(LLAMA, plan(TRAFFIC[name]))
    _, spec, initial = reference(case, torch.float64)
    arrays = {n: t.numpy() for n, t in initial.items()}
    sent = sum(shared_pool(ISLANDS).run(crossed, case, plan_from_dict(case.plan, spec), spec, arrays))
    assert sent == STEPS * 2 * 8 * sum(t.numel() for t in initial.values())  # both islands hold all tensors
