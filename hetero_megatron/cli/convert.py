"""``hetero-megatron convert SOURCE TARGET``: Hugging Face directory <-> native checkpoint."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hetero_megatron.checkpoint.foreign import refuse_foreign
from hetero_megatron.cli.arguments import refuse_empty
from hetero_megatron.cli.hub import model_directory
from hetero_megatron.errors import UserError
from hetero_megatron.training.exit import import_torch
from hetero_megatron.words import dtype_name, notice_line, plural

USAGE = """\
usage: hetero-megatron convert SOURCE TARGET [--dtype fp32|bf16|fp16|fp64] [--ckpt-step N]
                                [--check-finite] [--json]

  SOURCE is a Hugging Face directory, or a name on the hub: TARGET becomes a directory for --load (step 0,
  for any plan).
  SOURCE is a directory that --save wrote: TARGET becomes a Hugging Face directory.

  --dtype         of the written weights; otherwise each tensor's own, bit for bit (what it was before the training,
                  for a checkpoint; of a training from random weights, the training's)
  --ckpt-step     which checkpoint; otherwise the latest
  --check-finite  refuse weights with NaN or Inf, which are otherwise told and written
  --json          print one JSON object"""
_VALUES = ("--dtype", "--ckpt-step")
_SWITCHES = ("--json", "--check-finite")


def main(argv: Sequence[str]) -> int:
    if not argv or set(argv) & {"-h", "--help"}:
        print(USAGE)
        return 0 if argv else 2
    refuse_empty(argv)
    (source, target), options = _parse(argv)
    source = model_directory(source, "SOURCE")
    native, foreign = _kinds(Path(source))
    if not foreign:
        refuse_foreign(source, "SOURCE")
    if native == foreign:
        what = "is both a Hugging Face directory and one of checkpoints" if native else "holds no model"
        accepted = "a directory with config.json and weights, or one that --save wrote"
        raise UserError(what, field="SOURCE", value=source, accepted=accepted)
    if Path(target).exists() and (not Path(target).is_dir() or any(Path(target).iterdir())):
        raise UserError(
            "exists and is not an empty directory", field="TARGET", value=target, accepted="a new directory"
        )
    step = options.get("--ckpt-step")
    if step is not None and (foreign or not step.isdigit()):
        raise UserError("no step of SOURCE", field="--ckpt-step", value=step, accepted="a step, for a native SOURCE")
    # Only now: importing torch takes seconds, and a refusal should not.
    import_torch()
    from hetero_megatron.checkpoint.convert import DTYPES, from_native, to_native
    from hetero_megatron.checkpoint.finite import listed

    dtype = options.get("--dtype")
    dtype = None if dtype is None else dtype_name(dtype)
    if dtype is not None and dtype not in DTYPES:
        raise UserError("unknown value", field="--dtype", value=dtype, accepted=", ".join(DTYPES))
    start, finite = time.perf_counter(), "--check-finite" in options
    if native:
        done = from_native(source, target, dtype, None if step is None else int(step), finite)
    else:
        done = to_native(source, target, dtype, finite)
    done["bytes"] = sum(p.stat().st_size for p in Path(target).rglob("*") if p.is_file())
    done["seconds"] = round(time.perf_counter() - start, 3)
    told = [f"NaN or Inf in {listed(done['nonfinite'])}"] if done["nonfinite"] else []
    for notice in (*done["notices"], *told):
        print(notice_line(notice), file=sys.stderr)
    if "--json" in options:
        print(json.dumps(done))
    else:
        print(f"{done['direction']}: {done['model']}, {done['dtype']}, {plural(done['bytes'], 'byte')} in {target}")
    return 0


def _parse(argv: Sequence[str]) -> tuple[tuple[str, str], dict[str, str]]:
    places, options, words = [], {}, iter(argv)
    for word in words:
        name, separator, value = word.partition("=")
        if name in _VALUES:
            found = value if separator else next(words, None)
            if found is None:
                raise UserError("has no value", field=name, accepted=USAGE.splitlines()[0])
            options[name] = found
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


def _kinds(source: Path) -> tuple[bool, bool]:
    """(is a directory of native checkpoints, is a Hugging Face directory)."""
    return (source / "latest").exists() or any(source.glob("iter_*")), (source / "config.json").exists()
