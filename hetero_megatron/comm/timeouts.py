"""Blocking calls with a limit that they do not have themselves.

torch's stores and gloo's constructors block in C++, out of reach of Ctrl-C, and longer than the time-out that they were
given: gloo waits five times as long for a peer to connect, even for one whose process has ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TypeVar

from hetero_megatron.errors import UserError

LOOK_SECONDS = 2.0  # interval between looks at the peers; connecting usually takes milliseconds
T = TypeVar("T")


def in_time(seconds: float, call: Callable[[], T], gone: Callable[[], Collection[int]] = tuple) -> T:
    """What ``call`` returns or raises. It runs in a thread, which is left behind when the time is over.

    Args:
        gone: the ranks that ``call`` waits for whose processes have ended; asked every ``LOOK_SECONDS``.

    Raises:
        RuntimeError: it takes longer than ``seconds``, or waits for a rank that is gone.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(call())
        except Exception as error:  # of any kind: raised again by whoever waits
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True, name="connecting")
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and (left := end - time.monotonic()) > 0:
        thread.join(min(left, LOOK_SECONDS))
        if thread.is_alive() and gone():
            raise RuntimeError("it has not connected")
    if errors:
        raise errors[0]
    if not answers:
        raise RuntimeError(f"not connected after {seconds:g} s")
    return answers[0]


def within(seconds: float, call: Callable[[], T]) -> T | None:
    """The same; None if it fails or takes longer."""
    with suppress(RuntimeError, UserError):
        return in_time(seconds, call)
    return None
