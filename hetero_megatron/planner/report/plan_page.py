"""The page of a search: the plan, beside what else was possible."""

from __future__ import annotations

import html

from hetero_megatron.cluster import format_bytes
from hetero_megatron.html.page import page, section
from hetero_megatron.html.pictures import Bar, asked_list, bars
from hetero_megatron.planner.report.comparison import Summary
from hetero_megatron.planner.report.text import format_summary
from hetero_megatron.predictor.report.prediction_page import prediction_pictures

_BEST, _OTHER, _BOUND = "#34a06f", "#4c8bf5", "#8c8c8c"


def plan_page(summary: Summary) -> str:
    """Self-contained HTML: comparison bars, cluster, pipelines, memory, timeline, the report as text."""
    best = summary.result.best
    heading = f"{summary.model}: the best plan found"
    parts = [f"<h1>{html.escape(heading)}</h1>"]
    if summary.asked is not None:
        parts.append(asked_list(summary.asked.rows()))
    rows = comparison_rows(summary)
    if len(rows) > 1:
        parts.append(section("Beside other plans", "predicted tokens per second under the same rates"))
        parts.append(bars(rows))
    parts.append(prediction_pictures(best.prediction, best.cluster, summary.result.scorer.costs.model))
    parts += [section("The report"), f"<pre>{html.escape(format_summary(summary))}</pre>"]
    return page(heading, "".join(parts))


def comparison_rows(summary: Summary) -> list[Bar]:
    """This plan, the best uniform one, each chip type alone, and the bound, in tokens per second."""
    best = summary.result.best
    rate = best.prediction.tokens_per_second
    rows = [Bar("this plan", f"{rate:,.0f}", ((_BEST, rate),))]
    baselines = [("best uniform plan", summary.uniform)] if summary.uniform is not None else []
    baselines += [(f"{baseline.name} alone", baseline) for baseline in summary.alone]
    for name, baseline in baselines:
        tokens_per_second = baseline.tokens_per_second
        text = (
            f"{tokens_per_second:,.0f} ({tokens_per_second / rate:.0%})"
            if tokens_per_second
            else f"none: {baseline.problem}"
        )
        rows.append(Bar(name, text, ((_OTHER, tokens_per_second),)))
    if summary.bound is not None and summary.bound.seconds > 0:
        bound_tokens = rate * best.step_seconds / summary.bound.seconds
        reached = summary.bound.reached(best.step_seconds)
        rows.append(Bar("bound", f"{bound_tokens:,.0f}: this plan reaches {reached:.1%}", ((_BOUND, bound_tokens),)))
    if summary.roomier is not None and summary.roomier.text:
        tokens = rate * best.step_seconds / summary.roomier.step_seconds
        text = f"{tokens:,.0f} ({tokens / rate:.0%}), {format_bytes(summary.roomier.free)} free on every rank"
        rows.insert(1, Bar("a roomier plan", text, ((_OTHER, tokens),)))
    return rows
