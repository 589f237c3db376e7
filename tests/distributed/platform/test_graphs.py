"""Capture and replay of device graphs on the emulated device: what a graph holds, and what none can."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hetero_megatron.comm import Comm
from hetero_megatron.comm.captured import CapturedTransfers
from hetero_megatron.parallel.device_graphs import GraphPool
from tests.support.pool import Pool

EMULATED_RANKS = 2
pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.timeout(1800)]  # building takes minutes


def numbers(comm: Comm, *values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=comm.device)


def graph_pool(comm: Comm) -> GraphPool:
    assert comm.accelerator is not None
    return GraphPool(comm.accelerator)


def replays(comm: Comm) -> None:
    """A graph computes from what its inputs hold when it runs, always in the same memory, and only when it runs."""
    x, total, emu = numbers(comm, 1, 2), numbers(comm, 10, 20), torch.emu  # type: ignore[attr-defined]

    def run() -> torch.Tensor:
        y = (x * 2 + 1).relu()
        total.add_(y)
        return y

    before, launched = emu.memory_allocated(), emu.launches()
    graph, y = graph_pool(comm).capture(run)
    assert y.isnan().all(), "nothing has run"
    assert total.tolist() == [10, 20]
    graph.replay()
    held, address = emu.memory_allocated(), y.data_ptr()
    assert held > before, "temporaries keep their memory, too"
    assert y.tolist() == [3, 5] and total.tolist() == [13, 25]
    x.copy_(numbers(comm, 5, -5))
    graph.replay()
    assert y.tolist() == [11, 0] and total.tolist() == [24, 25]
    assert (emu.memory_allocated(), y.data_ptr()) == (held, address)
    assert emu.launches()["graph"] - launched.get("graph", 0) == 2
    assert emu.launches().get("aten::relu") == launched.get("aten::relu"), "the host launched graphs only"
    del graph, y
    assert emu.memory_allocated() == before


def runs_while_the_host_goes_on(comm: Comm) -> None:
    """On a busy stream, behind what is queued there."""
    x = numbers(comm, *range(1000))
    graph, y = graph_pool(comm).capture(lambda: x.cumsum(0))
    for _ in range(20):
        x.add_(1)
        graph.replay()
    assert y[-1].item() == 999 * 500 + 20 * 1000


def backward_in_a_graph(comm: Comm) -> None:
    weight = numbers(comm, 3.0).requires_grad_()
    x, dy = numbers(comm, 2.0).requires_grad_(), numbers(comm, 1.0)
    graphs = graph_pool(comm)
    with torch.enable_grad():
        forward, y = graphs.capture(lambda: (x * weight).square())
    backward, grads = graphs.capture(lambda: torch.autograd.grad(y, (x, weight), dy, retain_graph=True))
    for value in (2.0, 5.0):
        x.data.fill_(value)
        forward.replay(), backward.replay()
        assert y.item() == (3 * value) ** 2
        assert [g.item() for g in grads] == [2 * 9 * value, 2 * 3 * value**2]


def collectives_in_a_graph(comm: Comm) -> None:
    """They start when the graph runs, and hold up the device, not the host, until the other rank's does."""
    comm.create_groups([(0, 1)])
    group, pool, x = comm.group((0, 1)), graph_pool(comm), numbers(comm, comm.rank, 10)
    transfers, sent = CapturedTransfers(comm), dict(comm.sent_bytes)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        doubled, whole, part = x * 2, x.new_empty(4), x.new_empty(2)
        group.all_gather(doubled, whole).wait()
        group.exchange([whole[:2], whole[:2]], [part, part]).wait()
        return whole + 1, part

    with transfers.recorded():
        graph, (whole, part) = pool.capture(run)
    assert comm.sent_bytes[1 - comm.rank] == sent.get(1 - comm.rank, 0), "nothing has moved"
    if comm.rank == 1:
        time.sleep(0.3)
    for step in (1, 2):
        x[0] = comm.rank + step
        graph.replay()
        transfers.started()
        assert whole.tolist() == [2 * step + 1, 21, 2 * step + 3, 21] and part.tolist() == [2 * step, 20]
    assert comm.sent_bytes[1 - comm.rank] == sent.get(1 - comm.rank, 0) + 2 * (16 + 16)


