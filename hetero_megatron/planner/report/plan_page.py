"""The page of a search: the plan, beside what else was possible."""

from __future__ import annotations

import html

from hetero_megatron.html.page import page, section
from hetero_megatron.html.pictures import Bar, bars
from hetero_megatron.planner.report.comparison import Summary
from hetero_megatron.planner.report.text import format_summary
from hetero_megatron.predictor.report.prediction_page import prediction_pictures

_BEST, _OTHER, _BOUND = "#34a06f", "#4c8bf5", "#8c8c8c"


def plan_page(summary: Summary) -> str:
    """Self-contained HTML: comparison bars, cluster, pipelines, memory, timeline, the report as text."""
    best = summary.result.best
    heading = f"{summary.model}: the best plan found"
    parts = [f"<h1>{html.escape(heading)}</h1>", prediction_pictures(best.prediction, best.cluster)]
    rows = comparison_rows(summary)
    if len(rows) > 1:
        parts.insert(1, section("Beside other plans", "predicted tokens per second under the same rates"))
        parts.insert(2, bars(rows))
    parts += [section("The report"), f"<pre>{html.escape(format_summary(summary))}</pre>"]
    return page(heading, "".join(parts))


def comparison_rows(summary: Summary) -> list[Bar]:
    """This plan, the best uniform one, each chip type alone, and the bound, in tokens per second."""
    best = summary.result.best
    rate = best.prediction.tokens_per_second
    rows = [Bar("this plan", f"{rate:,.0f}", ((_BEST, rate),))]
    others = [("best uniform plan", summary.uniform)] if summary.uniform is not None else []
    others += [(f"{baseline.name} alone", baseline) for baseline in summary.alone]
    for name, baseline in others:
        found = baseline.tokens_per_second
        text = f"{found:,.0f} ({found / rate:.0%})" if found else f"none: {baseline.problem}"
        rows.append(Bar(name, text, ((_OTHER, found),)))
    if summary.bound is not None and summary.bound.seconds > 0:
        most = rate * best.step_seconds / summary.bound.seconds
        rows.append(Bar("bound", f"no plan above {most:,.0f}", ((_BOUND, most),)))
    return rows
