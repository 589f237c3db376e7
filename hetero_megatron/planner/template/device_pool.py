"""A cluster as groups of equal chips in equal nodes, with the links between them.

The search only sees this, so names do not matter and equal nodes are interchangeable. :mod:`plan_template` goes back to
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hetero_megatron.cluster import Cluster, Link
from hetero_megatron.errors import UserError

LinkOf = Callable[[int, int], Link]  # (rank, rank) -> link


@dataclass(frozen=True)
class DeviceGroup:
    """Equal nodes of ``per_node`` chips each.

    Args:
        ranks: per node, the cluster ranks of its chips.
        home: the cluster's node group (if several were merged: the first of them).
    """

    chip: str
    per_node: int
    ranks: tuple[tuple[int, ...], ...]
    home: str

    @property
    def nodes(self) -> int:
        return len(self.ranks)

    @property
    def chips(self) -> int:
        return self.nodes * self.per_node


@dataclass(frozen=True)
class DevicePool:
    """Args:
        intra: by group, the link between chips of one node; None: one chip per node.
        inter: by pair of groups, the link between two nodes; None on the diagonal for groups of one node."""

    groups: tuple[DeviceGroup, ...]
    intra: tuple[Link | None, ...]
    inter: tuple[tuple[Link | None, ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Chips per group."""
        return tuple(g.chips for g in self.groups)

    @property
    def chips(self) -> int:
        return sum(self.counts)

    def link(self, g: int, h: int, same_node: bool = False) -> Link | None:
        return self.intra[g] if same_node else self.inter[g][h]

    def fastest(self, g: int) -> float:
        """Bytes/s of the fastest link from a node of the group to others: the bandwidth of its network cards."""
        return max((link.bandwidth for link in self.inter[g] if link is not None), default=0.0)

    def part(self, counts: Sequence[int]) -> DevicePool:
        """The first nodes of each group, of so many chips in all; groups keep their numbers."""
        nodes = (replace(g, ranks=g.ranks[: n // g.per_node]) for g, n in zip(self.groups, counts, strict=True))
        return replace(self, groups=tuple(nodes))

    def restricted(self, groups: Sequence[int]) -> DevicePool:
        """The pool of only these groups."""
        return DevicePool(
            tuple(self.groups[g] for g in groups),
            tuple(self.intra[g] for g in groups),
            tuple(tuple(self.inter[g][h] for h in groups) for g in groups),
        )


def make_pool(cluster: Cluster, link_of: LinkOf, dtype: str | None = None) -> DevicePool:
    """The pool of a cluster. Node groups with the same chip type and node size are merged unless their links are given
    separately. Chips that do not support ``dtype`` are left out.

    Args:
        link_of: the link between two ranks.

    Raises:
        UserError: no chip is left.
    """
    first: list[list[tuple[int, ...]]] = []  # per node group of the file: ranks of each node
    start = 0
    for group in cluster.nodes:
        size = group.chips_per_node
        first.append([tuple(range(start + i * size, start + (i + 1) * size)) for i in range(group.count)])
        start += group.count * size
    usable = [
        i for i, g in enumerate(cluster.nodes) if first[i] and (dtype is None or dtype in cluster.chips[g.chip].dtypes)
    ]
    if not usable:
        names = ", ".join(sorted({d for c in cluster.chips.values() for d in c.dtypes}))
        raise UserError(
            f"no chip of the cluster computes in {dtype}", field="--dtype", value=dtype, accepted=names,
            where=cluster.file,
        )  # fmt: skip

    merged: dict[tuple[object, ...], list[int]] = {}
    for i in usable:
        group = cluster.nodes[i]
        plain = not cluster.rates.get("links") and not any(group.name in pair for pair in cluster.pairs)
        alike = (group.chip, group.chips_per_node, group.host_memory)
        key = alike if plain else (*alike, i)
        merged.setdefault(key, []).append(i)
    groups = tuple(
        DeviceGroup(home.chip, home.chips_per_node, tuple(n for i in m for n in first[i]), home.name)
        for m in merged.values()
        for home in [cluster.nodes[m[0]]]
    )
    intra = tuple(link_of(g.ranks[0][0], g.ranks[0][1]) if g.per_node > 1 else None for g in groups)
    inter = tuple(
        tuple(
            (link_of(g.ranks[0][0], g.ranks[-1][0]) if g.nodes > 1 else None)
            if i == j
            else link_of(g.ranks[0][0], h.ranks[0][0])
            for j, h in enumerate(groups)
        )
        for i, g in enumerate(groups)
    )
    return DevicePool(groups, intra, inter)
