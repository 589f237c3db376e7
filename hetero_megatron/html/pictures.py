"""Pictures of a page, as HTML and SVG that fits any width: plans and clusters as blocks, bars, curves over steps."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetero_megatron.utils.text import plural, rank_ranges

COLORS = ("#4c8bf5", "#d9654f", "#34a06f", "#b05fd0", "#e0a020", "#2aa7a7", "#8a6d3b", "#777777")
PART_COLORS = {
    "weights": "#4c8bf5", "gradients": "#e0a020", "optimizer": "#b05fd0", "activations": "#34a06f",
    "buffers": "#2aa7a7", "overhead": "#8c8c8c", "communicators": "#5d6d7e", "graphs": "#d9654f",
    "second_model": "#8a6d3b",
}  # fmt: skip
MOST_POINTS, MOST_PIPELINES, MOST_NODES, MOST_ROWS = 1200, 24, 48, 64
GIB = 2**30

STYLE = """
.pipe { display: flex; gap: 3px; margin: 2px 0 14px; overflow-x: auto }
.stage { min-width: 5.2em; padding: 6px 8px; border-radius: 5px; font-size: 12px; line-height: 1.35;
  border: 1px solid var(--c); background: color-mix(in srgb, var(--c) 22%, var(--bg)); overflow-wrap: anywhere;
  white-space: pre-line }
.stage b { display: block } .caption { margin: 6px 0 2px; font-weight: 600 }
.nodes { display: flex; flex-wrap: wrap; gap: 10px }
.node { border: 1px solid var(--line); border-radius: 6px; padding: 6px 8px; font-size: 12px; max-width: 100% }
.node i { display: inline-block; width: 14px; height: 14px; margin: 2px 2px 0 0; background: var(--c) }
.node i.idle { opacity: .25 }
.bars { display: grid; grid-template-columns: minmax(5em, max-content) 1fr max-content; gap: 5px 10px;
  align-items: center }
