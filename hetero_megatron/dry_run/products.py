"""Products and attention without values: they allocate what a chip's kernels do, not what those of a CPU do."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hetero_megatron.ops import KernelPlan
from hetero_megatron.ops.attention_op import AttentionOptions
from hetero_megatron.ops.gemm import bind_gemm, bind_joint_gemm
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
from hetero_megatron.ops.linear_cross_entropy import backward, bind_linear_cross_entropy, forward, fwd_bwd
from hetero_megatron.ops.spec import ATEN, Kernel
from hetero_megatron.spec.flops import CHUNK_ELEMENTS


def with_chip_products(kernels: KernelPlan) -> KernelPlan:
    """The same kernels, but products of 16-bit weight gradients make no wide copies of their operands, and the product
    in fp8, if there is one, multiplies quantised operands as they are."""
    kernels = _with_chip_sums(kernels) if kernels.choices["gemm"].signature.dtype.itemsize == 2 else kernels
    if kernels.fp8 is None:
        return kernels
    is_tensorwise = kernels.fp8 == TENSORWISE
    recipe = Tensorwise(_product, _quantise_whole) if is_tensorwise else Blockwise(_product, _quantise)
    gemm = Fp8Gemm(recipe)
    kernel = Kernel(kernels.fp8, "shapes", ATEN, gemm.forward, gemm.backward, parts=gemm.parts)
    hybrid = HYBRID in kernels.choices[kernels.fp8].signature.features
    return kernels.with_calls({kernels.fp8: bind_gemm_fp8(kernel, kernels.weight_gradients, hybrid)})


def _with_chip_sums(kernels: KernelPlan) -> KernelPlan:
    host_kernel, gradients = kernels.choices["gemm"].kernel, kernels.weight_gradients
    kernel = replace(host_kernel, parts={**host_kernel.parts, "weight": weight_gradient})
    gemm = bind_gemm(kernel, gradients)
    chip_kernels = kernels.with_calls({"gemm": gemm})
    chip_kernels.joint_gemm = bind_joint_gemm(kernel, gradients, gemm)
    return chip_kernels


def weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0
) -> torch.Tensor:
    """dy [.., n], x [.., k] -> [n, k], as an accelerator makes it that cannot add to a wider sum: in the dtype of the
    operands, before it is added."""
    gradient = dy.new_empty(dy.shape[-1], x.shape[-1])
    return gradient if into is None else into


def with_chip_attention(kernels: KernelPlan) -> KernelPlan:
    """The same kernels, but attention never has scores or masks in memory: where they are capped, dropped or of a
    window, those of a CPU do."""
    attend = kernels.attention

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, *options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plain = AttentionOptions(*options)._replace(window=None, softcap=None, dropout=None)
        return attend(q, k, v, sinks, *plain)  # type: ignore[no-any-return]

    return kernels.with_calls({"attention": attention})


def with_chip_chunks(kernels: KernelPlan) -> KernelPlan:
    """The same kernels, but head and loss in one, if they are, take as many tokens at once as on a chip."""
    if "linear_cross_entropy" not in kernels.choices:
        return kernels
    spec = kernels.registry.spec("linear_cross_entropy")
    parts = {"fwd_bwd": partial(fwd_bwd, elements=CHUNK_ELEMENTS)}
    kernel = Kernel(spec.name, "shapes", ATEN, forward, backward, parts=parts, version=2)
    call = bind_linear_cross_entropy(spec, kernel, kernels.weight_gradients)
    return kernels.with_calls({spec.name: call})


def _product(a: Quantised, b: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Kernels want the summed axis to be adjacent in memory."""
    product = a.data.new_empty(a.data.shape[0], b.data.shape[0], dtype=dtype)
    _ = a.data.contiguous(), b.data.contiguous()
    return product


def _quantise_whole(x: torch.Tensor, kind: torch.dtype, largest: torch.Tensor, turned: bool) -> list[Quantised]:
    data = x.new_empty(x.transpose(1, 2).shape if turned else x.shape, dtype=kind)
    return list(map(Quantised, data.unbind(0), largest.new_empty(largest.shape).unbind(0)))


def _quantise(x: torch.Tensor, kind: torch.dtype, blocks: str) -> Quantised:
    rows, n = x.shape[::-1] if blocks == "128x1" else x.shape
    data = x.new_empty(rows, n, dtype=kind)
    heights = -(-rows // BLOCK) if blocks == "128x128" else rows
    return Quantised(data, x.new_empty(heights, -(-n // BLOCK), dtype=torch.float32))
