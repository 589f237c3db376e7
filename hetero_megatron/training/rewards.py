"""A user's reward function, in a process of its own: whatever it does, it cannot end the run but with one line."""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.training.exit import end_with_parent

FLAG = "--reward-function"
_MODULE = "hetero_megatron.training.reward_process"
_LOADING = 60.0  # seconds that it may take at least
_MOST = 1e30  # advantages, and their sums over tokens, are numbers of fp32


class RewardFunction:
    """Starts the process and loads the function.

    Args:
        name: FILE.py:NAME.
        seconds: that a call may take.

    Raises:
        UserError: there is no such function, or it cannot be loaded.
    """

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self._seconds, self._unread = name, seconds, b""
        path, _, function = name.rpartition(":")
        root = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, path, function], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths}, preexec_fn=end_with_parent,
            start_new_session=True,  # what interrupts the run lets it finish its step
        )  # fmt: skip
        self._answer(max(seconds, _LOADING), "loading it")

    def __call__(self, columns: Mapping[str, Sequence[Any]], count: int) -> list[float]:
        """The rewards of ``count`` answers, NaN where it gives None; ``columns``: by name, what the function gets of
        each.

        Raises:
            UserError: it raises, ends its process, takes too long, or gives anything but a number or None for each.
        """
        sender = threading.Thread(target=self._send, args=(json.dumps(columns).encode() + b"\n",), daemon=True)
        sender.start()  # more than a pipe holds, to a process that may not read
        rewards = self._answer(self._seconds, "a call")
        if len(rewards) != count:
            raise self._refusal(f"gives {len(rewards)} rewards for {count} answers", "one for each answer")
        for i, reward in enumerate(rewards):
            if reward is not None and not abs(reward) <= _MOST:
                raise self._refusal(f"gives {reward} for answer {i} of {count}", f"-{_MOST:g} to {_MOST:g}, or None")
        if all(reward is None for reward in rewards):
            raise self._refusal(f"gives None for all {count} answers", "a number for one of them at least")
        return [math.nan if reward is None else reward for reward in rewards]

    def close(self) -> None:
        """End the process, and those that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()

    def _send(self, call: bytes) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(OSError, ValueError):  # it ended: what it says, or does not, tells why
            pipe.write(call)
            pipe.flush()

    def _answer(self, seconds: float, what: str) -> list[float | None]:
        line = self._line(time.monotonic() + seconds)
        if line is None:
            self.close()
            raise self._refusal(f"{what} takes more than {seconds:g} s", "a longer --reward-timeout, or less work")
        if not line:
            code = self._process.wait()
            raise self._refusal(f"ends its process ({'signal' if code < 0 else 'exit code'} {abs(code)})", "rewards")
        answer = json.loads(line)
        if "error" in answer:
            raise self._refusal(answer["error"], "FILE.py:NAME of a function that gives a number for each answer")
        return list(answer["rewards"])

    def _line(self, deadline: float) -> bytes | None:
        """The next line of its output; empty: it ended; None: nothing came in time."""
        assert self._process.stdout is not None
        pipe, poll = self._process.stdout.fileno(), select.poll()
        poll.register(pipe, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(1000 * max(deadline - time.monotonic(), 0)):
                return None
            part = os.read(pipe, 1 << 16)
            if not part:
                return b""
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _refusal(self, problem: str, accepted: str) -> UserError:
        return UserError(problem, field=FLAG, value=self.name, accepted=accepted)
