"""Marks that say whether a turn counts in the loss, in the spellings of the programs that people come from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_megatron.errors import UserError

# Key of a turn, or beside the turns with a value for each of them: a true one counts.
COUNTS = (
    "loss", "loss_mask", "step_loss_mask", "train", "trainable", "training", "is_trainable", "train_on_turn", "learn",
    "calculate_loss", "compute_loss", "with_loss", "has_loss", "weight", "loss_weight", "loss_scale",
)  # fmt: skip
SPARED = ("ignore", "ignore_loss", "no_loss", "skip_loss", "mask_loss", "masked", "is_masked")  # a true one does not
LISTS = ("loss_masks", "train_mask", "train_masks", "weights", "loss_weights", "loss_scales")  # beside the turns
# Of these programs differ about what a true one means, or they mark parts of a turn.
UNCLEAR = ("mask", "masks", "train_detail", "training_detail", "train_details", "assistant_mask", "assistant_masks")
MARKS = (*COUNTS, *SPARED)
_WORDS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_ACCEPTED = "true, false, 1 or 0"
_UNCLEAR_ACCEPTED = "loss_mask: 1 for a turn that counts, 0 for another one (without KEY)"


def turn_mark(turn: Mapping[str, Any], field: str, where: str) -> bool | None:
    """Whether a turn is marked to count; None: it has no mark.

    Args:
        field: name of the turn, where: file and line, for messages.

    Raises:
        UserError: a fraction or another value, marks that contradict each other, or one whose meaning is not known.
    """
    for key in UNCLEAR:
        if turn.get(key) is not None:
            raise _unclear(key, turn[key], f"{field}.{key}", where)
    mark: bool | None = None
    mark_key = ""
    for key in MARKS:
        if key not in turn or (value := _truth(turn[key], f"{field}.{key}", where)) is None:
            continue
        counts = value if key in COUNTS else not value
        if mark is not None and counts != mark:
            raise UserError(
                f"contradicts {mark_key} of the same turn", field=f"{field}.{key}", value=shown(turn[key]), where=where,
                accepted="marks that agree, or one of them",
            )  # fmt: skip
        mark, mark_key = counts, key
    return mark


def marks_beside(
    record: Mapping[str, Any], turns: Sequence[bool | None], form: str, users: Sequence[str], where: str
) -> list[bool | None]:
    """The marks of turns, with those that the record has beside them.

    Args:
        turns: what the turns themselves say, one for each of the list under ``form``.
        users: names under which the user speaks in them.

    Raises:
        UserError: not one for each turn, another value than 0 and 1, or against what the turn says.
    """
    marks = list(turns)
    for key in UNCLEAR:
        value = record.get(key)
        if value is None or (isinstance(value, str) and value in users):  # NeMo: who is not learned from
            continue
        raise _unclear(key, value, key, where)
    for key in (*MARKS, *LISTS):
        value = record.get(key)
        if value is None:
            continue
        if not isinstance(value, list):
            _require_whole(key, value, where)
            continue
        if len(value) != len(marks):
            raise UserError(
                f"has {len(value):,} values for {len(marks):,} turns in {form}", field=key, value=shown(value),
                accepted="one for each turn: 1 where it counts, 0 where it does not", where=where,
            )  # fmt: skip
        for i, mark in enumerate(value):
            truth = _truth(mark, f"{key}[{i}]", where)
            counts = truth if truth is None or key not in SPARED else not truth
            if counts is not None and marks[i] not in (None, counts):
                raise UserError(
                    f"contradicts a mark of {form}[{i}]", field=f"{key}[{i}]", value=shown(mark), where=where,
                    accepted="marks that agree, or one of them",
                )  # fmt: skip
            marks[i] = marks[i] if counts is None else counts
    return marks


def refuse_marks(record: Mapping[str, Any], where: str) -> None:
    """UserError for a record without a list of turns that has a mark."""
    marks_beside(record, [], "a list of messages", (), where)


def _require_whole(key: str, value: Any, where: str) -> None:
    """A mark of the whole record may only say what holds without it; other texts describe the record."""
    if isinstance(value, str) and value.strip().lower() not in _WORDS:
        return
    truth = _truth(value, key, where, f"{_ACCEPTED}, or one value for each turn (jq 'del(.{key})' leaves it out)")
    if truth is not None and truth is (key in SPARED):
        selector = f".{key} | not" if key in SPARED else f".{key}"
        raise UserError(
            "the record is marked not to be learned from", field=key, value=shown(value), where=where,
            accepted=f"the other records (jq -c 'select({selector})' keeps those), or one value for each turn",
        )  # fmt: skip


def _truth(value: Any, field: str, where: str, accepted: str = _ACCEPTED) -> bool | None:
    if value is None:
        return None
    if isinstance(value, str):
        truth = _WORDS.get(value.strip().lower())
        if truth is not None:
            return truth
    elif isinstance(value, (int, float)) and value in (0, 1):  # bool, too
        return bool(value)
    fraction = isinstance(value, (int, float)) and not isinstance(value, bool)
    problem = "a turn counts or does not: there are no weights in between" if fraction else "is no such mark"
    raise UserError(problem, field=field, value=shown(value), accepted=accepted, where=where)


def _unclear(key: str, value: Any, field: str, where: str) -> UserError:
    return UserError(
        "programs differ about what it means", field=field, value=shown(value), where=where,
        accepted=_UNCLEAR_ACCEPTED.replace("KEY", key),
    )  # fmt: skip


def shown(value: Any) -> str:
    """A value of a record for a message."""
    return json.dumps(value, default=str)[:80]
