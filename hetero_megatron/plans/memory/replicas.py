"""Copies of what ranks own in other ranks' host memory: who holds whose, and what that takes. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_megatron.cluster import Cluster, format_bytes
from hetero_megatron.plans.buckets import Bucket, with_counts
from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.memory.of_plan import ITEM_BYTES
from hetero_megatron.plans.outer import copies_of_owned

MOMENTS_KEPT = 2  # the newest copies count once all are there; until then the ones before do


def choose_holders(
    nodes: Sequence[str], sizes: Sequence[int], staying: Sequence[bool] | None = None,
    room: Mapping[str, float] | None = None,
) -> list[int]:  # fmt: skip
    """For each rank, which other one holds its copy: of another node where there is one, and of those one whose node
    has room for it, the one that holds least so far, the nearest after it first; itself where no other one may.

    Args:
        nodes: of the ranks; sizes: what each owns; staying: may hold copies (None: all).
        room: by node, bytes of host memory for all copies there; a node that is not in it has enough.
    """
    count = len(nodes)
    stays = [True] * count if staying is None else list(staying)
    load, holders = [0] * count, [0] * count
    left = dict(room or {})
    for node, size in zip(nodes, sizes, strict=True):  # each rank's copy for itself
        left[node] = left.get(node, math.inf) - MOMENTS_KEPT * size
    for i in sorted(range(count), key=lambda i: (-sizes[i], i)):
        need = MOMENTS_KEPT * sizes[i]
        candidates = [j for j in range(count) if j != i and stays[j]] or [i]
        on_other_nodes = [j for j in candidates if nodes[j] != nodes[i]] or candidates
        chosen = min(on_other_nodes, key=lambda j: (left[nodes[j]] < need, load[j], (j - i) % count))
        holders[i] = chosen
        if chosen != i:
            load[chosen] += sizes[i]
            left[nodes[chosen]] -= need
    return holders


@dataclass(frozen=True)
class PeerCopies:
    """
    Attributes:
        sizes: by rank of the plan, bytes that it owns, and that are copied.
        holders: by rank, where its copy lies, beside its own memory; empty: a plan of one rank makes none.
        nodes: by rank.
    """

    sizes: Mapping[int, int]
    holders: Mapping[int, int]
    nodes: Mapping[int, str]

    @property
    def memory(self) -> dict[int, int]:
        """Bytes of host memory, by rank."""
        held = dict(self.sizes) if self.holders else dict.fromkeys(self.sizes, 0)
        for rank, holder in self.holders.items():
            held[holder] += self.sizes[rank] if holder != rank else 0
        return {rank: MOMENTS_KEPT * size for rank, size in held.items()}

    @property
    def sent(self) -> dict[int, int]:
        """By rank, bytes that travel whenever copies are made."""
        return {rank: size if self.holders.get(rank) != rank else 0 for rank, size in self.sizes.items()}

    def over(self, room: Mapping[str, float]) -> dict[str, int]:
        """By node that has less ``room``, bytes that are missing."""
        needs = dict.fromkeys(room, 0)
        for rank, size in self.memory.items():
            if self.nodes[rank] in needs:
                needs[self.nodes[rank]] += size
        return {node: math.ceil(need - room[node]) for node, need in needs.items() if need > room[node]}

    def describe(self, every: int) -> str:
        """One line, of the rank that holds most and the one that sends most."""
        memory, steps = self.memory, "every step" if every == 1 else f"every {every} steps"
        holds_most = max(memory, key=memory.__getitem__)
        sends = max(self.sent, key=self.sent.__getitem__)
        travels = f"up to {format_bytes(self.sent[sends])} sent (rank {sends})"
        return (
            f"copies for peers: up to {format_bytes(memory[holds_most])} of host memory (rank {holds_most}); "
            f"{steps} {travels if self.sent[sends] else 'kept by each rank for itself'}"
        )


def copies_of(
    plan: Plan, buckets: Sequence[Bucket], dtype: str, moments: int, nodes: Mapping[int, str],
    room: Mapping[str, float] | None = None,
) -> PeerCopies:  # fmt: skip
    """
    Args:
        moments: states per element of the optimizer, beside the master.
        nodes: by rank.
        room: see :func:`choose_holders`.
    """
    owned_states, outer = dict.fromkeys(sorted(plan.ranks), 0), plan.outer
    shared = 0 if outer is None else copies_of_owned(outer)
    for bucket, _, owned_elements in with_counts(b for b in buckets if b.onward is None):
        for rank, count in zip(bucket.ranks, owned_elements.tolist(), strict=True):
            owned_states[rank] += count * (shared + (moments if bucket.matrices else 1 + moments))
    sizes = {rank: count * max(ITEM_BYTES[dtype], 4) for rank, count in owned_states.items()}
    nodes = {rank: nodes[rank] for rank in sizes}
    if len(sizes) == 1:
        return PeerCopies(sizes, {}, nodes)
    holders: dict[int, int] = {}
    for ranks in [tuple(sizes)] if outer is None else outer.islands:
        chosen = choose_holders([nodes[rank] for rank in ranks], [sizes[rank] for rank in ranks], room=room)
        holders |= {rank: ranks[i] for rank, i in zip(ranks, chosen, strict=True)}
    return PeerCopies(sizes, holders, nodes)


def host_room(cluster: Cluster, host_bytes: Mapping[int, int]) -> dict[str, float]:
    """By node whose host memory the cluster file states, what is left of it.

    Args:
        host_bytes: by rank of the plan, what the run takes there without copies (``MemoryBytes.host``).
    """
    room: dict[str, float] = {}
    for rank, taken in host_bytes.items():
        node, stated = cluster.ranks[rank].node, cluster.group_of(rank).host_memory
        if stated:
            room[node] = room.get(node, stated) - taken
    return room
