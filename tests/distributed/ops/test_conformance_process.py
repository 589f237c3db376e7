"""The conformance kit and kernels that harm their process: nothing ends the check, and each is named."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli.main import main
from tests.support.paths import ROOT

_SOURCE = ROOT / "plugins" / "bad_vendor" / "hetero_bad" / "deadly.py"
# Read, not imported: nothing of that module belongs into the process of the tests.
DEADLY: dict[str, tuple[str, str]] = next(
    ast.literal_eval(node.value) for node in ast.parse(_SOURCE.read_text(encoding="utf-8")).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DEADLY"
)  # fmt: skip


@pytest.fixture(scope="module")
def deadly() -> subprocess.CompletedProcess[str]:
    """One run of the kit over the plugin, as a user starts it."""
    command = [sys.executable, "-m", "hetero_megatron.cli.main", "plugins", "check", "hetero_bad.deadly", "--quick"]
    words = ["--dtypes", "fp32", "--no-speed", "--json", "--time-limit", "20", "--memory-limit", "0.5"]
    paths = [str(ROOT / "plugins" / "bad_vendor"), *sys.path]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HETERO_PLUGINS": "hetero_bad.deadly"}
    return subprocess.run([*command, *words], env=where, capture_output=True, text=True)


@pytest.fixture(scope="module")
def findings(deadly: subprocess.CompletedProcess[str]) -> dict[str, list[dict[str, str]]]:
    report: dict[str, Any] = json.loads(deadly.stdout)  # one object, whatever the kernels printed or closed
    assert deadly.returncode == 1 and not report["ok"]
    by_kernel: dict[str, list[dict[str, str]]] = {}
    for finding in report["findings"]:
        by_kernel.setdefault(finding["kernel"].partition(":")[2], []).append(finding)
    return by_kernel


@pytest.mark.slow
@pytest.mark.parametrize("name", DEADLY)
def test_a_deadly_kernel_is_named_with_what_it_did(name: str, findings: dict[str, list[dict[str, str]]]) -> None:
    check, words = DEADLY[name]
    failed = [f for f in findings[name] if f["status"] == "FAIL"]
    assert any(words in f["detail"] for f in failed if f["check"] == check), failed
    assert all(f["dtype"] == "float32" and f["case"] for f in failed)


HARMFUL = ("segfault", "exits_well", "interrupts", "never_ends", "kills_its_parent", "closes_files", "takes_all_memory")


@pytest.mark.slow
@pytest.mark.parametrize("name", HARMFUL)
def test_only_the_case_under_way_is_lost(name: str, findings: dict[str, list[dict[str, str]]]) -> None:
    """What a kernel does in one of nine cases leaves all checks of the others, and those that come after them."""
    good = [f for f in findings["settings"] if f["case"].partition(",")[0] != "odd"]
    other = [f for f in findings[name] if f["case"].partition(",")[0] != "odd"]
    assert [(f["check"], f["case"], f["status"]) for f in other] == [
        (f["check"], f["case"], f["status"]) for f in good
    ], "the table is that of a kernel that ends nothing"
    assert [f["case"] for f in findings[name] if f["status"] == "FAIL"] == ["odd"]


@pytest.mark.slow
def test_what_plugins_print_goes_to_stderr(deadly: subprocess.CompletedProcess[str]) -> None:
    assert "a plugin that prints" in deadly.stderr and "about to free" in deadly.stderr
    assert "Traceback" not in deadly.stderr


LATE = """
import ctypes
from dataclasses import replace
from hetero_megatron.ops.registry import torch_registry

HETERO_PLUGIN_API = 1
calls = []

def forward(x):
    calls.append(x.numel())
    if len(calls) > 1 and x.numel() == 273 and calls[0] != 273:  # only after another case
        ctypes.string_at(0)
    return good.forward(x)

