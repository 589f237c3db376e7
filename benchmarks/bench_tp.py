"""Tensor parallelism of degree 2 over gloo: what a layer exchanges, and other ways to do it.

    python benchmarks/bench_tp.py [--rounds 12]

A layer's forward makes two gathers and two scatter-sums (its backward the same again); Megatron without sequence
parallelism makes two all-reduces. Below that, single exchanges: ours (one ragged all-to-all) against torch's
collectives for equal shards and point-to-point messages. Every call includes the copies that its result needs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import alternate, machine, median, rank_env, ranks

CASES = ((4, 256, 256), (2, 512, 512), (4, 512, 1024))  # batch, tokens, hidden
NAMES = (
    "layer ours", "layer all_reduce",
    "gather ours", "gather all_gather", "gather p2p",
    "scatter ours", "scatter reduce_scatter", "scatter p2p",
)  # fmt: skip


def run(rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from hetero_megatron.comm import start_comm, stop_comm
    from hetero_megatron.parallel.collectives import gather_tokens, scatter_tokens
    from hetero_megatron.platform import Platform

    comm = start_comm(Platform(torch.device("cpu"), "gloo"), 60)
    comm.create_groups([(0, 1)])
    group, me = comm.group((0, 1)), comm.rank
    out: dict[str, dict[str, list[float]]] = {}
    for b, s, h in CASES:
        half = s // 2
        shards = (half, s - half)
        part, whole = torch.randn(b, half, h), torch.randn(b, s, h)

        def swap(x: torch.Tensor) -> torch.Tensor:
            received = torch.empty_like(x)
            handles = [comm.irecv(received, 1 - me, 0), comm.isend(x, 1 - me, 0)]
            for handle in handles:
                handle.wait()
            return received

        def all_gather(b: int = b, h: int = h, part: torch.Tensor = part) -> torch.Tensor:
            flat = torch.empty(2 * b, *part.shape[1:])
            dist.all_gather_into_tensor(flat, part)
            return flat.view(2, *part.shape).transpose(0, 1).reshape(b, -1, h)

        def gather_p2p(part: torch.Tensor = part) -> torch.Tensor:
            parts = [part, swap(part)] if me == 0 else [swap(part), part]
            return torch.cat(parts, dim=1)

        def reduce_scatter(part: torch.Tensor = part, whole: torch.Tensor = whole) -> torch.Tensor:
            result = torch.empty_like(part)
            dist.reduce_scatter_tensor(result, torch.cat(whole.chunk(2, dim=1)))
            return result

        def scatter_p2p(whole: torch.Tensor = whole) -> torch.Tensor:
            halves = whole.chunk(2, dim=1)
            return swap(halves[1 - me].contiguous()).add_(halves[me])

        def ours(part: torch.Tensor = part, whole: torch.Tensor = whole, shards: tuple[int, int] = shards) -> None:
            for _ in range(2):
                gather_tokens(part, group, shards)
                scatter_tokens(whole, group, shards)

        def all_reduce(whole: torch.Tensor = whole) -> None:
            for _ in range(2):
                dist.all_reduce(whole)
                whole.mul_(0.5)  # keep the values finite

        calls: tuple[Callable[[], object], ...] = (
            ours, all_reduce,
            partial(gather_tokens, part, group, shards), all_gather, gather_p2p,
            partial(scatter_tokens, whole, group, shards), reduce_scatter, scatter_p2p,
        )  # fmt: skip
        seconds: dict[str, list[float]] = {name: [] for name in NAMES}
        for i in range(rounds + 2):
            for name, call in zip(NAMES, calls, strict=True):
                dist.barrier()
                start = time.perf_counter()
                call()
                if i > 1:
                    seconds[name].append(time.perf_counter() - start)
        out[f"{b} x {s} x {h}"] = seconds
    if me == 0:
        print(json.dumps(out), flush=True)
    dist.barrier()
    stop_comm()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--side", choices=["run"])
    args = parser.parse_args()
    if args.side:
        run(args.rounds)
        return
    print(f"{machine()}; 2 ranks over gloo, 1 thread each, fp32, medians of {args.rounds} rounds, calls alternate")
    result = alternate({"run": ranks(2, __file__, "--side", "run", "--rounds", str(args.rounds))}, 1, rank_env())[
        "run"
    ][0]
    print(f"{'ms':<24}" + "".join(f"{case:>16}" for case in result) + "   (ratio: this / ours)")
    for name in NAMES:
        cells = []
        for seconds in result.values():
            mine = median(seconds[f"{name.split()[0]} ours"])
            cells.append(f"{median(seconds[name]) * 1e3:.2f} ({median(seconds[name]) / mine:.2f})")
        print(f"{name:<24}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
