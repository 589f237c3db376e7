"""What exchanges between islands add to the steps of a plan with outer steps."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_megatron.plans import Plan
from hetero_megatron.plans.buckets import Bucket
from hetero_megatron.plans.canonical import Outer
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
    assert plan.outer is not None
    return waiting_seconds(plan.outer, exchange_seconds(plan, spec, buckets, links, itemsize), step)


def exchange_seconds(
    plan: Plan, spec: ModelSpec, buckets: Sequence[Bucket], links: LinkModel, itemsize: int
) -> list[float]:
    """Of each fragment, how long its exchange takes."""
    outer = plan.outer
    assert outer is not None
    owners, seconds = owners_by_island(outer, buckets), list[float]()
    for names in fragment_tensors(spec, outer):
        flows = [(*pair, float(size)) for pair, size in exchanged(outer, owners, names, itemsize).items()]
        seconds.append(links.groups_exchange(flows, [plan.ranks])[0])
    return seconds


def waiting_seconds(outer: Outer, exchanges: Sequence[float], step: float) -> float:
    """Mean over all steps of what they wait for ``exchanges`` of each fragment that take so long."""
    return sum(max(0.0, seconds - outer.delay * step) for seconds in exchanges) / outer.every
