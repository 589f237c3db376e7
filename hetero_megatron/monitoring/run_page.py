"""A page about a run, from what is in its --save directory: self-contained HTML, no network, no torch."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from hetero_megatron.errors import printable
from hetero_megatron.html.page import KINDS, charts_html, figures, page, section
from hetero_megatron.html.pictures import (
    COLORS,
    Bar,
    Line,
    bars,
    chip_colors,
    cluster_blocks,
    curve,
    legend,
    memory_bars,
)
from hetero_megatron.monitoring.run_experts import EXPERT_STYLE, expert_sections
from hetero_megatron.monitoring.run_files import RunFiles, read_run
from hetero_megatron.monitoring.run_pictures import changes_picture, plan_picture
from hetero_megatron.predictor.report.prediction import format_seconds
from hetero_megatron.testbed.report import MEANING

MOST_CHIPS = 24  # types that are drawn
LEAST = 1e-9  # seconds: below, nothing was measured
__all__ = ["read_run", "run_page", "summary"]
_STYLE = """
table { border-collapse: collapse } td, th { padding: 2px 12px 2px 0; border-bottom: 1px solid var(--line);
  text-align: left; vertical-align: top } td { overflow-wrap: anywhere; min-width: 4em }
td:first-child { white-space: nowrap }
"""
_BARS = {"busy": "#4c8bf5", "bubble": "#d8d8d8", "communication": "#e0a020"}


def summary(run: RunFiles) -> dict[str, Any]:
    """The figures of the page, as JSON data."""
    first, last = run.steps[0], run.steps[-1]
    rates = [s["tokens"] / s["step_seconds"] for s in run.steps if s["step_seconds"] > LEAST]
    measured = [s["step_seconds"] for s in run.steps[2:]] or [s["step_seconds"] for s in run.steps]
    predicted = last.get("predicted_step_seconds")
    start = run.last("start")
    return {
        "run": str(run.directory),
        "plan": start["fingerprint"] if start else None,
        "outer": list(start.get("outer", ())) if start else [],
        "model": start["model"]["name"] if start else None,
        "steps": len(run.steps),
        "last_step": last["step"],
        "first_loss": first["loss"],
        "last_loss": last["loss"],
        "step_seconds": median(measured),
        "predicted_step_seconds": predicted,
        "measured_over_predicted": median(measured) / predicted if predicted and predicted > LEAST else None,
        "tokens_per_second": median(rates) if rates else None,
        "tgs_per_chip": _throughput(run),
        "starts": sum(e["kind"] == "start" for e in run.events),
        "repeated_steps": run.repeated,
        "stragglers": sum(e["kind"] == "straggler" for e in run.events),
        "skipped": sum(bool(s.get("skipped")) for s in run.steps),
        "checkpoints": list(run.checkpoints),
        "ended": e["text"] if (e := run.last("end")) else None,
        "emulation": dict(run.emulation) or None,
    }


def _throughput(run: RunFiles) -> dict[str, float]:
    """Median tokens per chip and second by chip type."""
    names = dict.fromkeys(name for s in run.steps for name in s.get("tgs_per_chip") or {})
    return {n: median(s["tgs_per_chip"][n] for s in run.steps if n in (s.get("tgs_per_chip") or {})) for n in names}


def run_page(run: RunFiles) -> str:
    """The page."""
    facts, start = summary(run), run.last("start")
    title = f"{facts['model'] or 'run'} in {printable(run.directory.name)}"
    parts = [f"<h1>{html.escape(title)}</h1>", _first_figures(facts), _facts(facts)]
    if start is not None:
        parts += _cluster(start)
        note = f"fingerprint {start['fingerprint']}; blocks as wide as their layers, colored by chip"
        parts += [section("Plan", note), *_outer(start), plan_picture(start), *_memory(start)]
    losses = Line("loss", [(s["step"], s["loss"]) for s in run.steps], COLORS[0])
    checks = Line("validation", [(v["step"], v["validation_loss"]) for v in run.validations], COLORS[1])
    marked = [e for e in run.events if e["kind"] in ("straggler", "error", "elastic") and "step" in e]
    marks = [(e["step"], e["text"]) for e in marked]
    marks += [(e["first_step"], e["text"]) for e in run.events if e["kind"] == "start" and e["first_step"] > 1]
    parts += [section("Loss", "nats per token by step; red lines: events"), curve([losses, checks], marks)]
    parts += [section("Step time", "seconds by step"), curve(_times(run), marks)]
    parts += [section("Throughput by chip", "tokens per chip and second, tokens shared out by work"), _chips(run)]
    if any(s.get("busy_seconds") for s in run.steps):
        parts += [section("Load of ranks", "median seconds of forward and backward"), _ranks(run, start)]
        parts += [section("Load over time", "share of the step in which ranks compute, by chip"), _load(run, start)]
    if changes := [e for e in run.events if e["kind"] == "elastic"]:
        parts += [section("Changes of ranks", "seconds until the run went on, by phase"), changes_picture(changes)]
    parts += expert_sections(run, start)
    parts += [section("One step on the time axis", "predicted beside measured"), _timeline(run, start)]
    parts += [section("Events", "stragglers, restarts, new plans, ends"), _events(run)]
    return page(title, "".join(parts), _STYLE + EXPERT_STYLE)


def _first_figures(facts: Mapping[str, Any]) -> str:
    """What is read first."""
    loss, ratio = facts["last_loss"], facts["measured_over_predicted"]
    rows = [
        ("steps", f"{facts['last_step']:,}"), ("loss", "not finite" if loss is None else f"{loss:.4f}"),
        ("per step", format_seconds(facts["step_seconds"])),
    ]  # fmt: skip
    rows += [("tokens per second", f"{facts['tokens_per_second']:,.0f}")] if facts["tokens_per_second"] else []
    rows += [("of the predicted step time", f"{ratio:.2f} x")] if ratio else []
    return figures(*rows)


def _cluster(start: Mapping[str, Any]) -> list[str]:
    """The nodes of a start event, where it names them."""
    if not start.get("nodes"):
        return []
    nodes: dict[str, list[tuple[int, str]]] = {}
    for rank, node in sorted(start["nodes"].items(), key=lambda item: int(item[0])):
        nodes.setdefault(node, []).append((int(rank), start["chips"].get(rank, "")))
    colors = chip_colors(list(start["chips"].values()))
    return [section("Cluster", "a square per rank"), cluster_blocks(nodes, set(map(int, start["nodes"])), colors)]


def _outer(start: Mapping[str, Any]) -> list[str]:
    """Where islands train apart: the loss is not that of any other plan."""
    return [f"<p>{html.escape(printable(line))}</p>" for line in start.get("outer", ())]


def _memory(start: Mapping[str, Any]) -> list[str]:
    """Predicted memory of each rank, where the start event has it."""
    memory_rows = (start.get("prediction") or {}).get("memory")
    if not memory_rows:
        return []
    memory = {int(rank): row["parts"] for rank, row in memory_rows.items()}
    limits = {int(rank): row["limit"] for rank, row in memory_rows.items()}
    chips = {int(rank): chip for rank, chip in start["chips"].items()}
    head = section("Memory of each rank", "predicted, against its limit, the dashed line")
    return [head, memory_bars(memory, limits, chips)]


def _load(run: RunFiles, start: Mapping[str, Any] | None) -> str:
    """Busy share by step, the mean over the ranks of each chip type."""
    chips = (start or {}).get("chips", {})
    ranks = start["ranks"] if start is not None else []
    rows = [s for s in run.steps if s.get("busy_seconds") and s["step_seconds"] > LEAST]
    kinds: dict[str, list[int]] = {}
    for position, rank in enumerate(ranks):
        kinds.setdefault(chips.get(str(rank), "chip"), []).append(position)
    kinds = kinds or {"ranks": list(range(len(rows[0]["busy_seconds"])))} if rows else {}
    colors = chip_colors(list(chips.values()) or list(kinds))
    lines = []
    for kind, positions in list(kinds.items())[:MOST_CHIPS]:
        points = []
        for row in rows:
            busy = [row["busy_seconds"][p] for p in positions if p < len(row["busy_seconds"])]
            points.append((row["step"], sum(busy) / len(busy) / row["step_seconds"] if busy else None))
        lines.append(Line(kind, points, colors.get(kind, COLORS[-1])))
    return curve(lines, [])


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], raw_last: bool = False) -> str:
    """Cells are escaped, but the last one of a row where ``raw_last``."""
    out = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    for row in rows:
        cells = [html.escape(c) for c in row]
        if raw_last:
            cells[-1] = row[-1]
        out += "<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
    return f"<div class='wide'><table>{out}</table></div>"


def _facts(facts: Mapping[str, Any]) -> str:
    predicted, ratio = facts["predicted_step_seconds"], facts["measured_over_predicted"]
    loss = ["not finite" if facts[k] is None else f"{facts[k]:.4f}" for k in ("first_loss", "last_loss")]
    emulated = facts["emulation"] or {}
    error = " (schedule + communication error)" if emulated.get("chips") == "clock" else ""
    rows = [
        ("steps", f"{facts['steps']}, the last is step {facts['last_step']}; {facts['skipped']} skipped"),
        ("loss", f"{loss[0]} at the first, {loss[1]} at the last"),
        ("step", f"{format_seconds(facts['step_seconds'])} (median without the first two)"),
        ("predicted", f"{format_seconds(predicted)}; measured is {ratio:.2f} of it{error}" if ratio else
         "no prediction"),
        ("throughput", f"{rate:,.0f} tokens/s (median)" if (rate := facts["tokens_per_second"]) else "not known"),
        ("starts", f"{facts['starts']}; {facts['repeated_steps']} steps were run again"),
        ("checkpoints", ", ".join(facts["checkpoints"]) or "none"),
        ("ended", facts["ended"] or "not yet, or not by itself"),
    ]
    if emulated:
        rows.insert(0, ("emulated", _emulated(emulated)))
    return _table(("", ""), rows)


def _emulated(facts: Mapping[str, Any]) -> str:
    """Which testbed it was, and how far its figures can be believed."""
    chips = facts.get("chips", "none")
    parts = [f"chips {chips} ({MEANING[chips]}), links {facts.get('links', 'none')}"]
    if "overrun" in facts and "late" in facts:
        parts.append(f"behind the clock by up to {facts['late']:.2%}, overrun {facts['overrun']:.2%}")
    if "spread" in facts:
        parts.append(f"compute of a step varied by {facts['spread']:.1%} (standard deviation)")
    if facts.get("invalid"):
        parts.append("INVALID: a rank could not keep up with its emulated chip")
    if facts.get("disturbed"):
        parts.append(f"DISTURBED: foreign load {facts.get('foreign_cores', 0.0):.2f} cores")
    return "; ".join(parts)


def _times(run: RunFiles) -> list[Line]:
    measured = [(s["step"], s["step_seconds"]) for s in run.steps]
    predicted = [(s["step"], s.get("predicted_step_seconds")) for s in run.steps]
    return [Line("measured", measured, COLORS[0]), Line("predicted", predicted, COLORS[1])]


def _chips(run: RunFiles) -> str:
    names = list(_throughput(run))[:MOST_CHIPS]
    lines = [
        Line(name, [(s["step"], (s.get("tgs_per_chip") or {}).get(name)) for s in run.steps], COLORS[i % len(COLORS)])
        for i, name in enumerate(names)
    ]
    return curve(lines, []) + _table(("chip", "median"), [(n, f"{v:,.1f}") for n, v in _throughput(run).items()])


def _ranks(run: RunFiles, start: Mapping[str, Any] | None) -> str:
    """A bar per rank of what its time went into; only steps of the last start count."""
    steps = [s for s in run.steps if s.get("busy_seconds") and (start is None or s["step"] >= start["first_step"])]
    if not steps:
        return "<p>no step since the last start</p>"
    keys = ("busy", "bubble", "communication")
    count = min(len(s.get(f"{key}_seconds") or ()) for s in steps for key in keys)
    ranks = start["ranks"] if start is not None else list(range(count))
    values = [[median(s[f"{k}_seconds"][i] for s in steps) for k in keys] for i in range(count)]
    rows = []
    for rank, row in zip(ranks, values):
        expected = ((start or {}).get("prediction") or {}).get("busy", {}).get(str(rank))
        chip = (start or {}).get("chips", {}).get(str(rank), "")
        forecast = f", predicted {format_seconds(expected)}" if expected is not None else ""
        tips = tuple(f"{k}: {format_seconds(v)}" for k, v in zip(keys, row, strict=True))
        parts = tuple((_BARS[k], v) for k, v in zip(keys, row, strict=True))
        rows.append(
            Bar(f"rank {rank} {chip}".strip(), f"busy {format_seconds(row[0])}{forecast}", parts, expected, tips)
        )
    return legend({**_BARS, "busy, predicted": "#dd3333"}) + bars(rows)


def _timeline(run: RunFiles, start: Mapping[str, Any] | None) -> str:
    charts: list[dict[str, Any]] = []
    seconds = 0.0
    prediction = (start or {}).get("prediction")
    if prediction:
        charts += [{**chart, "title": f"predicted: {chart['title']}"} for chart in prediction["charts"]]
        seconds = prediction["step_seconds"]
    measured = run.last("timeline")
    if measured is not None:
        charts.append(measured_chart(measured, start))
        seconds = max(seconds, measured["seconds"])
    if not charts:
        return "<p>this run wrote down neither a prediction nor a timeline</p>"
    return charts_html(charts, seconds)


def measured_chart(event: Mapping[str, Any], start: Mapping[str, Any] | None) -> dict[str, Any]:
    """Chart (``planner.page``) of a timeline event: a row per rank; what follows its last backward is ``rest``."""
    rows, labels, chips = [], [], (start or {}).get("chips", {})
    for rank, actions in event["ranks"].items():
        spans = [[KINDS.index(kind), begin, length, micro_batch] for kind, begin, length, micro_batch in actions]
        end = max((s[1] + s[2] for s in spans), default=0.0)
        if end < event["seconds"]:
            spans.append([KINDS.index("rest"), end, event["seconds"] - end, -1])
        rows.append(spans)
        labels.append(f"rank {rank}" + (f", {chips[rank]}" if rank in chips else ""))
    title = f"measured: step {event['step']}, {event['seconds']:.4g} s; by each rank's clock from its first action on"
    return {"title": title, "labels": labels, "rows": rows}


def _events(run: RunFiles) -> str:
    rows = [
        (time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(e["time"])), e["kind"], str(e.get("step", "")), e["text"])
        for e in run.events
        if e["kind"] != "timeline"
    ]
    return _table(("time (UTC)", "what", "step", ""), rows) if rows else "<p>none were written down</p>"
