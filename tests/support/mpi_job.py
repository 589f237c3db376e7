"""A rank of the jobs of test_mpi_island.py: ``mpi_job.py CASE``, under mpiexec and hetero_mpi_island.launch.

Prints one JSON object: ``rank`` and what the case found.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from hetero_mpi_island.plugin import BACKEND, MpiHost

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
BYTES_ONLY = (torch.bool, torch.complex64, torch.float8_e4m3fn)
# Their names before torch 2.13 are deprecated in it.
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
PATIENCE = timedelta(seconds=180)


def tensor(random: random.Random, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers: their sums are exact in every dtype."""
    numbers = torch.Generator().manual_seed(random.getrandbits(63))
    return torch.randint(0, 8, (count,), generator=numbers).to(torch.float32).to(dtype)


def refusal(call: Callable[[], object]) -> str:
    """The text of what ``call`` raises."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)


def bytes_of(x: torch.Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def operations(seed: int) -> dict[str, Any]:
    """Every operation on random shapes, beside gloo's result or the definition."""
    group = dist.new_group(backend=BACKEND, timeout=PATIENCE)
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []

    def check(name: str, ok: bool) -> None:
        if not ok:
            wrong.append(name)

    for turn in range(15):
        shared, mine = random.Random(seed + turn), random.Random((seed + turn) * size + rank + 1)
        dtype, n = shared.choice(DTYPES), shared.choice((0, 1, 3, 17, 1000, 70_001))
        # [from][to] rows, zeros among them
        rows = [[shared.choice((0, 1, 2, 5, 300)) for _ in range(size)] for _ in range(size)]
        width = shared.choice((1, 3))
        gives, takes = rows[rank], [rows[r][rank] for r in range(size)]

        x = tensor(mine, sum(gives) * width, dtype).view(-1, width)
        ours, theirs = x.new_empty(sum(takes), width), x.new_empty(sum(takes), width)
        work = dist.all_to_all_single(ours, x, takes, gives, group=group, async_op=True)
        work.wait()
        dist.all_to_all_single(theirs, x, takes, gives)
        check(f"all_to_all_single {dtype} {rows}", work.is_completed() and same(ours, theirs))

        into = [x.new_empty(count, width) for count in takes]
        dist.all_to_all(into, list(x.split(gives)), group=group)
        check(f"all_to_all {dtype} {rows}", same(torch.cat(into), theirs))

        x = tensor(mine, n, dtype)
        lists = [[torch.empty_like(x) for _ in range(size)] for _ in range(2)]
        dist.all_gather(lists[0], x, group=group)
        dist.all_gather(lists[1], x)
        check(f"all_gather {dtype} {n}", all(same(a, b) for a, b in zip(*lists)))
        flat = x.new_empty(size * n)
        GATHER(flat, x, group=group)
        check(f"all_gather_single {dtype} {n}", same(flat, torch.cat(lists[1])))

        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            ours, theirs = x.clone(), x.clone()
            dist.all_reduce(ours, op, group=group)
            dist.all_reduce(theirs, op)
            check(f"all_reduce {op} {dtype} {n}", same(ours, theirs))
        if dtype.is_floating_point:
            ours = x.clone()
            dist.all_reduce(ours, dist.ReduceOp.AVG, group=group)
            mean = (torch.stack(lists[1]).double().sum(0) / size).to(dtype)
            check(f"all_reduce AVG {dtype} {n}", torch.allclose(ours, mean))
        part = x.new_empty(n)
        SCATTER(part, x.repeat(size) + torch.arange(size).repeat_interleave(n).to(dtype), group=group)
        check(f"reduce_scatter {dtype} {n}", same(part, torch.stack([y + rank for y in lists[1]]).sum(0).to(dtype)))

        root, ours, theirs = shared.randrange(size), x.clone(), x.clone()
        dist.broadcast(ours, root, group=group)
        dist.broadcast(theirs, root)
        check(f"broadcast {dtype} {n}", same(ours, theirs))

        # A ring of tagged messages, received in the reverse order of their tags; any dtype.
        kind = shared.choice(DTYPES + BYTES_ONLY)
        out = [tensor(random.Random(100 * rank + tag), n, kind) for tag in range(3)]
        come = [torch.empty_like(y) for y in out]
        before, after = (rank - 1) % size, (rank + 1) % size
        works = [dist.irecv(come[tag], before, group, tag) for tag in (2, 1, 0)]
        works += [dist.isend(out[tag], after, group, tag) for tag in range(3)]
        for work in works:
            work.wait()
        right = [tensor(random.Random(100 * before + tag), n, kind) for tag in range(3)]
        check(f"messages {kind} {n}", all(same(a, b) for a, b in zip(come, right)))
    dist.barrier(group=group)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group=group)
    check("all_gather_object", objects == [{"rank": r, "text": "x" * r} for r in range(size)])
    other = torch.ones(2, 2)
    return {
        "wrong": wrong,
        "backend": dist.get_backend(group),
        "device": refusal(lambda: dist.all_reduce(torch.ones(2, device="meta"), group=group)),
        "strides": refusal(lambda: dist.broadcast(torch.ones(2, 3).t(), 0, group=group)),
        "reduced": refusal(lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), group=group)),
        "tag": refusal(lambda: dist.isend(other, (rank + 1) % size, group, 1 << 40)),
        "rows": refusal(lambda: dist.all_to_all_single(other, other, [1, 2], [2], group=group)),
        "unserved": refusal(lambda: dist.gather(other, [other] * size if rank == 0 else None, 0, group=group)),
    }


