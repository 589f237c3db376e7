"""``hetero-megatron``: one sub-command per task."""

from __future__ import annotations

import hetero_megatron.environment.interrupt  # first

# isort: split
import sys
import textwrap
from collections.abc import Callable, Sequence

from hetero_megatron.cli.arguments import version_line
from hetero_megatron.cli.commands import COMMANDS, GROUPS, entry
from hetero_megatron.cli.log import say_error
from hetero_megatron.cli.output import json_alone, while_read
from hetero_megatron.errors import INTERRUPTED, UserError
from hetero_megatron.training.exit import at_once, outlive_terminal
from hetero_megatron.utils.out_of_memory import out_of_memory
from hetero_megatron.utils.text import did_you_mean


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words == ["--version"]:
        print(version_line())
        return 0
    try:
        with json_alone(words[0], words[1:]):
            command = load_command(words[0])
            return _help(command, words) if words[1:] in (["-h"], ["--help"]) else command(words[1:])
    except UserError as error:
        say_error(str(error))
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (RuntimeError, MemoryError, OSError, ImportError) as error:
        if (refusal := out_of_memory(error)) is not None:
            say_error(str(refusal))
            return 2
        if type(error).__name__ != "CommError":  # by name: importing it would import torch
            raise
        say_error(str(error))
        return 3


def load_command(name: str) -> Callable[[Sequence[str]], int]:
    """The function of a command, whose module is imported now; UserError for an unknown one."""
    if name in COMMANDS:
        with at_once():
            command = entry(name)
        hetero_megatron.environment.interrupt.release()
        return command
    problem = f"no such command{did_you_mean(name, COMMANDS)}"
    raise UserError(problem, field="command", value=name, accepted=", ".join(COMMANDS))


def _help(command: Callable[[Sequence[str]], int], words: Sequence[str]) -> int:
    """A command's own help, and an example."""
    try:
        code = command(words[1:])
    except SystemExit as end:  # argparse's help
        code = int(end.code or 0)
    print(example(words[0]))
    return code


def example(name: str) -> str:
    """The example of a command, with line breaks that a shell takes."""
    breaks = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False, subsequent_indent="      ")
    return "\nexample:\n  " + " \\\n".join(breaks.wrap(COMMANDS[name].example))


def usage() -> str:
    """What ``hetero-megatron --help`` prints."""
    lines = ["usage: hetero-megatron COMMAND ...      (hetero-megatron COMMAND --help: its flags)"]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {command.name:<11} {command.does}" for command in commands)]
    return "\n".join(lines)


if __name__ == "__main__":
    outlive_terminal()
    sys.exit(while_read(main))
