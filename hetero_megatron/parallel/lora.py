"""Low-rank adapters, applied to a plain model stage from outside, before tensor parallelism.

A's columns and B's rows are cut where those of the adapted matrix are; what is not cut is whole on every rank of the
group. So each rank's own product, and each gradient, is the same kind of part as the matrix's own: rows of the result,
or a partial sum. Those of experts lie where the experts are, and see the tokens that are routed to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from hetero_megatron.layout import Box
from hetero_megatron.model.gpt import GPTStage, Layer, ResidualStream
from hetero_megatron.model.layers import Context, Linear
from hetero_megatron.model.moe import GroupedLinear
from hetero_megatron.ops.dropout import ADAPTER
from hetero_megatron.spec import Lora
from hetero_megatron.spec.lora import EVERY_TARGET
from hetero_megatron.spec.tensors import MAGNITUDE


def apply_lora(
    stage: GPTStage, lora: Lora, boxes: Mapping[str, Box], dtype: torch.dtype, device: torch.device | str
) -> None:
    """Freeze all parameters, and add adapters, uninitialised, where ``boxes`` (of all tensors that the stage holds, by
    logical name) say that there are some."""
    stage.requires_grad_(False)
    for layer in stage.layers():
        inside = _Inside(layer, lora.dropout)
        for name, module in list(layer.named_modules()):
            if (box := boxes.get(f"model.layers.{layer.number}.{name}.lora_A.weight")) is not None:
                assert isinstance(module, Linear | GroupedLinear), name
                site = ADAPTER + EVERY_TARGET.index(name.rpartition(".")[2])
                _adapt(module, lora, partial(inside.drop, site, box.lo[-1]), dtype, device)


class _Inside:
    """What the adapters of a layer drop of their inputs, in the forward that the layer is in."""

    def __init__(self, layer: Layer, rate: float) -> None:
        self._rate, self._layer, self._kernels = rate, layer.number, layer.kernels
        self._context: Context | None = None
        if rate:  # recomputation, which is put around it, runs it again with the same context
            layer.forward = partial(self._run, layer.forward)  # type: ignore[method-assign]

    def _run(self, forward: Callable[..., ResidualStream], x: torch.Tensor, context: Context, *more: Any) -> Any:
        self._context = context
        try:
            return forward(x, context, *more)
        finally:
            self._context = None

    def drop(self, site: int, feature: int, x: torch.Tensor) -> torch.Tensor:
        """x [b, s, features] of a place, whose first feature is number ``feature`` of it."""
        if self._context is None or self._context.draws is None or not x.shape[-1]:
            return x
        draws, inside = self._context.draws, self._context.inside
        key = draws.key(self._layer, site)
        return self._kernels.dropout(x, inside, self._rate, key, draws.sample, feature)  # type: ignore[no-any-return]


def _adapt(
    linear: Linear | GroupedLinear, lora: Lora, drop: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype,
    device: torch.device | str,
) -> None:  # fmt: skip
    *experts, outputs, inputs = linear.weight.shape
    for name, columns, rows in (("lora_A", inputs, lora.rank), ("lora_B", lora.rank, outputs)):
        adapter = Linear(0, 0, False, linear.kernels) if not experts else GroupedLinear(0, 0, 0, linear.kernels, False)
        adapter.weight = nn.Parameter(torch.empty(*experts, rows, columns, dtype=dtype, device=device))
        if isinstance(adapter, Linear):
            adapter.product = partial(_plain, adapter)  # type: ignore[method-assign]
        linear.add_module(name, adapter)
    linear.adapted = partial(_adapted, linear, lora.scale, drop)  # type: ignore[method-assign]
    if lora.dora:
        assert isinstance(linear, Linear)
        linear.add_module(MAGNITUDE, Magnitude(outputs, dtype, device))
        linear.alone, linear.product = True, partial(_scaled, linear, linear.product)  # type: ignore[method-assign]


def _plain(adapter: Linear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product of low rank, which stays in the dtype of the weights where others are in fp8."""
    return adapter.kernels.gemm(x, adapter.weight, bias)  # type: ignore[no-any-return]


def _adapted(
    linear: Linear | GroupedLinear, scale: float, drop: Callable[[torch.Tensor], torch.Tensor], base: torch.Tensor,
    x: torch.Tensor, *ends: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """``base`` + scale (B A drop(x)): two products of low rank beside the frozen one."""
    assert isinstance(linear.lora_A, nn.Module) and isinstance(linear.lora_B, nn.Module)
    return base.add(linear.lora_B(linear.lora_A(drop(x), *ends), *ends), alpha=scale)


class Magnitude(nn.Module):
    """Lengths [outputs] of the rows of an adapted matrix, and ``norms``, those that W + scale B A has: constants, which
    ``parallel/dora.py`` brings up to date."""

    def __init__(self, outputs: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        wide = torch.promote_types(dtype, torch.float32)
        self.weight = nn.Parameter(torch.empty(outputs, dtype=wide, device=device))
        self.norms = torch.empty(outputs, dtype=wide, device=device)

    def gain(self) -> torch.Tensor:
        """What rows are multiplied with, [outputs], in at least fp32."""
        return self.weight / self.norms


def _scaled(
    linear: Linear, product: Callable[..., torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """DoRA: the product with the rows of the adapted matrix at their trained lengths; of a part of the columns, a
    partial sum."""
    magnitude = linear.get_submodule(MAGNITUDE)
    assert isinstance(magnitude, Magnitude)
    y = product(x, None)
    y = y * magnitude.gain().to(y.dtype)
    return y if bias is None else y + bias
