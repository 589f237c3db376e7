"""Adaptive schedules of chunks: valid, within memory, timed as simulated, never slower than interleaved 1F1B."""

from __future__ import annotations

import itertools
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
from hetero_megatron.schedule.adaptive_chunks import search_adaptive_chunks
from hetero_megatron.schedule.chunk_scheduling import ChunkRule, list_schedule_chunks
from hetero_megatron.schedule.chunk_times import (
    ChunkedTimes,
    chunked_lower_bound_seconds,
    keeps_chunk_memory,
    time_chunk_orders,
)
from hetero_megatron.schedule.stage_orders import LinkTimes, StageTimes, chunk_orders_of, schedule_of
from hetero_megatron.schedule.stored import schedule_from_dict, schedule_to_dict, stored_orders
from tests.support.pipelines import random_chunked_times
from tests.unit.schedule.test_chunks_and_split import finishes

seeds = st.integers(0, 2**32 - 1)


def simulated_seconds(schedule: Schedule, times: ChunkedTimes) -> float:
    tail = [([Action("REDUCE", 0)], []) for _ in times.stages]
    return simulate(with_synchronisation(lower(schedule), tail), times.costs()).step_seconds


def drawn(seed: int, by_count: bool | None = None) -> tuple[ChunkedTimes, int]:
    draw = random.Random(seed)
    count = draw.random() < 0.5 if by_count is None else by_count
    return random_chunked_times(draw, draw.randint(1, 5), draw.randint(1, 4), count), draw.randint(0, 10)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(seeds)
def test_it_is_valid_within_memory_and_takes_what_is_simulated(seed: int) -> None:
    times, count = drawn(seed)
    found = search_adaptive_chunks(times, count, 5_000)
    validate(lower(found.schedule))
    assert len(times.stages) == 1 or finishes(lower(found.schedule))
    for chunks, row in zip(times.stages, chunk_orders_of(found.schedule), strict=True):
        assert keeps_chunk_memory(chunks, row)
        assert sum(action[0] == "F" for action in row) == count * times.chunks
    assert found.seconds == pytest.approx(simulated_seconds(found.schedule, times), rel=1e-12)
    assert found.bound_seconds <= found.seconds * (1 + 1e-12)
    plain = generate("interleaved", len(times.stages), count, times.chunks)
    if all(map(keeps_chunk_memory, times.stages, chunk_orders_of(plain))):
        assert found.seconds <= simulated_seconds(plain, times) * (1 + 1e-12)


def test_only_rules_that_take_longer_than_the_limit_are_given_up() -> None:
    draw, given_up = random.Random(3), 0
    for _ in range(60):
        times, count = drawn(draw.randrange(2**32))
        rule = ChunkRule(draw.randint(1, 5), most_deferred=draw.choice((0, 1, math.inf)), patience=draw.random())
        whole = list_schedule_chunks(times, count, rule)
        assert list_schedule_chunks(times, count, rule, whole[0] * (1 + 1e-9)) == whole
        seconds, _ = list_schedule_chunks(times, count, rule, 0.8 * whole[0])
        assert seconds in (whole[0], math.inf)
        given_up += seconds == math.inf
    assert given_up > 30


@pytest.mark.slow
def test_on_random_pipelines_it_is_never_slower_than_others_and_never_above_the_cap() -> None:
    draw = random.Random(1)
    compared = faster = bubbles = 0
    for _ in range(250):
        times, count = drawn(draw.randrange(2**32), by_count=True)
        found = search_adaptive_chunks(times, count, effort=4_000)
        caps = [chunks[0].memory_bytes for chunks in times.stages]
        assert all(most <= cap for most, cap in zip(in_flight(found.schedule), caps, strict=True))
        plain = generate("interleaved", len(times.stages), count, times.chunks)
        if all(most <= cap for most, cap in zip(in_flight(plain), caps, strict=True)):
            taken = simulated_seconds(plain, times)
            assert found.seconds <= taken * (1 + 1e-12)
            compared, faster = compared + 1, faster + (found.seconds < taken * (1 - 1e-9))
        if times.chunks > 1 and 30 * len(caps) * times.chunks * count <= 4_000:  # the effort is that of ten schedules
            whole = [int(min(cap / times.chunks, max(count, 1))) for cap in caps]
            other = generate("zero-bubble", len(caps), count, times.chunks, whole)
            assert found.seconds <= simulated_seconds(other, times) * (1 + 1e-9)
            bubbles += 1
    assert compared > 60 and faster > 25 and bubbles > 60


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(1, 8), st.sampled_from([0, 2, math.inf]), st.sampled_from([0, 1, math.inf]), st.booleans())
def test_any_rule_makes_a_valid_schedule_within_memory(
    seed: int, group: int, ahead: float, deferred: float, forward_first: bool
) -> None:
    times, count = drawn(seed)
    least = [sum(c.activation_bytes for c in chunks) for chunks in times.stages]
    if seed % 3 == 0:  # as little memory as there can be
        rows = [(replace(x[0], memory_bytes=n), *x[1:]) for x, n in zip(times.stages, least, strict=True)]
        times = replace(times, stages=tuple(rows))
    seconds, orders = list_schedule_chunks(times, count, ChunkRule(group, ahead, deferred, forward_first, 0.5))
    schedule = schedule_of("x", orders, times.chunks)
    validate(lower(schedule))
    assert all(map(keeps_chunk_memory, times.stages, orders))
    assert seconds == pytest.approx(simulated_seconds(schedule, times), rel=1e-12)
    assert seconds == time_chunk_orders(times, orders)


