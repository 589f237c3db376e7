"""Memory that is given up while a stream of the emulated device has not come to what uses it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from hetero_megatron.comm import Comm
from hetero_megatron.parallel.device_graphs import GraphPool
from tests.support.pool import Pool

EMULATED_RANKS = 2
SIZE = 1000
pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.timeout(1800)]  # building takes minutes


def numbers(comm: Comm) -> torch.Tensor:
    return torch.arange(SIZE, dtype=torch.float64, device=comm.device)


def while_queued(comm: Comm, key: str, queue: Callable[[Callable[[], None]], None]) -> None:
    """Have rank 0 ``queue`` something behind a message that comes when it calls what it is given."""
    store, group = dist.distributed_c10d._get_default_store(), dist.new_group(backend="cpu:gloo,emu:emuccl")
    if comm.rank != 0:
        store.wait([key])
        dist.send(numbers(comm), 0, group)
        return
    work = dist.irecv(torch.empty_like(numbers(comm)), 1, group)
    assert work is not None
    work.wait()
    queue(lambda: store.set(key, ""))


def storage_without_bytes(comm: Comm) -> None:
    """What was queued reads the old values; what is there again is undefined, and is written after it."""
    x, y, more = numbers(comm), torch.empty_like(numbers(comm)), []

    def queue(go: Callable[[], None]) -> None:
        y.copy_(x)
        y.add_(x)
        x.untyped_storage().resize_(0)
        more.append(torch.full_like(y, 7.0))  # where x was, or not
        x.untyped_storage().resize_(8 * SIZE)
        x.fill_(3.0)
        go()

    while_queued(comm, "storage", queue)
    if comm.rank == 0:
        assert y.tolist() == [2.0 * i for i in range(SIZE)]
        assert x.tolist() == [3.0] * SIZE and more[0].tolist() == [7.0] * SIZE


def input_of_a_graph(comm: Comm) -> None:
    assert comm.accelerator is not None
    given, more = [numbers(comm)], []
    graph, y = GraphPool(comm.accelerator).capture(lambda: (given[0] * 2).add_(1))

    def queue(go: Callable[[], None]) -> None:
        graph.replay()
        given.clear()
        more.append(torch.full_like(y, 7.0))
        go()

    while_queued(comm, "graph", queue)
    if comm.rank == 0:
        assert y.tolist() == [2.0 * i + 1 for i in range(SIZE)] and more[0].tolist() == [7.0] * SIZE


def graphs_captured_while_another_runs(comm: Comm) -> None:
    """They have the same pool: what one captures is where the other one works."""
    assert comm.accelerator is not None
    x, pool = torch.zeros(1 << 20, device=comm.device), GraphPool(comm.accelerator)

    def many() -> torch.Tensor:
        y = x
        for _ in range(60):
            y = y + 1
        return y

    graph, y = pool.capture(many)

    def queue(go: Callable[[], None]) -> None:
        graph.replay()
        go()
        for _ in range(30):
            pool.capture(lambda: torch.empty_like(x))
            time.sleep(0.001)

    while_queued(comm, "pool", queue)
    if comm.rank == 0:
        assert y.unique().tolist() == [60.0]


def sizes_change(comm: Comm) -> None:
    """What lies in a storage stays as far as it reaches."""
    emu, x = torch.emu, numbers(comm)  # type: ignore[attr-defined]
    held = emu.memory_allocated()
    x.untyped_storage().resize_(4 * SIZE)
    assert x[: SIZE // 2].tolist() == list(range(SIZE // 2)) and emu.memory_allocated() == held - 4096
    x.untyped_storage().resize_(8 * SIZE)
    assert x[: SIZE // 2].tolist() == list(range(SIZE // 2)) and x[SIZE // 2 :].isnan().all()
    x.untyped_storage().resize_(0)
    assert emu.memory_allocated() == held - 8192


@pytest.mark.parametrize(
    "job", [storage_without_bytes, input_of_a_graph, graphs_captured_while_another_runs, sizes_change]
)
def test_memory_lasts_until_what_is_queued_has_run(job: Callable[[Comm], None], pool: Pool) -> None:
    pool.run(job)
