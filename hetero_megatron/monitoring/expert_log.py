"""What a run says about its experts: who had how much to do, and the losses that balance them. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hetero_megatron.plan.routing_stats import RoutingStats

if TYPE_CHECKING:
    import torch

    from hetero_megatron.parallel.balance import StepRouting

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
