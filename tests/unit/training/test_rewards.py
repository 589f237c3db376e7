"""The process of a reward function: what functions may be and give, and what is refused in one line."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.spec.grpo import Grpo
from hetero_megatron.training.rewards import RewardFunction
from hetero_megatron.training.saved_state import other_rollouts

FILE = """from __future__ import annotations
import math, os, subprocess, sys, time
from dataclasses import dataclass
from multiprocessing import get_context

@dataclass
class Judge:
    floor: int = 0
    async def __call__(self, completions, **_): return [len(text) + self.floor for text in completions]

late = Judge(1)
def size(text): return len(text)
async def waits(completions, **_): return [len(text) for text in completions]
def shared(completions, **_):
    with get_context("fork").Pool(1) as pool: return pool.map(size, completions)
def inner(completions, **_):
    @dataclass
    class Inner: size: int
    return [Inner(len(text)).size for text in completions]
def starts(completions, **_):
    print("said", flush=True)
    return [len(subprocess.run(["cat"], stdout=subprocess.PIPE, timeout=9).stdout + sys.stdin.read().encode()), 3]
def some(completions, **_): return [None, True]
def none(completions, **_): return [None, None]
def raises(completions, **_): raise ValueError("no luck")
def nan(completions, **_): return [1.0, math.nan]
def huge(completions, **_): return [1.0, 1e300]
def few(completions, **_): return [1.0]
def words(completions, **_): return ["good", "bad"]
def text(completions, **_): return "11"
def table(completions, **_): return {0: 1, 1: 2}
def hangs(completions, marker, **_):
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(1); open({marker[0]!r}, 'w')"])
    time.sleep(100)
def ends(completions, **_): os._exit(3)
def killed(completions, **_): os.kill(os.getpid(), 9)
"""


@contextmanager
def loaded(path: Path, name: str, seconds: float = 60.0) -> Iterator[RewardFunction]:
    function = RewardFunction(f"{path}:{name}", seconds)
    try:
        yield function
    finally:
        function.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "a judge-1.py").write_text(FILE)
    return tmp_path / "a judge-1.py"


def columns(path: Path) -> Mapping[str, Any]:
    return {"completions": ["", "abc"], "marker": [f"{path}.left"] * 2}


def test_what_functions_may_be(path: Path) -> None:
    """Async ones, objects, and what uses processes, dataclasses or standard input and output; None: not judged."""
    given = {"late": [1, 4], "some": [math.nan, 1]} | dict.fromkeys(("waits", "shared", "inner", "starts"), [0, 3])
    for name, wanted in given.items():
        with loaded(path, name) as function:
            for _ in range(2):
                assert function(columns(path), 2) == pytest.approx(wanted, nan_ok=True), name


def test_what_is_refused(path: Path) -> None:
    refused = {
        "raises": "raises ValueError: no luck (line ", "nan": "gives nan for answer 1 of 2",
        "huge": "gives 1e+300 for answer 1 of 2", "few": "gives 1 rewards for 2 answers",
        "words": "raises ValueError: could not convert", "text": "it returns a str", "table": "it returns a dict",
        "none": "gives None for all 2 answers", "ends": "ends its process (exit code 3)",
        "killed": "ends its process (signal 9)",
    }  # fmt: skip
    for name, problem in refused.items():
        with loaded(path, name) as function, pytest.raises(UserError) as caught:
            function(columns(path), 2)
        assert problem in str(caught.value) and "--reward-function" in str(caught.value)
    with loaded(path, "hangs", 0.3) as function, pytest.raises(UserError, match="a call takes more than 0.3 s"):
        function(columns(path), 2)
    time.sleep(1.2)
    assert not Path(columns(path)["marker"][0]).exists(), "what it started goes on"


def test_what_a_run_that_goes_on_is_told() -> None:
    """Of flags that change numbers; in the middle of steps on the same answers it cannot go on."""
    was, now = Grpo(4, 2, beta=0.1, rows=3), Grpo(4, 3, beta=0.2)

    def told(step: int, saved: Grpo | None) -> list[str]:
        state = {"step": step, "grpo": asdict(saved) if saved is not None else None}
        return other_rollouts(state, SimpleNamespace(grpo=now))  # type: ignore[arg-type]

    assert told(6, was) == [
        "--grpo-iterations is 3; the checkpoint was made with 2",
        "--grpo-kl-beta is 0.2; the checkpoint was made with 0.1",
    ]
    assert told(6, now) == told(6, None) == []
    with pytest.raises(UserError, match="--grpo-iterations = 3: step 4 of the checkpoint"):
        told(4, was)
