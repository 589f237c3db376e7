"""Stop under one plan, go on under any other: the same losses and weights, optimizer included."""

from __future__ import annotations

import os
import random
import subprocess
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.checkpoint.native import CheckpointSaver, open_checkpoint
from hetero_megatron.checkpoint.state import load_tensors, merge_numbers, owned_tensors
from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.spec.moe import UNBALANCED
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from tests.distributed.parallel.test_context_replicas import CASES as CONTEXT
from tests.support.hf_reference import hf_to_logical, make_hf
from tests.support.moe_reference import BalancedModel
from tests.support.parity import DTYPES, Case, RandomSamples, build_optimizer, fixed_case, random_case
from tests.support.pool import shared_pool
from tests.support.random_plans import random_plan
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, plan

SEED = int(os.environ.get("SEED", "2026"))
COUNT = int(os.environ.get("N", "12"))  # random pairs of plans
QUICK, SLOW = (5,), (0, 3, 7)
BEFORE, AFTER = 2, 2
Seen = dict[str, Any]


def build(comm: Comm, case: Case, plan: Plan, spec: ModelSpec, initial: dict[str, np.ndarray]) -> Runtime | None:
    """This rank's runtime, from given weights; None for a rank that is not in the plan."""
    compiled = CompiledPlan(plan, spec, muon=case.optimizer == "muon")
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        comm.background_group(plan.ranks)
        return None

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return torch.from_numpy(initial[tensor.name][box.slices()])

    options = RuntimeOptions(balancing=case.balancing or UNBALANCED)
    runtime = Runtime(compiled, comm, DTYPES[case.dtype], initialize, build_optimizer(case), options=options)
    comm.background_group(plan.ranks)
    return runtime


def steps(runtime: Runtime, case: Case, size: int, first: int, count: int) -> list[tuple[float, float]]:
    """(loss, norm) of ``count`` steps; ``size`` samples each, whatever the plan's own batch size is."""
    fetch = RandomSamples(case, runtime.here.spec.vocab_size).fetch
    out = []
    for step in range(first, first + count):
        lr = case.lr * (1 - 0.1 * step)
        stats = runtime.train_step(fetch, step * size, size, lr, case.weight_decay, case.clip_grad)
        out.append((stats.loss, stats.grad_norm))
    return out


def save(
    runtime: Runtime, directory: str, step: int, asynchronous: bool = True, dtype: str = "fp64"
) -> CheckpointSaver:
    group = runtime.comm.background_group(runtime.here.plan.ranks)
    assert group is not None and runtime.optimizer is not None
    saver = CheckpointSaver(directory, group, asynchronous=asynchronous)
    runtime.hooks.before_update = saver.staged
    tensors, numbers = owned_tensors(runtime.optimizer, runtime.here.spec)
    merge = lambda ranks: {"optimizer": {"numbers": merge_numbers(ranks)}}  # noqa: E731
    saver.save(step, tensors, {"step": step, "dtype": dtype, "model": asdict(runtime.here.spec)}, numbers, merge)
    return saver


def weights(runtime: Runtime) -> list[tuple[str, Box, np.ndarray]]:
    boxes = runtime.stage_model.boxes
    return [(n, boxes[n], p.detach().double().numpy().copy()) for n, p in runtime.sync.params.items()]


def uninterrupted(comm: Comm, case: Case, plan: Plan, spec: ModelSpec, initial: Any, size: int, path: str) -> Seen:
    """Train, save while training goes on, train."""
    runtime = build(comm, case, plan, spec, initial)
    if runtime is None:
        return {}
    steps(runtime, case, size, 0, BEFORE)
    saver = save(runtime, path, BEFORE)
    seen = steps(runtime, case, size, BEFORE, AFTER)  # the writing thread must not see these updates
    saver.wait()
    return {"steps": seen, "weights": weights(runtime)}


def resumed(comm: Comm, case: Case, plan: Plan, spec: ModelSpec, initial: Any, size: int, path: str) -> Seen:
    runtime = build(comm, case, plan, spec, initial)
    if runtime is None:
        return {}
    assert runtime.optimizer is not None
    checkpoint = open_checkpoint(path, runtime.world)
    assert checkpoint is not None and checkpoint.state["step"] == BEFORE
    load_tensors(checkpoint, runtime.optimizer, spec, runtime.world, True)
    return {"steps": steps(runtime, case, size, BEFORE, AFTER), "weights": weights(runtime)}


