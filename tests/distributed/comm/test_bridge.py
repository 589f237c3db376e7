"""The bridge between unlike chips: every byte arrives, also on a device that copies only when it is waited for."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero_megatron.comm import Comm
from hetero_megatron.comm.bridge import BUFFERS, Bridge
from tests.support.pool import shared_pool

CHUNK = 512 << 10  # so that messages have many
SIZES = (0, 1, 7, 1000, CHUNK // 4, CHUNK // 4 + 1, BUFFERS * CHUNK // 4, 700_001, 1_300_000)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8)


class LateCopy:
    """A copy that happens only when somebody waits for it: what does not wait gets what was there before."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.target, self.source, self.over = target, source, False

    def synchronize(self) -> None:
        if not self.over:
            self.target.copy_(self.source)
            self.over = True


class LateCopies:
    """A device whose streams keep copies back until they are waited for; its "memory" is the host's."""

    def __init__(self) -> None:
        self.started: list[LateCopy] = []

    def buffer(self, size: int) -> torch.Tensor:
        return torch.full((size,), 255, dtype=torch.uint8)

    def now(self) -> Any:
        return None

    def stream(self) -> list[LateCopy]:
        return []

    def join(self, event: LateCopy) -> None:
        for copy in event.stream:  # type: ignore[attr-defined]
            copy.synchronize()
            if copy is event:
                return

    def copy(self, target: torch.Tensor, source: torch.Tensor, stream: list[LateCopy], after: Any) -> LateCopy:
        event = LateCopy(target, source)
        event.stream = stream  # type: ignore[attr-defined]
        stream.append(event)
        return event


def content(i: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(size) * 31 + i * 17).remainder(251).to(dtype)


def send_all(comm: Comm, seed: int, ranks: int) -> list[str]:
    """Random messages between random ranks, some of which have a device; what came wrong."""
    stripes = 1 + seed % 3
    groups = [
        dist.new_group(list(range(ranks)), timeout=timedelta(seconds=60), backend="gloo") for _ in range(2 * stripes)
    ]
    if comm.rank >= ranks:
        return []
    rng = random.Random(seed)
    device = [rng.random() < 0.6 for _ in range(ranks)]
    copies = [LateCopies() if device[comm.rank] else None for _ in range(2)]
    bridges = [Bridge(groups[i::2], copies[i], 60, CHUNK) for i in range(2)]
    under_way, wrong = [], []
    for i in range(24):
        src, dst = rng.sample(range(ranks), 2)
        which, size, dtype, tag = rng.randrange(2), rng.choice(SIZES), rng.choice(DTYPES), rng.randrange(3)
        expected = content(i, size, dtype)
        if comm.rank == src:
            under_way.append((i, bridges[which].isend(expected.clone(), dst, tag), None, expected))
        elif comm.rank == dst:
            received = torch.full((size,), 99).to(dtype)
            under_way.append((i, bridges[which].irecv(received, src, tag), received, expected))
    random.Random(seed + comm.rank).shuffle(under_way)
    for i, works, received, expected in under_way:
        for work in works:
            work.wait()
            assert work.is_completed()
        if received is not None and not torch.equal(received, expected):
            wrong.append(f"message {i} of {list(expected.shape)} {expected.dtype} on rank {comm.rank}")
    for bridge in bridges:
        bridge.close()
    return wrong


@pytest.mark.parametrize("seed", range(6))
def test_every_byte_arrives(seed: int) -> None:
    assert sum(shared_pool().run(send_all, seed, 2 + seed % 3), []) == []


def wait_for_nobody(comm: Comm) -> list[str]:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2), backend="gloo")
    if comm.rank != 0:
        return []
    bridge, said = Bridge([group], LateCopies(), 2), []
    works = [bridge.irecv(torch.empty(5), 1)[0] for _ in range(3)]
    for work in works:
        try:
            work.wait()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_peer_that_does_not_come_ends_all_that_wait_for_it() -> None:
    said = shared_pool().run(wait_for_nobody)[0]
    assert len(said) == 3 and all(said)
