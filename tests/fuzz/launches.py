"""Launch lines of NeMo with overrides of every form, through ``check``: each word is honoured, noticed or refused."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

from tests.fuzz import mutate

BASE = [
    "python", "megatron_gpt_pretraining.py", "trainer.devices=1", "trainer.max_steps=9", "model.num_layers=2",
    "model.hidden_size=64", "model.num_attention_heads=4", "model.encoder_seq_length=64", "model.micro_batch_size=1",
    "model.optim.lr=1e-3", "model.data.data_prefix=[1.0,stdlib]",
]  # fmt: skip
_VALUES = (
    "true", "False", "null", "0", "1", "2", "1.0", "[0,1]", "['0', \"1\"]", "[]", "{}", "{a: 1, b: [2, x]}",
    "[1.0,/d]", "rmsnorm", "fast-swiglu", "bf16-true", "16-mixed", "fp8", "rope", "alibi", "'quoted, text'",
    "${model.hidden_size}", "${oc.env:HOME}", "", "[", "{a:", "-1", "1e-5", "nan", "[[1],[2]]", "cosine",
    "CosineAnnealing", "fused_adam", "$X",
)  # fmt: skip
_OTHERS = ("~model.optim.sched", "~exp_manager.x", "model/optim=adam", "name=run", "--config-name=x", "-cn", "stray",
           "+model@a=b", "--multirun", "=5", "model.=3", ".a=1", "++", "~", "a.b.c.d.e=1",
           "hydra.run.dir=x")  # fmt: skip


def line(rng: random.Random, folder: Path) -> list[str]:
    """A script with one launch line."""
    from hetero_megatron.cli.nemo_keys import KEYS

    keys = sorted(KEYS.accepted_keys)
    extra = []
    for _ in range(rng.randint(1, 3)):
        key = rng.choice(keys)
        if rng.random() < 0.2:
            key = rng.choice((key[:-1], f"{key}s", key.upper(), f"x.{key}", key.replace(".", "_")))
        value = rng.choice(_VALUES) if rng.random() < 0.9 else str(mutate.odd_value(rng))[:200]
        word = f"{rng.choice(('', '', '+', '++'))}{key}={value}"
        extra.append(rng.choice(_OTHERS) if rng.random() < 0.15 else word)
    text = " ".join([*BASE, *(word if "$X" in word else shlex.quote(word) for word in extra)])
    (folder / "run.sh").write_text(text.encode("utf-8", "replace").decode() + "\n")
    (folder / "extra.json").write_text(json.dumps(extra))
    return ["check", str(folder / "run.sh"), "--json"]


def vanished(words: list[str]) -> str:
    """A word without which everything said of the line would be the same; empty: there is none."""
    from hetero_megatron.cli.check import check_launch
    from hetero_megatron.cli.foreign_launch import launches_of

    folder = Path(words[1]).parent
    extra = json.loads((folder / "extra.json").read_text())

    def said(some: list[str]) -> str:
        text = " ".join([*BASE, *(word if "$X" in word else shlex.quote(word) for word in some)])
        return str([check_launch(launch) for launch in launches_of(text, "x.sh", {})])

    whole = said(extra)
    base_keys = {word.partition("=")[0] for word in BASE}
    for at, word in enumerate(extra):
        key = word.partition("=")[0].lstrip("+")
        again = key in base_keys or sum(other.partition("=")[0].lstrip("+") == key for other in extra) > 1
        if word.strip() and not again and said([*extra[:at], *extra[at + 1 :]]) == whole:
            return f"nothing is said of {ascii(word[:80])}"
    return ""
