"""``metrics.jsonl`` of a run that goes on: what an earlier part of it recorded of later steps is taken out, so that
each step stands in it once. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import open_append, parse_json, text_lines

EVALUATED = ("validation", "test")  # <split>_loss is what a record of an evaluation holds
REPLACED = "metrics.replaced.jsonl"  # the lines that were taken out, in the order in which that happened


def rewind(path: Path, step: int | None = None, evaluated: int | None = None) -> bool:
    """Keep of a metrics file one line per step, the last, of the steps up to ``step`` (None: of all).

    What does not stay, and lines that cannot be read, are appended to ``metrics.replaced.jsonl`` beside it; then the
    file is replaced as a whole, so that a kill at any moment loses nothing.

    Args:
        evaluated: the step after which this run evaluates again, so that the evaluation recorded there goes.

    Returns:
        whether one was recorded there.

    Raises:
        UserError: the file cannot be read or written.
    """
    keys = [recorded(line, f"{path}:{number}") for number, line in text_lines(path, "--save")]
    last = {key: index for index, key in enumerate(keys)}
    evaluated_keys = {(f"{split}_loss", evaluated) for split in EVALUATED}

    def stays(index: int, key: tuple[str, int] | None) -> bool:
        if key is None or key[0] == "emulation":
            return key is not None
        return last[key] == index and key not in evaluated_keys and (step is None or key[1] <= step)

    keep = [stays(index, key) for index, key in enumerate(keys)]
    if not all(keep):
        _rewrite(path, keep)
    return not evaluated_keys.isdisjoint(last)


def last_step(path: Path) -> int:
    """Of the steps that a metrics file records; 0: none."""
    keys = (recorded(line, f"{path}:{number}") for number, line in text_lines(path, "--save"))
    return max((key[1] for key in keys if key is not None and key[0] == "step"), default=0)


def recorded(line: bytes, where: str) -> tuple[str, int] | None:
    """(what it records, step) of a line; None if it is not a record."""
    try:
        record = parse_json(line, where)
    except UserError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    if not line.endswith(b"\n") or not isinstance(step, int):
        return None
    # What was emulated holds for the part of the run that said so, whatever became of its last steps.
    kinds = ("emulation", *(f"{split}_loss" for split in EVALUATED))
    return next((kind for kind in kinds if kind in record), "step"), step


def _rewrite(path: Path, keep: list[bool]) -> None:
    part = path.with_name(f".{path.name}.incomplete")
    try:
        part.unlink(missing_ok=True)
        with open_append(path.with_name(REPLACED), "--save") as removed, open_append(part, "--save") as kept_lines:
            for (_, line), stays in zip(text_lines(path, "--save"), keep, strict=True):
                (kept_lines if stays else removed).write(line if line.endswith(b"\n") else line + b"\n")
            for file in (removed, kept_lines):
                os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise UserError(f"cannot be rewritten: {error.strerror}", field="--save", value=str(path)) from None
