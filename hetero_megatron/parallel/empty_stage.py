"""What a rank holds of a stage before it has values: modules, adapters, weights in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from hetero_megatron.layout import Box
from hetero_megatron.model import GPTStage
from hetero_megatron.model.gpt import Layer
from hetero_megatron.model.layers import Linear
from hetero_megatron.model.moe import GroupedLinear
from hetero_megatron.ops import KernelPlan
from hetero_megatron.ops.int8_weight import quantize, widened
from hetero_megatron.plans import Stage
from hetero_megatron.spec import Dropout, LogicalTensor, ModelSpec, Share, stage_tensors, tensor_box
from hetero_megatron.spec.adapted_model import stored_box
from hetero_megatron.spec.dropout import NO_DROPOUT

if TYPE_CHECKING:
    from hetero_megatron.ops.int8_weight import Scales
    from hetero_megatron.parallel.lora import AdapterSwitch


def store_in_few_bits(
    held: Mapping[str, LogicalTensor], boxes: Mapping[str, Box], scales: dict[str, Scales], layer: Layer
) -> None:
    """Give the weights of a new layer that are stored in 8 or 4 bits that form, uninitialised.

    Args:
        held: the stage's tensors by logical name; boxes: what the rank has of them.
        scales: gets theirs ([..., outputs, 1] of 8 bits), by logical name, uninitialised.
    """
    for name, module in layer.named_modules():
        weight_name = f"model.layers.{layer.number}.{name}.weight"
        if isinstance(module, Linear | GroupedLinear) and held[weight_name].int8:
            weight = module.weight.detach()
            module.weight = nn.Parameter(torch.empty_like(weight, dtype=torch.int8), requires_grad=False)
            module.alone = True
            module.scales = scales[weight_name] = weight.new_empty(*weight.shape[:-1], 1, dtype=torch.float32)
        elif isinstance(module, Linear) and held[weight_name].nf4:
            from hetero_megatron.ops.nf4_weight import empty_nf4

            box, (rows, columns) = boxes[weight_name], held[weight_name].shape
            packed, module.scales = empty_nf4(
                (box.lo[0], box.hi[0]), (box.lo[1], box.hi[1]), (rows, columns), module.weight.device,
                module.kernels.nf4_dequantize,
            )  # fmt: skip
            module.weight = nn.Parameter(packed, requires_grad=False)
            module.alone, scales[weight_name] = True, module.scales


def fill(
    tensor: LogicalTensor, box: Box, values: Callable[[LogicalTensor, Box], torch.Tensor], weight: torch.Tensor,
    scales: Mapping[str, Scales],
) -> None:  # fmt: skip
    """Write what ``values`` says of a box into a rank's weight; of one that is among ``scales``, in few bits, also its
    scales, which are those of whole output channels, or of the whole matrix, wherever the box ends."""
    if tensor.name not in scales:
        weight.copy_(values(tensor, box))
        return
    weight_scales = scales[tensor.name]
    if not isinstance(weight_scales, torch.Tensor):
        from hetero_megatron.ops.nf4_weight import quantize_nf4

        whole_weight = values(tensor, Box((0, 0), tensor.shape))
        packed, of_blocks = quantize_nf4(whole_weight, (box.lo[0], box.hi[0]), (box.lo[1], box.hi[1]))
        weight.copy_(packed)
        weight_scales.copy_(of_blocks)
        return
    quantised, of_channels = quantize(values(tensor, Box((*box.lo[:-1], 0), (*box.hi[:-1], tensor.shape[-1]))))
    weight.copy_(quantised[..., box.lo[-1] : box.hi[-1]])
    weight_scales.copy_(of_channels)


def owned_values(
    tensor: LogicalTensor, held: Box, owned: Sequence[Box], values: Callable[[LogicalTensor, Box], torch.Tensor],
    like: torch.Tensor, scales: Mapping[str, Scales],
) -> list[torch.Tensor]:  # fmt: skip
    """What :func:`fill` would write into some boxes of a rank's weight, without the weight.

    Args:
        held: the rank's box; owned: inside it, of the array in memory. like: of the weight's dtype and device.
    """
    if tensor.name not in scales:
        return [values(tensor, box).to(like.device, like.dtype, copy=True) for box in owned]
    stored = stored_box(tensor, held)
    stored_values = torch.empty(stored.shape, dtype=like.dtype)  # in host memory
    fill(tensor, held, values, stored_values, scales)
    return [stored_values[box.slices(stored)].to(like.device, copy=True) for box in owned]


class BaseWeights:
    """What a rank holds of a model, by logical name: what is in 8 bits as products have it, in at least fp32."""

    def __init__(
        self, params: Mapping[str, torch.Tensor], scales: Mapping[str, Scales], dtype: torch.dtype
    ) -> None:
        self._params, self._scales, self._wide = params, scales, torch.promote_types(dtype, torch.float32)

    def __getitem__(self, name: str) -> torch.Tensor:
        param = self.get(name)
        assert param is not None, name
        return param

    def get(self, name: str) -> torch.Tensor | None:
        param = self._params.get(name)
        if param is None or name not in self._scales:
            return param if param is None else param.detach()
        return widened(param.detach(), self._scales[name], self._wide)

    def part(self, name: str, values: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
        """``values`` of a part of a weight, as it is stored, in that form; ``columns``: of what is stored."""
        scales = self._scales.get(name)
        if scales is None:
            return values
        of_part = scales[rows] if isinstance(scales, torch.Tensor) else scales.of(rows, columns)
        return widened(values, of_part, self._wide)


@dataclass(frozen=True)
class EmptyStage:
    """Attributes, all by logical name but ``module``:
    module: the stage with this rank's share of every tensor, uninitialised.
    tensors: of the stage; boxes: what this rank has of each.
    scales: of frozen weights in 8 or 4 bits, uninitialised.
    adapters: turns them off; None: it has none."""

    module: GPTStage
    tensors: dict[str, LogicalTensor]
    boxes: dict[str, Box]
    scales: dict[str, Scales]
    adapters: AdapterSwitch | None = None

    def stored_boxes(self) -> dict[str, Box]:
        """By logical name, the box of each in the array that memory has."""
        return {name: stored_box(self.tensors[name], box) for name, box in self.boxes.items()}

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """By logical name."""
        params = dict(self.module.named_parameters())
        assert params.keys() == self.tensors.keys(), f"model and spec disagree: {params.keys() ^ self.tensors.keys()}"
        return params


def give_up(module: torch.nn.Module, names: Collection[str], prefix: str = "") -> None:
    """Take the memory of those parameters of a module whose names, after ``prefix``, are among ``names``."""
    for name, param in module.named_parameters(prefix):
        if name in names:
            param.untyped_storage().resize_(0)


def empty_stage(
    spec: ModelSpec, stage: Stage, share: Share, dtype: torch.dtype, device: torch.device, kernels: KernelPlan,
    seq_length: int, dropout: Dropout = NO_DROPOUT, without: Collection[str] = (),
) -> EmptyStage:  # fmt: skip
    """``share``: of the rank in its TP group; ``dtype``: of parameters and activations; ``dropout``: in training;
    ``without``: logical names of weights that get no memory."""
    layers = stage.layer_indices()
    tensors = {t.name: t for t in stage_tensors(spec, layers, stage.embed, stage.head)}
    boxes = {name: tensor_box(tensor, share) for name, tensor in tensors.items()}
    scales: dict[str, Scales] = {}

    def store(layer: Layer) -> None:
        store_in_few_bits(tensors, boxes, scales, layer)
        give_up(layer, without, f"model.layers.{layer.number}")

    module = GPTStage(
        spec, share, layers, stage.embed, stage.head, dtype=dtype, device=device, kernels=kernels,
        seq_length=seq_length, dropout=dropout, store=store,
    )  # fmt: skip
    give_up(module, without)
    adapters: AdapterSwitch | None = None
    if spec.lora is not None:
        from hetero_megatron.parallel.lora import apply_lora

        adapters = apply_lora(module, spec, boxes, dtype, device)
    return EmptyStage(module, tensors, boxes, scales, adapters)
