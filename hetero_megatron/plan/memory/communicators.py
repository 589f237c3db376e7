"""Memory of communication libraries: how many communicators each rank of a plan has, and with how many peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hetero_megatron.cluster import Chip, Cluster, format_bytes
from hetero_megatron.plan.buckets import Bucket, plan_groups
from hetero_megatron.plan.canonical import Plan
from hetero_megatron.plan.memory.of_plan import MemoryBytes
from hetero_megatron.spec import ModelSpec


def library(chip: Chip) -> str:
    """Whose communication library a chip has; "": none, as an emulated chip transfers by gloo, in host memory."""
    return "" if chip.speed is not None else chip.vendor or "unknown"


def communicators(
    plan: Plan, spec: ModelSpec, buckets: Sequence[Bucket], vendors: Mapping[int, str]
) -> dict[int, tuple[int, int]]:
    """By rank, (communicators of its device's library, peers in all of them).

    Tensor-parallel, context and expert groups and those of gradients have one each, and pipeline neighbours one for
    each direction. Groups of several vendors, or of ranks without one (the CPU), are gloo's, in host memory; so is the
    world's, which carries numbers.

    Args:
        vendors: whose library each rank's chip has; "": none.
    """
    found = dict.fromkeys(plan.ranks, (0, 0))

    def count(ranks: Iterable[int]) -> None:
        members = tuple(ranks)
        if len(members) > 1 and vendors[members[0]] and len({vendors[r] for r in members}) == 1:
            for rank in members:
                groups, peers = found[rank]
                found[rank] = groups + 1, peers + len(members) - 1

    every = plan_groups(plan, buckets, spec)
    every.remove(plan.ranks)  # the world's own; where gradients travel in it, it is listed twice
    for group in every:
        count(group)
    for pipeline in plan.pipelines:
        for above, below in zip(pipeline.stages, pipeline.stages[1:]):
            for a in above.ranks:
                for b in below.ranks:
                    count((a, b))
                    count((a, b))
    return found


def with_communicators(
    memory: Mapping[int, MemoryBytes], plan: Plan, spec: ModelSpec, buckets: Sequence[Bucket], cluster: Cluster
) -> dict[int, MemoryBytes]:
    """``memory`` of all ranks with that of their communicators."""
    chips = {rank: cluster.chip_of(rank) for rank in plan.ranks}
    counts = communicators(plan, spec, buckets, {rank: library(chip) for rank, chip in chips.items()})
    return {
        rank: replace(needs, communicators=max(one.bytes(*counts[rank]), one.least))
        for rank, needs in memory.items()
        for one in [chips[rank].communicator]
    }


def format_communicators(plan: Plan, cluster: Cluster) -> list[str]:
    """A line per vendor: what the estimate takes, and where that is from."""
    lines = {}
    for chip in (cluster.chip_of(rank) for rank in plan.ranks):
        if chip.speed is None:
            one = chip.communicator
            lines[chip.name] = (
                f"communicators of {chip.name}: {format_bytes(one.each)} each and {format_bytes(one.peer)} per peer, "
                f"at least {format_bytes(one.least)} ({one.source})"
            )
    return list(lines.values())
