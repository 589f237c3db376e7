"""Zero-bubble over several chunks: valid for every shape, within its caps, with the bubble that is known, and in the
order of torch.distributed.pipelining."""

from __future__ import annotations

import random
from itertools import product
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from hetero_megatron.schedule import Costs, Schedule, Timeline, generate, in_flight, lower, simulate, validate
from hetero_megatron.schedule.stage_orders import chunk_orders_of, schedule_of
from hetero_megatron.schedule.stored import schedule_from_dict, schedule_to_dict, stored_orders
from tests.support.selection import each
from tests.unit.schedule.test_chunks_and_split import SHAPES, finishes, own_bubble

KINDS = {"F": "F", "B_INPUT": "I", "W": "W"}
CHUNKED = [(p, m, v) for p, m, v in SHAPES if v > 1]


def zero_bubble(stages: int, micro_batches: int, chunks: int, caps: tuple[int, ...] = ()) -> Schedule:
    return generate("zero-bubble", stages, micro_batches, chunks, caps)


def check(schedule: Schedule, micro_batches: int, caps: tuple[int, ...]) -> None:
    """It runs, does everything once, and holds no more than its caps."""
    validate(lower(schedule))
    every = sorted((m, c) for m in range(micro_batches) for c in range(schedule.chunks))
    for row in schedule.stages:
        for kind in KINDS:
            assert sorted((a.micro_batch, a.chunk) for a in row if a.kind == kind) == every
        assert {a.kind for a in row} <= set(KINDS)
    assert all(held <= schedule.chunks * cap for held, cap in zip(in_flight(schedule), caps, strict=True))


def test_it_is_valid_for_any_shape_and_holds_as_many_micro_batches_as_there_are_stages() -> None:
    for p, m, v in CHUNKED:
        schedule = zero_bubble(p, m, v)
        check(schedule, m, (p,) * p)
        assert p == 1 or finishes(lower(schedule)), (p, m, v)


@each("seed", range(60))
def test_it_keeps_any_caps(seed: int) -> None:
    rng = random.Random(seed)
    p, m, v = rng.randint(1, 7), rng.randint(0, 15), rng.randint(2, 4)
    caps = tuple(rng.randint(1, rng.choice((2, 2 * p + 1))) for _ in range(p))
    schedule = zero_bubble(p, m, v, caps)
    check(schedule, m, caps)
    assert p == 1 or finishes(lower(schedule))
    stored = schedule_to_dict("x", stored_orders(schedule), m, "plan")
    assert schedule_from_dict(stored, p, m, "plan", num_chunks=v).stages == schedule.stages


@pytest.mark.parametrize("f, b, w", [(1, 1, 1), (1, 1, 0.5), (2, 2, 1.5)])
def test_its_bubble_is_that_of_one_chunk_divided_by_the_chunks(f: float, b: float, w: float) -> None:
    """Closed form of ZB1P, of the stage that idles most: (p - 1) (F + B_INPUT - W) / v."""
    for p, v in product((2, 3, 4, 8), (2, 3, 4)):
        for m in (p, 2 * p, 4 * p):
            timeline = timed(zero_bubble(p, m, v), f, b, w)
            assert own_bubble(timeline) == pytest.approx((p - 1) * (f + b - w) / v)


def timed(schedule: Schedule, f: float, b: float, w: float) -> Timeline:
    p = len(schedule.stages)
    return simulate(lower(schedule), Costs([f] * p, [b + w] * p, weight=[w] * p))


