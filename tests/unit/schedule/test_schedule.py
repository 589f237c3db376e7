"""Schedules: complete and ordered for every shape, refused with a marked grid when damaged, timed exactly."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.schedule import (
    Action,
    Costs,
    Schedule,
    ScheduleError,
    format_grid,
    generate,
    in_flight,
    lower,
    schedule_names,
    simulate,
    simulate_many,
    validate,
)


@pytest.mark.parametrize("name", schedule_names())
def test_every_shape_is_valid(name: str) -> None:
    for stages in (1, 2, 3, 5, 8):
        for micro_batches in (0, 1, 2, 4, 5, 9):
            schedule = lower(generate(name, stages, micro_batches))
            validate(schedule)
            split = name == "zero-bubble"
            for row in schedule.stages:
                for kind, there in (("F", True), ("B", not split), ("B_INPUT", split), ("W", split)):
                    micros = [a.micro_batch for a in row if a.kind == kind]
                    assert micros == (list(range(micro_batches)) if there else [])


def test_the_ends_neither_receive_nor_send_outwards() -> None:
    first, middle, last = lower(generate("1f1b", 3, 4)).stages
    assert not {a.kind for a in first} & {"RECV_F", "SEND_B"}
    assert not {a.kind for a in last} & {"SEND_F", "RECV_B"}
    assert {a.kind for a in middle} == {"F", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"}
    alone = lower(generate("1f1b", 1, 2)).stages[0]
    assert [str(a) for a in alone] == ["F0", "B0", "F1", "B1"]


def test_micro_batches_in_flight() -> None:
    assert in_flight(generate("1f1b", 4, 8)) == (4, 3, 2, 1)
    assert in_flight(generate("1f1b", 4, 2)) == (2, 2, 2, 1)
    assert in_flight(generate("gpipe", 4, 8)) == (8, 8, 8, 8)
    split = Schedule("x", (tuple(Action(k, m) for k, m in (("F", 0), ("B_INPUT", 0), ("F", 1), ("W", 0))),))
    assert in_flight(split) == (2,)


@pytest.mark.parametrize("name", ["adaptive", "1F1B"])
def test_unknown_schedules_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}.*1f1b, gpipe"):
        generate(name, 2, 2)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(UserError, match="num_stages"):
        generate("1f1b", 0, 2)
    with pytest.raises(UserError, match="num_micro_batches"):
        generate("1f1b", 2, -1)


def _edit(schedule: Schedule, stage: int, row: list[Action]) -> Schedule:
    rows = list(schedule.stages)
    rows[stage] = tuple(row)
    return Schedule(schedule.name, tuple(rows))


GOOD = lower(generate("1f1b", 3, 4))


def _cut(stage: int, *actions: Action) -> Schedule:
    return _edit(GOOD, stage, [a for a in GOOD.stages[stage] if a not in actions])


DAMAGED = {
    "missing SEND_F": (
        _cut(0, Action("SEND_F", 2)),
        "RECV_F2 waits for SEND_F2 of stage 0, which is missing",
    ),
    "missing SEND_B": (
        _cut(2, Action("SEND_B", 1)),
        "RECV_B1 waits for SEND_B1 of stage 2, which is missing",
    ),
    "missing RECV_F": (_cut(1, Action("RECV_F", 1)), "stage 1: F1 comes before RECV_F1"),
    "missing RECV_B": (_cut(1, Action("RECV_B", 3)), "stage 1: B3 comes before RECV_B3"),
    "B before F": (_edit(GOOD, 0, [Action("RECV_B", 0), *GOOD.stages[0]]), "deadlock"),
    "F missing": (_cut(2, Action("F", 1)), "stage 2: B1 comes before F1"),
    "B missing": (_cut(0, Action("B", 3), Action("RECV_B", 3)), "SEND_B3 is received by nobody"),
    "F twice": (_edit(GOOD, 0, [*GOOD.stages[0], Action("F", 2)]), "F2 is there twice"),
    "first receives": (
        _edit(GOOD, 0, [Action("RECV_F", 0), *GOOD.stages[0]]),
        "has no stage to receive from",
    ),
    "last sends": (_edit(GOOD, 2, [*GOOD.stages[2], Action("SEND_F", 0)]), "has no stage to send to"),
    "unknown kind": (_edit(GOOD, 1, [Action("G", 0), *GOOD.stages[1]]), "unknown kind"),
    "B and B_INPUT": (_edit(GOOD, 2, [*GOOD.stages[2], Action("B_INPUT", 0)]), "done in another form"),
}


@pytest.mark.parametrize("damaged, message", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_found_and_marked(damaged: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        validate(damaged)
    assert message in str(caught.value)
    assert str(caught.value).count("<-- ERROR HERE") == 1


def test_a_deadlock_names_who_waits() -> None:
    # Stage 0 wants the gradient before it has sent the activation that stage 1 needs for it.
    a, b = ([Action(k, 0) for k in row] for row in (["RECV_B", "F", "SEND_F", "B"], ["RECV_F", "F", "B", "SEND_B"]))
    with pytest.raises(ScheduleError, match=r"stage 0: RECV_B0 .*deadlock \(stage 0 at RECV_B0, stage 1 at RECV_F0\)"):
        validate(Schedule("x", (tuple(a), tuple(b))))


def test_forward_only_is_not_a_training_schedule() -> None:
    with pytest.raises(ScheduleError, match="F0 has no backward"):
        validate(Schedule("x", ((Action("F", 0),),)))


def test_any_single_deletion_is_found() -> None:
    draw = random.Random(1)
    for _ in range(60):
        stage = draw.randrange(3)
        row = list(GOOD.stages[stage])
        del row[draw.randrange(len(row))]
        with pytest.raises(ScheduleError):
            validate(_edit(GOOD, stage, row))


def test_grid() -> None:
    assert format_grid(generate("1f1b", 2, 2)) == "stage 0: F0 F1 B0 B1\nstage 1: F0 B0 F1 B1"
    assert str(Action("F", 3)) == "F3" and str(Action("SEND_F", 2, 1)) == "SEND_F2.1"
    assert "…" in format_grid(generate("gpipe", 2, 64), error=(1, 100))


EXACT = [
    ([10, 1], 480),
    ([1, 10], 483),
    ([10, 1, 1, 1], 480),
    ([1, 1, 1, 10], 489),
    ([1, 10, 1, 1], 483),
    ([2, 2, 2, 2], 114),
]


@pytest.mark.parametrize("forward, step", EXACT)
def test_step_times_without_links_are_exact(forward: list[float], step: float) -> None:
    schedule = lower(generate("1f1b", len(forward), 16))
    timeline = simulate(schedule, Costs(forward, [2 * f for f in forward]))
    assert timeline.step_seconds == step
    assert timeline.busy == tuple(48.0 * f for f in forward)


def test_links_take_time_and_the_slowest_sets_the_pace() -> None:
    schedule = lower(generate("gpipe", 2, 1))
    assert simulate(schedule, Costs([1, 1], [2, 2], [5])).step_seconds == 16
    slow = simulate(lower(generate("gpipe", 2, 8)), Costs([1, 1], [1, 1], [10]))
    assert slow.step_seconds == 164  # both directions drain one after another
    arrivals = [t for t in slow.stages[1] if t.action.kind == "RECV_F"]
    assert [t.end for t in arrivals] == [11.0 + 10 * m for m in range(8)]


@pytest.mark.parametrize("name", schedule_names())
@pytest.mark.parametrize("seed", range(10))
def test_many_steps_at_once_take_what_each_takes(name: str, seed: int) -> None:
    rng = random.Random(seed)
    stages, steps = rng.randint(1, 5), 3
    schedule = lower(generate(name, stages, rng.randint(1, 9)))

    def some(count: int) -> list[float]:
        return [rng.choice([0.0, rng.random()]) for _ in range(count)]

    forward, backward = some(stages), some(stages)
    between = {key: some(stages - 1) for key in ("link", "link_back", "latency")}
    host = [{kind: rng.random() for kind in ("SEND_F", "RECV_F", "SEND_B")} for _ in range(stages)]
    factors = np.array([[rng.random() for _ in range(steps)] for _ in range(stages)])
    each = [
        simulate(schedule, Costs([f * k for f, k in zip(forward, ks)], [b * k for b, k in zip(backward, ks)],
                                 **between, host=host)).step_seconds
        for ks in factors.T.tolist()
    ]  # fmt: skip
    vary = [lambda seconds, own=own: seconds * own for own in factors]
    together = simulate_many(schedule, Costs(forward, backward, **between, host=host), vary)
    assert together == pytest.approx(each)


def test_wrong_numbers_of_costs_are_refused() -> None:
    schedule = lower(generate("1f1b", 2, 2))
    with pytest.raises(UserError, match="link"):
        simulate(schedule, Costs([1, 1], [1, 1], [1, 1]))
    with pytest.raises(UserError, match="backward"):
        simulate(schedule, Costs([1, 1], [1]))


@pytest.mark.slow
def test_large_schedules_validate() -> None:
    validate(lower(generate("1f1b", 64, 1024)))
