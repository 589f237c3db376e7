"""Low-rank adapters, applied to a plain model stage from outside, before tensor parallelism.

A's columns and B's rows are cut where those of the adapted matrix are; what is not cut is whole on every rank of the
group. So each rank's own product, and each gradient, is the same kind of part as the matrix's own: rows of the result,
or a partial sum. Those of experts lie where the experts are, and see the tokens that are routed to them.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch
from torch import nn

from hetero_megatron.model.gpt import GPTStage
from hetero_megatron.model.layers import Linear
from hetero_megatron.model.moe import GroupedLinear
from hetero_megatron.spec import Lora


def apply_lora(
    stage: GPTStage, lora: Lora, names: Collection[str], dtype: torch.dtype, device: torch.device | str
) -> None:
    """Freeze all parameters, and add adapters, uninitialised, where ``names`` (of all tensors that the stage holds) say
    that there are some."""
    stage.requires_grad_(False)
    for name, module in list(stage.named_modules()):
        if f"{name}.lora_A.weight" in names:
            assert isinstance(module, Linear | GroupedLinear), name
            _adapt(module, lora, dtype, device)


def _adapt(linear: Linear | GroupedLinear, lora: Lora, dtype: torch.dtype, device: torch.device | str) -> None:
    *experts, outputs, inputs = linear.weight.shape
    for name, columns, rows in (("lora_A", inputs, lora.rank), ("lora_B", lora.rank, outputs)):
        adapter = Linear(0, 0, False, linear.kernels) if not experts else GroupedLinear(0, 0, 0, linear.kernels, False)
        adapter.weight = nn.Parameter(torch.empty(*experts, rows, columns, dtype=dtype, device=device))
        if isinstance(adapter, Linear):
            adapter.product = partial(_plain, adapter)  # type: ignore[method-assign]
        linear.add_module(name, adapter)
    linear.adapted = partial(_adapted, linear, lora.scale)  # type: ignore[method-assign]


def _plain(adapter: Linear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product of low rank, which stays in the dtype of the weights where others are in fp8."""
    return adapter.kernels.gemm(x, adapter.weight, bias)  # type: ignore[no-any-return]


def _adapted(
    linear: Linear | GroupedLinear, scale: float, base: torch.Tensor, x: torch.Tensor, *ends: torch.Tensor
) -> torch.Tensor:
    """``base`` + scale (B A x): two products of low rank beside the frozen one."""
    assert isinstance(linear.lora_A, nn.Module) and isinstance(linear.lora_B, nn.Module)
    return base.add(linear.lora_B(linear.lora_A(x, *ends), *ends), alpha=scale)
