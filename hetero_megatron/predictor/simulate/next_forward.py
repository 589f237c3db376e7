"""What of the ALL_GATHERs of parameters a step waits for, where the others come beside the next step's forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_megatron.plans import Plan
from hetero_megatron.plans.buckets import BUCKET_BYTES
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.grad_sync import GradSync
from hetero_megatron.schedule import Timeline


@dataclass(frozen=True)
class FirstForward:
    """Beside which a rank's parameters come, evenly and in the order in which it uses them.

    Attributes:
        begin: seconds from the start of the step until its first layer; last: until the first layer of those whose
            parameters come last, together.
        share: of the parameters, that have come together when the first layer can begin.
    """

    begin: float
    last: float
    share: float

    def end(self, updated: float, written: float) -> float:
        """Seconds at which the next step can begin, so that no layer of it waits. ``updated``: seconds at which
        the parameters leave, in this step; ``written``: at which all have come."""
        return max(updated + (written - updated) * self.share - self.begin, written - self.last)


def first_forward(
    costs: CostModel, tp: int, layers: int, embed: bool, head: bool, begin: float, forward: float
) -> FirstForward:
    """Of a stage of so many layers, whose first forward begins after ``begin`` seconds and takes ``forward``. What is
    in a bucket with parameters that are used earlier comes with them."""
    trained = costs.memory.trained
    layer, held, bucket = trained(tp, min(layers, 1), False, False), trained(tp, layers, embed, head), BUCKET_BYTES // 4
    first = min(held, max(bucket, trained(tp, min(layers, 1), embed, False)))
    last_layers = min(layers, max(1.0, bucket / layer)) if layer else layers
    last = begin + forward * (1 - last_layers / max(1, layers))
    return FirstForward(begin, last, first / held if held else 1.0)


def end_of_parameters(
    plan: Plan, sync: GradSync, timelines: Sequence[Timeline], updated: Mapping[int, float],
    written: Mapping[int, float],
) -> float:  # fmt: skip
    """Seconds at which the next step can begin. A rank waits for all its parameters where some are unpacked, or where
    its stage divides weights (:class:`~hetero_megatron.parallel.grad_sync.gathering.ParameterGather`).

    Args:
        timelines: of every pipeline. updated: by rank, end of its update; written: by rank, when it has all its
            parameters; in seconds of this step.
    """
    end = max(updated.values())
    packed = {rank for bucket in sync.buckets if not bucket.dense for rank in bucket.ranks}
    for pipeline, timeline in zip(plan.pipelines, timelines, strict=True):
        for s, stage in enumerate(pipeline.stages):
            at = next((i for i, action in enumerate(timeline.schedule.stages[s]) if action.kind == "F"), None)
            begin, after = (0.0, 0.0) if at is None else (timeline.starts[s][at], timeline.ends[s][at])
            layers = stage.chunks[0][1] - stage.chunks[0][0]
            for unit in stage.units:
                facts = len(unit.ranks), layers, stage.embed, stage.head, begin, after - begin
                beside = first_forward(sync.model, *facts)
                waits = at is None or stage.weights is not None
                for rank in unit.ranks:
                    there = written[rank] if waits or rank in packed else beside.end(updated[rank], written[rank])
                    end = max(end, there)
    return end
