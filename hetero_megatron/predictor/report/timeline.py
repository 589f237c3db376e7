"""A predicted step on a time axis: as text, as charts of a page, and as a trace for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hetero_megatron.html.page import KINDS, kind_of
from hetero_megatron.plans.dump import format_layers
from hetero_megatron.predictor.simulate.grad_sync import BucketSpan
from hetero_megatron.predictor.simulate.step import Prediction
from hetero_megatron.utils.text import rank_ranges, word

MARKS = {"F": "F", "B": "b", "B_INPUT": "b", "W": "w", "gradients": "g", "optimizer": "u", "parameters": "p"}
COLORS = {  # reserved names of the trace format: of the first chunk of layers, and of others
    "F": ("thread_state_running", "rail_response"), "B": ("good", "rail_load"),
    "B_INPUT": ("thread_state_runnable", "rail_animation"), "W": ("bad", "rail_idle"),
}  # fmt: skip


def groups(prediction: Prediction) -> list[tuple[int, ...]]:
    """Indices of pipelines that run alike, which are shown once."""
    alike: dict[int, list[int]] = {}
    for p, timeline in enumerate(prediction.timelines):
        alike.setdefault(id(timeline), []).append(p)
    return [tuple(indices) for indices in alike.values()]


def _synchronisation(prediction: Prediction) -> Iterator[tuple[str, float, float]]:
    """(part, start, seconds) of what follows the pipelines, the same for all stages."""
    start = prediction.computed_seconds
    for part in ("gradients", "optimizer", "parameters"):
        yield part, start, prediction.parts[part]
        start += prediction.parts[part]


def stage_label(prediction: Prediction, pipeline: int, stage: int) -> str:
    """``stage 1, ranks 4-7, A100-80-SXM, layers 8-15``."""
    chosen = prediction.plan.pipelines[pipeline].stages[stage]
    chips = "+".join(dict.fromkeys(prediction.chips[r] for r in chosen.ranks))
    layers = format_layers(chosen)
    return f"stage {stage}, ranks {rank_ranges(chosen.ranks)}, {chips}, layers {layers}"


def group_title(prediction: Prediction, group: Sequence[int]) -> str:
    seconds = prediction.timelines[group[0]].step_seconds
    return f"{word(len(group), 'pipeline')} {rank_ranges(group)}: {seconds:.4g} s of {prediction.step_seconds:.4g} s"


def prediction_charts(prediction: Prediction) -> list[dict[str, Any]]:
    """A chart per distinct pipeline, as :func:`hetero_megatron.html.page.charts_html` draws them."""
    synchronisation = [
        [KINDS.index(part), _round(start), _round(seconds), -1] for part, start, seconds in _synchronisation(prediction)
    ]
    charts = []
    for group in groups(prediction):
        rows = [
            [
                *([KINDS.index(kind_of(a)), _round(start), _round(end - start), a.micro_batch]
                  for a, start, end in stage if a.kind in KINDS), *synchronisation,
            ]
            for stage in prediction.timelines[group[0]].stages
        ]  # fmt: skip
        labels = [stage_label(prediction, group[0], s) for s in range(len(rows))]
        charts.append({"title": group_title(prediction, group), "labels": labels, "rows": rows})
    return charts


def _round(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def format_timeline(prediction: Prediction, width: int = 100) -> str:
    """One row per stage; each column shows the mark that takes most of its time: F forward, b backward, w weight
    gradients, g gradient reduction, u optimizer, p parameter all-gather, . waiting."""
    lines = ["timeline (F forward, b backward, w weight gradients, g gradients, u optimizer, p parameters, . waiting)"]
    scale = width / prediction.step_seconds if prediction.step_seconds else 0.0
    for group in groups(prediction):
        lines.append(group_title(prediction, group))
        stages = prediction.plan.pipelines[group[0]].stages
        for s, (row, stage) in enumerate(zip(prediction.timelines[group[0]].stages, stages, strict=True)):
            spans = [(MARKS[a.kind], start, end) for a, start, end in row if a.kind in MARKS]
            last = max((end for _, _, end in spans), default=0.0)
            spans += [
                (MARKS[part], max(start, last), start + seconds)
                for part, start, seconds in _synchronisation(prediction)
            ]
            lines.append(f"{_short(s, stage.ranks):<16}|{_columns(spans, width, scale)}|")
    return "\n".join(lines)


def _short(stage: int, ranks: Sequence[int]) -> str:
    text = f"{stage}: {rank_ranges(ranks)}"
    return text if len(text) <= 15 else text[:14] + "…"


def _columns(spans: Sequence[tuple[str, float, float]], width: int, scale: float) -> str:
    """Per column, the mark with most of its time; ``.`` where less than half of it is filled."""
    time: list[dict[str, float]] = [{} for _ in range(width)]
    for mark, start, end in spans:
        a, b = start * scale, end * scale
        for column in range(int(a), min(int(b) + 1, width)):
            part = min(b, column + 1) - max(a, column)
            if part > 0:
                time[column][mark] = time[column].get(mark, 0.0) + part
    return "".join(max(t, key=t.__getitem__) if sum(t.values()) >= 0.5 else "." for t in time)


def perfetto_trace(prediction: Prediction) -> Mapping[str, Any]:
    """Trace events (JSON array format): one process per distinct pipeline, one thread per stage and per link direction;
    the buckets of gradients and parameters are further processes."""
    events: list[dict[str, Any]] = []
    for number, group in enumerate(groups(prediction)):
        events.append(_name("process", number, 0, group_title(prediction, group)))
        for s, row in enumerate(prediction.timelines[group[0]].stages):
            events.append(_name("thread", number, 3 * s, stage_label(prediction, group[0], s)))
            events.append(_name("thread", number, 3 * s + 1, f"stage {s} to stage {s + 1}"))
            events.append(_name("thread", number, 3 * s + 2, f"stage {s} to stage {s - 1}"))
            for action, start, end in row:
                if action.kind.startswith("RECV"):
                    continue  # a receive is waiting: the gap shows it
                line = 3 * s + {"SEND_F": 1, "SEND_B": 2}.get(action.kind, 0)
                event = _event(str(action), action.kind, number, line, start, end)
                if action.kind in COLORS:
                    event["cname"] = COLORS[action.kind][action.chunk > 0]
                events.append(event)
    events += _buckets("gradients", prediction.reduces, len(prediction.timelines))
    events += _buckets("parameters", prediction.all_gathers, len(prediction.timelines) + 1)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _buckets(title: str, spans: Sequence[BucketSpan], process: int) -> Iterator[dict[str, Any]]:
    if spans:
        yield _name("process", process, 0, f"{title} on their way")
    free: list[float] = []  # end of the last bucket on each line, so that buckets under way together do not overlap
    for span in sorted(spans, key=lambda x: x.start):
        line = next((i for i, end in enumerate(free) if end <= span.start), len(free))
        free[line : line + 1] = [span.end]
        yield _event(f"bucket {span.bucket}", title, process, line, span.start, span.end)


def _event(name: str, kind: str, process: int, thread: int, start: float, end: float) -> dict[str, Any]:
    times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": thread, **times}


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": f"{what}_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
