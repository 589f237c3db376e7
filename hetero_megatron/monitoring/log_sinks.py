"""Places where a run writes what it measures. None of them may end the run: what fails is said once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import open_append
from hetero_megatron.utils.text import notice_line


def tell(text: str) -> None:
    print(notice_line(text), flush=True)


class LineFile:
    """A file of lines that only grows. A line that cannot be written is left out whole, and later ones are tried again;
    a file that somebody removed or replaced is begun anew.

    Args:
        file: open for appending at ``path``.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self._file, self._reported = path, file, set[str]()

    def write(self, line: bytes) -> None:
        """``line`` with its end."""
        try:
            self._follow()
            handle = self._file.fileno()
            size, unwritten = os.fstat(handle).st_size, memoryview(line)
            try:
                while unwritten:
                    unwritten = unwritten[os.write(handle, unwritten) :]
            except OSError:
                os.ftruncate(handle, size)
                raise
        except OSError as error:
            self._say(f"cannot be written ({error.strerror}): lines are missing in it, and training goes on")
        except UserError as error:
            self._say(f"{error.problem}: lines are missing in it, and training goes on")

    def _follow(self) -> None:
        opened = os.fstat(self._file.fileno())
        try:
            at_path = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            at_path = None
            if not self.path.parent.is_dir():  # perhaps moved as a whole, and the file with it
                self._say("is no longer there, nor is its folder: lines go on in the file that was")
                return
        if at_path is None or (at_path.st_dev, at_path.st_ino) != (opened.st_dev, opened.st_ino):
            new_file = open_append(self.path)
            self._file.close()
            self._file = new_file
            self._say("was removed or replaced while the run writes it: it goes on in a new one")

    def _say(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            tell(f"{self.path} {text}")

    def close(self) -> None:
        self._file.close()


class Board:
    """A dashboard's writer, behind a library that may fail in any way; after its first failure it is left alone.

    Args:
        flag, place: that asked for it, for the notice.
        make: makes the writer.
    """

    def __init__(self, flag: str, place: str, make: Callable[[], Any]) -> None:
        self.flag, self.place, self.writer = flag, place, None
        self.writer = self.attempt(make)

    def attempt(self, call: Callable[[], Any]) -> Any:
        """What ``call`` returns; None, and a notice, where it fails.

        Raises:
            UserError: of ``call``'s own.
        """
        try:
            return call()
        except UserError:
            raise
        except Exception as error:  # whatever the library raises, the training is worth more
            self.writer = None
            reason = (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
            tell(f"{self.flag} {self.place} fails ({reason}): nothing more is written there, and training goes on")
            return None

    def do(self, action: Callable[[Any], Any]) -> None:
        """``action`` with the writer, while it works."""
        if (writer := self.writer) is not None:
            self.attempt(lambda: action(writer))


class QuietThreads:
    """A ``threading.excepthook`` that says nothing of a dashboard's own threads: what ends one of them is raised again
    where the dashboard is next written to, and told there.

    Args:
        before: the hook for all other threads.
        kinds: names of the threads' classes.
    """

    def __init__(self, before: Callable[[threading.ExceptHookArgs], Any], *kinds: str) -> None:
        self.before, self.kinds = before, kinds

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        if type(args.thread).__name__ not in self.kinds:
            self.before(args)

    @staticmethod
    def install(*kinds: str) -> None:
        if not isinstance(threading.excepthook, QuietThreads):
            threading.excepthook = QuietThreads(threading.excepthook, *kinds)
