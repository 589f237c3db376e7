"""The process that a user's reward function runs in: python -m hetero_megatron.training.reward_process FILE NAME

Each line of standard input is a call, a JSON object of the keyword arguments; each line of standard output its answer:
``{"rewards": [...]}``, or ``{"error": "..."}``, what went wrong in one line. What the function prints goes to standard
error.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path


def main(path: str, name: str) -> None:
    """Load the function, say so, and answer calls until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(path).resolve().parent))

    def say(answer: dict[str, object]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        function = runpy.run_path(path, run_name=Path(path).stem).get(name)
    except BaseException as error:
        say({"error": f"cannot be loaded: {_told(error, path)}"})
        return
    if not callable(function):
        say({"error": f"{path} has no function {name}"})
        return
    say({"rewards": []})
    for line in sys.stdin:
        try:
            given = function(**json.loads(line))
            say({"rewards": [float(reward) for reward in given]})
        except BaseException as error:
            say({"error": f"raises {_told(error, path)}"})


def _told(error: BaseException, path: str) -> str:
    """An error in one line, with the last line of the file that it went through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    place = f" (line {lines[-1]})" if lines else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300] + place


if __name__ == "__main__":
    main(*sys.argv[1:])
