"""``pretrain_gpt.py`` as tests start it: in this process, as ranks forked from a process with torch, or by torchrun.

What a short run costs is nearly all imports, so most tests fork. What users type, with torchrun and fresh interpreters,
is in ``tests/distributed/training/test_end_to_end.py`` and ``tests/slow``.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hetero_megatron.cli.pretrain import main
from tests.support.paths import ROOT
from tests.support.pool import PRELOAD
from tests.support.ports import free_port

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
SINGLE = """
version: 1
seq_length: 48
global_batch_size: 6
pipelines:
  - {micro_batch_size: 6, num_micro_batches: 1, stages: [{ranks: 0, layers: [0, 6]}]}
"""


def command(ranks: int) -> list[str]:
    """``pretrain_gpt.py`` in fresh interpreters."""
    launcher = [*TORCHRUN, "--nproc-per-node", str(ranks)] if ranks > 1 else [sys.executable]
    return [*launcher, "pretrain_gpt.py"]


def inside(words: list[str], code: int = 0) -> tuple[str, str]:
    """(stdout, stderr) of the program with these words, alone, in this process."""
    out, err = io.StringIO(), io.StringIO()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            returned = main(words, {})
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert returned == code, out.getvalue() + err.getvalue()
    return out.getvalue(), err.getvalue()


def _program(
    words: list[str], environment: dict[str, str], output: str, command: str, before: Callable[[], None] | None
) -> None:
    """In a forked process: what ``hetero-megatron COMMAND`` does."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{output}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    # The streams of the process that it was forked from may be closed.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.argv = ["hetero-megatron", command, *words]
    if before is not None:
        before()
    from hetero_megatron.cli.start import train

    train(command, words)


class Program:
    """A forked ``pretrain_gpt.py`` (or another command), with the methods of ``subprocess.Popen`` that tests need;
    ``before``: called in it first."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str] = ENVIRONMENT,
        command: str = "pretrain",
        before: Callable[[], None] | None = None,
    ) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="program")
        given = (list(words), dict(environment), self._folder.name, command, before)
        self._process = context.Process(target=_program, args=given)
        self._process.start()
        atexit.register(self.kill)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def output(self) -> tuple[str, str]:
        """(stdout, stderr) so far."""
        files = (Path(self._folder.name) / name for name in ("out", "err"))
        out, err = (file.read_text() if file.exists() else "" for file in files)
        return out, err

    def until(self, text: str, seconds: float = 240.0) -> None:
        """Wait for ``text`` on stdout."""
        end = time.monotonic() + seconds
        while text not in self.output()[0]:
            assert self.poll() is None and time.monotonic() < end, self.output()
            time.sleep(0.02)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("pretrain_gpt.py", timeout or 0.0)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """(stdout, stderr) once it has ended."""
        self.wait(timeout)
        return self.output()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_ranks(
    ranks: int,
    words: Sequence[str],
    own: Mapping[int, Sequence[str]] | None = None,
    nodes: Sequence[str] = (),
    before: Callable[[], None] | None = None,
    **environment: str,
) -> list[Program]:
    """Ranks without a launcher, so that nobody but the ranks themselves notices a failure.

    Args:
        own: further flags of some ranks.
        nodes: the name of each rank's node; empty: this host's.
        before: called first in every rank.
    """
    port = str(free_port())
    shared = {**ENVIRONMENT, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **environment}
    return [
        Program(
            [*words, *(own or {}).get(rank, ())],
            {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **({"HETERO_NODE": nodes[rank]} if nodes else {})},
            before=before,
        )
        for rank in range(ranks)
    ]


def run_ranks(ranks: int, words: Sequence[str], code: int = 0, timeout: float = 480) -> tuple[str, str]:
    """(stdout of all ranks, stderr of all ranks) of a job in which each ends with ``code``."""
    programs = start_ranks(ranks, words)
    try:
        printed = [program.communicate(timeout) for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [code] * ranks, printed
    return "".join(out for out, _ in printed), "".join(err for _, err in printed)
