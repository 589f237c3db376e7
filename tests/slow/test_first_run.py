"""The command for the day an accelerator is there, whole, at a small size: on the CPU and on the emulated device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.vendors import PLUGINS, build_emulated


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("platform", ["cpu", "emulated_vendor"])
def test_every_part_runs_and_is_on_the_page(platform: str, tmp_path: Path) -> None:
    environment = dict(os.environ)
    if platform == "emulated_vendor":
        build_emulated()
        environment |= {
            "PYTHONPATH": str(PLUGINS / "emulated_vendor"), "HETERO_PLUGINS": "hetero_emulated_vendor.plugin",
        }  # fmt: skip
    out, trace = tmp_path / "page.md", tmp_path / "trace.json"
    command = [
        sys.executable, "benchmarks/gpu/first_run.py", "--size", "small", "--platform", platform, "--seconds", "2400",
        "--out", str(out), "--trace", str(trace),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = out.read_text()
    for title in ("Training", "Parity with transformers", "Conformance", "Attention"):
        assert f"## {title}" in page
    assert "| fp32 | 20 |" in page and "| bf16 | 20 |" in page
    assert "| ours |" in page and "| transformers |" in page and "predicted" in page
    assert trace.stat().st_size > 0
