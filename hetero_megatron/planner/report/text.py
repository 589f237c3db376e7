"""The report of a search as text and as JSON data, and the plan file."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hetero_megatron.cluster import format_bytes
from hetero_megatron.planner.report.comparison import Summary, choice_text
from hetero_megatron.planner.search.incumbent import SimulatedPlan
from hetero_megatron.planner.search.schedule_times import least_seconds
from hetero_megatron.planner.whatif.replan import NodeLoss
from hetero_megatron.plans import dump_yaml, to_dict
from hetero_megatron.plans.dump import degrees, format_layers
from hetero_megatron.plans.made_for import MadeFor
from hetero_megatron.predictor.report.prediction import (
    bubble_share,
    format_dtypes,
    format_question,
    format_seconds,
    format_step_seconds,
    holdings,
    split_notice,
)
from hetero_megatron.spec import ModelSpec
from hetero_megatron.utils.text import plural, rank_ranges, word

PLAIN = ("1f1b", "gpipe")  # schedules under which plans are searched first
SHOWN = 8  # names of idle nodes in the report


def format_summary(summary: Summary) -> str:
    """The report as text."""
    return "\n\n".join(text for text in (format_plan(summary), format_comparisons(summary)) if text)


def format_plan(summary: Summary) -> str:
    """The part of the report that is known when the search ends: the plan, its memory, idle chips."""
    result, best = summary.result, summary.result.best
    prediction = best.prediction
    chips = [g.chip for g in result.pool.groups]
    share = (
        f", {prediction.mfu:.1%} of the peak of the chips used (aggregate MFU)" if prediction.mfu is not None else ""
    )
    lines = [] if summary.asked is None else [format_question(summary.asked), ""]
    lines += [
        f"best plan: {format_step_seconds(prediction)} per step, {prediction.tokens_per_second:,.0f} tokens/s{share}",
        f"  {choice_text(best, chips)}",
        f"  found in {result.seconds:.2f} s, {plural(result.evaluated, 'plan')} evaluated exactly"
        + ("" if result.complete else "; cut short, the best so far"),
    ]
    if result.work_ended:
        lines.append("  better plans were looked for until the effort was used up: --schedule-effort 4 looks further")
    lines += format_dtypes(prediction)
    lines += _schedule_lines(summary)
    lines += _cost_lines(summary)
    lines.append(f"  context groups: {result.context}")
    if result.divided:
        lines.append(f"  divided weights: {result.divided}")
    lines += [f"  activations in host memory: {line}" for line in summary.activations]
    if result.experts:
        gain = f"; {summary.experts}" if summary.experts is not None else ""
        lines.append(f"  experts: {result.experts}{gain}")
    if summary.left_out:
        names = ", ".join(summary.left_out[:SHOWN]) + (", …" if len(summary.left_out) > SHOWN else "")
        nodes = plural(len(summary.left_out), "node")
        lines.append(f"  idle: {nodes} ({names}), not part of the cluster that the plan's ranks refer to")
    idle = [(summary.idle, f"; {_why_idle(summary)}")] if summary.idle else []
    idle += [(x, f": {chip} does not compute in {summary.dtype}") for chip, x in summary.unusable.items()]
    for ranks, why in idle:
        numbers = f"{word(len(ranks), 'rank')} {rank_ranges(ranks)}"
        lines.append(f"  idle: {plural(len(ranks), 'chip')} ({numbers}){why}")
    if result.rejected:
        words = {"memory": "over memory after exact evaluation", "packing": "TP groups that do not pack into nodes"}
        lines.append("  dropped: " + ", ".join(f"{n} {words.get(k, k)}" for k, n in result.rejected.items()))
    lines += ["", *_memory_lines(best, result.scorer.costs.model)]
    if prediction.assumed:
        lines += [
            "",
            f"rates of {prediction.describe_assumed()} are from data sheets, not measured here: run calibrate",
        ]
    lines += ["", *split_notice(prediction)] if prediction.unsplit else []
    return "\n".join(lines)


def format_comparisons(summary: Summary) -> str:
    """The part of the report computed after the search: bound, other plans, plans for node losses."""
    best = summary.result.best
    parts = [_bound_lines(summary), _comparison_lines(summary), _roomier_lines(summary)]
    if summary.variants:
        parts.append(["why not"])
        for v in summary.variants:
            slower = f"+{v.step_seconds / best.step_seconds - 1:.1%}" if v.step_seconds else "—"
            parts[-1].append(f"  {slower:>8}  {v.text}: {v.why}")
    if summary.losses:
        parts.append(["plans after the loss of one node, from the search's warm state"])
        parts[-1] += [f"  without {loss.node:<20}{_loss_text(loss, best.step_seconds)}" for loss in summary.losses]
    if summary.rejected:
        parts.append(["uniform plans (Megatron) that do not fit, with their approximate step times"])
        for r in summary.rejected:
            prefix = f"{r.of} alone: " if r.of else ""
            parts[-1] += [f"  {format_seconds(r.step_seconds):>8}  {prefix}{r.text}", f"{'':>12}{r}"]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _bound_lines(summary: Summary) -> list[str]:
    bound, best = summary.bound, summary.result.best
    if bound is None:
        return []
    tokens = best.prediction.tokens_per_second * best.step_seconds / bound.seconds if bound.seconds else 0.0
    return [
        f"no plan of this space does more than {tokens:,.0f} tokens/s under these rates: this one reaches "
        f"{bound.reached(best.step_seconds):.1%} of the bound (by {bound.method})",
        *textwrap.wrap(
            "it covers: " + "; ".join(summary.assumptions), 118, initial_indent=" " * 2, subsequent_indent=" " * 4
        ),
    ]


def _roomier_lines(summary: Summary) -> list[str]:
    """Another plan beside one that nearly fills a chip."""
    roomier, best = summary.roomier, summary.result.best
    if roomier is None:
        return []
    margin = f"plan --memory-margin {roomier.margin:.2f}"
    if not roomier.text:
        return [f"tight: the best plan leaves {format_bytes(roomier.before)} on one rank; {margin} finds more room"]
    slower = roomier.step_seconds / best.step_seconds - 1
    return [
        f"roomier: with at least {format_bytes(roomier.free)} free on each rank, where the best plan leaves "
        f"{format_bytes(roomier.before)} on one, a step takes {format_seconds(roomier.step_seconds)} ({slower:+.1%})",
        f"  {roomier.text}; {margin} finds such plans",
    ]


def _loss_text(loss: NodeLoss, before: float) -> str:
    alike = f" (or any of {loss.alike} alike)" if loss.alike > 1 else ""
    if loss.plan is None:
        return f"no plan{alike}: {loss.problem}"
    slower = f"{loss.step_seconds / before:.2f} x as long"
    searched = "" if loss.warm else ", by a new search: no pipeline of the first one fits"
    return f"{format_seconds(loss.step_seconds)} per step, {slower}, found in {loss.seconds:.3f} s{searched}{alike}"


def _schedule_lines(summary: Summary) -> list[str]:
    """Why the schedule is not the one under which the plan was searched; nothing where it is."""
    best = summary.result.best
    plain = [x for x in summary.result.others if x.template == best.template and x.plan.schedule in PLAIN]
    if best.plan.schedule in PLAIN or not plain:
        return []
    flat, ranks = plain[0], best.plan.ranks
    bubbles, peaks = zip(*((bubble_share(x.prediction), max(x.prediction.memory[r].total for r in ranks))
                          for x in (best, flat)))  # fmt: skip
    ratio = flat.step_seconds / best.step_seconds
    chunks = max(pipeline.chunks for pipeline in best.plan.pipelines)
    over = f" over {chunks} chunks of layers per stage" if chunks > 1 else ""
    gap = schedule_gap(summary)
    gap_line = [] if gap is None else [f"    in this memory, no schedule of these stages is more than {gap:.1%} faster"]
    return [
        f"  schedule: {best.plan.schedule}{over}, {ratio:.3f} x as fast as the same plan under {flat.plan.schedule}: "
        f"bubble {bubbles[0]:.1%} instead of {bubbles[1]:.1%}, at most {format_bytes(peaks[0])} on a rank instead of "
        f"{format_bytes(peaks[1])}",
        *gap_line,
    ]


def schedule_gap(summary: Summary) -> float | None:
    """By what part the pipelines of the best plan are above what no schedule of their stages can beat; None where that
    is not known."""
    best, costs = summary.result.best, summary.result.scorer.costs
    if costs.cluster is not best.cluster:  # the plan is for a part of it
        return None
    bound = least_seconds(best.plan, costs, best.prediction)
    return max(0.0, max(best.prediction.pipeline_seconds) / bound - 1) if bound else None


def _cost_lines(summary: Summary) -> list[str]:
    costs, lines = _costs(summary), []
    if costs:
        per = costs["tokens_per_cost"]
        lines.append(f"  cost: {costs['cost_per_hour']:,.4g} per hour, {per:,.4g} tokens per currency unit")
    if "deadline" in costs:
        due = costs["deadline"]
        lines.append(
            f"  deadline: {due['tokens']:.4g} tokens take {due['needed_hours']:.4g} h and cost {due['cost']:,.4g}; "
            f"{due['slack_hours']:.4g} of {due['hours']:.4g} h are left"
        )
    return lines + ([f"  objective: {summary.result.parts}"] if summary.result.parts else [])


def _costs(summary: Summary) -> dict[str, Any]:
    """Cost per hour of the used chips, tokens per currency unit, and slack to the deadline."""
    best, due = summary.result.best, summary.deadline
    cost = best.cost_per_hour
    if cost is None:
        return {}
    data: dict[str, Any] = {"cost_per_hour": cost, "tokens_per_cost": best.tokens_per_cost}
    if due is not None:
        hours = due.tokens / best.prediction.tokens_per_second / 3600
        data["deadline"] = {
            "tokens": due.tokens, "hours": due.hours, "needed_hours": hours, "slack_hours": due.hours - hours,
            "cost": hours * cost,
        }  # fmt: skip
    return data


def _why_idle(summary: Summary) -> str:
    if not summary.result.complete:
        return "the search was cut short before a faster plan used them"
    return "no plan that was tried is faster with them"


def _memory_lines(best: SimulatedPlan, model: ModelSpec) -> list[str]:
    """A table of the stages, and below it who holds which tokens and heads where a stage has several ranks."""
    rows = [("stage", "chip", "ranks", "layers", "divided", "recompute", "memory", "of")]
    holding_lines, counts = [], dict[object, int]()
    for p, pipeline in enumerate(best.plan.pipelines):
        stages = tuple(
            (s.layers, s.chip, s.recompute, s.activations, s.optimizer,
             tuple((u.sequences, u.tokens, u.tp_split) for u in s.units)) for s in pipeline.stages
        )
        key = pipeline.micro_batch_size, min(pipeline.num_micro_batches, len(stages)), stages
        counts[key] = counts.get(key, 0) + 1
        if counts[key] > 1:
            continue
        for s, stage in enumerate(pipeline.stages):
            fullest = max(stage.ranks, key=lambda r: best.prediction.memory[r].total)
            rows.append((
                f"{p}.{s}", stage.chip or "", rank_ranges(stage.ranks), format_layers(stage), degrees(stage),
                str(stage.recompute), format_bytes(best.prediction.memory[fullest].total),
                format_bytes(best.prediction.limits[fullest]),
            ))  # fmt: skip
            holding_lines += [f"  {p}.{s}  {line}" for line in holdings(best.plan, stage, model)]
    repeated = sum(n - 1 for n in counts.values())
    lines = _table(rows, right=2) + ([f"and {repeated} more pipelines like these"] if repeated else [])
    return lines + (["", "who holds what", *holding_lines] if holding_lines else [])


def _table(rows: Sequence[Sequence[str]], right: int) -> list[str]:
    """Columns as wide as they need to be; the last ``right`` ones end at the same place."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    left_columns = len(widths) - right
    ends = ["<" if i < left_columns else ">" for i in range(len(widths))]
    return ["  ".join(f"{cell:{end}{width}}" for cell, end, width in zip(row, ends, widths)).rstrip() for row in rows]