def other_plan(case: Case, seed: int) -> Case:
    """The same model and data under another random plan, of other ranks."""
    rng = random.Random(seed)
    model = case.model
    ranks = rng.randint(1, 8)
    layers, heads = (
        model.get(a) or model[b] for a, b in (("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"))
    )
    return replace(case, ranks=ranks, plan=random_plan(rng, layers, heads, case.plan["seq_length"], ranks))


def start(case: Case) -> tuple[ModelSpec, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(spec, initial weights, other weights that a load must overwrite)."""
    hf, spec = make_hf(case.model, case.seed, dtype=DTYPES[case.dtype])
    if case.balancing is not None:
        spec = BalancedModel(hf, spec, case.router, case.balancing).spec
    initial = {n: t.detach().float().numpy().astype(np.float64) for n, t in hf_to_logical(hf, spec).items()}
    return spec, initial, {n: a + 1.0 for n, a in initial.items()}


@pytest.mark.parametrize("index", quick(range(COUNT), QUICK, SLOW))
def test_any_plan_goes_on_where_any_other_stopped(index: int, tmp_path: Path) -> None:
    a = random_case(SEED + 7 * index)
    check_pair(a, other_plan(a, SEED + 7 * index), tmp_path)


@pytest.mark.parametrize("index", quick([3, 4], [], [3]))
def test_muon_goes_on_under_any_other_plan(index: int, tmp_path: Path) -> None:
    """A matrix has another owner, and others get Adam's moments."""
    a = replace(random_case(SEED + 7 * index), optimizer="muon")
    check_pair(a, other_plan(a, SEED + 7 * index), tmp_path)


@pytest.mark.parametrize("name", quick(CONTEXT, []))
def test_plans_with_context_groups_stop_and_go_on(name: str, tmp_path: Path) -> None:
    """From a plan with context groups to one without, and the other way round."""
    rng = random.Random(SEED)
    context = fixed_case(LLAMA, plan(CONTEXT[name]), packed=True)
    plain = random_plan(rng, 3, 6, context.plan["seq_length"], 4)
    other = replace(context, ranks=4, plan=plain)
    check_pair(context, other, tmp_path / "there")
    check_pair(other, context, tmp_path / "back")


def of_any_batch(described: dict[str, Any], size: int) -> dict[str, Any]:
    """The plan for steps of ``size`` samples: a stored schedule is only for the plan's own number of micro-batches."""
    if described.get("schedule") != "adaptive" or described["global_batch_size"] == size:
        return described
    pipelines = [{k: v for k, v in pipeline.items() if k != "schedule"} for pipeline in described["pipelines"]]
    return {**described, "schedule": "interleaved", "pipelines": pipelines}  # 1F1B where stages have one chunk


def check_pair(a: Case, b: Case, path: Path) -> None:
    """Steps under ``b`` after a checkpoint of ``a`` equal the uninterrupted run; under ``a`` bit for bit."""
    path.mkdir(exist_ok=True)
    spec, initial, wrong = start(a)
    size = max(a.plan["global_batch_size"], b.plan["global_batch_size"])
    a, b = (replace(case, plan=of_any_batch(case.plan, size)) for case in (a, b))
    pool, folder = shared_pool(), str(path)
    want = pool.run(uninterrupted, a, plan_from_dict(a.plan, spec), spec, initial, size, folder)
    got = pool.run(resumed, b, plan_from_dict(b.plan, spec), spec, wrong, size, folder)
    where = f"{a.describe()} -> {b.plan}"
    for seen in got[: b.ranks]:
        np.testing.assert_allclose(seen["steps"], want[0]["steps"], rtol=1e-9, atol=0, err_msg=where)
    compare_weights(want[: a.ranks], got[: b.ranks], spec, a.optimizer != "sgd", where)
    again = pool.run(resumed, a, plan_from_dict(a.plan, spec), spec, wrong, size, folder)
    for one, two in zip(want, again, strict=True):
        assert one.get("steps") == two.get("steps"), where
        for (_, _, x), (_, _, y) in zip(one.get("weights", ()), two.get("weights", ()), strict=True):
            assert np.array_equal(x, y), where


def compare_weights(want: list[Seen], got: list[Seen], spec: ModelSpec, adam: bool, where: str) -> None:
    whole: dict[str, np.ndarray] = {}
    for seen in want:
        for name, box, array in seen["weights"]:
            whole.setdefault(name, np.full(_shape(spec, name), np.nan))[box.slices()] = array
    for seen in got:
        for name, box, array in seen["weights"]:
            if name.endswith("k_proj.bias") and adam:
                continue  # zero true gradient: Adam amplifies rounding noise (see tests/support/parity.py)
            np.testing.assert_allclose(array, whole[name][box.slices()], rtol=0, atol=1e-9, err_msg=f"{name} {where}")


def _shape(spec: ModelSpec, name: str) -> tuple[int, ...]:
    from hetero_megatron.spec import logical_tensors

    return next(t.shape for t in logical_tensors(spec) if t.name == name)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", quick(["bf16", "fp32"], ["fp32"]))
def test_masters_of_low_precision_come_back_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    a = replace(random_case(SEED + 3, dtype), optimizer="adamw")
    spec, initial, wrong = start(a)
    size, plan = a.plan["global_batch_size"], plan_from_dict(a.plan, spec)
    want = shared_pool().run(uninterrupted, a, plan, spec, initial, size, str(tmp_path))
    got = shared_pool().run(resumed, a, plan, spec, wrong, size, str(tmp_path))
    for one, two in zip(want, got, strict=True):
        assert one.get("steps") == two.get("steps")


def test_the_checksums_are_the_ones_that_sha256sum_knows(tmp_path: Path) -> None:
    a = random_case(SEED + 5)
    spec, initial, _ = start(a)
    plan = plan_from_dict(a.plan, spec)
    shared_pool().run(uninterrupted, a, plan, spec, initial, a.plan["global_batch_size"], str(tmp_path))
    made = tmp_path / f"iter_{BEFORE:07d}"
    done = subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=made, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": OK") == len(list(made.iterdir())) - 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [made.name, "latest"]


