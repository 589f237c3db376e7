"""Which files of the package a run goes through: ``python -m tests.support.walk OUT UNTIL PROGRAM WORDS...``.

Runs a program of this repository (a script, or ``hetero-megatron``) under ``sys.setprofile`` until a function named
UNTIL is called in torch, or until the program ends, and writes JSON to OUT: ``entered``, the files of
``hetero_megatron`` in which the main thread called a function, in the order of their first call; ``imported``, those
whose modules were loaded.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.support.paths import ROOT

PACKAGE = str(ROOT / "hetero_megatron") + os.sep


def imports(frame: FrameType | None) -> bool:
    """Whether a module of the package is being loaded: its tables and decorators are not where a run goes."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


class Walk:
    """Notes the files entered, and ends the process where UNTIL is reached."""

    def __init__(self, out: Path, until: str) -> None:
        self._out, self._until = out, until
        self._seen: set[CodeType] = set()
        self._entered: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        ours = code.co_filename.startswith(PACKAGE)
        if (ours or code.co_name == self._until) and imports(frame):
            return
        self._seen.add(code)
        if ours:
            self._entered.setdefault(code.co_filename.removeprefix(PACKAGE))
        elif code.co_name == self._until and f"{os.sep}torch{os.sep}" in code.co_filename:
            self.write()
            os._exit(0)

    def write(self) -> None:
        """What was seen so far."""
        sys.setprofile(None)
        paths = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
        imported = sorted(path.removeprefix(PACKAGE) for path in paths if path and path.startswith(PACKAGE))
        partial = self._out.with_suffix(".partial")
        partial.write_text(json.dumps({"entered": list(self._entered), "imported": imported}))
        partial.replace(self._out)


def main(out: str, until: str, program: str, *words: str) -> None:
    walk = Walk(Path(out), until)
    sys.argv = [program, *words]
    exit_at_once = os._exit

    def ended(code: int) -> None:
        walk.write()
        exit_at_once(code)

    os._exit = ended  # type: ignore[assignment]  # programs of ranks end so
    sys.setprofile(walk)
    try:
        if program == "hetero-megatron":
            from hetero_megatron.cli.start import console

            sys.exit(console())
        runpy.run_path(program, run_name="__main__")
    finally:
        walk.write()


if __name__ == "__main__":
    main(*sys.argv[1:])
