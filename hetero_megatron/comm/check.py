"""Connectivity check of a job: correctness and speed of every kind of transfer that training uses.

Every rank calls these functions in the same order; results are shared by :func:`~Group.gather_objects`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from hetero_megatron.comm.comm import Comm
from hetero_megatron.comm.group import Group
from hetero_megatron.comm.work import CommError

PINGS, REPEATS = 20, 5
SMALL = 8  # bytes of a ping
PATTERN = 251  # prime, so that messages of neighbouring ranks differ


@dataclass(frozen=True)
class Fault:
    """An error in transfers from ``source`` to ``target``; ``group``: the ranks of the collective, empty for
    point-to-point."""

    source: int
    target: int
    what: str
    group: tuple[int, ...] = ()

    def __str__(self) -> str:
        group_text = f" in the group of ranks {list(self.group)}" if self.group else ""
        return f"rank {self.source} to rank {self.target}{group_text}: {self.what}"


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of messages from ``source`` to ``target``: ``latency`` in seconds, ``bandwidth`` in bytes/s of the largest
    message, and the relative spread (max - min) / median of its times."""

    source: int
    target: int
    route: str
    latency: float
    bandwidth: float
    spread: float


def rounds(ranks: int) -> list[list[tuple[int, int]]]:
    """All pairs of ranks in rounds in which every rank is in at most one pair (round-robin tournament)."""
    players = [*range(ranks), *([-1] if ranks % 2 else [])]
    out = []
    for _ in range(len(players) - 1):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        out.append([(min(p), max(p)) for p in pairs if -1 not in p])
        players = [players[0], players[-1], *players[1:-1]]
    return out


def check_pairs(comm: Comm, ranks: int, size: int) -> list[Fault]:
    """Every pair of ranks exchanges ``size`` bytes.

    Returns:
        Faults found by this rank. It stops after a failed transfer, since later failures would be a consequence.
    """
    faults: list[Fault] = []
    for number, pairs in enumerate(rounds(ranks)):
        peer = next((a + b - comm.rank for a, b in pairs if comm.rank in (a, b)), None)
        if peer is None:
            continue
        comm.activity = f"checking ranks {min(peer, comm.rank)} and {max(peer, comm.rank)}"
        try:
            comm.connect([peer])
            received = torch.zeros(size, dtype=torch.uint8, device=comm.device)
            receive = comm.irecv(received, peer, number)
            comm.isend(pattern(comm.rank, peer, size, comm.device), peer, number).wait()
            receive.wait()
        except CommError as error:
            return [*faults, Fault(peer, comm.rank, str(error))]
        faults += _compare(received, peer, comm.rank, ())
    return faults


def check_groups(comm: Comm, groups: Sequence[tuple[int, ...]], size: int) -> list[Fault]:
    """Every (already created) group runs the collectives of TP, context and gradient groups.

    Args:
        size: bytes of the largest part; parts are unequal.
    """
    faults: list[Fault] = []
    for ranks in (g for g in groups if comm.rank in g and len(g) > 1):
        group = comm.group(ranks)
        comm.activity = f"checking the group of ranks {list(ranks)}"
        sizes = {r: max(1, size - 1000 * i) if size > 1000 * len(ranks) else size for i, r in enumerate(ranks)}
        sends = [pattern(comm.rank, r, sizes[r], comm.device) for r in ranks]
        incoming = [torch.zeros(sizes[comm.rank], dtype=torch.uint8, device=comm.device) for _ in ranks]
        try:
            group.exchange(sends, incoming).wait()
            flat = group.all_to_all(torch.cat(sends), [sizes[r] for r in ranks], [sizes[comm.rank]] * len(ranks)).wait()
            gathered = group.gather_vectors(torch.tensor([comm.rank], device=comm.device)).flatten().tolist()
        except CommError as error:
            return [*faults, Fault(error.peers[0] if error.peers else ranks[0], comm.rank, str(error), ranks)]
        assert flat is not None
        for i, peer in enumerate(ranks):
            if peer != comm.rank:
                faults += _compare(incoming[i], peer, comm.rank, ranks)
            faults += _compare(flat.split(sizes[comm.rank])[i], peer, comm.rank, ranks)
            if gathered[i] != peer:
                faults.append(Fault(peer, comm.rank, f"a gathered number is {gathered[i]}", ranks))
    return faults


def measure(comm: Comm, everyone: Group, pairs: Sequence[tuple[int, int]], size: int) -> list[LinkSpeed]:
    """Latency and bandwidth of each ordered pair, one pair at a time.

    Returns:
        Rows for the pairs whose first rank this is.
    """
    rows = []
    for number, (a, b) in enumerate(pairs):
        everyone.gather_objects(None)  # the others wait here
        if comm.rank not in (a, b):
            continue
        comm.activity = f"measuring ranks {a} and {b}"
        comm.connect([a + b - comm.rank])
        tag = 10_000 + 2 * number
        ping = median(one_way(comm, a, b, SMALL, tag) for _ in range(PINGS)) / 2
        large = [one_way(comm, a, b, size, tag) - ping for _ in range(REPEATS + 1)][1:]
        if comm.rank == a:
            route = str(comm.islands.route((a, b))) if comm.islands is not None else "gloo"
            seconds = max(median(large) - ping, 1e-9)
            rows.append(LinkSpeed(a, b, route, ping, size / seconds, (max(large) - min(large)) / median(large)))
    return rows


def one_way(comm: Comm, a: int, b: int, size: int, tag: int) -> float:
    """Seconds from sending ``size`` bytes at a until b's acknowledgement is back (for small messages half of it is the
    way back); meaningless on b."""
    message = torch.zeros(size, dtype=torch.uint8, device=comm.device)
    note = torch.zeros(SMALL, dtype=torch.uint8, device=comm.device)
    comm.clock.synchronize()
    start = time.perf_counter()
    if comm.rank == a:
        acknowledgement = comm.irecv(note, b, tag + 1)
        comm.isend(message, b, tag).wait()
        acknowledgement.wait()
    else:
        comm.irecv(message, a, tag).wait()
        comm.isend(note, a, tag + 1).wait()
    comm.clock.synchronize()  # on devices, wait() only orders the stream
    return time.perf_counter() - start


def pattern(source: int, target: int, size: int, device: torch.device) -> torch.Tensor:
    """[size] uint8, unique to the pair and without repetitions."""
    places = torch.arange(size, dtype=torch.int64)
    return ((places * 131 + places // PATTERN + 17 * source + 29 * target) % PATTERN).to(torch.uint8).to(device)


def _compare(received: torch.Tensor, source: int, target: int, group: tuple[int, ...]) -> list[Fault]:
    unequal = (received.cpu() != pattern(source, target, received.numel(), torch.device("cpu"))).nonzero().flatten()
    if not unequal.numel():
        return []
    problem = f"{unequal.numel():,} of {received.numel():,} bytes are wrong, the first is number {int(unequal[0]):,}"
    return [Fault(source, target, problem, group)]
