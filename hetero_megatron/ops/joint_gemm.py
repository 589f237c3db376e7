"""Products of one input with several weights, as one product where the weights lie one after the other in memory.

Queries, keys and values, and the two halves of a gated MLP, are weights of their own everywhere: in checkpoints, for
optimizer and adapters. Only here are they rows of one matrix: one launch instead of two or three, forward, for the
input's gradient (which then need not be added up) and for the weights'. No copy is made of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetero_megatron.ops.gemm import WeightGradients
from hetero_megatron.ops.kernel import Kernel

Products = Callable[
    [torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor | None]], tuple[torch.Tensor, ...]
]  # (x, weights, biases) -> the product with each


def joint_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors [n_i, ...] that lie one after the other in one piece of memory as one [sum of n_i, ...], without a copy;
    None where they do not."""
    first = parts[0]
    end, storage = first.storage_offset(), first.untyped_storage()._cdata
    for part in parts:
        if part.storage_offset() != end or part.untyped_storage()._cdata != storage or not part.is_contiguous():
            return None
        end += part.numel()
    rest = first.shape[1:]
    strides = [rest[i:].numel() for i in range(len(rest) + 1)]
    return first.as_strided((sum(part.shape[0] for part in parts), *rest), strides)


def joint_columns(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors [..., n_i] side by side, [..., sum of n_i]: without a copy where they are neighbours in one contiguous
    tensor."""
    first = parts[0]
    end, storage, strides = first.storage_offset(), first.untyped_storage()._cdata, first.stride()
    for part in parts:
        if part.storage_offset() != end or part.untyped_storage()._cdata != storage or part.stride() != strides:
            return torch.cat(list(parts), -1)
        end += part.shape[-1]
    whole = first.as_strided((*first.shape[:-1], end - first.storage_offset()), strides)
    return whole if whole.is_contiguous() else torch.cat(list(parts), -1)


def separate(gemm: Callable[..., torch.Tensor]) -> Products:
    """A product with each weight."""

    def products(
        x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        return tuple(gemm(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    return products


def bind_joint_gemm(kernel: Kernel, gradients: WeightGradients, gemm: Callable[..., torch.Tensor]) -> Products:
    """The differentiable products by a kernel of ``gemm``, each by ``gemm`` where the weights (or biases) lie apart or
    only some of them are trained. Results are columns of one tensor."""
    forward, for_input, for_weight = kernel.forward, kernel.parts["input"], kernel.parts["weight"]

    class JointGemm(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, count: int,
            *parts: torch.Tensor,
        ) -> tuple[torch.Tensor, ...]:  # fmt: skip
            ctx.save_for_backward(x, weight)
            ctx.leaves = parts[:count]  # recomputation saves other tensors of the same values
            ctx.rows = [len(part) for part in ctx.leaves]
            return _apart(forward(x, weight, bias)[0], ctx.rows)

        @staticmethod
        def backward(ctx: Any, *dys: torch.Tensor) -> tuple[Any, ...]:
            x, weight = ctx.saved_tensors
            x_wanted, wanted = ctx.needs_input_grad[0], ctx.needs_input_grad[4:]
            dy, count = joint_columns(dys), len(ctx.rows)
            dx = for_input(dy, weight) if x_wanted else None
            dws: Sequence[torch.Tensor | None] = (None,) * count
            if wanted[0]:
                dw = gradients.gradient(ctx.leaves, dy, x, for_weight)  # type: ignore[arg-type]
                dws = dws if dw is None else dw.split(ctx.rows)
            dbs: Sequence[torch.Tensor | None] = (None,) * (len(wanted) - count)
            if any(wanted[count:]):
                dbs = dy.flatten(0, -2).sum(0).split(ctx.rows)
            return dx, None, None, None, *dws, *dbs

    def joint(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, count: int, *parts: Any) -> Any:
        if torch.is_grad_enabled():
            return JointGemm.apply(x, weight, bias, count, *parts)
        return _apart(forward(x, weight, bias)[0], [part.shape[0] for part in parts[:count]])

    return _where_together(joint, gemm)


def watched_joint_gemm(gemm: Callable[..., torch.Tensor]) -> Products:
    """The same by calls of ``gemm``, which somebody watches: one call where the weights lie together."""

    def joint(
        x: torch.Tensor, _: torch.Tensor, bias: torch.Tensor | None, count: int, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        weight = _Rows.apply(*parts[:count])
        y = gemm(x, weight, None if bias is None else _Rows.apply(*parts[count:]))
        return _Columns.apply(y, [len(part) for part in parts[:count]])  # type: ignore[no-any-return]

    return _where_together(joint, gemm)


def _where_together(joint: Callable[..., tuple[torch.Tensor, ...]], gemm: Callable[..., torch.Tensor]) -> Products:
    each = separate(gemm)

    def products(
        x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
    ) -> tuple[torch.Tensor, ...]:
        given = [bias for bias in biases if bias is not None]
        with torch.no_grad():
            weight, bias = joint_rows(weights), joint_rows(given) if given else None
        alike = len({part.requires_grad for part in weights}) == 1 and len(given) in (0, len(weights))
        if len(weights) == 1 or weight is None or not alike or (given and bias is None):
            return each(x, weights, biases)
        return joint(x, weight, bias, len(weights), *weights, *given)

    return products


def _apart(y: torch.Tensor, columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Columns of y, to autograd no views of one tensor: an operator may overwrite some and leave the others."""
    return tuple(part.data for part in y.split(list(columns), -1))


class _Rows(torch.autograd.Function):
    """``joint_rows``, where they lie together."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        ctx.rows = [len(part) for part in parts]
        whole = joint_rows(parts)
        assert whole is not None
        return whole.data

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad.split(ctx.rows)


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, columns: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return _apart(y, columns)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return joint_columns(grads), None
