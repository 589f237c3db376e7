"""Zero-bubble schedules: backward is split, and weight gradients are put off into what would be gaps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetero_megatron.schedule.actions import Action, ChunkPasses, Rows, Schedule, chunk_passes
from hetero_megatron.schedule.chunk_scheduling import ChunkRule, list_schedule_chunks
from hetero_megatron.schedule.chunk_times import ChunkedTimes, chunked_lower_bound_seconds, time_chunk_orders
from hetero_megatron.schedule.stage_orders import LinkTimes, StageTimes, chunk_orders_of, schedule_of

# F, B_INPUT and W of equal stages, by which schedules over chunks are chosen: attention makes B_INPUT the longest.
_EQUAL = StageTimes(4, 5, 3)
_GOOD = 1.1  # times the lower bound: nothing else is tried
MOST_COMPARED = 9  # schedules over chunks that are made to choose one


def zero_bubble(stages: int, micro_batches: int, chunks: int = 1, caps: Sequence[int] = ()) -> Rows:
    """ZB-H1 and its relatives (Qi et al., 2024), with one chunk of layers per stage or several.

    Several chunks are passed in groups, as under interleaved 1F1B; with as many micro-batches as there are stages in
    every group this is the interleaved ZB1P of torch.distributed.pipelining, whose bubble is that of one chunk divided
    by the chunks. Where caps or the number of micro-batches allow no such groups, other ones and list schedules are
    compared, for equal stages.

    Args:
        caps: per stage, the most micro-batches that it holds at once, from their forward to their W; one in one of
            several chunks counts as that part of one. () is as many as there are stages, on each: the memory of the
            first stage of 1F1B, and a third of its bubble where F, B_INPUT and W take the same time. With more, up to
            ``2 * stages - 1`` with one chunk, there are more forwards ahead (ZB-H2); with fewer the stage puts off
            less, down to no overlap at 1.
    """
    caps = caps or (stages,) * stages
    if chunks == 1:
        rows = _in_groups(chunk_passes(micro_batches, 1, 1), 1, caps)
        assert rows is not None, "one chunk needs no room for groups"
        return rows
    if min(caps) >= stages and micro_batches % stages == 0:
        rows = _in_groups(chunk_passes(micro_batches, chunks, max(micro_batches // stages, 1)), chunks, caps)
        assert rows is not None, "groups of as many as there are stages fit into the memory of so many"
        return rows
    return _best(micro_batches, chunks, caps)


def _in_groups(passes: ChunkPasses, chunks: int, caps: Sequence[int]) -> Rows | None:
    """1F1B with some forwards ahead, fewer on each stage than on the one before it, and every W put off as long as the
    cap allows; None where a group needs more memory than a cap.

    It never deadlocks: let n forwards more than backwards come first on a stage. Before its k-th backward its
    (k + n)-th forward must have been done, which is that of the same micro-batch or a later one, as n is at least
    ``(chunks - 1) * largest``. Around the ring, a forward of the first stage waits for one that is a group earlier on
    the last, and a backward of the last stage for one that is a group earlier on the first; so the last stage may be
    at most two groups behind the first.
    """
    forwards, backwards, smallest, largest = passes
    stages, inside, ahead = len(caps), (chunks - 1) * largest, list[int]()
    # More only delays W; over chunks, forwards still further ahead would wait for those of the group before them.
    useful = inside + stages + (stages - 1 if chunks == 1 else 2 * stages // 3)
    room = [min(chunks * cap, useful) for cap in caps]
    for stage, micro_batches in enumerate(room):
        later_stages = stages - 1 - stage
        extra = min(max(micro_batches - inside - stages, 0), later_stages)
        # A stage that is further ahead than the one before it would wait for a forward that needs its own backward.
        ahead.append(min(inside + later_stages + extra, micro_batches - 1, *ahead[-1:], len(forwards)))
    if ahead[-1] < inside:
        return None
    if chunks > 1:
        ahead = [min(n, ahead[-1] + 2 * smallest) for n in ahead]
    return tuple(_split(forwards, backwards, n, micro_batches) for n, micro_batches in zip(ahead, room, strict=True))


def _split(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], ahead: int, cap: int
) -> tuple[Action, ...]:
    """1F1B with ``ahead`` forwards first, whose W wait until the stage holds ``cap`` of them, or until it has no
    forward left."""
    row = [Action("F", *x) for x in forwards[:ahead]]
    forwards_begun, weights = len(row), 0
    for backwards_done, backward in enumerate(backwards):
        if forwards_begun < len(forwards):
            if forwards_begun - weights >= cap:
                row.append(Action("W", *backwards[weights]))
                weights += 1
            row.append(Action("F", *forwards[forwards_begun]))
            forwards_begun += 1
        elif weights < backwards_done:
            row.append(Action("W", *backwards[weights]))
            weights += 1
        row.append(Action("B_INPUT", *backward))
    row += [Action("W", *x) for x in backwards[weights:]]
    return tuple(row)


def _best(micro_batches: int, chunks: int, caps: Sequence[int]) -> Rows:
    """The fastest of some for equal stages whose transfers take no time."""
    stage_times = tuple((replace(_EQUAL, memory_bytes=chunks * cap), *[_EQUAL] * (chunks - 1)) for cap in caps)
    times = ChunkedTimes(stage_times, (LinkTimes(),) * len(caps) if len(caps) > 1 else ())
    good_enough = _GOOD * chunked_lower_bound_seconds(times, micro_batches)
    best, fastest = Rows(), math.inf
    for rows in _candidates(times, micro_batches, caps):
        seconds = time_chunk_orders(times, chunk_orders_of(Schedule("", rows, chunks)))
        assert seconds is not None, "no candidate deadlocks"
        if seconds < fastest:
            best, fastest = rows, seconds
        if fastest <= good_enough:
            break
    return best


def _candidates(times: ChunkedTimes, micro_batches: int, caps: Sequence[int]) -> Iterator[Rows]:
    stages, chunks, least_cap = len(caps), times.chunks, min(caps)
    sizes = stages, least_cap
    groups = [max(micro_batches // stages, 1), *(max(math.ceil(micro_batches / size), 1) for size in sizes)]
    for count in dict.fromkeys(groups):
        rows = _in_groups(chunk_passes(micro_batches, chunks, count), chunks, caps)
        if rows is not None:
            yield rows
    for group, ahead in itertools.product((stages, max(stages // 2, 1), 1), (math.inf, least_cap)):
        orders = list_schedule_chunks(times, micro_batches, ChunkRule(group, ahead))[1]
        yield schedule_of("", orders, chunks).stages
