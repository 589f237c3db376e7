"""Schedules as a plan keeps them: a few letters per stage, with repeats counted; where they are long, packed in one
word."""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.schedule.actions import Action, Schedule
from hetero_megatron.schedule.generators import lower
from hetero_megatron.schedule.stage_orders import (
    KIND_OF_LETTER,
    Row,
    StageMemory,
    chunk_orders_of,
    held_bytes,
    orders_of,
    schedule_of,
    split_letter,
)
from hetero_megatron.schedule.validate import ScheduleError, format_rows, validate

VERSION, PACKED_VERSION = 1, 2
PACKED = "zlib:"
LONGEST = 240  # letters of all stages that are written as they are
KEYS = ("version", "name", "made_for", "num_micro_batches", "stages")
_ACTION = r"[FIWB](?:[1-9][0-9]{0,3})?"
_ITEM = re.compile(rf"((?:{_ACTION})+)(?:\*([1-9][0-9]{{0,8}}))?")
_LONGEST_REPEAT = 48  # letters; longer ones are written out
_MARK = "<-- ERROR HERE"


def compress(row: Row) -> str:
    """Runs of equal actions and repeated groups with their number: ``FFFFIFWIFWIW`` is ``F*4 IFW*2 IW``."""
    items: list[str] = []
    single = ""
    index = 0
    while index < len(row):
        length, count = _best_repeat(row, index)
        unit = "".join(row[index : index + length])
        if count == 1:
            single += unit
        else:
            items += [single] if single else []
            items.append(f"{unit}*{count}")
            single = ""
        index += length * count
    return " ".join([*items, single] if single else items)


