"""DoRA: rows of adapted matrices at trained lengths.

Row i of W + scale B A counts as m_i / |row i| times itself, where m is trained and the norm is a constant in gradients,
as in peft; of a mixture of experts, rows of every expert by themselves. Where several ranks have columns of a row, its
norm is of the sum of their squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetero_megatron.comm import Comm, Group
from hetero_megatron.model.gpt import GPTStage
from hetero_megatron.model.layers import Linear
from hetero_megatron.model.moe import GroupedLinear
from hetero_megatron.ops.int8_weight import dequantize, quantize
from hetero_megatron.parallel.collectives import sum_of_ranks
from hetero_megatron.plans import Stage
from hetero_megatron.plans.experts import expert_groups
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.spec.adapter_modules import adapters
from hetero_megatron.spec.tensors import MAGNITUDE

CUT = ("q_heads", "ffn", "expert_ffn")  # inputs of which several ranks have a part
ROWS = 1024  # in fp32 at once


class Magnitude(nn.Module):
    """Lengths [outputs] of the rows of an adapted matrix, or [experts, outputs], and ``norms``, those that
    W + scale B A has: constants, which :class:`RowNorms` brings up to date."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        wide_dtype = torch.promote_types(dtype, torch.float32)
        self.weight = nn.Parameter(torch.empty(shape, dtype=wide_dtype, device=device))
        self.norms = torch.empty(shape, dtype=wide_dtype, device=device)

    def gain(self) -> torch.Tensor:
        """What rows are multiplied with, of the weight's shape, in at least fp32."""
        return self.weight / self.norms

    def scaled(self, y: torch.Tensor, bias: torch.Tensor | None, *ends: torch.Tensor) -> torch.Tensor:
        """The product y [..., outputs] without bias -> with scaled rows, and with it.

        Args:
            bias: [outputs], or [experts, outputs]; frozen.
            ends: of experts, [experts], where the rows of each end among those of y.
        """
        if not ends:
            y = y * self.gain().to(y.dtype)
            return y if bias is None else y + bias
        expert = torch.searchsorted(ends[0], torch.arange(len(y), device=y.device), right=True)  # [rows]
        y = _ScaledRows.apply(y, self.gain(), expert)
        return y if bias is None else y + bias[expert]


class _ScaledRows(torch.autograd.Function):
    """y [rows, outputs] times the gain [experts, outputs] of each row's expert [rows]. Kept are y and the gains: what
    they are by row is as large as y, and is made again."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, gain: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(y, gain, expert)
        return y * gain.to(y.dtype)[expert]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        y, gain, expert = ctx.saved_tensors
        dgain = torch.zeros_like(gain).index_put_((expert,), dy.to(gain.dtype) * y, accumulate=True)
        return dy * gain.to(y.dtype)[expert], dgain, None


class RowNorms:
    """Of a stage with DoRA, built before tensor parallelism is applied.

    Args:
        held: the stage's tensors by logical name.
        stage: the plan's, whose groups have been created.
    """

    def __init__(
        self, model: GPTStage, held: Mapping[str, LogicalTensor], spec: ModelSpec, stage: Stage, comm: Comm
    ) -> None:
        unit = next(unit.ranks for unit in stage.units if comm.rank in unit.ranks)
        self._unit = _Sharers(comm.group(unit), unit)
        self._experts = self._unit
        if stage.experts and spec.moe is not None:
            members = next(g for g in expert_groups(stage, spec.moe.num_experts) if comm.rank in g.ranks)
            ranks = next(m.ranks for m in members.members if comm.rank in m.ranks)
            several = any(len(m.ranks) > 1 for m in members.members)
            group = comm.group(tuple(sorted(members.ranks))) if several else comm.group((comm.rank,))
            self._experts = _Sharers(group, ranks)
        self._parts: dict[str, tuple[Linear | GroupedLinear, Magnitude, _Sharers | None, float]] = {}
        for layer in model.layers():
            for name, module in layer.named_modules():
                magnitude = getattr(module, MAGNITUDE, None)
                if not (isinstance(module, Linear | GroupedLinear) and isinstance(magnitude, Magnitude)):
                    continue
                module_name = f"model.layers.{layer.number}.{name}"
                weight = held[f"{module_name}.weight"]
                sharers = self._experts if weight.per_expert else self._unit
                cut = weight.axes[-1].role in CUT and sharers.group.size > 1
                scale = adapters(spec)[module_name].scale
                self._parts[weight.name] = module, magnitude, sharers if cut else None, scale

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the norms of the weights as they are now. Called on all ranks of the stage, in one exchange per kind
        of group."""
        squares = {
            name: _squares(linear, scale, magnitude.norms.dtype)
            for name, (linear, magnitude, _, scale) in self._parts.items()
        }
        for sharers in dict.fromkeys((self._unit, self._experts)):
            cut = [name for name, part in self._parts.items() if part[2] is sharers]
            if cut:
                parts = torch.cat([squares[name].flatten() for name in cut])
                total = sum_of_ranks(parts, sharers.group, sharers.ranks)
                sizes = [squares[name].numel() for name in cut]
                squares |= zip(cut, total.split(sizes), strict=True)
        for name, (_, magnitude, _, _) in self._parts.items():
            magnitude.norms.copy_(squares[name].view_as(magnitude.norms).sqrt())

    def gains(self) -> dict[str, torch.Tensor]:
        """By logical name of a matrix, what its rows are multiplied with, in at least fp32."""
        self.refresh()
        return {name: magnitude.gain().detach() for name, (_, magnitude, _, _) in self._parts.items()}


@dataclass(frozen=True)
class _Sharers:
    """``ranks`` that have columns of the same rows, among those of a group, which add up their parts together."""

    group: Group
    ranks: tuple[int, ...]


def _squares(linear: Linear | GroupedLinear, scale: float, wide: torch.dtype) -> torch.Tensor:
    """Of the rows of W + scale B A, [outputs] or [experts, outputs], of the columns that this rank has."""

    def by_expert(x: torch.Tensor) -> torch.Tensor:
        return x if isinstance(linear, GroupedLinear) else x[None]

    a, b = (by_expert(linear.get_parameter(f"{name}.weight").to(wide)) for name in ("lora_A", "lora_B"))
    weights, scales = by_expert(linear.weight), linear.scales
    squares = b.new_empty(b.shape[:2])
    experts = max(1, ROWS // max(1, b.shape[1]))
    for first in range(0, len(b), experts):
        for start in range(0, b.shape[1], ROWS):
            some, rows = slice(first, first + experts), slice(start, start + ROWS)
            weight = weights[some, rows]
            if scales is None:
                weight = weight.to(wide)
            else:
                assert isinstance(scales, torch.Tensor), "DoRA over 4 bits is refused"
                weight = dequantize(weight, by_expert(scales)[some, rows], wide)
            squares[some, rows] = torch.baddbmm(weight, b[some, rows], a[some], alpha=scale).square_().sum(-1)
    return squares if isinstance(linear, GroupedLinear) else squares[0]


def first_magnitude(weight: torch.Tensor, int8: bool) -> torch.Tensor:
    """Lengths of the rows of base matrices, [..., outputs, inputs] as files have them, in at least fp32."""
    wide_dtype = torch.promote_types(weight.dtype, torch.float32)
    weight = dequantize(*quantize(weight), wide_dtype) if int8 else weight.to(wide_dtype)
    return torch.linalg.vector_norm(weight, dim=-1)
