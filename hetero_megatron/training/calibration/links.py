"""Latency, bandwidth and host overhead of the links of a job, both ways; one pair of ranks at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from hetero_megatron.cluster import Cluster
from hetero_megatron.comm import Comm
from hetero_megatron.comm.check import SMALL, one_way

FIRST = 256 << 10  # bytes of the message that says how large the next ones should be
LARGE_SECONDS = 0.06  # how long the large message is to take
MAX_LARGE = 8 << 20
PINGS, REPEATS = 20, 9


@dataclass(frozen=True)
class LinkRow:
    """``alpha`` seconds per message, ``beta`` seconds per byte, ``message`` host seconds, from group to group; the
    first two for an all-to-all of a pair, and for an exchange of single messages as TP groups have it; ``spread`` of
    the large message's time."""

    source: str
    target: str
    same_node: bool
    alpha: float
    beta: float
    message: float
    all_to_all: tuple[float, float]
    exchange: tuple[float, float]
    spread: float


def pairs(cluster: Cluster) -> list[tuple[int, int]]:
    """One ordered pair of ranks for each kind of link: inside a node of each group, between two nodes of a group, and
    between each two groups, both ways."""
    chosen: dict[tuple[str, str, bool], tuple[int, int]] = {}
    heads: dict[str, dict[str, list[int]]] = {}  # ranks by group and node
    for rank in cluster.ranks:
        heads.setdefault(rank.group, {}).setdefault(rank.node, []).append(rank.rank)
    for group, nodes in heads.items():
        first = next(iter(nodes.values()))
        if len(first) > 1:
            chosen[group, group, True] = (first[0], first[1])
        others = list(nodes.values())[1:]
        if others:
            chosen[group, group, False] = (first[0], others[0][0])
        for other, theirs in heads.items():
            if other != group:
                chosen[group, other, False] = (first[0], next(iter(theirs.values()))[0])
    return list(chosen.values())


def measure_links(comm: Comm, cluster: Cluster) -> list[LinkRow]:
    """Every rank calls it; the rows are known to the sending rank of each pair (others get none of them)."""
    wanted = pairs(cluster)
    comm.create_groups([*wanted, tuple(range(cluster.world_size))])
    everyone = comm.group(range(cluster.world_size))
    rows = []
    for number, (a, b) in enumerate(wanted):
        everyone.gather_vectors(torch.zeros(1))
        if comm.rank in (a, b):
            row = _measure(comm, cluster, a, b, 1000 * number)
            rows += [row] if comm.rank == a else []
    return rows


def _measure(comm: Comm, cluster: Cluster, a: int, b: int, tag: int) -> LinkRow:
    comm.connect([a + b - comm.rank])
    ping = [one_way(comm, a, b, SMALL, tag) for _ in range(PINGS)]
    first = median(one_way(comm, a, b, FIRST, tag) for _ in range(3))
    rate = FIRST / max(first - median(ping) / 2, 1e-6)
    large = int(min(MAX_LARGE, max(2 * FIRST, rate * LARGE_SECONDS)))
    large = int(_agree(comm, a, b, float(large), tag))
    small = [one_way(comm, a, b, FIRST, tag) for _ in range(REPEATS)]
    big = [one_way(comm, a, b, large, tag) for _ in range(REPEATS)]
    beta = max(0.0, median(big) - median(small)) / (large - FIRST)
    alpha = max(0.0, median(small) - median(ping) / 2 - beta * FIRST)
    message = median(_host_seconds(comm, a, b, tag) for _ in range(PINGS))
    group = comm.group(sorted((a, b)))
    swap = _line(comm, group.all_to_all, lambda size: _halves(comm, a, b, size), FIRST, large)
    # TP groups exchange less at a time, so its time at nothing matters: it is measured, not extrapolated.
    exchange = _line(comm, group.exchange, lambda size: _buffers(comm, size), SMALL, large)
    source, target = cluster.ranks[a], cluster.ranks[b]
    return LinkRow(
        source.group, target.group, source.node == target.node, max(alpha, median(ping) / 2), beta, message,
        swap, exchange, (max(big) - min(big)) / median(big),
    )  # fmt: skip


def _agree(comm: Comm, a: int, b: int, value: float, tag: int) -> float:
    """a's value, on both."""
    box = torch.tensor([value], dtype=torch.float32, device=comm.device)
    if comm.rank == a:
        comm.isend(box, b, tag + 2).wait()
    else:
        comm.irecv(box, a, tag + 2).wait()
    return float(box[0])


def _host_seconds(comm: Comm, a: int, b: int, tag: int) -> float:
    """Seconds that posting one message takes the rank itself."""
    note = _buffer(comm, SMALL)
    start = time.perf_counter()
    handle = comm.isend(note, b, tag + 3) if comm.rank == a else comm.irecv(note, a, tag + 3)
    posted = time.perf_counter() - start
    handle.wait()
    return posted


def _buffer(comm: Comm, size: int) -> torch.Tensor:
    """Bytes where the job's messages come from: on the device, if there is one."""
    return torch.zeros(size, dtype=torch.uint8, device=comm.device)


def _halves(comm: Comm, a: int, b: int, size: int) -> tuple[torch.Tensor, list[int], list[int]]:
    """A buffer and counts with which a and b send each other ``size`` bytes."""
    counts = [0 if r == comm.rank else size for r in sorted((a, b))]
    return _buffer(comm, size), counts, counts


def _buffers(comm: Comm, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What each of two ranks sends to the other, and where it receives."""
    send, receive = _buffer(comm, size), _buffer(comm, size)
    return [send, send], [receive, receive]


def _line(
    comm: Comm, call: Callable[..., Any], buffers: Callable[[int], tuple[Any, ...]], small: int, large: int
) -> tuple[float, float]:
    """(seconds at no bytes, per byte) of ``call`` through the medians at two sizes."""
    low, high = _seconds(comm, call, buffers(small), PINGS), _seconds(comm, call, buffers(large), REPEATS)
    beta = max(0.0, high - low) / (large - small)
    return max(0.0, low - beta * small), beta


def _seconds(comm: Comm, call: Callable[..., Any], buffers: tuple[Any, ...], repeats: int) -> float:
    """Of a call whose buffers are there already: new ones of some MiB take as long as the message itself."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call(*buffers).wait()
        comm.clock.synchronize()
        seconds.append(time.perf_counter() - start)
    return median(seconds[1:])
