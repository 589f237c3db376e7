"""Ranks that exceed their memory, the refusal of a plan that does not fit, and memory as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetero_megatron.cluster import Cluster, format_bytes
from hetero_megatron.errors import UserError
from hetero_megatron.plans.memory.of_plan import MemoryBytes
from hetero_megatron.utils.text import plural, rank_ranges


@dataclass(frozen=True)
class OverLimit:
    """A rank that needs ``over`` bytes more than its ``limit``."""

    rank: int
    chip: str
    need: int
    limit: int

    @property
    def over(self) -> int:
        return self.need - self.limit

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.chip}) needs {format_bytes(self.need)} of {format_bytes(self.limit)} usable: "
            f"over by {format_bytes(self.over)}"
        )


@dataclass(frozen=True)
class OverHost(OverLimit):
    """A node whose ranks, of which ``rank`` is the first, need more host memory than it has."""

    node: str = ""

    def __str__(self) -> str:
        return (
            f"node {self.node} needs {format_bytes(self.need)} of its {format_bytes(self.limit)} of host memory: "
            f"over by {format_bytes(self.over)}"
        )


def over_host(memory: Mapping[int, MemoryBytes], cluster: Cluster) -> tuple[OverHost, ...]:
    """The nodes that exceed their ``host_memory``, where the cluster file says it, worst first."""
    needs: dict[str, int] = {}
    for rank, m in memory.items():
        node = cluster.ranks[rank].node
        needs[node] = needs.get(node, 0) + m.host
    exceeded = []
    for rank in sorted(memory):
        cluster_rank, limit = cluster.ranks[rank], cluster.group_of(rank).host_memory
        if limit and needs.pop(cluster_rank.node, 0) > limit:
            need = sum(m.host for r, m in memory.items() if cluster.ranks[r].node == cluster_rank.node)
            exceeded.append(OverHost(rank, cluster_rank.chip, need, limit, cluster_rank.node))
    return tuple(sorted(exceeded, key=lambda o: (-o.over, o.rank)))


def over_limit(
    memory: Mapping[int, MemoryBytes], limits: Mapping[int, int], chips: Mapping[int, str]
) -> tuple[OverLimit, ...]:
    """The ranks that exceed their limit, worst first."""
    exceeded = [OverLimit(r, chips[r], m.total, limits[r]) for r, m in memory.items() if m.total > limits[r]]
    return tuple(sorted(exceeded, key=lambda o: (-o.over, o.rank)))


def refuse(over: tuple[OverLimit, ...], memory: Mapping[int, MemoryBytes], where: str = "") -> UserError:
    """The error for a plan that does not fit: its worst rank, what fills it, and what would help most."""
    worst = over[0]
    if isinstance(worst, OverHost):
        return UserError(
            f"the plan does not fit: {worst}", field="memory", where=where,
            accepted="activations: {offload: {first: n}} of fewer layers, recompute instead, fewer offloaded "
            "optimizers, or more host_memory: of its nodes in the cluster file",
        )  # fmt: skip
    largest = memory[worst.rank].largest
    bytes_ = format_bytes(memory[worst.rank].parts()[largest])
    help_by = {
        "activations": "recompute: elementwise or full or activations: {offload: all} on its stage, a smaller "
        "micro_batch_size, or fewer layers there",
        "graphs": "the run without --cuda-graph-impl local, or fewer micro-batches in flight",
        "second_model": "a smaller teacher or reference, or what it says in a file (hetero-megatron score)",
        "overhead": "a chip with more memory",
        "communicators": "fewer ranks in groups and fewer groups, or communicators: of the chip in the cluster file",
    }
    others_text = f"; {plural(len(over), 'rank')} do not fit" if len(over) > 1 else ""
    return UserError(
        f"the plan does not fit: {worst}{others_text}. Most of it is {largest}, {bytes_}",
        field="memory", where=where,
        accepted=help_by.get(
            largest, "more tp, fewer layers on its stage, more replicas that share the optimizer, or "
            "optimizer: {offload: true}",
        ),
    )  # fmt: skip


def format_memory(memory: Mapping[int, MemoryBytes]) -> str:
    """A table with one row per set of ranks with equal memory."""
    rows: dict[MemoryBytes, list[int]] = {}
    for rank, needs in sorted(memory.items()):
        rows.setdefault(needs, []).append(rank)
    heads = ["weights", "gradients", "optimizer", "activations", "moving", "buffers"]
    heads += ["second_model", "graphs", "overhead", "communicators", "total", "host"]
    for head in ("moving", "second_model", "graphs", "overhead", "communicators", "host"):
        if not any(getattr(needs, head) for needs in rows):
            heads.remove(head)
    lines = ["estimated memory per rank", f"{'ranks':<16}" + "".join(f"{h:>15}" for h in heads)]
    for needs, ranks in rows.items():
        values = [getattr(needs, head) for head in heads]
        lines.append(f"{rank_ranges(ranks):<16}" + "".join(f"{format_bytes(v):>15}" for v in values))
    return "\n".join(lines)
