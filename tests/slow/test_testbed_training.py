"""pretrain_gpt.py on a testbed of two fast and two slow nodes: the loss is that of the run without a testbed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_megatron.testbed.machine import examine

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = "examples/clusters/testbed.yaml"
PLAN = """
version: 1
seq_length: 64
global_batch_size: 8
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 6
    stages:
      - {ranks: [0, 1], layers: [0, 4], tp: 2, chip: big}
      - {ranks: 2, layers: [4, 6], chip: small}
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 3, layers: [0, 6], chip: small}]}
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(examine().no_namespaces()), reason=f"testbed: {examine().no_namespaces()}")
def test_training_is_the_same_on_a_testbed(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    losses = {}
    for links in ("namespaces", "none"):
        save = tmp_path / links
        run = [sys.executable, "-m", "hetero_megatron.cli.main", "testbed", "run", "--cluster", CLUSTER]
        run += ["--chips", "none", "--links", links, "--log-dir", str(tmp_path / f"log-{links}"), "--"]
        run += [sys.executable, "pretrain_gpt.py", "--cluster", CLUSTER, "--plan", str(tmp_path / "plan.yaml")]
        run += ["--model", "tiny", "--mock-data", "--train-iters", "4", "--lr", "1e-3", "--save", str(save)]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        losses[links] = [json.loads(line)["loss"] for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert len(losses["none"]) == 4 and losses["namespaces"] == pytest.approx(losses["none"], rel=1e-6)
