"""Frozen weights in 8 bits: an int8 per element and an fp32 scale per output channel, as in torchao's int8 weight-only;
and products of weights in few bits, of which those in 4 are in ``nf4_weight.py``.

Values do not depend on how a plan cuts a weight: a scale is that of a whole output channel. Before each product a
weight becomes one of the activations' dtype, which lives as long as the product; backward makes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hetero_megatron.ops.spec import ATEN, Bounds, Kernel, OpSpec

if TYPE_CHECKING:
    from hetero_megatron.ops.nf4_weight import Nf4Scales

    Scales = torch.Tensor | Nf4Scales  # of a weight in 8 bits, and in 4


def _of_nf4(name: str) -> Callable[..., Any]:
    """A function of ``nf4_weight.py``, which runs without weights in 4 bits do not load."""

    def call(*args: Any) -> Any:
        from hetero_megatron.ops import nf4_weight

        return getattr(nf4_weight, name)(*args)

    return call


def _nf4_definition(*args: Any) -> tuple[torch.Tensor]:
    _of_nf4("nf4_dequantize")(*args)
    return (args[5],)


# Its fp32 results are equal to the last bit: what adapters are trained against does not depend on who computed it.
SPEC = OpSpec(
    name="nf4_dequantize", tensors=("weight", "groups", "mean", "levels", "codes", "matrix"),
    options=("first", "across", "skip"), results=(), in_place=("matrix",), wide=("groups", "mean", "levels", "codes"),
    definition=_nf4_definition, forward=_of_nf4("nf4_dequantize"), backward=None, fake=lambda *args: (),
    flops=_of_nf4("nf4_flops"), cases=_of_nf4("nf4_cases"), bounds=Bounds(fp32=(0.0, 0.0)), schema=None,
    speed=lambda: _of_nf4("nf4_case")("4096 x 4096", 4096, 4096, 64),
)  # fmt: skip
KERNELS = (Kernel("nf4_dequantize", ATEN, ATEN, _of_nf4("nf4_dequantize"), None, traceable=True),)

LEVELS = 127.5  # half of the range of int8
SMALLEST = torch.finfo(torch.float32).eps  # of scales: a channel of zeros has one, too


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., outputs, inputs], finite and of whole output channels -> int8 of that shape, and fp32 scales
    [..., outputs, 1]: the largest magnitude of a channel, over 127.5."""
    weight = weight.float()
    scales = (weight.abs().amax(-1, keepdim=True) / LEVELS).clamp(min=SMALLEST)
    return (weight * (1 / scales)).round_().clamp_(-128, 127).to(torch.int8), scales


def dequantize(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight in ``dtype``: int8 [..., outputs, inputs] times fp32 [..., outputs, 1], rounded once."""
    if dtype == torch.float64:
        return weight.to(dtype).mul_(scales)
    return torch.mul(weight, scales, out=weight.new_empty(weight.shape, dtype=dtype))


def widened(weight: torch.Tensor, scales: Scales, dtype: torch.dtype) -> torch.Tensor:
    """A weight in 8 or 4 bits in ``dtype``."""
    return dequantize(weight, scales, dtype) if isinstance(scales, torch.Tensor) else scales.widened(weight, dtype)


class _NarrowProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor, scales: Scales,
        bias: torch.Tensor | None, *more: Any,
    ) -> torch.Tensor:  # fmt: skip
        ctx.product, ctx.scales = product, scales  # frozen: neither has a gradient
        ctx.save_for_backward(weight, *more)
        return product(x, widened(weight, scales, x.dtype), bias, *more)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        weight, *other_saved = ctx.saved_tensors
        dx = None
        if ctx.needs_input_grad[1]:
            dx = ctx.product(dy, widened(weight, ctx.scales, dy.dtype).mT, None, *other_saved)
        return None, dx, *(None for _ in range(3 + len(other_saved)))


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
