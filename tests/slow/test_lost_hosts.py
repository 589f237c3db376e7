"""``hetero-megatron run --via ssh`` over namespaces as hosts: hosts are lost, cut off and come back; losses stay."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.namespace_hosts import LAUNCHER, NamespaceHosts, missing
from tests.support.programs import inside

pytestmark = [pytest.mark.slow, pytest.mark.testbed("hosts")]
STEPS = 100_000  # until it is told to stop
PLAN = """
version: 1
seq_length: 48
global_batch_size: {batch}
pipelines:
  - micro_batch_size: 1
    num_micro_batches: {batch}
    stages: [{stages}]
"""
LAYERS = {3: [(0, 3), (3, 5), (5, 6)], 2: [(0, 4), (4, 6)], 1: [(0, 6)]}
WORDS = ["--model", "tiny", "--mock-data", "--fp64", "--lr", "1e-3", "--lr-decay-style", "constant"]


def plan(folder: Path, ranks: int, batch: int = 4) -> Path:
    stages = ", ".join(f"{{ranks: {r}, layers: [{a}, {b}]}}" for r, (a, b) in enumerate(LAYERS[ranks]))
    path = folder / f"plan-{ranks}.yaml"
    path.write_text(PLAN.replace("{stages}", stages).replace("{batch}", str(batch)))
    return path


def alone(folder: Path, steps: int, *words: str, batch: int = 4) -> list[float]:
    """Losses of one process."""
    more = ["--seq-length", "48", "--global-batch-size", str(batch), "--micro-batch-size", "1", "--save", str(folder)]
    inside([*WORDS, *more, "--train-iters", str(steps), "--save-interval", "0", *words])
    return losses(folder)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[NamespaceHosts]:
    """With a real sshd where it is installed."""
    if reason := missing():
        pytest.skip(reason)
    with NamespaceHosts(tmp_path, 3, not missing(sshd=True)) as found:
        yield found


def losses(directory: Path) -> list[float]:
    path = directory / "metrics.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return [row["loss"] for row in rows if "loss" in row]


class Run:
    """A job on three hosts with one chip each, and what it said."""

    def __init__(
        self, hosts: NamespaceHosts, folder: Path, *more: str, steps: int = STEPS, words: Sequence[str] = (),
        batch: int = 4,
    ) -> None:  # fmt: skip
        self.directory = folder / "run"
        self.said = ""
        command = [sys.executable, "-m", "hetero_megatron.cli.main", "run", "--via", "ssh", "--ssh-command", hosts.ssh]
        files = ["--cluster", str(hosts.cluster([1, 1, 1])), "--plan", str(plan(folder, 3, batch))]
        files += ["--fallback-plan", str(plan(folder, 2, batch)), str(plan(folder, 1, batch))]
        limits = ["--lease", "6", "--grace", "20", "--max-restarts", "1000", *more]
        save = ["--save", str(self.directory), "--load", str(self.directory), "--save-interval", "10"]
        flags = [*WORDS, *save, "--train-iters", str(steps), "--distributed-timeout-minutes", "0.1", *words]
        self.job = hosts.start([*command, *files, "--on-failure", "replan", *limits, "--", *flags])
        threading.Thread(target=self._read, args=(self.job.stdout,), daemon=True).start()
        threading.Thread(target=self._read, args=(self.job.stderr,), daemon=True).start()

    def _read(self, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            self.said += line

    def until(self, step: int, seconds: float = 150) -> None:
        end = time.monotonic() + seconds
        while len(losses(self.directory)) < step:
            assert self.job.poll() is None and time.monotonic() < end, self.said
            time.sleep(0.02)

    def forget(self, text: str) -> None:
        """What was said of it does not count for the next ``until_said``."""
        self.said = self.said.replace(text, "-")

    def until_said(self, text: str, seconds: float = 150, times: int = 1) -> None:
        end = time.monotonic() + seconds
        while self.said.count(text) < times:
            assert self.job.poll() is None and time.monotonic() < end, self.said
            time.sleep(0.05)

    def stop(self) -> None:
        """After some more steps, by a signal to the launcher."""
        self.until(len(losses(self.directory)) + 10)
        self.job.send_signal(signal.SIGTERM)
        self.wait()

    def wait(self, seconds: float = 300) -> None:
        try:
            self.job.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.job.kill()
            raise AssertionError(self.said) from None
        time.sleep(0.5)
        assert self.job.returncode == 0, self.said


def test_a_host_that_loses_its_power_and_comes_back(hosts: NamespaceHosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, "--rejoin", "2")
    run.until(30)
    hosts.power_off(2)
    run.until_said("without host2, 2 ranks left")
    run.until(len(losses(run.directory)) + 10)
    hosts.boot(2)
    run.until_said("with host2, 3 ranks")
    run.stop()
    found = losses(run.directory)
    assert found == pytest.approx(alone(tmp_path / "alone", len(found)), rel=1e-9)
    assert hosts.no_orphans() == []


@pytest.mark.exhaustive
def test_two_hosts_that_are_cut_off_from_each_other(hosts: NamespaceHosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, "--rejoin", "2")
    run.until(30)
    hosts.cut(0, 1)
    run.until_said("host0 and host1 cannot reach each other")
    run.until_said("without host1, 2 ranks left")
    run.until(len(losses(run.directory)) + 10)
    hosts.mend(0, 1)
    run.until_said("with host1, 3 ranks")
    run.stop()
    found = losses(run.directory)
    assert found == pytest.approx(alone(tmp_path / "alone", len(found)), rel=1e-9)
    assert hosts.no_orphans() == []


@pytest.mark.exhaustive
@pytest.mark.timeout(0)
def test_many_losses(tmp_path: Path) -> None:
    """``LOSSES=50 SEED=1 pytest -m slow tests/slow/test_lost_hosts.py -k many``: one host after another is lost."""
    if reason := missing():
        pytest.skip(reason)
    count, seed = int(os.environ.get("LOSSES", "2")), int(os.environ.get("SEED", "1"))
    dice, steps = random.Random(seed), 80 * count
    sgd = ["--optimizer", "sgd"]  # over a thousand steps Adam amplifies what another order of sums changes
    with NamespaceHosts(tmp_path, 3) as hosts:
        run = Run(hosts, tmp_path, "--rejoin", "1", steps=steps, words=sgd)
        for number in range(count):
            run.until(len(losses(run.directory)) + dice.randint(3, 20), 300)
            gone = dice.randrange(3)
            hosts.power_off(gone)
            run.until_said("2 ranks left", 300, number + 1)
            run.until(len(losses(run.directory)) + dice.randint(1, 10), 300)
            hosts.boot(gone)
            run.until_said(f"with host{gone}, 3 ranks", 300)
            run.forget(f"with host{gone}, 3 ranks")
        run.wait(300 + 60 * count)
        assert losses(run.directory) == pytest.approx(alone(tmp_path / "alone", steps, *sgd), rel=1e-9)
        assert hosts.no_orphans() == []


def test_hosts_join_an_elastic_run_and_lose_their_power(hosts: NamespaceHosts, tmp_path: Path) -> None:
    """From one host to three, and to two when one of them is off; the losses are one process's throughout."""
    directory = tmp_path / "run"
    files = ["--plan", str(plan(tmp_path, 1)), "--fallback-plan", str(plan(tmp_path, 2)), str(plan(tmp_path, 3))]
    command = [sys.executable, "-m", "hetero_megatron.cli.main", "run"]
    elastic = ["--elastic", "--address", LAUNCHER, "--least-speed", "0", "--grace", "10", *files, "--", *WORDS]
    save = ["--save", str(directory), "--load", str(directory), "--peer-replicas-every", "1"]
    limits = ["--train-iters", "100000", "--distributed-timeout-minutes", "0.1"]
    job = hosts.start([*command, *elastic, *save, *limits])
    said: list[str] = []
    for stream in (job.stdout, job.stderr):
        threading.Thread(target=lambda lines: said.extend(lines), args=(stream,), daemon=True).start()

    def until(text: str) -> None:
        end = time.monotonic() + 150
        while not any(text in line for line in said):
            assert job.poll() is None and time.monotonic() < end, "".join(said)
            time.sleep(0.05)

    joining = []
    until("training starts at step 0")  # whoever asks before the job is there is refused
    for index in range(2):
        enter = ["nsenter", f"--net={hosts.network.path(hosts.network.nodes[index])}"]
        joining.append(subprocess.Popen([*enter, *command, "--join", str(directory), "--node", f"host{index}"]))
        until(f"host{index} joined (1 rank); {index + 2} ranks went on")
    hosts.power_off(0)
    until("2 ranks went on after step")
    done = len(losses(directory))
    while len(losses(directory)) < done + 3:
        assert job.poll() is None, "".join(said)
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 0 and joining[1].wait(60) == 0, "".join(said)
    joining[0].kill()
    found = losses(directory)
    assert found == pytest.approx(alone(tmp_path / "alone", len(found)), rel=1e-9)
