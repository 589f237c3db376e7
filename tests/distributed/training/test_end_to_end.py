"""The program as users run it: text in, losses out, the same whatever the plan."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT, SINGLE, Program, command, run_ranks
from tests.support.selection import quick

MODEL_AND_DATA = ["--model", "tiny", "--data-path", "stdlib", "--split", "95,5,0", "--fp64", "--seed", "7"]
PACKING = ["--eod-mask-loss", "--reset-attention-mask", "--reset-position-ids"]
# 2 + 2 + 4 + 6 samples in four steps.
LENGTH = ["--train-samples", "14", "--rampup-batch-size", "2", "2", "6", "--eval-interval", "2", "--eval-iters", "1"]
RATES = ["--lr", "1e-3", "--lr-warmup-samples", "2", "--lr-decay-style", "cosine", "--weight-decay", "0.1"]
ASYMMETRIC = """
version: 1
seq_length: 48
global_batch_size: 6
pipelines:
  - micro_batch_size: 2
    num_micro_batches: 2
    stages:
      - {ranks: [0, 1], layers: [0, 4], tp: 2, tp_split: [3, 1], recompute: {first: 1}}
      - {ranks: 2, layers: [4, 6]}
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 3, layers: [0, 6], recompute: selective}]}
"""
def train(directory: Path, plan: str, ranks: int, launcher: str = "none") -> list[dict[str, Any]]:
    """Lines of metrics.jsonl."""
    directory.mkdir()
    (directory / "plan.yaml").write_text(plan)
    words = ["--plan", str(directory / "plan.yaml"), "--save", str(directory / "run")]
    words += [*MODEL_AND_DATA, *PACKING, *LENGTH, *RATES]
    if launcher == "none":
        run_ranks(ranks, words)
    else:
        pipe = subprocess.PIPE
        done = subprocess.run([*command(ranks), *words], cwd=ROOT, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Warning" not in done.stderr, done.stderr
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("launcher", quick(["none", "torchrun"], [], ["torchrun"]))
def test_an_asymmetric_run_equals_a_single_rank(launcher: str, tmp_path: Path) -> None:
    """Ramp-up, evaluation, packed documents and masked tokens included; fp64."""
    one = train(tmp_path / "one", SINGLE, 1)
    four = train(tmp_path / "four", ASYMMETRIC, 4, launcher)
    assert [r["global_batch_size"] for r in one if "loss" in r] == [2, 2, 4, 6]
    assert len(one) == len(four) >= 6
    for a, b in zip(one, four, strict=True):
        for key in ("step", "consumed_samples", "tokens", "lr", "global_batch_size"):
            assert a.get(key) == b.get(key)
        assert a.keys() == b.keys()
        for key in {"loss", "grad_norm", "validation_loss"} & a.keys():
            assert a[key] == pytest.approx(b[key], rel=1e-11)


def test_a_signal_ends_the_run_after_a_step(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(SINGLE)
    words = ["--plan", str(tmp_path / "plan.yaml"), "--save", str(tmp_path / "run"), "--model", "tiny", "--mock-data"]
    words += ["--train-iters", "100000", "--log-interval", "1", "--lr", "1e-3", "--exit-signal-handler"]
    process = Program(words)
    process.until(" iteration ")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    assert "received SIGTERM" in out
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"stopped at step {last['step']}" in out
