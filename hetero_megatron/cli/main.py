"""``hetero-megatron``: one sub-command per task."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from hetero_megatron.cli.arguments import version_line
from hetero_megatron.cli.say import say_error
from hetero_megatron.errors import UserError
from hetero_megatron.out_of_memory import out_of_memory
from hetero_megatron.training.exit import INTERRUPTED, at_once, outlive_terminal

# Each is a module of this package with a function main(arguments) -> exit code, imported when it is called.
_COMMANDS = {
    "calibrate": "measure the chips and links of a cluster, and write the rates into its file",
    "cluster": "discover: a cluster file of hosts that are asked what they have",
    "comm": "check that all ranks reach each other, byte by byte, and measure how fast",
    "convert": "Hugging Face checkpoint <-> native checkpoint",
    "doctor": "what this machine has, what is missing, how to mend it",
    "launch": "start a command on all hosts of a cluster: ssh, SLURM, Kubernetes",
    "plan": "search for the best plan of a model on a cluster",
    "plugins": "platforms and kernels: list, scaffold, conformance kit",
    "predict": "simulate one plan: step time, memory, timeline",
    "report": "one page about a run: plan, timeline, loss, throughput, events",
    "schedule": "one pipeline under every schedule: step, bubble, memory, picture",
    "run": "start the ranks of a plan here, and go on when some fail",
    "testbed": "run a command on a heterogeneous cluster that is emulated on this machine",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if words == ["--version"]:
        print(version_line())
        return 0
    try:
        return _command(words[0])(words[1:])
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


def _command(name: str) -> Callable[[Sequence[str]], int]:
    if name in _COMMANDS:
        with at_once():
            command: Callable[[Sequence[str]], int] = import_module(f"hetero_megatron.cli.{name}").main
        return command
    near = difflib.get_close_matches(name, _COMMANDS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"no such command{hint}", field="command", value=name, accepted=", ".join(_COMMANDS))


def _usage() -> str:
    lines = ["usage: hetero-megatron COMMAND ...", ""]
    lines += [f"  {name:<10} {text}" for name, text in _COMMANDS.items()]
    lines += ["", "training: python pretrain_gpt.py --help"]
    return "\n".join(lines)


if __name__ == "__main__":
    outlive_terminal()
    sys.exit(main())
