"""Products in fp8 without values: what they allocate is what a chip's kernels do, not what the reference does."""

from __future__ import annotations

import torch

from hetero_megatron.ops import KernelPlan
from hetero_megatron.ops.gemm_fp8 import (
    BLOCK,
    HYBRID,
    TENSORWISE,
    Blockwise,
    Fp8Gemm,
    Quantised,
    Tensorwise,
    bind_gemm_fp8,
)
from hetero_megatron.ops.kernel import ATEN, Kernel


def with_chip_products(kernels: KernelPlan) -> KernelPlan:
    """The same kernels, but the product in fp8, if there is one, multiplies quantised operands as they are."""
    if kernels.fp8 is None:
        return kernels
    recipe = Tensorwise(_product) if kernels.fp8 == TENSORWISE else Blockwise(_product, _quantise)
    gemm = Fp8Gemm(recipe)
    kernel = Kernel(kernels.fp8, "shapes", ATEN, gemm.forward, gemm.backward, parts=gemm.parts)
    hybrid = HYBRID in kernels.choices[kernels.fp8].signature.features
    return kernels.with_calls({kernels.fp8: bind_gemm_fp8(kernel, kernels.weight_gradients, hybrid)})


def _product(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Kernels want the summed axis to be adjacent in memory."""
    made = a.data.new_empty(a.data.shape[0], b.data.shape[0], dtype=dtype)
    _ = a.data.contiguous(), b.data.contiguous()
    return made


def _quantise(x: torch.Tensor, kind: torch.dtype, blocks: str) -> Quantised:
    rows, n = x.shape[::-1] if blocks == "128x1" else x.shape
    data = x.new_empty(rows, n, dtype=kind)
    heights = -(-rows // BLOCK) if blocks == "128x128" else rows
    return Quantised(data, x.new_empty(heights, -(-n // BLOCK), dtype=torch.float32))
