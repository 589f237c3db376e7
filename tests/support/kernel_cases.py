"""What the tests of the Triton kernels share: device, tolerances, poisoned and fenced memory.

The kernels run under Triton's interpreter unless there is an accelerator; it must be switched on before
hetero_kernels is first imported in the process, which tests/conftest.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
DTYPES = [FP64, FP32, FP16, BF16]

# Relative Frobenius error allowed against fp64, by class of operator.
CAPS: dict[str, dict[torch.dtype, float]] = {
    "elementwise": {FP64: 1e-13, FP32: 1e-6, FP16: 1e-3, BF16: 6e-3},
    "norm": {FP64: 1e-13, FP32: 1e-6, FP16: 1e-3, BF16: 5e-3},
    "norm weight": {FP64: 1e-12, FP32: 1e-5, FP16: 1e-3, BF16: 5e-3},
    "loss": {FP64: 1e-12, FP32: 1e-6, FP16: 1e-5, BF16: 1e-5},
    "logits": {FP64: 1e-12, FP32: 1e-6, FP16: 1e-3, BF16: 5e-3},
    "linear loss": {FP64: 1e-12, FP32: 1e-6, FP16: 1e-4, BF16: 1e-4},
    "linear grad": {FP64: 1e-12, FP32: 1e-5, FP16: 2e-3, BF16: 6e-3},
    "attention": {FP64: 1e-12, FP32: 2e-6, FP16: 1e-3, BF16: 8e-3},
    "attention grad": {FP64: 1e-12, FP32: 5e-6, FP16: 2e-3, BF16: 1.2e-2},
}


def randn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(n * 31**i for i, n in enumerate(shape)) % 100_003)
    return (torch.randn(*shape, generator=generator, dtype=FP64) * scale).to(dtype).to(DEVICE)


def check(
    got: torch.Tensor, exact: torch.Tensor, kind: str, dtype: torch.dtype, eager: torch.Tensor | None = None,
    factor: float = 2.0, least: float = 1e-30,
) -> None:  # fmt: skip
    """FlashAttention's rule: the relative Frobenius error is below the cap of the class, and the largest error at
    most ``factor`` times that of the same computation in torch and ``dtype`` (``eager``), give or take rounding.

    ``least``: the error is relative to a norm of at least this, where the exact result may be 0.
    """
    assert got.shape == exact.shape, (got.shape, exact.shape)
    got64, exact64 = got.to("cpu", FP64), exact.to("cpu", FP64)
    assert torch.equal(got64.isfinite(), exact64.isfinite()), "not written, or not finite"
    live = exact64.isfinite()
    error, exact64 = (got64 - exact64)[live], exact64[live]
    if not exact64.numel():
        return
    relative = error.norm() / exact64.norm().clamp_min(least)
    assert relative <= CAPS[kind][dtype], f"{kind} {dtype}: relative error {relative:.2e}"
    if eager is not None:
        eager64 = eager.to("cpu", FP64)[live]
        rounding = 2 * ((exact64 + 0.3).to(eager.dtype).to(FP64) - 0.3 - exact64).abs().max()
        assert error.abs().max() <= factor * (eager64 - exact64).abs().max() + rounding + 1e-12


def gradients(
    function: Callable[..., Any], inputs: list[torch.Tensor], seeds: list[torch.Tensor], dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients of ``function`` by torch's autograd with inputs in ``dtype``."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    torch.autograd.backward(outputs[: len(seeds)], [s.to(o.dtype) for s, o in zip(seeds, outputs)])
    return [o.detach() for o in outputs], [x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves]


FENCE = 64  # elements before and after


@contextmanager
def fenced_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, ``torch.empty`` and ``empty_like`` return memory full of NaN between two fences of a known number.

    Afterwards every fence must be untouched: nothing was written outside. What a kernel leaves unwritten stays NaN.
    """
    plain, fences = torch.empty, []
    number = 12345.0

    def fenced(*size: Any, dtype: torch.dtype | None = None, device: Any = None, **rest: Any) -> torch.Tensor:
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        dtype = dtype or torch.get_default_dtype()
        if not dtype.is_floating_point:
            return plain(shape, dtype=dtype, device=device, **rest)
        whole = plain(shape.numel() + 2 * FENCE, dtype=dtype, device=device).fill_(number)
        inner = whole[FENCE : FENCE + shape.numel()].fill_(float("nan")).view(shape)
        fences.append(whole)
        return inner

    def fenced_like(x: torch.Tensor, dtype: torch.dtype | None = None, **rest: Any) -> torch.Tensor:
        return fenced(x.shape, dtype=dtype or x.dtype, device=x.device)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fenced)
        patch.setattr(torch, "empty_like", fenced_like)
        yield
    expected = {dtype: torch.tensor(number, dtype=dtype) for dtype in DTYPES}
    for whole in fences:
        for edge in (whole[:FENCE], whole[-FENCE:]):
            assert bool((edge.cpu() == expected[whole.dtype]).all()), "a kernel wrote outside its buffer"


def inputs_fenced(x: torch.Tensor) -> torch.Tensor:
    """The same values between NaNs: reading outside gives NaN."""
    whole = torch.full((x.numel() + 2 * FENCE,), float("nan"), dtype=x.dtype, device=x.device)
    inner = whole[FENCE : FENCE + x.numel()].view(x.shape)
    return inner.copy_(x)
