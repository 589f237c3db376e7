"""What test_emulated_vendor.py runs in processes of its own: loading the device changes a process for good."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PLUGIN = os.path.join(ROOT, "plugins", "emulated_vendor")

# A planted bug: with ``right``, the program that does it right.
Planted = Callable[[bool], None]


def device() -> Any:
    """``torch.emu``."""
    sys.path.insert(0, PLUGIN)
    import hetero_emulated_vendor.adapter  # noqa: F401

    return torch.emu  # type: ignore[attr-defined]


def numbers(n: int = 1000, index: int = 0) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float64, device=torch.device("emu", index))


def read_before_wait(right: bool) -> None:
    emu, here = torch.emu, torch.emu.current_stream()  # type: ignore[attr-defined]
    x, side = numbers(), emu.Stream()
    side.wait_stream(here)
    with emu.stream(side):
        y = x * 2
    if right:
        here.wait_stream(side)
    assert float((y + 1).sum()) == 1000.0 * 999 + 1000
    y.record_stream(here)
    x.record_stream(side)


def buffer_reused_while_read(right: bool) -> None:
    emu, here = torch.emu, torch.emu.current_stream()  # type: ignore[attr-defined]
    x, side = numbers(), emu.Stream()
    side.wait_stream(here)
    with emu.stream(side):
        total = x.sum()
    if right:
        here.wait_stream(side)
    x.zero_()
    side.synchronize()
    assert float(total) == 999 * 500


def used_before_its_allocation(right: bool) -> None:
    emu, here = torch.emu, torch.emu.current_stream()  # type: ignore[attr-defined]
    x, side = torch.empty(100, device="emu"), emu.Stream()
    if right:
        side.wait_stream(here)
    with emu.stream(side):
        x.fill_(1.0)
    x.record_stream(side)


def event_on_the_wrong_stream(right: bool) -> None:
    emu, here = torch.emu, torch.emu.current_stream()  # type: ignore[attr-defined]
    x, side, done = numbers(), emu.Stream(), emu.Event()
    side.wait_stream(here)
    with emu.stream(side):
        x.add_(1)
    done.record(side if right else here)
    here.wait_event(done)
    x.mul_(2)
    x.record_stream(side)


def event_recorded_too_early(right: bool) -> None:
    emu, here = torch.emu, torch.emu.current_stream()  # type: ignore[attr-defined]
    x, side, done = numbers(), emu.Stream(), emu.Event()
    side.wait_stream(here)
    with emu.stream(side):
        if not right:
            done.record()
        x.add_(1)
        if right:
            done.record()
    done.synchronize()
    x.mul_(2)
    x.record_stream(side)


def freed_in_flight(right: bool) -> None:
    emu, here = torch.emu, torch.emu.current_stream()  # type: ignore[attr-defined]
    x, side = numbers(), emu.Stream()
    side.wait_stream(here)
    with emu.stream(side):
        y = x * 2
    if right:
        x.record_stream(side)
    del x
    side.synchronize()
    assert float(y[-1]) == 2 * 999


def host_read_without_wait(right: bool) -> None:
    emu = torch.emu  # type: ignore[attr-defined]
    x, buffer = numbers(), torch.empty(1000, dtype=torch.float64, pin_memory=True)
    buffer.copy_(x, non_blocking=True)
    if right:
        emu.current_stream().synchronize()
    seen = float(buffer.sum())
    emu.check_host_read(buffer)
    assert seen == 999 * 500


def host_waits_for_another_stream(right: bool) -> None:
    emu, here = torch.emu, torch.emu.current_stream()  # type: ignore[attr-defined]
    x, side = numbers(), emu.Stream()
    side.wait_stream(here)
    with emu.stream(side):
        buffer = x.to("cpu", non_blocking=True)
    (side if right else here).synchronize()
    emu.check_host_read(buffer)
    assert float(buffer.sum()) == 999 * 500
    x.record_stream(side)


def host_buffer_reused_while_read(right: bool) -> None:
    emu = torch.emu  # type: ignore[attr-defined]
    buffer = torch.ones(1000, pin_memory=True)
    x = buffer.to("emu", non_blocking=True)
    if right:
        emu.synchronize()
    buffer.zero_()
    emu.synchronize()
    assert float(x.sum()) == 1000.0


def pinned_buffer_of_two_copies(right: bool) -> None:
    emu, here = torch.emu, torch.emu.current_stream()  # type: ignore[attr-defined]
    x, side, buffer = numbers(), emu.Stream(), torch.empty(1000, dtype=torch.float64, pin_memory=True)
    buffer.copy_(x, non_blocking=True)
    if right:
        side.wait_stream(here)
    with emu.stream(side):
        y = buffer.to("emu", non_blocking=True)
    side.synchronize()
    assert float(y.sum()) == 999 * 500


def operands_on_two_devices(right: bool) -> None:
    x, y = numbers(), numbers(index=0 if right else 1)
    assert float((x + y).sum()) == 999 * 1000


def event_of_another_device(right: bool) -> None:
    emu = torch.emu  # type: ignore[attr-defined]
    done = emu.Event()
    done.record(emu.current_stream(0))
    done.record(emu.current_stream(0 if right else 1))


def waits_for_the_wrong_device(right: bool) -> None:
    emu = torch.emu  # type: ignore[attr-defined]
    x = numbers(index=1)
    buffer = torch.empty(1000, dtype=torch.float64, pin_memory=True)
    buffer.copy_(x, non_blocking=True)
    emu.synchronize(1 if right else 0)
    emu.check_host_read(buffer)
    assert float(buffer.sum()) == 999 * 500


def no_such_device(right: bool) -> None:
    emu = torch.emu  # type: ignore[attr-defined]
    emu.set_device(emu.device_count() - right)


def operand_on_the_host(right: bool) -> None:
    y = torch.ones(1000, dtype=torch.float64)
    assert float((numbers() * (y.to("emu") if right else y)).sum()) == 999 * 500


# What is planted, and words of the message that finds it.
BUGS: dict[Planted, tuple[str, ...]] = {
    read_before_wait: ("aten::add", "the default stream of emu:0 reads", "8000 bytes", "aten::mul on stream", "writes"),
    buffer_reused_while_read: ("aten::zero_", "writes", "8000 bytes", "aten::sum", "reads"),
    used_before_its_allocation: ("aten::fill_", "allocation on the default stream"),
    event_on_the_wrong_stream: ("aten::mul", "aten::add", "nothing makes the later one wait"),
    event_recorded_too_early: ("aten::mul", "aten::add", "nothing makes the later one wait"),
    freed_in_flight: ("the release of the memory", "aten::mul on stream", "record_stream"),
    host_read_without_wait: ("the host reads a buffer of 8000 bytes", "has not delivered"),
    host_waits_for_another_stream: ("the host reads a buffer of 8000 bytes", "has not delivered"),
    host_buffer_reused_while_read: ("the host changed a buffer of 4000 bytes", "copy to the device"),
    pinned_buffer_of_two_copies: ("copy to the device", "reads a buffer", "copy to the host"),
    operands_on_two_devices: ("same device", "emu:0 and emu:1"),
    event_of_another_device: ("wrong device", "emu:0", "emu:1"),
    waits_for_the_wrong_device: ("the host reads a buffer of 8000 bytes", "emu:1"),
    no_such_device: ("wrong device", "emu:8"),
    operand_on_the_host: ("same device", "emu:0 and cpu"),
}


def attempt(program: Planted, right: bool) -> str:
    """What the device finds in a program, at the latest when everything has ended; empty: nothing."""
    emu = torch.emu  # type: ignore[attr-defined]
    found = []
    try:
        program(right)
    except RuntimeError as error:
        found.append(str(error))
    for index in range(emu.device_count()):
        try:
            emu.synchronize(index)
        except RuntimeError as error:
            found.append(str(error))
    emu.findings()
    emu.set_device(0)
    return "\n".join(found)


def all_attempts() -> None:
    """Every program, wrong and right, as JSON on standard output."""
    device()
    print(json.dumps({bug.__name__: [attempt(bug, False), attempt(bug, True)] for bug in BUGS}))


def touch_device_memory() -> None:
    device()
    x = torch.ones(4, device="emu")
    print("values", x.tolist(), flush=True)
    ctypes.string_at(x.data_ptr(), 8)
    print("the host has read device memory", flush=True)


def everyone(comm: Any) -> dist.ProcessGroup:
    """All ranks by their library, in the same group at every call."""
    made = getattr(comm, "emulated_group", None)
    if made is None:
        made = comm.emulated_group = dist.new_group(backend="cpu:gloo,emu:emuccl")
    return made


def exchange(comm: Any, index: int | None = None) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
    """(sent, received, works) of an exchange that ranks 2 n and 2 n + 1 start, the even one sending first."""
    where = comm.device if index is None else torch.device("emu", index)
    mine = torch.full((1000,), float(comm.rank), dtype=torch.float64, device=where)
    theirs, peer = torch.zeros_like(mine), comm.rank ^ 1
    group = everyone(comm)
    starts = [lambda: dist.isend(mine, peer, group), lambda: dist.irecv(theirs, peer, group)]
    return mine, theirs, [start() for start in (starts[::-1] if comm.rank % 2 else starts)]


def read_before_received(comm: Any, right: bool) -> None:
    _, theirs, works = exchange(comm)
    if right:
        for work in works:
            work.wait()
    assert float(theirs.sum()) == 1000.0 * (comm.rank ^ 1)


def buffer_reused_before_sent(comm: Any, right: bool) -> None:
    mine, theirs, works = exchange(comm)
    if right:
        for work in works:
            work.wait()
    mine.fill_(-1.0)
    for work in works:
        work.wait()
    assert float(theirs.sum()) == 1000.0 * (comm.rank ^ 1)


def waited_on_another_stream(comm: Any, right: bool) -> None:
    emu, index = torch.emu, comm.device.index  # type: ignore[attr-defined]
    _, theirs, works = exchange(comm)
    with emu.stream(emu.current_stream(index) if right else emu.Stream(index)):
        for work in works:
            work.wait()
    assert float(theirs.sum()) == 1000.0 * (comm.rank ^ 1)


def summed_while_it_changes(comm: Any, right: bool) -> None:
    x = torch.ones(100, dtype=torch.float64, device=comm.device)
    work = dist.all_reduce(x, group=everyone(comm), async_op=True)
    if right:
        work.wait()
    x.mul_(2)
    assert float(x.sum()) == 800.0


def tensor_of_another_device(comm: Any, right: bool) -> None:
    exchange(comm, comm.device.index if right else comm.device.index + 1)


TRANSFER_BUGS: dict[Callable[[Any, bool], None], tuple[str, ...]] = {
    read_before_received: ("aten::sum", "reads", "8000 bytes", "emuccl receive from member", "writes"),
    buffer_reused_before_sent: ("aten::fill_", "writes", "8000 bytes", "emuccl send to member", "reads"),
    waited_on_another_stream: ("aten::sum", "reads", "8000 bytes", "emuccl receive from member", "writes"),
    summed_while_it_changes: ("aten::mul", "800 bytes", "emuccl all-reduce"),
    tensor_of_another_device: ("wrong device", "the group is on emu:"),
}


def attempt_on_ranks(comm: Any, bug: Callable[[Any, bool], None]) -> list[str]:
    torch.emu.set_device(comm.device)  # type: ignore[attr-defined]
    before = torch.emu.current_device()  # type: ignore[attr-defined]
    dist.all_reduce(torch.zeros(1, device=comm.device), group=everyone(comm))  # the group learns its device
    answers = []
    for right in (False, True):
        answers.append(attempt(lambda right: bug(comm, right), right))
        torch.emu.set_device(before)  # type: ignore[attr-defined]
    return answers


def message(program: Callable[[], Any]) -> str:
    try:
        program()
    except RuntimeError as error:
        return str(error)
    return ""


def refusals(comm: Any) -> tuple[str, str]:
    """Of a host tensor, and of a group whose ranks say to be of two vendors."""
    group = dist.new_group(backend="emuccl")
    host = message(lambda: dist.all_reduce(torch.ones(1), group=group))
    os.environ["HETERO_EMULATED_VENDOR"] = "other" if comm.rank % 2 else ""
    foreign = message(lambda: dist.new_group(backend="emuccl"))
    del os.environ["HETERO_EMULATED_VENDOR"]
    return host, foreign


def one_comes_alone(comm: Any) -> str:
    from hetero_emulated_vendor.adapter import make_backend

    time_out = timedelta(milliseconds=500)
    options = SimpleNamespace(store=dist.HashStore(), group_rank=0, group_size=2, timeout=time_out)
    return message(lambda: make_backend(options)) if comm.rank == 0 else ""


def nobody_sends(comm: Any) -> str:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1), backend="emuccl")
    if comm.rank != 0:
        return ""
    x = torch.zeros(4, device=comm.device)
    work = dist.irecv(x, 1, group)
    if message(work.wait):
        return "the host was held up"
    return message(torch.emu.synchronize)  # type: ignore[attr-defined]


def abort_ends_it(comm: Any) -> str:
    """What is wrong with an abort of a group whose two members wait for each other; empty: nothing. Rank 0 aborts
    first, of which rank 1 learns nothing."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60), backend="emuccl")
    if comm.rank > 1:
        return ""
    backend, peer, x = group._get_backend(comm.device), 1 - comm.rank, torch.zeros(4, device=comm.device)
    works = [dist.irecv(x, peer, group), dist.all_reduce(torch.zeros_like(x), group=group, async_op=True)]
    works[0].wait()
    late = threading.Timer(0.2 + 0.6 * comm.rank, backend.abort)
    began = time.monotonic()
    late.start()
    if comm.rank == 1:
        time.sleep(0.5)
        if works[0].is_completed():
            return "the abort of a peer ended a receive"
    said = message(torch.emu.synchronize)  # type: ignore[attr-defined]
    late.join()
    if "aborted" not in said or time.monotonic() - began < 0.2 + 0.6 * comm.rank:
        return f"the device said {said!r} too early, or nothing"
    again = message(lambda: dist.irecv(x, peer, group))
    backend.abort()
    return "" if "aborted" in again and bool((x + 1 == 1).all()) else f"afterwards: {again!r}, {x}"