def test_more_memory_fills_more_of_the_bubble() -> None:
    """Each forward ahead fills that of one chunk; the ways to the last stage and back stay part of the step."""
    for p, v in product((2, 3, 4, 6, 8, 12), (2, 3)):
        timelines = [timed(zero_bubble(p, 4 * p, v, (cap,) * p), 1, 1, 1) for cap in range(p, 2 * p)]
        bubbles = [own_bubble(timeline) for timeline in timelines]
        assert all(b < a + 1e-9 for a, b in zip(bubbles, bubbles[1:]))
        assert bubbles[-1] == pytest.approx((p - 1 - 2 * p // 3) / v, abs=1e-9)
        assert all(x.step_seconds == pytest.approx(3 * 4 * p + (p - 1) / v) for x in timelines)


def test_it_is_faster_than_zero_bubble_of_one_chunk_and_than_interleaved() -> None:
    """In the memory of as many micro-batches as there are stages, or more; interleaved takes more."""
    for p, v in product((2, 3, 4, 6), (2, 3)):
        for m, more in product((p, 2 * p, 2 * p + 1, 3 * p + 2, 4 * p), (0, 1)):
            caps = (p + more,) * p
            chunked, one = zero_bubble(p, m, v, caps), generate("zero-bubble", p, m, caps=caps)
            plain = generate("interleaved", p, m, v)
            seconds = [timed(x, 1, 1.2, 0.8).step_seconds for x in (chunked, one, plain)]
            assert seconds[0] < seconds[1], (p, m, v, more, seconds)
            assert m % p or seconds[0] < seconds[2], (p, m, v, more, seconds)


def torch_actions(schedule: Schedule) -> dict[int, list[torch_schedules._Action | None]]:
    p = len(schedule.stages)
    kind = torch_schedules._ComputationType.from_str
    return {
        s: [torch_schedules._Action(a.chunk * p + s, kind(KINDS[a.kind]), a.micro_batch) for a in row]
        for s, row in enumerate(schedule.stages)
    }


def test_torch_finds_it_valid_and_free_of_deadlock() -> None:
    for p, m, v in CHUNKED:
        if p == 1 or m == 0:
            continue
        actions = torch_actions(zero_bubble(p, m, v))
        torch_schedules._validate_schedule(actions, p, p * v, m)
        ranks = [s % p for s in range(p * v)]
        compute = {s: [a for a in row if a is not None] for s, row in actions.items()}
        both = torch_schedules._add_send_recv(compute, ranks.__getitem__, p * v)
        torch_schedules._simulate_comms_compute(both, ranks.__getitem__, p * v)  # raises where it stops


def of_torch(stages: int, micro_batches: int, chunks: int) -> Schedule:
    """What ScheduleInterleavedZeroBubble runs, without process groups."""
    rounds = max(1, micro_batches // stages)
    asked = SimpleNamespace(
        n_local_stages=chunks, pp_group_size=stages, _n_microbatches=micro_batches,
        microbatches_per_round=micro_batches // rounds,
    )  # fmt: skip
    made = torch_schedules.ScheduleInterleavedZeroBubble._calculate_single_rank_operations
    letters = {kind: letter for letter, kind in zip("FIW", ("FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"))}
    rows = []
    for rank in range(stages):
        actions = [a for a in made(asked, rank) if a is not None]  # type: ignore[arg-type]
        rows.append(tuple(
            letters[a.computation_type.name] + (str(a.stage_index // stages) if a.stage_index >= stages else "")
            for a in actions
        ))  # fmt: skip
    return schedule_of("torch", rows, chunks)


def test_forwards_and_backwards_are_in_the_order_of_torch_and_it_is_never_slower() -> None:
    for p, v in product((2, 3, 4, 6), (2, 3, 4)):
        for m in (p, 2 * p, 4 * p):
            ours, theirs = zero_bubble(p, m, v), of_torch(p, m, v)
            assert max(in_flight(theirs)) <= p * v
            for mine, other in zip(chunk_orders_of(ours), chunk_orders_of(theirs), strict=True):
                assert [x for x in mine if x[0] != "W"] == [x for x in other if x[0] != "W"]
            for f, b, w in ((1, 1, 1), (1, 1.3, 0.7), (1, 1, 1.2)):
                assert timed(ours, f, b, w).step_seconds <= timed(theirs, f, b, w).step_seconds * (1 + 1e-12)
