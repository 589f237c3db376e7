"""The process that a user's reward function runs in: python -m hetero_megatron.training.reward_process FILE NAME

Each line of standard input is a call, a JSON object of the keyword arguments; each line of standard output its answer:
``{"rewards": [...]}``, or ``{"error": "..."}``, what went wrong in one line. What the function prints goes to standard
error; it and programs that it starts find standard input empty.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any


def main(path: str, name: str) -> None:
    """Load the function, say so, and answer calls until standard input ends."""
    calls, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(path).resolve().parent))

    def say(answer: dict[str, object]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        function = _names(path).get(name)
    except BaseException as error:
        say({"error": f"cannot be loaded: {_told(error, path)}"})
        return
    if not callable(function):
        say({"error": f"{path} has no function {name}"})
        return
    say({"rewards": []})
    with closing(asyncio.new_event_loop()) as loop:
        for line in calls:
            try:
                given = function(**json.loads(line))
                say({"rewards": _numbers(loop.run_until_complete(given) if inspect.isawaitable(given) else given)})
            except BaseException as error:
                say({"error": f"raises {_told(error, path)}"})


def _names(path: str) -> Mapping[str, Any]:
    """What a file defines; as a module, in which pickle and dataclasses look for it."""
    stem = Path(path).stem
    module = ModuleType(stem if stem not in sys.modules else "reward_function")
    sys.modules[module.__name__], module.__file__ = module, path
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(module))
    return vars(module)


def _numbers(given: Any) -> list[float | None]:
    if isinstance(given, (str, bytes, Mapping)):
        raise TypeError(f"it returns a {type(given).__name__}, no list of numbers")
    return [None if reward is None else float(reward) for reward in given]


def _told(error: BaseException, path: str) -> str:
    """An error in one line, with the last line of the file that it went through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    place = f" (line {lines[-1]})" if lines else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300] + place


if __name__ == "__main__":
    main(*sys.argv[1:])