def collectives(comm: Any) -> str:
    """What is wrong with them; empty: nothing."""
    rank, size, group = comm.rank, dist.get_world_size(), everyone(comm)

    def of(*values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=comm.device)

    wrong = []

    def check(name: str, tensor: torch.Tensor, want: list[float]) -> None:
        if tensor.tolist() != want:
            wrong.append(f"{name}: {tensor.tolist()}, not {want}")

    ranks = [float(r) for r in range(size)]
    x = of(rank)
    dist.all_reduce(x, group=group)
    check("all_reduce", x, [sum(ranks)])
    x = of(rank)
    dist.broadcast(x, 2, group=group)
    check("broadcast", x, [2.0])
    parts = [of(-1) for _ in ranks]
    dist.all_gather(parts, of(rank), group=group)
    check("all_gather", torch.cat(parts), ranks)
    whole = of(*[-1.0] * size)
    dist.all_gather_into_tensor(whole, of(rank), group=group)
    check("all_gather_into_tensor", whole, ranks)
    x = of(-1)
    dist.reduce_scatter_tensor(x, of(*ranks), group=group)
    check("reduce_scatter_tensor", x, [float(size * rank)])
    counts = [1 if r == 0 else 2 for r in range(size)]  # everyone has one for rank 0, two for the others
    out = of(*[-1.0] * (size * counts[rank]))
    dist.all_to_all_single(out, of(*[float(rank)] * sum(counts)), [counts[rank]] * size, counts, group=group)
    check("all_to_all_single", out, [r for r in ranks for _ in range(counts[rank])])
    outs = [of(*[-1.0] * r) for r in range(size)]
    dist.all_to_all(outs, [of(*[float(rank)] * rank) for _ in ranks], group=group)
    check("all_to_all", torch.cat(outs), [r for r in ranks for _ in range(int(r))])
    dist.barrier(group=group)
    _, theirs, works = exchange(comm)
    for work in works:
        work.wait()
    check("exchange", theirs[:1], [float(rank ^ 1)])
    return "; ".join(wrong)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
