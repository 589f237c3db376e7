"""Megatron's uniform degrees -> a plan. Uniform data parallelism becomes pipelines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hetero_megatron.plan.canonical import Interval, Pipeline, Plan, Recompute, Stage
from hetero_megatron.plan.fields import first_layers
from hetero_megatron.plan.flag_source import Blame, FlagSource, flag_error
from hetero_megatron.plan.megatron_context import context_flags, context_members
from hetero_megatron.words import plural, word

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec

MAX_LAYOUT = 1 << 16


@dataclass(frozen=True)
class MegatronParallel:
    """Megatron's parallel flags, named like them; ``world_size`` is the number of ranks that were started."""

    world_size: int
    seq_length: int
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    cp_comm_type: Sequence[str] = ("p2p",)
    hierarchical_context_parallel_sizes: Sequence[int] | None = None
    expert_model_parallel_size: int = 1
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_activations: bool = False
    use_tp_pp_dp_mapping: bool = False
    schedule: str = "1f1b"


def from_megatron(flags: MegatronParallel, spec: ModelSpec) -> Plan:
    """Build the plan that Megatron's flags describe, with Megatron's numbering of ranks.

    Ranks run through tensor parallel first, then context parallel, then data parallel, then pipeline
    (``--use-tp-pp-dp-mapping``: pipeline before data parallel). Without ``--global-batch-size``, it is
    one micro-batch per pipeline.

    Raises:
        UserError: names the flag; also for a plan that breaks a law of ``validate``.
    """
    from hetero_megatron.plan.validate import validate

    _refuse_unsupported(flags)
    tp, pp = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
    context = context_flags(
        flags.context_parallel_size, flags.cp_comm_type, flags.hierarchical_context_parallel_sizes
    )
    cp = context.size
    dp, rest = divmod(flags.world_size, tp * cp * pp)
    if rest:
        sizes, names = f"{tp} x {pp}", "tensor x pipeline parallel"
        if cp > 1:
            sizes, names = f"{tp} x {cp} x {pp}", "tensor x context x pipeline parallel"
        largest = max((tp, "tensor"), (cp, "context"), (pp, "pipeline"), key=lambda size: size[0])
        name = f"{largest[1]}{'' if largest[1] == 'context' else '_model'}_parallel_size"
        raise flag_error(
            name,
            largest[0],
            f"{plural(flags.world_size, 'rank')} {word(flags.world_size, 'is')} not a multiple of {sizes} ({names})",
            f"a number of ranks that is a multiple of {tp * cp * pp}",
        )
    count = micro_batches(flags.global_batch_size, dp * flags.micro_batch_size)
    layers, embed, head = _stages(flags, spec.num_layers)
    pipelines = []
    for d in range(dp):
        built = []
        for p in range(pp):
            block = d * pp + p if flags.use_tp_pp_dp_mapping else p * dp + d
            ranks = [tuple(range(first * tp, (first + 1) * tp)) for first in range(block * cp, (block + 1) * cp)]
            units, kv = context_members(
                context, ranks, flags.micro_batch_size, flags.seq_length, spec.num_heads
            )
            a, b = layers[p]
            built.append(
                Stage(
                    layers=((a, b),) if a < b else (),
                    units=units,
                    embed=p == embed,
                    head=p == head,
                    recompute=recompute(flags, b - a),
                    kv=kv,
                )
            )
        pipelines.append(Pipeline(flags.micro_batch_size, count, tuple(built)))
    batch = dp * flags.micro_batch_size * count
    plan = Plan(flags.seq_length, batch, flags.schedule, tuple(pipelines))
    validate(plan, spec, source=FlagSource(blame=partial(_blame, flags)))
    return plan


def _blame(flags: MegatronParallel, key: str, stage: int) -> Blame | None:
    """The flag behind a key of the plan that was built from flags."""
    if key in ("layers", "embed", "head"):
        if flags.pipeline_model_parallel_layout is not None:
            name, accepted = "pipeline_model_parallel_layout", "E, t or L in every stage"
        else:
            ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
            name = next((n for n in ends if getattr(flags, n) is not None), "pipeline_model_parallel_size")
            accepted = "a layer for every stage between the first and the last"
        return Blame(name, getattr(flags, name), f"stage {stage}, counted from 0", accepted)
    names = {
        "tp": "tensor_model_parallel_size",
        "context": "context_parallel_size",
        "recompute": "recompute_granularity" if flags.recompute_granularity else "recompute_activations",
        "dp_split": "micro_batch_size",
        "seq_length": "seq_length",
        "global_batch_size": "global_batch_size",
        "schedule": "schedule",
    }
    return Blame(names[key], getattr(flags, names[key])) if key in names else None


