"""What copies of ranks' states in other ranks' host memory cost in time: their messages beside the next step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_megatron.cluster import format_bytes
from hetero_megatron.plans.memory.replicas import PeerCopies
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.step import Prediction
from hetero_megatron.utils.text import format_seconds

WORTH = 0.03  # share of a run's time


@dataclass(frozen=True)
class CopyPrediction:
    """
    Attributes:
        packing: seconds in which a rank copies what it owns to host memory, before the next step.
        link: seconds that its messages take.
        without: seconds of a step without copies.
        exposed: seconds of it in which the links carry what the step waits for; copies then wait.
        over: by node that has too little host memory for them, bytes that are missing.
    """

    packing: float
    link: float
    without: float
    exposed: float
    over: Mapping[str, int]

    @property
    def step_seconds(self) -> float:
        """Of a step beside which copies travel."""
        return self.packing + max(self.without, self.link + self.exposed)

    @property
    def share(self) -> float:
        """By which a step beside which copies travel is longer."""
        return self.step_seconds / self.without - 1

    @property
    def worth_every(self) -> int:
        """Steps between copies so that they lengthen the run by at most ``WORTH``."""
        return max(1, math.ceil(self.share / WORTH - 1e-9))

    def as_json(self, copies: PeerCopies) -> dict[str, Any]:
        """Seconds, and bytes by rank."""
        return {
            "packing_seconds": self.packing, "link_seconds": self.link, "step_seconds": self.step_seconds,
            "memory": {str(rank): size for rank, size in copies.memory.items()}, "over": dict(self.over),
            "sent": {str(rank): size for rank, size in copies.sent.items()},
            "holders": {str(rank): holder for rank, holder in copies.holders.items()},
        }  # fmt: skip

    def __str__(self) -> str:
        every = self.worth_every
        advice = "" if every == 1 else f"; --peer-replicas-every {every}: at most {WORTH:+.0%}"
        missing = sorted(self.over.items())
        over = "".join(f"; node {node} has {format_bytes(size)} too little for them" for node, size in missing)
        return (
            f"{format_seconds(self.packing)} to pack, {format_seconds(self.link)} on the links beside the next step, "
            f"which then takes {format_seconds(self.step_seconds)} ({self.share:+.1%}{advice}){over}"
        )


def predict_copies(
    copies: PeerCopies, costs: CostModel, prediction: Prediction, room: Mapping[str, float]
) -> CopyPrediction:
    """
    Args:
        room: by node, bytes of host memory for all copies there, where the cluster file says it.

    Raises:
        UserError: rates or links are missing.
    """
    flows = [(rank, holder, float(copies.sizes[rank])) for rank, holder in copies.holders.items()]
    packing = max(size / costs.host_rate(costs.cluster.ranks[rank].chip) for rank, size in copies.sizes.items())
    exposed = prediction.parts["gradients"] + prediction.parts["parameters"]
    link = costs.links.exchange(flows).seconds if flows else 0.0
    return CopyPrediction(packing if flows else 0.0, link, prediction.step_seconds, exposed, copies.over(room))
