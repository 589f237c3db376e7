"""Copies of what ranks own in other ranks' host memory: who holds whose, and what that takes. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero_megatron.cluster import format_bytes
from hetero_megatron.plans.buckets import Bucket, with_counts
from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.memory.of_plan import ITEM_BYTES

MOMENTS_KEPT = 2  # the newest copies count once all are there; until then the ones before do


def choose_holders(nodes: Sequence[str], sizes: Sequence[int], staying: Sequence[bool] | None = None) -> list[int]:
    """For each rank, which other one holds its copy: of another node where there is one, and of those the one that
    holds least so far, the nearest after it first; itself where no other one may.

    Args:
        nodes: of the ranks; sizes: what each owns; staying: may hold copies (None: all).
    """
    count = len(nodes)
    stays = [True] * count if staying is None else list(staying)
    load, holders = [0] * count, [0] * count
    for i in sorted(range(count), key=lambda i: (-sizes[i], i)):
        candidates = [j for j in range(count) if j != i and stays[j]] or [i]
        on_other_nodes = [j for j in candidates if nodes[j] != nodes[i]] or candidates
        holders[i] = min(on_other_nodes, key=lambda j: (load[j], (j - i) % count))
        load[holders[i]] += sizes[i]
    return holders


def replica_bytes(
    plan: Plan, buckets: Sequence[Bucket], dtype: str, moments: int, nodes: Mapping[int, str]
) -> dict[int, tuple[int, int]]:
    """By rank: (host memory that copies take, bytes that it sends whenever they are made).

    Args:
        moments: states per element of the optimizer, beside the master.
        nodes: by rank.
    """
    owned_states = dict.fromkeys(sorted(plan.ranks), 0)
    for bucket, _, owned_elements in with_counts(b for b in buckets if b.onward is None):
        for rank, count in zip(bucket.ranks, owned_elements.tolist(), strict=True):
            owned_states[rank] += count * (moments if bucket.matrices else 1 + moments)
    ranks, sizes = list(owned_states), [count * max(ITEM_BYTES[dtype], 4) for count in owned_states.values()]
    if len(ranks) == 1:
        return {ranks[0]: (0, 0)}
    held_bytes = list(sizes)
    for i, holder in enumerate(choose_holders([nodes[rank] for rank in ranks], sizes)):
        held_bytes[holder] += sizes[i]
    return {rank: (MOMENTS_KEPT * held_bytes[i], sizes[i]) for i, rank in enumerate(ranks)}


def format_replicas(bytes_of_rank: Mapping[int, tuple[int, int]], every: int) -> str:
    """One line, of the rank that holds most and the one that sends most."""
    holds_most, sends = (max(bytes_of_rank, key=lambda rank: bytes_of_rank[rank][column]) for column in (0, 1))
    steps = "every step" if every == 1 else f"every {every} steps"
    return (
        f"copies for peers: up to {format_bytes(bytes_of_rank[holds_most][0])} of host memory (rank {holds_most}); "
        f"{steps} up to {format_bytes(bytes_of_rank[sends][1])} sent (rank {sends})"
    )
