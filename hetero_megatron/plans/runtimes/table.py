"""The runtimes, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.runtimes.accelerate import ACCELERATE
from hetero_megatron.plans.runtimes.deepspeed import DEEPSPEED
from hetero_megatron.plans.runtimes.degrees import degrees_of, node_order, rank_order, renumbered
from hetero_megatron.plans.runtimes.megatron import MEGATRON
from hetero_megatron.plans.runtimes.runtime import RuntimeLaunch
from hetero_megatron.plans.runtimes.torchtitan import TORCHTITAN

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.spec import ModelSpec

RUNTIMES = {runtime.name: runtime for runtime in (MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE)}


def written(name: str, plan: Plan, spec: ModelSpec, cluster: Cluster, dtype: str) -> str:
    """The plan as the runtime's file.

    Raises:
        UserError: names what the runtime cannot say.
    """
    flags = degrees_of(plan, spec, name)
    RUNTIMES[name].check(flags, dtype)
    order = rank_order(plan, flags, spec)
    nodes = node_order(order, cluster, name)
    counts = {sum(cluster.ranks[rank].node == node for rank in order) for node in nodes}
    launch = RuntimeLaunch(flags, dtype, spec.num_layers, nodes, counts.pop() if len(counts) == 1 else 0)
    return RUNTIMES[name].write(launch)


def reordered(plan: Plan, nodes: Sequence[str], cluster: Cluster) -> Plan:
    """A plan whose ranks are numbered through these nodes, with the cluster's numbers; no nodes: as it is."""
    order = [rank.rank for name in nodes for rank in cluster.ranks if rank.node == name]
    return renumbered(plan, order) if order else plan
