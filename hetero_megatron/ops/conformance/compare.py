"""Casting cases to a dtype, the fp64 oracle, and how far a result is from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetero_megatron.ops.spec import Case, OpSpec, seeded, wide

Flat = list[torch.Tensor]
NOTHING = 1e-6  # norm up to which the truth counts as zero


def cast(spec: OpSpec, case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """The case's arguments in ``dtype`` on ``device``; strides are kept, ``spec.wide`` stays in at least fp32."""

    def one(name: str, value: Any) -> Any:
        if hasattr(value, "_fields"):  # an option of several values, some of which may lie on the device
            return value._make(one(name, x) for x in value)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            return [one(name, x) for x in value]
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return value.to(device)
        return same_strides(value, wide(dtype) if name in spec.wide else dtype, device)

    return tuple(one(name, value) for name, value in zip(spec.args, case.args, strict=True))


def same_strides(value: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy of ``value`` that lies in memory as it does."""
    out = torch.empty_strided(value.size(), value.stride(), dtype=dtype, device=device)
    return out.copy_(value)


def exact(args: Sequence[Any]) -> list[Any]:
    """The same values in fp64 on the CPU."""

    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().cpu().double() if value.is_floating_point() else value.cpu()
        if hasattr(value, "_fields"):
            return value._make(map(one, value))
        return [one(x) for x in value] if isinstance(value, list) else value

    return [one(value) for value in args]


def oracle(spec: OpSpec, args: Sequence[Any], grads: Sequence[torch.Tensor] | None) -> tuple[Flat, Flat]:
    """(results, gradients) by the definition in fp64; gradients only where ``grads`` are given."""
    values = exact(args)
    if grads is None or not spec.gradients:
        with torch.no_grad():
            return flatten(spec.definition(*values)), []
    places = [spec.args.index(name) for name in spec.gradients]
    for i in places:
        values[i] = values[i].requires_grad_() if values[i] is not None else None
    results = spec.definition(*values)
    live_results = results[: len(spec.results) - len(spec.fixed)]
    inputs = [values[i] for i in places if values[i] is not None]
    start = seeded(live_results, [g.detach().cpu().double() for g in grads])
    gradients = torch.autograd.grad(start, inputs, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, inputs, strict=True)]
    return [x.detach() for x in flatten(results)], filled


def flatten(values: Any) -> Flat:
    """All tensors of a nested structure, in order."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [x for value in values for x in flatten(value)] if isinstance(values, (list, tuple)) else []


def distance(got: torch.Tensor, want: torch.Tensor) -> tuple[float, float]:
    """(relative Frobenius error, largest absolute error) over finite values; inf where infinities or NaN differ.

    Tensors that are next to nothing are measured absolutely: some gradients are truly zero.
    """
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    if got.shape != want.shape:
        return math.inf, math.inf
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(got[~finite], want[~finite]):
        return math.inf, math.inf
    if not finite.any():
        return 0.0, 0.0
    error, size = got[finite] - want[finite], want[finite]
    norm = float(size.norm())
    return float(error.norm()) / (norm if norm > NOTHING else 1.0), float(error.abs().max())


def mismatch(got: torch.Tensor, want: torch.Tensor, eager: torch.Tensor | None, cap: float, factor: float) -> str:
    """Why ``got`` is not good enough, or an empty string. After FlashAttention's rule:

    (A) its relative error is at most ``cap``, or ``factor`` times that of ``eager``, the definition in the same dtype
    (where the truth is the small difference of large numbers); (B) no element is further off than ``factor`` times the
    worst of ``eager``, give or take ``cap`` or two roundings of the largest element: one wrong row among 65,537 does
    not show in (A).
    """
    if got.shape != want.shape:
        return f"shape {tuple(got.shape)}, not {tuple(want.shape)}"
    if not want.is_floating_point() and got.dtype == want.dtype:
        wrong_count = int((got.cpu() != want).sum())
        return f"{wrong_count} of {got.numel()} integers differ" if wrong_count else ""
    if not got.is_floating_point():
        return f"it is {got.dtype}, which is no floating-point dtype"
    if (got.isnan().cpu() & ~want.isnan()).any():
        count = int((got.isnan().cpu() & ~want.isnan()).sum())
        return f"{count} of {got.numel()} elements were not written, or are NaN"
    relative, worst = distance(got, want)
    eager_error = distance(eager, want) if eager is not None else (0.0, 0.0)
    if not math.isfinite(eager_error[0]):  # the definition overflows in this dtype: no measure for others
        eager_error = (0.0, 0.0)
    if relative > max(cap, factor * eager_error[0]):
        return f"error {relative:.2g} is over {cap:.2g}{_guess(got, want)}"
    if eager is None or not got.numel():
        return ""
    finite = want[want.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    rounding = max(cap, torch.finfo(got.dtype).eps) * (largest if largest > NOTHING else 1.0)
    bound = factor * eager_error[1] + rounding
    return f"one element is off by {worst:.2g}, over {bound:.2g}" if worst > bound else ""


def _guess(got: torch.Tensor, want: torch.Tensor) -> str:
    """A known mistake that explains the error."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    for factor, mistake in ((1 / math.log(2), "it is in base 2, not natural logarithms"), (-1.0, "its sign is wrong"),
                         (math.log(2), "it is scaled by ln 2")):  # fmt: skip
        if distance(got, want * factor)[0] < 1e-3:
            return f" ({mistake})"
    return ""


def copy_args(args: Sequence[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
    """The arguments with every tensor replaced."""

    def one(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return change(value)
        return [one(x) for x in value] if isinstance(value, list) else value

    return tuple(one(value) for value in args)