@settings(max_examples=60, deadline=None)
@given(seeds)
def test_it_survives_being_stored(seed: int) -> None:
    times, count = drawn(seed)
    schedule = search_adaptive_chunks(times, count, 2_000).schedule
    stored = schedule_to_dict(schedule.name, stored_orders(schedule), count, "x")
    assert schedule_from_dict(stored, len(times.stages), count, "x", num_chunks=times.chunks) == schedule


def test_a_deadlock_is_found() -> None:
    stages = ((StageTimes(1, 1, 1),) * 2,) * 2
    times = ChunkedTimes(stages, (LinkTimes(),) * 2)
    assert time_chunk_orders(times, (("F1", "B1", "F", "B"), ("F", "F1", "B1", "B"))) is None


def test_weight_gradients_fill_the_bubble_of_interleaved() -> None:
    """Four equal stages, F, B_INPUT and W of a second each, two chunks of half: the bubble of interleaved 1F1B is
    3 x 3 / 2 s; with W put off less is left."""
    half = StageTimes(0.5, 0.5, 0.5, activation_bytes=0.5, deferred_bytes=0.5)
    times = ChunkedTimes(((half, half),) * 4, (LinkTimes(),) * 4)
    plain = simulated_seconds(generate("interleaved", 4, 8, 2), times)
    assert plain == 8 * 3 + 3 * 3 / 2
    assert search_adaptive_chunks(times, 8).seconds <= 8 * 3 + 3 * 1 / 2


def test_the_same_question_has_the_same_answer() -> None:
    times, _ = drawn(5)
    assert search_adaptive_chunks(times, 6) == search_adaptive_chunks(times, 6)


ONE = StageTimes(1, 1, 1)
BAD = {
    "chunks": (lambda: ChunkedTimes(((ONE,), (ONE, ONE)), (LinkTimes(),) * 2), "stages"),
    "links": (lambda: ChunkedTimes(((StageTimes(1, 1, 1),),) * 2, (LinkTimes(),)), "links"),
    "memory": (lambda: ChunkedTimes(((StageTimes(1, 1, 1, memory_bytes=1),) * 2,), ()), "memory_bytes"),
    "count": (lambda: search_adaptive_chunks(ChunkedTimes(((StageTimes(1, 1, 1),),), ()), -1), "num_micro_batches"),
}


@pytest.mark.parametrize("make, field", BAD.values(), ids=BAD)
def test_bad_inputs_are_refused_by_name(make, field: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError) as caught:
        make()
    assert caught.value.field == field


def every_order(count: int, chunks: int) -> list[tuple[str, ...]]:
    """All orders of whole forwards and backwards of a stage: each chunk takes micro-batches in order, and a micro-batch
    passes the chunks in order and comes back."""
    names = [""] + [str(c) for c in range(1, chunks)]
    way = [f"F{c}" for c in names] + [f"B{c}" for c in reversed(names)]
    found: list[tuple[str, ...]] = []

    def extend(row: tuple[str, ...], done: tuple[int, ...]) -> None:
        if len(row) == count * len(way):
            found.append(row)
        for m, n in enumerate(done):
            # As far as the micro-batch before it is, or behind.
            if n < len(way) and (m == 0 or n < done[m - 1]):
                extend((*row, way[n]), (*done[:m], n + 1, *done[m + 1 :]))

    extend((), (0,) * count)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_it_is_no_slower_than_any_order_of_whole_backwards_and_the_bound_is_no_higher(seed: int) -> None:
    """Two stages of two chunks, two micro-batches: all pairs of orders."""
    draw = random.Random(seed)
    times = random_chunked_times(draw, 2, 2)
    rows = [[row for row in every_order(2, 2) if keeps_chunk_memory(chunks, row)] for chunks in times.stages]
    seconds = [time_chunk_orders(times, pair) for pair in itertools.product(*rows)]
    best = min(x for x in seconds if x is not None)
    found = search_adaptive_chunks(times, 2)
    assert chunked_lower_bound_seconds(times, 2) <= found.seconds * (1 + 1e-12)
    assert found.seconds <= best * (1 + 1e-12)


@settings(max_examples=80, deadline=None)
@given(seeds)
def test_the_bound_is_at_most_what_any_rule_takes(seed: int) -> None:
    times, count = drawn(seed)
    seconds = min(
        list_schedule_chunks(times, count, ChunkRule(group, most_deferred=most))[0]
        for group in (1, 3)
        for most in (0, math.inf)
    )
    assert chunked_lower_bound_seconds(times, count) <= seconds * (1 + 1e-12)
