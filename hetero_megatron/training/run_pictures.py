"""Pictures of a run as SVG: curves over steps, and its plan as boxes."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_megatron.training import log_fields as f
from hetero_megatron.words import plural, rank_ranges

COLORS = ("#4c8bf5", "#d9654f", "#34a06f", "#b05fd0", "#e0a020", "#2aa7a7", "#8a6d3b", "#777777")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 900, 240, 70, 24, 12
MOST_POINTS, MOST_PIPELINES, BOX = 1200, 24, 26
MOST_RANKS = 1 << 17
_INTERVAL = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


@dataclass(frozen=True)
class Line:
    """A named curve; points whose value is None (not finite, or not known) interrupt it."""

    name: str
    points: Sequence[tuple[int, float | None]]
    color: str


def curve(lines: Sequence[Line], marks: Sequence[tuple[int, str]]) -> str:
    """Curves over a common axis of steps, with vertical marks (step, what)."""
    lines = [line for line in lines if any(v is not None for _, v in line.points)]
    if not lines:
        return "<p>nothing was measured</p>"
    xs = [x for line in lines for x, _ in line.points]
    ys = [v for line in lines for _, v in line.points if v is not None]
    x0, x1 = min(xs), max(max(xs), min(xs) + 1)
    low, high = min(ys), max(ys)
    ticks = nice_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])

    def x(step: float) -> float:
        return LEFT + (step - x0) / (x1 - x0) * (WIDTH - LEFT - 10)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    out = [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' font-size='11' font-family='system-ui'>"]
    for tick in ticks:
        out.append(f"<line x1='{LEFT}' x2='{WIDTH - 10}' y1='{y(tick):.1f}' y2='{y(tick):.1f}' stroke='#e4e4e4'/>")
        out.append(f"<text x='{LEFT - 6}' y='{y(tick) + 4:.1f}' text-anchor='end' fill='#666'>{tick:.4g}</text>")
    for step in sorted({x0, (x0 + x1) // 2, x1}):
        out.append(f"<text x='{x(step):.1f}' y='{HEIGHT - 6}' text-anchor='middle' fill='#666'>{step}</text>")
    for step, what in marks:
        if x0 <= step <= x1:
            place = f"x1='{x(step):.1f}' x2='{x(step):.1f}' y1='{TOP}' y2='{HEIGHT - BOTTOM}'"
            title = f"<title>step {step}: {html.escape(what)}</title>"
            out.append(f"<line {place} stroke='#d33' stroke-dasharray='3 3'>{title}</line>")
    for i, line in enumerate(lines):
        for part in _parts(line.points):
            text = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in part)
            if len(part) == 1:
                out.append(f"<circle cx='{x(part[0][0]):.1f}' cy='{y(part[0][1]):.1f}' r='2.5' fill='{line.color}'/>")
            out.append(f"<polyline points='{text}' fill='none' stroke='{line.color}' stroke-width='1.5'/>")
        at = WIDTH - 160
        out.append(f"<rect x='{at}' y='{TOP + 16 * i}' width='10' height='10' fill='{line.color}'/>")
        out.append(f"<text x='{at + 16}' y='{TOP + 9 + 16 * i}'>{html.escape(line.name)}</text>")
    return "".join(out) + "</svg>"


def _parts(points: Sequence[tuple[int, float | None]]) -> list[list[tuple[int, float]]]:
    """Runs of known values; thinned out where there are more than the picture has columns."""
    every = max(1, len(points) // MOST_POINTS)
    parts: list[list[tuple[int, float]]] = [[]]
    for i, (step, value) in enumerate(points):
        if value is None:
            parts.append([])
        elif i % every == 0 or i == len(points) - 1:
            parts[-1].append((step, value))
    return [part for part in parts if part]


def nice_ticks(low: float, high: float) -> list[float]:
    """3 to 7 round values around ``[low, high]``."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = min(low, high), max(low, high)
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / 4
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * f for f in (1, 2, 5, 10) if size * f >= raw)
    first = math.floor(low / step)
    return [round(i * step, 12) for i in range(first, math.ceil(high / step) + 1)]


