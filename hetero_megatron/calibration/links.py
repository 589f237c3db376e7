"""Latency, bandwidth and host overhead of the links of a job, both ways; one pair of ranks at a time."""

from __future__ import annotations

import time

import torch

from hetero_megatron.calibration.measure import repeated
from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.subset import link_pairs
from hetero_megatron.comm import Comm
from hetero_megatron.comm.check import SMALL, one_way
from hetero_megatron.predictor.cost.rates import LinkRates

FIRST = 256 << 10  # bytes of the message that says how large the next ones should be
LARGE_SECONDS = 0.06  # how long the large message is to take
MAX_LARGE = 8 << 20
PINGS, REPEATS = 20, 9  # calls with small messages, and with large ones
LinkKind = tuple[str, str, bool]  # from a node group to another, inside a node


def measure_links(comm: Comm, cluster: Cluster) -> list[tuple[LinkKind, LinkRates]]:
    """Every rank calls it, and gets all links."""
    pairs, everyone = link_pairs(cluster), tuple(range(cluster.world_size))
    comm.create_groups([*pairs, everyone])
    world, measured = comm.group(everyone), list[tuple[LinkKind, LinkRates]]()
    for number, (a, b) in enumerate(pairs):
        world.gather_vectors(torch.zeros(1))  # one pair at a time
        if comm.rank in (a, b):
            source, target = cluster.ranks[a], cluster.ranks[b]
            kind = (source.group, target.group, source.node == target.node)
            rates = _measure(comm, a, b, 1000 * number, kind[2])
            measured += [(kind, rates)] if comm.rank == a else []
    return [link for links in world.gather_objects(measured, list[tuple[LinkKind, LinkRates]]) for link in links]


def _measure(comm: Comm, a: int, b: int, tag: int, same_node: bool) -> LinkRates:
    """Medians at two sizes, and the line through them: of messages with their acknowledgement, and of an exchange, as
    which an all-to-all of a pair counts too. Right on ``a``."""
    comm.connect([a + b - comm.rank])
    ends = sorted((a, b))
    group = comm.group(ends)

    def message(size: int, count: int) -> tuple[float, float]:
        return repeated(lambda: [one_way(comm, a, b, size, tag)], count)[0]

    def exchange(size: int, count: int) -> float:
        send, receive = (torch.zeros(size, dtype=torch.uint8, device=comm.device) for _ in range(2))

        def timed() -> list[float]:
            start = time.perf_counter()
            group.exchange([send, send], [receive, receive]).wait()
            comm.clock.synchronize()
            return [time.perf_counter() - start]

        return repeated(timed, count)[0][0]

    back = message(SMALL, PINGS)[0] / 2
    rate = FIRST / max(message(FIRST, 3)[0] - back, 1e-6)
    large_bytes = min(MAX_LARGE, max(2 * FIRST, rate * LARGE_SECONDS))
    sizes = group.gather_vectors(torch.tensor([large_bytes], dtype=torch.float64))  # an int at the limits, else a float
    large = int(sizes[ends.index(a), 0])
    (small, _), (big, spread) = message(FIRST, REPEATS), message(large, REPEATS)
    alpha, beta = _line(FIRST, small - back, large, big - back)
    # TP groups exchange little at a time, so its time at nothing matters: it is measured, not extrapolated.
    collective = _line(SMALL, exchange(SMALL, PINGS), large, exchange(large, REPEATS))
    host_seconds, _ = repeated(lambda: [_host_seconds(comm, a, b, tag + 2)], PINGS)[0]
    return LinkRates(max(alpha, back), beta, host_seconds, collective, same_node, True, collective, spread=spread)


def _line(low: int, seconds: float, high: int, more: float) -> tuple[float, float]:
    """(seconds at no bytes, per byte), at least 0, through two sizes."""
    beta = max(0.0, (more - seconds) / (high - low))
    return max(0.0, seconds - beta * low), beta


def _host_seconds(comm: Comm, a: int, b: int, tag: int) -> float:
    """Seconds that starting one message takes the rank itself."""
    note = torch.zeros(SMALL, dtype=torch.uint8, device=comm.device)
    start = time.perf_counter()
    handle = comm.isend(note, b, tag) if comm.rank == a else comm.irecv(note, a, tag)
    posted = time.perf_counter() - start
    handle.wait()
    return posted
