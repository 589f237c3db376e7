"""Head and loss in one: three products where the gradient of the loss is known beforehand, against torch in fp64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_megatron.ops import SPECS, KernelPlan, Signature, resolve, torch_registry
from hetero_megatron.ops.linear_cross_entropy import CPU_CHUNK_ELEMENTS, TILE, _chunks


def plan(provider: str = "aten") -> KernelPlan:
    signature = Signature("linear_cross_entropy", "cpu", torch.float32)
    return resolve(torch_registry(), [signature], {"linear_cross_entropy": provider})


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "mm" in str(func):
            self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operands(tokens: int = 300, h: int = 12, vocabulary: int = 20_011) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, h, dtype=torch.float64, generator=generator) for n in (tokens, vocabulary))
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator)
    dloss = torch.rand(tokens, dtype=torch.float64, generator=generator)
    dloss[::7] = 0.0  # tokens that do not count
    return x.view(3, -1, h).requires_grad_(), weight.requires_grad_(), labels.view(3, -1), dloss.view(3, -1)


@pytest.mark.parametrize("provider", ["aten", "reference"])
def test_known_loss_gradients_give_the_same_gradients_in_three_products(provider: str) -> None:
    x, weight, labels, dloss = operands()
    want = F.cross_entropy((x @ weight.t()).flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    grads = torch.autograd.grad(want, (x, weight), dloss)
    call = plan(provider).linear_cross_entropy
    counts = []
    for more in ((), (dloss,)):
        with Products() as products:
            loss = call(x, weight, labels, *more)
            found = torch.autograd.grad(loss, (x, weight), dloss)
        counts.append(products.count.total())
        torch.testing.assert_close(loss, want, rtol=1e-12, atol=1e-12)
        for got, exact in zip(found, grads, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-10, atol=1e-12)
    if provider == "aten":
        chunks = len(list(_chunks(300, 20_011, x.device)))
        assert chunks > 1 and counts == [4 * chunks, 3 * chunks]
    with torch.no_grad():
        torch.testing.assert_close(call(x, weight, labels, dloss), want, rtol=1e-12, atol=1e-12)


def test_the_weight_gradient_goes_straight_into_its_sum() -> None:
    x, weight, labels, dloss = operands()
    kernels, calls = plan(), []
    total = torch.full_like(weight, torch.nan)

    def taker(dy: torch.Tensor, x: torch.Tensor, kernel: Callable[..., torch.Tensor]) -> None:
        made = kernel(dy, x, total, float(len(calls) > 0))
        assert made.data_ptr() == total.data_ptr()
        calls.append(dy)

    kernels.weight_gradients.assign([weight], taker)
    for _ in range(2):
        loss = kernels.linear_cross_entropy(x, weight, labels, dloss)
        loss.backward(dloss)
    want = F.cross_entropy((x @ weight.t()).flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    dx, dw = torch.autograd.grad(want, (x, weight), dloss)
    assert len(calls) == 2 and weight.grad is None
    torch.testing.assert_close(total, 2 * dw, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(x.grad, 2 * dx, rtol=1e-10, atol=1e-12)


def test_chunks_are_whole_tiles() -> None:
    for device in ("cpu", "meta"):
        for tokens, vocabulary in ((8192, 128_256), (300, 20_011), (5, 3), (0, 7), (4096, 1), (4096, 0)):
            parts = list(_chunks(tokens, vocabulary, torch.device(device)))
            assert [p.start for p in parts] == [0, *(p.stop for p in parts[:-1])][: len(parts)]
            assert all((p.stop - p.start) % TILE == 0 for p in parts[:-1])
            assert not parts or parts[-1].stop == tokens
    assert SPECS["linear_cross_entropy"].parts == ("fwd_bwd",)
    assert CPU_CHUNK_ELEMENTS >= TILE
