"""One case: its input is made from (seed, kind, number), and the program is run on it."""

from __future__ import annotations

import contextlib
import io
import random
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import chats, documents, flags, runs, weights

# kind -> share of the cases
KINDS = {"plans": 6, "clusters": 5, "configs": 6, "weights": 6, "checkpoints": 6, "logs": 5, "flags": 6,
         "records": 6, "templates": 4}  # fmt: skip
SLOW = ("weights", "checkpoints")  # kinds that read tensors
ACCEPTED, REFUSED, TRACEBACK, HANG, CRASH = "accepted", "refused", "traceback", "hang", "crash"
# What a library says of itself, or advice against a safety check, is no message of ours.
FOREIGN = re.compile(r"Traceback \(most recent|weights_only|object at 0x|\bNoneType\b|Errno \d")


@dataclass(frozen=True)
class Outcome:
    """How one case ended; ``words``: what the program said last."""

    result: str
    words: str


def kind_of(number: int) -> str:
    """Kinds take turns, so that any first N cases have all of them."""
    names = [name for name, share in KINDS.items() for _ in range(share)]
    return names[(number * 17) % len(names)]


def make(seed: int, kind: str, number: int, folder: Path, bases: Path) -> list[str]:
    """Write the input of a case into an empty folder; returns the words to start the program with."""
    rng = random.Random(f"{seed} {kind} {number}")
    if kind == "plans":
        return documents.plan(rng, folder)
    if kind == "clusters":
        return documents.cluster(rng, folder)
    if kind == "configs":
        return documents.config(rng, folder)
    if kind == "weights":
        return weights.model(rng, folder)
    if kind == "checkpoints":
        return runs.checkpoint(rng, folder, bases / "checkpoint")
    if kind == "logs":
        return runs.log(rng, folder, bases / "run")
    if kind == "records":
        return chats.record(rng, folder, bases / "chat")
    if kind == "templates":
        return chats.template(rng, folder, bases / "chat")
    return flags.line(rng, flags.known_flags())


def run(words: list[str]) -> Outcome:
    """Run the program in this process."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = _started(_configure, words[1:]) if words[0] == "pretrain_gpt.py" else (
                _started(chats.encode, words) if words[0] == "chat" else _command(words)
            )  # fmt: skip
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "/hetero_megatron/" in f.filename] or frames
        where = f"{own[-1].filename.rpartition('/hetero_megatron/')[2]}:{own[-1].lineno}"
        text = ascii(str(error))[:120] if not isinstance(error, RecursionError) else ""
        return Outcome(TRACEBACK, f"{where}: {type(error).__name__}: {text}")
    text = said.getvalue()
    if code == 2 and not text.strip():
        return Outcome(TRACEBACK, "a refusal without a word")
    if found := FOREIGN.search(text):
        return Outcome(TRACEBACK, f"not our words: {found.group()}: {ascii(text[:200])}")
    if code not in (0, 2):
        return Outcome(TRACEBACK, f"exit code {code}: {ascii(text[:200])}")
    return Outcome(ACCEPTED if code == 0 else REFUSED, ascii(text[-300:]))


def _command(words: list[str]) -> int:
    from hetero_megatron.cli.main import main

    return main(words)


def _started(part: Callable[[list[str]], int], words: list[str]) -> int:
    """A part of what a rank does; its refusal is said as the program says it."""
    import sys

    from hetero_megatron.errors import UserError

    try:
        return part(words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _configure(words: list[str]) -> int:
    """What every rank does with its command line before anything else."""
    from hetero_megatron.cli.configure import configure

    configure(words, {"WORLD_SIZE": "1"})
    return 0
