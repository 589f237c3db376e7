"""``hetero-megatron``: one sub-command per task; what each does, and an example, for help and shell completion."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

import hetero_megatron.environment.interrupt  # first
from hetero_megatron.cli.arguments import version_line
from hetero_megatron.cli.log import say_error
from hetero_megatron.cli.output import json_alone, while_read
from hetero_megatron.errors import INTERRUPTED, UserError
from hetero_megatron.training.exit import outlive_terminal
from hetero_megatron.utils.out_of_memory import out_of_memory
from hetero_megatron.utils.text import did_you_mean


class Command(NamedTuple):
    """``name`` is also the module of this package whose ``main(words)`` runs it, unless ``at`` says
    ``module.function``; ``parts``: its own sub-commands."""

    name: str
    does: str
    example: str
    parts: tuple[str, ...] = ()
    at: str = ""


GROUPS: dict[str, tuple[Command, ...]] = {
    "Train": (
        Command("pretrain", "train under a plan, with Megatron's flags (pretrain_gpt.py)",
                "torchrun --nproc-per-node 4 -m hetero_megatron pretrain --plan plan.yaml --model tiny --mock-data "
                "--train-iters 10 --lr 1e-3"),
        Command("finetune", "the same on conversations; what the assistant wrote counts",
                "hetero-megatron finetune --load-hf model --data-path chats.jsonl --split 1 --seq-length 1024 "
                "--micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr 1e-5 --save-hf tuned",
                at="pretrain.finetune"),
        Command("score", "what a model says of training data, in a file that its students learn from",
                "hetero-megatron score --load-hf teacher --data-path chats.jsonl --sft --split 1 --seq-length 1024 "
                "--micro-batch-size 1 --global-batch-size 8 --train-iters 100 --save-scores scores.bin",
                at="pretrain.score"),
        Command("check", "what would be honoured, noticed and refused of a Megatron, NeMo or FlagScale launch script",
                "hetero-megatron check pretrain_llama.sh"),
        Command("generate", "continue prompts with a model, to look at what came out",
                "hetero-megatron generate --load-hf tuned --prompt 'What is a pipeline?' --chat"),
        Command("run", "start the ranks of a plan here, and go on when some fail",
                "hetero-megatron run --plan plan.yaml -- --model tiny --mock-data --train-iters 10 --lr 1e-3 "
                "--save runs/tiny --load runs/tiny"),
        Command("launch", "start a command on all hosts of a cluster: ssh, SLURM, Kubernetes",
                "hetero-megatron launch --cluster cluster.yaml -- pretrain_gpt.py --cluster cluster.yaml "
                "--plan plan.yaml --model llama3-8b --mock-data --train-iters 10 --lr 1e-4"),
        Command("top", "a run while it goes on: loss, time left, what every rank does",
                "hetero-megatron top runs/tiny"),
        Command("report", "one page about a run: plan, timeline, loss, throughput, events",
                "hetero-megatron report runs/tiny"),
    ),
    "Plan": (
        Command("plan", "search for the best plan of a model on a cluster",
                "hetero-megatron plan --model llama3-8b --cluster cluster.yaml --seq-length 4096 "
                "--global-batch-size 64 --out plan.yaml"),
        Command("predict", "simulate one plan: step time, memory, timeline",
                "hetero-megatron predict --plan plan.yaml --cluster cluster.yaml --html timeline.html"),
        Command("schedule", "one pipeline under every schedule: step, bubble, memory, picture",
                "hetero-megatron schedule --stages 4 --micro-batches 8"),
        Command("calibrate", "measure the chips and links of a cluster, and write the rates into its file",
                "torchrun --nproc-per-node 4 -m hetero_megatron calibrate --cluster cluster.yaml --model tiny"),
    ),
    "Data and checkpoints": (
        Command("preprocess", "tokenize JSON lines once: Megatron's .bin/.idx",
                "hetero-megatron preprocess --input corpus.jsonl --output-prefix corpus --append-eod "
                "--tokenizer-model gpt2 --workers 4"),
        Command("convert", "Hugging Face checkpoint <-> native checkpoint",
                "hetero-megatron convert runs/tiny exported"),
    ),
    "Machines": (
        Command("doctor", "what this machine has, what is missing, how to mend it", "hetero-megatron doctor"),
        Command("cluster", "a cluster file of hosts that are asked what they have",
                "hetero-megatron cluster discover 10.0.0.1 10.0.0.2 --out cluster.yaml", ("discover",)),
        Command("cards", "kinds of cards: data sheets, and what somebody measured of them",
                "hetero-megatron cards compare RTX3090 RTX4090", ("list", "show", "compare", "contribute", "check")),
        Command("comm", "check that all ranks reach each other, byte by byte, and measure how fast",
                "torchrun --nproc-per-node 2 -m hetero_megatron comm check", ("check",)),
        Command("plugins", "platforms and kernels: list, scaffold, conformance kit",
                "hetero-megatron plugins new acme && hetero-megatron plugins check acme",
                ("list", "new", "check", "compare", "drift")),
        Command("testbed", "run a command on a heterogeneous cluster that is emulated on this machine",
                "hetero-megatron testbed run --cluster cluster.yaml -- hetero-megatron pretrain --plan plan.yaml "
                "--model tiny --mock-data --train-iters 2 --lr 1e-3", ("run", "status", "clean", "fault")),
        Command("completion", "a script for bash, zsh or fish that completes commands and flags",
                'eval "$(hetero-megatron completion bash)"', ("bash", "zsh", "fish")),
    ),
}  # fmt: skip
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}


def entry(name: str) -> Callable[[Sequence[str]], int]:
    """The function of a command, whose module is imported now."""
    module, _, function = (COMMANDS[name].at or f"{name}.main").partition(".")
    run: Callable[[Sequence[str]], int] = getattr(import_module(f"hetero_megatron.cli.{module}"), function)
    return run


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
        command = entry(name)  # until then Ctrl-C ends the process
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
