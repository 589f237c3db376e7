"""Duration of concurrent messages: over chips' own links inside a node, over a node's shared network cards between
nodes, and over a chip's link to its host."""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.cluster import BRIDGE_RATE, BRIDGE_STRIPES, Cluster
from hetero_megatron.cluster.cluster import BRIDGE
from hetero_megatron.errors import UserError
from hetero_megatron.plans.buckets import IN_FLIGHT
from hetero_megatron.predictor.cost.rates import LinkRates, Rates, measured_links
from hetero_megatron.utils.cached_method import cached_method
from hetero_megatron.utils.text import format_rate

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
        message, pair = self._message(group, rates), rates.between_chips(collective)
        return LinkPrice(alpha, rates.alpha, out, into, min(rates.beta, beta), pair, message)

    def _message(self, group: str, link: LinkRates | None = None) -> float:
        """Host seconds of a message of a chip of ``group``: as measured on the link, else the chip's own."""
        if link is not None and link.message_seconds is not None:
            return link.message_seconds
        return self.rates.chips[self.rates.cluster.groups[group].chip].message_seconds

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
            same_node = a.node == b.node
            kind = (a.group, b.group, same_node)
            total[("out", src if same_node else a.node), kind] += size
            total[("in", dst if same_node else b.node), kind] += size
            between[src if same_node else a.node, dst if same_node else b.node, kind] += size
            single[src, dst, kind] += size
        ports: dict[Port, float] = defaultdict(float)
        latency = 0.0
        for (port, kind), size in total.items():
            link = self.link(*kind, collective)
            latency = max(latency, link.alpha)
            exchanges = sharing.get(port[1], 1) if sharing and isinstance(port[1], str) else 1
            ports[port] += size * (link.out if port[0] == "out" else link.into) * exchanges
        longest = max((size * self.link(*kind, collective).link for (_, _, kind), size in between.items()), default=0.0)
        pair = max((size * self.link(*kind, collective).pair for (_, _, kind), size in single.items()), default=0.0)
        return ExchangePrice(dict(ports), latency, max(longest, pair))

    @cached_method
    def fastest(self, group: str, same_node: bool) -> float:
        """Seconds per byte of the fastest link of a group's chips (or nodes)."""
        betas = []
        for node in self.rates.cluster.nodes:
            if (same_node and node.name != group) or (not same_node and node.name == group and node.count == 1):
                continue
            with contextlib.suppress(UserError):  # links without rates are skipped
                betas.append(self.rates.between(group, node.name, same_node).beta)
        return min(betas)

    @cached_method
    def host_seconds(self, ranks: tuple[int, ...]) -> float:
        """Host seconds of a collective on the slowest of its ranks: one message to each other rank."""
        first, second = ranks[:2]
        return (len(ranks) - 1) * max(self.message_seconds(r, second if r == first else first) for r in ranks)

    def tp_exchange(self, ranks: tuple[int, ...], size: float) -> tuple[float, float]:
        """(seconds of one gather or scatter-sum in a TP group with ``size`` bytes of activations in all, seconds of it
        on the host)."""
        if len(ranks) == 1:
            return 0.0, 0.0
        share = size / len(ranks)
        return self.groups_exchange(((a, b, share) for a in ranks for b in ranks), [ranks])

    def groups_exchange(self, flows: Iterable[Flow], groups: Iterable[tuple[int, ...]]) -> tuple[float, float]:
        """(seconds of an exchange in which all of ``groups`` take part at once, seconds of it on the host)."""
        price = self.exchange(flows, collective="exchange")
        host_seconds = messages = 0.0
        for ranks in (ranks for ranks in groups if len(ranks) > 1):
            link = self.rates.link(ranks[0], ranks[-1])
            # Inside a node the measured latency includes starting a message, unless the link has message_seconds.
            message = link.message_seconds or 0.0
            host_seconds = max(host_seconds, (len(ranks) - 1) * message)
            included = message if link.exchange is not None else 0.0  # a measured exchange includes one message
            messages = max(messages, (len(ranks) - 1) * message - included)
        return price.seconds + price.latency + messages, host_seconds

    def barrier_seconds(self, kinds: Iterable[LinkKind], ranks: int) -> float:
        """An all-reduce of a few bytes, so only latency: once around a ring of all ranks, at the pace of the slowest of
        these kinds of link."""
        links = [self.link(*kind) for kind in kinds]
        return (ranks - 1) * max((link.single + link.message for link in links), default=0.0)

    @cached_method
    def least_message(self, group: str) -> float:
        """Host seconds of a message of a chip of ``group``, over the link where that is least."""
        seconds = []
        for node in self.rates.cluster.nodes:
            for same_node in (False, True) if node.name == group else (False,):
                with contextlib.suppress(UserError):  # links without rates are skipped
                    seconds.append(self._message(group, self.rates.between(group, node.name, same_node)))
        return min(seconds, default=self._message(group))

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


Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Elements = TypeVar("Elements", float, NDArray[np.int64])


