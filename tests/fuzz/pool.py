"""Worker processes with a limit of time and of memory per case; one that dies, hangs or grows is replaced."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.fuzz.cases import CRASH, HANG, Outcome
from tests.support.paths import ROOT

START = 60.0  # seconds by which the first case of a process may be longer: it imports torch


class Pool:
    """``count`` processes that run cases of one seed."""

    def __init__(self, count: int, seed: int, bases: Path, inputs: Path, seconds: float, memory: int) -> None:
        self._words = [str(seed), str(bases), str(inputs)]
        self._count, self._seconds, self._memory = count, seconds, memory

    def run(self, numbers: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, Outcome]]:
        """(kind, number, outcome) of each case, in the order in which they end."""
        waiting = list(reversed(numbers))
        workers = [_Worker(self._words) for _ in range(min(self._count, len(numbers)))]
        try:
            while waiting or any(w.case for w in workers):
                for i, worker in enumerate(workers):
                    if worker.case is None and waiting:
                        worker.give(waiting.pop())
                    outcome = worker.look(self._seconds, self._memory)
                    if outcome is not None and worker.case is not None:
                        yield (*worker.case, outcome)
                        worker.case = None
                        if outcome.result in (HANG, CRASH):
                            worker.end()
                            workers[i] = _Worker(self._words)
                select.select([w.answers for w in workers], [], [], 0.1)
        finally:
            for worker in workers:
                worker.end()


class _Worker:
    def __init__(self, words: Sequence[str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (closed in end())
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.worker", *words],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.answers = self._process.stdout
        os.set_blocking(self.answers.fileno(), False)
        self.case: tuple[str, int] | None = None
        self._began, self._text = time.monotonic() + START, b""

    def give(self, case: tuple[str, int]) -> None:
        assert self._process.stdin is not None
        self.case, self._began = case, max(self._began, time.monotonic())
        try:
            self._process.stdin.write(f"{case[0]} {case[1]}\n".encode())
            self._process.stdin.flush()
        except OSError:
            pass  # it is dead: look() says so

    def look(self, seconds: float, memory: int) -> Outcome | None:
        """How the case under way has ended, if it has."""
        import json

        chunk = self.answers.read()
        if chunk:
            self._text += chunk
            if self._text.endswith(b"\n"):
                answer = json.loads(self._text)
                self._text, self._began = b"", time.monotonic()
                return Outcome(**answer)
        code = self._process.poll()
        if code is not None:
            self._said.seek(0)
            last = (self._said.read()[-300:].decode(errors="replace").strip().splitlines() or [""])[-1]
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Outcome(CRASH, f"{name}: {ascii(last)}")
        if self.case is not None and time.monotonic() - self._began > seconds:
            return Outcome(HANG, f"over {seconds:g} s")
        if self.case is not None and _resident(self._process.pid) > memory:
            return Outcome(CRASH, f"over {memory >> 20} MiB of memory")
        return None

    def end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._said):
            assert file is not None
            try:
                file.close()
            except OSError:
                continue


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
