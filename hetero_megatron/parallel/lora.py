"""Low-rank adapters, applied to a plain model stage from outside, before tensor parallelism.

A's columns and B's rows are cut where those of the adapted matrix are; what is not cut is whole on every rank of the
group. So each rank's own product, and each gradient, is the same kind of part as the matrix's own: rows of the result,
or a partial sum. Those of experts lie where the experts are, and see the tokens that are routed to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from hetero_megatron.layout import Box
from hetero_megatron.model.gpt import GPTStage, Layer, ResidualStream
from hetero_megatron.model.layers import Context, Linear
from hetero_megatron.model.moe import GroupedLinear
from hetero_megatron.ops.dropout import ADAPTER
from hetero_megatron.parallel.dora import Magnitude
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.adapter_choice import Adapter
from hetero_megatron.spec.adapter_modules import adapters
from hetero_megatron.spec.lora import EVERY_TARGET
from hetero_megatron.spec.tensors import MAGNITUDE


def apply_lora(
    stage: GPTStage, spec: ModelSpec, boxes: Mapping[str, Box], dtype: torch.dtype, device: torch.device | str
) -> AdapterSwitch:
    """Freeze all parameters, and add adapters, uninitialised, where ``boxes`` (of all tensors that the stage holds, by
    logical name) say that there are some; what turns them off."""
    stage.requires_grad_(False)
    switch, adapter_of = AdapterSwitch(), adapters(spec)
    assert spec.lora is not None
    for layer in stage.layers():
        dropouts, reduced = _Inside(layer, spec.lora.dropout), dict[str, _Reduced]()
        for name, module in list(layer.named_modules()):
            module_name = f"model.layers.{layer.number}.{name}"
            if f"{module_name}.lora_B.weight" not in boxes:
                continue
            assert isinstance(module, Linear | GroupedLinear), name
            adapter = adapter_of[module_name]
            if module_name == adapter.first:
                site = ADAPTER + EVERY_TARGET.index(adapter.place[1])
                box = boxes[f"{module_name}.lora_A.weight"]
                drop = partial(dropouts.drop, site, box.lo[-1])
                reduced[module_name] = _Reduced(module, drop, len(adapter.parts))
            _adapt(module, adapter, reduced[adapter.first], spec.lora.dora, switch, dtype, device)
    return switch


class AdapterSwitch:
    """Of all adapters of a stage. ``on``: they count; else the model is the base that they were added to."""

    on = True

    @contextmanager
    def off(self) -> Iterator[None]:
        self.on = False
        try:
            yield
        finally:
            self.on = True


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
        draws, element_range = self._context.draws, self._context.inside
        key = draws.key(self._layer, site)
        return self._kernels.dropout(x, element_range, self._rate, key, draws.sample, feature)  # type: ignore[no-any-return]


class _Reduced:
    """What A of a matrix makes of its input, for all projections of which the matrix is: the first one, in whose module
    A is, computes it, and the last one lets go of it."""

    def __init__(self, first: Linear | GroupedLinear, drop: Callable[[torch.Tensor], torch.Tensor], parts: int) -> None:
        self.first, self._drop, self._parts = first, drop, parts
        self._values: torch.Tensor | None = None
        self._left = 0

    def __call__(self, linear: nn.Module, x: torch.Tensor, *ends: torch.Tensor) -> torch.Tensor:
        if linear is self.first:
            assert isinstance(self.first.lora_A, nn.Module)
            self._values, self._left = self.first.lora_A(self._drop(x), *ends), self._parts
        values, self._left = self._values, self._left - 1
        assert values is not None, "projections of one matrix run in the order in which they lie"
        if not self._left:
            self._values = None
        return values


def _adapt(
    linear: Linear | GroupedLinear, adapter: Adapter, reduced: _Reduced, dora: bool, switch: AdapterSwitch,
    dtype: torch.dtype, device: torch.device | str,
) -> None:  # fmt: skip
    (*experts, outputs, inputs), rank = linear.weight.shape, adapter.rank
    if linear.scales is not None and not isinstance(linear.scales, torch.Tensor):  # in 4 bits, its bytes are no columns
        inputs = linear.scales.columns
    for part, columns, rows in (("lora_A", inputs, rank), ("lora_B", rank, outputs)):
        if part == "lora_A" and linear is not reduced.first:
            continue
        module = Linear(0, 0, False, linear.kernels) if not experts else GroupedLinear(0, 0, 0, linear.kernels, False)
        module.weight = nn.Parameter(torch.empty(*experts, rows, columns, dtype=dtype, device=device))
        if isinstance(module, Linear):
            module.product = partial(_plain, module)  # type: ignore[method-assign]
        linear.add_module(part, module)
    linear.adapted = partial(_adapted, linear, adapter.scale, switch, reduced)  # type: ignore[method-assign]
    if dora:
        magnitude = Magnitude((*experts, outputs), dtype, device)
        linear.add_module(MAGNITUDE, magnitude)
        linear.alone = True
        linear.product = partial(_scaled, magnitude, switch, linear.product)  # type: ignore[method-assign]


def _plain(adapter: Linear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A product of low rank, which stays in the dtype of the weights where others are in fp8."""
    return adapter.kernels.gemm(x, adapter.weight, bias)  # type: ignore[no-any-return]


def _adapted(
    linear: Linear | GroupedLinear, scale: float, switch: AdapterSwitch, reduced: _Reduced, base: torch.Tensor,
    x: torch.Tensor, *ends: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """``base`` + scale (B A drop(x)): two products of low rank beside the frozen one."""
    if not switch.on:
        return base
    assert isinstance(linear.lora_B, nn.Module)
    return base.add(linear.lora_B(reduced(linear, x, *ends), *ends), alpha=scale)


def _scaled(
    magnitude: Magnitude, switch: AdapterSwitch, product: Callable[..., torch.Tensor], x: torch.Tensor,
    bias: torch.Tensor | None, *ends: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """DoRA: the product with the rows of the adapted matrix at their trained lengths; of a part of the columns, a
    partial sum."""
    return magnitude.scaled(product(x, None, *ends), bias, *ends) if switch.on else product(x, bias, *ends)
