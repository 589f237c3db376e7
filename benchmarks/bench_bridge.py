"""The bridge between unlike chips: messages in chunks against copying a whole message and then sending it.

    python benchmarks/bench_bridge.py [--rate 400] [--rounds 9]
    python benchmarks/bench_bridge.py --loopback    # chunks and stripes, as fast as this host is, beside bare sockets

Two processes over gloo. The link, and the copies between device and host, are emulated at ``--rate`` MB/s each: what is
carried is over no earlier than that, and the next waits for it. "one end": the receiver is a CPU, so copy and link are
two equal legs and the ceiling of the ratio is 2; "both ends": copy, link, copy, and the ceiling is 3.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import alternate, machine, median, rank_env, ranks

SIZES = (64 << 10, 1 << 20, 8 << 20, 64 << 20)


class Leg:
    """Something that carries one thing after the other at ``rate`` bytes/s."""

    def __init__(self, rate: float) -> None:
        self.rate, self.free = rate, 0.0

    def due(self, size: int) -> float:
        self.free = max(self.free, time.perf_counter()) + size / self.rate
        return self.free


def until(due: float) -> None:
    if (left := due - time.perf_counter()) > 0:
        time.sleep(left)


@dataclass
class Copied:
    due: float

    def synchronize(self) -> None:
        until(self.due)


class PacedCopies:
    """A device whose memory is the host's, behind a slow bus, one lane each way."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def buffer(self, size: int) -> Any:
        import torch

        return torch.empty(size, dtype=torch.uint8)

    def now(self) -> None:
        return None

    def stream(self) -> Leg:
        return Leg(self.rate)

    def join(self, event: Copied) -> None:
        event.synchronize()

    def copy(self, target: Any, source: Any, stream: Leg, after: Any) -> Copied:
        target.copy_(source)
        return Copied(stream.due(source.nbytes))


class Dma(PacedCopies):
    """A device whose engine copies at once, and takes nothing of the processor for it."""

    def copy(self, target: Any, source: Any, stream: Leg, after: Any) -> Copied:
        return Copied(0.0)


class Arriving:
    """A transfer whose bytes the emulated link carries once gloo has them, one after the other."""

    def __init__(self, due: Future[float]) -> None:
        self.due = due

    def wait(self) -> None:
        until(self.due.result())


def paced(bridge: Any, rate: float) -> Any:
    """``bridge``, whose receives come over a link of ``rate`` bytes/s."""
    link, plain, line = Leg(rate), bridge._transfer, ThreadPoolExecutor(1)

    def transfer(peer: int, sends: bool, stripe: int) -> Callable[[Any, int], Any]:
        start = plain(peer, sends, stripe)

        def carry(work: Any, size: int) -> float:
            work.wait()
            return link.due(size)

        return start if sends else lambda host, tag: Arriving(line.submit(carry, start(host, tag), host.nbytes))

    bridge._transfer = transfer
    return bridge


