"""What the user sees of a search: the plan, what it is compared with, how much better a plan could be, and why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hetero_megatron.cluster import Cluster, format_bytes
from hetero_megatron.errors import UserError
from hetero_megatron.plan import dump_yaml, from_megatron, rank_ranges, to_dict
from hetero_megatron.planner.bound import ASSUMPTIONS, Bound, price_bound
from hetero_megatron.planner.choices import Choice, SearchOptions, concrete
from hetero_megatron.planner.context_joint_bound import CONTEXT_ASSUMPTIONS, context_bound
from hetero_megatron.planner.evaluate import best_recompute
from hetero_megatron.planner.place import shrink
from hetero_megatron.planner.predict import Prediction, predict
from hetero_megatron.planner.report import format_seconds
from hetero_megatron.planner.search import Result, few_uniform, search
from hetero_megatron.planner.shape import Candidate, Part, PipelineShape, describe
from hetero_megatron.planner.uniform import Uniform
from hetero_megatron.spec import ModelSpec

PRICE_CHIPS = 300_000  # chips x layers above which the bound by prices is only computed when asked for


@dataclass(frozen=True)
class Baseline:
    """A plan that the result is compared with; ``tokens_per_second`` 0 and ``problem`` where there is none."""

    name: str
    text: str
    tokens_per_second: float = 0.0
    step_seconds: float = 0.0
    chips: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Variant:
    """Another plan and why it is not the one."""

    text: str
    step_seconds: float
    why: str


@dataclass
class Summary:
    """Everything that the report says."""

    result: Result
    model: str
    bound: Bound | None
    uniform: Baseline | None = None
    alone: list[Baseline] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)
    unusable: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # chip -> ranks, where it lacks the dtype
    dtype: str = ""

    @property
    def idle(self) -> tuple[int, ...]:
        """Ranks that the best plan could have used, and does not."""
        return tuple(sorted(set(self.result.best.idle) - {r for ranks in self.unusable.values() for r in ranks}))

    @property
    def hethub_tokens_per_second(self) -> float | None:
        """HETHUB's bound: each chip type alone with its best plan, added up; None where none can train the model."""
        total = sum(b.tokens_per_second for b in self.alone)
        return total or None

    @property
    def speedup_ratio(self) -> float | None:
        """H2's: tokens per second per chip x chips over the sum of what each type does alone. Types that cannot
        train the model alone count as 0, which is said."""
        total = self.hethub_tokens_per_second
        return None if total is None else self.result.best.prediction.tokens_per_second / total


def summarize(
    result: Result,
    model: ModelSpec,
    cluster: Cluster,
    seq_length: int,
    batch: int,
    options: SearchOptions,
    *,
    baselines: bool = True,
    bound: bool | None = None,
) -> Summary:
    """Compute the comparisons.

    Args:
        baselines: also search each chip type alone and enumerate uniform plans.
        bound: True: however long it takes; None: unless the cluster is large.
    """
    found: Bound | None = None
    if result.lower_bound > 0:
        # What was left out of the enumeration may have made its bound weak; both hold.
        found = price_bound(result.evaluator, model, batch, options.space, result.best.step_seconds, enumerated=True)
        if result.lower_bound >= found.seconds:
            found = Bound(result.lower_bound, "enumeration")
    elif bound or (
        bound is None and result.method != "islands" and result.pool.chips * model.num_layers <= PRICE_CHIPS
    ):
        space = replace(options.space, offload="always") if result.offload_tried else options.space
        found = price_bound(result.evaluator, model, batch, space, result.best.step_seconds)
    if found is not None and (result.context_tried or result.unlike_groups):
        found = context_bound(found, result.evaluator, model, batch)
    lacking = {c: [r.rank for r in cluster.ranks if r.chip == c] for c, chip in cluster.chips.items()
               if options.dtype not in chip.dtypes}  # fmt: skip
    unusable = {chip: tuple(ranks) for chip, ranks in lacking.items() if ranks}
    summary = Summary(result, model.name, found, dtype=options.dtype, unusable=unusable)
    summary.variants = variants(result, model, cluster, seq_length, batch, options)
    if baselines:
        summary.uniform = best_uniform(result, model, cluster, seq_length, batch, options)
        summary.alone = list(each_alone(result, model, cluster, seq_length, batch, options))
    return summary