def copy_in_background(comm: Comm, case: Case, plan: Plan, spec: ModelSpec, initial: Any, path: str) -> Seen:
    """Save while the copy is held up; what the next forward and backward may do, and the update may not."""
    runtime = build(comm, case, plan, spec, initial)
    if runtime is None:
        return {}
    group, copy_may_end = comm.background_group(plan.ranks), threading.Event()
    assert group is not None and runtime.optimizer is not None
    saver = CheckpointSaver(path, group, synchronize=lambda: copy_may_end.wait(30) and None)
    order: list[str] = []

    def before_update() -> None:
        order.append("forward and backward done")
        copy_may_end.set()
        saver.staged()
        order.append("copied")

    steps(runtime, case, plan.global_batch_size, 0, 1)
    runtime.hooks.before_update = before_update
    tensors, numbers = owned_tensors(runtime.optimizer, spec)
    merge = lambda ranks: {"optimizer": {"numbers": merge_numbers(ranks)}}  # noqa: E731
    saved = [w[2] for w in weights(runtime)]
    saver.save(1, tensors, {"step": 1, "model": asdict(spec)}, numbers, merge)
    order.append("saving")
    steps(runtime, case, plan.global_batch_size, 1, 2)
    saver.wait()
    found = open_checkpoint(path, runtime.world)
    assert found is not None
    load_tensors(found, runtime.optimizer, spec, runtime.world, True)
    same = all((a == b[2]).all() for a, b in zip(saved, weights(runtime), strict=True))
    return {"order": order, "same": same}


def test_the_copy_is_made_beside_the_next_forward_and_backward(tmp_path: Path) -> None:
    case = random_case(SEED + 5)
    spec, initial, _ = start(case)
    for seen in shared_pool().run(
        copy_in_background, case, plan_from_dict(case.plan, spec), spec, initial, str(tmp_path)
    )[: case.ranks]:
        assert seen["order"][:3] == ["saving", "forward and backward done", "copied"] and seen["same"]
