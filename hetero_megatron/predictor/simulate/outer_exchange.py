"""What exchanges between islands add to the steps of a plan with outer steps."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_megatron.plans import Plan
from hetero_megatron.plans.buckets import Bucket
from hetero_megatron.plans.outer import exchanged, fragment_tensors, owners_by_island
from hetero_megatron.predictor.cost.link_model import LinkModel
from hetero_megatron.spec import ModelSpec


def outer_seconds(
    plan: Plan, spec: ModelSpec, buckets: Sequence[Bucket], links: LinkModel, itemsize: int, step: float
) -> float:
    """Mean over all steps of what they wait for exchanges.

    Args:
        itemsize: bytes of a difference of weights that is not compressed.
        step: seconds of a step without exchanges, which those that are under way for some steps go on beside.
    """
    outer = plan.outer
    assert outer is not None
    owners = owners_by_island(outer, buckets)
    waits = 0.0
    for names in fragment_tensors(spec, outer):
        flows = [(*pair, float(size)) for pair, size in exchanged(outer, owners, names, itemsize).items()]
        waits += max(0.0, links.groups_exchange(flows, [plan.ranks])[0] - outer.delay * step)
    return waits / outer.every