def best_uniform(
    result: Result, model: ModelSpec, cluster: Cluster, seq_length: int, batch: int, options: SearchOptions
) -> Baseline:
    """The best plan that Megatron's flags can describe, over all chips of the cluster."""
    best: tuple[float, Uniform, Prediction] | None = None
    problem = "no uniform plan fits into memory, or the batch divides by none of their sizes"
    whole = result.pool.chips == cluster.world_size
    for uniform, _ in few_uniform(result.evaluator, model, batch, 4):
        assert isinstance(uniform, Uniform)
        try:
            plan = from_megatron(uniform.flags(seq_length, batch), model)
            found = predict(plan, model, cluster, options.dtype, result.evaluator.costs)
        except UserError as error:
            problem = error.problem
            continue
        if not found.over and (best is None or found.step_seconds < best[0]):
            best = (found.step_seconds, uniform, found)
    if best is None:
        return Baseline("uniform", "", problem=problem if whole else "some chips lack the dtype")
    return Baseline("uniform", best[1].text(), best[2].tokens_per_second, best[0], cluster.world_size)


def each_alone(
    result: Result, model: ModelSpec, cluster: Cluster, seq_length: int, batch: int, options: SearchOptions
) -> list[Baseline]:
    """The best plan of each chip type alone, with the same global batch (which favours the parts: fewer bubbles)."""
    names = list(dict.fromkeys(group.chip for group in result.pool.groups))
    found = []
    for name in names:
        keep = [rank.rank for rank in cluster.ranks if rank.chip == name]
        own = result.alone.get(name) or _alone(cluster, keep, model, seq_length, batch, options)
        if isinstance(own, UserError):
            found.append(Baseline(name, "", chips=len(keep), problem=own.problem))
            continue
        best = own.best
        text = choice_text(best, [g.chip for g in own.pool.groups])
        found.append(Baseline(name, text, best.prediction.tokens_per_second, best.step_seconds, len(keep)))
    return found


def _alone(
    cluster: Cluster, keep: list[int], model: ModelSpec, seq_length: int, batch: int, options: SearchOptions
) -> Result | UserError:
    part = cluster if len(keep) == cluster.world_size else shrink(cluster, keep)
    try:
        return search(model, part, seq_length, batch, options)
    except UserError as error:
        return error


def text_of(candidate: Candidate, chips: list[str]) -> str:
    """``8 x (m 32, b 1) A100 tp8 [10] > H100 tp2 [8,8,7,7]``, parts joined by `` + ``."""
    parts = [
        f"{p.copies} x (m {p.num_micro_batches}, b {p.shape.micro_batch_size}) {describe(p.shape, chips)}"
        for p in candidate.parts[:4]
    ]
    return " + ".join(parts) + (" + …" if len(candidate.parts) > 4 else "")


def choice_text(choice: Choice, chips: list[str]) -> str:
    """What a plan is."""
    return choice.text or text_of(choice.candidate, chips)


def variants(
    result: Result, model: ModelSpec, cluster: Cluster, seq_length: int, batch: int, options: SearchOptions
) -> list[Variant]:
    """Plans near the best one: one choice undone each, and the runners-up of another make-up."""
    best, found = result.best, []
    chips = [g.chip for g in result.pool.groups]
    for text, candidate in (
        ("the same with equal layers per stage", _even_layers(result, best.candidate, model)),
        ("the same with equal shares of the batch", None if best.text else _even_shares(best.candidate, batch)),
    ):
        if candidate is not None and not best.text:
            found.append(_variant(result, text, candidate, model, cluster, seq_length, options))
    seen = {(best.text, _make_up(best.candidate))}
    for other in result.others:
        if (other.text, _make_up(other.candidate)) not in seen and len(found) < 6:
            seen.add((other.text, _make_up(other.candidate)))
            found.append(Variant(choice_text(other, chips), other.step_seconds, _why(best, other)))
    return [v for v in found if v.step_seconds >= best.step_seconds or v.step_seconds == 0.0]


def _make_up(candidate: Candidate) -> frozenset[object]:
    return frozenset(
        (tuple((s.group, s.tp, s.dp, s.layers) for s in p.shape.stages), p.copies, candidate.schedule)
        for p in candidate.parts
    )


