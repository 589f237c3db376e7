"""Several products of one input as one: the same numbers as of each by itself, from memory that is not copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_megatron.ops import KernelPlan, Signature, resolve, torch_registry
from hetero_megatron.ops.gemm import joint_columns, joint_rows

ROWS = (6, 2, 0, 3)


class Count(TorchDispatchMode):
    """Names of the torch operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.ran.append(str(function))
        return function(*args, **(kwargs or {}))

    def products(self) -> int:
        return sum(name in ("aten.mm.default", "aten.addmm.default", "aten.addmm_.default") for name in self.ran)


def plan(provider: str = "aten") -> KernelPlan:
    return resolve(torch_registry(), [Signature("gemm", "cpu", torch.float64)], {"gemm": provider})


def weights(together: bool) -> list[torch.nn.Parameter]:
    whole = torch.randn(sum(ROWS), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return [torch.nn.Parameter(part if together else part.clone()) for part in whole.split(list(ROWS))]


def biases(together: bool) -> list[torch.nn.Parameter]:
    whole = torch.randn(sum(ROWS), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [torch.nn.Parameter(part if together else part.clone()) for part in whole.split(list(ROWS))]


def inputs() -> torch.Tensor:
    x = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return x.requires_grad_()


def gradients(
    products: Callable[..., tuple[torch.Tensor, ...]], w: list[torch.nn.Parameter], b: list[torch.nn.Parameter] | None
) -> Iterator[torch.Tensor]:
    """Results, then the gradients of all."""
    x = inputs()
    found = products(x, w, b or [None] * len(w))
    yield from (y.detach().clone() for y in found)
    torch.stack([y.sin().sum() * (i + 1) for i, y in enumerate(found)]).sum().backward()
    assert x.grad is not None
    yield x.grad
    for part in w + (b or []):
        assert part.grad is not None
        yield part.grad


def plain(x: torch.Tensor, w: list[torch.Tensor], b: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.nn.functional.linear(x, *parts) for parts in zip(w, b, strict=True))


@pytest.mark.parametrize("provider", ["aten", "reference"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_results_and_gradients_are_those_of_separate_products(
    provider: str, biased: bool, together: bool, deferred: bool
) -> None:
    kernels = plan(provider)

    def products(*args) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
        return kernels.joint_gemm(*args)

    want = gradients(plain, weights(together), biases(together) if biased else None)
    found = gradients(products, weights(together), biases(together) if biased else None)
    if deferred:
        kernels.weight_gradients.deferring = True
        w, b = weights(together), biases(together) if biased else None
        outputs = products(inputs(), w, b or [None] * len(w))
        torch.stack([y.sin().sum() * (i + 1) for i, y in enumerate(outputs)]).sum().backward()
        assert all(part.grad is None for part in w) and len(kernels.weight_gradients) == (1 if together else len(w))
        kernels.weight_gradients.flush()
        exact = list(gradients(plain, weights(together), None if b is None else biases(together)))
        for part, grad in zip(w, exact[len(w) + 1 :], strict=False):
            torch.testing.assert_close(part.grad, grad, rtol=1e-12, atol=1e-12)
        return
    for got, exact_value in zip(found, want, strict=True):
        torch.testing.assert_close(got, exact_value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("biased", [False, True])
def test_a_watcher_sees_one_call_with_the_same_bits(biased: bool) -> None:
    kernels, seen = plan(), list[tuple[int, ...]]()

    def watched(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(tuple(weight.shape))
        return kernels.gemm(x, weight, bias)  # type: ignore[no-any-return]

    both = [k.joint_gemm for k in (kernels, kernels.with_calls({"gemm": watched}))]
    want, found = (list(gradients(run, weights(True), biases(True) if biased else None)) for run in both)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert seen == [(sum(ROWS), 5)]


@pytest.mark.parametrize("together", [False, True])
def test_weights_that_lie_together_are_multiplied_once_each_way(together: bool) -> None:
    kernels, w, counter = plan(), weights(together), Count()
    total = torch.full((sum(ROWS), 5), torch.nan, dtype=torch.float64)
    for part in (w, *([p] for p in w)) if not together else (w,):
        kernels.weight_gradients.assign(part, lambda dy, x, kernel: kernel(dy, x, total[: dy.shape[-1]], 0.0))
    with counter:
        found = kernels.joint_gemm(inputs(), w, [None] * len(w))
        torch.autograd.backward(found, [torch.ones_like(y) for y in found])
    assert counter.products() == (3 if together else 3 * len(w))
    if together:
        assert all(part.grad is None for part in w)
        want = torch.ones(6, sum(ROWS), dtype=torch.float64).t() @ inputs().flatten(0, 1)
        torch.testing.assert_close(total, want.detach(), rtol=1e-12, atol=1e-12)


def test_what_is_frozen_in_part_is_multiplied_apart() -> None:
    kernels, w = plan(), weights(together=True)
    w[0].requires_grad_(False)
    x = inputs()
    torch.cat(kernels.joint_gemm(x, w, [None] * len(w)), -1).sum().backward()
    assert w[0].grad is None and all(part.grad is not None for part in w[1:])
    torch.testing.assert_close(x.grad, torch.cat(list(w)).sum(0).expand_as(x), rtol=1e-12, atol=1e-12)


def test_memory_is_shared_and_never_guessed() -> None:
    whole = torch.arange(24.0).view(8, 3)
    parts = list(whole.split([2, 0, 5, 1]))
    joint = joint_rows(parts)
    assert joint is not None and joint.data_ptr() == whole.data_ptr() and torch.equal(joint, whole)
    assert joint_rows(parts[:1] + parts[2:3]) is not None  # nothing lies between them
    for other in (parts[::-1], [parts[0], parts[3]], [parts[0], parts[2].clone()], [whole[:, :2], whole[:, 2:]]):
        assert joint_rows(other) is None
    columns = list(whole.split([1, 0, 2], -1))
    assert joint_columns(columns).data_ptr() == whole.data_ptr()
    for pieces in (columns[::-1], columns[:1], [columns[0], columns[2].contiguous()], [whole[:, :2], whole[:, 1:]]):
        found = joint_columns(pieces)
        assert torch.equal(found, torch.cat(pieces, -1)) and found.is_contiguous()
        assert len(pieces) == 1 or found.data_ptr() != whole.data_ptr()
