"""Entry points of the programs (``hetero-megatron``, ``pretrain_gpt.py``): settings that must hold before slow imports.

For whoever asks what runs first. The words of the command line go unread to ``cli/main.py``, or, for a rank, to the
command's module (``cli/pretrain.py``); what comes back is the exit code.
"""

from __future__ import annotations

import hetero_megatron.environment.interrupt  # noqa: F401  # first

# isort: split
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import NoReturn

from hetero_megatron.cli.log import say_error
from hetero_megatron.cli.output import json_alone, nobody_reads, while_read
from hetero_megatron.environment.launcher import MAX_RANKS, is_first, refuse_copies
from hetero_megatron.errors import INTERRUPTED, UserError
from hetero_megatron.training.exit import at_once, end_process, end_with_parent, outlive_terminal

# Commands that run as the ranks of a job, started alone or once per rank by a launcher, and where their functions are.
RANKS = {"pretrain": ("pretrain", "main"), "finetune": ("pretrain", "finetune"), "generate": ("generate", "main")}
CONFIGURED = ("pretrain", "finetune")
NPROC_FLAGS = ("--nproc-per-node", "--nproc_per_node")
_HELP = {"-h", "--help", "--help-all", "--version"}


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
        try:
            code = start_ranks(command, words) if asks_for_ranks(words) else _as_rank(command, words)
        except BrokenPipeError:
            code = nobody_reads()
    end_process(code)


def _as_rank(command: str, words: Sequence[str]) -> int:
    with json_alone(command, words):
        with at_once(is_first()):
            module, function = RANKS[command]
            run = getattr(import_module(f"hetero_megatron.cli.{module}"), function)
        return int(run(words))


def asks_for_ranks(words: Sequence[str]) -> bool:
    """Whether ``--nproc-per-node N`` asks for all ranks of a job on this host; not where help is asked for."""
    return any(word.partition("=")[0] in NPROC_FLAGS for word in words) and _HELP.isdisjoint(words)


def start_ranks(command: str, words: Sequence[str]) -> int:
    """Refuse what can be refused before anything is started, then start the ranks; returns the exit code."""
    try:
        count, run_words = _count(words)
        refuse_copies(f"{NPROC_FLAGS[0]} {count}", "starts all ranks by itself")
        if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
            raise UserError("a launcher has started this process as a rank (RANK, WORLD_SIZE)", field=NPROC_FLAGS[0],
                            value=count, accepted="one of the two")  # fmt: skip
        if command in CONFIGURED and "--auto-plan" not in run_words:  # each rank searches; here it would be once more
            from hetero_megatron.cli.configure import configure

            added_flags = ["--sft"] if command == "finetune" and "--sft" not in run_words else []
            configure([*added_flags, *run_words], {"WORLD_SIZE": str(count)}, early="--dry-run" not in run_words)
    except UserError as error:
        say_error(str(error))
        return 2
    with at_once():
        from hetero_megatron.launch.here import start_here
    return start_here(["-m", "hetero_megatron", command, *run_words], count)


def _count(words: Sequence[str]) -> tuple[int, list[str]]:
    """(ranks, the other words)."""
    other_words, count = list(words), ""
    for index, word in enumerate(words):
        name, separator, value = word.partition("=")
        if name in NPROC_FLAGS:
            count = value if separator else (list(words) + [""])[index + 1]
            del other_words[index : index + (1 if separator else 2)]
            break
    if not re.fullmatch(r"[0-9]{1,6}", count) or not 1 <= int(count) <= MAX_RANKS or asks_for_ranks(other_words):
        raise UserError("is no number of ranks", field=NPROC_FLAGS[0], value=count, accepted="1 or more, once")
    return int(count), other_words
