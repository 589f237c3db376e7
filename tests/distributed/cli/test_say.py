"""Errors of all ranks of a node are printed once, and found where torchrun looks for them; none is ever lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hetero_megatron.cli.log import say_error
from hetero_megatron.environment.launcher import ERROR_FILE
from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT

SAY = "import sys; from hetero_megatron.cli.log import say_error; say_error(sys.argv[1])"


def ranks(directory: Path, texts: list[str], program: str = SAY) -> list[str]:
    """What the ranks of a node print that say these texts at the same time."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, text], cwd=ROOT, text=True, stderr=subprocess.PIPE,
            env={**ENVIRONMENT, ERROR_FILE: str(directory / str(rank) / "error.json")},
        )
        for rank, text in enumerate(texts)
    ]  # fmt: skip
    return [process.communicate(timeout=60)[1] for process in started]


def test_what_all_say_is_printed_once(tmp_path: Path) -> None:
    said = ranks(tmp_path, ["--plan = x: no such file"] * 4)
    assert sorted(said) == ["", "", "", "error: --plan = x: no such file\n"]


def test_what_one_rank_says_is_printed(tmp_path: Path) -> None:
    said = ranks(tmp_path, ["all say this", "all say this", "rank 2 is special", "all say this"])
    assert said[2] == "error: rank 2 is special\n" and sorted(said)[:2] == ["", ""] and len(set(said)) == 3
    (only,) = ranks(tmp_path / "another job", ["all say this"])
    assert only == "error: all say this\n"


def test_a_rank_that_is_killed_while_it_prints_takes_no_error_with_it(tmp_path: Path) -> None:
    """It holds the lock and has noted nothing yet."""
    killed = "import builtins, os; builtins.print = lambda *_, **__: os._exit(9); " + SAY
    assert ranks(tmp_path, ["everyone's"], killed) == [""]
    assert ranks(tmp_path, ["everyone's"]) == ["error: everyone's\n"]


def test_where_nothing_can_be_shared_everybody_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for environment in ({}, {ERROR_FILE: str(tmp_path / "file" / "0" / "error.json")}):
        say_error("two\n lines", environment)
        say_error("two\n lines", environment)
    assert capsys.readouterr().err == "error: two lines\n" * 4


def test_torchrun_shows_it(tmp_path: Path) -> None:
    """As its launcher reads what ``@record`` writes."""
    file = tmp_path / "attempt_0" / "1" / "error.json"
    say_error("--plan = x: no such file", {ERROR_FILE: str(file)})
    failure = ProcessFailure(local_rank=1, pid=7, exitcode=2, error_file=str(file))
    assert abs(failure.timestamp - time.time()) < 600
    assert "--plan = x: no such file" in ChildFailedError("pretrain_gpt.py", {1: failure}).format_msg()
    assert json.loads(file.read_text()).keys() == {"message"}


@pytest.mark.parametrize("bad", [{"WORLD_SIZE": "x"}, {"MASTER_PORT": "0"}])
def test_commands_say_their_refusals_that_way(bad: dict[str, str], tmp_path: Path) -> None:
    program = f"import os; os.environ |= {bad!r}; from hetero_megatron.cli.pretrain import main; main([])"
    said = ranks(tmp_path, ["", ""], program)
    assert sorted(said)[0] == "" and sorted(said)[1].startswith("error: environment: "), said
    assert next(iter(bad)) in json.loads((tmp_path / "1" / "error.json").read_text())["message"]["message"]
