"""``hetero-megatron top``: a run while it goes on: loss, time left, and what every rank does."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from hetero_megatron.cli.arguments import ArgumentParser, Number
from hetero_megatron.errors import printable
from hetero_megatron.monitoring.live_view import LiveView, live_view, render
from hetero_megatron.monitoring.metrics import FILE
from hetero_megatron.monitoring.run_files import read_run


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser("top", "A run while it goes on: loss, time left, and what its ranks do. Ctrl-C ends it.")
    parser.add_argument("run", metavar="RUN_DIR", help="the --save directory of a run")
    parser.add_argument("--interval", type=Number(float, 0.1, 3600), default=2.0, metavar="SECONDS",
        help="between looks (default 2)")  # fmt: skip
    parser.add_argument("--once", action="store_true", help="look once (default where the output is no terminal)")
    args = parser.parse_args(list(argv))
    console = Console()
    name = printable(str(args.run))
    if args.once or not sys.stdout.isatty():
        console.print(render(_look(args.run), name))
        return 0
    try:
        with Live(render(_look(args.run), name), console=console, auto_refresh=False) as screen:
            while not (view := _look(args.run)).ended:
                screen.update(render(view, name), refresh=True)
                time.sleep(args.interval)
            screen.update(render(view, name), refresh=True)
    except KeyboardInterrupt:
        pass
    return 0


def _look(directory: str) -> LiveView:
    run = read_run(directory)
    return live_view(run, written=os.stat(Path(directory) / FILE).st_mtime)
