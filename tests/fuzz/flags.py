"""Lines of flags for ``pretrain_gpt.py``: a good one, with words changed, added and left out."""

from __future__ import annotations

import random
import re

from tests.fuzz import mutate
from tests.support.paths import FIXTURES

BASE = [
    "--num-layers",
    "2",
    "--hidden-size",
    "16",
    "--num-attention-heads",
    "4",
    "--vocab-size",
    "100",
    "--mock-data",
    "--seq-length",
    "32",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "4",
    "--train-iters",
    "3",
    "--lr",
    "1e-3",
]


FLAGS = FIXTURES / "megatron_flags.txt"


def known_flags() -> list[str]:
    """Every flag of Megatron's, refused ones among them, and some of our own."""
    names = re.findall(r"--[a-z0-9-]+", FLAGS.read_text(encoding="utf-8"))
    return sorted(
        {*names, "--plan", "--cluster", "--model", "--load-hf", "--save-hf", "--dry-run", "--kernels", "--loss-scale"}
    )


def line(rng: random.Random, flags: list[str]) -> list[str]:
    words = list(BASE)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(words) + 1)
        change = rng.randrange(5)
        if change == 0 and words:
            del words[min(at, len(words) - 1)]
        elif change == 1:
            words.insert(at, _word(rng))
        elif change == 2:
            numbers = [i for i, word in enumerate(words) if not word.startswith("--")]
            if numbers:
                words[rng.choice(numbers)] = _word(rng)
        else:
            words += [rng.choice(flags), *(_word(rng) for _ in range(rng.choice((0, 1, 1, 2))))]
    return ["pretrain_gpt.py", *words]


def _word(rng: random.Random) -> str:
    """What can be on a command line: no NUL."""
    word = str(rng.choice(mutate.NUMBERS) if rng.random() < 0.6 else rng.choice(mutate.TEXTS))
    return (
        word.replace("\0", "")
        .encode("utf-8", "surrogateescape" if word.isascii() else "replace")
        .decode("utf-8", "replace")
    )
