"""Who holds which sequences, tokens and heads of a stage."""

from __future__ import annotations

from collections.abc import Sequence

from hetero_megatron.plan import Plan, Stage
from hetero_megatron.plan.canonical import Unit
from hetero_megatron.spec import ModelSpec, shares
from hetero_megatron.utils.text import rank_ranges, word

MOST_LINES = 16  # of one stage


def holdings(plan: Plan, stage: Stage, model: ModelSpec) -> list[str]:
    """A line for each TP group of a stage that divides tokens, heads or sequences; none for a stage of one rank."""
    lines = [_unit(plan, stage, unit, model) for unit in stage.units] if len(stage.ranks) > 1 else []
    more = len(lines) - MOST_LINES
    return lines[:MOST_LINES] + ([f"and {more} more groups"] if more > 0 else [])


def _unit(plan: Plan, stage: Stage, unit: Unit, model: ModelSpec) -> str:
    parts = []
    if len(stage.replicas) > 1:
        a, b = unit.sequences
        parts.append(f"sequences {_spans([(a, b)])} of each micro-batch")
    if unit.num_tokens == plan.seq_length:
        parts.append("all tokens")
    else:
        parts.append(f"tokens {_spans(unit.tokens)} ({unit.num_tokens:,} of {plan.seq_length:,})")
    heads = [share.q_heads for share in shares(model, unit.tp_split, unit.heads)]
    counts = {b - a for a, b in heads}
    if len(heads) > 1 and len(counts) == 1:
        parts.append(f"{counts.pop()} of {model.num_heads} heads on each rank")
    elif len(heads) > 1:
        parts.append("heads " + ", ".join(f"{_spans([span])} on rank {r}" for span, r in zip(heads, unit.ranks)))
    else:
        parts.append("all heads" if unit.heads == (0, model.num_heads) else f"heads {_spans([unit.heads])}")
    return f"{word(unit.tp, 'rank')} {rank_ranges(unit.ranks)}: {', '.join(parts)}"


def _spans(spans: Sequence[tuple[int, int]]) -> str:
    """``0-1023 and 3072-4095``, with the last one in it."""
    return " and ".join(f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in spans if a < b) or "none"
