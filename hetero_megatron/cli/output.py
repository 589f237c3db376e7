"""What commands write: files, checked before long work, and one JSON object alone on standard output."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from hetero_megatron.errors import UserError
from hetero_megatron.training.exit import LastingStream
from hetero_megatron.utils.outputs import try_file, unwritable, write_text

__all__ = ["check_writable", "json_alone", "print_json", "unwritable", "write_text"]
NOBODY_READS = 128 + signal.SIGPIPE  # exit code, as of any program that a closed pipe ends
_STARTERS = ("launch", "run", "testbed")  # what they start may print an answer of its own


def while_read(program: Callable[[], int]) -> int:
    """The exit code of a program, which ends quietly where whoever reads its output has enough, as in ``… | head``."""
    try:
        try:
            return program()
        finally:  # also of argparse's exits: at the end of the interpreter it would be too late
            sys.stdout.flush()
    except BrokenPipeError:
        return nobody_reads()


def nobody_reads() -> int:
    """The exit code then; what is printed from now on goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return NOBODY_READS


def check_writable(name: str | None, flag: str) -> None:
    """UserError if ``name`` cannot be written. Called before long work; an existing file is not changed."""
    if name:
        try_file(name, flag)


class _AnswerStream:
    """In the place of standard output: what anybody prints goes to standard error, but for the answer."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def answer(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def print_json(value: Any) -> None:
    """The one object that a command with ``--json`` prints."""
    text = json.dumps(value) + "\n"
    if isinstance(sys.stdout, _AnswerStream):
        sys.stdout.answer(text)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


@contextmanager
def json_alone(command: str, words: Sequence[str]) -> Iterator[None]:
    """While a command runs that was asked for JSON, standard output is for ``print_json`` only: libraries print there
    while they are imported and used, and so do compilers that they start."""
    own_words = list(words[: words.index("--")] if "--" in words else words)
    if "--json" not in own_words or command in _STARTERS or not {"-h", "--help"}.isdisjoint(own_words):
        yield
        return
    stdout, handle = sys.stdout, _separate_handle()
    stream = stdout if handle is None else os.fdopen(handle, "w", encoding=stdout.encoding, errors=stdout.errors)
    sys.stdout = _AnswerStream(LastingStream(stream))  # type: ignore[arg-type, assignment]
    loggers = _handlers_of(stdout)
    try:
        for handler in loggers:
            handler.setStream(sys.stderr)
        yield
    finally:
        sys.stdout = stdout
        for handler in loggers:
            handler.setStream(stdout)
        if handle is not None:
            os.dup2(handle, 1)
            with suppress(OSError):  # nobody reads it any more, and some of it was not written
                stream.close()


def _handlers_of(stream: TextIO) -> list[logging.StreamHandler[TextIO]]:
    """What logs to this stream by libraries that are there already, as in a notebook."""
    known_loggers = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(logger for logger in known_loggers if isinstance(logger, logging.Logger))]
    handlers = (handler for logger in loggers for handler in logger.handlers)
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler) and handler.stream is stream]


def _separate_handle() -> int | None:
    """Another handle of the process's standard output, whose own number now leads to standard error; None where
    ``sys.stdout`` is something else."""
    try:
        if sys.stdout.fileno() != 1:
            return None
        sys.stdout.flush()
        handle = os.dup(1)
        os.dup2(2, 1)
        return handle
    except (OSError, ValueError):  # closed, or kept in memory (io.UnsupportedOperation)
        return None


MARK = "# By hetero-megatron plan, which also removes it: the cluster that the ranks of the plan beside it are of.\n"


class ClusterBesidePlan:
    """FILE.cluster.yaml beside a plan FILE: the cluster that its ranks refer to, if that is not --cluster itself.
    Created before the search, so that errors are raised before it.

    A stale one must not stay beside a new plan, and a user's file must not be overwritten: ours have a mark in their
    first line.

    Args:
        out: the plan file; None: none is written.
        cluster: the file of --cluster; left alone even if it is one that an earlier call wrote.
        may_write: the plan may be for another cluster.
    """

    def __init__(self, out: str | None, cluster: str, may_write: bool) -> None:
        self.path = Path(f"{out}.cluster.yaml") if out else None
        self.keep = self.path is not None and self.path.exists() and Path(cluster).exists()
        self.keep = self.keep and self.path is not None and self.path.samefile(cluster)
        if self.path is None:
            return
        if self.keep and may_write:
            self._refuse("is the file of --cluster, and would be replaced")
        if self.path.exists() and not self.keep and not self._ours():
            self._refuse(f"is there and not by this command: beside the new {out} it would be taken for its cluster")
        if may_write:
            check_writable(str(self.path), "--out")

    def finish(self, text: str | None, quiet: bool) -> None:
        """Write ``text`` with our mark; None: the plan is for --cluster, and an earlier one goes."""
        if self.path is None:
            return
        message = ""
        if text is not None:
            write_text(self.path, "--out", MARK + text)
            message = f"the plan's ranks refer to {self.path}"
        elif not self.keep and self.path.exists():
            try:
                self.path.unlink()
            except OSError as error:
                raise unwritable(error, str(self.path), "--out") from None
            message = f"removed {self.path} of an earlier plan: this one's ranks refer to --cluster"
        if message and not quiet:
            print(message, file=sys.stderr)

    def _ours(self) -> bool:
        assert self.path is not None
        try:
            with self.path.open("rb") as file:
                return file.read(len(MARK)) == MARK.encode()
        except OSError:
            return False

    def _refuse(self, problem: str) -> None:
        raise UserError(problem, field="--out", value=str(self.path), accepted="another --out, or move that file away")
