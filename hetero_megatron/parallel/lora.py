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

from hetero_megatron.comm import Group
from hetero_megatron.layout import Box
from hetero_megatron.model.gpt import GPTStage, Layer, ResidualStream
from hetero_megatron.model.layers import Context, Linear
from hetero_megatron.model.moe import GroupedLinear
from hetero_megatron.ops.dropout import ADAPTER
from hetero_megatron.ops.int8_weight import dequantize, quantize
from hetero_megatron.parallel.collectives import sum_over_ranks
from hetero_megatron.spec import LogicalTensor, ModelSpec
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
        assert isinstance(linear, Linear)
        linear.add_module(MAGNITUDE, Magnitude(outputs, dtype, device))
        linear.alone = True
        linear.product = partial(_scaled, linear, switch, linear.product)  # type: ignore[method-assign]


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


class Magnitude(nn.Module):
    """Lengths [outputs] of the rows of an adapted matrix, and ``norms``, those that W + scale B A has: constants, which
    ``parallel/lora.py`` brings up to date."""

    def __init__(self, outputs: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        wide_dtype = torch.promote_types(dtype, torch.float32)
        self.weight = nn.Parameter(torch.empty(outputs, dtype=wide_dtype, device=device))
        self.norms = torch.empty(outputs, dtype=wide_dtype, device=device)

    def gain(self) -> torch.Tensor:
        """What rows are multiplied with, [outputs], in at least fp32."""
        return self.weight / self.norms


def _scaled(
    linear: Linear, switch: AdapterSwitch, product: Callable[..., torch.Tensor], x: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """DoRA: the product with the rows of the adapted matrix at their trained lengths; of a part of the columns, a
    partial sum."""
    magnitude = linear.get_submodule(MAGNITUDE)
    assert isinstance(magnitude, Magnitude)
    if not switch.on:
        return product(x, bias)
    y = product(x, None)
    y = y * magnitude.gain().to(y.dtype)
    return y if bias is None else y + bias


CUT = ("q_heads", "ffn")  # inputs of which a rank of a TP group has a part
ROWS = 1024  # in fp32 at once


class RowNorms:
    """Of a stage with DoRA, built before tensor parallelism is applied.

    Args:
        held: the stage's tensors by logical name.
        group: the unit's ranks, which together have all columns of a matrix that is cut along its input.
    """

    def __init__(self, stage: GPTStage, held: Mapping[str, LogicalTensor], spec: ModelSpec, group: Group) -> None:
        self._group = group
        self._parts: dict[str, tuple[Linear, Magnitude, bool]] = {}
        self._scales: dict[str, float] = {}
        for layer in stage.layers():
            for name, module in layer.named_modules():
                magnitude = getattr(module, MAGNITUDE, None)
                if isinstance(module, Linear) and isinstance(magnitude, Magnitude):
                    weight_name = f"model.layers.{layer.number}.{name}.weight"
                    cut = held[weight_name].axes[1].role in CUT and group.size > 1
                    self._parts[weight_name] = module, magnitude, cut
                    self._scales[weight_name] = adapters(spec)[weight_name.removesuffix(".weight")].scale

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the norms of the weights as they are now. Called on all ranks of the group, in one exchange."""
        squares = {
            name: _squares(linear, self._scales[name], m.norms.dtype) for name, (linear, m, _) in self._parts.items()
        }
        cut = [name for name, (_, _, cut) in self._parts.items() if cut]
        if cut:
            total = sum_over_ranks(torch.cat([squares[name] for name in cut]), self._group)
            squares |= zip(cut, total.split([len(squares[name]) for name in cut]), strict=True)
        for name, (_, magnitude, _) in self._parts.items():
            magnitude.norms.copy_(squares[name].sqrt())

    def gains(self) -> dict[str, torch.Tensor]:
        """By logical name of a matrix, what its rows are multiplied with, in at least fp32."""
        self.refresh()
        return {name: magnitude.gain().detach() for name, (_, magnitude, _) in self._parts.items()}


def _squares(linear: Linear, scale: float, wide: torch.dtype) -> torch.Tensor:
    """Of the rows of W + scale B A, [outputs], of the columns that this rank has."""
    a, b = (linear.get_parameter(f"{name}.weight").to(wide) for name in ("lora_A", "lora_B"))
    squares = []
    for start in range(0, len(b), ROWS):
        rows = slice(start, start + ROWS)
        weight = linear.weight[rows]
        if linear.scales is None:
            weight = weight.to(wide)
        else:
            assert isinstance(linear.scales, torch.Tensor), "DoRA over 4 bits is refused"
            weight = dequantize(weight, linear.scales[rows], wide)
        squares.append(torch.addmm(weight, b[rows], a, alpha=scale).square_().sum(1))
    return torch.cat(squares) if squares else b.new_empty(0)


def first_magnitude(weight: torch.Tensor, int8: bool) -> torch.Tensor:
    """Lengths of the rows of a base matrix, [outputs, inputs] as files have it, in at least fp32."""
    wide_dtype = torch.promote_types(weight.dtype, torch.float32)
    weight = dequantize(*quantize(weight), wide_dtype) if int8 else weight.to(wide_dtype)
    return torch.linalg.vector_norm(weight, dim=1)
