"""The kernel plan of each rank: built from plan, plugins and platform; agreed on; printed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import torch

from hetero_megatron.comm import Group
from hetero_megatron.errors import UserError
from hetero_megatron.ops import KernelPlan, Registry, Signature, default_kernels, resolve
from hetero_megatron.ops.conformance.run import used_kernels, wrong_kernels
from hetero_megatron.ops.gemm_fp8 import NAMES as FP8_PRODUCTS
from hetero_megatron.ops.kernel_plan import EVERY
from hetero_megatron.ops.spec import VENDOR, Kernel
from hetero_megatron.ops.stage import stage_signatures
from hetero_megatron.pipeline.stage_model import RankStage
from hetero_megatron.plans import Plan
from hetero_megatron.plans.fp8 import RECIPES, Fp8
from hetero_megatron.platform import Platform
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import PLAIN, RuntimeOptions
from hetero_megatron.utils.text import format_seconds, notice_line, plural, rank_ranges


def rank_kernels(
    plan: Plan,
    spec: ModelSpec,
    rank: int,
    registry: Registry,
    platform: Platform,
    dtype: torch.dtype,
    options: RuntimeOptions = PLAIN,
    deterministic: bool = False,
) -> KernelPlan:
    """The kernels of one rank's stage.

    Args:
        dtype: of the weights.
        options: of the runtime that will use them.
        deterministic: without kernels that do not give the same bits every time.

    Raises:
        UserError: the stage asks for a provider that is not there or cannot serve it.
    """
    rank_stage = RankStage(plan, spec, rank)
    compiled = options.compile_backend is not None
    base = replace(_signature(platform, dtype), compiled=compiled, deterministic=deterministic)
    requests = dict(rank_stage.stage.kernels)
    chunked = rank_stage.loss_chunk(dtype, options.logits_bytes) is not None
    fp8 = rank_stage.fp8(options.fp8)
    if fp8 is not None:
        _require_fp8(registry, replace(base, op=fp8.operator), fp8, requests, rank_stage.path, rank)
    signatures = stage_signatures(
        base,
        spec,
        rank_stage.share,
        rank_stage.stage.head,
        rank_stage.unit.tp,
        requests,
        chunked,
        rank_stage.tiled,
        fp8,
        options.dropout,
    )
    return resolve(registry, signatures, requests, f"{rank_stage.path}.kernels")


def _require_fp8(
    registry: Registry, signature: Signature, fp8: Fp8, requests: Mapping[str, str], path: str, rank: int
) -> None:
    """UserError where nothing multiplies in fp8 on this chip: the plan has to say that the stage computes otherwise."""
    kernels = registry.kernels(fp8.operator)
    if fp8.operator in requests or _has_fp8(registry, signature):
        return
    chip = ".".join(map(str, signature.arch))
    why = "; ".join(f"{k.provider}: {', '.join(k.reasons(signature)) or 'only by request'}" for k in kernels)
    raise UserError(
        f"rank {rank} is on {signature.platform or signature.device}{f' (chip {chip})' if chip else ''}, where no "
        f"provider multiplies in {fp8} ({why})",
        field=f"{path}.dtype", value="fp8",
        accepted="dtype: (that of the weights) for this stage, or --kernels with a provider that can serve it",
    )  # fmt: skip


def fp8_kernels(registry: Registry, platform: Platform, dtype: torch.dtype) -> dict[str, Kernel]:
    """By recipe, the product in fp8 that a run on this platform would have unasked; recipes that it lacks are left
    out."""
    kernels = {}
    for recipe in RECIPES:
        signature = replace(_signature(platform, dtype), op=Fp8("e4m3", recipe).operator)
        if _has_fp8(registry, signature):
            kernels[recipe] = resolve(registry, [signature]).choices[signature.op].kernel
    return kernels


def _has_fp8(registry: Registry, signature: Signature) -> bool:
    return any(not k.reasons(signature) and k.chosen_unasked(signature) for k in registry.kernels(signature.op))


def _signature(platform: Platform, dtype: torch.dtype) -> Signature:
    accelerator = platform.accelerator
    arch = accelerator.arch(platform.device.index or 0) if accelerator is not None else ()
    return Signature("", platform.device.type, dtype, platform.name, arch)


def shape_kernels(config: RunConfig, rank: int, dtype: torch.dtype) -> KernelPlan:
    """Kernels for a dry run with fake tensors: torch's own, whatever the plan asks for; shapes and sizes are alike."""
    from hetero_megatron.dry_run.expert_layers import with_expected_rows
    from hetero_megatron.dry_run.products import with_chip_attention, with_chip_chunks, with_chip_products

    rank_stage = RankStage(config.plan, config.spec, rank)
    kernels = default_kernels(
        config.spec, rank_stage.share, rank_stage.stage.head, dtype, tp=rank_stage.unit.tp,
        chunked=rank_stage.loss_chunk(dtype, config.logits_bytes) is not None, tiled=rank_stage.tiled,
        fp8=rank_stage.fp8(config.fp8),
    )  # fmt: skip
    kernels = with_chip_attention(with_chip_chunks(with_chip_products(kernels)))
    if "dropout" in kernels.choices:  # making masks of nothing would take most of the time
        kernels.dropout = lambda x, *_: x.clone()  # type: ignore[attr-defined]
    return kernels if config.spec.moe is None else with_expected_rows(kernels)


