"""Elastic runs under torchrun: hosts whose workers are agents; what happens to ranks changes nothing, bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron.testbed.process import all_status
from tests.distributed.training.test_elastic import PLANS, _plans
from tests.support.elastic_jobs import final_state, run_segments
from tests.support.ports import free_port
from tests.support.programs import ENVIRONMENT

STEPS = 60
DEADLINE = 200.0


class Hosts:
    """One torchrun for each of ``chips``, on this machine, all with the same command."""

    def __init__(self, directory: Path, chips: Sequence[int], *words: str) -> None:
        self.directory, port, self.jobs = directory, free_port(), list[subprocess.Popen[bytes]]()
        for index, count in enumerate(chips):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(chips)), "--node-rank"]
            torchrun += [str(index), "--nproc-per-node", str(count), "--master-addr", "127.0.0.1"]
            with (directory / f"host-{index}").open("wb") as log:
                self.jobs.append(subprocess.Popen(
                    [*torchrun, "--master-port", str(port), *words], stdout=log, stderr=subprocess.STDOUT,
                    env={**ENVIRONMENT, "HETERO_NODE": f"host{index}", "OMP_NUM_THREADS": "1"},
                ))  # fmt: skip

    def said(self, host: int) -> str:
        return (self.directory / f"host-{host}").read_text()

    def steps(self) -> list[dict[str, Any]]:
        path = self.directory / "run" / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if "loss" in row]

    def until(self, condition: Any) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, "\n".join(map(self.said, range(len(self.jobs))))
            time.sleep(0.02)

    def ranks(self, host: int) -> list[int]:
        """Pids of the real ranks of a host, in order."""
        entries = list(all_status())
        workers = [entry.pid for entry in entries if entry.parent == self.jobs[host].pid]
        return sorted(entry.pid for entry in entries if entry.parent in workers)

    def kill(self) -> None:
        for job in self.jobs:
            job.kill()
            job.wait()


def words(directory: Path) -> list[str]:
    run = str(directory / "run")
    return [
        *("--model", "tiny", "--mock-data", "--fp64", "--lr", "1e-3", "--train-iters", str(STEPS), "--save", run),
        *("--load", run, "--distributed-timeout-minutes", "0.5", "--no-kernel-check"),
    ]


@pytest.mark.slow
def test_a_killed_rank_and_a_host_that_leaves(tmp_path: Path) -> None:
    """Three hosts, two after a rank's death, whose torchrun stays; one after the SIGTERM of another's torchrun."""
    plans = _plans(tmp_path)
    run = ["-m", "hetero_megatron", "run", "--elastic", "--plan", str(plans[3]), "--fallback-plan", str(plans[2])]
    hosts = Hosts(tmp_path, [1, 1, 1], *run, str(plans[1]), "--", *words(tmp_path))
    try:
        hosts.until(lambda: len(hosts.steps()) >= 5)
        assert [len(hosts.ranks(host)) for host in range(3)] == [1, 1, 1]
        os.kill(hosts.ranks(2)[0], signal.SIGKILL)
        hosts.until(lambda: "2 ranks went on" in hosts.said(0))
        hosts.until(lambda: len(hosts.steps()) >= 20)
        hosts.jobs[1].send_signal(signal.SIGTERM)
        hosts.until(lambda: "1 rank went on" in hosts.said(0))
        assert hosts.jobs[2].poll() is None, hosts.said(2)  # its worker ends with the job
        hosts.until(lambda: hosts.jobs[2].poll() is not None or "done: " in hosts.said(0))
        said = hosts.said(0)
    finally:
        hosts.kill()  # that of the first host would wait for five minutes for the one that has left
    epochs = re.findall(r"elastic: epoch \d: (.*); (\d) ranks? went on after step (\d+) from memory", said)
    assert [int(ranks) for _, ranks, _ in epochs] == [2, 1], said
    assert "lost rank 2 (host2, chip 0): SIGKILL" in epochs[0][0] and "left: it was told to leave" in epochs[1][0]
    found = hosts.steps()
    assert [row["step"] for row in found] == list(range(1, STEPS + 1)), said
    apart = tmp_path / "undisturbed"
    ends = [*(int(step) for _, _, step in epochs), STEPS]
    plans = _plans(apart, PLANS)
    expected = run_segments(apart, words(apart), [(plans[n], n, end) for n, end in zip((3, 2, 1), ends, strict=True)])
    for key in ("loss", "grad_norm", "consumed_samples"):
        assert [row[key] for row in found] == [row[key] for row in expected], key
    mine, theirs = final_state(tmp_path), final_state(apart)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine) and mine.keys() == theirs.keys()
