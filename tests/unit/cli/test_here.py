"""``--nproc-per-node N``: ranks on this host, and a refusal that is one line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hetero_megatron.cli.start import asks_for_ranks, start_ranks
from tests.support.paths import ROOT

WORDS = [
    "--model", "tiny", "--mock-data", "--seq-length", "16", "--micro-batch-size", "1", "--train-iters", "1",
    "--lr", "1e-3",
]  # fmt: skip


def test_a_refusal_is_one_line(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {
        "flags of ranks": ["--nproc-per-node", "2", *WORDS, "--adam-beta1", "2", "--bogus", "1"],
        "a plan for others": ["--nproc-per-node=3", *WORDS, "--tensor-model-parallel-size", "2"],
        "no number": ["--nproc_per_node", "gpu", *WORDS],
        "twice": ["--nproc-per-node", "2", "--nproc-per-node", "2", *WORDS],
        "nothing": [*WORDS, "--nproc-per-node"],
    }
    for name, words in bad.items():
        assert asks_for_ranks(words) and start_ranks("pretrain", words) == 2
        err = capfd.readouterr().err
        assert err.startswith("error: ") and len(err.splitlines()) == 1, (name, err)
    assert not asks_for_ranks(WORDS) and not asks_for_ranks(["--nproc-per-node", "2", "--help"])
    monkeypatch.setenv("RANK", "0")
    assert start_ranks("pretrain", ["--nproc-per-node", "2", *WORDS]) == 2
    assert "RANK" in capfd.readouterr().err


@pytest.mark.slow
def test_what_ranks_refuse_is_one_line_too() -> None:
    """Known only to ranks: no such platform."""
    command = [sys.executable, "-m", "hetero_megatron", "pretrain", "--nproc-per-node", "2", *WORDS,
               "--platform", "nosuch"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "nosuch" in done.stderr, done.stderr
