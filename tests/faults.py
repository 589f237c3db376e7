"""Kill runs: a rank of a torchrun job gets SIGKILL at a random moment; the job must end as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.test_end_to_end import ENVIRONMENT, ROOT

STEPS = 24
PLAN = """
version: 1
seq_length: 48
global_batch_size: 4
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 3
    stages:
      - {ranks: [0, 1], layers: [0, 4], tp: 2, tp_split: [3, 1]}
      - {ranks: 2, layers: [4, 6]}
  - {micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 3, layers: [0, 6]}]}
"""


def start(directory: Path, restarts: int, *more: str) -> subprocess.Popen[str]:
    """A torchrun job that saves after every step and goes on from the latest checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.yaml").write_text(PLAN)
    words = [".venv/bin/torchrun", "--nproc-per-node", "4", "--max-restarts", str(restarts), "--standalone"]
    words += ["pretrain_gpt.py", "--plan", str(directory / "plan.yaml"), "--model", "tiny", "--mock-data", "--fp64"]
    words += ["--train-iters", str(STEPS), "--lr", "1e-3", "--save", str(directory / "run"), "--save-interval", "1"]
    words += [
        "--load",
        str(directory / "run"),
        "--keep-checkpoints",
        "3",
        "--distributed-timeout-minutes",
        "0.5",
        *more,
    ]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def children(pid: int) -> list[int]:
    """Processes whose parent is ``pid``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return sorted(found)


def losses(directory: Path) -> dict[int, float]:
    """By step; for a step that was run twice the later line counts."""
    lines = (json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@dataclass
class Killed:
    moment: str
    rank: int
    output: str
    final: dict[int, float]


def kill_run(directory: Path, seed: int) -> Killed:
    """One disturbed run; asserts that it ended well, and that nothing is left of it."""
    rng = random.Random(seed)
    job = start(directory, restarts=3)
    seen: set[int] = set()
    try:
        moment = rng.choice(["start", "step", "step", "save", "save"])
        _wait_for(moment, directory / "run", rng, job)
        workers = children(job.pid)
        seen |= set(workers)
        rank = rng.randrange(4)
        if len(workers) == 4:
            os.kill(workers[rank], signal.SIGKILL)
        deadline = time.monotonic() + 240
        while job.poll() is None and time.monotonic() < deadline:
            seen |= set(children(job.pid))
            time.sleep(0.2)
        assert job.poll() is not None, f"seed {seed}: the job hangs"
        output = job.communicate()[0]
        assert job.returncode == 0, f"seed {seed}, {moment}, rank {rank}:\n{output}"
        left = [pid for pid in seen if Path(f"/proc/{pid}").exists()]
        assert not left, f"seed {seed}: orphans {left}"
        leftovers = list((directory / "run").glob("*.incomplete"))
        assert not leftovers, f"seed {seed}: {leftovers}"
        return Killed(moment, rank, output, losses(directory))
    finally:
        for pid in [job.pid, *children(job.pid)]:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        job.wait()


def _wait_for(moment: str, run: Path, rng: random.Random, job: subprocess.Popen[str]) -> None:
    """Until the job starts, has made some steps, or is writing a checkpoint."""
    deadline, steps = time.monotonic() + 120, rng.randint(1, STEPS - 4)
    while time.monotonic() < deadline and job.poll() is None:
        metrics = run / "metrics.jsonl"
        done = metrics.read_text().count("\n") if metrics.exists() else 0
        if moment == "start" and len(children(job.pid)) == 4:
            time.sleep(rng.uniform(0, 4))
            return
        if done >= steps and (moment == "step" or list(run.glob("*.incomplete"))):
            time.sleep(rng.uniform(0, 0.02))
            return
        time.sleep(0.002)
