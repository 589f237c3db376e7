"""Plan -> what one rank, one pipeline or one micro-batch gets."""

from __future__ import annotations

from hetero_megatron.layout import Box, Layout, cut, largest_remainder
from hetero_megatron.plan.canonical import Interval, Pipeline, Place, Plan, Stage, Unit


def locate(plan: Plan, rank: int) -> Place:
    """The place of one rank; KeyError for a rank that the plan does not use."""
    return plan.places[rank]


def stage_at(plan: Plan, place: Place) -> Stage:
    return plan.pipelines[place.pipeline].stages[place.stage]


def unit_at(plan: Plan, place: Place) -> Unit:
    return stage_at(plan, place).units[place.unit]


def pipeline_shares(plan: Plan, batch_size: int) -> tuple[int, ...]:
    """Sequences of a batch per pipeline: in proportion to the nominal shares, by largest remainder.

    Equals ``micro_batch_size * num_micro_batches`` when ``batch_size`` is the plan's global batch size.
    """
    return largest_remainder(batch_size, [p.batch_size for p in plan.pipelines])


def pipeline_samples(plan: Plan, batch_size: int) -> tuple[Interval, ...]:
    """The contiguous block of sample indices inside a batch that each pipeline computes."""
    bounds, start = [], 0
    for share in pipeline_shares(plan, batch_size):
        bounds.append((start, start + share))
        start += share
    return tuple(bounds)


def micro_batch_sizes(pipeline: Pipeline, share: int) -> tuple[int, ...]:
    """Sequences per micro-batch: the pipeline's micro-batch size each, a smaller last one for what is
    left."""
    full, rest = divmod(share, pipeline.micro_batch_size)
    return (pipeline.micro_batch_size,) * full + ((rest,) if rest else ())


def unit_sequences(stage: Stage, size: int) -> tuple[Interval, ...]:
    """Per unit, the rows of a micro-batch of ``size`` sequences: cut by the stage's ``dp_split``; may
    be empty."""
    rows = dict(zip(stage.replicas, cut(size, stage.dp_split), strict=True))
    return tuple(rows[unit.sequences] for unit in stage.units)


def token_intervals(unit: Unit, tp_rank: int) -> tuple[Interval, ...]:
    """Tokens of each sequence that one TP rank of a unit holds between layers.

    Sequence parallelism: the unit's tokens, strung together in ascending order, are cut evenly over its
        ranks,
    whatever ``tp_split`` says.
    """
    start, stop = cut(unit.num_tokens, [1] * unit.tp)[tp_rank]
    held, offset = [], 0
    for a, b in unit.tokens:
        lo, hi = max(start, offset), min(stop, offset + b - a)
        if lo < hi:
            held.append((a + lo - offset, a + hi - offset))
        offset += b - a
    return tuple(held)


def activation_layout(plan: Plan, pipeline: int, stage: int, size: int, hidden: int) -> Layout:
    """Who holds what of a stage's activations, between layers and at its boundaries.

    Args:
        size: sequences in this micro-batch; may be smaller than the nominal one.
        hidden: hidden size of the model; never cut.

    Returns:
        a layout over (sequence, token, hidden) of shape ``(size, seq_length, hidden)`` that tiles it
        exactly once.
    """
    chosen = plan.pipelines[pipeline].stages[stage]
    boxes: dict[int, tuple[Box, ...]] = {}
    for unit, (row, end) in zip(chosen.units, unit_sequences(chosen, size), strict=True):
        for t, rank in enumerate(unit.ranks):
            boxes[rank] = tuple(Box((row, a, 0), (end, b, hidden)) for a, b in token_intervals(unit, t))
    return Layout((size, plan.seq_length, hidden), boxes)
