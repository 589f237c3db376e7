"""Damaged and hostile inputs of a fixed seed: refused, every one (``make test-fuzz`` for more of them)."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_hostile_inputs_are_refused() -> None:
    words = [sys.executable, "-m", "tests.fuzz", "-n", "120", "--seed", "7"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
