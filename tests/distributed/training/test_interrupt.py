"""Ctrl-C ends a run in one line, after a checkpoint where there is --save; and two runs never share a directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_megatron.checkpoint.lock import DirectoryLock
from hetero_megatron.cli.configure import configure
from hetero_megatron.errors import INTERRUPTED
from hetero_megatron.training.exit import ExitConditions, LastingStream, handled, note_hang_up
from tests.support.faults import children
from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT, Program, command, inside, start_ranks

RUN = [sys.executable, "pretrain_gpt.py", "--model", "tiny", "--mock-data", "--seq-length", "32", "--lr", "1e-3"]
RUN += ["--micro-batch-size", "2", "--log-interval", "1"]
HOLD = (
    "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(flush=True); input()"
)


@pytest.fixture
def own_handler() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_echo_of_ctrl_c_is_not_a_second_one(own_handler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    conditions = ExitConditions(signals=("SIGINT",))
    assert not conditions.check(1)
    for _ in range(2):  # the terminal's, and the one that torchrun passes on
        os.kill(os.getpid(), signal.SIGINT)
    assert conditions.check(1) and conditions.reason == "received SIGINT" and not ended
    monkeypatch.setattr("hetero_megatron.training.exit.ECHO_SECONDS", 0.0)
    os.kill(os.getpid(), signal.SIGINT)
    assert ended == [INTERRUPTED]


@pytest.mark.parametrize("first", [True, False])
def test_one_rank_says_that_ctrl_c_came(first: bool, own_handler: None, capfd: pytest.CaptureFixture[str]) -> None:
    conditions = ExitConditions(signals=("SIGINT",), first=first)
    os.kill(os.getpid(), signal.SIGINT)
    assert conditions.check(1) and ("stopping after this step" in capfd.readouterr().err) == first


def test_a_file_that_appears_ends_a_run(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    words = [*RUN[2:], "--train-iters", "100000", "--save", str(tmp_path / "out"), "--exit-file", str(notice)]
    process = Program(words)
    process.until(" iteration ")
    notice.touch()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0 and f"--exit-file {notice} appeared" in out and not err
    assert (tmp_path / "out" / "latest").exists()
    _, err = inside(words, code=2)
    assert f"--exit-file = {notice}: it exists" in err and len(err.splitlines()) == 1
    # Only where a process starts: an elastic run that goes on under another plan reads its flags again.
    assert configure(words, {}).exit.file == str(notice)


def test_a_wish_of_this_host_alone_is_told_from_one_of_the_job(tmp_path: Path, own_handler: None) -> None:
    conditions = ExitConditions(interval=4, signals=("SIGTERM",), file=str(tmp_path / "notice"))
    assert not conditions.check(3) and not conditions.leaves
    (tmp_path / "notice").touch()
    assert conditions.check(3) and conditions.leaves
    later = ExitConditions(interval=4)
    later.go_on_from(conditions)
    assert later.check(3) and later.leaves
    assert later.check(4) and not later.leaves, "all stop there"
    os.kill(os.getpid(), signal.SIGTERM)
    assert conditions.check(3) and conditions.leaves and conditions.reason == "received SIGTERM"


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c(saves: bool, tmp_path: Path) -> None:
    process = Program([*RUN[2:], "--train-iters", "100000", *(["--save", str(tmp_path)] if saves else [])])
    process.until(" iteration ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=240)
    assert "Traceback" not in err and "received SIGINT" in out
    assert process.returncode == (0 if saves else INTERRUPTED) and (tmp_path / "latest").exists() == saves


@pytest.mark.parametrize("seconds", [0.5, pytest.param(2.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "words",
    [[*RUN[1:], "--train-iters", "100000"], ["-m", "hetero_megatron.cli.main", "doctor"]],
    ids=["train", "doctor"],
)
def test_ctrl_c_while_modules_are_imported_is_one_line(words: list[str], seconds: float, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('begins', flush=True)")  # Python's own start is over
    environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "begins\n"
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    ended = (process.returncode, err)
    if "everything that is needed is here" in out:  # all is done: Python's own end has no handler of signals any more
        assert ended in ((0, ""), (INTERRUPTED, ""), (INTERRUPTED, "error: interrupted\n"), (-signal.SIGINT, ""))
        return
    assert ended in ((INTERRUPTED, "error: interrupted\n"), (0, ""), (2, "")) or "after this step" in err, (out, err)
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_terminal_that_is_closed_saves(tmp_path: Path) -> None:
    """SIGHUP, and every write to the terminal fails from then on."""
    ours, theirs = pty.openpty()

    def own_terminal() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    words = [*RUN, "--train-iters", "100000", "--save", str(tmp_path)]
    process = subprocess.Popen(
        words, cwd=ROOT, env=ENVIRONMENT, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=own_terminal
    )
    os.close(theirs)
    seen = b""
    while b" iteration " not in seen:
        seen += os.read(ours, 4096)
    os.close(ours)
    assert process.wait(timeout=60) == 0 and (tmp_path / "latest").exists()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events[-1]["kind"] == "end" and events[-1]["text"].endswith("received SIGHUP")


def test_where_hang_ups_are_ignored_they_stay_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        assert handled(("SIGHUP", "SIGTERM")) == {signal.SIGTERM}
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert handled(("SIGHUP", "SIGTERM")) == {signal.SIGTERM, signal.SIGHUP}
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_stream_drops_what_no_terminal_takes_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        number = errno.EIO

        def write(self, text: str) -> int:
            raise OSError(self.number, "")

    gone = Gone()
    print("nobody reads this", file=LastingStream(gone), flush=True)
    for gone.number in (errno.ENOSPC, errno.EPIPE):
        with pytest.raises(OSError):
            print("", file=LastingStream(gone))
    monkeypatch.setattr(sys, "stdout", LastingStream(gone))
    note_hang_up(signal.SIGHUP)
    print("nor this", flush=True)


@pytest.mark.slow
def test_ranks_end_with_their_agent() -> None:
    words = [*command(2), *RUN[2:], "--train-iters", "100000"]
    process = subprocess.Popen(
        words, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None and any(" iteration " in line for line in process.stdout)
    ranks = children(process.pid)
    assert len(ranks) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 30
    while (left := [pid for pid in ranks if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_rank_that_was_told_to_stop_is_named() -> None:
    ranks = start_ranks(2, [*RUN[2:], "--train-iters", "100000", "--exit-signal-handler"])
    try:
        ranks[0].until(" iteration ")
        ranks[1].send_signal(signal.SIGTERM)
        (out, err), other = (rank.communicate(timeout=240) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0] and "rank 1 was told to" in out, (out, err, other)


@contextlib.contextmanager
def other_process(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """One that holds the directory; it dies at the end."""
    words = [sys.executable, "-c", HOLD, str(directory)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_run_refuses_the_directory_of_another(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001.incomplete").mkdir()  # of the other run, which a new one would remove
    with other_process(tmp_path):
        _, err = inside([*RUN[2:], "--train-iters", "2", "--save", str(tmp_path)], code=2)
    assert f"--save = {tmp_path}: another run is writing there" in err
    assert [p.name for p in tmp_path.iterdir()] == ["iter_0000001.incomplete"]


def test_a_lock_ends_with_its_process_and_with_the_run(tmp_path: Path) -> None:
    lock, again = DirectoryLock(tmp_path), DirectoryLock(tmp_path)
    with other_process(tmp_path) as process:
        assert not lock.take(0.2)
        process.kill()
        assert lock.take(30)
    assert again.take(0)  # a run of this process that failed may still hold it
    lock.release()
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)


def test_without_locks_on_the_file_system_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert DirectoryLock(tmp_path).take(0)
