"""``hetero-megatron convert SOURCE TARGET``: Hugging Face directory <-> native checkpoint <- Megatron's checkpoint; and
either of the first two -> a GGUF file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetero_megatron.checkpoint.model_files import model_directory
from hetero_megatron.cli.arguments import refuse_empty
from hetero_megatron.cli.output import print_json
from hetero_megatron.errors import UserError
from hetero_megatron.spec import model_folder
from hetero_megatron.spec.foreign_checkpoints import is_megatron, refuse_foreign
from hetero_megatron.spec.mistaken import refuse_mistaken
from hetero_megatron.training.exit import import_torch
from hetero_megatron.utils.outputs import try_export, try_file
from hetero_megatron.utils.text import dtype_name, notice_line, plural

USAGE = """\
usage: hetero-megatron convert SOURCE TARGET [--dtype fp32|bf16|fp16|fp64] [--ckpt-step N]
                                [--model M] [--check-finite] [--json]

  SOURCE is a Hugging Face directory, or a name on the hub: TARGET becomes a directory for --load (step 0,
  for any plan).
  SOURCE is a directory that --save wrote: TARGET becomes a Hugging Face directory.
  SOURCE is a checkpoint of Megatron-LM (formats torch and torch_dist; its weights): TARGET becomes a directory
  for --load, and a second convert makes a Hugging Face directory of that.
  TARGET ends in .gguf: it becomes a file for llama.cpp, of one of the first two kinds of SOURCE (needs gguf).

  --dtype         of the written weights; otherwise each tensor's own, bit for bit (what it was before the training,
                  for a checkpoint; of a training from random weights, the training's)
  --ckpt-step     which checkpoint; otherwise the latest
  --model         of a checkpoint of Megatron-LM: the directory (or config.json) of the model, whose tokenizer comes
                  along; otherwise what the stored arguments say, without a tokenizer
  --check-finite  refuse weights with NaN or Inf, which are otherwise told and written
  --json          print one JSON object"""
_VALUES = ("--dtype", "--ckpt-step", "--model")
_SWITCHES = ("--json", "--check-finite")
HF, NATIVE, MEGATRON = "Hugging Face", "native", "Megatron-LM"
SUFFIX = ".gguf"


def main(argv: Sequence[str]) -> int:
    if not argv or set(argv) & {"-h", "--help"}:
        print(USAGE)
        return 0 if argv else 2
    refuse_empty(argv)
    (source, target), options = _parse(argv)
    source = model_directory(source, "SOURCE")
    kind = _kind(source)
    to_gguf = target.endswith(SUFFIX)
    if to_gguf and kind == MEGATRON:
        problem = "a checkpoint of Megatron-LM becomes a directory first"
        raise UserError(problem, field="TARGET", value=target, accepted="a directory for --load, then convert that")
    (_try_new_file if to_gguf else try_export)(target, "TARGET")
    step, model = options.get("--ckpt-step"), options.get("--model")
    if step is not None and (kind == HF or not (step.isascii() and step.isdigit()) or len(step) > 18):
        accepted = "a step, for a SOURCE of checkpoints"
        raise UserError("no step of SOURCE", field="--ckpt-step", value=step, accepted=accepted)
    if model is not None and kind != MEGATRON:
        accepted = "leave the flag out: it is for a SOURCE of Megatron-LM"
        raise UserError("SOURCE says what the model is", field="--model", value=model, accepted=accepted)
    # Only now: importing torch takes seconds, and a refusal should not.
    import_torch()
    from hetero_megatron.checkpoint.convert import DTYPES, from_native, to_native
    from hetero_megatron.utils.text import listed

    dtype = options.get("--dtype")
    dtype = None if dtype is None else dtype_name(dtype)
    if dtype is not None and dtype not in DTYPES:
        raise UserError("unknown value", field="--dtype", value=dtype, accepted=", ".join(DTYPES))
    start, finite, number = time.perf_counter(), "--check-finite" in options, None if step is None else int(step)
    if to_gguf:
        from hetero_megatron.checkpoint.convert import to_gguf as write

        report = write(source, target, kind == NATIVE, dtype, number, finite)
    elif kind == NATIVE:
        report = from_native(source, target, dtype, number, finite)
    elif kind == MEGATRON:
        report = _from_megatron(source, target, model, number, dtype, finite)
    else:
        report = to_native(source, target, dtype, finite)
    files = [Path(target)] if to_gguf else Path(target).rglob("*")
    report["bytes"] = sum(p.stat().st_size for p in files if p.is_file())
    report["seconds"] = round(time.perf_counter() - start, 3)
    nonfinite_notice = [f"NaN or Inf in {listed(report['nonfinite'])}"] if report["nonfinite"] else []
    for notice in (*report["notices"], *nonfinite_notice):
        print(notice_line(notice), file=sys.stderr)
    if "--json" in options:
        print_json(report)
    else:
        print(
            f"{report['direction']}: {report['model']}, {report['dtype']}, "
            f"{plural(report['bytes'], 'byte')} in {target}"
        )
    return 0


def _try_new_file(name: str, field: str) -> None:
    """UserError: it is there, or cannot be written."""
    if os.path.lexists(name):
        raise UserError("exists", field=field, value=name, accepted="a new file")
    try_file(name, field)


def _parse(argv: Sequence[str]) -> tuple[tuple[str, str], dict[str, str]]:
    places, options, words = [], {}, iter(argv)
    for word in words:
        name, separator, value = word.partition("=")
        if name in _VALUES:
            value_words = value if separator else next(words, None)
            if value_words is None:
                raise UserError("has no value", field=name, accepted=USAGE.splitlines()[0])
            options[name] = value_words
        elif word in _SWITCHES:
            options[word] = ""
        elif word.startswith("-"):
            raise UserError("unknown flag", field=word, accepted=USAGE.splitlines()[0])
        else:
            places.append(word)
    if len(places) != 2:
        problem = f"takes two directories, not {len(places)}"
        raise UserError(problem, field="convert", value=" ".join(places), accepted="SOURCE TARGET")
    return (places[0], places[1]), options


def _kind(source: str) -> str:
    """What SOURCE is. UserError: nothing that is read."""
    root = Path(source)
    native = (root / "latest").exists() or any(root.glob("iter_*"))
    foreign = (root / "config.json").exists()
    if is_megatron(root) and not (foreign and any(p.suffix in (".safetensors", ".bin") for p in root.iterdir())):
        return MEGATRON
    if root.is_file():
        refuse_mistaken(source, "SOURCE")
        accepted = "the directory that it is in, or one that --save wrote"
        raise UserError("is a file", field="SOURCE", value=source, accepted=accepted)
    if not foreign and not native:
        refuse_mistaken(source, "SOURCE")
    if not foreign:
        refuse_foreign(source, "SOURCE")
    if native == foreign:
        problem = "is both a Hugging Face directory and one of checkpoints" if native else "holds no model"
        accepted = "a directory with config.json and weights, one that --save wrote, or one of Megatron-LM"
        raise UserError(problem, field="SOURCE", value=source, accepted=accepted)
    return NATIVE if native else HF


def _from_megatron(
    source: str, target: str, model: str | None, step: int | None, dtype: str | None, check_finite: bool
) -> dict[str, Any]:
    from hetero_megatron.checkpoint.convert import import_weights
    from hetero_megatron.checkpoint.megatron.weights import MegatronWeights, open_megatron
    from hetero_megatron.checkpoint.model_files import ModelFiles, from_directory
    from hetero_megatron.cli.flags.megatron_checkpoint import spec_of_arguments

    tensors = open_megatron(source, step)
    spec, notices = spec_of_arguments(tensors.arguments, model, tensors.vocabulary_rows())
    folder = model_folder(model)
    model_files = from_directory(folder) if folder is not None else ModelFiles()
    direction = f"Megatron's {tensors.form} to native"
    weights = MegatronWeights(tensors, spec)
    weights.notices.extend(notices)
    return import_weights(weights, model_files, direction, target, dtype, check_finite)