def _interchangeable(plan: KernelPlan) -> dict[str, frozenset[str]]:
    """Providers that unlike chips of one stage may have by themselves, by operator: a vendor's attention, whose saved
    state has one form, so that what one made another may use."""
    shared_kernels = [k for k in plan.registry.kernels("attention") if k.kind == VENDOR and not k.private]
    return {"attention": frozenset(k.provider for k in shared_kernels)}


def agree_on_kernels(runtime: Runtime, reasons: bool = False) -> None:
    """The ranks of a stage use the same kernels; the first rank prints every stage's, and what could not serve.

    ``reasons``: with a line per operator, and all that was passed over.

    Stages may differ: that is the point. Ranks of one stage with other sizes (uneven TP) may not differ in providers.
    """
    place, plan = runtime.here.place, runtime.stage_model.kernels
    text = "\n".join([plan.summary(), *([plan.format()] if reasons else plan.why())])
    summary_here = (place.pipeline, place.stage, plan.providers(), plan.digest(), text)
    summaries = runtime.world.gather_objects(summary_here, tuple[int, int, dict[str, str], str, str])
    first: dict[tuple[int, int], tuple[str, str]] = {}
    # TP groups of one rank and of several call different operators for the loss, so each has a first rank of its own.
    by_stage: dict[tuple[int, int], dict[str, tuple[int, str]]] = {}
    interchangeable, notices = _interchangeable(plan), dict[tuple[int, int, str], str]()
    for rank, (p, s, providers, digest, summary) in zip(runtime.world.ranks, summaries, strict=True):
        first.setdefault((p, s), (digest, summary))
        provider_of_op = by_stage.setdefault((p, s), {})
        for op, provider in sorted(providers.items()):
            first_rank, other_provider = provider_of_op.setdefault(op, (rank, provider))
            if provider != other_provider and {provider, other_provider} <= interchangeable.get(op, frozenset()):
                notices.setdefault((p, s, op), f"rank {first_rank} uses {other_provider}, rank {rank} {provider}")
            elif provider != other_provider:
                raise UserError(
                    f"ranks {first_rank} and {rank} of one stage resolved {op} to different providers",
                    field=f"pipelines[{p}].stages[{s}].kernels", accepted="one provider per operator, by name",
                )  # fmt: skip
    if runtime.comm.rank == runtime.world.ranks[0]:
        called = {op for provider_of_op in by_stage.values() for op in provider_of_op} | {EVERY}
        stages = (stage for pipeline in runtime.here.plan.pipelines for stage in pipeline.stages)
        for op in sorted({op for stage in stages for op, _ in stage.kernels} - called):
            print(notice_line(f"kernels.{op} has no effect: this model never calls it"), flush=True)
        for (p, s, op), unlike_kernels in notices.items():
            stage_name = f"pipeline {p} stage {s}"
            print(
                notice_line(f"unlike chips of {stage_name} have unlike kernels for {op}: {unlike_kernels}"), flush=True
            )
        some_in_fp8 = any(op in FP8_PRODUCTS for provider_of_op in by_stage.values() for op in provider_of_op)
        for (p, s), (digest, summary) in sorted(first.items()):
            if some_in_fp8 and not any(op in FP8_PRODUCTS for op in by_stage[p, s]):
                summary = f"all in {str(runtime.stage_model.dtype).removeprefix('torch.')}; {summary}"
            print(f"kernels of pipeline {p} stage {s} ({digest}): {summary}", flush=True)


def check_kernels(kernels: KernelPlan, world: Group, platform: Platform) -> None:
    """Called on all ranks of the plan, before anything large is in the device's memory; the first one says how long it
    took.

    Raises:
        UserError: on all ranks, naming the first kernel that computes something else, and where.
    """
    begin = time.perf_counter()
    failures_here = wrong_kernels(
        used_kernels(kernels.registry, kernels.choices), platform.device, platform.synchronize
    )
    failures_of_ranks = world.gather_objects(failures_here, dict[str, str])
    ranks_by_kernel: dict[str, list[int]] = {}
    for rank, failures in zip(world.ranks, failures_of_ranks, strict=True):
        for kernel in failures:
            ranks_by_kernel.setdefault(kernel, []).append(rank)
    for kernel, ranks in ranks_by_kernel.items():
        op, failure = kernel.partition(":")[0], failures_of_ranks[world.ranks.index(ranks[0])][kernel]
        raise UserError(
            f"computes otherwise than its operator's definition on {plural(len(ranks), 'rank')} of {world.size} "
            f"({rank_ranges(ranks)}): {failure}", field="kernel", value=kernel,
            accepted=f"a kernel that passes `hetero-megatron plugins check`; --kernels {op}=PROVIDER for another one; "
            "other hardware for that rank; or --no-kernel-check",
        )  # fmt: skip
    if world.index == 0:
        duration = format_seconds(time.perf_counter() - begin)
        print(f"kernels checked against their definitions in {duration} (--no-kernel-check leaves it out)", flush=True)
