"""Entry points of the programs (``hetero-megatron``, ``pretrain_gpt.py``): settings that must hold before slow imports.

For whoever asks what runs first. The words of the command line go unread to ``cli/main.py``, or, for a rank, to the
command's module (``cli/pretrain.py``); what comes back is the exit code.
"""

from __future__ import annotations

import hetero_megatron.environment.interrupt  # noqa: F401  # first

# isort: split
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from hetero_megatron.cli.output import json_alone, nobody_reads, while_read
from hetero_megatron.environment.launcher import is_first
from hetero_megatron.training.exit import at_once, end_with_parent, outlive_terminal
from hetero_megatron.utils.exit_codes import INTERRUPTED

# Commands that run as the ranks of a job, started alone or once per rank by a launcher.
RANKS = ("pretrain", "finetune", "generate")


def console() -> int:
    """``hetero-megatron``. Returns the exit code; a command of ranks ends the process."""
    if sys.argv[1:2] and sys.argv[1] in RANKS and sys.argv[2:] not in (["-h"], ["--help"]):
        train(sys.argv[1], sys.argv[2:])
    try:
        outlive_terminal()
        with at_once():
            from hetero_megatron.cli.main import main
        return while_read(main)
    except KeyboardInterrupt:
        return INTERRUPTED


def train(command: str, words: Sequence[str]) -> NoReturn:
    """One of the commands of ``RANKS``, however it is started."""
    code = INTERRUPTED
    with suppress(KeyboardInterrupt):
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun's agent
            end_with_parent()
        outlive_terminal()
        with at_once(is_first()):
            module = import_module("hetero_megatron.cli.here")
        try:
            code = module.main(command, words) if module.asks_for_ranks(words) else _as_rank(command, words)
        except BrokenPipeError:
            code = nobody_reads()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # nobody reads it any more
            stream.flush()
    # Not sys.exit: gloo's threads may still be dropping tensors, and one that asks for the interpreter's lock while it
    # shuts down aborts the process ("terminate called without an active exception").
    os._exit(code)


def _as_rank(command: str, words: Sequence[str]) -> int:
    with json_alone(command, words):
        with at_once(is_first()):
            main = import_module(f"hetero_megatron.cli.{command}").main
        return int(main(words))