.bars > span { font-size: 13px; overflow-wrap: anywhere; max-width: 34vw }
.bars > b { font-size: 12px; font-weight: 500; overflow-wrap: anywhere; max-width: 30vw }
.asked { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 0 }
.asked dt { color: var(--dim) } .asked dd { margin: 0; overflow-wrap: anywhere }
.track { position: relative; height: 20px; background: var(--panel); border-radius: 3px; overflow: hidden }
.track i { position: absolute; top: 0; bottom: 0; left: 0; background: var(--c) }
.track u { position: absolute; top: 0; bottom: 0; border-left: 2px dashed #d33 }
.chart { position: relative; height: 230px; margin: 4px 0 26px 58px }
.chart svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible }
.chart polyline, .chart line { vector-effect: non-scaling-stroke }
.chart .y { position: absolute; right: 100%; margin-right: 6px; transform: translateY(-50%) }
.chart .x { position: absolute; top: 100%; transform: translateX(-50%) }
.chart .x, .chart .y { font-size: 11px; color: var(--dim); white-space: nowrap }
"""


@dataclass(frozen=True)
class Line:
    """A named curve; points whose value is None (not finite, or not known) interrupt it."""

    name: str
    points: Sequence[tuple[int, float | None]]
    color: str


@dataclass(frozen=True)
class StageBlock:
    """``details``: what is written under the layers; ``chips``: names of its chips, the first one colours it."""

    layers: int
    heading: str
    details: str
    chips: tuple[str, ...]


@dataclass(frozen=True)
class PipelineBlock:
    caption: str
    stages: tuple[StageBlock, ...]


@dataclass(frozen=True)
class Bar:
    """A row of bars; ``text``: written beside it, on the page's own color; ``parts``: (color, value) from the left;
    ``limit``: a mark."""

    name: str
    text: str
    parts: tuple[tuple[str, float], ...]
    limit: float | None = None
    tips: tuple[str, ...] = field(default_factory=tuple)


def luminance(color: str) -> float:
    """Relative luminance of ``#rrggbb``, 0 to 1 (WCAG 2)."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(color: str, other: str) -> float:
    """1 to 21 (WCAG 2); small text is readable from 4.5."""
    low, high = sorted((luminance(color), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink(color: str) -> str:
    """Black or white, what is better read on the color: at least 4.5 on any."""
    return max(("#000000", "#ffffff"), key=lambda text: contrast(text, color))


def asked_list(rows: Sequence[tuple[str, str]]) -> str:
    """What was asked: (what, in words)."""
    entries = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in rows)
    return f"<dl class='asked'>{entries}</dl>"


def chip_colors(kinds: Sequence[str]) -> dict[str, str]:
    """One per chip type, in their order."""
    return {kind: COLORS[i % len(COLORS)] for i, kind in enumerate(dict.fromkeys(kinds))}


def legend(colors: Mapping[str, str]) -> str:
    """What the colors stand for."""
    keys = "".join(f"<span><i style='background:{c}'></i>{html.escape(name)}</span>" for name, c in colors.items())
    return f"<p class='legend'>{keys}</p>"


def plan_blocks(pipelines: Sequence[PipelineBlock], colors: Mapping[str, str]) -> str:
    """A row of blocks per pipeline, as wide as their layers and colored by chip."""
    rows = []
    for pipeline in pipelines[:MOST_PIPELINES]:
        stages = []
        for stage in pipeline.stages:
            color = colors.get(stage.chips[0] if stage.chips else "", "#999999")
            tip = html.escape(f"{stage.heading}; {stage.details}; chips {', '.join(stage.chips)}", quote=True)
            stages.append(
                f"<div class='stage' style='flex:{max(stage.layers, 1)} 1 0;--c:{color}' title='{tip}'>"
                f"<b>{html.escape(stage.heading)}</b>{html.escape(stage.details)}</div>"
            )
        rows.append(f"<p class='caption'>{html.escape(pipeline.caption)}</p><div class='pipe'>{''.join(stages)}</div>")
    if len(pipelines) > MOST_PIPELINES:
        rows.append(f"<p>and {len(pipelines) - MOST_PIPELINES} more pipelines</p>")
    return "".join(rows)


def cluster_blocks(nodes: Mapping[str, Sequence[tuple[int, str]]], used: set[int], colors: Mapping[str, str]) -> str:
    """Nodes with a square per chip; equal nodes in a row are drawn once.

    Args:
        nodes: (rank, chip) of each chip, by node.
        used: ranks of the plan; other chips are pale.
    """
    groups: list[tuple[list[str], Sequence[tuple[int, str]], list[bool]]] = []
    for name, chips in nodes.items():
        kinds, busy = [chip for _, chip in chips], [rank in used for rank, _ in chips]
        if groups and [c for _, c in groups[-1][1]] == kinds and groups[-1][2] == busy:
            groups[-1][0].append(name)
        else:
            groups.append(([name], chips, busy))
    blocks = []
    for names, chips, busy in groups[:MOST_NODES]:
        squares = "".join(
            f"<i style='--c:{colors.get(chip, '#999999')}'{'' if is_used else ' class=idle'}></i>"
            for (_, chip), is_used in zip(chips, busy, strict=True)
        )
        heading = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} nodes)"
        types = ", ".join(dict.fromkeys(chip for _, chip in chips))
        idle = "" if all(busy) else f", {busy.count(False)} idle"
        text = f"{len(chips)} x {types}{idle}"
        blocks.append(f"<div class='node'>{html.escape(heading)}<br>{squares}<br>{html.escape(text)}</div>")
    left_out = f"<p>and {len(groups) - MOST_NODES} more kinds of nodes</p>" if len(groups) > MOST_NODES else ""
    return f"<div class='nodes'>{''.join(blocks)}</div>{left_out}"


def bars(rows: Sequence[Bar]) -> str:
    """Horizontal bars on one scale."""
    longest = max((max(sum(v for _, v in row.parts), row.limit or 0.0) for row in rows), default=0.0) or 1.0
    out = []
    for row in rows[:MOST_ROWS]:
        start, pieces = 0.0, []
        for index, (color, value) in enumerate(row.parts):
            tip = f" title='{html.escape(row.tips[index], quote=True)}'" if index < len(row.tips) else ""
            place = f"left:{100 * start / longest:.3f}%;width:{100 * value / longest:.3f}%"
            pieces.append(f"<i style='{place};--c:{color}'{tip}></i>")
            start += value
        mark = f"<u style='left:calc({100 * row.limit / longest:.3f}% - 2px)'></u>" if row.limit is not None else ""
        text = f"<b>{html.escape(row.text)}</b>"
        out.append(f"<span>{html.escape(row.name)}</span><div class='track'>{''.join(pieces)}{mark}</div>{text}")
    left_out = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
    return f"<div class='bars'>{''.join(out)}</div>{left_out}"