def _comparison_lines(summary: Summary) -> list[str]:
    tokens = summary.result.best.prediction.tokens_per_second
    lines = ["compared with"]
    for baseline in ([summary.uniform] if summary.uniform else []) + summary.alone:
        uniform = baseline.name == "uniform"
        name = "best uniform plan (Megatron)" if uniform else f"{baseline.chips} x {baseline.name} alone"
        if baseline.problem:
            lines.append(f"  {name:<34} none: {baseline.problem}")
        else:
            ratio = tokens / baseline.tokens_per_second
            lines.append(f"  {name:<34}{baseline.tokens_per_second:>14,.0f} tokens/s  {ratio:>6.2f}x  {baseline.text}")
    if summary.skipped:
        lines.append(f"  {'each chip type alone':<34} {summary.skipped}")
    if summary.alone:
        total = summary.hethub_tokens_per_second
        if total is None:
            lines.append("  no chip type can train this model alone: HETHUB's bound and H2's ratio are undefined")
        else:
            missing = [b.name for b in summary.alone if b.problem]
            note = f" (without {', '.join(missing)}, which cannot train it alone)" if missing else ""
            name = "sum of the types alone (HETHUB)"
            share = f"{tokens / total:>6.1%} of it = hetero speedup ratio (H2){note}"
            lines.append(f"  {name:<34}{total:>14,.0f} tokens/s  {share}")
    return lines if len(lines) > 1 else []


