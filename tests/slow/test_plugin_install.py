"""``plugins new acme && pip install -e acme`` in a new environment: found by its entry point, and trains. That it
conforms and passes its own tests is run by docs/vendor_plugin.md."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(command: list[str], folder: Path) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HETERO_PLUGINS", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=kept, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_a_new_plugin_is_installed_found_and_trains(tmp_path: Path) -> None:
    run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], tmp_path)
    python = str(tmp_path / "env" / "bin" / "python")
    inner = Path(run([python, "-c", "import site; print(site.getsitepackages()[0])"], tmp_path).strip())
    paths = [*site.getsitepackages(), str(ROOT), str(ROOT / "kernels"), str(ROOT / "plugins")]
    (inner / "outer.pth").write_text("\n".join(paths) + "\n")
    hetero = [python, "-m", "hetero_megatron.cli.main", "plugins"]
    run([*hetero, "new", "acme"], tmp_path)
    run([python, "-m", "pip", "install", "--quiet", "--no-build-isolation", "-e", "acme"], tmp_path)
    listed = json.loads(run([*hetero, "list", "--json"], tmp_path))
    (mine,) = [p for p in listed["plugins"] if p["name"] == "acme"]
    assert mine["origin"] == "entry point" and mine["version"] == "0.1.0" and not mine["error"]
    command = [python, str(ROOT / "pretrain_gpt.py"), "--platform", "acme", "--model", "tiny", "--mock-data",
               "--seq-length", "32", "--micro-batch-size", "1", "--global-batch-size", "2", "--train-iters", "1",
               "--lr", "1e-3"]  # fmt: skip
    assert "acme: swiglu" in run(command, tmp_path)