def asked_for_its_end(comm: Comm, x: torch.Tensor) -> object:
    return comm.group((0, 1)).all_gather(x, x.new_empty(4)).done


def connects(comm: Comm, x: torch.Tensor) -> object:
    return dist.isend(x, 1 - comm.rank, comm.group((0, 1))._handle)


def hosts_value(comm: Comm, x: torch.Tensor) -> object:
    return (x + 1).sum().item()


def shape_from_values(comm: Comm, x: torch.Tensor) -> object:
    return x.nonzero()


def copy_to_host(comm: Comm, x: torch.Tensor) -> object:
    return x.to("cpu")


def copy_from_host(comm: Comm, x: torch.Tensor) -> object:
    return x + torch.ones(2, dtype=x.dtype).to(x.device)


def synchronisation(comm: Comm, x: torch.Tensor) -> object:
    return torch.emu.synchronize()  # type: ignore[attr-defined]


def event(comm: Comm, x: torch.Tensor) -> object:
    return torch.emu.Event().record()  # type: ignore[attr-defined]


def random_numbers(comm: Comm, x: torch.Tensor) -> object:
    return torch.rand_like(x)


REFUSED: dict[Callable[[Comm, torch.Tensor], object], str] = {
    hosts_value: "the host would wait for aten::_local_scalar_dense", shape_from_values: "aten::nonzero",
    copy_to_host: "a copy between host and device", copy_from_host: "a copy between host and device",
    asked_for_its_end: "no end that the host could ask for", connects: "the first transfer, which connects",
    synchronisation: "synchronize", event: "an event", random_numbers: "random numbers of a generator",
}  # fmt: skip


def refusals(comm: Comm) -> dict[str, str]:
    found = {}
    comm.create_groups([(0, 1)])
    for program in REFUSED:
        x = numbers(comm, 1, 2)
        try:
            graph_pool(comm).capture(lambda program=program, x=x: program(comm, x))
            found[program.__name__] = ""
        except RuntimeError as error:
            found[program.__name__] = str(error)
        assert (x + 1).tolist() == [2, 3], "the device goes on"
    return found


def misuse(comm: Comm) -> Iterator[str]:
    def problem(run: Callable[[], Any]) -> str:
        try:
            run()
        except RuntimeError as error:
            return str(error)
        return ""

    emu, accelerator = torch.emu, comm.accelerator  # type: ignore[attr-defined]
    assert accelerator is not None
    yield problem(accelerator.begin_capture)
    given = [numbers(comm, 1, 2)]
    graph, y = graph_pool(comm).capture(lambda: given[0] + 1)
    graph.replay()
    side = emu.Stream()
    with emu.stream(side):
        yield problem(lambda: y * 2)
    emu.synchronize()
    given.clear()
    yield problem(graph.replay)


def misuses(comm: Comm) -> list[str]:
    return list(misuse(comm))


@pytest.mark.parametrize("job", [replays, runs_while_the_host_goes_on, backward_in_a_graph, collectives_in_a_graph])
def test_a_graph_runs_again(job: Callable[[Comm], None], pool: Pool) -> None:
    pool.run(job)


def test_what_no_graph_can_hold_is_refused(pool: Pool) -> None:
    for found in pool.run(refusals):
        for program, words in REFUSED.items():
            assert words in found[program.__name__], program


def test_graphs_that_are_used_wrongly(pool: Pool) -> None:
    words = ("default stream", "graph on the default stream", "memory that was released: aten::add reads")
    for found in pool.run(misuses):
        for text, want in zip(found, words, strict=True):
            assert want in text