def summary_json(summary: Summary) -> Mapping[str, Any]:
    """The report as one JSON object."""
    result, best = summary.result, summary.result.best
    prediction = best.prediction
    bound = None
    if summary.bound is not None:
        bound = {
            "step_seconds": summary.bound.seconds, "method": summary.bound.method,
            "assumptions": list(summary.assumptions),
            "gap": max(0.0, summary.bound.gap(best.step_seconds)) if summary.bound.seconds else None,
            "reached": summary.bound.reached(best.step_seconds) if summary.bound.seconds else None,
        }  # fmt: skip
    return {
        "model": summary.model,
        "asked": None if summary.asked is None else summary.asked.as_json(),
        "plan": to_dict(best.plan),
        "fingerprint": best.plan.fingerprint(),
        "step_seconds": best.step_seconds,
        "seconds_range": None if prediction.seconds_range is None else list(prediction.seconds_range),
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "parts": dict(prediction.parts),
        "memory": {str(r): m.total for r, m in prediction.memory.items()},
        "memory_limits": {str(r): n for r, n in prediction.limits.items()},
        "idle_ranks": sorted({*summary.idle, *(r for ranks in summary.unusable.values() for r in ranks)}),
        "idle_nodes": list(summary.left_out),
        **_costs(summary),
        "parts_searched": result.parts,
        "bound": bound,
        "schedule_gap": schedule_gap(summary),
        "hethub_bound_tokens_per_second": summary.hethub_tokens_per_second,
        "hetero_speedup_ratio": summary.speedup_ratio,
        "context": result.context,
        "divided": result.divided,
        "activations": list(summary.activations),
        "experts": summary.experts.as_json() if summary.experts is not None else None,
        "uniform": vars(summary.uniform) if summary.uniform else None,
        "alone": [vars(b) for b in summary.alone],
        "alone_skipped": summary.skipped,
        "roomier": vars(summary.roomier) if summary.roomier else None,
        "losses": [
            {k: getattr(x, k) for k in ("node", "alike", "warm", "problem")} | {
                "step_seconds": x.step_seconds if x.plan else None, "replan_seconds": x.seconds,
                "plan": to_dict(x.plan) if x.plan else None,
            }
            for x in summary.losses
        ],
        "rejected": [vars(v) for v in summary.variants],
        "over_memory": [
            {k: getattr(r, k) for k in ("text", "step_seconds", "stage", "largest")}
            | {"chips": r.of or "all", **vars(r.worst), "over": r.worst.over}
            for r in summary.rejected
        ],
        "search_seconds": result.seconds,
        "report_seconds": summary.seconds,
        "evaluated": result.evaluated,
        "complete": result.complete,
        "work_ended": result.work_ended,
        "assumed_rates": list(prediction.assumed),
    }


def plan_text(choice: SimulatedPlan, model: str, made_for: MadeFor) -> str:
    """The plan file with a comment and a ``made_for`` section."""
    return f"# {model}: {choice.step_seconds:.4g} s per step predicted. Written by hetero-megatron plan.\n" + dump_yaml(
        replace(choice.plan, made_for=made_for)
    )
