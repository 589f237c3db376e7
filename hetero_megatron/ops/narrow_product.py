"""Products of frozen weights in few bits: before each one a weight becomes one of the activations' dtype, which lives
as long as the product; backward makes it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero_megatron.ops import int8_weight
from hetero_megatron.ops.nf4_weight import Nf4Scales, dequantize_nf4

Scales = torch.Tensor | Nf4Scales  # of a weight in 8 bits, and in 4


def dequantize(weight: torch.Tensor, scales: Scales, dtype: torch.dtype) -> torch.Tensor:
    """The weight in ``dtype``."""
    if isinstance(scales, Nf4Scales):
        return dequantize_nf4(weight, scales, dtype)
    return int8_weight.dequantize(weight, scales, dtype)


class _NarrowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor, scales: Scales,
        bias: torch.Tensor | None, *more: Any,
    ) -> torch.Tensor:  # fmt: skip
        ctx.product, ctx.scales = product, scales  # frozen: neither has a gradient
        ctx.save_for_backward(weight, *more)
        return product(x, dequantize(weight, scales, x.dtype), bias, *more)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        weight, *more = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[1]:
            dx = ctx.product(dy, dequantize(weight, ctx.scales, dy.dtype).mT, None, *more)
        return None, dx, *(None for _ in range(3 + len(more)))


def narrow_product(
    product: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor, scales: Scales,
    bias: torch.Tensor | None, *more: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """``product(x, weight, bias, *more)`` of a frozen weight in few bits, differentiable in x.

    Args:
        product: ``gemm``, or ``grouped_gemm`` with ``ends`` as ``more``. With the weight transposed it makes the
            gradient of x, too.
        bias: frozen.
    """
    return _NarrowProduct.apply(product, x, weight, scales, bias, *more)  # type: ignore[no-any-return]