def _variant(
    result: Result,
    text: str,
    candidate: Candidate,
    model: ModelSpec,
    cluster: Cluster,
    seq_length: int,
    options: SearchOptions,
) -> Variant:
    choice = concrete(candidate, cluster, model, seq_length, options, result.evaluator)
    assert choice is not None, "it lies on the chips of the best plan"
    if choice.prediction.over:
        worst = max(choice.prediction.over, key=lambda o: o.over)
        return Variant(text, 0.0, f"does not fit: {worst}")
    return Variant(text, choice.step_seconds, _why(result.best, choice))


def _why(best: Choice, other: Choice) -> str:
    """The part of the step that grew most."""
    grown = {k: other.prediction.parts[k] - v for k, v in best.prediction.parts.items()}
    part = max(grown, key=lambda k: grown[k])
    words = {
        "pipelines": "its slowest pipeline takes", "jitter": "waiting for unsteady chips takes",
        "gradients": "exposed gradient reduction takes", "optimizer": "the optimizer takes",
        "parameters": "sending parameters takes",
    }  # fmt: skip
    return f"{words[part]} {format_seconds(max(0.0, grown[part]))} longer"


def _even_layers(result: Result, candidate: Candidate, model: ModelSpec) -> Candidate | None:
    parts = []
    for part in candidate.parts:
        count = len(part.shape.stages)
        each, more = divmod(model.num_layers, count)
        stages = tuple(
            replace(s, layers=each + (i < more), recompute="none", first=0) for i, s in enumerate(part.shape.stages)
        )
        shape: PipelineShape | None = PipelineShape(part.shape.micro_batch_size, stages)
        assert shape is not None
        fitting = best_recompute(
            result.evaluator.tables, shape, candidate.schedule, part.num_micro_batches, candidate.pipelines
        )
        parts.append(Part(fitting or shape, part.copies, part.num_micro_batches))
    changed = replace(candidate, parts=tuple(parts))
    same = all(
        [s.layers for s in a.shape.stages] == [s.layers for s in b.shape.stages]
        for a, b in zip(changed.parts, candidate.parts)
    )
    return None if same else changed


