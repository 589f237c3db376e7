"""Megatron's uniform degrees -> a plan. Uniform data parallelism becomes pipelines; where it divides weights, the
replicas of one pipeline's stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hetero_megatron.plans.canonical import (
    ActivationOffload,
    Interval,
    Pipeline,
    Plan,
    Recompute,
    Stage,
    Unit,
    WeightSharding,
)
from hetero_megatron.plans.experts import has_experts, without_plain_experts
from hetero_megatron.plans.fields import Blame, FlagSource, first_layers, flag_error
from hetero_megatron.plans.importers.megatron_stages import (
    VIRTUAL,
    MegatronParallel,
    context_flags,
    context_members,
    expert_flags,
    stage_layers,
)
from hetero_megatron.utils.text import plural, word

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec


def from_megatron(flags: MegatronParallel, spec: ModelSpec) -> Plan:
    """Build the plan that Megatron's flags describe, with Megatron's numbering of ranks.

    Ranks run through tensor parallel first, then context parallel, then data parallel, then pipeline
    (``--use-tp-pp-dp-mapping``: pipeline before data parallel). Without ``--global-batch-size``, it is
    one micro-batch per pipeline.

    Raises:
        UserError: names the flag; also for a plan that breaks a law of ``validate``.
    """
    from hetero_megatron.plans.validate import validate

    _refuse_unsupported(flags)
    tp, pp = flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
    context = context_flags(
        flags.context_parallel_size, flags.cp_comm_type, flags.hierarchical_context_parallel_sizes
    )
    cp = context.size
    dp, remainder = divmod(flags.world_size, tp * cp * pp)
    if remainder:
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
    layers, embed, head = stage_layers(flags, spec.num_layers)
    experts, size = expert_flags(flags, spec, dp), flags.micro_batch_size
    pipelines = []
    replicas = experts.replicas if flags.gather_weights is None else dp
    for d in range(0, dp, replicas):
        built = []
        for p in range(pp):
            units: list[Unit] = []
            for i in range(replicas):
                block = (d + i) * pp + p if flags.use_tp_pp_dp_mapping else p * dp + d + i
                ranks = [tuple(range(first * tp, (first + 1) * tp)) for first in range(block * cp, (block + 1) * cp)]
                members, kv = context_members(context, ranks, size, flags.seq_length, spec.num_heads)
                units += [replace(unit, sequences=(i * size, (i + 1) * size)) for unit in members]
            layers_held = sum(b - a for a, b in layers[p])
            stage = Stage(
                layers=layers[p] if layers_held or len(layers[p]) > 1 else (),
                units=tuple(units),
                embed=p == embed,
                head=p == head,
                recompute=recompute(flags, layers_held),
                kv=kv,
                weights=_weights(flags, units),
                activations=offload(flags, layers[p], spec),
            )
            if spec.moe is not None and has_experts(spec, stage):
                stage = replace(stage, experts=experts.groups(stage.ranks))
            built.append(stage)
        pipelines.append(Pipeline(size * replicas, count, tuple(built)))
    batch = dp * flags.micro_batch_size * count
    schedule = flags.schedule or ("interleaved" if len(layers[0]) > 1 else "1f1b")
    plan = Plan(flags.seq_length, batch, schedule, tuple(pipelines))
    if spec.moe is not None:
        plan = without_plain_experts(plan, spec)
    validate(plan, spec, source=FlagSource(blame=partial(_blame, flags)))
    return plan


def _blame(flags: MegatronParallel, key: str, stage: int) -> Blame | None:
    """The flag behind a key of the plan that was built from flags."""
    if key in ("layers", "embed", "head"):
        if flags.pipeline_model_parallel_layout is not None:
            name, accepted = "pipeline_model_parallel_layout", "E, t or L in every stage"
        else:
            names_of_flags = (*VIRTUAL, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
            name = next((n for n in names_of_flags if getattr(flags, n) is not None), "pipeline_model_parallel_size")
            accepted = "a layer for every stage between the first and the last"
        return Blame(name, getattr(flags, name), f"stage {stage}, counted from 0", accepted)
    names = {
        "tp": "tensor_model_parallel_size",
        "context": "context_parallel_size",
        "experts": "expert_model_parallel_size",
        "recompute": "recompute_granularity" if flags.recompute_granularity else "recompute_activations",
        "dp_split": "micro_batch_size",
        "seq_length": "seq_length",
        "global_batch_size": "global_batch_size",
        "schedule": "schedule",
        "weights": "use_torch_fsdp2" if flags.use_torch_fsdp2 else "data_parallel_sharding_strategy",
    }
    return Blame(names[key], getattr(flags, names[key])) if key in names else None


def _weights(flags: MegatronParallel, units: Sequence[Unit]) -> WeightSharding | None:
    """Equal shares of weights, where the replicas of a stage divide them and there are several."""
    if flags.gather_weights is None or len(units) == 1:
        return None
    reshard = not flags.torch_fsdp2_no_reshard_after_forward and flags.gather_weights != "step"
    return WeightSharding((1,) * sum(unit.tp for unit in units), flags.gather_weights, reshard)


def _refuse_unsupported(flags: MegatronParallel) -> None:
    sizes = (
        "world_size", "seq_length", "micro_batch_size", "tensor_model_parallel_size",
        "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    )  # fmt: skip
    for name in sizes:
        if getattr(flags, name) < 1:
            raise flag_error(name, getattr(flags, name), "too small", "an integer >= 1")
    if flags.use_torch_fsdp2 and flags.use_megatron_fsdp:
        raise flag_error("use_torch_fsdp2", True, "--use-megatron-fsdp divides the weights, too", "one of the two")


def micro_batches(global_batch_size: int | None, per_step: int) -> int:
    """Micro-batches per pipeline, for ``per_step`` sequences in one micro-batch of all pipelines."""
    if global_batch_size is None:
        return 1
    if global_batch_size < 1 or global_batch_size % per_step:
        lower = global_batch_size // per_step * per_step
        nearest = f"{lower} or {lower + per_step}" if lower > 0 else str(per_step)
        raise flag_error(
            "global_batch_size",
            global_batch_size,
            f"not a multiple of {per_step} (micro-batch size x data parallel)",
            f"{nearest}, or a plan file with unequal shares",
        )
    return global_batch_size // per_step


ELEMENTWISE = ("layernorm", "mlp_act")


def _selective(modules: Sequence[str] | None) -> str:
    """The plan's name of what selective recompute covers."""
    chosen, accepted = set(modules or ("core_attn",)), "core_attn, or layernorm with mlp_act (moe_act)"
    if chosen == {"core_attn"}:
        return "selective"
    problem = None
    if chosen - {"core_attn", *ELEMENTWISE, "moe_act"}:
        problem = "other modules are recomputed with their layer (--recompute-granularity full)"
    elif "core_attn" in chosen:
        problem = "a stage recomputes attention or elementwise results, not both"
    elif "layernorm" not in chosen or len(chosen) == 1:
        problem = "outputs of norms and of activations are recomputed together"
    if problem is not None:
        raise flag_error("recompute_modules", " ".join(modules or ()), problem, accepted)
    return "elementwise"