@dataclass
class RankHost:
    """One rank, whose buckets travel in one hop.

    Attributes:
        delay: seconds of packing and summing so far; last: time (s) of the last send.
        under_way: (arrival, seconds to sum or unpack) of buckets that were sent and not yet completed.
    """

    delay: float = 0.0
    last: float = 0.0
    under_way: deque[tuple[float, float]] = field(default_factory=deque)

    def send(self, ready: float, pack: float) -> float:
        """Time (s) when the next bucket is packed; ``ready``: when its content is complete, without the delay."""
        begin = max(ready + self.delay, self.last)
        if len(self.under_way) == IN_FLIGHT:
            arrived, sum_seconds = self.under_way.popleft()
            begin = max(begin, arrived) + sum_seconds
            self.delay += sum_seconds
        self.delay += pack
        self.last = begin + pack
        return self.last

    def finish(self, at: float) -> float:
        """Time (s) when all buckets are reduced. ``at``: when the rank is done with all else (s)."""
        end = max(at + self.delay, self.last)
        for arrived, sum_seconds in self.under_way:
            end = max(end, arrived) + sum_seconds
        return end


class RankHosts:
    """:class:`RankHost` of all ranks at once, as arrays, for buckets with any number of hops. ``slots``: most buckets
    that a rank may have under way; :data:`IN_FLIGHT` with single hops."""

    def __init__(self, ranks: int, slots: int = IN_FLIGHT) -> None:
        self.slots = slots
        self.delay, self.last = np.zeros(ranks), np.zeros(ranks)
        self.first, self.sent = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        self.newest = np.full(ranks, -1)
        self.arrived, self.after = np.zeros((ranks, slots)), np.zeros((ranks, slots))

    def start(self, at: Ints, bucket: int, ready: Floats, pack: Floats | float, limited: bool = True) -> Floats:
        """Time (s) when a hop of a bucket is packed. The bucket's previous hop ends first; with ``limited`` also the
        oldest buckets, so that fewer than IN_FLIGHT are under way."""
        begin = np.maximum(ready + self.delay[at], self.last[at])
        while True:
            count = self.sent[at] - self.first[at]
            waits = (count > 0) & (self.newest[at] == bucket)
            if limited:
                waits |= count >= IN_FLIGHT
            if not waits.any():
                break
            sum_seconds = self._end_oldest(at[waits], begin, waits)
            self.delay[at[waits]] += sum_seconds
        self.delay[at] += pack
        self.last[at] = begin = begin + pack
        return begin

    def travel(self, at: Ints, bucket: int, end: float, after: Floats | float) -> None:
        slot = self.sent[at] % self.slots
        self.arrived[at, slot], self.after[at, slot] = end, after
        self.sent[at] += 1
        self.newest[at] = bucket

    def finish(self, idle: Floats) -> Floats:
        end = np.maximum(idle + self.delay, self.last)
        while (unfinished := self.sent > self.first).any():
            self._end_oldest(np.flatnonzero(unfinished), end, unfinished)
        return end

    def _end_oldest(self, rows: Ints, now: Floats, where: NDArray[np.bool_]) -> Floats:
        """Advance ``now[where]`` to when the oldest bucket of each of ``rows`` is summed; returns the seconds of
        summing."""
        slot = self.first[rows] % self.slots
        sum_seconds = self.after[rows, slot]
        now[where] = np.maximum(now[where], self.arrived[rows, slot]) + sum_seconds
        self.first[rows] += 1
        return np.asarray(sum_seconds)


