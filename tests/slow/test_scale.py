"""One step on 32 ranks of this machine: 4 pipelines of unequal shape (`make test-scale`)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PLAN = """\
version: 1
seq_length: 64
global_batch_size: 16
schedule: 1f1b
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 6
    stages:
      - {ranks: "0-3", layers: [0, 1], tp: 4}
      - {ranks: "4-5", layers: [1, 2], tp: 2}
      - {ranks: "6-7", layers: [2, 4], tp: 2}
      - {ranks: "8-9", layers: [4, 6], tp: 2}
  - micro_batch_size: 2
    num_micro_batches: 3
    repeat: 1
    stages:
      - {ranks: "10-13", layers: [0, 3], tp: 2}
      - {ranks: "14-15", layers: [3, 6], tp: 2}
  - micro_batch_size: 1
    num_micro_batches: 2
    stages:
      - {ranks: "16-19", layers: [0, 2], tp: 4}
      - {ranks: "20-21", layers: [2, 4], tp: 2}
      - {ranks: "22-25", layers: [4, 6], tp: 4}
  - micro_batch_size: 2
    num_micro_batches: 1
    stages:
      - {ranks: "26-27", layers: [0, 1], tp: 2}
      - {ranks: 28, layers: [1, 2]}
      - {ranks: 29, layers: [2, 4]}
      - {ranks: "30-31", layers: [4, 6], tp: 2}
"""


@pytest.mark.slow
@pytest.mark.scale
@pytest.mark.timeout(900)
def test_one_step_on_32_ranks(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "32", "pretrain_gpt.py"]
    command += ["--plan", str(plan), "--model", "tiny", "--mock-data", "--train-iters", "1", "--lr", "1e-3"]
    command += ["--save", str(tmp_path / "run")]
    kept = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, cwd=ROOT, env=kept, **pipes)
    output = done.stdout.decode(errors="replace")
    assert done.returncode == 0, output[-4000:]
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert metrics.count('"loss"') == 1, output[-4000:]
