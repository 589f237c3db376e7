"""How long messages take that travel together: chips' own links inside a node, a node's shared cards between."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.planner.cost.rates import Rates

Flow = tuple[int, int, float]  # source rank, destination rank, bytes
Port = tuple[str, int | str]  # ("out" | "in", rank or node)
LinkKind = tuple[str, str, bool]  # node group of the sender, of the receiver, whether inside one node


@dataclass(frozen=True)
class ExchangePrice:
    """Messages under way together: how long they occupy each port, how long the slowest takes to arrive after that, and
    how long the most loaded single link needs."""

    ports: Mapping[Port, float]
    latency: float
    link: float = 0.0

    @property
    def seconds(self) -> float:
        """Until everything was sent."""
        return max(self.link, *self.ports.values(), 0.0)


@dataclass(frozen=True)
class LinkTraffic:
    """Messages that start together: all that their price depends on but rates.

    Attributes:
        bytes_by: added up by port and kind of link.
        longest: the most between one sender and one receiver (chips inside a node, else nodes), by kind of link.
        pairs: the most from one chip to another.
    """

    bytes_by: Mapping[tuple[Port, LinkKind], float]
    longest: Mapping[LinkKind, float]
    pairs: Mapping[LinkKind, float]


@dataclass(frozen=True)
class LinkPrice:
    """What messages over a kind of link cost: of a collective, where it was asked for one that was measured.

    Attributes:
        alpha: seconds per message; single: the same outside of collectives.
        out, into: seconds per byte by which a message occupies the sender's and the receiver's port, which pass
            everything at the rate of their fastest link.
        link: seconds per byte of what one end (a chip inside a node, else a node) has for one other.
        pair: seconds per byte from one chip to another.
        message: host seconds that a message costs the sender.
    """

    alpha: float
    single: float
    out: float
    into: float
    link: float
    pair: float
    message: float


class LinkModel:
    """Prices of messages between the ranks of a cluster: the one place where rates become seconds on links."""

    def __init__(self, rates: Rates) -> None:
        self.rates, self.ranks = rates, rates.cluster.ranks
        self._fastest: dict[tuple[str, bool], float] = {}
        self._links: dict[tuple[str, str, bool, str | None], LinkPrice] = {}
        self._chips = {group.name: group.chip for group in rates.cluster.nodes}

    def link(self, group: str, other: str, same_node: bool, collective: str | None = None) -> LinkPrice:
        """Of messages from a node of ``group`` to one of ``other``, or inside one node."""
        key = (group, other, same_node, collective)
        if key not in self._links:
            rates = self.rates.between(group, other, same_node)
            alpha, beta = rates.collective(collective)
            out, into = (min(beta, self.fastest(name, same_node)) for name in (group, other))
            message = rates.message_seconds
            if message is None:
                message = self.rates.chips[self._chips[group]].message_seconds
            pair = rates.between_chips(collective)
            self._links[key] = LinkPrice(alpha, rates.alpha, out, into, min(rates.beta, beta), pair, message)
        return self._links[key]

    def traffic(self, flows: Iterable[Flow]) -> LinkTraffic:
        """Those to itself cost nothing."""
        total: dict[tuple[Port, LinkKind], float] = defaultdict(float)
        between: dict[tuple[int | str, int | str, LinkKind], float] = defaultdict(float)
        single: dict[tuple[int, int, LinkKind], float] = defaultdict(float)
        for src, dst, size in flows:
            if src == dst:
                continue
            a, b = self.ranks[src], self.ranks[dst]
            same = a.node == b.node
            kind = (a.group, b.group, same)
            total[("out", src if same else a.node), kind] += size
            total[("in", dst if same else b.node), kind] += size
            between[src if same else a.node, dst if same else b.node, kind] += size
            single[src, dst, kind] += size
        return LinkTraffic(dict(total), _most(between), _most(single))

    def price(
        self,
        traffic: LinkTraffic,
        item: float = 1.0,
        sharing: Mapping[str, int] | None = None,
        collective: str | None = None,
    ) -> ExchangePrice:
        """What messages cost: a port passes everything at the rate of its fastest link, and what one sender has for one
        receiver takes at least as long as their own link needs, and as two chips take for it in that collective.

        Args:
            item: bytes per unit in which the traffic was counted.
            sharing: by node, how many such exchanges use its cards at a time.
            collective: what they are together, which may have been measured as such: see ``LinkRates``.
        """
        ports: dict[Port, float] = defaultdict(float)
        latency = slowest = 0.0
        for (port, kind), size in traffic.bytes_by.items():
            link = self.link(*kind, collective)
            latency = max(latency, link.alpha)
            others = sharing.get(port[1], 1) if sharing and isinstance(port[1], str) else 1
            ports[port] += size * item * (link.out if port[0] == "out" else link.into) * others
        for kind, size in traffic.longest.items():
            slowest = max(slowest, size * item * self.link(*kind, collective).link)
        for kind, size in traffic.pairs.items():
            slowest = max(slowest, size * item * self.link(*kind, collective).pair)
        return ExchangePrice(dict(ports), latency, slowest)

    def fastest(self, group: str, same_node: bool) -> float:
        """Seconds per byte of the fastest link that chips (or nodes) of a group have."""
        key = (group, same_node)
        if key not in self._fastest:
            known = []
            for node in self.rates.cluster.nodes:
                if (same_node and node.name != group) or (not same_node and node.name == group and node.count == 1):
                    continue
                with contextlib.suppress(UserError):  # a link that nothing is known about is no candidate
                    known.append(self.rates.between(group, node.name, same_node).beta)
            self._fastest[key] = min(known)
        return self._fastest[key]

    def exchange(
        self, flows: Iterable[Flow], sharing: Mapping[str, int] | None = None, collective: str | None = None
    ) -> ExchangePrice:
        """Messages that start together; see :meth:`price`."""
        return self.price(self.traffic(flows), 1.0, sharing, collective)

    def posting(self, ranks: tuple[int, ...]) -> float:
        """Host seconds that a collective of these ranks costs the slowest of them: a message to each other member."""
        first, second = ranks[:2]
        return (len(ranks) - 1) * max(self.message_seconds(r, second if r == first else first) for r in ranks)

    def tp_exchange(self, ranks: tuple[int, ...], size: float) -> tuple[float, float]:
        """Seconds of one gather or scatter-sum in a TP group whose activations have ``size`` bytes in all, and how many
        of them the host needs to post it."""
        if len(ranks) == 1:
            return 0.0, 0.0
        part = size / len(ranks)
        found = self.exchange(((a, b, part) for a in ranks for b in ranks), collective="exchange")
        link = self.rates.link(ranks[0], ranks[-1])
        # Inside a node posting is part of what was measured as latency, unless the link says what a message costs.
        message = link.message_seconds or 0.0
        posting = (len(ranks) - 1) * message
        own = message if link.exchange is not None else 0.0  # of one message, which was measured with it
        return found.seconds + found.latency + posting - own, posting

    def message_seconds(self, rank: int, peer: int) -> float:
        """Host seconds that a message to or from ``peer`` costs ``rank``."""
        a, b = self.ranks[rank], self.ranks[peer]
        return self.link(a.group, b.group, a.node == b.node).message


def _most(between: Mapping[Any, float]) -> dict[LinkKind, float]:
    """The largest of each kind of link, which is the last part of the keys."""
    found: dict[LinkKind, float] = {}
    for (_, _, kind), size in between.items():
        found[kind] = max(found.get(kind, 0.0), size)
    return found