def memory_bars(
    memory: Mapping[int, Mapping[str, float]], limits: Mapping[int, float], chips: Mapping[int, str]
) -> str:
    """A bar per rank of what its memory holds, with its limit; ranks in a row that are alike are drawn once.

    Args:
        memory: bytes by part (``MemoryBytes.parts``) by rank.
    """
    runs: list[tuple[list[int], Mapping[str, float], float, str]] = []
    for rank in sorted(memory):
        row = (memory[rank], limits[rank], chips.get(rank, ""))
        if runs and runs[-1][1:] == row:
            runs[-1][0].append(rank)
        else:
            runs.append(([rank], *row))
    rows = []
    for ranks, parts, limit, chip in runs:
        # Of activations and buffers the larger counts: they are not there at the same time.
        moving = max(parts.get("activations", 0.0), parts.get("buffers", 0.0))
        counted = {k: v for k, v in parts.items() if v and (k not in ("activations", "buffers") or v == moving)}
        total = sum(counted.values())
        excess = f", {(total - limit) / GIB:.3g} GiB too much" if total > limit else ""
        rows.append(
            Bar(
                f"{'ranks' if len(ranks) > 1 else 'rank'} {rank_ranges(ranks)} {chip}".strip(),
                f"{total / GIB:.3g} of {limit / GIB:.3g} GiB{excess}",
                tuple((PART_COLORS.get(k, "#999999"), v) for k, v in counted.items()), limit,
                tuple(f"{k}: {v / GIB:.3g} GiB" for k, v in counted.items()),
            )
        )  # fmt: skip
    names = dict.fromkeys(k for parts in memory.values() for k, v in parts.items() if v)
    return legend({k: PART_COLORS.get(k, "#999999") for k in names}) + bars(rows)


def curve(lines: Sequence[Line], marks: Sequence[tuple[int, str]]) -> str:
    """Curves over a common axis of steps, with vertical marks (step, what)."""
    lines = [line for line in lines if any(v is not None for _, v in line.points)]
    if not lines:
        return "<p>nothing was measured</p>"
    xs = [x for line in lines for x, _ in line.points]
    ys = [v for line in lines for _, v in line.points if v is not None]
    x0, x1 = min(xs), max(max(xs), min(xs) + 1)
    ticks = nice_ticks(min(ys), max(ys))
    low, high = min(min(ys), ticks[0]), max(max(ys), ticks[-1])

    def x(step: float) -> float:
        return (step - x0) / (x1 - x0) * 1000

    def y(value: float) -> float:
        return (high - value) / (high - low) * 1000

    out = ["<svg viewBox='0 0 1000 1000' preserveAspectRatio='none'>"]
    for tick in ticks:
        out.append(f"<line x1='0' x2='1000' y1='{y(tick):.1f}' y2='{y(tick):.1f}' stroke='var(--line)'/>")
    for step, event in marks:
        if x0 <= step <= x1:
            title = f"<title>step {step}: {html.escape(event)}</title>"
            place = f"x1='{x(step):.1f}' x2='{x(step):.1f}' y1='0' y2='1000'"
            out.append(f"<line {place} stroke='#d33' stroke-dasharray='4 3'>{title}</line>")
    for line in lines:
        for run in _parts(line.points):
            text = " ".join(f"{x(s):.1f},{y(v):.1f}" for s, v in run)
            dot = f" {x(run[0][0]):.1f},{y(run[0][1]):.1f}" if len(run) == 1 else ""
            width = "6' stroke-linecap='round" if dot else "1.8"
            out.append(
                f"<polyline points='{text}{dot}' fill='none' stroke='{line.color}' stroke-width='{width}'/>"
            )
    out.append("</svg>")
    out += [f"<span class='y' style='top:{y(tick) / 10:.2f}%'>{tick:.4g}</span>" for tick in ticks]
    out += [f"<span class='x' style='left:{x(s) / 10:.2f}%'>{s}</span>" for s in sorted({x0, (x0 + x1) // 2, x1})]
    return f"{legend({line.name: line.color for line in lines})}<div class='chart'>{''.join(out)}</div>"


def _parts(points: Sequence[tuple[int, float | None]]) -> list[list[tuple[int, float]]]:
    """Runs of known values; thinned out where there are more than the picture has columns."""
    stride = max(1, len(points) // MOST_POINTS)
    runs: list[list[tuple[int, float]]] = [[]]
    for i, (step, value) in enumerate(points):
        if value is None:
            runs.append([])
        elif i % stride == 0 or i == len(points) - 1:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def nice_ticks(low: float, high: float) -> list[float]:
    """3 to 7 round values around ``[low, high]``."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = min(low, high), max(low, high)
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    raw = (high - low) / 4
    size = 10 ** math.floor(math.log10(raw))
    step = next(size * f for f in (1, 2, 5, 10) if size * f >= raw)
    first_tick = math.floor(low / step)
    return [round(i * step, 12) for i in range(first_tick, math.ceil(high / step) + 1)]


def share_caption(number: int, copies: int, micro_batches: int, size: int) -> str:
    """``pipeline 0 x 2: 8 sequences = 4 x 2``."""
    words = f"pipeline {number}" + (f" x {copies}" if copies > 1 else "")
    return f"{words}: {plural(micro_batches * size, 'sequence')} = {micro_batches} x {size}"
