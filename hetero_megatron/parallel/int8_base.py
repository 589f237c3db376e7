"""A frozen base in 8 bits: what a rank has of it, cut as it would be in 16 bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from hetero_megatron.layout import Box
from hetero_megatron.model.gpt import Layer
from hetero_megatron.model.layers import Linear
from hetero_megatron.model.moe import GroupedLinear
from hetero_megatron.ops.int8_weight import dequantize, quantize
from hetero_megatron.spec import LogicalTensor


def store_in_int8(held: Mapping[str, LogicalTensor], scales: dict[str, torch.Tensor], layer: Layer) -> None:
    """Give the weights of a new layer that are stored in 8 bits that form, uninitialised.

    Args:
        held: the stage's tensors by logical name.
        scales: gets theirs [..., outputs, 1], by logical name, uninitialised.
    """
    for name, module in layer.named_modules():
        whole = f"model.layers.{layer.number}.{name}.weight"
        if isinstance(module, Linear | GroupedLinear) and held[whole].int8:
            weight = module.weight.detach()
            module.weight = nn.Parameter(torch.empty_like(weight, dtype=torch.int8), requires_grad=False)
            module.alone = True
            module.scales = scales[whole] = weight.new_empty(*weight.shape[:-1], 1, dtype=torch.float32)


def fill(
    tensor: LogicalTensor, box: Box, values: Callable[[LogicalTensor, Box], torch.Tensor], weight: torch.Tensor,
    scales: Mapping[str, torch.Tensor],
) -> None:  # fmt: skip
    """Write what ``values`` says of a box into a rank's weight; of one that is among ``scales``, in 8 bits, also its
    scales, which are those of whole output channels wherever the box ends."""
    if tensor.name not in scales:
        weight.copy_(values(tensor, box))
        return
    found, of_channels = quantize(values(tensor, Box((*box.lo[:-1], 0), (*box.hi[:-1], tensor.shape[-1]))))
    weight.copy_(found[..., box.lo[-1] : box.hi[-1]])
    scales[tensor.name].copy_(of_channels)


class BaseWeights:
    """What a rank holds of a model, by logical name: what is in 8 bits as products have it, in at least fp32."""

    def __init__(
        self, params: Mapping[str, torch.Tensor], scales: Mapping[str, torch.Tensor], dtype: torch.dtype
    ) -> None:
        self._params, self._scales, self._wide = params, scales, torch.promote_types(dtype, torch.float32)

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self.get(name)
        assert found is not None, name
        return found

    def get(self, name: str) -> torch.Tensor | None:
        found = self._params.get(name)
        if found is None or name not in self._scales:
            return found if found is None else found.detach()
        return dequantize(found.detach(), self._scales[name], self._wide)
