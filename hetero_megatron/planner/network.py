"""How long messages take that travel together: chips' own links inside a node, a node's shared cards between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from hetero_megatron.layout import Layout
from hetero_megatron.layout.layout import overlapping_pairs
from hetero_megatron.planner.rates import LinkRates, Rates

Flow = tuple[int, int, float]  # source rank, destination rank, bytes
Port = tuple[str, int | str]  # ("out" | "in", rank or node)


@dataclass(frozen=True)
class Exchange:
    """Messages under way together: how long they occupy each port, how long the slowest takes to arrive after that."""

    ports: Mapping[Port, float]
    latency: float

    @property
    def seconds(self) -> float:
        """Until the ports are free again."""
        return max(self.ports.values(), default=0.0)


class Network:
    """Prices of messages between the ranks of a cluster."""

    def __init__(self, rates: Rates) -> None:
        self.rates, self.ranks = rates, rates.cluster.ranks

    def exchange(
        self, flows: Iterable[Flow], sharing: Mapping[str, int] | None = None, collective: bool = False
    ) -> Exchange:
        """Messages that start together; those to itself cost nothing.

        Args:
            sharing: by node, how many such exchanges use its cards at a time.
            collective: one all-to-all, which may have been measured as such.
        """
        ports: dict[Port, float] = defaultdict(float)
        latency = 0.0
        for src, dst, size in flows:
            if src == dst:
                continue
            link = self.rates.link(src, dst)
            alpha, beta = (link.all_to_all if collective else None) or (link.alpha, link.beta)
            latency = max(latency, alpha)
            a, b = self.ranks[src], self.ranks[dst]
            seconds = size * beta
            if a.node == b.node:
                ports["out", src] += seconds
                ports["in", dst] += seconds
            else:
                ports["out", a.node] += seconds * (sharing.get(a.node, 1) if sharing else 1)
                ports["in", b.node] += seconds * (sharing.get(b.node, 1) if sharing else 1)
        return Exchange(dict(ports), latency)

    def tp_exchange(self, ranks: tuple[int, ...], size: float) -> float:
        """Seconds of one gather or scatter-sum in a TP group whose activations have ``size`` bytes in all."""
        if len(ranks) == 1:
            return 0.0
        part = size / len(ranks)
        found = self.exchange(((a, b, part) for a in ranks for b in ranks), collective=True)
        return found.seconds + found.latency

    def message_seconds(self, rank: int, peer: int) -> float:
        """Host seconds that a message to or from ``peer`` costs ``rank``."""
        link: LinkRates = self.rates.link(rank, peer)
        if link.message_seconds is not None:
            return link.message_seconds
        return self.rates.chips[self.ranks[rank].chip].message_seconds


def volumes(holders: Layout, owners: Layout) -> dict[tuple[int, int], int]:
    """Elements that every holder has in common with every owner: what a gradient reduction sends."""
    src_rank, src_lo, src_hi = holders.arrays()
    dst_rank, dst_lo, dst_hi = owners.arrays()
    i, j = overlapping_pairs(src_lo, src_hi, dst_lo, dst_hi)
    sizes = np.prod(np.minimum(src_hi[i], dst_hi[j]) - np.maximum(src_lo[i], dst_lo[j]), axis=1)
    out: dict[tuple[int, int], int] = defaultdict(int)
    for src, dst, size in zip(src_rank[i].tolist(), dst_rank[j].tolist(), sizes.tolist(), strict=True):
        out[src, dst] += size
    return dict(out)