def plan_picture(start: Mapping[str, Any]) -> str:
    """The plan of a start event: a row per pipeline (equal ones are drawn once), boxes as wide as their layers."""
    plan, layers = start["plan"], start["model"]["num_layers"]
    kinds = list(dict.fromkeys(start["chips"].values()))
    color = {kind: COLORS[i % len(COLORS)] for i, kind in enumerate(kinds)}
    pipelines = plan["pipelines"]
    out, top = [], 4
    for number, pipeline in enumerate(pipelines[:MOST_PIPELINES]):
        share = pipeline["micro_batch_size"] * pipeline["num_micro_batches"]
        copies = pipeline.get("repeat", 1)
        words = f"pipeline {number}" + (f" x {copies}" if copies > 1 else "")
        words += f": {share} sequences = {pipeline['num_micro_batches']} x {pipeline['micro_batch_size']}"
        out.append(f"<text x='0' y='{top + 12}'>{html.escape(words)}</text>")
        top, left = top + 18, 0.0
        rows = max(min(len(_ranks(s["ranks"])), 4) for s in pipeline["stages"])
        for stage in pipeline["stages"]:
            count, text = _stage(stage)
            width = max(WIDTH * count / layers, 60.0)
            ranks = _ranks(stage["ranks"])
            chips = list(dict.fromkeys(start["chips"].get(str(r), "") for r in ranks))
            height = BOX * min(len(ranks), 4) + 8
            fill = color.get(chips[0], "#ccc")
            full = f"{text}; chips {', '.join(chips)}"
            out.append(
                f"<g><title>{html.escape(full)}</title><rect x='{left:.0f}' y='{top}' width='{width - 3:.0f}' "
                f"height='{height}' rx='3' fill='{fill}' fill-opacity='0.35' stroke='{fill}'/>"
                f"<text x='{left + 5:.0f}' y='{top + 15}'>{html.escape(text[: max(4, int(width / 6.2))])}</text></g>"
            )
            left += width
        top += BOX * rows + 20
    if len(pipelines) > MOST_PIPELINES:
        out.append(f"<text x='0' y='{top + 12}'>and {len(pipelines) - MOST_PIPELINES} more pipelines</text>")
        top += 18
    for i, kind in enumerate(kinds):
        out.append(f"<rect x='{160 * i}' y='{top + 2}' width='10' height='10' fill='{color[kind]}'/>")
        out.append(f"<text x='{160 * i + 16}' y='{top + 11}'>{html.escape(kind)}</text>")
    size = f"viewBox='0 0 {WIDTH + 60} {top + 20}' width='{WIDTH + 60}'"
    return f"<svg {size} font-size='11' font-family='system-ui'>{''.join(out)}</svg>"


def _stage(stage: Mapping[str, Any]) -> tuple[int, str]:
    """(layers, text) of a stage as in a plan file."""
    ranges = stage["layers"]
    ranges = [ranges] if ranges and not isinstance(ranges[0], list) else ranges
    count = sum(b - a for a, b in ranges)
    said = ", ".join(f"{a}-{b - 1}" for a, b in ranges) or "none"
    more = [f"{key} {stage[key]}" for key in ("tp", "dp_split", "recompute") if stage.get(key) not in (None, 1, "none")]
    if stage.get("context"):
        more.append(plural(len(stage['context']), 'context group'))
    if (stage.get("optimizer") or {}).get("offload"):
        more.append("optimizer on the host")
    return count, ", ".join([f"ranks {rank_ranges(_ranks(stage['ranks']))}", f"layers {said}", *more])


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
    found = _intervals(value)
    good = found and all(a < b for a, b in found) and sum(b - a for a, b in found) <= MOST_RANKS
    return None if good else ("", value, f'ranks, as 3, "0-3,8" or a list of these, at most {MOST_RANKS:,}')


def _layer_ranges(value: Any) -> f.Wrong:
    count = f.integer(0, MOST_RANKS)
    ranges = value if isinstance(value, list) and value and isinstance(value[0], list) else [value] if value else []
    wrong = f.array(f.row(count, count))(ranges)
    return None if wrong is None and value is not None else ("", value, "[first, end] or a list of these")


_STAGE = f.record(
    {"ranks": _some_ranks, "layers": _layer_ranges},
    {"context": f.maybe(f.array(f.anything)), "optimizer": f.maybe(f.mapping(f.anything))},
)
_PIPELINE = f.record(
    {"micro_batch_size": f.integer(), "num_micro_batches": f.integer(), "stages": f.some(f.array(_STAGE))},
    {"repeat": f.integer(1)},
)
PLAN = f.record({"pipelines": f.some(f.array(_PIPELINE))})  # what is drawn of a plan
