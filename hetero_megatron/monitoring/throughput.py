"""How fast is fast: peak rates for MFU, and tokens per chip and second by chip type."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hetero_megatron.plans import Plan
from hetero_megatron.plans.routing import RoutingStats
from hetero_megatron.platform import Platform
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import head_flops, layer_flops

if TYPE_CHECKING:
    import torch

    from hetero_megatron.parallel.balance import StepRouting

LEAST, LARGEST = 1e-3, 8192  # seconds of a product that is more than its launch; its size at most


def measured_peak_flops(platform: Platform, dtype: torch.dtype, size: int = 512, seconds: float = 0.2) -> float:
    """FLOP/s of repeated square matrix products: the best of several, on this device as it is now.

    The better of ``dtype`` and fp32: where 16-bit products are emulated, fp32 is what the chip can do.

    Args:
        size: to begin with; doubled until a product takes ``LEAST``.
        seconds: for each dtype.
    """
    best = 0.0
    for kind in {dtype, torch.float32}:
        end, width = time.perf_counter() + seconds, size
        a = torch.randn(width, width, device=platform.device).to(kind)
        _product_seconds(platform, a)  # libraries choose their kernel, memory is allocated
        while (duration := _product_seconds(platform, a)) < LEAST and width < LARGEST:
            width *= 2
            a = torch.randn(width, width, device=platform.device).to(kind)
            _product_seconds(platform, a)
        while time.perf_counter() < end:
            duration = min(duration, _product_seconds(platform, a))
        best = max(best, 2 * width**3 / duration)
    return best


def _product_seconds(platform: Platform, a: torch.Tensor) -> float:
    start = time.perf_counter()
    a @ a
    platform.synchronize()
    return time.perf_counter() - start


def work_shares(plan: Plan, spec: ModelSpec) -> dict[int, float]:
    """The share of a step's model FLOPs that each rank computes; they sum to 1."""
    layer, head = layer_flops(spec, plan.seq_length), head_flops(spec, plan.seq_length)
    total = plan.global_batch_size * (spec.num_layers * layer + head)
    shares: dict[int, float] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            flops = stage.num_layers * layer + stage.head * head
            for unit in stage.units:
                rows = (unit.sequences[1] - unit.sequences[0]) * pipeline.num_micro_batches
                for rank, weight in zip(unit.ranks, unit.tp_split, strict=True):
                    shares[rank] = rows * flops * weight / sum(unit.tp_split) / total
    return shares


def tokens_per_chip_second(
    shares: Mapping[int, float], chips: Mapping[int, str], tokens_per_second: float
) -> dict[str, float]:
    """TGS by chip type: a type's part of the tokens (by work) per chip of it."""
    work, count = defaultdict[str, float](float), defaultdict[str, int](int)
    for rank, share in shares.items():
        work[chips[rank]] += share
        count[chips[rank]] += 1
    return {chip: tokens_per_second * work[chip] / count[chip] for chip in sorted(work)}


NAMES = {"sequence loss": "load_balancing_loss", "z-loss": "z_loss"}  # Megatron's


@dataclass(frozen=True)
class ExpertFigures:
    """Of one step.

    Attributes:
        busiest: by layer, tokens of its busiest expert over the mean of its experts.
        rank_rows: by rank of the plan, how often it computed an expert for a token.
        losses: mean over layers, without coefficients, by Megatron's names.
    """

    busiest: Mapping[int, float]
    rank_rows: Sequence[int]
    losses: Mapping[str, float]

    @property
    def worst(self) -> float:
        """Of the layer that is balanced worst."""
        return max(self.busiest.values(), default=1.0)

    def record(self) -> dict[str, Any]:
        """For a line of metrics.jsonl."""
        return {
            "expert_load": {
                "max_over_mean": {str(layer): round(x, 4) for layer, x in self.busiest.items()},
                "rank_rows": list(self.rank_rows),
            },
            **self.losses,
        }

    def scalars(self) -> dict[str, float]:
        """For TensorBoard and W&B."""
        mean = sum(self.rank_rows) / max(len(self.rank_rows), 1)
        ranks = {"moe/busiest rank": max(self.rank_rows) / mean} if mean else {}
        layers = {f"moe/busiest expert, layer {layer}": x for layer, x in self.busiest.items()}
        return {**self.losses, "moe/busiest expert": self.worst, **ranks, **layers}


def figures_of(routing: StepRouting) -> ExpertFigures:
    busiest = {layer: _over_mean(load) for layer, load in routing.load.items()}
    losses = {NAMES[name]: value for name, value in routing.losses.items()}
    return ExpertFigures(busiest, routing.rank_rows.tolist(), losses)


def _over_mean(load: torch.Tensor) -> float:
    total = int(load.sum())
    return int(load.max()) * len(load) / total if total else 1.0


class ExpertTotals:
    """Counts of all steps so far."""

    def __init__(self) -> None:
        self.load: dict[int, torch.Tensor] = {}

    def add(self, routing: StepRouting) -> None:
        for layer, load in routing.load.items():
            self.load[layer] = self.load[layer] + load if layer in self.load else load

    def stats(self, top_k: int) -> RoutingStats:
        counts = {layer: tuple(load.tolist()) for layer, load in self.load.items()}
        return RoutingStats(sum(next(iter(counts.values()), ())) // top_k, counts)
