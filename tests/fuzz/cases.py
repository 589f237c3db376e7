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

from tests.fuzz import chats, documents, flags, foreign, launches, pieces, planning, runs, weights
from tests.support import cluster_words

# kind -> (share of the cases, writes the input into an empty folder and returns the words to start the program with)
Make = Callable[[random.Random, Path, Path], list[str]]
KINDS: dict[str, tuple[int, Make]] = {
    "plans": (6, lambda rng, folder, bases: documents.plan(rng, folder)),
    "clusters": (5, lambda rng, folder, bases: documents.cluster(rng, folder)),
    "words": (5, lambda rng, folder, bases: documents.words(rng, folder)),
    "configs": (6, lambda rng, folder, bases: documents.config(rng, folder)),
    "weights": (6, lambda rng, folder, bases: weights.model(rng, folder)),
    "checkpoints": (6, lambda rng, folder, bases: runs.checkpoint(rng, folder, bases / "checkpoint")),
    "logs": (5, lambda rng, folder, bases: runs.log(rng, folder, bases / "run")),
    "flags": (6, lambda rng, folder, bases: flags.line(rng, flags.known_flags())),
    "planning": (11, lambda rng, folder, bases: planning.case(rng, folder)),
    "adapters": (5, lambda rng, folder, bases: foreign.adapter(rng, folder, bases / "adapted")),
    "generation": (5, lambda rng, folder, bases: foreign.generation(rng, folder, bases / "adapted")),
    "records": (6, lambda rng, folder, bases: chats.record(rng, folder, bases / "chat")),
    "tokenizers": (4, lambda rng, folder, bases: foreign.tokenizer(rng, folder, bases / "chat")),
    "launches": (4, lambda rng, folder, bases: launches.line(rng, folder)),
    "templates": (4, lambda rng, folder, bases: chats.template(rng, folder, bases / "chat")),
}
SLOW = ("weights", "checkpoints", "adapters", "generation")  # kinds that read tensors
ACCEPTED, REFUSED, TRACEBACK, HANG, CRASH = "accepted", "refused", "traceback", "hang", "crash"
WRONG = "wrong"  # accepted, with numbers that cannot be, or other ones than the library has whose file it is
# What a library says of itself, or advice against a safety check, is no message of ours.
FOREIGN = re.compile(r"Traceback \(most recent|weights_only|object at 0x|\bNoneType\b|Errno \d")


@dataclass(frozen=True)
class Outcome:
    """How one case ended; ``words``: what the program said last."""

    result: str
    words: str


def kind_of(number: int) -> str:
    """Kinds take turns, so that any first N cases have all of them."""
    names = [name for name, (share, _) in KINDS.items() for _ in range(share)]
    return names[(number * 101) % len(names)]  # a prime, and more than there are


def make(seed: int, kind: str, number: int, folder: Path, bases: Path) -> list[str]:
    """Write the input of a case into an empty folder; returns the words to start the program with."""
    return KINDS[kind][1](random.Random(f"{seed} {kind} {number}"), folder, bases)


def run(words: list[str], kind: str = "") -> Outcome:
    """Run the program in this process; of some kinds the answer is looked at too."""
    said, shown, wrong = io.StringIO(), io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(said):
            if kind == "planning":
                code, wrong = planning.run(words)
            elif words[0] == "chat":
                code = _started(chats.encode, words)
            else:
                code = _started(_configure, words[1:]) if words[0] == "pretrain_gpt.py" else _command(words)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "/hetero_megatron/" in f.filename] or frames
        where = f"{own[-1].filename.rpartition('/hetero_megatron/')[2]}:{own[-1].lineno}"
        text = ascii(str(error))[:120] if not isinstance(error, RecursionError) else ""
        return Outcome(TRACEBACK, f"{where}: {type(error).__name__}: {text}")
    text = said.getvalue() or (shown.getvalue() if kind == "launches" else "")  # whose answer is on standard output
    if code == 0 and words[0] == "launch":
        try:
            cluster_words.check(Path(words[words.index("--cluster") + 1]))
        except AssertionError as error:
            return Outcome(TRACEBACK, f"a word acts: {ascii(str(error))[:200]}")
    if code == 2 and not text.strip():
        return Outcome(TRACEBACK, "a refusal without a word")
    if found := FOREIGN.search(text):
        return Outcome(TRACEBACK, f"not our words: {found.group()}: {ascii(text[:200])}")
    if code not in (0, 2):
        return Outcome(TRACEBACK, f"exit code {code}: {ascii(text[:200])}")
    try:
        wrong = wrong or _law(kind, words, code, shown.getvalue(), text)
    except Exception as error:
        wrong = f"the law cannot be checked: {type(error).__name__}: {ascii(str(error))[:200]}"
    if wrong:
        return Outcome(WRONG, wrong)
    return Outcome(ACCEPTED if code == 0 else REFUSED, ascii(text[-300:]))


def _law(kind: str, words: list[str], code: int, shown: str, said: str) -> str:
    """What is wrong with an answer, by what else says what it should be; empty: nothing."""
    if kind == "launches":
        return launches.vanished(words)
    if code == 0 and kind in ("adapters", "generation"):
        return foreign.differs(kind, words, shown)
    if code == 0 and kind == "tokenizers":
        return foreign.unsaid(words, said)
    return pieces.lost(words, shown) if code == 0 and kind == "records" else ""


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
