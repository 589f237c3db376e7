"""Norms of adapted matrices for DoRA: |row of W + scale B A|, over all input columns, wherever these are cut."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hetero_megatron.comm import Group
from hetero_megatron.model.gpt import GPTStage
from hetero_megatron.model.layers import Linear
from hetero_megatron.ops.int8_weight import dequantize, quantize
from hetero_megatron.parallel.collectives import sum_over_ranks
from hetero_megatron.parallel.lora import Magnitude
from hetero_megatron.spec import LogicalTensor
from hetero_megatron.spec.tensors import MAGNITUDE

CUT = ("q_heads", "ffn")  # inputs of which a rank of a TP group has a part
ROWS = 1024  # in fp32 at once


class RowNorms:
    """Of a stage with DoRA, built before tensor parallelism is applied.

    Args:
        held: the stage's tensors by logical name; scale: of the adapters.
        group: the unit's ranks, which together have all columns of a matrix that is cut along its input.
    """

    def __init__(self, stage: GPTStage, held: Mapping[str, LogicalTensor], scale: float, group: Group) -> None:
        self._scale, self._group = scale, group
        self._parts: dict[str, tuple[Linear, Magnitude, bool]] = {}
        for layer in stage.layers():
            for name, module in layer.named_modules():
                magnitude = getattr(module, MAGNITUDE, None)
                if isinstance(module, Linear) and isinstance(magnitude, Magnitude):
                    whole = f"model.layers.{layer.number}.{name}.weight"
                    cut = held[whole].axes[1].role in CUT and group.size > 1
                    self._parts[whole] = module, magnitude, cut

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the norms of the weights as they are now. Called on all ranks of the group, in one exchange."""
        squares = {name: self._squares(linear, m.norms.dtype) for name, (linear, m, _) in self._parts.items()}
        cut = [name for name, (_, _, cut) in self._parts.items() if cut]
        if cut:
            total = sum_over_ranks(torch.cat([squares[name] for name in cut]), self._group)
            squares |= zip(cut, total.split([len(squares[name]) for name in cut]), strict=True)
        for name, (_, magnitude, _) in self._parts.items():
            magnitude.norms.copy_(squares[name].sqrt())

    def _squares(self, linear: Linear, wide: torch.dtype) -> torch.Tensor:
        """[outputs], of the columns that this rank has."""
        a, b = (linear.get_parameter(f"{name}.weight").to(wide) for name in ("lora_A", "lora_B"))
        found = []
        for start in range(0, len(b), ROWS):
            rows = slice(start, start + ROWS)
            weight = linear.weight[rows]
            weight = weight.to(wide) if linear.scales is None else dequantize(weight, linear.scales[rows], wide)
            found.append(torch.addmm(weight, b[rows], a, alpha=self._scale).square_().sum(1))
        return torch.cat(found) if found else b.new_empty(0)

    def gains(self) -> dict[str, torch.Tensor]:
        """By logical name of a matrix, what its rows are multiplied with, in at least fp32."""
        self.refresh()
        return {name: magnitude.gain().detach() for name, (_, magnitude, _) in self._parts.items()}


def first_magnitude(weight: torch.Tensor, int8: bool) -> torch.Tensor:
    """Lengths of the rows of a base matrix, [outputs, inputs] as files have it, in at least fp32."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    weight = dequantize(*quantize(weight), wide) if int8 else weight.to(wide)
    return torch.linalg.vector_norm(weight, dim=1)
