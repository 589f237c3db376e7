"""Ways to put members into context groups: clusters of the topology, and the equal layouts that are the baselines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hetero_megatron.planner.context_problem import ContextGroup, ContextLayout, ContextProblem

Grouping = tuple[tuple[int, ...], ...]


def nodes_of(problem: ContextProblem, members: Sequence[int] | None = None) -> list[tuple[int, ...]]:
    """Members by node, nodes in order of first appearance."""
    found: dict[int, list[int]] = {}
    for index in range(len(problem.members)) if members is None else members:
        found.setdefault(problem.members[index].node, []).append(index)
    return [tuple(group) for group in found.values()]


def chunks(items: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(items[i : i + size]) for i in range(0, len(items), size)]


def by_node(problem: ContextProblem, size_of: Callable[[int], int]) -> Grouping:
    """Every node cut into groups of ``size_of(kind)`` members."""
    result: list[tuple[int, ...]] = []
    for node in nodes_of(problem):
        result += chunks(node, max(1, size_of(problem.members[node[0]].kind)))
    return tuple(result)


def across_nodes(problem: ContextProblem, nodes: int, mixed: bool) -> Grouping:
    """Groups of ``nodes`` consecutive nodes, of one kind each unless ``mixed``."""
    result: list[tuple[int, ...]] = []
    kinds: dict[int, list[tuple[int, ...]]] = {}
    for node in nodes_of(problem):
        kinds.setdefault(0 if mixed else problem.members[node[0]].kind, []).append(node)
    for listed in kinds.values():
        for start in range(0, len(listed), nodes):
            result.append(tuple(m for node in listed[start : start + nodes] for m in node))
    return tuple(result)


def striped(problem: ContextProblem, count: int) -> Grouping:
    """``count`` groups of like composition: the members of each kind are cut into ``count`` consecutive parts."""
    kinds: dict[int, list[int]] = {}
    for index, member in enumerate(problem.members):
        kinds.setdefault(member.kind, []).append(index)
    groups: list[list[int]] = [[] for _ in range(count)]
    for listed in kinds.values():
        for k in range(count):
            groups[k] += listed[len(listed) * k // count : len(listed) * (k + 1) // count]
    return tuple(tuple(group) for group in groups if group)


def clusters(problem: ContextProblem) -> list[Grouping]:
    """Groupings by topology, without repetitions: inside nodes, over several nodes, strided, and striped over kinds."""
    nodes = nodes_of(problem)
    widest, world = max(map(len, nodes)), len(problem.members)
    found: list[Grouping] = [by_node(problem, lambda kind, u=size: u) for size in _sizes(widest)]  # type: ignore[misc]
    count = 2
    while count < 2 * len(nodes):
        found += [across_nodes(problem, count, False), across_nodes(problem, count, True)]
        count *= 2
    found.append((tuple(range(world)),))
    # Strided: the ring runs inside nodes, the all-to-all between them (LoongTrain's context-first placement).
    found += [tuple(tuple(range(k, world, r)) for k in range(r)) for r in _sizes(min(world // 2, 256))]
    if len({member.kind for member in problem.members}) > 1:
        found += [striped(problem, k) for k in _sizes(min(world // 2, 256))]
    return list(dict.fromkeys(found))


def _sizes(limit: int) -> list[int]:
    """1 to 4, then powers of two and three times powers of two, and the limit itself."""
    small = range(1, min(limit, 4) + 1)
    return sorted({*small, *(n for k in range(2, 12) for n in (2**k, 3 * 2 ** (k - 1)) if n <= limit), limit} - {0})


def partitions(items: Sequence[int]) -> Iterator[Grouping]:
    """All set partitions, each group in listed order (Bell numbers: 15 for 4 items, 203 for 6)."""
    if not items:
        yield ()
        return
    for rest in partitions(items[1:]):
        yield ((items[0],), *rest)
        for i, group in enumerate(rest):
            yield (*rest[:i], (items[0], *group), *rest[i + 1 :])


def equal_shares(total: int, parts: int) -> list[int]:
    """Integers that differ by at most one, the larger first."""
    return [total // parts + (i < total % parts) for i in range(parts)]


def equal_layouts(problem: ContextProblem) -> list[ContextLayout]:
    """Every Ring, Ulysses and USP layout with equal shards: P = u x r with u a divisor of the query heads.

    ``u`` members form an all-to-all group, of consecutive members (as in USP) or strided; r groups form the ring.
    Key-value heads are copied where u exceeds them. Shards differ by a token where the sequence does not divide.
    """
    world, heads = len(problem.members), problem.model.num_heads
    tokens = equal_shares(problem.seq_length, world)
    found: list[ContextLayout] = []
    for u in range(1, world + 1):
        if world % u or heads % u:
            continue
        r = world // u
        inner = [tuple(range(k * u, k * u + u)) for k in range(r)]
        strided = [tuple(range(k, world, r)) for k in range(r)]
        name = "ulysses" if r == 1 else "ring" if u == 1 else f"usp {u}x{r}"
        for groups in dict.fromkeys((tuple(inner), tuple(strided))):
            built = tuple(ContextGroup(g, tuple(tokens[m] for m in g), (heads // u,) * u) for g in groups)
            label = name if groups == tuple(inner) else f"{name} strided"
            if r == 1:
                found.append(ContextLayout(built, "a2a", 0, label))
                continue
            for transport in problem.options.transports:
                block = max(sum(g.tokens) for g in built) if transport == "ring" else 0
                found.append(ContextLayout(built, transport, block, label))
                if transport == "ring":
                    found += [ContextLayout(built, "ring", b, label) for b in block_sizes(problem, block) if b != block]
    return found


def block_sizes(problem: ContextProblem, largest: int) -> list[int]:
    """Tokens per block that are worth a trial: the largest share, and powers of two below it."""
    limit = max(1, min(largest, problem.seq_length))
    powers = [1 << k for k in range(limit.bit_length()) if limit / 64 <= 1 << k <= limit]
    return sorted({limit, *powers}, reverse=True)
