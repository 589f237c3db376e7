"""A rank that dies or hangs ends the job within the time-out; every survivor says whom it waited for, and in what."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 5.0  # seconds that a rank waits for another
PLAN = """
version: 1
seq_length: 32
global_batch_size: 6
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 4
    stages:
      - {ranks: [0, 1], layers: [0, 4], tp: 2}
      - {ranks: 2, layers: [4, 6]}
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 3, layers: [0, 6]}]}
"""
MESSAGE = re.compile(r"^error: rank (\d), in (.+), waited ([\d.]+) s for rank ([\d, ]+) and got no answer", re.M)


def start(directory: Path) -> list[subprocess.Popen[str]]:
    """Four ranks without a launcher, so that nobody but the ranks themselves notices a failure."""
    (directory / "plan.yaml").write_text(PLAN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "pretrain_gpt.py", "--plan", str(directory / "plan.yaml"), "--model", "tiny"]
    command += ["--mock-data", "--train-iters", "100000", "--lr", "1e-3", "--save", str(directory / "run")]
    command += ["--distributed-timeout-minutes", str(TIMEOUT / 60)]
    shared = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **shared, "GLOO_SOCKET_IFNAME": "lo", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for rank in range(4)
    ]


@pytest.mark.parametrize(("how", "victim"), [(signal.SIGKILL, 2), (signal.SIGSTOP, 1)])
def test_survivors_end_and_say_why(how: signal.Signals, victim: int, tmp_path: Path) -> None:
    ranks = start(tmp_path)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 90
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2) and time.monotonic() < deadline:
            assert all(p.poll() is None for p in ranks), [p.communicate()[1] for p in ranks if p.poll() is not None]
            time.sleep(0.1)
        assert metrics.exists(), "no step within the deadline"
        ranks[victim].send_signal(how)
        named, said = set(), []
        for rank, process in enumerate(ranks):
            if rank == victim:
                continue
            _, err = process.communicate(timeout=4 * TIMEOUT + 30)
            assert process.returncode == 3, err
            assert "Traceback" not in err
            found = MESSAGE.search(err)
            assert found and int(found[1]) == rank, err
            assert re.search(r"pipeline \d stage \d, |gradient synchronisation|the optimizer step", found[2])
            named |= set(map(int, found[4].split(", ")))
            said.append(err)
        assert victim in named  # some survivor waited for the victim itself, and knows what became of it
        what = {signal.SIGKILL: "is gone", signal.SIGSTOP: "hangs"}[how]
        assert any(re.search(rf"rank (\d, )*{victim}(, \d)* {what}", err) for err in said), said
    finally:
        for process in ranks:
            process.kill()
            process.wait()
