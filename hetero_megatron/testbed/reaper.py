"""The process that outlives the launcher and removes what it left, however it ended.

    python -m hetero_megatron.testbed.reaper DIRECTORY

It waits until its standard input is closed, which the kernel does when the launcher ends, also by kill -9. It has a
session of its own and ignores the terminal's signals.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from hetero_megatron.testbed.state import Testbed, clean


def main(directory: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1024):
        pass
    try:
        clean(Testbed(Path(directory)))
    except RuntimeError as error:
        print(f"testbed: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
