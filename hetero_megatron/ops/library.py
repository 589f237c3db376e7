"""Kernels as torch operators of our own namespace, so that ``torch.compile`` can call them without looking inside.

aten is never overridden: each kernel is ``hetero_megatron::<operator>__<provider>``, with a shape function and a
backward of its own. Eager training does not go through here (a torch operator costs 3 to 10 us more).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from hetero_megatron.ops.bind import bind
from hetero_megatron.ops.spec import Kernel, OpSpec

NAMESPACE = "hetero_megatron"


@functools.cache
def _library() -> torch.library.Library:
    return torch.library.Library(NAMESPACE, "FRAGMENT")


def offered(spec: OpSpec, kernel: Kernel) -> bool:
    """Whether the kernel can be a torch operator: pure tensors in and out, portable state."""
    return spec.schema is not None and spec.differentiable and not spec.split and not kernel.private


def operator_name(spec: OpSpec, kernel: Kernel) -> str:
    """Of the kernel's torch operator, in :data:`NAMESPACE`."""
    return re.sub(r"\W", "_", f"{spec.name}__{kernel.provider}")


def compiled_call(spec: OpSpec, kernel: Kernel) -> Callable[..., Any]:
    """``kernel`` for use inside ``torch.compile``: a torch operator, or a graph break where it cannot be one."""
    if not offered(spec, kernel):
        return torch.compiler.disable(bind(spec, kernel))  # type: ignore[no-any-return]
    operator, count = define(spec, kernel), len(spec.results)

    def call(*args: Any) -> Any:
        outputs = operator(*args)
        return outputs[0] if count == 1 else outputs[:count]

    return call


_DEFINED: dict[str, tuple[Kernel, Any]] = {}  # torch keeps operators for the whole process; so must we


def define(spec: OpSpec, kernel: Kernel) -> Any:
    """The torch operator of ``kernel``: forward with all extras as results, fake and autograd registered.

    Results and gradients are contiguous, whatever the strides of the arguments: that is what the fakes promise.
    """
    name = operator_name(spec, kernel)
    if name in _DEFINED:
        first, defined = _DEFINED[name]
        assert (first.forward, first.backward) == (kernel.forward, kernel.backward), f"two kernels are called {name}"
        return defined
    kernel_backward = kernel.backward
    assert kernel_backward is not None
    tensor_args = ", ".join(f"Tensor{'?' if t in spec.optional else ''} {t}" for t in spec.tensors)
    schema = ", ".join(part for part in (tensor_args, spec.schema) if part)
    result_count = len(spec.results) + len(spec.extras)
    library = _library()
    library.define(f"{name}({schema}) -> ({', '.join(['Tensor'] * result_count)})")
    forward_op = getattr(getattr(torch.ops, NAMESPACE), name).default
    live_count = len(spec.results) - len(spec.fixed)
    saved_types = ", ".join(
        f"Tensor{'?' if s in spec.optional else ''} s{i}" for i, s in enumerate(spec.saves)
    )
    grads = ", ".join(f"Tensor g{i}" for i in range(live_count))
    back_schema = ", ".join(part for part in (grads, saved_types, spec.schema) if part)
    library.define(f"{name}_backward({back_schema}) -> ({', '.join(['Tensor'] * len(spec.gradients))})")
    backward_op = getattr(getattr(torch.ops, NAMESPACE), f"{name}_backward").default

    def forward(*args: Any) -> Any:
        out = _contiguous(kernel.forward(*(_copy(spec, kernel, args) if kernel.overwrites else args)))
        return out[0] if result_count == 1 else out

    def fake(*args: Any) -> Any:
        out = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in spec.fake(*args))
        return out[0] if result_count == 1 else out

    def backward(*values: Any) -> Any:
        values = tuple(v.contiguous() if i < live_count else v for i, v in enumerate(values))
        out = _contiguous(_distinct(kernel_backward(*values), values[0]))
        return out[0] if len(out) == 1 else out

    def backward_fake(*values: Any) -> Any:
        saved = dict(zip(spec.saves, values[live_count : live_count + len(spec.saves)], strict=True))
        out = tuple(
            _gradient_like(saved.get(name, values[min(i, live_count - 1)]), values[0])
            for i, name in enumerate(spec.gradients)
        )
        return out[0] if len(out) == 1 else out

    for target, function, shape in (
        (name, forward, fake), (f"{name}_backward", backward, backward_fake),
    ):  # fmt: skip
        library.impl(target, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{target}", shape, lib=library)
    _register_autograd(spec, name, backward_op, live_count)

    def operator(*args: Any) -> tuple[Any, ...]:
        out = forward_op(*args)
        return out if isinstance(out, tuple) else (out,)

    _DEFINED[name] = (kernel, operator)
    return operator


def _register_autograd(spec: OpSpec, name: str, backward_op: Any, live: int) -> None:
    count = len(spec.results)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        values = (*inputs, *outputs)
        ctx.save_for_backward(*(values[spec.index(saved)] for saved in spec.saves))
        ctx.options = inputs[len(spec.tensors) :]
        undifferentiated = (*outputs[live:count], *outputs[count:])
        if undifferentiated:
            ctx.mark_non_differentiable(*undifferentiated)

    def backward(ctx: Any, *grads: Any) -> Any:
        gradients = backward_op(*grads[:live], *ctx.saved_tensors, *ctx.options)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        grad_by_name = dict(zip(spec.gradients, gradients, strict=True))
        needs = ctx.needs_input_grad
        return tuple(grad_by_name[arg] if arg in grad_by_name and needs[i] else None for i, arg in enumerate(spec.args))

    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward, setup_context=setup, lib=_library())


def _copy(spec: OpSpec, kernel: Kernel, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A torch operator must not change its arguments."""
    return tuple(a.clone() if n in kernel.overwrites else a for n, a in zip(spec.args, args, strict=True))


def _contiguous(results: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(x.contiguous() for x in results)


def _distinct(results: tuple[Any, ...], like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Results of a torch operator are tensors, and none is another."""
    out: list[torch.Tensor] = []
    for x in results:
        out.append(like.new_empty(0) if x is None else x.clone() if any(x is y for y in out) else x)
    return tuple(out)


def _gradient_like(saved: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad.new_empty(0) if saved is None else torch.empty_like(saved, memory_format=torch.contiguous_format)
