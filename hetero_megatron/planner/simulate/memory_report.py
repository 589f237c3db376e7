"""Memory of each rank of a plan, and by how much ranks exceed their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.cluster import format_bytes
from hetero_megatron.errors import UserError
from hetero_megatron.plan import Plan, Stage, Unit
from hetero_megatron.plan.buckets import IN_FLIGHT, Bucket, make_buckets
from hetero_megatron.plan.experts import rank_shares
from hetero_megatron.plan.fp8 import Fp8
from hetero_megatron.plan.fp8_checks import stage_fp8
from hetero_megatron.plan.memory import (
    ITEM_BYTES,
    MemoryBytes,
    RankWork,
    activation_bytes,
    buffer_bytes,
    chunk_limit,
    graph_bytes,
    host_bytes,
    kept_bytes,
    operand_bytes,
    saved_in_int8,
    state_bytes,
    working_bytes,
)
from hetero_megatron.plan.pipeline_schedule import ADAPTIVE, pipeline_schedule
from hetero_megatron.plan.routing import EVEN, Routing, mean_loads
from hetero_megatron.planner.context.activations import context_activations
from hetero_megatron.schedule import Held, generate, held_states
from hetero_megatron.spec import ModelSpec, stage_tensors, tensor_box
from hetero_megatron.spec.expert_load import ExpertLoad
from hetero_megatron.spec.flops import LOGITS_BYTES
from hetero_megatron.words import plural, rank_ranges

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
    known: dict[tuple[int, ...], tuple[Ints, Ints, Ints]] = {}  # held, owned, [2, ranks] as in recent, of a bucket
    for bucket in buckets if buckets is not None else make_buckets(plan, spec):
        key = (*map(id, bucket.holders.values()), *map(id, bucket.owners.values()))
        if key not in known:
            whole, mine = (
                np.sum([layout.counts() for layout in layouts.values()], axis=0)
                for layouts in (bucket.holders, bucket.owners)
            )
            known[key] = whole, mine, _buffers(bucket, whole, mine, item)
        if bucket.ranks not in places:
            places[bucket.ranks] = np.array([index[r] for r in bucket.ranks], np.int64)
        at, (whole, mine, moving) = places[bucket.ranks], known[key]
        held[at] += whole
        owned[at] += mine
        last = np.concatenate([recent[:, 1:, at], moving[:, None]], axis=1)
        recent[:, :, at] = last
        first_added = last[:, 0].max(axis=0) + last[0, 1:].sum(axis=0)
        buffers[at] = np.maximum.reduce([buffers[at], first_added, moving.max(axis=0)])
    frozen = _frozen(plan, spec, item) if spec.lora is not None else {}
    offloading = {r for p in plan.pipelines for s in p.stages if s.optimizer.offload for r in s.ranks}
    for rank, has, owns, most in zip(plan.ranks, held.tolist(), owned.tolist(), buffers.tolist(), strict=True):
        more, saved = frozen.get(rank, (0, 0))
        weights, gradients, optimizer = state_bytes(has + more, owns, item, moments, has, saved)
        states = {"optimizer": 0, "host": host_bytes(owns, moments)} if rank in offloading else {"optimizer": optimizer}
        out[rank] = replace(out[rank], weights=weights, gradients=gradients, buffers=most, **states)
    return out


def _frozen(plan: Plan, spec: ModelSpec, item: int) -> dict[int, tuple[int, int]]:
    """(elements that each rank holds and that are not trained, bytes that those in 8 bits save)."""
    found: dict[int, tuple[int, int]] = {}
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
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
        if plan.schedule == ADAPTIVE:
            states = held_states(pipeline_schedule(plan, pipeline))
        else:
            stages, count = len(pipeline.stages), pipeline.num_micro_batches
            states = _held_states(plan.schedule, stages, count, pipeline.chunks, pipeline.in_flight)
        for stage, held in zip(pipeline.stages, states, strict=True):
            limit = _logits_limit(stage, spec, item, logits_bytes)
            loads = [mean_loads(spec, stage, range(*chunk), routing, plan.islands) for chunk in stage.chunks]
            for unit in stage.units:
                for rank, weight in zip(unit.ranks, unit.tp_split, strict=True):
                    mine = [load[rank] for load in loads]
                    chunks = _chunks(stage, unit, sum(unit.tp_split) / weight, item, limit, mine, fp8)
                    if (chunks, held) not in known:
                        activations = activation_bytes(spec, chunks, held)
                        beside = graph_bytes(spec, chunks, held) if graphs else 0
                        known[chunks, held] = MemoryBytes(activations=activations, graphs=beside)
                    out[rank] = known[chunks, held]
            out |= context_activations(plan, spec, stage, chunks, held, item)
    return out


def micro_batch_bytes(
    stage: Stage, spec: ModelSpec, item: int, routing: Routing = EVEN, fp8: Fp8 | None = None
) -> dict[int, list[tuple[int, int, int]]]:
    """By rank and chunk, bytes of one micro-batch in a stage without context groups: (from F to its backward, from
    B_INPUT to W, what a backward works with)."""
    limit, found = _logits_limit(stage, spec, item, LOGITS_BYTES), dict[int, list[tuple[int, int, int]]]()
    loads = [mean_loads(spec, stage, range(*chunk), routing) for chunk in stage.chunks]
    for unit in stage.units:
        for rank, weight in zip(unit.ranks, unit.tp_split, strict=True):
            mine = [load[rank] for load in loads]
            chunks = _chunks(stage, unit, sum(unit.tp_split) / weight, item, limit, mine, fp8)
            found[rank] = [(kept_bytes(spec, x), operand_bytes(spec, x), working_bytes(spec, x)) for x in chunks]
    return found


def _logits_limit(stage: Stage, spec: ModelSpec, item: int, logits_bytes: int) -> int | None:
    if not stage.head:
        return None
    sizes = [(unit.micro_batch_tokens, unit.tp_split) for unit in stage.units]
    return chunk_limit(spec, sizes, item, logits_bytes)


def _chunks(
    stage: Stage, unit: Unit, tp: float, item: int, limit: int | None, loads: Sequence[ExpertLoad | None],
    fp8: Fp8 | None,
) -> tuple[RankWork, ...]:  # fmt: skip
    """What a rank works on in each chunk of its stage."""
    found, before = [], 0
    mine, rows = stage_fp8(stage, fp8), unit.sequences[1] - unit.sequences[0]
    last = len(stage.chunks) - 1
    for c, (a, b) in enumerate(stage.chunks):
        first = min(max(stage.recompute.layers - before, 0), b - a)
        before += b - a
        embed, head = stage.embed and c == 0, stage.head and c == last
        found.append(RankWork(
            b - a, embed, head, stage.recompute.kind, first, unit.micro_batch_tokens, item, tp, unit.tp,
            limit if head else None, loads[c], mine.recipe if mine is not None else None, rows,
        ))  # fmt: skip
    return tuple(found)


@lru_cache(maxsize=64)
def _held_states(
    schedule: str, stages: int, micro_batches: int, chunks: int, caps: tuple[int, ...]
) -> tuple[tuple[Held, ...], ...]:
    return held_states(generate(schedule, stages, micro_batches, chunks, caps))


@dataclass(frozen=True)
class OverLimit:
    """A rank that needs ``over`` bytes more than its ``limit``."""

    rank: int
    chip: str
    need: int
    limit: int

    @property
    def over(self) -> int:
        return self.need - self.limit

    def __str__(self) -> str:
        return (
            f"rank {self.rank} ({self.chip}) needs {format_bytes(self.need)} of {format_bytes(self.limit)} usable: "
            f"over by {format_bytes(self.over)}"
        )


def over_limit(
    memory: Mapping[int, MemoryBytes], limits: Mapping[int, int], chips: Mapping[int, str]
) -> tuple[OverLimit, ...]:
    """The ranks that exceed their limit, worst first."""
    found = [OverLimit(r, chips[r], m.total, limits[r]) for r, m in memory.items() if m.total > limits[r]]
    return tuple(sorted(found, key=lambda o: (-o.over, o.rank)))


def refuse(over: tuple[OverLimit, ...], memory: Mapping[int, MemoryBytes], where: str = "") -> UserError:
    """The error for a plan that does not fit: its worst rank, what fills it, and what would help most."""
    worst = over[0]
    largest = memory[worst.rank].largest
    bytes_ = format_bytes(memory[worst.rank].parts()[largest])
    help_by = {
        "activations": "recompute: full on its stage, a smaller micro_batch_size, or fewer layers there",
        "graphs": "the run without --cuda-graph-impl local, or fewer micro-batches in flight",
        "overhead": "a chip with more memory",
        "communicators": "fewer ranks in groups and fewer groups, or communicators: of the chip in the cluster file",
    }
    more = f"; {plural(len(over), 'rank')} do not fit" if len(over) > 1 else ""
    return UserError(
        f"the plan does not fit: {worst}{more}. Most of it is {largest}, {bytes_}",
        field="memory", where=where,
        accepted=help_by.get(
            largest, "more tp, fewer layers on its stage, more replicas that share the optimizer, or "
            "optimizer: {offload: true}",
        ),
    )  # fmt: skip


def format_memory(memory: Mapping[int, MemoryBytes]) -> str:
    """A table with one row per set of ranks with equal memory."""
    rows: dict[MemoryBytes, list[int]] = {}
    for rank, needs in sorted(memory.items()):
        rows.setdefault(needs, []).append(rank)
    heads = ["weights", "gradients", "optimizer", "activations", "buffers"]
    heads += ["graphs", "overhead", "communicators", "total", "host"]
    for head in ("graphs", "overhead", "communicators", "host"):
        if not any(getattr(needs, head) for needs in rows):
            heads.remove(head)
    lines = ["estimated memory per rank", f"{'ranks':<16}" + "".join(f"{h:>13}" for h in heads)]
    for needs, ranks in rows.items():
        values = [getattr(needs, head) for head in heads]
        lines.append(f"{rank_ranges(ranks):<16}" + "".join(f"{format_bytes(v):>13}" for v in values))
    return "\n".join(lines)
