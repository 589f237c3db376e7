"""Logs that fail are said once, and training goes on."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.errors import UserError, printable, without_controls
from hetero_megatron.monitoring.log_sinks import Board, LineFile, QuietThreads
from hetero_megatron.monitoring.metrics import FILE, MetricsWriter, StepMetrics
from hetero_megatron.utils.files import open_append
from hetero_megatron.utils.text import notice_line


def write(writer: MetricsWriter, *steps: int) -> None:
    for step in steps:
        writer.step(StepMetrics(step, step, 1.0, 1.0, 1e-3, 8, 0.1))


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_file_that_vanishes_goes_on_in_a_new_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = MetricsWriter(str(tmp_path))
    write(writer, 1, 2)
    (tmp_path / FILE).unlink()
    write(writer, 3)
    (tmp_path / FILE).rename(tmp_path / "moved")  # as logrotate does
    write(writer, 4, 5)
    writer.close()
    assert steps(tmp_path / "moved") == [3] and steps(tmp_path / FILE) == [4, 5]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and f"notice: {tmp_path / FILE} was removed or replaced" in said[0]


def test_a_full_disk_leaves_whole_lines_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, room = os.write, [True]

    def full(handle: int, data: Any) -> int:
        if not room[0]:
            real(handle, bytes(data)[:7])  # what fits
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, data)

    writer = MetricsWriter(str(tmp_path))
    monkeypatch.setattr(os, "write", full)
    write(writer, 1)
    room[0] = False
    write(writer, 2, 3)
    room[0] = True
    write(writer, 4)
    assert steps(tmp_path / FILE) == [1, 4]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "No space left on device" in said[0] and "training goes on" in said[0]


def test_a_folder_that_is_gone_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run" / "lines"
    path.parent.mkdir()
    lines = LineFile(path, open_append(path))
    path.unlink()
    path.parent.rmdir()
    for _ in range(3):
        lines.write(b"x\n")
    assert capsys.readouterr().out.count("notice: ") == 1
    path.parent.mkdir()
    lines.write(b"y\n")
    assert path.read_bytes() == b"y\n"


def test_a_board_that_fails_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def fail(_: Any) -> None:
        calls.append(1)
        raise RuntimeError("the service\x1b[31m is gone")

    board = Board("--wandb-project", "mine", object)
    for _ in range(3):
        board.do(fail)
    said = capsys.readouterr().out
    assert len(calls) == 1 and said.count("\n") == 1 and "\x1b" not in said
    assert "notice: --wandb-project mine fails (RuntimeError: the service\\x1b[31m is gone)" in said

    def refuse() -> None:
        raise UserError("is not installed")

    with pytest.raises(UserError):
        Board("--wandb-project", "mine", refuse)


def test_only_a_boards_own_threads_are_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    class Worker(threading.Thread):
        def run(self) -> None:
            raise OSError("nothing of this is shown")

    class Other(Worker):
        pass

    seen: list[str] = []
    before = threading.excepthook
    threading.excepthook = QuietThreads(lambda args: seen.append(type(args.thread).__name__), "Worker")
    try:
        for thread in (Worker(), Other()):
            thread.start()
            thread.join()
    finally:
        threading.excepthook = before
    assert seen == ["Other"]


def test_what_others_named_is_shown_without_what_a_terminal_obeys() -> None:
    assert notice_line("a\x1b]0;x\x07\nerror: b\u202e") == "notice: a\\x1b]0;x\\x07\\nerror: b\\u202e"
    assert printable("a\x9b31m") == "a\\x9b31m"
    assert without_controls("a\x1b[2J\tb\n\x9bc\u200d\u0301") == "a\\x1b[2J\tb\n\\x9bc\u200d\u0301"