class HostRates(NamedTuple):
    """Seconds per byte that is packed, added to a sum and unpacked, and seconds per exchange: of one chip, or [ranks].
    """

    pack: Any
    add: Any
    unpack: Any
    exchange: Any


def exchange_host_seconds(
    rates: HostRates, given: Elements, taken: Elements, owned: Elements, alone: Any, dense: bool, ranks: int,
    item: float, gather: bool,
) -> tuple[Any, Any]:  # fmt: skip
    """(seconds before, after) that the host spends on a bucket's exchange beside its messages: packing what others get;
    summing gradients, or with ``gather`` unpacking parameters. Of one rank, or [ranks].

    Args:
        given, taken: elements sent to other owners and received from other holders, towards the owners; owned: kept.
        alone: whether sums begin with a copy of the own part, as nobody else holds all of it.
        dense: all ranks hold the same: gradients and parameters leave from, and parameters arrive, where they are kept.
    """
    if gather:  # owners give what they took
        packed, unpacked = (taken, given) if not dense else (0 * taken, 0 * given)
        return packed * item * rates.pack + rates.exchange, unpacked * item * rates.unpack + rates.exchange
    first = owned * np.where(alone, rates.pack, rates.add) if isinstance(alone, np.ndarray) else owned * (
        rates.pack if alone else rates.add
    )
    packed = 0 * given if dense else given
    return packed * item * rates.pack + rates.exchange, (taken * rates.add + first) * item + rates.exchange * ranks


def host_copy_waits(
    copies: Sequence[float], forward: float, backward: Sequence[float], ahead: int, head: float
) -> tuple[float, float]:
    """Seconds of (:func:`waits_leaving`, :func:`waits_coming`): how long a stage waits for copies of its activations to
    host memory, and back.

    They run beside the compute, which waits for them in two places: in forward, when more layers than may be under way
    have not arrived, and in backward, when a layer has not come back. A chip has one way out and one in, each as fast
    as its link to the host.
    """
    return waits_leaving(copies, forward, ahead), waits_coming(copies, backward, ahead, head)


def waits_leaving(copies: Sequence[float], forward: float, ahead: int) -> float:
    """Seconds for which forward waits; a layer computes for ``forward`` and is copied for ``copies`` when it has."""
    now = free = waited = 0.0
    under_way: deque[float] = deque()
    for seconds in copies:
        now += forward
        if seconds:
            free = max(now, free) + seconds
            under_way.append(free)
            while len(under_way) > ahead:
                wait = max(under_way.popleft() - now, 0.0)
                now, waited = now + wait, waited + wait
    return waited


def waits_coming(copies: Sequence[float], backward: Sequence[float], ahead: int, head: float) -> float:
    """Seconds for which backward waits; it begins with ``head``, and the last layers come first."""
    now = free = waited = 0.0
    count, arrived = len(copies), dict[int, float]()

    def begin(layers: Sequence[int]) -> None:
        nonlocal free
        for i in layers:
            if i not in arrived and copies[i]:
                arrived[i] = free = max(now, free) + copies[i]

    begin(range(count - 1, max(count - 1 - ahead, -1), -1))
    now = head
    for i in reversed(range(count)):
        begin([i])
        wait = max(arrived.get(i, 0.0) - now, 0.0)
        now, waited = now + wait, waited + wait
        begin(range(i - 1, max(i - 1 - ahead, -1), -1))
        now += backward[i]
    return waited


def capped_bridges(cluster: Cluster) -> list[str]:
    """Links that are faster than what the bridge is taken to reach over them, as nobody has measured it."""
    measured, lines = measured_links(cluster), list[str]()
    for a, b in itertools.combinations_with_replacement(cluster.groups.values(), 2):
        link = cluster.link_between(a.name, b.name)
        if link is None or link.emulated is not None or (a.name, b.name, False) in measured:
            continue
        if cluster.transport(link, a, b) == BRIDGE and link.bandwidth > BRIDGE_RATE:
            lines.append(
                f"the bridge between {a.name} and {b.name} is taken to reach {format_rate(BRIDGE_RATE)} per pair "
                f"of ranks ({BRIDGE_STRIPES} connections), not the link's {format_rate(link.bandwidth)}: calibrate "
                "measures it"
            )
    return lines
