"""Stored schedules: what was written is read, and what cannot run or is for another plan is refused with its place."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.errors import UserError
from hetero_megatron.schedule import Action, Schedule, generate
from hetero_megatron.schedule.adaptive import adaptive
from hetero_megatron.schedule.stage_orders import StageMemory
from hetero_megatron.schedule.stored import compress, expand, schedule_from_dict, schedule_to_dict, stored_orders
from tests.support.pipelines import random_times


def as_stored(schedule: Schedule, made_for: str) -> dict[str, Any]:
    count = sum(action.kind == "F" for action in schedule.stages[0])
    return schedule_to_dict(schedule.name, stored_orders(schedule), count, made_for)


@settings(max_examples=300, deadline=None)
@given(
    st.text("FIWB", max_size=60)
    | st.tuples(st.text("FIWB", max_size=5), st.integers(0, 300)).map(lambda x: x[0] * x[1])
)
def test_rows_survive_compression(row: str) -> None:
    text = compress(row)
    assert expand(text, len(row)) == row
    assert len(text) <= max(1, len(row))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_schedules_survive_being_stored(seed: int) -> None:
    draw = random.Random(seed)
    times, count = random_times(draw, draw.randint(1, 5)), draw.randint(0, 10)
    schedule = adaptive(times, count, effort=5_000)
    text = json.dumps(as_stored(schedule, "plan-1"))
    assert schedule_from_dict(json.loads(text), len(times.stages), count, "plan-1", times.stages) == schedule


def test_long_schedules_are_short_texts() -> None:
    stored = as_stored(generate("1f1b", 32, 256), "x")
    assert stored_orders(generate("1f1b", 32, 256))[0] == "F*32 BF*224 B*32"
    assert stored["version"] == 2 and len(stored["stages"]) < 320  # 32 such texts are packed in one word
    assert schedule_from_dict(stored, 32, 256, "x") == generate("1f1b", 32, 256)


def test_what_the_form_cannot_say_is_refused() -> None:
    chunked = Schedule("x", ((Action("F", 0, 1), Action("B", 0, 1)),))
    newest_first = Schedule("x", ((Action("F", 0), Action("F", 1), Action("B", 1), Action("B", 0)),))
    for schedule in (chunked, newest_first):
        with pytest.raises(UserError, match="cannot be stored"):
            as_stored(schedule, "x")


GOOD = {
    "version": 1,
    "name": "adaptive",
    "made_for": "plan-1",
    "num_micro_batches": 3,
    "stages": ["F*2 I F IW IW W", "FIW*3"],
}


def _row(stage: int, text: Any) -> Callable[[dict[str, Any]], object]:
    return lambda stored: stored["stages"].__setitem__(stage, text)


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "version": (lambda d: d.update(version=3), "schedule.version", "another version"),
    "no version": (lambda d: d.pop("version"), "schedule.version", "another version"),
    "unknown key": (lambda d: d.update(chunks=1), "schedule.chunks", "unknown key"),
    "name": (lambda d: d.update(name=None), "schedule.name", "missing or no such value"),
    "stages": (lambda d: d.update(stages="F"), "schedule.stages", "missing or no such value"),
    "count no number": (lambda d: d.update(num_micro_batches=True), "schedule.num_micro_batches", "no such value"),
    "other plan": (lambda d: d.update(made_for="plan-2"), "schedule.made_for", "another plan.*plan-1"),
    "other count": (lambda d: d.update(num_micro_batches=4), "schedule.num_micro_batches", "another plan"),
    "other stages": (lambda d: d["stages"].append("FB*3"), "schedule.stages", "another plan"),
    "no text": (_row(1, 3), r"schedule.stages[1]", "is no text"),
    "letter": (_row(1, "FIW FXW FIW"), "schedule.stages[1]", r"character 6 (.|\n)*FIW FXW FIW\n     \^"),
    "zero times": (_row(1, "FIW*3 F*0"), "schedule.stages[1]", "character 8 "),
    "too many": (_row(1, "FIW*3 F*999999999"), "schedule.stages[1]", "character 7 .*more than the 9 actions"),
    "F too often": (_row(1, "FB*3 F"), "schedule.stages[1]", "F3, action 7, .*ERROR HERE"),
    "F missing": (_row(1, "FIW*2"), "schedule.stages[1]", "1 F missing"),
    "B missing": (_row(1, "FIW*2 F"), "schedule.stages[1]", "1 B or B_INPUT missing"),
    "W missing": (_row(1, "FIW*2 FI"), "schedule.stages[1]", "1 W missing"),
    "B before F": (_row(1, "FIW I FW FIW"), "schedule.stages[1]", "B_INPUT1, action 4, comes before its forward"),
    "W before B_INPUT": (_row(1, "FWI FIW*2"), "schedule.stages[1]", "W0, action 2, comes before its B_INPUT"),
    "memory": (_row(0, "F*3 IW*3"), "schedule.stages[0]", "F2, action 3, needs 3 bytes .*has 2"),
}  # fmt: skip


@pytest.mark.parametrize("damage, field, message", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_refused_with_its_place(damage: Callable[[dict[str, Any]], object], field: str, message: str) -> None:
    memory = [StageMemory(memory_bytes=3 if field != "schedule.stages[0]" else 2), StageMemory()]
    stored = copy.deepcopy(GOOD)
    damage(stored)
    with pytest.raises(UserError, match=f"(?s){message}") as caught:
        schedule_from_dict(stored, 2, 3, "plan-1", memory)
    assert caught.value.field == field


def test_a_deadlock_is_refused_with_its_place() -> None:
    # Stage 1 wants two forwards before its first backward; stage 0 waits for that backward after one forward.
    stored = {**GOOD, "stages": ["FB*3", "FF BB FB"]}
    with pytest.raises(UserError, match="(?s)stage 0: RECV_B0 .*deadlock.*<-- ERROR HERE"):
        schedule_from_dict(stored, 2, 3, "plan-1")


@pytest.mark.parametrize("value", [None, [], "F", 3, {}])
def test_what_is_no_stored_schedule_is_refused(value: object) -> None:
    with pytest.raises(UserError):
        schedule_from_dict(value, 2, 3, "plan-1")


def test_the_good_one_is_good() -> None:
    assert schedule_from_dict(GOOD, 2, 3, "plan-1", [StageMemory(memory_bytes=3), StageMemory()]).name == "adaptive"
