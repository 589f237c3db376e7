"""A kernel as a callable with gradients: one autograd.Function per kernel, made once, looked up never."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from hetero_megatron.ops.spec import Kernel, OpSpec


class Split(NamedTuple):
    """Forward and backward of an operator that autograd does not call, because a collective lies between them.

    ``forward(*args)`` returns (results, saved), ``backward(grad, saved, ...)`` the gradients.
    """

    forward: Callable[..., tuple[tuple[Any, ...], tuple[Any, ...]]]
    backward: Callable[..., tuple[Any, ...]]


def bind(spec: OpSpec, kernel: Kernel, traced: bool = False) -> Any:
    """``kernel`` as the operator is called: results as a tensor (or a tuple of several).

    Args:
        traced: ``torch.compile`` will look inside.
    """
    if spec.split:
        return _split(spec, kernel)
    if kernel.apply is not None:
        return kernel.apply
    if spec.differentiable:
        apply = make_function(spec, kernel, traced).apply
        return apply if traced else by_mode(apply, kernel.forward, len(spec.results))
    if spec.in_place:
        return kernel.forward
    return _first(kernel.forward) if len(spec.results) == 1 else kernel.forward


def _split(spec: OpSpec, kernel: Kernel) -> Split:
    pick, count, run = _picker([spec.index(name) for name in spec.saves]), len(spec.results), kernel.backward
    assert run is not None, f"{kernel}: no backward"

    def forward(*args: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outputs = kernel.forward(*args)
        return outputs[:count], outputs[count:] if kernel.private else pick(args + outputs)

    def backward(grad: torch.Tensor, saved: tuple[Any, ...], *rest: Any) -> tuple[Any, ...]:
        return run(grad, *saved, *rest)

    return Split(forward, backward)


def by_mode(apply: Callable[..., Any], forward: Callable[..., tuple[Any, ...]], count: int) -> Callable[..., Any]:
    """``apply`` where gradients are recorded; else ``forward`` alone: a Function costs more than a small kernel."""

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled():
            return apply(*args)
        outputs = forward(*args)
        return outputs[0] if count == 1 else outputs[:count]

    return call


def _first(forward: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return forward(*args)[0]

    return call


def make_function(spec: OpSpec, kernel: Kernel, traced: bool = False) -> type[torch.autograd.Function]:
    """The autograd.Function of one kernel."""
    assert kernel.backward is not None, f"{kernel}: no backward"
    run_backward = kernel.backward
    run_forward = _with_views(kernel.forward, len(spec.results)) if traced else kernel.forward
    tensors, count = len(spec.tensors), len(spec.results)
    fixed = tuple(spec.results.index(name) for name in spec.fixed)
    live_count = count - len(fixed)
    assert fixed == tuple(range(live_count, count)), f"{spec.name}: results without gradients come last"
    pick = _picker([spec.index(name) for name in spec.saves], traced)
    place = [spec.gradients.index(name) if name in spec.gradients else None for name in spec.args]
    direct = place == list(range(len(spec.gradients)))  # the gradients are those of all arguments, in order
    private = kernel.private
    padding = (None,) * (len(spec.args) - len(spec.gradients))
    leading = place[: len(spec.gradients)] == list(range(len(spec.gradients)))

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            outputs = run_forward(*args)
            ctx.save_for_backward(*(outputs[count:] if private else pick(args + outputs)))
            ctx.options = args[tensors:]
            if live_count == 1:  # its gradient is there whenever backward runs: no zeros are made for the fixed ones
                ctx.set_materialize_grads(False)
            if fixed:
                ctx.mark_non_differentiable(*outputs[live_count:count])
            return outputs[0] if count == 1 else outputs[:count]

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            gradients = run_backward(*grads[:live_count], *ctx.saved_tensors, *ctx.options)
            if direct:
                return gradients
            if leading:
                return gradients + padding
            return tuple(None if i is None else gradients[i] for i in place)

    Function.__name__ = Function.__qualname__ = f"{spec.name}_{kernel.provider}"
    return Function


def _with_views(forward: Callable[..., tuple[Any, ...]], count: int) -> Callable[..., tuple[Any, ...]]:
    """``forward`` with views of its results: under torch 2.11 a compiled autograd.Function whose result an in-place
    operation wrote has gradients of zero (pytorch issue 180642). Compilers see through views."""

    def call(*args: Any) -> tuple[Any, ...]:
        outputs = forward(*args)
        return tuple(t.view_as(t) for t in outputs[:count]) + outputs[count:]

    return call


def _picker(indices: list[int], traced: bool = False) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(indices) > 1 and not traced:  # three times as fast, but nothing that dynamo knows
        return itemgetter(*indices)
    return lambda values: tuple(values[i] for i in indices)
