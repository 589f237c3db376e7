"""Launch lines of Megatron-LM, FlagScale and NeMo (``nemo_launch``) in a script, or FlagScale's YAML, as Megatron's
flags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_megatron.cli.nemo_launch import ITS_YAML, OVERRIDE, flag_words, read_overrides
from hetero_megatron.cli.shell_script import Judged, ShellCommand, mark, read_script, unresolved
from hetero_megatron.utils.yaml_document import Entry, parse_document

_TRAINER = re.compile(r"[^=]*\.py")
_RANKS = ("nproc-per-node", "nnodes")  # of torchrun
_OTHERS = ("convert", "preprocess", "setup.py", "generate", "merge", "checkpoint/util", "eval", "infer", "server")
_OF_EXPERIMENT = ("save", "load", "tensorboard-dir")
_OF_FLAGS = {"num_layers", "micro_batch_size", "model", "load_hf"}  # a line with one of these is none of overrides
_SECTIONS = ("system", "model", "data")  # of FlagScale's train configuration


@dataclass(frozen=True)
class Launch:
    """A launch line: the flags of ``program``; ``ranks``: what its launcher is told, None: nothing; ``others``: what
    is said of words that are no flag of this program; ``notice``: of what is not in the line, empty: nothing."""

    line: int
    program: str
    flags: tuple[str, ...]
    ranks: int | None
    others: tuple[Judged, ...] = ()
    notice: str = ""


def launches_of(text: str, name: str, given: Mapping[str, str]) -> list[Launch]:
    """In the order of the file."""
    if name.endswith((".yaml", ".yml")):
        return [launch] if (launch := _flagscale(parse_document(text, name))) is not None else []
    return [launch for command in read_script(text, given) if (launch := _launch(command)) is not None]


def _launch(command: ShellCommand) -> Launch | None:
    words = command.words
    start = next((i for i, word in enumerate(words) if _is_trainer(words, i)), None)
    if start is None:
        return None
    flags: Sequence[str] = words[start + 1 :]
    ranks = _ranks(words[:start])
    given_flags = {word[2:].partition("=")[0].replace("-", "_") for word in flags if word.startswith("--")}
    if any(map(OVERRIDE.fullmatch, flags)) and not given_flags & _OF_FLAGS:
        nemo = read_overrides(flags)
        return Launch(command.line, words[start], tuple(nemo.flags), nemo.ranks or ranks, tuple(nemo.others), ITS_YAML)
    return Launch(command.line, words[start], tuple(flags), ranks)


def _is_trainer(words: Sequence[str], at: int) -> bool:
    """Whether a word is the program that trains: a script, or a command of ours or of NeMo 2."""
    word = words[at]
    if word in ("pretrain", "finetune"):
        nemo = at > 1 and words[at - 1] == "llm" and words[at - 2].rpartition("/")[2] == "nemo"
        return nemo or (at > 0 and words[at - 1].rpartition("/")[2] in ("hetero-megatron", "hetero_megatron"))
    script = _TRAINER.fullmatch(word) is not None and not any(other in word for other in _OTHERS)
    return script and any(word_after.startswith("--") or OVERRIDE.fullmatch(word_after) or unresolved(word_after)
                          for word_after in words[at + 1 :])  # fmt: skip


def _ranks(words: Sequence[str]) -> int | None:
    """How many ranks a launcher's words ask for."""
    rank_flags: dict[str, str] = {}
    for position, word in enumerate(words):
        name, separator, value = word.partition("=")
        key = name.lstrip("-").replace("_", "-")
        if name.startswith("--") and key in (*_RANKS, "ntasks"):
            rank_flags[key] = value if separator else (list(words) + [""])[position + 1]
        elif name == "-n" and words[0].rpartition("/")[2] in ("srun", "mpirun"):
            rank_flags["ntasks"] = (list(words) + [""])[position + 1]
    if not rank_flags:
        return None
    if rank_flags.get("ntasks", "").isdecimal() and "nproc-per-node" not in rank_flags:
        return int(rank_flags["ntasks"])
    local, nodes = rank_flags.get("nproc-per-node", "1"), rank_flags.get("nnodes", "1").rpartition(":")[2]
    return int(local) * int(nodes) if local.isdecimal() and nodes.isdecimal() and int(local) * int(nodes) else None


def _flagscale(document: Entry) -> Launch | None:
    """The flags that FlagScale's runner makes of its configuration: each leaf's key with dashes, and its value."""
    keys = document.any_mapping()
    train = keys["train"].any_mapping() if "train" in keys and isinstance(keys["train"].value, dict) else keys
    sections = [train[name] for name in _SECTIONS if name in train and isinstance(train[name].value, dict)]
    if not sections:
        return None
    flags: list[str] = []
    for section in sections:
        for key, value in _leaves(section.plain()):
            flags += flag_words("--" + key.replace("_", "-"), value)
    for key in _OF_EXPERIMENT:  # its runner adds these
        flags += [] if f"--{key}" in flags else [f"--{key}", mark("experiment.exp_dir")]
    return Launch(sections[0].line, "train.py", tuple(flags), None)


def _leaves(value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, item in value.items():
        leaves += _leaves(item) if isinstance(item, dict) else [(str(key), item)]
    return leaves
