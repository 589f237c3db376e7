"""Jobs of ``hetero-megatron run --testbed`` that tests disturb, and what must not be left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero_megatron.cli.main import main as hetero_megatron
from hetero_megatron.testbed import cgroups, process, state
from hetero_megatron.testbed.machine import examine
from tests.distributed.training.test_supervise import THREE, TWO
from tests.support.faults import children
from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT
from tests.testbed.test_launch import namespaces_in_use, netns_of

LINKS = "paced" if examine().no_namespaces() else "namespaces"
CLUSTER = """
version: 1
nodes:
  - {name: fast, chip: big}
  - {name: slow, count: 2, chip: small}
chips:
  big:   {memory: 2 GiB, emulate: {speed: 0.6}}
  small: {memory: 1 GiB, emulate: {speed: 0.3}}
links:
  inter_node: {bandwidth: 50 MB/s}
  pairs: [{between: [fast, slow], bandwidth: 25 MB/s}]
"""
HETERO = [sys.executable, "-m", "hetero_megatron.cli.main"]
STEPS = 14
TRAIN = ["--model", "tiny", "--mock-data", "--fp64", "--lr", "1e-3", "--lr-decay-style", "constant"]


class TestbedRun:
    """A training run on the cluster above, under the plan for three ranks, to be disturbed.

    Args:
        options: of ``hetero-megatron run``; flags: of ``pretrain_gpt.py``.
    """

    __test__ = False  # not a test, whatever pytest thinks of its name

    def __init__(self, path: Path, options: list[str], flags: list[str]) -> None:
        for name, text in (("cluster", CLUSTER), ("three", THREE), ("two", TWO)):
            (path / f"{name}.yaml").write_text(text)
        words = [*HETERO, "run", "--testbed", "--cluster", str(path / "cluster.yaml")]
        words += ["--plan", str(path / "three.yaml"), *options, "--"]
        words += ["--save", str(path / "run"), "--load", str(path / "run"), *TRAIN, *flags]
        pipe = subprocess.PIPE
        self.job = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=pipe, stderr=subprocess.STDOUT, text=True)
        self._beds: list[state.Testbed] = []
        self._namespaces: set[str] = set()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 600
        while not condition() and self.job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def fault(self, *words: str) -> None:
        """On the testbed that this job's launcher has started."""
        if not self._beds:
            mine = [self.job.pid, *children(self.job.pid)]  # an elastic run's launcher is the testbed's
            self._beds = [bed for bed in state.all_testbeds() if bed.launcher in mine]
            assert len(self._beds) == 1, (self._beds, mine)
            pid, home = self._beds[0].launcher, netns_of("/proc/self/ns/net")
            self._namespaces = {netns_of(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")} - {"", home}
        # In this process: a new interpreter takes as long as some steps, and the run is short.
        assert hetero_megatron(["testbed", "fault", "--testbed", self._beds[0].id, *words]) == 0

    def finish(self, code: int = 0) -> str:
        """What it said; asserts that it ended well."""
        try:
            output = self.job.communicate(timeout=900)[0]
            assert self.job.returncode == code, output
            return output
        finally:
            if self.job.poll() is None:
                self.job.send_signal(signal.SIGTERM)
                self.job.wait()

    def left(self) -> dict[str, Any]:
        """What is still there of the testbed that faults were made on."""
        folders = {str(bed.directory) for bed in self._beds}
        found = {
            "processes": [pid for pid, where in process.marked().items() if where in folders],
            "namespaces": sorted(self._namespaces & namespaces_in_use()),
            "cgroups": [str(path) for bed in self._beds for path in cgroups.find_groups(bed.id)],
            "directories": [folder for folder in folders if Path(folder).exists()],
        }
        return {kind: value for kind, value in found.items() if value}


def metrics(path: Path) -> list[dict[str, Any]]:
    """Those of steps."""
    lines = [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]
