"""Schedules of several chunks and of split backwards: valid for every shape, as long as they are known to take, within
their caps."""

from __future__ import annotations

import random
from itertools import product

import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.schedule import (
    Action,
    ChunkSeconds,
    Costs,
    Schedule,
    ScheduleError,
    Timeline,
    generate,
    held_states,
    in_flight,
    lower,
    receive_order,
    simulate,
    validate,
)
from hetero_megatron.schedule.actions import HOST_LOOKAHEAD, LOOKAHEAD, SEND_LAG
from tests.support.selection import each

SHAPES = [(p, m, v) for p, m, v in product((1, 2, 3, 4, 5, 7), range(12), (1, 2, 3, 4))]


def interleaved(stages: int, micro_batches: int, chunks: int) -> Schedule:
    return lower(generate("interleaved", stages, micro_batches, chunks))


def test_interleaved_is_valid_for_any_number_of_stages_micro_batches_and_chunks() -> None:
    for p, m, v in SHAPES:
        schedule = interleaved(p, m, v)
        validate(schedule)
        every = {(x, c) for x in range(m) for c in range(v)}
        for row in schedule.stages:
            for kind in ("F", "B"):
                done = [(a.micro_batch, a.chunk) for a in row if a.kind == kind]
                assert set(done) == every and len(done) == len(every)


def test_interleaved_with_one_chunk_is_1f1b() -> None:
    for p, m in product((1, 2, 4), (0, 1, 3, 8)):
        assert generate("interleaved", p, m).stages == generate("1f1b", p, m).stages


def test_the_order_of_interleaved_is_that_of_megatron() -> None:
    first, second = generate("interleaved", 2, 4, 2).stages
    assert " ".join(map(str, first)) == "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3"
    assert " ".join(map(str, second)) == "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3"


@pytest.mark.parametrize("forward, backward", [(1, 2), (2, 3)])
def test_the_bubble_of_interleaved_is_that_of_1f1b_divided_by_the_chunks(forward: float, backward: float) -> None:
    for p, v in product((2, 3, 4, 6), (1, 2, 3, 4)):
        for m in (p + 1, 2 * p - 1, 2 * p, 3 * p + 1, 4 * p):
            step = simulate(interleaved(p, m, v), Costs([forward] * p, [backward] * p)).step_seconds
            assert step == pytest.approx((m + (p - 1) / v) * (forward + backward))


def own_bubble(timeline: Timeline) -> float:
    """Of the stage that idles most between its own first and last action, as Qi et al. count."""
    return max(
        max(t.end for t in row) - min(t.start for t in row if t.action.kind == "F") - busy
        for row, busy in zip(timeline.stages, timeline.busy, strict=True)
    )


@pytest.mark.parametrize("f, b, w", [(1, 1, 1), (1, 1, 0.5), (2, 2, 1.5)])
def test_the_bubble_of_zero_bubble_h1(f: float, b: float, w: float) -> None:
    for p in (2, 3, 4, 8):
        for m in (p, p + 1, 2 * p, 3 * p + 2):
            timeline = simulate(lower(generate("zero-bubble", p, m)), Costs([f] * p, [b + w] * p, weight=[w] * p))
            assert own_bubble(timeline) == pytest.approx((p - 1) * (f + b - w))
            one = simulate(lower(generate("1f1b", p, m)), Costs([f] * p, [b + w] * p))
            assert own_bubble(one) == pytest.approx((p - 1) * (f + b + w))


def test_zero_bubble_h2_has_none() -> None:
    for p in (2, 3, 4, 8):
        schedule = lower(generate("zero-bubble", p, 3 * p, caps=(2 * p - 1,) * p))
        validate(schedule)
        assert own_bubble(simulate(schedule, Costs([1] * p, [2] * p))) == pytest.approx(0)


@each("seed", range(40))
def test_zero_bubble_never_holds_more_than_its_caps(seed: int) -> None:
    rng = random.Random(seed)
    p, m = rng.randint(1, 7), rng.randint(0, 15)
    caps = [rng.randint(1, 2 * p + 1) for _ in range(p)]
    schedule = lower(generate("zero-bubble", p, m, caps=caps))
    validate(schedule)
    assert all(held <= cap for held, cap in zip(in_flight(schedule), caps, strict=True))
    assert all(held <= p for held in in_flight(generate("zero-bubble", p, m)))


