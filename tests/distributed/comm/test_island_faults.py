"""A rank that dies or freezes in one island is named by the ranks of the other, also where a device waits and not its
host: within the time-out, with exit code 3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.vendors import PLUGINS, build_emulated

PIPELINE = """
seq_length: 16
global_batch_size: 4
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 4
    stages: [{ranks: 0, layers: [0, 3]}, {ranks: 1, layers: [3, 6]}]
"""
WORDS = ["pretrain_gpt.py", "--model", "tiny", "--mock-data", "--log-interval", "1", "--train-iters", "1000000", "--lr",
         "1e-3", "--plan"]  # fmt: skip


def start(
    rank: int, platform: str, port: int, plan: Path, program: Sequence[str] = WORDS, vendor: str = ""
) -> subprocess.Popen[str]:
    """A rank of two; ``program`` ends with the flag of its plan; ``vendor``: of an emulated device."""
    told = {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "PYTHONPATH": str(PLUGINS / "emulated_vendor"), "OMP_NUM_THREADS": "1",
        "HETERO_PLUGINS": "hetero_emulated_vendor.plugin", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    if vendor:
        told["HETERO_EMULATED_VENDOR"] = vendor
    words = [sys.executable, *program, str(plan), "--platform", platform, "--distributed-timeout-minutes", "0.2"]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, env={**os.environ, **told}, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.timeout(1800)  # building the device takes minutes
@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGSTOP", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("platforms", "victim"),
    [
        pytest.param(("emulated_vendor", "emulated_vendor"), 1, marks=pytest.mark.slow, id="on one device library"),
        pytest.param(("emulated_vendor", "cpu"), 0, id="the device of a bridge"),
        pytest.param(("emulated_vendor", "cpu"), 1, marks=pytest.mark.slow, id="the host of a bridge"),
    ],
)
def test_a_lost_peer_is_named(platforms: tuple[str, str], victim: int, how: str, tmp_path: Path) -> None:
    build_emulated()
    (tmp_path / "plan.yaml").write_text(PIPELINE)
    port = free_port()
    ranks = [start(r, platform, port, tmp_path / "plan.yaml") for r, platform in enumerate(platforms)]
    try:
        printed = ranks[0].stdout
        assert printed is not None
        said = []
        while "iteration" not in (line := printed.readline()):
            assert line, "".join(said) + ranks[0].communicate()[1] + ranks[1].communicate()[1]
            said.append(line)
        ranks[victim].send_signal(getattr(signal, how))
        left = ranks[1 - victim]
        _, error = left.communicate(timeout=120)
        assert left.returncode == 3, error
        says = "is gone" if how == "SIGKILL" else "hangs"
        assert f"for rank {victim} and got no answer" in error and f"rank {victim} {says}" in error, error
        assert "Traceback" not in error
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