def islands() -> dict[str, Any]:
    """Two islands of two ranks: what crosses is refused; a sum goes inside, between the owners, and back inside."""
    rank = dist.get_rank()
    inside = [dist.new_group(ranks, PATIENCE, BACKEND) for ranks in ([0, 1], [2, 3])][rank // 2]
    owners = [dist.new_group([i, i + 2], PATIENCE, "gloo") for i in (0, 1)][rank % 2]
    refused = [refusal(lambda r=ranks: dist.new_group(r, PATIENCE, BACKEND)) for ranks in ([1, 2], [0, 1, 2, 3])]
    torch.manual_seed(rank)
    x = torch.randn(4099, dtype=torch.float64)
    flat = x.clone()
    dist.all_reduce(flat)
    # Ragged halves: owner i of an island has element i of it.
    counts = [2050, 2049]
    mine = x.new_empty(2, counts[rank % 2])
    dist.all_to_all_single(mine.view(-1), x, [counts[rank % 2]] * 2, counts, group=inside)
    total = mine.sum(0)
    dist.all_reduce(total, group=owners)
    spread = x.new_empty(4099)
    dist.all_to_all_single(spread, total.repeat(2), counts, [len(total)] * 2, group=inside)
    difference = float(((spread - flat).abs() / flat.abs().clamp_min(x.abs().max())).max())
    # A long message of MPI that is not waited for must not hold up gloo's that its receiver sends afterwards.
    long, answer = torch.full((3_000_000,), float(rank)), torch.zeros(1)
    peer = rank ^ 1
    if rank % 2 == 0:
        work = dist.isend(long, peer, inside, 5)
        dist.recv(answer, peer)
        work.wait()
    else:
        got = torch.empty_like(long)
        dist.irecv(got, peer, inside, 5).wait()
        dist.send(got[:1] + 1, peer)
        answer = got[:1] + 1
    return {"refused": refused, "difference": difference, "answer": float(answer)}


def absent() -> dict[str, Any]:
    """Rank 2 does not come, then is killed: everyone who waits for it says so in time."""
    rank, limit = dist.get_rank(), timedelta(seconds=5)
    group = dist.new_group([0, 1, 2], limit, BACKEND)
    said: dict[str, tuple[str, float]] = {}

    def note(name: str, call: Callable[[], object]) -> None:
        start = time.monotonic()
        said[name] = refusal(call), time.monotonic() - start

    if rank == 2:
        said["short"] = refusal(lambda: dist.recv(torch.zeros(5), 0, group, 9)), 0.0
    else:
        if rank == 0:
            dist.send(torch.zeros(4), 2, group, 9)
        x = torch.ones(3)
        note("receive", lambda: dist.recv(x, 2, group))
        note("exchange", lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), group=group))
        note("sum", lambda: dist.all_reduce(x, group=group))
        note("given", lambda: dist.irecv(x, 2, group, 1).wait(timedelta(seconds=0.5)))
        note("group", lambda: dist.new_group([0, 1, 2], limit, BACKEND))
    dist.barrier()  # gloo's: rank 2 is there, only not for MPI
    if rank == 2:
        print(json.dumps({"rank": rank, "said": said}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    note("killed", lambda: dist.recv(x, 2, group, 2))
    return {"said": said}


def main(case: str, *words: str) -> None:
    MpiHost().device(0)
    dist.init_process_group("gloo", timeout=PATIENCE)
    found = {"operations": operations, "islands": islands, "absent": absent}[case](*map(int, words))
    print(json.dumps({"rank": dist.get_rank(), "local": os.environ["LOCAL_RANK"], **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