good = torch_registry().kernel("squared_relu", "reference")
def register(api): api.kernel(replace(good, provider="late", kind="vendor", traceable=False, forward=forward))
"""
AT_IMPORT = "import os\nHETERO_PLUGIN_API = 1\nos.kill(os.getpid(), 11)\ndef register(api): pass\n"


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"late": LATE, "fatal": AT_IMPORT}.items():
        (tmp_path / f"hetero_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HETERO_PLUGINS", "hetero_fatal,hetero_late")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # a pool of threads in the process that forks would hang its children


@pytest.mark.slow
def test_late_harm_is_not_blamed_on_the_case_that_it_hits(plugins: None, capsys: pytest.CaptureFixture[str]) -> None:
    """And a plugin that ends the process that imports it is left out by name."""
    assert main(["plugins", "check", "late", "--dtypes", "fp32", "--quick", "--no-speed"]) == 1
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert lines[0].startswith("plugin late on platform")
    place = next(i for i, line in enumerate(lines) if "FAIL" in line)
    assert lines[place].split()[:3] == ["FAIL", "squared_relu:late", "memory"]
    assert "odd: it ended its process by SIGSEGV (forward, hetero_late.py:" in lines[place + 1]
    assert "an earlier case has damaged the process" in lines[place + 1]
    assert lines[-1].endswith("checks, 1 FAILED"), "the case itself is checked in a process of its own"
    assert "plugin fatal is left out: while it was loaded, it ended its process by SIGSEGV" in shown.err


@pytest.mark.slow
def test_a_plugin_that_cannot_be_imported_alive_fails(plugins: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "fatal"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL  plugin fatal" in shown and "SIGSEGV" in shown and "1 check, 1 FAILED" in shown


TRITON = """
import torch, triton, triton.language as tl
from hetero_megatron.ops import Kernel
from hetero_megatron.ops.registry import torch_registry

HETERO_PLUGIN_API = 1

@triton.jit
def square(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.maximum(tl.load(x + i, mask=i < n, other=0.0), 0.0)
    tl.store(y + i, v * v)  # and no mask

def forward(x):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        square[(triton.cdiv(x.numel(), 1024),)](x.contiguous(), y, x.numel(), BLOCK=1024)
    return (y,)

def register(api):
    api.kernel(Kernel("squared_relu", "maskless", "vendor", forward,
                      torch_registry().kernel("squared_relu", "reference").backward))
"""


@pytest.mark.slow
def test_a_triton_kernel_that_stores_without_a_mask_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hetero_maskless.py").write_text(TRITON)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HETERO_PLUGINS", "hetero_maskless")
    words = ["--dtypes", "fp32", "--quick", "--no-speed", "--time-limit", "60"]
    assert main(["plugins", "check", "maskless", *words]) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    assert "under Triton's interpreter" in first and "bf16" in first
    assert any(line.split()[:3] == ["FAIL", "squared_relu:maskless", "bounds"] for line in lines)
    assert any("wrote out of bounds: 1 after an output of 273 elements" in line for line in lines)
    assert all(line.split()[2] == "bounds" for line in lines if "FAIL  " in line) and "checks, " in lines[-1]


@pytest.mark.slow
def test_lines_come_as_checks_are_finished_and_nothing_outlives_the_check() -> None:
    """The first kernel's lines are there while the next runs; SIGKILL of the check ends its processes too."""
    command = [sys.executable, "-m", "hetero_megatron.cli.main", "plugins", "check", "reference"]
    check = subprocess.Popen([*command, "--operators", "gelu,rope", "--no-speed"], stdout=subprocess.PIPE, text=True)
    assert check.stdout is not None
    assert "plugin reference" in check.stdout.readline()
    assert "gelu:reference" in check.stdout.readline() and check.poll() is None
    inner = Path(f"/proc/{check.pid}/task/{check.pid}/children").read_text().split()
    assert inner
    check.send_signal(signal.SIGKILL)
    check.wait()
    check.stdout.close()
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in inner) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in inner)


@pytest.mark.parametrize("words", [["--time-limit", "0"], ["--time-limit", "nan"], ["--memory-limit", "much"]])
def test_limits_are_numbers_above_zero(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "aten", *words]) == 2
    assert words[0] in capsys.readouterr().err
