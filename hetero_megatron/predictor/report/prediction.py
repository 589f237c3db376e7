"""A prediction as text and as JSON data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hetero_megatron.cluster import format_bytes
from hetero_megatron.plan.memory.report import format_memory
from hetero_megatron.predictor.simulate.step import Prediction
from hetero_megatron.utils.text import plural, rank_ranges, word

PARTS = {
    "pipelines": "pipelines, until the last backward",
    "jitter": "waiting for unsteady chips",
    "gradients": "gradients, what backward does not hide",
    "optimizer": "optimizer",
    "parameters": "parameters to their holders",
}


def format_seconds(seconds: float) -> str:
    """``1.234 s``, ``56.7 ms`` or ``8.9 us``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return "0 s" if seconds < 5e-10 else f"{seconds * 1e9:.3g} ns"


def format_step_seconds(found: Prediction) -> str:
    """``1.236 s (1.19-1.29)``, the range in the unit of the seconds; without it where there is none."""
    text = format_seconds(found.step_seconds)
    if found.seconds_range is None:
        return text
    number, unit = text.split()
    factor = float(number) / found.step_seconds if found.step_seconds else 0.0
    low, high = (seconds * factor for seconds in found.seconds_range)
    digits = max(0, 2 - math.floor(math.log10(high))) if high > 0 else 0
    return f"{number} {unit} ({low:.{digits}f}-{high:.{digits}f})"


def bubble_share(found: Prediction) -> float:
    """Share of the time of all stages, until the last backward of the step, in which they do not compute."""
    busy = sum(sum(timeline.busy) for timeline in found.timelines)
    return 1 - busy / (max(found.pipeline_seconds) * sum(len(timeline.busy) for timeline in found.timelines))


def format_prediction(found: Prediction) -> str:
    """Step time and its parts, use of the chips, memory, and what was assumed."""
    share = f", {found.mfu:.1%} of the chips' peak (MFU)" if found.mfu is not None else ""
    lines = [
        f"plan {found.plan.fingerprint()}: {plural(found.plan.world_size, 'rank')}, "
        f"{plural(len(found.plan.pipelines), 'pipeline')}",
        f"predicted step: {format_step_seconds(found)}, {found.tokens_per_second:,.0f} tokens/s{share}",
    ]
    for part, words in PARTS.items():
        seconds = found.parts[part]
        if seconds or part != "jitter":
            lines.append(f"  {words:<40}{format_seconds(seconds):>12}{seconds / found.step_seconds:>8.1%}")
    lines += format_dtypes(found)
    lines += ["", "busy with compute", *_busy(found), "", format_memory(found.memory)]
    lines += found.communicators
    free = min((found.limits[r] - m.total, r) for r, m in found.memory.items())
    if found.over:
        lines += [f"does not fit: {over}" for over in found.over[:4]]
        if len(found.over) > 4:
            lines.append(f"and {len(found.over) - 4} more ranks")
    else:
        lines.append(f"fits: rank {free[1]} has least left, {format_bytes(free[0])} below its limit")
    if found.assumed:
        chips = found.describe_assumed()
        lines.append(f"assumed: data sheet x default efficiencies for {chips}; no rates in the cluster file")
    return "\n".join([*lines, *split_notice(found)])


def split_notice(found: Prediction) -> list[str]:
    """A line where the plan splits backwards, and rates do not say what their parts take."""
    if not found.unsplit:
        return []
    return [f"assumed: weight gradients (W) take their share of a backward's FLOPs, and splitting it takes nothing, on "
            f"{', '.join(found.unsplit)}: their rates say nothing about it, run calibrate"]  # fmt: skip


def format_dtypes(found: Prediction) -> list[str]:
    """A line per dtype: which ranks have linear modules in it; nothing where no run has fp8."""
    rows: dict[str, list[int]] = {}
    for rank, dtype in sorted(found.dtypes.items()):
        rows.setdefault(dtype, []).append(rank)
    lines = []
    for dtype, ranks in rows.items():
        chips = ", ".join(dict.fromkeys(found.chips[rank] for rank in ranks))
        lines.append(f"  linear modules in {dtype}: {word(len(ranks), 'rank')} {rank_ranges(ranks)} ({chips})")
    return lines


def _busy(found: Prediction) -> list[str]:
    """One line per run of ranks of one stage (or several alike)."""
    rows: dict[tuple[str, float], list[int]] = {}
    for rank, seconds in sorted(found.busy.items()):
        rows.setdefault((found.chips[rank], seconds), []).append(rank)
    return [
        f"  ranks {rank_ranges(ranks):<20}{chip:<18}{format_seconds(seconds):>10}{seconds / found.step_seconds:>8.1%}"
        for (chip, seconds), ranks in rows.items()
    ]


def as_json(found: Prediction) -> Mapping[str, Any]:
    """Everything but the timeline, as JSON data; seconds and bytes."""
    return {
        "plan": found.plan.fingerprint(),
        "step_seconds": found.step_seconds,
        "seconds_range": None if found.seconds_range is None else list(found.seconds_range),
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "parts": dict(found.parts),
        "pipeline_seconds": list(found.pipeline_seconds),
        "fits": not found.over,
        "over": [{"rank": o.rank, "chip": o.chip, "bytes": o.over} for o in found.over],
        "assumed": list(found.assumed),
        "ranks": [
            {
                "rank": rank,
                "chip": found.chips[rank],
                "busy_seconds": found.busy[rank],
                **({"linear_modules": found.dtypes[rank]} if found.dtypes else {}),
                "memory": memory.parts() | {"total": memory.total, "host": memory.host},
                "memory_limit": found.limits[rank],
            }
            for rank, memory in sorted(found.memory.items())
        ],
    }
