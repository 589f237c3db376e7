"""Kill runs: a rank of a job gets SIGKILL at a random moment; the job must end as if nothing had happened.

The job is torchrun's, or that of a small agent here that does the same (restarts all ranks when one failed) with ranks
forked from a process that has imported torch: most of a short run's time is imports.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.pool import PRELOAD
from tests.support.ports import free_port
from tests.support.programs import ENVIRONMENT, TORCHRUN

STEPS = 12
OFFLOADED = """
version: 1
seq_length: 48
global_batch_size: 4
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 3
    stages:
      - {ranks: [0, 1], layers: [0, 4], tp: 2, tp_split: [3, 1], activations: {offload: all}}
      - {ranks: 2, layers: [4, 6]}
  - micro_batch_size: 1
    num_micro_batches: 1
    stages:
      - {ranks: 3, layers: [0, 6], recompute: elementwise, activations: {offload: {first: 4}, ahead: 2}}
"""
DIVIDED = """
version: 1
seq_length: 48
global_batch_size: 4
pipelines:
  - micro_batch_size: 2
    num_micro_batches: 2
    stages:
      - {ranks: [0, 1], layers: [0, 2], dp_split: [1, 1], weights: {shard: [3, 1]}}
      - {ranks: [2, 3], layers: [2, 6], dp_split: [1, 1], weights: {shard: [0, 1], gather: step}}
"""
PLANS = {"offloaded": OFFLOADED, "divided": DIVIDED}  # activations away, and weights divided unevenly


def words(directory: Path, plan: str) -> list[str]:
    """Flags of a run of one of ``PLANS`` that saves after every step and goes on from the latest checkpoint."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "plan.yaml").write_text(PLANS[plan])
    run = str(directory / "run")
    return [
        *("--plan", str(directory / "plan.yaml"), "--model", "tiny", "--mock-data", "--fp64", "--lr", "1e-3"),
        *("--train-iters", str(STEPS), "--save", run, "--save-interval", "1", "--load", run),
        *("--keep-checkpoints", "3", "--distributed-timeout-minutes", "0.5"),
    ]


def start(directory: Path, restarts: int, plan: str) -> subprocess.Popen[str]:
    """The run under torchrun."""
    launch = [*TORCHRUN, "--nproc-per-node", "4", "--max-restarts", str(restarts), "--standalone"]
    launch += ["pretrain_gpt.py", *words(directory, plan)]
    pipe = subprocess.PIPE
    return subprocess.Popen(launch, cwd=ROOT, env=ENVIRONMENT, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def _rank(flags: list[str], environment: dict[str, str], output: str) -> None:
    """In a forked process: what ``pretrain_gpt.py`` does."""
    os.environ |= environment
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    os.chdir(ROOT)
    from hetero_megatron.cli.pretrain import main

    code = main(flags)
    sys.stdout.flush()
    os._exit(code)


class ForkedJob:
    """Four ranks and an agent that restarts all of them when one failed, as torchrun does; poll it often.

    Args:
        asks: survivors get SIGTERM when one has failed (as from torchrun), else they must notice by themselves.
    """

    def __init__(self, directory: Path, restarts: int, plan: str, asks: bool = True) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._flags, self._log = words(directory, plan), directory / "output"
        self._left, self._asks, self._round = restarts, asks, -1
        self.returncode: int | None = None
        self.pids: list[int] = []
        self._start()

    def _start(self) -> None:
        self._round += 1
        port = str(free_port())
        shared = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RESTART_COUNT": str(self._round)}
        self._ranks = []
        for rank in range(4):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = self._context.Process(target=_rank, args=(self._flags, environment, str(self._log)), daemon=True)
            process.start()
            self._ranks.append(process)
        self.pids = [process.pid for process in self._ranks]  # type: ignore[misc]
        self._deadline = float("inf")

    def poll(self) -> int | None:
        """Looks after the ranks; the exit code when the job is over."""
        codes = [process.exitcode for process in self._ranks]
        if self.returncode is not None or all(code == 0 for code in codes):
            self.returncode = self.returncode or 0
        elif any(codes):  # one has failed
            if self._deadline == float("inf"):
                self._deadline = time.monotonic() + 120
                for process in self._ranks if self._asks else ():
                    process.terminate()
            if all(code is not None for code in codes) or time.monotonic() > self._deadline:
                hangs = [rank for rank, process in enumerate(self._ranks) if process.exitcode is None]
                self.kill()
                if hangs or not self._left:
                    self._log.open("a").write(f"gave up: codes {codes}, ranks {hangs} hang\n")
                    self.returncode = 1
                else:
                    self._left -= 1
                    self._start()
        return self.returncode

    def workers(self) -> list[int]:
        return self.pids

    def output(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        for process in self._ranks:
            process.kill()
            process.join()


class TorchrunJob:
    """The same under torchrun."""

    def __init__(self, directory: Path, restarts: int, plan: str) -> None:
        self._job = start(directory, restarts, plan)
        self._text: str | None = None

    @property
    def returncode(self) -> int | None:
        return self._job.returncode

    def poll(self) -> int | None:
        return self._job.poll()

    def workers(self) -> list[int]:
        return children(self._job.pid)

    def output(self) -> str:
        if self._text is None:
            self._text = self._job.communicate()[0]
        return self._text

    def kill(self) -> None:
        for pid in [self._job.pid, *children(self._job.pid)]:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        self._job.wait()


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


def kill_run(directory: Path, seed: int, plan: str, under_torchrun: bool = False) -> Killed:
    """One disturbed run; asserts that it ended well, and that nothing is left of it."""
    rng = random.Random(seed)
    asks = rng.random() < 0.5
    job = TorchrunJob(directory, 3, plan) if under_torchrun else ForkedJob(directory, 3, plan, asks)
    seen: set[int] = set()
    try:
        moment = rng.choice(["start", "step", "step", "save", "save"])
        _wait_for(moment, directory / "run", rng, job)
        workers = job.workers()
        seen |= set(workers)
        rank = rng.randrange(4)
        with suppress(ProcessLookupError, IndexError):  # the job is over, or its ranks are just being started
            os.kill(workers[rank], signal.SIGKILL)
        deadline = time.monotonic() + 900
        while job.poll() is None and time.monotonic() < deadline:
            seen |= set(job.workers())
            time.sleep(0.1)
        assert job.poll() is not None, f"seed {seed}: the job hangs"
        output = job.output()
        assert job.returncode == 0, f"seed {seed}, {moment}, rank {rank}:\n{output}"
        left = [pid for pid in seen if Path(f"/proc/{pid}").exists()]
        assert not left, f"seed {seed}: orphans {left}"
        leftovers = list((directory / "run").glob("*.incomplete"))
        assert not leftovers, f"seed {seed}: {leftovers}"
        return Killed(moment, rank, output, losses(directory))
    finally:
        job.kill()


def _wait_for(moment: str, run: Path, rng: random.Random, job: TorchrunJob | ForkedJob) -> None:
    """Until the job starts, has made some steps, or is writing a checkpoint."""
    deadline, steps = time.monotonic() + 600, rng.randint(1, STEPS - 4)
    while time.monotonic() < deadline and job.poll() is None:
        metrics = run / "metrics.jsonl"
        done = metrics.read_text().count("\n") if metrics.exists() else 0
        if moment == "start" and len(job.workers()) == 4:
            time.sleep(rng.uniform(0, 4))
            return
        if done >= steps and (moment == "step" or list(run.glob("*.incomplete"))):
            time.sleep(rng.uniform(0, 0.02))
            return
        time.sleep(0.002)