def run(rate: float, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from hetero_megatron.cluster import BRIDGE_CHUNK
    from hetero_megatron.comm import start_comm, stop_comm
    from hetero_megatron.comm.bridge import Bridge
    from hetero_megatron.platform import Platform

    comm = start_comm(Platform(torch.device("cpu"), "gloo"), 120)
    out: dict[str, dict[str, list[float]]] = {}
    for size in SIZES:
        message = torch.zeros(size, dtype=torch.uint8)
        sides = {}
        for ends in ("one end", "both ends"):
            copies = PacedCopies(rate if comm.rank == 0 or ends == "both ends" else float("inf"))
            for way, chunk in (("whole", size), ("chunks", BRIDGE_CHUNK)):
                # The buffers of the whole message are all of it, so chunks of it are the message itself.
                sides[f"{ends}, {way}"] = paced(Bridge([dist.new_group([0, 1])], copies, 120, chunk), rate)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for i in range(rounds + 1):
            for name, bridge in sides.items():
                dist.barrier()
                start = time.perf_counter()
                move = bridge.isend if comm.rank == 0 else bridge.irecv
                for work in move(message, 1 - comm.rank):
                    work.wait()
                if i:
                    seconds[name].append(time.perf_counter() - start)
        out[str(size)] = seconds
    if comm.rank == 1:  # what was sent has come there
        print(json.dumps(out), flush=True)
    dist.barrier()
    stop_comm()


class Sockets:
    """One connection and nothing else: what the kernel's TCP costs by itself, whoever calls it."""

    def __init__(self, rank: int) -> None:
        import torch.distributed as dist

        port: list[int] = [0]
        if rank == 1:
            listener = socket.create_server(("127.0.0.1", 0))
            port = [listener.getsockname()[1]]
        dist.broadcast_object_list(port, 1)
        self._connection = listener.accept()[0] if rank == 1 else socket.create_connection(("127.0.0.1", port[0]))

    def isend(self, message: Any, peer: int) -> list[Any]:
        self._connection.sendall(message.numpy())
        return []

    def irecv(self, message: Any, peer: int) -> list[Any]:
        left = memoryview(message.numpy())
        while left:
            left = left[self._connection.recv_into(left) :]
        return []


WAYS = {  # stripes, largest chunk
    "512 KiB": (1, 512 << 10), "4 MiB": (1, 4 << 20), "4 MiB, 2 stripes": (2, 4 << 20),
    "4 MiB, 4 stripes": (4, 4 << 20),
}  # fmt: skip


def run_loopback(rounds: int) -> None:
    """Seconds and CPU seconds of both processes, per message, by size and way."""
    import torch
    import torch.distributed as dist

    from hetero_megatron.comm import start_comm, stop_comm
    from hetero_megatron.comm.bridge import Bridge
    from hetero_megatron.platform import Platform

    torch.set_num_threads(1)
    comm = start_comm(Platform(torch.device("cpu"), "gloo"), 120)
    sides: dict[str, Any] = {
        way: Bridge([dist.new_group([0, 1]) for _ in range(stripes)], Dma(float("inf")), 120, chunk)
        for way, (stripes, chunk) in WAYS.items()
    }
    sides["gloo alone"] = Bridge([dist.new_group([0, 1])], None, 120)
    sides["sockets alone"] = Sockets(comm.rank)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for size in (1 << 20, 64 << 20):
        message, count = torch.zeros(size, dtype=torch.uint8), max((64 << 20) // size, 1)
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in sides}
        for i in range(rounds + 1):
            for way, bridge in sides.items():
                dist.barrier()
                start, busy = time.perf_counter(), time.process_time()
                move = bridge.isend if comm.rank == 0 else bridge.irecv
                for _ in range(count):
                    for work in move(message, 1 - comm.rank):
                        work.wait()
                took = torch.tensor([time.process_time() - busy], dtype=torch.float64)
                elapsed = time.perf_counter() - start
                dist.all_reduce(took)
                if i:
                    seconds[way].append((elapsed / count, took.item() / count))
        found[str(size)] = seconds
    if comm.rank == 1:
        print(json.dumps(found), flush=True)
    dist.barrier()
    stop_comm()


def loopback(rounds: int) -> None:
    words = ["--side", "loopback", "--rounds", str(rounds)]
    (found,) = alternate({"run": ranks(2, __file__, *words)}, 1, rank_env())["run"]
    print(f"{machine()}; loopback, medians of {rounds} rounds in turn; CPU seconds of both ends\n")
    print("| message | chunks | GB/s | ratio | CPU s per GB | share of it |\n|---|---|---|---|---|---|")
    for size, seconds in found.items():
        before = None
        for way, times in seconds.items():
            rate = int(size) / median([t for t, _ in times]) / 1e9
            busy = median([cpu for _, cpu in times]) / int(size) * 1e9
            before = before or (rate, busy)
            ratios = f"{rate:.2f} | {rate / before[0]:.2f} | {busy:.2f} | {busy / before[1]:.2f}"
            print(f"| {int(size) >> 20} MiB | {way} | {ratios} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=400.0, help="MB/s of the link and of copies (default 400)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--side", choices=["run", "loopback"])
    parser.add_argument("--loopback", action="store_true", help="chunks and stripes, as fast as this host is")
    args = parser.parse_args()
    if args.side == "loopback":
        return run_loopback(args.rounds)
    if args.loopback:
        return loopback(args.rounds)
    if args.side:
        run(args.rate * 1e6, args.rounds)
        return
    words = ["--side", "run", "--rate", str(args.rate), "--rounds", str(args.rounds)]
    (found,) = alternate({"run": ranks(2, __file__, *words)}, 1, rank_env())["run"]
    print(f"{machine()}; link and copies emulated at {args.rate:g} MB/s, medians of {args.rounds} rounds in turn\n")
    print("| message | ends with a device | whole, ms | chunks, ms | ratio |\n|---|---|---|---|---|")
    for size, seconds in found.items():
        for ends in ("one end", "both ends"):
            whole, chunks = median(seconds[f"{ends}, whole"]), median(seconds[f"{ends}, chunks"])
            print(f"| {int(size) >> 10} KiB | {ends} | {1e3 * whole:.2f} | {1e3 * chunks:.2f} | {whole / chunks:.2f} |")


if __name__ == "__main__":
    main()
