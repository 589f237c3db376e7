"""A prediction as text and as JSON data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_megatron.cluster import format_bytes, format_rate
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan, Stage
from hetero_megatron.plans.canonical import Unit
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.made_for import lora_words
from hetero_megatron.plans.memory.memory_report import OverHost, format_memory
from hetero_megatron.plans.memory.of_plan import ADAM_MOMENTS
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.role_prediction import RolloutPrediction
from hetero_megatron.predictor.simulate.step import Prediction
from hetero_megatron.spec import ModelSpec, shares
from hetero_megatron.spec.flops import parameter_count
from hetero_megatron.utils.text import format_seconds as brief_seconds
from hetero_megatron.utils.text import plural, rank_ranges, word

PARTS = {
    "reference": "forward of reference or teacher",
    "pipelines": "pipelines, until the last backward",
    "jitter": "waiting for unsteady chips",
    "gradients": "gradients, what backward does not hide",
    "optimizer": "optimizer",
    "parameters": "parameters to their holders",
    "outer": "outer steps, mean of all steps",
}


def format_seconds(seconds: float) -> str:
    """``1.234 s``, ``56.7 ms`` or ``8.9 us``."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return "0 s" if seconds < 5e-10 else f"{seconds * 1e9:.3g} ns"


def format_step_seconds(prediction: Prediction) -> str:
    """``1.236 s (1.19-1.29)``, the range in the unit of the seconds; without it where there is none."""
    text = format_seconds(prediction.step_seconds)
    if prediction.seconds_range is None:
        return text
    number, unit = text.split()
    factor = float(number) / prediction.step_seconds if prediction.step_seconds else 0.0
    low, high = (seconds * factor for seconds in prediction.seconds_range)
    digits = max(0, 2 - math.floor(math.log10(high))) if high > 0 else 0
    return f"{number} {unit} ({low:.{digits}f}-{high:.{digits}f})"


def bubble_share(prediction: Prediction) -> float:
    """Share of the time of all stages, until the last backward of the step, in which they do not compute."""
    busy = sum(sum(timeline.busy) for timeline in prediction.timelines)
    return 1 - busy / (max(prediction.pipeline_seconds) * sum(len(timeline.busy) for timeline in prediction.timelines))


def mfu_words(prediction: Prediction) -> str:
    """What the MFU is a share of; beside a role it is of the other model and its chips."""
    beside = "" if prediction.role is None else f", without the {prediction.role.name}"
    return f"the chips' peak (MFU{beside})"


def format_prediction(prediction: Prediction) -> str:
    """Step time and its parts, use of the chips, memory, and what was assumed."""
    share = f", {prediction.mfu:.1%} of {mfu_words(prediction)}" if prediction.mfu is not None else ""
    lines = [
        f"plan {prediction.plan.fingerprint()}: {plural(prediction.plan.world_size, 'rank')}, "
        f"{plural(len(prediction.plan.pipelines), 'pipeline')}",
        f"predicted step: {format_step_seconds(prediction)}, {prediction.tokens_per_second:,.0f} tokens/s{share}",
    ]
    for part, words in PARTS.items():
        seconds = prediction.parts[part]
        if part == "reference" and prediction.role is not None and prediction.role.apart:
            words = "forwards and waiting before the step"
        if part == "reference" and isinstance(prediction.role, RolloutPrediction):
            words = "answers, and waiting for them"
        if seconds or part not in ("jitter", "reference", "outer"):
            lines.append(f"  {words:<40}{format_seconds(seconds):>12}{seconds / prediction.step_seconds:>8.1%}")
    if prediction.role is not None:
        ranks = prediction.role.ranks
        on = f"{word(len(ranks), 'rank')} {rank_ranges(ranks)}"
        lines.append(f"{prediction.role.name} on {on}: {prediction.role}")
    lines += format_dtypes(prediction)
    lines += ["", "busy with compute", *_busy(prediction), "", format_memory(prediction.memory)]
    lines += prediction.communicators
    free = min((prediction.limits[r] - m.total, r) for r, m in prediction.memory.items())
    if prediction.over:
        lines += [f"does not fit: {over}" for over in prediction.over[:4]]
        if len(prediction.over) > 4:
            lines.append(f"and {len(prediction.over) - 4} more")
    else:
        lines.append(f"fits: rank {free[1]} has least left, {format_bytes(free[0])} below its limit")
    if prediction.assumed:
        chips = prediction.describe_assumed()
        lines.append(f"assumed: data sheet x default efficiencies for {chips}; no rates in the cluster file")
    return "\n".join([*lines, *split_notice(prediction)])