def test_more_memory_is_never_slower() -> None:
    p, m = 4, 12
    steps = [
        simulate(lower(generate("zero-bubble", p, m, caps=(cap,) * p)), Costs([1] * p, [2] * p)).step_seconds
        for cap in range(1, 2 * p)
    ]
    assert steps == sorted(steps, reverse=True) and len(set(steps)) == p


def test_what_stages_hold() -> None:
    assert held_states(generate("1f1b", 3, 5)) == ((((3,), (0,)),), (((2,), (0,)),), (((1,), (0,)),))


@each("seed", range(20))
def test_what_stages_hold_is_what_is_alive(seed: int) -> None:
    """For any bytes of activations and operands the most that is alive is in one of the states."""
    rng = random.Random(seed)
    p, m, v = rng.randint(1, 4), rng.randint(1, 9), rng.randint(1, 3)
    split = [lower(generate("zero-bubble", p, m, caps=[rng.randint(1, 2 * p) for _ in range(p)]))]
    for schedule in [interleaved(p, m, v), *split]:
        kept = [rng.random() for _ in range(schedule.chunks)]
        needed = [rng.choice([0.1, 3]) * rng.random() for _ in kept]
        for row, states in zip(schedule.stages, held_states(schedule), strict=True):
            now = most = 0.0
            for action in row:
                if action.kind in ("W", "B", "B_INPUT"):
                    now -= (needed if action.kind == "W" else kept)[action.chunk]
                now += kept[action.chunk] if action.kind == "F" else 0
                now += needed[action.chunk] if action.kind == "B_INPUT" else 0
                most = max(most, now)
            found = max(sum(map(float.__mul__, kept, map(float, a))) + sum(map(float.__mul__, needed, map(float, b)))
                        for a, b in states)  # fmt: skip
            assert found == pytest.approx(most)


def test_a_chunk_after_another_on_one_stage_needs_no_message() -> None:
    (row,) = interleaved(1, 2, 2).stages
    assert {a.kind for a in row} == {"F", "B"}
    early = Schedule("x", ((Action("F", 0, 1), Action("F", 0), Action("B", 0, 1), Action("B", 0)),), 2)
    with pytest.raises(ScheduleError, match="F0.1 comes before F0"):
        validate(early)
    late = Schedule("x", ((Action("F", 0), Action("F", 0, 1), Action("B", 0), Action("B", 0, 1)),), 2)
    with pytest.raises(ScheduleError, match="B0 comes before B0.1"):
        validate(late)
    with pytest.raises(ScheduleError, match="chunk"):
        validate(Schedule("x", (row,), 1))


def test_the_last_stage_sends_to_the_first() -> None:
    schedule = interleaved(3, 3, 2)
    first, _, last = schedule.stages
    assert Action("RECV_F", 1, 1) in first and Action("RECV_F", 1, 0) not in first
    assert Action("SEND_F", 1, 0) in last and Action("SEND_F", 1, 1) not in last
    assert schedule.peer(2, Action("SEND_F", 1, 0)) == (0, Action("RECV_F", 1, 1))
    assert schedule.peer(0, Action("SEND_B", 1, 1)) == (2, Action("RECV_B", 1, 0))
    times = [
        simulate(schedule, Costs([2] * 3, [4] * 3, [1, 1, wrap], latency=[0, 0, 0])).step_seconds
        for wrap in (0, 5)
    ]
    assert times[0] < times[1]
    with pytest.raises(UserError, match="2 chunks"):
        simulate(schedule, Costs([1] * 3, [2] * 3, chunks=[[ChunkSeconds(1, 2, 1)]] * 3))


def test_any_single_deletion_is_found() -> None:
    rng = random.Random(2)
    for schedule in (interleaved(3, 5, 2), lower(generate("zero-bubble", 3, 5))):
        for _ in range(60):
            stage = rng.randrange(3)
            rows = [list(row) for row in schedule.stages]
            del rows[stage][rng.randrange(len(rows[stage]))]
            with pytest.raises(ScheduleError):
                validate(Schedule("x", tuple(map(tuple, rows)), schedule.chunks))


