"""How many files a newcomer goes through who follows a run: a rank of a pipeline up to its first send, and a search."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.programs import ENVIRONMENT

PLAN = """
version: 1
seq_length: 128
global_batch_size: 4
pipelines:
  - {micro_batch_size: 1, num_micro_batches: 4, stages: [{ranks: 0, layers: [0, 4]}, {ranks: 1, layers: [4, 6]}]}
"""
RUN = ("--model", "tiny", "--mock-data", "--train-iters", "1", "--lr", "1e-3")
# What it takes today; lower them with the walk.
ENTERED_BY_A_RANK, IMPORTED_BY_A_RANK, ENTERED_BY_A_SEARCH = 110, 250, 101


def start(out: Path, until: str, *words: str, **environment: str) -> subprocess.Popen[bytes]:
    walk = [sys.executable, "-m", "tests.support.walk", str(out), until, *words]
    return subprocess.Popen(walk, cwd=ROOT, env={**ENVIRONMENT, **environment}, stdout=subprocess.DEVNULL)


def counts(out: Path) -> tuple[int, int]:
    seen = json.loads(out.read_text())
    return len(seen["entered"]), len(seen["imported"])


@pytest.mark.slow
def test_a_rank_to_its_first_send(tmp_path: Path) -> None:
    """The aim is 110 files entered, and 300 loaded."""
    (tmp_path / "plan.yaml").write_text(PLAN)
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    words = ("pretrain_gpt.py", "--plan", str(tmp_path / "plan.yaml"), *RUN)
    outs = [tmp_path / f"{rank}.json" for rank in range(2)]
    ranks = [start(outs[r], "isend", *words, RANK=str(r), LOCAL_RANK=str(r), **job) for r in range(2)]
    try:
        assert ranks[0].wait(300) == 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    entered, imported = counts(outs[0])
    assert 100 < entered <= ENTERED_BY_A_RANK and imported <= IMPORTED_BY_A_RANK


@pytest.mark.slow
def test_a_search_of_six_chips(tmp_path: Path) -> None:
    """The aim is 90 files entered."""
    cluster = ROOT / "examples" / "clusters" / "mixed_small.yaml"
    model = ("--model", "llama2-7b", "--seq-length", "2048", "--global-batch-size", "32")
    words = ("plan", *model, "--cluster", str(cluster))
    search = start(tmp_path / "walk.json", "-", "hetero-megatron", *words, "--out", str(tmp_path / "plan.yaml"))
    assert search.wait(300) == 0
    entered, _ = counts(tmp_path / "walk.json")
    assert 50 < entered <= ENTERED_BY_A_SEARCH