OFFLOAD_MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
EXPERT_MODULES = ("expert_fc1", "moe_act")


def offload(flags: MegatronParallel, layers: Sequence[Interval], spec: ModelSpec) -> ActivationOffload | None:
    """The flags about activations in host memory, for a stage with these layers."""
    count, held_layers = flags.cpu_offloading_num_layers, sum(b - a for a, b in layers)
    if flags.cpu_offloading and count is None:
        raise flag_error("cpu_offloading", True, "of how many layers?", "--cpu-offloading-num-layers N beside it")
    all_layers, chosen = flags.fine_grained_activation_offloading, flags.offload_modules
    if all_layers and count:
        name = "--fine-grained-activation-offloading"
        raise flag_error("cpu_offloading_num_layers", count, f"{name} offloads all layers", "one of the two")
    if chosen is not None:
        known_modules = (*OFFLOAD_MODULES, *EXPERT_MODULES)
        needed_modules = OFFLOAD_MODULES if spec.moe is None else known_modules
        unknown = next((m for m in chosen if m not in known_modules), None)
        if unknown is not None or not set(needed_modules) <= set(chosen):
            problem = "all that a layer saves goes together" if unknown is None else f"no module is called {unknown}"
            accepted = f"{' '.join(needed_modules)}, or leave the flag out"
            raise flag_error("offload_modules", " ".join(chosen), problem, accepted)
    if count and len(layers) > 1:
        problem = "the first layers of every virtual stage cannot be chosen alone"
        raise flag_error("cpu_offloading_num_layers", count, problem, "--fine-grained-activation-offloading")
    away = held_layers if all_layers else min(count or 0, held_layers)
    return ActivationOffload(away, flags.fine_grained_offloading_max_inflight_offloads or 1) if away else None


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
        kind = _selective(flags.recompute_modules)
        return Recompute(kind) if num_layers else Recompute()
    if granularity != "full":
        raise flag_error("recompute_granularity", granularity, "unknown granularity", "selective or full")
    count = flags.recompute_num_layers
    if flags.recompute_method == "block":
        if any(getattr(flags, name) not in (None, 1) for name in VIRTUAL):
            problem = "the first layers of every virtual stage cannot be recomputed alone"
            raise flag_error("recompute_method", "block", problem, "uniform, or leave it out")
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
