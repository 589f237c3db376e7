"""A page about a run, from what is in its --save directory: self-contained HTML, no network, no torch."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.planner.page import KINDS, LEGEND, charts_html, page
from hetero_megatron.planner.report import format_seconds
from hetero_megatron.testbed.report import MEANING
from hetero_megatron.training import metrics, record
from hetero_megatron.training.run_pictures import COLORS, Line, curve, plan_picture

EVENT_KINDS = {"start", "timeline", "end", "straggler", "error", "launcher"}
_STYLE = """
table { border-collapse: collapse } td, th { padding: 2px 12px; border-bottom: 1px solid #ddd; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } svg { max-width: 100% } h2 { margin-top: 2em }
.bar { display: inline-block; height: 12px; vertical-align: middle }
"""
_BARS = {"busy": "#4c8bf5", "bubble": "#d8d8d8", "communication": "#e0a020"}


@dataclass(frozen=True)
class RunFiles:
    """What a run left: one record per step (the last where a step was run twice), evaluations, events in order.

    ``emulation``: what the last start of the job emulated, and how far it can be believed; flags of earlier ones stay.
    """

    directory: Path
    steps: Sequence[Mapping[str, Any]]
    validations: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    repeated: int = 0  # steps that were run more than once
    checkpoints: Sequence[str] = field(default_factory=tuple)
    emulation: Mapping[str, Any] = field(default_factory=dict)

    def last(self, kind: str) -> Mapping[str, Any] | None:
        return next((e for e in reversed(self.events) if e["kind"] == kind), None)


def read_run(directory: str) -> RunFiles:
    """Read and check metrics.jsonl and events.jsonl.

    Raises:
        UserError: no such directory, no metrics in it, or a line that is not what a run writes (file:line).
    """
    path = Path(directory)
    if not path.is_dir():
        raise UserError("no such directory", field="RUN_DIR", value=directory, accepted="the --save directory of a run")
    if not (path / metrics.FILE).is_file():
        raise UserError(
            f"holds no {metrics.FILE}", field="RUN_DIR", value=directory, accepted="the --save directory of a run"
        )
    steps: dict[int, Mapping[str, Any]] = {}
    validations, repeated, emulation = [], 0, dict[str, Any]()
    for where, line in _lines(path / metrics.FILE):
        step = line.get("step")
        if not isinstance(step, int):
            raise UserError("is not a line of metrics", field="step", value=step, where=where)
        if "validation_loss" in line:
            validations.append(line)
            continue
        if isinstance(new := line.get("emulation"), dict):
            emulation |= new | {flag: True for flag in ("invalid", "disturbed") if emulation.get(flag)}
            continue
        if not isinstance(line.get("step_seconds"), int | float) or "loss" not in line:
            raise UserError("is not a line of metrics: loss or step_seconds is missing", where=where)
        repeated += step in steps
        steps[step] = line
    if not steps:
        raise UserError("holds no step yet", field="RUN_DIR", value=directory, where=str(path / metrics.FILE))
    events = []
    for where, line in _lines(path / record.FILE) if (path / record.FILE).is_file() else ():
        if line.get("kind") not in EVENT_KINDS or not isinstance(line.get("time"), int | float):
            raise UserError("is not an event", field="kind", value=line.get("kind"), where=where)
        events.append(line)
    saved = sorted(p.name for p in path.glob("iter_*") if p.is_dir() and not p.name.endswith((".incomplete", ".old")))
    return RunFiles(path, [steps[s] for s in sorted(steps)], validations, events, repeated, saved, emulation)


def _lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file:line, object) of a file of JSON lines; the last may be cut off, as when a rank died while writing it."""
    out = []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(lines, 1):
        if not text:
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(lines):
                continue
            raise UserError(f"is not JSON: {error.msg}", where=f"{path}:{number}") from None
        if not isinstance(value, dict):
            raise UserError("is not a JSON object", where=f"{path}:{number}")
        out.append((f"{path}:{number}", value))
    return out


def summary(run: RunFiles) -> dict[str, Any]:
    """The figures of the page, as JSON data."""
    first, last = run.steps[0], run.steps[-1]
    measured = [s["step_seconds"] for s in run.steps[2:]] or [s["step_seconds"] for s in run.steps]
    predicted = last.get("predicted_step_seconds")
    start = run.last("start")
    return {
        "run": str(run.directory),
        "plan": start["fingerprint"] if start else None,
        "model": start["model"]["name"] if start else None,
        "steps": len(run.steps),
        "last_step": last["step"],
        "first_loss": first["loss"],
        "last_loss": last["loss"],
        "step_seconds": median(measured),
        "predicted_step_seconds": predicted,
        "measured_over_predicted": median(measured) / predicted if predicted else None,
        "tokens_per_second": median(s["tokens"] / s["step_seconds"] for s in run.steps if s["step_seconds"] > 0),
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
    title = f"{facts['model'] or 'run'} in {run.directory.name}"
    parts = [f"<h1>{html.escape(title)}</h1>", _facts(facts)]
    if start is not None:
        parts += [_head("Plan", f"fingerprint {start['fingerprint']}; areas are layers x ranks"), plan_picture(start)]
    losses = Line("loss", [(s["step"], s["loss"]) for s in run.steps], COLORS[0])
    checks = Line("validation", [(v["step"], v["validation_loss"]) for v in run.validations], COLORS[1])
    marks = [(e["step"], e["text"]) for e in run.events if e["kind"] in ("straggler", "error") and "step" in e]
    marks += [(e["first_step"], e["text"]) for e in run.events if e["kind"] == "start" and e["first_step"] > 1]
    parts += [_head("Loss", "nats per token by step; red lines: events"), curve([losses, checks], marks)]
    parts += [_head("Step time", "seconds by step"), curve(_times(run), marks)]
    parts += [_head("Throughput by chip", "tokens per chip and second, tokens shared out by work"), _chips(run)]
    if any(s.get("busy_seconds") for s in run.steps):
        parts += [_head("Ranks", "median seconds of forward and backward"), _ranks(run, start)]
    parts += [_head("One step on the time axis", "predicted beside measured"), _timeline(run, start)]
    parts += [_head("Events", "stragglers, restarts, new plans, ends"), _events(run)]
    return page(title, "".join(parts), _STYLE)


def _head(title: str, note: str) -> str:
    return f"<h2>{html.escape(title)}</h2><p>{html.escape(note)}</p>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], raw_last: bool = False) -> str:
    """Cells are escaped, but the last one of a row where ``raw_last``."""
    out = "".join(f"<th>{html.escape(h)}</th>" for h in heads)
    for row in rows:
        cells = [html.escape(c) for c in row]
        if raw_last:
            cells[-1] = row[-1]
        out += "<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>"
    return f"<table>{out}</table>"


def _facts(facts: Mapping[str, Any]) -> str:
    predicted, ratio = facts["predicted_step_seconds"], facts["measured_over_predicted"]
    loss = ["not finite" if facts[k] is None else f"{facts[k]:.4f}" for k in ("first_loss", "last_loss")]
    emulated = facts["emulation"] or {}
    error = " (schedule + communication error)" if emulated.get("chips") == "clock" else ""
    rows = [
        ("steps", f"{facts['steps']}, the last is step {facts['last_step']}; {facts['skipped']} skipped"),
        ("loss", f"{loss[0]} at the first, {loss[1]} at the last"),
        ("step", f"{format_seconds(facts['step_seconds'])} (median without the first two)"),
        ("predicted", f"{format_seconds(predicted)}; measured is {ratio:.2f} of it{error}" if predicted else
         "no prediction"),
        ("throughput", f"{facts['tokens_per_second']:,.0f} tokens/s (median)"),
        ("starts", f"{facts['starts']}; {facts['repeated_steps']} steps were run again"),
        ("checkpoints", ", ".join(facts["checkpoints"]) or "none"),
        ("ended", facts["ended"] or "not yet, or not by itself"),
    ]
    if emulated:
        rows.insert(0, ("emulated", _emulated(emulated)))
    return _table(("", ""), rows)


def _emulated(facts: Mapping[str, Any]) -> str:
    """Which testbed it was, and how far its figures can be believed."""
    parts = [f"chips {facts['chips']} ({MEANING[facts['chips']]}), links {facts['links']}"]
    if "overrun" in facts:
        parts.append(f"behind the clock by up to {facts['late']:.2%}, overrun {facts['overrun']:.2%}")
    if facts.get("invalid"):
        parts.append("INVALID: a rank could not keep up with its emulated chip")
    if facts.get("disturbed"):
        parts.append(f"DISTURBED: foreign load {facts['foreign_cores']:.2f} cores")
    return "; ".join(parts)


def _times(run: RunFiles) -> list[Line]:
    measured = [(s["step"], s["step_seconds"]) for s in run.steps]
    known = [(s["step"], s["predicted_step_seconds"]) for s in run.steps]
    return [Line("measured", measured, COLORS[0]), Line("predicted", known, COLORS[1])]


def _chips(run: RunFiles) -> str:
    names = list(_throughput(run))
    lines = [
        Line(name, [(s["step"], (s.get("tgs_per_chip") or {}).get(name)) for s in run.steps], COLORS[i % len(COLORS)])
        for i, name in enumerate(names)
    ]
    return curve(lines, []) + _table(("chip", "median"), [(n, f"{v:,.1f}") for n, v in _throughput(run).items()])


def _ranks(run: RunFiles, start: Mapping[str, Any] | None) -> str:
    """A row per rank with a bar of what its time went into; only steps of the last start count."""
    steps = [s for s in run.steps if s.get("busy_seconds") and (start is None or s["step"] >= start["first_step"])]
    if not steps:
        return "<p>no step since the last start</p>"
    count = min(len(s["busy_seconds"]) for s in steps)
    ranks = start["ranks"] if start is not None else list(range(count))
    keys = ("busy", "bubble", "communication")
    values = [[median(s[f"{k}_seconds"][i] for s in steps) for k in keys] for i in range(count)]
    scale = 300 / (max(map(sum, values)) or 1.0)
    rows = []
    for rank, row in zip(ranks, values):
        bar = "".join(
            f"<span class='bar' style='width:{v * scale:.0f}px;background:{_BARS[k]}' title='{k}'></span>"
            for k, v in zip(keys, row, strict=True)
        )
        expected = ((start or {}).get("prediction") or {}).get("busy", {}).get(str(rank))
        chip = (start or {}).get("chips", {}).get(str(rank), "")
        told = format_seconds(expected) if expected is not None else ""
        rows.append((str(rank), chip, *map(format_seconds, row), told, bar))
    legend = "".join(f"<span><i style='background:{c}'></i>{name}</span>" for name, c in _BARS.items())
    heads = ("rank", "chip", *keys, "busy, predicted", "")
    return f"<p class='legend'>{legend}</p>" + _table(heads, rows, raw_last=True)


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
    return charts_html(charts, seconds, legend={**LEGEND, "rest of the step": "#b9b9b9"})


def measured_chart(event: Mapping[str, Any], start: Mapping[str, Any] | None) -> dict[str, Any]:
    """Chart (``planner.page``) of a timeline event: a row per rank; what follows its last backward is ``rest``."""
    rows, labels, chips = [], [], (start or {}).get("chips", {})
    for rank, actions in event["ranks"].items():
        spans = [[KINDS.index(kind), at, length, micro_batch] for kind, at, length, micro_batch in actions]
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
