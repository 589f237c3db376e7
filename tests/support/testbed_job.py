"""What the tests of the testbed run as a rank: ``python testbed_job.py WHAT ...``. Standard library only."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def address(node: int) -> str:
    return f"10.77.0.{node + 1}"


def listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("0.0.0.0", port))
    listener.listen()
    return listener


def connect(node: int, port: int) -> socket.socket:
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((address(node), port), timeout=60)
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def receive(port: int, sizes: list[int]) -> list[float]:
    """Bytes/s of each message of so many bytes, from its first byte to its last."""
    rates = []
    with listen(port) as listener, listener.accept()[0] as peer:
        buffer = bytearray(1 << 18)
        for size in sizes:
            got = peer.recv_into(buffer, min(size, len(buffer)))
            start, first = time.perf_counter(), got
            while got < size:
                got += peer.recv_into(buffer, min(size - got, len(buffer)))
            rates.append((got - first) / (time.perf_counter() - start))
            peer.sendall(b"x")
    return rates


def send(node: int, port: int, sizes: list[int]) -> None:
    with connect(node, port) as peer:
        for size in sizes:
            peer.sendall(bytes(size))
            peer.recv(1)


def transfer(pairs: list[list[int]], size: int, repeats: int, out: str) -> None:
    """Each pair [source rank, destination rank, node of the destination] in turn; the receivers write what they saw.
    A fourth number is the pair's own size of messages."""
    measured = {}
    gate = Path(out)
    for index, (source, destination, node, *own) in enumerate(pairs):
        port, sizes = 6000 + index, [*own, size][:1] * repeats
        if destination == RANK:
            measured[f"{source}-{destination}"] = receive(port, sizes)
            (gate / f"done-{index}").touch()
        elif source == RANK:
            send(node, port, sizes)
        while not (gate / f"done-{index}").exists():
            time.sleep(0.01)
    (gate / f"rates-{RANK}.json").write_text(json.dumps(measured))


def ping(path: str) -> None:
    """Rank 0 sends a byte to rank 1 every 20 ms; rank 1 writes down how many came."""
    if RANK == 0:
        with connect(1, 6000) as peer:
            while True:
                peer.sendall(b"x")
                time.sleep(0.02)
    elif RANK == 1:
        count = 0
        with listen(6000) as listener, listener.accept()[0] as peer:
            while True:
                count += len(peer.recv(1024))
                Path(path).write_text(str(count))
    time.sleep(3600)


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "transfer":
        transfer(json.loads(rest[0]), int(rest[1]), int(rest[2]), rest[3])
    elif what == "ping":
        ping(rest[0])
    elif what == "environment":
        Path(rest[0], f"environment-{RANK}.json").write_text(
            json.dumps({**os.environ, "cores": sorted(os.sched_getaffinity(0))})
        )
    elif what == "wait":  # with a child in a session of its own, which no signal to the group would reach
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
        Path(os.environ["HETERO_TESTBED_DIR"], f"ready-{RANK}").touch()
        Path(rest[0], f"up-{RANK}").touch()
        while rest[1:] and int(rest[1]) in (-1, RANK):  # that rank, or all, end with a code when they are told to
            time.sleep(0.02)
            if Path(rest[0], "go").exists():
                sys.exit(int(rest[2]))
        time.sleep(3600)
    elif what == "count":  # how much CPU time it gets, once everybody is under way
        Path(os.environ["HETERO_TESTBED_DIR"], f"ready-{RANK}").touch()
        time.sleep(1.0)
        for index in range(int(rest[1])):
            start, used = time.perf_counter(), time.process_time()
            while time.perf_counter() - start < float(rest[2]):
                pass
            share = (time.process_time() - used) / (time.perf_counter() - start)
            Path(rest[0], f"share-{RANK}-{index}").write_text(str(share))


if __name__ == "__main__":
    main()
