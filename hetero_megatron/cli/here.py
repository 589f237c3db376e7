"""``--nproc-per-node N`` before the flags of a command of ranks: all of its ranks on this host."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from hetero_megatron.cli.log import say_error
from hetero_megatron.environment.launcher import MAX_RANKS, refuse_copies
from hetero_megatron.errors import UserError
from hetero_megatron.training.exit import at_once

FLAGS = ("--nproc-per-node", "--nproc_per_node")
_CONFIGURED = ("pretrain", "finetune")
_HELP = {"-h", "--help", "--help-all", "--version"}


def asks_for_ranks(words: Sequence[str]) -> bool:
    """Not where help is asked for."""
    return any(word.partition("=")[0] in FLAGS for word in words) and _HELP.isdisjoint(words)


def main(command: str, words: Sequence[str]) -> int:
    """Refuse what can be refused before anything is started, then start the ranks; returns the exit code."""
    try:
        count, run_words = _count(words)
        refuse_copies(f"{FLAGS[0]} {count}", "starts all ranks by itself")
        if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
            raise UserError("a launcher has started this process as a rank (RANK, WORLD_SIZE)", field=FLAGS[0],
                            value=count, accepted="one of the two")  # fmt: skip
        if command in _CONFIGURED and "--auto-plan" not in run_words:  # each rank searches; here it would be once more
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
        if name in FLAGS:
            count = value if separator else (list(words) + [""])[index + 1]
            del other_words[index : index + (1 if separator else 2)]
            break
    if not re.fullmatch(r"[0-9]{1,6}", count) or not 1 <= int(count) <= MAX_RANKS or asks_for_ranks(other_words):
        raise UserError("is no number of ranks", field=FLAGS[0], value=count, accepted="1 or more, once")
    return int(count), other_words