def _even_shares(candidate: Candidate, batch: int) -> Candidate | None:
    per = {p.shape.micro_batch_size * p.num_micro_batches for p in candidate.parts}
    if len(per) == 1 or batch % candidate.pipelines:
        return None
    share = batch // candidate.pipelines
    if any(share % p.shape.micro_batch_size for p in candidate.parts):
        return None
    return replace(
        candidate, parts=tuple(replace(p, num_micro_batches=share // p.shape.micro_batch_size) for p in candidate.parts)
    )


def format_summary(summary: Summary) -> str:
    """The report as text."""
    result, best = summary.result, summary.result.best
    found = best.prediction
    chips = [g.chip for g in result.pool.groups]
    share = f", {found.mfu:.1%} of the peak of the chips used (aggregate MFU)" if found.mfu is not None else ""
    lines = [
        f"best plan: {format_seconds(best.step_seconds)} per step, {found.tokens_per_second:,.0f} tokens/s{share}",
        f"  {choice_text(best, chips)}",
        f"  found in {result.seconds:.2f} s, {result.evaluated:,} plans evaluated exactly"
        + ("" if result.complete else "; cut short, the best so far"),
    ]
    if summary.bound is not None:
        gap = max(0.0, summary.bound.gap(best.step_seconds))
        tokens = found.tokens_per_second * best.step_seconds / summary.bound.seconds if summary.bound.seconds else 0.0
        lines.append(
            f"  no plan of this space does more than {tokens:,.0f} tokens/s under these rates: within {gap:.1%} of the "
            f"bound (by {summary.bound.method})"
        )
    lines.append(f"  context groups: {result.context}")
    if summary.idle:
        idle = f"{len(summary.idle)} chips (ranks {rank_ranges(summary.idle)})"
        lines.append(f"  idle: {idle}; using them would not help")
    for chip, ranks in summary.unusable.items():
        plural = "s" if len(ranks) > 1 else ""
        lines.append(
            f"  idle: {len(ranks)} chip{plural} (rank{plural} {rank_ranges(ranks)}): {chip} does not compute in "
            f"{summary.dtype}"
        )
    lines += ["", *_memory_lines(best), "", *_comparison_lines(summary)]
    if summary.variants:
        lines += ["", "why not"]
        for v in summary.variants:
            slower = f"+{v.step_seconds / best.step_seconds - 1:.1%}" if v.step_seconds else "—"
            lines.append(f"  {slower:>8}  {v.text}: {v.why}")
    if result.rejected:
        words = {"memory": "over memory after exact evaluation", "packing": "TP groups that do not pack into nodes"}
        lines.append("  dropped: " + ", ".join(f"{n} {words.get(k, k)}" for k, n in result.rejected.items()))
    if found.assumed:
        lines += ["", f"rates of {', '.join(found.assumed)} are from data sheets, not measured: run calibrate"]
    return "\n".join(lines)


def _memory_lines(best: Choice) -> list[str]:
    lines = [f"{'stage':<10}{'chip':<18}{'ranks':<20}{'layers':<12}{'recompute':<12}{'memory':>12}{'of':>12}"]
    seen: dict[object, int] = {}
    for p, pipeline in enumerate(best.plan.pipelines):
        key = tuple((s.layers, s.chip, s.recompute, len(s.ranks)) for s in pipeline.stages)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > 1:
            continue
        for s, stage in enumerate(pipeline.stages):
            worst = max(stage.ranks, key=lambda r: best.prediction.memory[r].total)
            layers = f"{stage.layers[0][0]}-{stage.layers[0][1] - 1}" if stage.layers else "none"
            lines.append(
                f"{f'{p}.{s}':<10}{stage.chip or '':<18}{rank_ranges(stage.ranks):<20}{layers:<12}"
                f"{str(stage.recompute):<12}{format_bytes(best.prediction.memory[worst].total):>12}"
                f"{format_bytes(best.prediction.limits[worst]):>12}"
            )
    more = sum(n - 1 for n in seen.values())
    return lines + ([f"and {more} more pipelines like these"] if more else [])


def _comparison_lines(summary: Summary) -> list[str]:
    tokens = summary.result.best.prediction.tokens_per_second
    lines = ["compared with"]
    for baseline in ([summary.uniform] if summary.uniform else []) + summary.alone:
        name = (
            "best uniform plan (Megatron)"
            if baseline.name == "uniform"
            else f"{baseline.chips} x {baseline.name} alone"
        )
        if baseline.problem:
            lines.append(f"  {name:<34} none: {baseline.problem}")
        else:
            ratio = tokens / baseline.tokens_per_second
            lines.append(f"  {name:<34}{baseline.tokens_per_second:>14,.0f} tokens/s  {ratio:>6.2f}x  {baseline.text}")
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
    found = best.prediction
    bound = None
    if summary.bound is not None:
        bound = {
            "step_seconds": summary.bound.seconds, "method": summary.bound.method,
            "assumptions": list(CONTEXT_ASSUMPTIONS if result.context_tried or result.unlike_groups else ASSUMPTIONS),
            "gap": max(0.0, summary.bound.gap(best.step_seconds)) if summary.bound.seconds else None,
        }  # fmt: skip
    return {
        "model": summary.model,
        "plan": to_dict(best.plan),
        "fingerprint": best.plan.fingerprint(),
        "step_seconds": best.step_seconds,
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "parts": dict(found.parts),
        "memory": {str(r): m.total for r, m in found.memory.items()},
        "memory_limits": {str(r): n for r, n in found.limits.items()},
        "idle_ranks": sorted({*summary.idle, *(r for ranks in summary.unusable.values() for r in ranks)}),
        "bound": bound,
        "hethub_bound_tokens_per_second": summary.hethub_tokens_per_second,
        "hetero_speedup_ratio": summary.speedup_ratio,
        "context": result.context,
        "uniform": vars(summary.uniform) if summary.uniform else None,
        "alone": [vars(b) for b in summary.alone],
        "rejected": [vars(v) for v in summary.variants],
        "search_seconds": result.seconds,
        "evaluated": result.evaluated,
        "complete": result.complete,
        "assumed_rates": list(found.assumed),
    }


def plan_text(choice: Choice, model: str) -> str:
    """The plan file, with a comment that says what it is for."""
    return f"# {model}: {choice.step_seconds:.4g} s per step predicted. Written by hetero-megatron plan.\n" + dump_yaml(
        choice.plan
    )