def split_notice(prediction: Prediction) -> list[str]:
    """A line where the plan splits backwards, and rates do not say what their parts take."""
    if not prediction.unsplit:
        return []
    return [f"assumed: weight gradients (W) take their share of a backward's FLOPs, and splitting it takes nothing, on "
            f"{', '.join(prediction.unsplit)}: their rates say nothing about it, run calibrate"]  # fmt: skip


def format_dtypes(prediction: Prediction) -> list[str]:
    """A line per dtype: which ranks have linear modules in it; nothing where no run has fp8."""
    rows: dict[str, list[int]] = {}
    for rank, dtype in sorted(prediction.dtypes.items()):
        rows.setdefault(dtype, []).append(rank)
    lines = []
    for dtype, ranks in rows.items():
        chips = ", ".join(dict.fromkeys(prediction.chips[rank] for rank in ranks))
        lines.append(f"  linear modules in {dtype}: {word(len(ranks), 'rank')} {rank_ranges(ranks)} ({chips})")
    return lines


def _busy(prediction: Prediction) -> list[str]:
    """One line per run of ranks of one stage (or several alike)."""
    rows: dict[tuple[str, float], list[int]] = {}
    for rank, seconds in sorted(prediction.busy.items()):
        rows.setdefault((prediction.chips[rank], seconds), []).append(rank)
    step = prediction.step_seconds
    return [
        f"  ranks {rank_ranges(ranks):<20}{chip:<18}{format_seconds(seconds):>10}{seconds / step:>8.1%}"
        for (chip, seconds), ranks in rows.items()
    ]


def as_json(prediction: Prediction) -> Mapping[str, Any]:
    """Everything but the timeline, as JSON data; seconds and bytes."""
    return {
        "plan": prediction.plan.fingerprint(),
        "step_seconds": prediction.step_seconds,
        "seconds_range": None if prediction.seconds_range is None else list(prediction.seconds_range),
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu,
        "parts": dict(prediction.parts),
        "pipeline_seconds": list(prediction.pipeline_seconds),
        "fits": not prediction.over,
        "over": [
            {"rank": o.rank, "chip": o.chip, "bytes": o.over} | ({"host": o.node} if isinstance(o, OverHost) else {})
            for o in prediction.over
        ],
        "assumed": list(prediction.assumed),
        **({} if prediction.role is None else {"role": dict(prediction.role.as_json())}),
        "ranks": [
            {
                "rank": rank,
                "chip": prediction.chips[rank],
                "busy_seconds": prediction.busy[rank],
                **({"linear_modules": prediction.dtypes[rank]} if prediction.dtypes else {}),
                "memory": memory.parts() | {"total": memory.total, "host": memory.host},
                "memory_limit": prediction.limits[rank],
            }
            for rank, memory in sorted(prediction.memory.items())
        ],
    }


MOST_LINKS = 6  # that are written out


@dataclass(frozen=True)
class AskedLink:
    """Between two chips of a node of group ``a`` (``inside``), or two nodes of the groups ``a`` and ``b``.
    ``bandwidth``: bytes/s; ``latency``: seconds."""

    a: str
    b: str
    inside: bool
    bandwidth: float
    latency: float
    measured: bool

    def __str__(self) -> str:
        ends = f"between {self.a} and {self.b}" if self.a != self.b else f"among {self.a}"
        ends = f"inside {self.a}" if self.inside else ends
        measured = " (measured)" if self.measured else ""
        return f"{ends} {format_rate(self.bandwidth)}, {brief_seconds(self.latency)}{measured}"


