"""Ctrl-C at any moment from the start to the first steps: always one line, always ended. MOMENTS=200 for more."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT, TORCHRUN

pytestmark = pytest.mark.slow
MOMENTS = int(os.environ.get("MOMENTS", "8"))
RUN = ["pretrain_gpt.py", "--model", "tiny", "--mock-data", "--seq-length", "32", "--lr", "1e-3"]
RUN += ["--micro-batch-size", "2", "--log-interval", "1", "--train-iters", "100000"]
BUSY = "while True: pass"


@pytest.fixture
def load() -> Iterator[None]:
    """Something else on every core."""
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(os.cpu_count() or 1)]
    yield
    for other in others:
        other.kill()
        other.wait()


def environment(folder: Path) -> dict[str, str]:
    """``begins`` is printed when Python's own start is over, of ours: what torch's agent does with an interrupt while
    it is imported is torch's."""
    (folder / "sitecustomize.py").write_text(
        "import sys\nwords = sys.orig_argv\n"
        "if 'torch.distributed.run' not in words and any('pretrain_gpt' in a for a in words):"
        " print('begins', flush=True)"
    )
    return {**ENVIRONMENT, "PYTHONPATH": str(folder)}


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Read a program's lines up to one that holds ``text``."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if text in line:
            return
    raise AssertionError(f"it ended, with exit code {process.wait()}, before it said {text!r}")


def interrupted(words: list[str], seconds: float, around: dict[str, str]) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a program whose group gets Ctrl-C after ``seconds``."""
    process = subprocess.Popen(
        words, cwd=ROOT, env=around, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_for(process, "begins")
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def first_step(words: list[str], around: dict[str, str]) -> float:
    """Seconds until the first step's line."""
    begin = time.monotonic()
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(
        words, cwd=ROOT, env=around, stdout=pipe, stderr=null, text=True, start_new_session=True
    )
    wait_for(process, " iteration ")
    found = time.monotonic() - begin
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    return found


def tried(words: list[str], moments: int, tmp_path: Path) -> Counter[str]:
    """How often each kind of end came; asserts on every one."""
    around, seen = environment(tmp_path), Counter[str]()
    longest, rng = first_step(words, around) * 1.1, random.Random(7)
    for count in range(moments):
        seconds = longest * (count + rng.random()) / moments
        code, out, err = interrupted(words, seconds, around)
        where = f"after {seconds:.3f} s: exit {code}\n{out[-2000:]}\n{err[-2000:]}"
        lines = [line for line in err.splitlines() if "interrupted" in line]
        if TORCHRUN[2] in words:  # whose agent says what it did; ours is in the ranks
            assert len(lines) <= 1 and code != 0, where
            seen["ended"] += 1
        elif err == "error: interrupted\n":
            assert code == 130, where
            seen["one line at once"] += 1
        else:
            assert err.startswith("interrupted: stopping after this step") and err.count("\n") == 1, where
            assert code == 130, where
            seen["after a step"] += 1
    return seen


def test_one_process(tmp_path: Path) -> None:
    print(tried([sys.executable, *RUN], MOMENTS, tmp_path))


@pytest.mark.exhaustive  # CI has a test on every core beside this one
def test_one_process_beside_load(load: None, tmp_path: Path) -> None:
    print(tried([sys.executable, *RUN], MOMENTS // 2, tmp_path))


def test_two_ranks_of_torchrun(tmp_path: Path) -> None:
    words = [*TORCHRUN, "--nproc-per-node", "2", *RUN, "--global-batch-size", "4"]
    print(tried(words, MOMENTS // 4, tmp_path))
