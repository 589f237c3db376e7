"""Adaptive schedules: valid, within memory, timed as simulated, never slower than 1F1B, near an exact solver's."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_megatron.errors import UserError
from hetero_megatron.schedule import (
    Action,
    Schedule,
    generate,
    in_flight,
    lower,
    simulate,
    validate,
    with_synchronisation,
)
from hetero_megatron.schedule.adaptive import EFFORT, AdaptiveResult, adaptive, one_f_one_b_orders, search_adaptive
from hetero_megatron.schedule.list_scheduling import ListRule, list_schedule
from hetero_megatron.schedule.stage_orders import (
    LinkTimes,
    PipelineTimes,
    StageMemory,
    StageTimes,
    join_backwards,
    keeps_memory,
    keeps_order,
    lower_bound_seconds,
    orders_of,
    schedule_of,
    time_orders,
)
from tests.support.exact_schedule import exact_seconds
from tests.support.pipelines import random_times

SMALL_EFFORT = 20_000
seeds = st.integers(0, 2**32 - 1)


def simulated_seconds(schedule: Schedule, times: PipelineTimes) -> float:
    tail = [([Action("REDUCE", 0)], []) for _ in times.stages]
    return simulate(with_synchronisation(lower(schedule), tail), times.costs()).step_seconds


def drawn(seed: int, most_stages: int = 6, most_micro_batches: int = 12) -> tuple[PipelineTimes, int]:
    draw = random.Random(seed)
    times = random_times(draw, draw.randint(1, most_stages), by_count=draw.random() < 0.5)
    if draw.random() < 0.2:
        times = replace(times, stages=tuple(replace(s, memory_bytes=math.inf) for s in times.stages))
    if draw.random() < 0.3:
        costs = (replace(s, split_seconds=draw.randint(-10, 60)) for s in times.stages)
        times = replace(times, stages=tuple(costs))
    if draw.random() < 0.4:  # links that are slower than the stages, so that transfers queue up
        links = (
            replace(k, forward_seconds=5 * k.forward_seconds, backward_seconds=5 * k.backward_seconds)
            for k in times.links
        )
        times = replace(times, links=tuple(links))
    return times, draw.randint(0, most_micro_batches)


def by_count(times: PipelineTimes) -> PipelineTimes:
    """The same with every micro-batch one byte until its W."""
    stages = [
        replace(s, activation_bytes=1, deferred_bytes=1, memory_bytes=max(1, int(s.capacity))) for s in times.stages
    ]
    return replace(times, stages=tuple(stages))


@settings(max_examples=80, deadline=None)
@given(seeds)
def test_it_is_valid_within_memory_and_takes_what_is_simulated(seed: int) -> None:
    times, count = drawn(seed)
    found = search_adaptive(times, count, SMALL_EFFORT)
    validate(lower(found.schedule))
    for stage, row in zip(times.stages, orders_of(found.schedule), strict=True):
        assert keeps_memory(stage, row)
        assert row.count("F") == count == row.count("B") + row.count("I") and row.count("I") == row.count("W")
    assert found.seconds == simulated_seconds(found.schedule, times)
    assert found.bound_seconds <= found.seconds <= found.one_f_one_b_seconds


def test_only_rules_that_take_longer_than_the_limit_are_given_up() -> None:
    draw, given_up = random.Random(3), 0
    for _ in range(200):
        times, count = drawn(draw.randrange(2**32))
        rule = ListRule.uniform(len(times.stages), draw.choice((0, 1, math.inf)), draw.random() < 0.5, draw.random())
        whole = list_schedule(times, count, rule)
        assert list_schedule(times, count, rule, whole[0] * (1 + 1e-9)) == whole
        seconds, _ = list_schedule(times, count, rule, 0.8 * whole[0])
        assert seconds in (whole[0], math.inf)
        given_up += seconds == math.inf
    assert given_up > 100


def test_it_ends_near_the_bound_when_asked_to() -> None:
    draw, sooner = random.Random(4), 0
    for _ in range(60):
        times, count = drawn(draw.randrange(2**32))
        found, near = search_adaptive(times, count, 5_000), search_adaptive(times, count, 5_000, near=0.05)
        assert near.seconds <= max(found.seconds, 1.05 * found.bound_seconds)
        assert near.timed_actions <= found.timed_actions
        sooner += near.timed_actions < found.timed_actions
    assert sooner > 5


def test_on_random_pipelines_it_is_never_slower_than_1f1b_and_never_above_the_cap() -> None:
    draw = random.Random(1)
    faster = 0
    for _ in range(200):
        times, count = by_count(random_times(draw, draw.randint(2, 5))), draw.randint(1, 12)
        found = search_adaptive(times, count, effort=5_000)
        caps = [s.memory_bytes for s in times.stages]
        assert all(most <= cap for most, cap in zip(in_flight(found.schedule), caps, strict=True))
        plain = generate("1f1b", len(times.stages), count)
        if all(most <= cap for most, cap in zip(in_flight(plain), caps, strict=True)):
            assert simulated_seconds(found.schedule, times) <= simulated_seconds(plain, times)
        faster += found.seconds < found.one_f_one_b_seconds
    assert faster > 100


def test_small_pipelines_are_within_two_percent_of_the_exact_solver() -> None:
    draw = random.Random(7)
    solved = 0
    for _ in range(25):
        times, count = random_times(draw, draw.randint(2, 3)), draw.randint(2, 4)
        found = search_adaptive(times, count)
        best, bound = exact_seconds(times, count, upper=found.seconds, limit=20)
        assert found.bound_seconds <= best + 0.01
        if bound > best - 0.5:  # solved
            solved += 1
            assert found.seconds <= best * 1.02 + 0.01
    assert solved >= 20


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from([0, 1, 3, math.inf]), st.booleans(), st.sampled_from([0.0, 0.7]))
def test_any_rule_makes_a_valid_schedule_within_memory(
    seed: int, most_deferred: float, forward_first: bool, patience: float
) -> None:
    times, count = drawn(seed)
    rule = ListRule.uniform(len(times.stages), most_deferred, forward_first, patience).on_stage(0, most_in_flight=2)
    seconds, orders = list_schedule(times, count, rule)
    schedule = schedule_of("x", orders)
    validate(lower(schedule))
    assert all(keeps_memory(stage, row) for stage, row in zip(times.stages, orders, strict=True))
    assert seconds == simulated_seconds(schedule, times)


@settings(max_examples=80, deadline=None)
@given(seeds)
def test_orders_are_timed_as_simulated_or_found_to_deadlock(seed: int) -> None:
    times, count = drawn(seed, most_micro_batches=6)
    draw = random.Random(seed)
    orders = []
    for row in list_schedule(times, count, ListRule.uniform(len(times.stages), math.inf, False, 0.0))[1]:
        shuffled = list(row)
        for _ in range(draw.choice((0, 0, 1, 3)) if row else 0):
            letter = shuffled.pop(draw.randrange(len(shuffled)))
            shuffled.insert(draw.randrange(len(shuffled) + 1), letter)
        orders.append("".join(shuffled) if keeps_order("".join(shuffled)) else row)
    schedule = schedule_of("x", orders)
    timing = time_orders(times, orders)
    try:
        validate(lower(schedule))
    except ValueError:
        assert timing is None
    else:
        assert timing is not None and timing.seconds == simulated_seconds(schedule, times)
        assert orders_of(schedule) == tuple(orders)
        joined = [join_backwards(row) for row in orders]
        assert [row.replace("B", "IW").count("W") for row in joined] == [count] * len(orders)


def test_the_same_question_has_the_same_answer() -> None:
    times = random_times(random.Random(3), 4)
    assert adaptive(times, 8) == adaptive(times, 8)
    assert search_adaptive(times, 8).timed_actions <= EFFORT


def test_more_effort_is_never_slower() -> None:
    draw = random.Random(4)
    for _ in range(10):
        times = random_times(draw, draw.randint(2, 4))
        seconds = [search_adaptive(times, 9, effort).seconds for effort in (0, 2_000, 20_000, 100_000)]
        assert seconds == sorted(seconds, reverse=True)


def test_where_it_gains_nothing_it_is_1f1b() -> None:
    assert adaptive(PipelineTimes((StageTimes(1, 1, 1),), ()), 5) == generate("1f1b", 1, 5)
    stages = tuple(StageTimes(f, f, f, deferred_bytes=10, memory_bytes=3 - s) for s, f in enumerate((1, 1, 50)))
    times = PipelineTimes(stages, (LinkTimes(), LinkTimes()))
    assert adaptive(times, 8) == generate("1f1b", 3, 8)  # no memory to split, and the last stage never waits
    split = PipelineTimes(tuple(replace(s, deferred_bytes=1) for s in stages), times.links)
    assert adaptive(split, 0) == generate("1f1b", 3, 0)
    assert adaptive(split, 8, effort=0) == generate("1f1b", 3, 8) != adaptive(split, 8)


def test_a_stage_with_a_long_reduction_ends_first() -> None:
    stages = [StageTimes(10, 10, 10, memory_bytes=4) for _ in range(4)]
    stages[1] = replace(stages[1], tail_seconds=100)
    found = search_adaptive(PipelineTimes(tuple(stages), (LinkTimes(),) * 3), 8)
    timing = time_orders(PipelineTimes(tuple(stages), (LinkTimes(),) * 3), orders_of(found.schedule))
    assert timing is not None
    ends = [row[-1] for row in timing.ends]
    assert ends[1] == min(ends)


def test_splitting_needs_memory() -> None:
    """Where what W needs fits beside nothing, backwards stay whole; where it is free, they are split."""

    def found(deferred: float) -> set[str]:
        stages = tuple(
            StageTimes(10, 10, 10, activation_bytes=1, deferred_bytes=deferred, memory_bytes=4 - s) for s in range(4)
        )
        return set("".join(orders_of(adaptive(PipelineTimes(stages, (LinkTimes(),) * 3), 8))))

    assert "I" not in found(100.0) and "I" in found(0.0)


def test_splitting_takes_seconds() -> None:
    """Where B_INPUT and W together take much longer than B, backwards stay whole; where they take less, all are split;
    and in between both kinds are faster than either alone."""

    def found(split: float) -> AdaptiveResult:
        stages = (StageTimes(10, 10 + split / 2, 10 + split / 2, split_seconds=split),) * 4
        return search_adaptive(PipelineTimes(stages, (LinkTimes(1, 1),) * 3), 6)

    letters = ["".join(orders_of(found(split).schedule)) for split in (12.0, 1.0, -1.0)]
    assert "I" not in letters[0] and {"I", "B"} < set(letters[1]) and "I" in letters[2]
    assert found(1.0).seconds < found(12.0).seconds


def test_bounds_of_simple_pipelines_are_exact() -> None:
    even = PipelineTimes((StageTimes(1, 1, 1),) * 2, (LinkTimes(),))
    assert lower_bound_seconds(even, 1) == 5  # F F I I W
    assert lower_bound_seconds(even, 8) == 1 + 8 * 3 == search_adaptive(even, 8).seconds  # memory has no limit
    assert lower_bound_seconds(PipelineTimes((StageTimes(1, 1, 1, tail_seconds=7),), ()), 0) == 7


BAD = {
    "negative seconds": (lambda: StageTimes(-1, 1, 1), "forward_seconds"),
    "not a number": (lambda: StageTimes(1, math.nan, 1), "input_gradient_seconds"),
    "infinite": (lambda: LinkTimes(math.inf), "forward_seconds"),
    "split": (lambda: StageTimes(1, 1, 1, split_seconds=3), "split_seconds"),
    "no memory": (lambda: StageMemory(activation_bytes=5, memory_bytes=4), "memory_bytes"),
    "no stage": (lambda: PipelineTimes((), ()), "stages"),
    "links": (lambda: PipelineTimes((StageTimes(1, 1, 1),), (LinkTimes(),)), "links"),
    "micro-batches": (lambda: adaptive(PipelineTimes((StageTimes(1, 1, 1),), ()), -1), "num_micro_batches"),
    "effort": (lambda: adaptive(PipelineTimes((StageTimes(1, 1, 1),), ()), 1, -1), "effort"),
}


@pytest.mark.parametrize("make, field", BAD.values(), ids=BAD)
def test_bad_inputs_are_refused_by_name(make, field: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as caught:
        make()
    assert caught.value.field == field


def test_1f1b_with_little_memory_does_not_deadlock() -> None:
    for caps in ((1, 4, 4, 4), (4, 1, 2, 1), (2, 2, 2, 2)):
        times = PipelineTimes(tuple(StageTimes(1, 1, 1, memory_bytes=cap) for cap in caps), (LinkTimes(),) * 3)
        orders = one_f_one_b_orders(times, 6)
        validate(lower(schedule_of("1f1b", orders)))
        assert all(keeps_memory(stage, row) for stage, row in zip(times.stages, orders, strict=True))
