"""A process that runs the cases whose numbers it reads: it may die or hang in any of them."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from tests.fuzz import cases


def main() -> None:
    """Arguments: seed, folder of the bases, folder for inputs. Lines of standard input: ``KIND NUMBER``."""
    seed, bases, inputs = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        kind, number = line.split()
        folder = inputs / f"{kind}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        sys.setrecursionlimit(20_000)  # deep inputs are made here, and read below as a user's program reads them
        words = cases.make(seed, kind, int(number), folder, bases)
        sys.setrecursionlimit(1000)
        (folder / "words.json").write_text(json.dumps(words))
        here = os.getcwd()
        os.chdir(folder)
        outcome = cases.run(words, kind)
        os.chdir(here)
        print(json.dumps(asdict(outcome)), file=answers, flush=True)


if __name__ == "__main__":
    main()
