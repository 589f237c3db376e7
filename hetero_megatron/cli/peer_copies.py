"""What copies in peers' memory take in a run with --elastic, and whether the nodes of its plan have room for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from hetero_megatron.cluster import format_bytes
from hetero_megatron.errors import UserError
from hetero_megatron.plans.memory.replicas import PeerCopies, copies_of, host_room
from hetero_megatron.training.config import RunConfig


def copies_in(config: RunConfig, room: Mapping[str, float] | None = None) -> PeerCopies:
    """Those of the run's plan; without a cluster file every rank is a node."""
    from hetero_megatron.plans.memory.of_plan import moments_of

    cluster, moments = config.cluster, moments_of(config.optimizer.name)
    if config.optimizer.name == "sgd" and not config.optimizer.momentum:
        moments = 0
    nodes = {r: cluster.ranks[r].node if cluster is not None else f"rank{r}" for r in config.plan.ranks}
    return copies_of(config.plan, config.compiled.buckets, config.dtype, moments, nodes, room)


def with_room_for_copies(config: RunConfig, asked: bool) -> RunConfig:
    """The run with what ranks need to know to place copies where host memory is; without copies, which is a notice,
    where a node has too little of it.

    Args:
        asked: --peer-replicas-every is among the flags: then what does not fit is refused.

    Raises:
        UserError: the copies do not fit, and were asked for, or there is nothing else that a loss could be mended from.
    """
    elastic, cluster = config.elastic, config.cluster
    if elastic is None or elastic.replicas_every is None or cluster is None:
        return config
    if not any(cluster.group_of(rank).host_memory for rank in config.plan.ranks):
        return config
    room = host_room(cluster, _host_bytes(config))
    copies = copies_in(config, room)
    elastic, over = replace(elastic, room={node: math.floor(left) for node, left in room.items()}), copies.over(room)
    if not over or asked and config.allow_over_memory:
        return replace(config, elastic=elastic)
    worst = max(over, key=over.__getitem__)
    needed = sum(size for rank, size in copies.memory.items() if copies.nodes[rank] == worst)
    others = f", and {len(over) - 1} more nodes have too little" if len(over) > 1 else ""
    problem = (
        f"copies in peers' memory do not fit: node {worst} needs {format_bytes(needed)} for them and has "
        f"{format_bytes(max(room[worst], 0))} left of its host memory: {format_bytes(over[worst])} too little{others}"
    )
    if asked:
        raise UserError(problem, field="--peer-replicas-every", value=elastic.replicas_every,
                        accepted="0 (no copies), more host_memory: of its nodes in the cluster file, or "
                        "--allow-over-memory")  # fmt: skip
    if not config.checkpoint.goes_on:
        raise UserError(problem, field="--elastic", accepted="--save DIR and --load DIR, the same, to go on from the "
                        "last checkpoint after a loss")  # fmt: skip
    notice = f"{problem}; there are none, and a loss is mended from the last checkpoint"
    return replace(config, elastic=replace(elastic, replicas_every=None), notices=(*config.notices, notice))


def _host_bytes(config: RunConfig) -> dict[int, int]:
    """By rank, what the run takes of host memory without copies: what is offloaded."""
    from hetero_megatron.plans.memory.of_plan import estimate_memory, moments_of

    memory = estimate_memory(
        config.plan, config.spec, config.dtype, moments_of(config.optimizer.name), config.compiled.buckets,
        config.logits_bytes, fp8=config.fp8,
    )  # fmt: skip
    return {rank: needs.host for rank, needs in memory.items()}
