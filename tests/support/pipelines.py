"""Random unequal pipelines for the schedule tests and benchmarks."""

from __future__ import annotations

import random
from dataclasses import replace

from hetero_megatron.schedule.chunk_times import ChunkedTimes
from hetero_megatron.schedule.stage_orders import LinkTimes, PipelineTimes, StageTimes


def random_times(
    draw: random.Random, num_stages: int, by_count: bool = True, spread: float | None = None
) -> PipelineTimes:
    """Stages of unlike speed, some with full recompute, some with a tail; links of up to 1.5 forwards; memory from one
    micro-batch less than 1F1B wants to two more.

    Seconds are whole numbers, so that their sums are exact and an integer solver sees the same.

    Args:
        by_count: every micro-batch in flight counts as one byte, until its W; else bytes until B_INPUT and until W
            differ.
        spread: forwards differ by up to so much from their mean; None: 0.1, 0.3 or 0.6.
    """
    slowest_link = draw.choice((0, 20, 60, 150))
    spread = spread or draw.choice((0.1, 0.3, 0.6))
    stages = []
    for s in range(num_stages):
        forward = round(100 * draw.uniform(1 - spread, 1 + spread))
        recompute = draw.choice((1, 1, 2))
        wanted = max(1, num_stages - s + draw.choice((-1, 0, 0, 1, 2)))
        activation, deferred = (1, 1) if by_count else (draw.randint(2, 9), draw.randint(0, 12))
        stages.append(
            StageTimes(
                forward,
                round(forward * draw.uniform(0.9, 1.2) * recompute),
                round(forward * draw.uniform(0.7, 1.0)),
                draw.choice((0, draw.randint(0, 300))),
                activation_bytes=activation,
                deferred_bytes=deferred,
                memory_bytes=wanted * activation + (0 if by_count else draw.randint(0, activation)),
            )
        )
    links = [
        LinkTimes(draw.randint(0, slowest_link), draw.randint(0, slowest_link), draw.randint(0, 5))
        for _ in range(num_stages - 1)
    ]
    return PipelineTimes(tuple(stages), tuple(links))


def random_chunked_times(draw: random.Random, num_stages: int, num_chunks: int, by_count: bool = True) -> ChunkedTimes:
    """Stages as in :func:`random_times`, each of several unlike chunks; memory from just one micro-batch in all chunks
    to more than interleaved 1F1B wants; a fifth without limit."""
    stages, limited = [], draw.random() < 0.8
    for stage in random_times(draw, num_stages, by_count).stages:
        chunks = []
        for _ in range(num_chunks):
            share = draw.uniform(0.3, 1.7) / num_chunks
            chunks.append(replace(
                stage, forward_seconds=round(stage.forward_seconds * share),
                input_gradient_seconds=round(stage.input_gradient_seconds * share),
                weight_gradient_seconds=round(stage.weight_gradient_seconds * share),
                activation_bytes=1 if by_count else draw.randint(1, 9), memory_bytes=float("inf"), tail_seconds=0,
            ))  # fmt: skip
        least = sum(c.activation_bytes for c in chunks)
        memory = least * draw.uniform(1, num_stages + 2) if limited else float("inf")
        chunks[0] = replace(chunks[0], memory_bytes=int(memory) if limited else memory, tail_seconds=stage.tail_seconds)
        stages.append(tuple(chunks))
    slowest = draw.choice((0, 20, 150))
    links = [
        LinkTimes(draw.randint(0, slowest), draw.randint(0, slowest), draw.randint(0, 5))
        for _ in range(num_stages if num_stages > 1 else 0)
    ]
    return ChunkedTimes(tuple(stages), tuple(links))
