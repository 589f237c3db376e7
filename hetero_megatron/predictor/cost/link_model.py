"""Duration of concurrent messages: over chips' own links inside a node, over a node's shared network cards between
nodes."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hetero_megatron.errors import UserError
from hetero_megatron.predictor.cost.rates import Rates
from hetero_megatron.utils.cached_method import cached_method

Flow = tuple[int, int, float]  # source rank, destination rank, bytes
Port = tuple[str, int | str]  # ("out" | "in", rank or node)
LinkKind = tuple[str, str, bool]  # (sender's node group, receiver's node group, inside one node)


@dataclass(frozen=True)
class ExchangePrice:
    """Price of concurrent messages.

    Attributes:
        ports: seconds that each port is occupied.
        latency: seconds until the slowest message arrives after everything was sent.
        link: seconds of the most loaded single link.
    """

    ports: Mapping[Port, float]
    latency: float
    link: float = 0.0

    @property
    def seconds(self) -> float:
        """Until everything was sent."""
        return max(self.link, *self.ports.values(), 0.0)


@dataclass(frozen=True)
class LinkPrice:
    """Price of messages over a kind of link, in a collective where that was measured.

    Attributes:
        alpha: seconds per message; single: the same outside of collectives.
        out, into: seconds per byte that a message occupies the sender's and the receiver's port; ports run at the rate
            of their fastest link.
        link: seconds per byte between two ends (chips inside a node, else nodes).
        pair: seconds per byte from one chip to another.
        message: host seconds per message of the sender.
    """

    alpha: float
    single: float
    out: float
    into: float
    link: float
    pair: float
    message: float


class LinkModel:
    """Prices of messages between the ranks of a cluster; the only place that turns link rates into seconds."""

    def __init__(self, rates: Rates) -> None:
        self.rates, self.ranks = rates, rates.cluster.ranks

    @cached_method
    def link(self, group: str, other: str, same_node: bool, collective: str | None = None) -> LinkPrice:
        """Price of messages from a node of ``group`` to one of ``other``, or inside one node."""
        rates = self.rates.between(group, other, same_node)
        alpha, beta = rates.collective(collective)
        out, into = (min(beta, self.fastest(name, same_node)) for name in (group, other))
        message = rates.message_seconds
        if message is None:
            message = self.rates.chips[self.rates.cluster.groups[group].chip].message_seconds
        pair = rates.between_chips(collective)
        return LinkPrice(alpha, rates.alpha, out, into, min(rates.beta, beta), pair, message)

    def exchange(
        self, flows: Iterable[Flow], sharing: Mapping[str, int] | None = None, collective: str | None = None
    ) -> ExchangePrice:
        """Price of messages that start together; those to the sender itself are free. A port passes everything at the
        rate of its fastest link; the bytes between one sender and one receiver (chips inside a node, else nodes) take
        at least as long as on their own link, and those between two chips as long as these take in that collective.

        Args:
            sharing: by node, how many such exchanges share its network cards.
            collective: its name, if measured as one (see ``LinkRates``).
        """
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
        ports: dict[Port, float] = defaultdict(float)
        latency = 0.0
        for (port, kind), size in total.items():
            link = self.link(*kind, collective)
            latency = max(latency, link.alpha)
            others = sharing.get(port[1], 1) if sharing and isinstance(port[1], str) else 1
            ports[port] += size * (link.out if port[0] == "out" else link.into) * others
        longest = max((size * self.link(*kind, collective).link for (_, _, kind), size in between.items()), default=0.0)
        pair = max((size * self.link(*kind, collective).pair for (_, _, kind), size in single.items()), default=0.0)
        return ExchangePrice(dict(ports), latency, max(longest, pair))

    @cached_method
    def fastest(self, group: str, same_node: bool) -> float:
        """Seconds per byte of the fastest link of a group's chips (or nodes)."""
        known = []
        for node in self.rates.cluster.nodes:
            if (same_node and node.name != group) or (not same_node and node.name == group and node.count == 1):
                continue
            with contextlib.suppress(UserError):  # links without rates are skipped
                known.append(self.rates.between(group, node.name, same_node).beta)
        return min(known)

    @cached_method
    def posting(self, ranks: tuple[int, ...]) -> float:
        """Host seconds of a collective on the slowest of its ranks: one message to each other rank."""
        first, second = ranks[:2]
        return (len(ranks) - 1) * max(self.message_seconds(r, second if r == first else first) for r in ranks)

    def tp_exchange(self, ranks: tuple[int, ...], size: float) -> tuple[float, float]:
        """(seconds of one gather or scatter-sum in a TP group with ``size`` bytes of activations in all, seconds of it
        on the host)."""
        if len(ranks) == 1:
            return 0.0, 0.0
        part = size / len(ranks)
        return self.groups_exchange(((a, b, part) for a in ranks for b in ranks), [ranks])

    def groups_exchange(self, flows: Iterable[Flow], groups: Iterable[tuple[int, ...]]) -> tuple[float, float]:
        """(seconds of an exchange in which all of ``groups`` take part at once, seconds of it on the host)."""
        found = self.exchange(flows, collective="exchange")
        posting = more = 0.0
        for ranks in (ranks for ranks in groups if len(ranks) > 1):
            link = self.rates.link(ranks[0], ranks[-1])
            # Inside a node the measured latency includes posting, unless the link has message_seconds.
            message = link.message_seconds or 0.0
            posting = max(posting, (len(ranks) - 1) * message)
            own = message if link.exchange is not None else 0.0  # a measured exchange includes one message
            more = max(more, (len(ranks) - 1) * message - own)
        return found.seconds + found.latency + more, posting

    def busiest_host(self, messages: Iterable[tuple[int, int]]) -> float:
        """Host seconds of the rank with the most messages; of each message, (rank, peer)."""
        seconds: dict[int, float] = defaultdict(float)
        for rank, peer in messages:
            if rank != peer:
                seconds[rank] += self.message_seconds(rank, peer)
        return max(seconds.values(), default=0.0)

    def message_seconds(self, rank: int, peer: int) -> float:
        """Host seconds that a message to or from ``peer`` costs ``rank``."""
        a, b = self.ranks[rank], self.ranks[peer]
        return self.link(a.group, b.group, a.node == b.node).message
