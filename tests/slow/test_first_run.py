"""The command for the day an accelerator is there, whole, at a small size: on the CPU and on the emulated device."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.quick_start import serving
from tests.support.selection import quick
from tests.support.vendors import PLUGINS, build_emulated

ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(PLUGINS / "emulated_vendor"), "HETERO_PLUGINS": "hetero_emulated_vendor.plugin",
}  # fmt: skip


@pytest.fixture(scope="module")
def forked() -> Iterator[Path]:
    build_emulated()
    with serving(ENVIRONMENT) as programs:
        yield programs


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("platform", quick(["cpu", "emulated_vendor"], ["emulated_vendor"], []))
def test_every_part_runs_and_is_on_the_page(platform: str, forked: Path, tmp_path: Path) -> None:
    out, trace = tmp_path / "page.md", tmp_path / "trace.json"
    command = [
        forked / "python", "benchmarks/gpu/first_run.py", "--size", "small", "--platform", platform, "--minutes", "40",
        "--out", str(out), "--trace", str(trace),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = out.read_text()
    for title in ("Training", "Parity with transformers", "Conformance", "Attention"):
        assert f"## {title}" in page
    assert "| fp32 | 20 |" in page and "| bf16 | 20 |" in page
    assert "| ours |" in page and "| transformers |" in page and "predicted" in page
    assert trace.stat().st_size > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_accelerators_train_together(forked: Path, tmp_path: Path) -> None:
    """On the emulated device with its bad habits."""
    environment = ENVIRONMENT | {
        "HETERO_EMULATED_HABITS": "lazy-loading,blocking-groups,slots=132,freeing-waits,no-fp64",
    }  # fmt: skip
    out = tmp_path / "page.md"
    command = [
        forked / "python", "benchmarks/gpu/first_run_two.py", "--size", "small", "--platform", "emulated_vendor",
        "--minutes", "30", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = out.read_text()
    assert all(f"| {case} |" in page for case in ("one", "pipeline", "tensor", "replicas", "bridge"))


def lives(pid: int) -> bool:
    """Of a process that nobody may have waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] not in "XZ"
    except OSError:
        return False


def wait_until(holds: Callable[[], bool], seconds: float = 30.0) -> bool:
    """A process that was killed ends when it next runs."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


@pytest.mark.slow
def test_a_part_that_does_not_end_is_ended_and_what_it_found_is_kept(tmp_path: Path) -> None:
    """With the processes that it started."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
    from parts import FAILED, run

    left = tmp_path / "child"
    program = (
        "import subprocess, time; from pathlib import Path; child = subprocess.Popen(['sleep', '600']); "
        f"Path({str(left)!r}).write_text(str(child.pid)); print('{{\"rows\": 3}}', flush=True); "
        "print('{', flush=True); time.sleep(600)"
    )
    found = run([sys.executable, "-c", program], [dict(os.environ)], 5.0, ROOT)
    assert found["rows"] == 3 and "did not end in 5 s" in found[FAILED]
    assert wait_until(lambda: not lives(int(left.read_text())))
