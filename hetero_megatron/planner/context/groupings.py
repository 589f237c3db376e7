"""Groupings of members into context groups: by topology, and the equal layouts that serve as baselines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.context.problem import ContextLayout, ContextProblem, MemberGroup

Grouping = tuple[tuple[int, ...], ...]


def nodes_of(problem: ContextProblem) -> list[tuple[int, ...]]:
    """Members by node, nodes in order of first appearance."""
    by_node: dict[int, list[int]] = {}
    for index, member in enumerate(problem.members):
        by_node.setdefault(member.node, []).append(index)
    return [tuple(group) for group in by_node.values()]


def blocks_of(row: Sequence[tuple[int, ...]], nodes: int, each: int) -> list[tuple[int, ...]]:
    """Groups of ``each`` members from each of ``nodes`` consecutive nodes of a row."""
    groups: list[tuple[int, ...]] = []
    for start in range(0, len(row), nodes):
        block = row[start : start + nodes]
        for offset in range(0, max(map(len, block)), each):
            groups.append(tuple(m for node in block for m in node[offset : offset + each]))
    return [group for group in groups if group]


def nodes_by_kind(problem: ContextProblem) -> dict[int, list[tuple[int, ...]]]:
    kinds: dict[int, list[tuple[int, ...]]] = {}
    for node in nodes_of(problem):
        kinds.setdefault(problem.members[node[0]].kind, []).append(node)
    return kinds


def per_kind(problem: ContextProblem, sizes: dict[int, tuple[int, int]]) -> Grouping:
    """Each kind's nodes grouped by its own (nodes, each), one kind after the other."""
    return tuple(g for kind, row in nodes_by_kind(problem).items() for g in blocks_of(row, *sizes[kind]))


def clusters(problem: ContextProblem) -> list[Grouping]:
    """Groupings by topology, without duplicates: inside nodes, over several nodes, whole, and strided.

    Parts of several nodes: the ring runs inside nodes and crosses nodes once per block of nodes, while the all-to-all
    runs between them (LoongTrain's context-first placement).
    """
    nodes = nodes_of(problem)
    widest, world = max(map(len, nodes)), len(problem.members)
    groupings: list[Grouping] = [tuple(blocks_of(nodes, 1, size)) for size in _sizes(widest)]
    groupings += [tuple(blocks_of(nodes, n, per_node)) for n in _sizes(len(nodes), 2) for per_node in _sizes(widest, 2)]
    groupings.append((tuple(range(world)),))
    # Strided over all members: the ring stays inside nodes as far as possible.
    groupings += [tuple(tuple(range(k, world, r)) for k in range(r)) for r in _sizes(min(world // 2, 128))]
    return list(dict.fromkeys(groupings))


def _sizes(limit: int, base: int = 3) -> list[int]:
    """Powers of two up to the limit, and the limit; with base 3 also three times powers of two."""
    powers = {2**k for k in range(12)} | ({3 * 2**k for k in range(11)} if base == 3 else set())
    return sorted({n for n in powers if n <= limit} | {limit})


def partitions(items: Sequence[int]) -> Iterator[Grouping]:
    """All set partitions, each group in listed order (Bell numbers: 15 for 4 items, 203 for 6)."""
    if not items:
        yield ()
        return
    for smaller in partitions(items[1:]):
        yield ((items[0],), *smaller)
        for i, group in enumerate(smaller):
            yield (*smaller[:i], (items[0], *group), *smaller[i + 1 :])


def equal_shares(total: int, parts: int) -> list[int]:
    """Integers that differ by at most one, larger ones first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def equal_layouts(problem: ContextProblem) -> list[ContextLayout]:
    """Every Ring, Ulysses and USP layout with equal shards: P = u x r, u a divisor of the number of query heads. ``u``
    members form an all-to-all group, of consecutive members (as in USP) or strided; r groups form the ring. KV heads
    are copied where u exceeds them. Shards differ by at most one token."""
    world, heads = len(problem.members), problem.model.num_heads
    tokens = equal_shares(problem.seq_length, world)
    layouts: list[ContextLayout] = []
    for u in range(1, world + 1):
        if world % u or heads % u:
            continue
        r = world // u
        inner = [tuple(range(k * u, k * u + u)) for k in range(r)]
        strided = [tuple(range(k, world, r)) for k in range(r)]
        name = "ulysses" if r == 1 else "ring" if u == 1 else f"usp {u}x{r}"
        for groups in dict.fromkeys((tuple(inner), tuple(strided))):
            built = tuple(MemberGroup(g, tuple(tokens[m] for m in g), (heads // u,) * u) for g in groups)
            label = name if groups == tuple(inner) else f"{name} strided"
            if r == 1:
                layouts.append(ContextLayout(built, "a2a", 0, label))
                continue
            blocks = block_sizes([sum(g.tokens) for g in built])
            layouts += [ContextLayout(built, "ring", block, label) for block in blocks]
    return layouts


def block_sizes(shares: Sequence[int]) -> list[int]:
    """Block sizes (tokens) to try: equal parts of the largest and of the smallest share."""
    largest, smallest = max(shares), min(share for share in shares if share)
    trials = {-(-largest // n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 24)} | {
        -(-smallest // n) for n in (1, 2, 3, 4, 6, 8)
    }
    return sorted(trials, reverse=True)


def even_block(shares: Sequence[int], limit: int) -> int:
    """The block size, at most ``limit`` tokens, that makes rounds most even; larger ones among nearly equal ones."""
    trials = [block for block in block_sizes(shares) if block <= limit] or [limit]
    sizes = np.array(shares, dtype=np.float64)
    return min(trials, key=lambda block: round(unevenness(sizes, block), 2))


def unevenness(shares: NDArray[np.float64], block: int) -> float:
    """Slowdown of attention (1 or more) because blocks differ in size: blocks x largest block / sequence. A group of
    ``shares[k]`` tokens has ceil(shares[k] / block) equal blocks, and all groups compute one block per round. Blocks as
    large as the largest share give its pace, P max(s) / S; small blocks bring it near 1 but cost messages. Groups
    without tokens have no blocks."""
    shares = shares[shares > 0]
    counts = np.ceil(shares / block)
    return float(counts.sum() * (shares / counts).max() / shares.sum())
