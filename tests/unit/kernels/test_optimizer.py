"""Triton kernels of the optimizer against torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import hetero_kernels as hk
from hetero_megatron.comm.fake import FakeComm
from hetero_megatron.data.batch import Batch
from hetero_megatron.model import initial_values
from hetero_megatron.parallel.optimizer import AdamW
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.spec.hf_config import from_hf_config
from hetero_megatron.training.runtime import Runtime
from tests.distributed.training.test_kernel_training import MODEL, batch, make_plan
from tests.support.kernel_cases import BF16, DEVICE, FP32, FP64, inputs_fenced, randn

Many = list[torch.Tensor]
SIZES = [(7, 5), (0,), (1,), (70_001,), (3, 1000)]  # one longer than a chunk
FEW = hk.Limits(arch="interpreter", processors=2, max_grid=2)
OPTIONS = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-8}


def tensors(seed: int, dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    return [inputs_fenced(randn(*shape, dtype=dtype, seed=seed + i, scale=scale)) for i, shape in enumerate(SIZES)]


@pytest.mark.parametrize(("dtype", "grad_dtype"), [(FP64, FP64), (FP32, FP32), (FP32, BF16)])
@pytest.mark.parametrize("limits", [None, FEW])
def test_adamw_is_torchs(dtype: torch.dtype, grad_dtype: torch.dtype, limits: hk.Limits | None) -> None:
    params = tensors(0, dtype)
    expected = [p.clone().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(expected, betas=(0.9, 0.95), **OPTIONS)
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    copies = [torch.zeros_like(p, dtype=BF16) for p in params]
    scale = torch.tensor(0.25, dtype=dtype, device=DEVICE)
    for step in (1, 2, 3):
        grads = tensors(10 * step, grad_dtype)
        for p, g in zip(expected, grads):
            p.grad = g.to(dtype) * 0.25
        optimizer.step()
        hk.adamw_step(
            params, grads, *moments, beta1=0.9, beta2=0.95, step=step, grad_scale=scale if step > 1 else 0.25,
            copies=copies, limits=limits, **OPTIONS,
        )  # fmt: skip
    bound = 1e-12 if dtype == FP64 else 1e-6
    for p, e, m, v, copy in zip(params, expected, *moments, copies):
        if not p.numel():
            continue
        state = optimizer.state[e]
        for got, wanted in ((p, e), (m, state["exp_avg"]), (v, state["exp_avg_sq"])):
            assert (got - wanted).norm() <= bound * wanted.norm()
        assert torch.equal(copy, p.to(BF16))


def test_adamw_reference_is_torchs() -> None:
    params = tensors(0, FP64)
    expected = [p.clone().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(expected, betas=(0.9, 0.95), **OPTIONS)
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    for step in (1, 2):
        grads = tensors(10 * step, FP64)
        for p, g in zip(expected, grads):
            p.grad = g
        optimizer.step()
        hk.adamw_reference(params, grads, *moments, beta1=0.9, beta2=0.95, step=step, **OPTIONS)
    assert all(torch.allclose(p, e.detach(), rtol=1e-13, atol=0) for p, e in zip(params, expected))


def test_adamw_skips_on_overflow_and_keeps_its_table() -> None:
    params, grads = tensors(0, FP32), tensors(1, FP32)
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    before = [p.clone() for p in params]
    table = hk.adamw_table(params, grads, *moments)
    call = {"beta1": 0.9, "beta2": 0.95, "step": 1, "table": table, **OPTIONS}
    found = torch.ones((), device=DEVICE)
    hk.adamw_step(params, grads, *moments, found_inf=found, **call)
    assert all(torch.equal(a, b) for a, b in zip(params, before)) and not any(m.any() for m in moments[0])
    hk.adamw_step(params, grads, *moments, found_inf=found.zero_(), **call)
    assert not any(torch.equal(a, b) for a, b in zip(params, before) if a.numel())
    assert all(m.any() for m in moments[0] if m.numel())
    hk.adamw_step([], [], [], [], beta1=0.9, beta2=0.95, step=1, **OPTIONS)


def test_the_table_of_tensors_that_stay_is_made_once() -> None:
    first, second = tensors(0, FP32), tensors(0, FP32)
    table = hk.tensor_table([first, second], DEVICE)
    assert hk.tensor_table([list(first), list(second)], DEVICE) is table
    assert hk.tensor_table([second, first], DEVICE) is not table
    assert hk.tensor_table([[x[:1] for x in each] for each in (first, second)], DEVICE) is not table


@pytest.mark.parametrize("limits", [None, FEW])
def test_l2norm(limits: hk.Limits | None) -> None:
    mixed = [*tensors(0, FP32), *tensors(1, BF16, scale=30)]
    exact = torch.cat([x.double().flatten() for x in mixed]).norm()
    for squared in (False, True):
        got = hk.l2norm(mixed, squared=squared, limits=limits)
        assert got.dtype == FP32 and got.shape == ()
        assert abs(got.double() / (exact**2 if squared else exact) - 1) < 1e-6
        assert torch.equal(got, hk.l2norm(mixed, squared=squared, limits=limits))
    exact = torch.cat([x.flatten() for x in tensors(0, FP64)]).norm()
    assert abs(hk.l2norm(tensors(0, FP64)) / exact - 1) < 1e-14
    assert hk.l2norm([randn(0, 3)]) == 0 and hk.l2norm([]) == 0
    assert abs(hk.l2norm_reference(tensors(0, FP64)) / exact - 1) < 1e-14


@pytest.mark.parametrize("dtype", [FP64, FP32])
def test_scaling_gradients_inside_the_step_changes_no_bit(dtype: torch.dtype) -> None:
    """Triton scales as it reads (the gradients stay as they are), aten before: both as by a pass of its own."""
    registry = load_plugins().registry
    for provider in ("aten", "triton"):
        step, results = registry.kernel("adamw", provider).forward, []
        for inside in (False, True):
            params, grads = tensors(0, dtype), tensors(1, dtype)
            moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
            if not inside:
                torch._foreach_mul_(grads, 0.3)
            step(params, grads, *moments, [], 1, 3e-3, 0.9, 0.95, 1e-8, 0.1, 0.3 if inside else 1.0)
            results.append([*params, *moments[0], *moments[1]])
            if inside and provider == "triton":
                assert all(torch.equal(g, same) for g, same in zip(grads, tensors(1, dtype)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), provider


@pytest.mark.parametrize("provider", ["aten", "reference", "triton"])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_copies_are_torchs_new_parameters_rounded_to_nearest(provider: str, kind: torch.dtype) -> None:
    step = load_plugins().registry.kernel("adamw", provider).forward
    params, theirs = tensors(0, FP32), tensors(0, FP32)
    moments = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    copies = [torch.full_like(p, torch.nan, dtype=kind) for p in params]
    want = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for count in (1, 2, 3):
        for p, g in zip(theirs, tensors(count, FP32), strict=True):
            p.grad = 0.3 * g
        want.step()
        step(params, tensors(count, FP32), *moments, copies, count, 3e-3, 0.9, 0.95, 1e-8, 0.1, 0.3)
    for mine, right, copy in zip(params, theirs, copies, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)
        assert copy.dtype == kind and torch.equal(copy, mine.to(kind))


def test_16_bit_weights_are_what_the_update_wrote() -> None:
    """The update's kernel is told where the model's weights are, and nobody copies the masters there again."""
    spec = from_hf_config(MODEL)
    plan = make_plan(spec, {"ranks": 0, "layers": [0, 2]})

    def kernel(params: Many, grads: Many, first: Many, second: Many, copies: Many, *rest: float) -> None:
        assert [c.shape for c in copies] == [p.shape for p in params] and {p.dtype for p in params} == {FP32}
        for p, copy in zip(params, copies, strict=True):
            p.add_(1.0)
            copy.copy_(p + 0.5)

    runtime = Runtime(
        CompiledPlan(plan, spec), FakeComm(0, torch.device("cpu")), torch.bfloat16,
        lambda t, box: initial_values(t, box, spec, 7),
        lambda groups: AdamW(groups, kernel, (0.9, 0.95), 1e-8),
    )  # fmt: skip
    assert runtime.optimizer is not None
    runtime.train_step(lambda rows: batch(), 0, 2, 1e-3)
    for name, _, master in runtime.optimizer.owned():
        assert torch.equal(runtime.sync.params[name].detach(), (master + 0.5).bfloat16())
    runtime.optimizer.all_gather()  # as after loading a checkpoint: all of them, from the masters
    for name, _, master in runtime.optimizer.owned():
        assert torch.equal(runtime.sync.params[name].detach(), master.bfloat16())


def test_a_training_step_leaves_scaling_to_the_optimizer() -> None:
    """Its kernel gets gradients over the clipping norm, and the scale that brings them down to it."""
    spec = from_hf_config(MODEL)
    plan, seen = make_plan(spec, {"ranks": 0, "layers": [0, 2]}), list[tuple[float, float]]()

    def kernel(params: list[torch.Tensor], grads: list[torch.Tensor], *rest: float) -> None:
        seen.append((sum(float(g.double().square().sum()) for g in grads), rest[-1]))

    runtime = Runtime(
        CompiledPlan(plan, spec), FakeComm(0, torch.device("cpu")), FP32,
        lambda t, box: initial_values(t, box, spec, 7),
        lambda groups: AdamW(groups, kernel, (0.9, 0.95), 1e-8),
    )  # fmt: skip
    data = batch()

    def fetch(rows: Sequence[int]) -> Batch:
        return Batch(*(x[list(rows)] for x in (data.tokens, data.labels, data.positions)))

    stats = runtime.train_step(fetch, 0, 2, 1e-3, clip_grad=1e-3)
    (scale,) = {each for _, each in seen}
    squares = sum(square for square, _ in seen)
    assert stats.grad_norm > 0.1 and not stats.skipped
    assert scale * squares**0.5 == pytest.approx(1e-3, rel=1e-4)
