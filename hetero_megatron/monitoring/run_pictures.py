"""Pictures of what the log of a run says: its plan as blocks, and how long each change of its ranks took."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_megatron.html.pictures import (
    COLORS,
    Bar,
    PipelineBlock,
    StageBlock,
    bars,
    chip_colors,
    legend,
    plan_blocks,
    share_caption,
)
from hetero_megatron.monitoring import log_fields as f
from hetero_megatron.predictor.report.prediction import format_seconds
from hetero_megatron.utils.text import plural, rank_ranges

MOST_RANKS = 1 << 17
_INTERVAL = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def plan_picture(start: Mapping[str, Any]) -> str:
    """The plan of a start event (equal pipelines are drawn once), colored by chip."""
    colors = chip_colors(list(start["chips"].values()))
    blocks = []
    for number, pipeline in enumerate(start["plan"]["pipelines"]):
        stages = []
        for stage in pipeline["stages"]:
            count, heading, details = _stage(stage)
            chips = tuple(dict.fromkeys(start["chips"].get(str(r), "") for r in _ranks(stage["ranks"])))
            stages.append(StageBlock(count, heading, details, chips))
        shares = (pipeline.get("repeat", 1), pipeline["num_micro_batches"], pipeline["micro_batch_size"])
        blocks.append(PipelineBlock(share_caption(number, *shares), tuple(stages)))
    return legend(colors) + plan_blocks(blocks, colors)


def changes_picture(events: Sequence[Mapping[str, Any]]) -> str:
    """A bar for each ``elastic`` event, of what it took until the run went on."""
    phases = dict.fromkeys(phase for event in events for phase in event["seconds"])
    colors = {phase: COLORS[i % len(COLORS)] for i, phase in enumerate(phases)}
    rows = []
    for event in events:
        seconds = event["seconds"]
        tips = tuple(f"{phase}: {format_seconds(took)}" for phase, took in seconds.items())
        text = f"{format_seconds(sum(seconds.values()))}, {event['bytes'] / 1e6:.1f} MB moved"
        parts = tuple((colors[phase], took) for phase, took in seconds.items())
        rows.append(Bar(f"after step {event['step']}", text, parts, tips=tips))
    return legend(colors) + bars(rows)


def _stage(stage: Mapping[str, Any]) -> tuple[int, str, str]:
    """(number of layers, ranks and layers, the rest) of a stage as in a plan file."""
    ranges = stage["layers"]
    ranges = [ranges] if ranges and not isinstance(ranges[0], list) else ranges
    count = sum(b - a for a, b in ranges)
    layer_ranges = ", ".join(f"{a}-{b - 1}" for a, b in ranges) or "none"
    settings = [
        f"{key} {stage[key]}" for key in ("tp", "dp_split", "recompute") if stage.get(key) not in (None, 1, "none")
    ]
    if stage.get("context"):
        settings.append(plural(len(stage['context']), 'context group'))
    if (stage.get("optimizer") or {}).get("offload"):
        settings.append("optimizer on the host")
    if stage.get("activations"):
        settings.append("activations on the host")
    return count, f"ranks {rank_ranges(_ranks(stage['ranks']))}, layers {layer_ranges}", ", ".join(settings)


def _ranks(value: Any) -> list[int]:
    """A plan file's spelling of ranks: 3, "0-3", "0-3,8", or a list of these (checked by :data:`PLAN`)."""
    return [r for start, stop in _intervals(value) or [] for r in range(start, stop)]


def _intervals(value: Any, depth: int = 0) -> list[tuple[int, int]] | None:
    """[start, stop) of each part; None if it is no spelling of ranks."""
    if isinstance(value, bool) or depth > 2:
        return None
    if isinstance(value, int):
        return [(value, value + 1)] if 0 <= value < MOST_RANKS else None
    if isinstance(value, str):
        parts = [_INTERVAL.fullmatch(part) for part in value.replace(" ", "").split(",")]
        return [(int(p[1]), int(p[2] or p[1]) + 1) for p in parts if p is not None] if all(parts) else None
    if not isinstance(value, list):
        return None
    inner = [_intervals(part, depth + 1) for part in value]
    return None if None in inner else [pair for pairs in inner for pair in pairs or ()]


def _some_ranks(value: Any) -> f.Wrong:
    intervals = _intervals(value)
    is_valid = intervals and all(a < b for a, b in intervals) and sum(b - a for a, b in intervals) <= MOST_RANKS
    return None if is_valid else ("", value, f'ranks, as 3, "0-3,8" or a list of these, at most {MOST_RANKS:,}')


def _layer_ranges(value: Any) -> f.Wrong:
    count = f.integer(0, MOST_RANKS)
    ranges = value if isinstance(value, list) and value and isinstance(value[0], list) else [value] if value else []
    problem = f.array(f.row(count, count))(ranges)
    return None if problem is None and value is not None else ("", value, "[first, end] or a list of these")


_STAGE = f.record(
    {"ranks": _some_ranks, "layers": _layer_ranges},
    {"context": f.maybe(f.array(f.anything)), "optimizer": f.maybe(f.mapping(f.anything))},
)
_PIPELINE = f.record(
    {"micro_batch_size": f.integer(), "num_micro_batches": f.integer(), "stages": f.some(f.array(_STAGE))},
    {"repeat": f.integer(1)},
)
PLAN = f.record({"pipelines": f.some(f.array(_PIPELINE))})  # what is drawn of a plan
