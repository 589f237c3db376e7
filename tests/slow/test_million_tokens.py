"""The long-sequence benchmark at a size for CI."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.selection import quick
from tests.support.vendors import PLUGINS, build_emulated


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_65536_tokens_on_four_ranks_agree_with_one() -> None:
    command = [sys.executable, "benchmarks/million_tokens.py", "--tokens", "65536"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["loss_error"] < 1e-6 and result["prefix_logits"] < 1e-5 and result["gradients"] < 1e-4
    # Ranks 2 and 3 own a third of what 0 and 1 do, and no rank holds what one rank alone does.
    assert max(result["peak_mib"]) < result["one_rank_peak_mib"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("platform", quick(["cpu", "emulated_vendor"], ["cpu"], []))
def test_it_runs_through_plugins_and_refuses_quadratic_attention(platform: str, forked_programs: Path) -> None:
    environment = dict(os.environ)
    if platform == "emulated_vendor":
        build_emulated()
        environment |= {
            "PYTHONPATH": str(PLUGINS / "emulated_vendor"), "HETERO_PLUGINS": "hetero_emulated_vendor.plugin",
        }  # fmt: skip
    script = [forked_programs / "python", "benchmarks/million_tokens.py", "--platform", platform, "--check", "256"]
    command = [*script, "--prefix", "64", "--kernels", "attention=reference", "--tokens"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True)

    done = run("512", "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["device"].startswith("emu" if platform == "emulated_vendor" else "cpu")
    assert result["loss_error"] < 1e-6 and result["gradients"] < 1e-4 and min(result["peak_mib"]) > 0
    done = run("8192", "--ranks", "1")
    assert done.returncode != 0 and "kernels.attention = reference" in done.stderr and "Traceback" not in done.stderr
