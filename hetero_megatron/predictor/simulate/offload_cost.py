"""What copies of activations to host memory and back add to the forwards and backwards of a plan's stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_megatron.plans import Stage
from hetero_megatron.plans.memory.micro_batches import host_layers
from hetero_megatron.predictor.cost.host_copies import coming, leaving
from hetero_megatron.predictor.cost.layer_cost import CostModel, UnitSeconds
from hetero_megatron.schedule.simulate import ChunkSeconds


class OffloadCost:
    """Of one plan."""

    def __init__(self, model: CostModel, seq_length: int) -> None:
        self.model, self.seq_length = model, seq_length

    def _copies(self, stage: Stage) -> Sequence[Mapping[int, Sequence[float]]]:
        """By chunk and rank, seconds of the copies of each layer."""
        model = self.model
        rates = {rank: model.host_rate(model.cluster.ranks[rank].chip) for rank in stage.ranks}
        options = model.options
        bytes_of = host_layers(stage, model.model, self.seq_length, model.item, options.routing, options.fp8)
        return [
            {rank: [size / rates[rank] for size in chunks[c]] for rank, chunks in bytes_of.items()}
            for c in range(len(stage.chunks))
        ]

    def added(
        self, stage: Stage, chunk_seconds: Sequence[ChunkSeconds], part: UnitSeconds, weights: Mapping[Any, float]
    ) -> list[ChunkSeconds]:
        """Seconds of the stage's chunks with the copies of its slowest rank; ``part``: of the stage; ``weights``: by
        layer, seconds in which backward brings its weights on the same link."""
        offload, out, recomputed = stage.activations, list(chunk_seconds), stage.recomputed
        if offload is None:
            return out

        def beside(row: Sequence[float], first: int) -> list[float]:
            return [x and x + weights.get(first + i, 0.0) for i, x in enumerate(row)]

        for c, (copies, (a, b)) in enumerate(zip(self._copies(stage), stage.chunks, strict=True)):
            head = part.head[1] if stage.head and c + 1 == len(stage.chunks) else 0.0
            backward = [part.layer[1] + (part.layer[0] if i < recomputed else 0.0) for i in range(b - a)]
            recomputed = max(recomputed - (b - a), 0)
            leaving_seconds = max((leaving(row, part.layer[0], offload.ahead) for row in copies.values()), default=0.0)
            rows = [beside(row, a) for row in copies.values()]
            coming_seconds = max((coming(row, backward, offload.ahead, head) for row in rows), default=0.0)
            out[c] = out[c]._replace(
                forward=out[c].forward + leaving_seconds, backward=out[c].backward + coming_seconds
            )
        return out
