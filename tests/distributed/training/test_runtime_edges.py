"""What the runtime does at its edges: small batches, empty units, fp16 overflow, repeatability."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.data.batch import Batch
from hetero_megatron.layout import Box
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.training.lr_schedule import LossScale
from hetero_megatron.training.runtime import Runtime
from tests.support.hf_reference import hf_loss_sum, hf_to_logical, make_hf
from tests.support.parity import Case, RandomSamples, build_optimizer, fixed_case
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PIPELINES = [
    pipe(4, 2, stage([0, 1, 2], [0, 1], tp=1, dp_split=[1, 2, 1]), stage([3, 4], [1, 3], tp=2, recompute="full")),
    pipe(3, 1, stage([5], [0, 2], recompute="selective"), stage([6, 7], [2, 3], tp=1, dp_split=[1, 2])),
]
CASES = {
    (tied, schedule): fixed_case(LLAMA | {"tie_word_embeddings": tied}, plan(PIPELINES, schedule=schedule))
    for tied in (False, True)
    for schedule in ("1f1b", "gpipe")
}
SIZES = (1, 2, 3, 5, 7, 11, 1)


def job(
    comm: Comm, case: Case, plan: Plan, spec: ModelSpec, initial: Any, sizes: tuple[int, ...], scale: LossScale
) -> dict[str, Any]:
    """Train one step per batch size, evaluating before and after."""
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return {}

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return torch.from_numpy(initial[tensor.name][box.slices()])

    runtime = Runtime(compiled, comm, DTYPES[case.dtype], initialize, build_optimizer(case))
    data = RandomSamples(case, spec.vocab_size)
    evaluations = [runtime.evaluate(data.fetch, 100, n) for n in (1, 2, plan.global_batch_size)]
    stats, scales, kept, first = [], [], [], 0
    for size in sizes:
        before = {n: p.detach().clone() for n, p in runtime.sync.params.items()}
        scales.append(scale.scale)
        stats.append(
            runtime.train_step(
                data.fetch, first, size, case.lr, case.weight_decay, case.clip_grad, loss_scale=scale.scale
            )
        )
        scale = scale.update(stats[-1].skipped)
        kept.append(all(torch.equal(before[n], p) for n, p in runtime.sync.params.items()))
        first += size
    assert runtime.optimizer is not None
    boxes = runtime.stage_model.boxes
    return {
        "losses": [s.loss for s in stats], "norms": [s.grad_norm for s in stats], "skipped": [s.skipped for s in stats],
        "kept": kept, "scales": scales, "evaluations": evaluations,
        "weights": [(n, boxes[n], p.detach().double().numpy().copy()) for n, p in runtime.sync.params.items()],
        "owned": [(n, b, m.detach().double().numpy().copy(), str(m.dtype)) for n, b, m in runtime.optimizer.owned()],
    }  # fmt: skip


def run(case: Case, sizes: tuple[int, ...], scale: LossScale | None = None) -> list[dict[str, Any]]:
    dtype = torch.float64 if case.dtype == "fp64" else torch.float32
    hf, spec = make_hf(case.model, case.seed, dtype=dtype)
    initial = {n: t.detach().numpy() for n, t in hf_to_logical(hf, spec).items()}
    everyone = shared_pool().run(job, case, plan_from_dict(case.plan, spec), spec, initial, sizes, scale or LossScale())
    return everyone[: case.ranks]


def reference(case: Case, sizes: tuple[int, ...]) -> dict[str, Any]:
    """The same by a plain loop over the Hugging Face model in fp64."""
    hf, spec = make_hf(case.model, case.seed, dtype=torch.float64)
    data = RandomSamples(case, spec.vocab_size)

    def loss_of(batch: Batch) -> torch.Tensor:
        return hf_loss_sum(hf, batch.tokens, batch.labels, batch.positions, batch.documents, batch.loss_mask)

    with torch.no_grad():
        batches = [data.fetch(range(100, 100 + n)) for n in (1, 2, case.plan["global_batch_size"])]
        evaluations = [(float(loss_of(b)), b.num_loss_tokens()) for b in batches]
    optimizer = build_optimizer(case)(
        [
            {"params": [p for p in hf.parameters() if p.dim() > 1], "weight_decay": case.weight_decay},
            {"params": [p for p in hf.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
    )
    losses, norms, first = [], [], 0
    for size in sizes:
        batch = data.fetch(range(first, first + size))
        optimizer.zero_grad()
        loss = loss_of(batch) / batch.num_loss_tokens()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(hf.parameters(), case.clip_grad or float("inf"))))
        optimizer.step()
        losses.append(loss.item())
        first += size
    weights = {n: t.detach().numpy() for n, t in hf_to_logical(hf, spec).items()}
    return {"losses": losses, "norms": norms, "evaluations": evaluations, "weights": weights}


@pytest.mark.parametrize("optimizer", quick(["adamw", "sgd"], ["adamw"], []))
@pytest.mark.parametrize("named", quick(CASES, [(True, "1f1b")]), ids=str)
def test_small_batches_equal_one_process(named: tuple[bool, str], optimizer: str) -> None:
    """Ramp-up down to one sequence leaves units, micro-batches and whole pipelines without rows; fp64."""
    case = replace(CASES[named], optimizer=optimizer, packed=True, masked=True)
    want = reference(case, SIZES)
    for rank, got in enumerate(run(case, SIZES)):
        np.testing.assert_allclose(got["losses"], want["losses"], rtol=1e-12, atol=0, err_msg=f"loss, rank {rank}")
        np.testing.assert_allclose(got["norms"], want["norms"], rtol=1e-11, atol=0, err_msg=f"norm, rank {rank}")
        np.testing.assert_allclose(got["evaluations"], want["evaluations"], rtol=1e-12, atol=0)
        for name, box, array in got["weights"]:
            np.testing.assert_allclose(array, want["weights"][name][box.slices()], rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("dtype", quick(["fp32", "bf16", "fp16"], [], ["fp16"]))
def test_the_same_run_twice_is_bitwise_equal(dtype: str) -> None:
    case = replace(CASES[True, "1f1b"], dtype=dtype)
    scale = LossScale(1024.0) if dtype == "fp16" else None
    for a, b in zip(run(case, SIZES, scale), run(case, SIZES, scale), strict=True):
        assert a["losses"] == b["losses"] and a["norms"] == b["norms"]
        for (name, _, x), (_, _, y) in zip(a["weights"], b["weights"], strict=True):
            assert np.array_equal(x, y), name


@pytest.mark.slow
def test_fp16_overflow_is_skipped_everywhere_and_recovers() -> None:
    case = replace(CASES[True, "1f1b"], dtype="fp16", lr=1e-3)
    ranks = run(case, (11,) * 20, LossScale(2.0**32, dynamic=True, hysteresis=1))
    for got in ranks:
        assert got["skipped"] == ranks[0]["skipped"] and got["scales"] == ranks[0]["scales"]
        assert got["skipped"][0] and not got["skipped"][-1]
        assert all(kept for kept, skipped in zip(got["kept"], got["skipped"], strict=True) if skipped)
        assert not any(kept for kept, skipped in zip(got["kept"], got["skipped"], strict=True) if not skipped)
        taken = [n for n, skipped in zip(got["norms"], got["skipped"], strict=True) if not skipped]
        assert np.isfinite(taken).all() and np.isfinite(got["losses"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", quick(["bf16", "fp16"], ["bf16"], []))
def test_16_bit_weights_follow_fp32_masters(dtype: str) -> None:
    """Updates too small for 16 bits add up in the masters, also where one rank owns a tensor alone."""
    alone = fixed_case(LLAMA, plan([pipe(1, 2, stage([0], [0, 3]))]))
    for case in (alone, CASES[True, "1f1b"]):
        size = case.plan["global_batch_size"]
        case = replace(case, dtype=dtype, lr=1e-5, weight_decay=0.0)
        owned: dict[str, np.ndarray] = {}
        start, ranks = run(replace(case, lr=0.0), (size,)), run(case, (size,) * 3)
        for before, got in zip(start, ranks, strict=True):
            for (name, box, old, _), (_, _, new, kind) in zip(before["owned"], got["owned"], strict=True):
                assert kind == "torch.float32"
                assert name.endswith("norm.weight") or not np.array_equal(old, new), name
                whole = owned.setdefault(name, np.full((64, 64) if len(box.lo) > 1 else (64,), np.nan))
                whole[box.slices()] = new
        for got in ranks:
            for name, box, array in got["weights"]:
                master = torch.from_numpy(owned[name][box.slices()])
                assert np.array_equal(array, master.to(DTYPES[dtype]).double().numpy()), name
