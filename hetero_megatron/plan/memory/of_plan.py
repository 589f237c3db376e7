"""Memory of each rank of a plan, by the formulas of :mod:`.states`, :mod:`.activations` and :mod:`.context_groups`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.plan.buckets import IN_FLIGHT, Bucket, make_buckets
from hetero_megatron.plan.canonical import Plan, Stage
from hetero_megatron.plan.experts import Islands, rank_shares
from hetero_megatron.plan.fp8 import Fp8
from hetero_megatron.plan.fp8_checks import stage_fp8
from hetero_megatron.plan.memory.activations import (
    RankWork,
    activation_bytes,
    chunk_limit,
    graph_bytes,
    kept_bytes,
    operand_bytes,
    working_bytes,
)
from hetero_megatron.plan.memory.context_groups import context_activations
from hetero_megatron.plan.memory.divided import divided_bytes
from hetero_megatron.plan.memory.states import (
    ITEM_BYTES,
    MemoryBytes,
    buffer_bytes,
    host_bytes,
    saved_in_int8,
    state_bytes,
)
from hetero_megatron.plan.pipeline_schedule import held_by_stages
from hetero_megatron.plan.routing import EVEN, Routing, mean_loads
from hetero_megatron.spec import ModelSpec, stage_tensors, tensor_box
from hetero_megatron.spec.flops import LOGITS_BYTES

Ints = NDArray[np.int64]


def estimate_memory(
    plan: Plan, spec: ModelSpec, dtype: str, moments: int = 2, buckets: tuple[Bucket, ...] | None = None,
    logits_bytes: int = LOGITS_BYTES, routing: Routing = EVEN, fp8: Fp8 | None = None, graphs: bool = False,
) -> dict[int, MemoryBytes]:  # fmt: skip
    """Memory of every rank in bytes, without the framework's overhead and communicators.

    Args:
        moments: optimizer moments per element: 2 for Adam, 1 for SGD with momentum.
        buckets: those of the plan, if already made.
        logits_bytes: size of a micro-batch's logits on a rank above which head and loss run in chunks of tokens.
        routing: how tokens divide over experts, which what they keep depends on.
        fp8: what linear modules compute in, where their stage does not say otherwise.
        graphs: layers run as device graphs.
    """
    item = ITEM_BYTES[dtype]
    out = plan_activations(plan, spec, item, logits_bytes, routing, fp8, graphs)
    index = {rank: i for i, rank in enumerate(plan.ranks)}
    held, owned, buffers = (np.zeros(len(index), np.int64) for _ in range(3))
    # Bytes of each rank's latest buckets, in the order of sending: [under way | being summed, IN_FLIGHT, ranks].
    recent = np.zeros((2, IN_FLIGHT, len(index)), np.int64)
    places: dict[tuple[int, ...], Ints] = {}
    known: dict[object, tuple[Ints, Ints, Ints]] = {}  # held, owned, [2, ranks] as in recent, of a bucket
    buckets = buckets if buckets is not None else make_buckets(plan, spec)
    divided, kept = divided_bytes(plan, spec.tied, buckets, item), np.zeros(len(index), np.int64)
    for bucket in buckets:
        key = bucket.layout_key
        if key not in known:
            whole, mine = bucket.counts()
            known[key] = whole, mine, _buffers(bucket, whole, mine, item)
        if bucket.ranks not in places:
            places[bucket.ranks] = np.array([index[r] for r in bucket.ranks], np.int64)
        at, (whole, mine, moving) = places[bucket.ranks], known[key]
        if bucket.weights is not None:
            kept[at] += mine
            continue
        held[at] += whole
        owned[at] += mine
        last = np.concatenate([recent[:, 1:, at], moving[:, None]], axis=1)
        recent[:, :, at] = last
        first_added = last[:, 0].max(axis=0) + last[0, 1:].sum(axis=0)
        buffers[at] = np.maximum.reduce([buffers[at], first_added, moving.max(axis=0)])
    frozen = _frozen(plan, spec, item) if spec.lora is not None else {}
    columns = (column.tolist() for column in (held, owned, kept, buffers))
    for rank, has, owns, keeps, most in zip(plan.ranks, *columns, strict=True):
        more, saved = frozen.get(rank, (0, 0))
        weights, gradients, optimizer = state_bytes(has + more, owns, item, moments, has, saved)
        gathered, moved = divided.get(rank, (0, 0))
        weights, gradients = weights + gathered, gradients + moved + keeps * max(item, 4)
        optimizer += keeps * max(item, 4) * (moments + 1)  # masters are copies in any dtype
        host = 0
        if rank in plan.offloading:
            optimizer, host = 0, host_bytes(owns + keeps, moments)
        states = {"weights": weights, "gradients": gradients, "optimizer": optimizer, "host": host}
        out[rank] = replace(out[rank], buffers=most, **states)
    return out


def _frozen(plan: Plan, spec: ModelSpec, item: int) -> dict[int, tuple[int, int]]:
    """(elements that each rank holds and that are not trained, bytes that those in 8 bits save)."""
    found: dict[int, tuple[int, int]] = {}
    for stage in plan.stages:
        tensors = stage_tensors(spec, stage.layer_indices(), stage.embed, stage.head)
        held = rank_shares(spec, stage)
        sizes = {
            share: (
                sum(tensor_box(t, share).size for t in tensors if not t.trained), saved_in_int8(tensors, share, item)
            ) for share in {*held.values()}
        }  # fmt: skip
        found |= {rank: sizes[share] for rank, share in held.items()}
    return found


def _buffers(bucket: Bucket, held: Ints, owned: Ints, item: int) -> Ints:
    """[2, ranks] bytes while the bucket is under way, and while it is summed."""
    if len(bucket.ranks) == 1:
        return np.zeros((2, 1), np.int64)
    return np.array(buffer_bytes(held, owned, held.sum() / owned.sum(), item, bucket.dense)).astype(np.int64)


def plan_activations(
    plan: Plan, spec: ModelSpec, item: int, logits_bytes: int = LOGITS_BYTES, routing: Routing = EVEN,
    fp8: Fp8 | None = None, graphs: bool = False,
) -> dict[int, MemoryBytes]:  # fmt: skip
    """Only the activations of every rank, and what ``graphs`` take beside them."""
    out: dict[int, MemoryBytes] = {}
    known: dict[tuple[object, ...], MemoryBytes] = {}
    for pipeline in plan.pipelines:
        for stage, held in zip(pipeline.stages, held_by_stages(plan, pipeline), strict=True):
            work = stage_work(stage, spec, item, logits_bytes, routing, fp8, plan.islands)
            for rank, chunks in work.items():
                if (chunks, held) not in known:
                    activations = activation_bytes(spec, chunks, held)
                    beside = graph_bytes(spec, chunks, held) if graphs else 0
                    known[chunks, held] = MemoryBytes(activations=activations, graphs=beside)
                out[rank] = known[chunks, held]
            with_context = context_activations(spec, stage, plan.seq_length, work, held)
            out |= {rank: MemoryBytes(activations=size) for rank, size in with_context.items()}
    return out


def micro_batch_bytes(
    stage: Stage, spec: ModelSpec, item: int, routing: Routing = EVEN, fp8: Fp8 | None = None
) -> dict[int, list[tuple[int, int, int]]]:
    """By rank and chunk, bytes of one micro-batch in a stage without context groups: (from F to its backward, from
    B_INPUT to W, what a backward works with)."""
    return {
        rank: [(kept_bytes(spec, x), operand_bytes(spec, x), working_bytes(spec, x)) for x in chunks]
        for rank, chunks in stage_work(stage, spec, item, routing=routing, fp8=fp8).items()
    }


def logits_limit(stage: Stage, spec: ModelSpec, item: int, logits_bytes: int = LOGITS_BYTES) -> int | None:
    """:func:`chunk_limit` of a stage of a plan."""
    sizes = [(unit.micro_batch_tokens, unit.tp_split) for unit in stage.units] if stage.head else []
    return chunk_limit(spec, sizes, item, logits_bytes)


def stage_work(
    stage: Stage, spec: ModelSpec, item: int, logits_bytes: int = LOGITS_BYTES, routing: Routing = EVEN,
    fp8: Fp8 | None = None, islands: Islands = (),
) -> dict[int, tuple[RankWork, ...]]:  # fmt: skip
    """What each rank of a stage works on, by chunk."""
    limit, dtype = logits_limit(stage, spec, item, logits_bytes), stage_fp8(stage, fp8)
    recipe = dtype.recipe if dtype is not None else None
    loads = [mean_loads(spec, stage, range(*chunk), routing, islands) for chunk in stage.chunks]
    chunks = [(*chunk, load) for chunk, load in zip(_chunks(stage), loads, strict=True)]
    found = {}
    for unit in stage.units:
        tokens, rows = unit.micro_batch_tokens, unit.sequences[1] - unit.sequences[0]
        for rank, weight in zip(unit.ranks, unit.tp_split, strict=True):
            found[rank] = tuple(
                RankWork(
                    layers, embed, head, stage.recompute.kind, first, tokens, item, sum(unit.tp_split) / weight,
                    unit.tp, limit if head else None, load[rank], recipe, rows,
                ) for layers, embed, head, first, load in chunks
            )  # fmt: skip
    return found


def _chunks(stage: Stage) -> Iterator[tuple[int, bool, bool, int]]:
    """Of each run of layers (how many, embedding, head, how many of the stage's first recomputed layers)."""
    before, last = 0, len(stage.chunks) - 1
    for c, (a, b) in enumerate(stage.chunks):
        first = min(max(stage.recompute.layers - before, 0), b - a)
        yield b - a, stage.embed and c == 0, stage.head and c == last, first
        before += b - a