def _refuse_unsupported(flags: MegatronParallel) -> None:
    sizes = (
        "world_size", "seq_length", "micro_batch_size", "tensor_model_parallel_size",
        "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    )  # fmt: skip
    for name in sizes:
        if getattr(flags, name) < 1:
            raise flag_error(name, getattr(flags, name), "too small", "an integer >= 1")
    if flags.expert_model_parallel_size != 1:
        value = flags.expert_model_parallel_size
        raise flag_error("expert_model_parallel_size", value, "this version cannot run expert parallelism", "1")
    for name in ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"):
        value = getattr(flags, name)
        if value is not None and not (name.startswith("num_virtual") and value == 1):
            raise flag_error(
                name, value, "this version cannot run virtual pipeline stages", "leave the flag out"
            )


def micro_batches(global_batch_size: int | None, per_step: int) -> int:
    """Micro-batches per pipeline, for ``per_step`` sequences in one micro-batch of all pipelines."""
    if global_batch_size is None:
        return 1
    if global_batch_size < 1 or global_batch_size % per_step:
        lower = global_batch_size // per_step * per_step
        near = f"{lower} or {lower + per_step}" if lower > 0 else str(per_step)
        raise flag_error(
            "global_batch_size",
            global_batch_size,
            f"not a multiple of {per_step} (micro-batch size x data parallel)",
            f"{near}, or a plan file with unequal shares",
        )
    return global_batch_size // per_step


def _stages(flags: MegatronParallel, num_layers: int) -> tuple[list[Interval], int, int]:
    """Layers of each stage, and the stages that hold embedding and head."""
    pp = flags.pipeline_model_parallel_size
    if flags.pipeline_model_parallel_layout is not None:
        for name in (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ):
            if getattr(flags, name):
                raise flag_error(
                    name, getattr(flags, name), "it contradicts --pipeline-model-parallel-layout"
                )
        return layout_stages(flags.pipeline_model_parallel_layout, pp, num_layers)
    counts = layer_counts(flags, num_layers)
    return intervals(counts), 0, pp - 1


def intervals(counts: Sequence[int]) -> list[Interval]:
    """Consecutive ranges of these lengths."""
    result, start = [], 0
    for count in counts:
        result.append((start, start + count))
        start += count
    return result


def layer_counts(flags: MegatronParallel, num_layers: int) -> list[int]:
    """Decoder layers per stage; what does not divide goes to the first stages (30 over 4: 8, 8, 7, 7)."""
    pp = flags.pipeline_model_parallel_size
    first, last = flags.decoder_first_pipeline_num_layers, flags.decoder_last_pipeline_num_layers
    embed, loss = flags.account_for_embedding_in_pipeline_split, flags.account_for_loss_in_pipeline_split
    if first is None and last is None:
        slots = _even(num_layers + embed + loss, pp)
        slots[0] -= embed
        slots[-1] -= loss
        if min(slots) < 0:
            raise flag_error(
                "pipeline_model_parallel_size", pp, f"more stages than {plural(num_layers, 'layer')} can fill"
            )
        return slots
    if embed or loss:
        name = "account_for_embedding_in_pipeline_split" if embed else "account_for_loss_in_pipeline_split"
        raise flag_error(
            name, True, "it contradicts --decoder-first/last-pipeline-num-layers", "one of the two"
        )
    fixed = [n for n in (first, last) if n is not None]
    name = "decoder_first_pipeline_num_layers" if first is not None else "decoder_last_pipeline_num_layers"
    rest, stages = num_layers - sum(fixed), pp - len(fixed)
    if min(fixed) < 0 or rest < 0 or stages < 0 or (stages == 0 and rest):
        raise flag_error(
            name,
            fixed[0],
            f"it leaves {rest} of {plural(num_layers, 'layer')} for {max(stages, 0)} of {plural(pp, 'pipeline stage')}",
            f"first, last and the stages between them adding up to {plural(num_layers, 'layer')}",
        )
    middle = _even(rest, stages) if stages else []
    return [*([first] if first is not None else []), *middle, *([last] if last is not None else [])]


def _even(total: int, parts: int) -> list[int]:
    each, extra = divmod(total, parts)
    return [each + (i < extra) for i in range(parts)]


def layout_stages(text: str, pp: int, num_layers: int) -> tuple[list[Interval], int, int]:
    """Megatron's layout language, e.g. ``Et*3|(tt|)*29,m|L``, as layers per stage."""
    name = "pipeline_model_parallel_layout"
    stages = expand_layout(text).split("|")
    symbols = "".join(stages)
    if "m" in symbols:
        raise flag_error(name, text, "this version cannot run multi-token prediction ('m')", "E, t, L and |")
    if len(stages) != pp:
        problem = f"it has {plural(len(stages), 'stage')} for {plural(pp, 'pipeline-parallel rank')}"
        if len(stages) % pp == 0:
            problem += f": {plural(len(stages) // pp, 'virtual stage')} each, which this version cannot run"
        raise flag_error(name, text, problem, plural(pp, "stage"))
    if symbols.count("E") != 1 or not symbols.startswith("E"):
        raise flag_error(name, text, "the embedding 'E' stands once, before everything else", "E…")
    if symbols.count("L") != 1 or not symbols.endswith("L"):
        raise flag_error(name, text, "the loss 'L' stands once, after everything else", "…L")
    counts = [stage.count("t") for stage in stages]
    if sum(counts) != num_layers:
        raise flag_error(
            name, text, f"it has {plural(sum(counts), 'decoder layer')}, the model has {num_layers}", str(num_layers)
        )
    embed = next(i for i, stage in enumerate(stages) if "E" in stage)
    head = next(i for i, stage in enumerate(stages) if "L" in stage)
    return intervals(counts), embed, head


def expand_layout(text: str) -> str:
    """Multiply out ``x*n`` and ``(...)*n``; commas and blanks are cosmetic."""
    tokens = re.findall(r"\d+|.", re.sub(r"[\s,]", "", text), flags=re.DOTALL)
    expanded, rest = _sequence(text, tokens, 0)
    if rest < len(tokens):
        raise flag_error("pipeline_model_parallel_layout", text, "a ')' without '('")
    return expanded


def _sequence(text: str, tokens: list[str], i: int, depth: int = 0) -> tuple[str, int]:
    """Expand tokens from ``i`` to the end of this parenthesis; (expanded, next index)."""
    name = "pipeline_model_parallel_layout"
    parts: list[str] = []
    while i < len(tokens) and tokens[i] != ")":
        if tokens[i] == "(":
            if depth > 20:
                raise flag_error(name, text, "nested too deeply")
            part, i = _sequence(text, tokens, i + 1, depth + 1)
            if i == len(tokens):
                raise flag_error(name, text, "a '(' without ')'")
        elif tokens[i] in "EtmL|":
            part = tokens[i]
        else:
            raise flag_error(name, text, f"unexpected {tokens[i]!r}", "E, t, m, L, |, x*n and (...)*n")
        i += 1
        if i < len(tokens) and tokens[i] == "*":
            if i + 1 == len(tokens) or not tokens[i + 1].isdecimal():
                raise flag_error(name, text, "a '*' without a number after it", "x*n")
            if len(part) * int(tokens[i + 1]) > MAX_LAYOUT:
                raise flag_error(name, text, "it expands to an absurd length")
            part *= int(tokens[i + 1])
            i += 2
        parts.append(part)
    return "".join(parts), i


def recompute(flags: MegatronParallel, num_layers: int) -> Recompute:
    """The recompute flags for a stage of ``num_layers``: ``block`` recomputes the first n layers of
    every stage."""
    granularity = flags.recompute_granularity or ("selective" if flags.recompute_activations else None)
    if granularity is None:
        for name in ("recompute_method", "recompute_num_layers"):
            if getattr(flags, name) is not None:
                raise flag_error(name, getattr(flags, name), "it needs --recompute-granularity full", "leave it out")
        return Recompute()
    if granularity == "selective":
        if flags.recompute_method is not None:
            raise flag_error(
                "recompute_method", flags.recompute_method, "it needs --recompute-granularity full", "leave it out"
            )
        return Recompute("selective") if num_layers else Recompute()
    if granularity != "full":
        raise flag_error("recompute_granularity", granularity, "unknown granularity", "selective or full")
    count = flags.recompute_num_layers
    if flags.recompute_method == "block":
        if count is None or count < 1:
            raise flag_error("recompute_num_layers", count, "the block method needs it", "an integer >= 1")
        return first_layers(count, num_layers)
    if flags.recompute_method not in ("uniform", None):
        raise flag_error("recompute_method", flags.recompute_method, "unknown method", "uniform or block")
    if count not in (None, 1):
        raise flag_error(
            "recompute_num_layers", count, "uniform recompute in chunks of several layers is missing", "1"
        )
    return first_layers(num_layers, num_layers)
