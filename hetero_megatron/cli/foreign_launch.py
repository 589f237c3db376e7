"""Launch lines of Megatron-LM, FlagScale and NeMo in a script, or FlagScale's YAML, as Megatron's flags."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_megatron.cli.flags.parse import index
from hetero_megatron.cli.shell_script import ShellCommand, mark, read_script, unresolved
from hetero_megatron.utils.yaml_document import Entry, parse_document

_TRAINER = re.compile(r"[^=]*\.py")
_RANKS = ("nproc-per-node", "nnodes")  # of torchrun
_OTHERS = ("convert", "preprocess", "setup.py", "generate", "merge", "checkpoint/util", "eval", "infer", "server")
# NeMo's names that are not Megatron's: of the last parts of a key.
NEMO = {
    "trainer.max_steps": "train_iters", "model.encoder_seq_length": "seq_length", "model.optim.lr": "lr",
    "model.optim.sched.min_lr": "min_lr", "model.optim.sched.warmup_steps": "lr_warmup_iters",
    "model.optim.weight_decay": "weight_decay", "model.data.data_prefix": "data_path",
    "model.data.splits_string": "split", "trainer.gradient_clip_val": "clip_grad",
    "trainer.val_check_interval": "eval_interval", "trainer.limit_val_batches": "eval_iters",
    "trainer.log_every_n_steps": "log_interval", "model.layernorm_epsilon": "norm_epsilon",
    "model.tokenizer.model": "tokenizer_model", "model.data.index_mapping_dir": "data_cache_path",
    "model.activations_checkpoint_granularity": "recompute_granularity",
    "model.activations_checkpoint_method": "recompute_method",
    "model.activations_checkpoint_num_layers": "recompute_num_layers",
    "model.rotary_percentage": "rotary_percent", "model.nccl_communicator_config_path": "nccl_communicator_config_path",
}  # fmt: skip
_NEMO_RANKS = ("trainer.devices", "trainer.num_nodes")
_NEMO_PRECISION = {"bf16": "--bf16", "bf16-mixed": "--bf16", "16": "--fp16", "16-mixed": "--fp16", "32": ""}
_OVERRIDE = re.compile(r"\+*(?P<key>[a-z_]\w*(\.\w+)+)=(?P<value>.*)", re.DOTALL)
_OF_EXPERIMENT = ("save", "load", "tensorboard-dir")
_SECTIONS = ("system", "model", "data")  # of FlagScale's train configuration


@dataclass(frozen=True)
class Launch:
    """A launch line: the flags of ``program``; ``ranks``: what its launcher is told, None: nothing."""

    line: int
    program: str
    flags: tuple[str, ...]
    ranks: int | None


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
    overrides = [match for word in flags if (match := _OVERRIDE.fullmatch(word))]
    if overrides and not any(word.startswith("--") and word[2:].partition("=")[0].replace("-", "_") in
                             ("num_layers", "micro_batch_size", "model", "load_hf") for word in flags):  # fmt: skip
        own_flags, world = _nemo([(match["key"], match["value"]) for match in overrides])
        return Launch(command.line, words[start], tuple(own_flags), world or ranks)
    return Launch(command.line, words[start], tuple(flags), ranks)


def _is_trainer(words: Sequence[str], at: int) -> bool:
    """Whether a word is the program that trains: a script, or a command of ours."""
    word = words[at]
    if word in ("pretrain", "finetune"):
        return at > 0 and words[at - 1].rpartition("/")[2] in ("hetero-megatron", "hetero_megatron")
    script = _TRAINER.fullmatch(word) is not None and not any(other in word for other in _OTHERS)
    return script and any(word_after.startswith("--") or _OVERRIDE.fullmatch(word_after) or unresolved(word_after)
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


def _nemo(pairs: Sequence[tuple[str, str]]) -> tuple[list[str], int | None]:
    """(flags, ranks) of Hydra's overrides."""
    flags: list[str] = []
    ranks = 1
    for key, value in pairs:
        if key in _NEMO_RANKS:
            ranks *= int(value) if value.isdecimal() else 1
        elif key == "trainer.precision":
            flags += [flag] if (flag := _NEMO_PRECISION.get(value.strip("'\""), "")) else []
        else:
            flags += _flag(NEMO.get(key, key.rpartition(".")[2]), _plain(value))
    return flags, ranks if any(key in _NEMO_RANKS for key, _ in pairs) else None


def _plain(value: str) -> Any:
    text = value.strip("'\"")
    if text.lower() in ("true", "false", "null", "none"):
        return {"true": True, "false": False}.get(text.lower())
    if text.startswith("[") and text.endswith("]"):
        return [item.strip(" '\"") for item in text[1:-1].split(",")]
    return text


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
            flags += _flag(key, value)
    for key in _OF_EXPERIMENT:  # its runner adds these
        flags += [] if f"--{key}" in flags else [f"--{key}", mark("experiment.exp_dir")]
    return Launch(sections[0].line, "train.py", tuple(flags), None)


def _leaves(value: Mapping[str, Any]) -> list[tuple[str, Any]]:
    leaves: list[tuple[str, Any]] = []
    for key, item in value.items():
        leaves += _leaves(item) if isinstance(item, dict) else [(str(key), item)]
    return leaves


def _flag(key: str, value: Any) -> list[str]:
    """A flag as words; a switch that is off, and nothing, are none."""
    name = "--" + key.replace("_", "-")
    flag = index().get(name)
    if value is None or value is False:
        return []
    if value is True:
        return [name] if flag is None or flag.nargs == 0 else [name, "True"]
    if flag is not None and flag.nargs == 0:  # a value for a switch is refused by name
        return [f"{name}={value}"]
    return [name, *map(str, value)] if isinstance(value, list) else [name, str(value)]