def test_uneven_chunks_take_what_the_path_takes() -> None:
    """One micro-batch passes all chunks, one after the other."""
    chunks = [[ChunkSeconds(1, 3, 1), ChunkSeconds(4, 1, 1)], [ChunkSeconds(2, 1, 1), ChunkSeconds(8, 2, 1)]]
    timeline = simulate(interleaved(2, 1, 2), Costs([5, 10], [4, 3], chunks=chunks))
    assert timeline.step_seconds == 1 + 2 + 4 + 8 + 2 + 1 + 1 + 3 and timeline.busy == (9, 13)


def finishes(schedule: Schedule) -> bool:
    """Whether stages end with as many receives posted ahead as devices and hosts have."""
    return all(finishes_with(schedule, lookahead) for lookahead in (LOOKAHEAD, HOST_LOOKAHEAD))


def finishes_with(schedule: Schedule, lookahead: int) -> bool:
    """Whether stages end that post receives ahead, and whose gradient sends wait for the one ``SEND_LAG`` before."""
    rows, orders = schedule.stages, [receive_order(schedule, s) for s in range(len(schedule.stages))]
    at, taken, sent = [0] * len(rows), [0] * len(rows), [list[tuple[int, Action]]() for _ in rows]
    posted: list[set[Action]] = [set() for _ in rows]
    arrived: list[set[Action]] = [set() for _ in rows]
    moved = True
    while moved:
        moved = False
        for s, row in enumerate(rows):
            while at[s] < len(row):
                action = row[at[s]]
                ahead = orders[s].index(action) + 1 if action.kind.startswith("RECV") else 0
                posted[s] |= set(orders[s][: max(taken[s] + lookahead, ahead)])
                if action.kind.startswith("RECV") and action not in arrived[s]:
                    break
                if action.kind.startswith("SEND"):
                    there = schedule.peer(s, action)
                    assert there is not None
                    arrived[there[0]].add(there[1])
                    if action.kind == "SEND_B" and there not in sent[s]:
                        sent[s].append(there)
                    if len(sent[s]) > SEND_LAG:
                        peer, receive = sent[s][-1 - SEND_LAG]
                        if receive not in posted[peer]:
                            break
                taken[s] += action.kind.startswith("RECV")
                at[s] += 1
                moved = True
    return all(i == len(row) for i, row in zip(at, rows, strict=True))


def test_no_schedule_waits_for_ever_with_few_sends_under_way() -> None:
    for p, m, v in SHAPES:
        if p > 1:
            assert finishes(interleaved(p, m, v)), (p, m, v)
    for name, p, m in product(("1f1b", "gpipe", "zero-bubble"), (2, 3, 5), (1, 4, 11)):
        assert finishes(lower(generate(name, p, m)))
        if name == "zero-bubble":
            assert finishes(lower(generate(name, p, m, caps=[2 * p - 1] * p)))


def test_receives_are_posted_in_the_order_of_their_sends() -> None:
    for p, m, v in ((2, 5, 2), (2, 8, 3), (3, 7, 2), (4, 8, 2)):
        schedule = interleaved(p, m, v)
        for s, row in enumerate(schedule.stages):
            order = receive_order(schedule, s)
            assert sorted(order) == sorted(a for a in row if a.kind.startswith("RECV"))
            for sender in range(p):
                sends = [there[1] for a in schedule.stages[sender] if a.kind.startswith("SEND")
                         if (there := schedule.peer(sender, a)) is not None and there[0] == s]  # fmt: skip
                assert [a for a in order if a in set(sends)] == sends
    for name in ("1f1b", "gpipe", "zero-bubble"):
        schedule = lower(generate(name, 3, 5))
        for s, row in enumerate(schedule.stages):
            assert list(receive_order(schedule, s)) == [a for a in row if a.kind.startswith("RECV")]


@pytest.mark.parametrize(
    "name, chunks, caps, field",
    [("1f1b", 2, (), "num_chunks"), ("zero-bubble", -1, (), "num_chunks"), ("interleaved", 0, (), "num_chunks"),
     ("1f1b", 1, (2, 2), "caps"), ("interleaved", 2, (2, 2), "caps"), ("zero-bubble", 2, (2,), "caps"),
     ("zero-bubble", 1, (2,), "caps"), ("zero-bubble", 1, (2, 0), "caps")],
)  # fmt: skip
def test_what_a_schedule_cannot_have_is_refused(name: str, chunks: int, caps: tuple[int, ...], field: str) -> None:
    with pytest.raises(UserError, match=field):
        generate(name, 2, 4, chunks, caps)