@dataclass(frozen=True)
class Question:
    """What a plan was made or predicted for. ``moments``: of the optimizer, per element; ``muon``: it is
    Muon."""

    model: ModelSpec
    seq_length: int
    global_batch_size: int
    dtype: str
    fp8: Fp8 | None
    moments: int
    margin: float
    links: tuple[AskedLink, ...]
    muon: bool = False

    @property
    def optimizer(self) -> str:
        if self.muon:
            return "muon"
        return "adam" if self.moments == ADAM_MOMENTS else "sgd"

    def rows(self) -> list[tuple[str, str]]:
        """(what, in words)."""
        model, tokens = self.model, self.seq_length * self.global_batch_size
        billions = f"{parameter_count(model) / 1e9:.3g} billion parameters"
        trained = f"adapters, {' '.join(lora_words(model.lora))}" if model.lora is not None else "all weights"
        computes = f", and {self.fp8} where chips have it and it pays" if self.fp8 is not None else ""
        links = [str(link) for link in self.links[:MOST_LINKS]]
        if len(self.links) > MOST_LINKS:
            links.append(f"and {len(self.links) - MOST_LINKS} more")
        return [
            ("model", f"{model.name}: {plural(model.num_layers, 'layer')}, {billions}"),
            ("step", f"{plural(self.global_batch_size, 'sequence')} of {self.seq_length:,} tokens = {tokens:,} tokens"),
            ("computes in", f"{self.dtype}{computes}"),
            ("trains", f"{trained}; optimizer {self.optimizer}; {self.margin:.0%} of each chip's memory stays free"),
            *([("links priced", "; ".join(links))] if links else []),
        ]  # fmt: skip

    def as_json(self) -> Mapping[str, Any]:
        return {
            "model": self.model.name,
            "seq_length": self.seq_length,
            "global_batch_size": self.global_batch_size,
            "dtype": self.dtype,
            "fp8": None if self.fp8 is None else {"format": self.fp8.format, "recipe": self.fp8.recipe},
            "adapters": None if self.model.lora is None else dict(self.model.lora.shape()),
            "optimizer": self.optimizer,
            "memory_margin": self.margin,
            "links": [
                vars(link) | {"bandwidth": link.bandwidth if math.isfinite(link.bandwidth) else None}
                for link in self.links
            ],
        }


def question(costs: CostModel, global_batch_size: int) -> Question:
    """Of a cost model, which has the cluster and all options."""
    options = costs.options
    return Question(
        costs.model, costs.seq_length, global_batch_size, costs.dtype, options.fp8, options.moments, options.margin,
        _links(costs), options.muon,
    )  # fmt: skip


def _links(costs: CostModel) -> tuple[AskedLink, ...]:
    """Inside nodes of each group, then between nodes; links of which nothing is known are not used."""
    rates, nodes, asked_links = costs.links.rates, costs.cluster.nodes, []
    ways = [(node.name, node.name, True) for node in nodes if node.chips_per_node > 1]
    ways += [(node.name, node.name, False) for node in nodes if node.count > 1]
    ways += [(a.name, b.name, False) for a, b in itertools.combinations(nodes, 2)]
    for way in ways:
        try:
            link = rates.between(*way).as_link()
        except UserError:
            continue
        asked_links.append(AskedLink(*way, link.bandwidth, link.latency, way in rates.measured))
    return tuple(asked_links)


def format_question(asked: Question) -> str:
    """One line per row."""
    return "\n".join(f"{name + ':':<14}{text}" for name, text in asked.rows())


MOST_LINES = 16  # of one stage


def holdings(plan: Plan, stage: Stage, model: ModelSpec) -> list[str]:
    """A line for each TP group of a stage that divides tokens, heads or sequences; none for a stage of one rank."""
    lines = [_unit(plan, stage, unit, model) for unit in stage.units] if len(stage.ranks) > 1 else []
    left_out = len(lines) - MOST_LINES
    return lines[:MOST_LINES] + ([f"and {left_out} more groups"] if left_out > 0 else [])


def _unit(plan: Plan, stage: Stage, unit: Unit, model: ModelSpec) -> str:
    parts = []
    if len(stage.replicas) > 1:
        a, b = unit.sequences
        parts.append(f"{'sequence' if b - a == 1 else 'sequences'} {_spans([(a, b)])} of each micro-batch")
    if unit.num_tokens == plan.seq_length:
        parts.append("all tokens")
    else:
        parts.append(f"tokens {_spans(unit.tokens)} ({unit.num_tokens:,} of {plan.seq_length:,})")
    heads = [share.q_heads for share in shares(model, unit.tp_split, unit.heads)]
    counts = {b - a for a, b in heads}
    if len(heads) > 1 and len(counts) == 1:
        parts.append(f"{counts.pop()} of {model.num_heads} heads on each rank")
    elif len(heads) > 1:
        parts.append("heads " + ", ".join(f"{_spans([span])} on rank {r}" for span, r in zip(heads, unit.ranks)))
    else:
        parts.append("all heads" if unit.heads == (0, model.num_heads) else f"heads {_spans([unit.heads])}")
    return f"{word(unit.tp, 'rank')} {rank_ranges(unit.ranks)}: {', '.join(parts)}"


def _spans(spans: Sequence[tuple[int, int]]) -> str:
    """``0-1023 and 3072-4095``, with the last one in it."""
    return " and ".join(f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in spans if a < b) or "none"
