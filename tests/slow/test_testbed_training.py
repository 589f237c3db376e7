"""pretrain_gpt.py on a testbed of two fast and two slow nodes: the loss is that of the run without a testbed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_megatron.testbed.machine import examine
from tests.support.paths import ROOT
from tests.support.programs import run_ranks

CLUSTER = "examples/clusters/testbed.yaml"
PLAN = """
version: 1
seq_length: 64
global_batch_size: 8
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 6
    stages:
      - {ranks: [0, 1], layers: [0, 4], tp: 2}
      - {ranks: 2, layers: [4, 6]}
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 3, layers: [0, 6]}]}
"""


@pytest.mark.slow
@pytest.mark.testbed
@pytest.mark.skipif(bool(examine().no_namespaces()), reason=f"testbed: {examine().no_namespaces()}")
def test_training_is_the_same_on_a_testbed(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    train = ["--plan", str(tmp_path / "plan.yaml"), "--model", "tiny", "--mock-data"]
    train += ["--train-iters", "4", "--lr", "1e-3", "--save"]
    testbed = [sys.executable, "-m", "hetero_megatron.cli.main", "testbed", "run", "--cluster", CLUSTER]
    start = [*testbed, "--chips", "clock", "--links", "namespaces", "--", sys.executable, "pretrain_gpt.py", *train]
    done = subprocess.run([*start, str(tmp_path / "testbed")], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    run_ranks(4, [*train, str(tmp_path / "forked")])
    losses = {}
    for name in ("testbed", "forked"):
        save = tmp_path / name
        lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [line["loss"] for line in lines if "loss" in line]
        emulated = [line["emulation"] for line in lines if "emulation" in line]
        assert [(e["chips"], e["links"]) for e in emulated] == [("clock", "namespaces")] * 2 * (name == "testbed")
        assert not emulated or emulated[1]["overrun"] >= 0 and emulated[1]["invalid"] in (True, False)
    assert len(losses["forked"]) == 4 and losses["testbed"] == pytest.approx(losses["forked"], rel=1e-6)