def _best_repeat(row: Row, at: int) -> tuple[int, int]:
    """(length of a group, how often it follows itself at ``at``) that shortens the text most; (1, 1) where none
    does."""
    best, saved = (1, 1), 0
    for length in range(1, min(_LONGEST_REPEAT, (len(row) - at) // 2) + 1):
        unit = row[at : at + length]
        if row[at + length : at + 2 * length] != unit:
            continue
        count = 2
        while row[at + count * length : at + (count + 1) * length] == unit:
            count += 1
        saving = (count - 1) * sum(map(len, unit)) - len(f"*{count} ")
        if saving > saved:
            best, saved = (length, count), saving
    return best


def expand(text: str, most: int, field: str = "stages") -> Row:
    """The actions that :func:`compress` wrote: a str where all are of the first chunk, else a tuple.

    Args:
        most: actions that the result may have.

    Raises:
        UserError: an item that is no actions with a count, or too many actions; with the place marked.
    """
    actions: list[str] = []
    for item in re.finditer(r"\S+", text):
        match = _ITEM.fullmatch(item[0])
        if match is None:
            readable = _ITEM.match(item[0])
            raise _text_error("cannot be read", text, item.start() + (readable.end() if readable else 0), field)
        repeated, count = re.findall(_ACTION, match[1]), int(match[2] or 1)
        if len(actions) + len(repeated) * count > most:
            raise _text_error(f"makes more than the {most} actions that the stage can have", text, item.start(), field)
        actions += repeated * count
    return tuple(actions) if any(len(action) > 1 for action in actions) else "".join(actions)


def _text_error(problem: str, text: str, at: int, field: str) -> UserError:
    shown = text[max(0, at - 40) : at + 40]
    mark = " " * min(at, 40) + "^"
    form = "letters of F, I (B_INPUT), W and B, from the second chunk on with its number, with *COUNT or without"
    return UserError(f"character {at + 1} {problem} ({form})\n{shown}\n{mark}", field=field)


def stored_orders(schedule: Schedule) -> tuple[str, ...]:
    """The actions of every stage of a schedule with micro-batches in order in every chunk, as a plan keeps them.

    Raises:
        UserError: a schedule that this form cannot say.
    """
    orders: Sequence[Row] = orders_of(schedule) if schedule.chunks == 1 else chunk_orders_of(schedule)
    compute = tuple(tuple(a for a in row if a.kind in ("F", "B", "B_INPUT", "W")) for row in schedule.stages)
    if schedule_of(schedule.name, orders).stages != compute:
        raise UserError(
            "cannot be stored", field="schedule", value=schedule.name, accepted="micro-batches in order in every chunk"
        )
    return tuple(map(compress, orders))


def schedule_to_dict(name: str, orders: Sequence[str], num_micro_batches: int, made_for: str) -> dict[str, Any]:
    """A schedule as a plan file keeps it, and :func:`schedule_from_dict` reads it.

    Args:
        orders: of its stages, from :func:`stored_orders`.
        made_for: what it was made for, e.g. the fingerprint of the plan without its schedules.
    """
    plain = sum(map(len, orders)) <= LONGEST
    stages = list(orders) if plain else pack(orders)
    values = VERSION if plain else PACKED_VERSION, name, made_for, num_micro_batches, stages
    return dict(zip(KEYS, values, strict=True))


def pack(orders: Sequence[str]) -> str:
    """The orders of all stages as one word."""
    return PACKED + base64.urlsafe_b64encode(zlib.compress("\n".join(orders).encode(), 9)).decode()


def unpack(text: str, most: int, field: str) -> list[str]:
    """What :func:`pack` packed.

    Args:
        most: letters that the orders may have.

    Raises:
        UserError: it is no such word, or holds more.
    """
    try:
        reader = zlib.decompressobj()
        data = reader.decompress(base64.b64decode(text.removeprefix(PACKED), b"-_", validate=True), most + 1)
        orders = data.decode("ascii").split("\n")
        complete = reader.eof and len(data) <= most
    except (binascii.Error, zlib.error, ValueError):
        complete = False
    if not complete or not text.startswith(PACKED):
        accepted = "as it was written, whole; plan again"
        raise UserError("cannot be unpacked", field=field, value=text[:40], accepted=accepted)
    return orders


def schedule_from_dict(
    stored: Any,
    num_stages: int,
    num_micro_batches: int,
    made_for: str,
    memory: Sequence[StageMemory] = (),
    field: str = "schedule",
    num_chunks: int = 1,
) -> Schedule:
    """The stored schedule, proven to run.

    Args:
        num_stages, num_micro_batches, made_for: of the plan that it is used in.
        memory: per stage of one chunk, what its micro-batches hold and may hold; () leaves memory unchecked.
        field: where it was read, for messages.

    Raises:
        UserError: not of this form or version, for another plan, incomplete, out of order, deadlocked, or with more
            activations than the memory of a stage holds; with the place marked.
    """
    stored = unpacked(stored, num_stages, num_micro_batches * num_chunks, field)
    for key, value, planned in (
        ("num_micro_batches", stored["num_micro_batches"], num_micro_batches),
        ("stages", len(stored["stages"]), num_stages),
        ("made_for", stored["made_for"], made_for),
    ):
        if value != planned:
            raise UserError("was made for another plan", field=f"{field}.{key}", value=value, accepted=str(planned))
    orders = tuple(
        expand(text, 3 * num_micro_batches * num_chunks, f"{field}.stages[{s}]")
        for s, text in enumerate(stored["stages"])
    )
    for s, row in enumerate(orders):
        _check_counts(row, num_micro_batches, num_chunks, f"{field}.stages[{s}]")
        if memory:
            assert num_chunks == 1, "memory of several chunks"
            _check_memory(row, memory[s], f"{field}.stages[{s}]")
    schedule = schedule_of(stored["name"], orders, num_chunks)
    try:
        validate(lower(schedule))
    except ScheduleError as error:
        raise UserError(_around_mark(str(error)), field=field) from None
    return schedule


def unpacked(stored: Any, num_stages: int, passes: int, field: str = "schedule") -> Mapping[str, Any]:
    """The stored schedule with its orders as letters.

    Args:
        passes: micro-batches times chunks, each of which has at most three actions of five letters on a stage.

    Raises:
        UserError: not of this form or version, or it cannot be unpacked.
    """
    _check_keys(stored, field)
    if stored["version"] == VERSION:
        return dict(stored)
    stages = unpack(stored["stages"], num_stages * (24 * passes + 64), f"{field}.stages")
    return {**stored, "version": VERSION, "stages": stages}


def _check_keys(stored: Any, field: str) -> None:
    if not isinstance(stored, Mapping):
        raise UserError("is no stored schedule", field=field, value=stored, accepted=f"the keys {', '.join(KEYS)}")
    if stored.get("version") not in (VERSION, PACKED_VERSION) or isinstance(stored["version"], bool):
        raise UserError(
            "is another version of stored schedules; plan again",
            field=f"{field}.version",
            value=stored.get("version"),
            accepted=f"{VERSION} or {PACKED_VERSION}",
        )
    packed = stored["version"] == PACKED_VERSION
    for key in stored:
        if key not in KEYS:
            raise UserError("unknown key", field=f"{field}.{key}", accepted=", ".join(KEYS))
    stages = str if packed else Sequence
    for key, kind in (("name", str), ("made_for", str), ("num_micro_batches", int), ("stages", stages)):
        value = stored.get(key)
        text = key == "stages" and isinstance(value, str)
        if not isinstance(value, kind) or isinstance(value, bool) or (text and not packed):
            accepted = {"name": "text", "made_for": "text", "num_micro_batches": "a number"}
            accepted["stages"] = f"{PACKED}..." if packed else "a list of texts"
            raise UserError("is missing or no such value", field=f"{field}.{key}", value=value, accepted=accepted[key])
    for s, text in enumerate(() if packed else stored["stages"]):
        if not isinstance(text, str):
            raise UserError("is no text", field=f"{field}.stages[{s}]", value=text, accepted="e.g. F*4 IFW*2 IW")


def _check_counts(row: Row, count: int, chunks: int, field: str) -> None:
    """In every chunk, every micro-batch once forward and once backward, and a W for each B_INPUT; backwards after their
    forwards."""
    forwards, backwards, deferred = [0] * chunks, [0] * chunks, [0] * chunks
    for index, action in enumerate(row):
        letter, c = split_letter(action)
        if c >= chunks:
            raise _order_error(f"is of a chunk that the stage does not have (it has {chunks})", row, index, field)
        if letter == "F":
            forwards[c] += 1
        elif letter == "W":
            deferred[c] -= 1
        else:
            backwards[c] += 1
            deferred[c] += letter == "I"
        if forwards[c] > count:
            raise _order_error(f"is one forward more than {count} micro-batches have", row, index, field)
        if backwards[c] > forwards[c]:
            raise _order_error("comes before its forward", row, index, field)
        if deferred[c] < 0:
            raise _order_error("comes before its B_INPUT", row, index, field)
    forward_count = count * chunks
    for kind, missing in (
        ("F", forward_count - sum(forwards)), ("B or B_INPUT", forward_count - sum(backwards)), ("W", sum(deferred))
    ):  # fmt: skip
        if missing:
            raise UserError(f"ends with {missing} {kind} missing", field=field, value=compress(row))


def _check_memory(row: Row, memory: StageMemory, field: str) -> None:
    for index, held in enumerate(held_bytes(memory, row)):
        if held > memory.memory_bytes:
            problem = f"needs {held:g} bytes for activations, and the stage has {memory.memory_bytes:g}"
            raise _order_error(problem, row, index, field)


def _order_error(problem: str, row: Row, at: int, field: str) -> UserError:
    """Marks the action in the list; of letters that cannot be numbered only what comes before it is shown."""
    actions = schedule_of("", (row[:at],)).stages[0]
    letter, chunk = split_letter(row[at])
    alike = ("B", "B_INPUT") if letter in "IB" else (letter,)
    number = sum(a.kind in alike for a in actions if a.chunk == chunk)
    action = Action(KIND_OF_LETTER[letter], number, chunk)
    shown = format_rows({"order": (*actions, action)}, ("order", at))
    return UserError(f"{action}, action {at + 1}, {problem}\n{shown}", field=field)


def _around_mark(text: str) -> str:
    """The message with the marked row of its grid and those beside it: a pipeline may have many stages."""
    message, *grid = text.splitlines()
    marked = next((i for i, line in enumerate(grid) if _MARK in line), 0)
    return "\n".join([message, *grid[max(0, marked - 2) : marked + 3]])
