"""What each rank of a plan needs in memory, by formula. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_megatron.cluster import format_bytes
from hetero_megatron.parallel.buckets import make_buckets, tensor_holders
from hetero_megatron.parallel.context_plan import ContextGroup, Member, StageContext, seen_tokens, stage_contexts
from hetero_megatron.plan import Plan, Stage, rank_ranges
from hetero_megatron.schedule import generate, in_flight
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import head_activation_bytes, layer_activation_bytes

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank: weights, accumulated gradients, optimizer (moments, and fp32 masters of 16-bit weights),
    activations of the micro-batches in flight, and what is packed, received and summed when gradients travel."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        # Buckets travel when most activations of the last micro-batch are gone.
        return self.weights + self.gradients + self.optimizer + max(self.activations, self.buffers)


def estimate_memory(plan: Plan, spec: ModelSpec, dtype: str, moments: int = 2) -> dict[int, Memory]:
    """Memory of every rank; ``moments`` per element: 2 for Adam, 1 for SGD."""
    item = ITEM_BYTES[dtype]
    wide = max(item, 4)
    holders = tensor_holders(plan, spec)
    held, owned, buffers = (dict.fromkeys(plan.ranks, 0) for _ in range(3))
    for layout in holders.values():
        for rank in layout.ranks:
            held[rank] += layout.elements(rank)
    for bucket in make_buckets(plan, spec):
        for rank in bucket.ranks:
            mine = sum(o.elements(rank) for o in bucket.owners.values())
            given = sum(h.elements(rank) for h in bucket.holders.values()) - mine
            taken = mine * (len(bucket.ranks) - 1)
            owned[rank] += mine
            if len(bucket.ranks) > 1:
                # Every bucket is sent before the first is waited for, so all of them travel at once.
                buffers[rank] += wide * (given + taken + mine)
    activations = _activations(plan, spec, item)
    master = 4 if item == 2 else 0
    return {
        rank: Memory(
            held[rank] * item,
            held[rank] * wide,
            owned[rank] * (moments * wide + master),
            activations[rank],
            buffers[rank],
        )
        for rank in plan.ranks
    }


def _activations(plan: Plan, spec: ModelSpec, item: int) -> dict[int, int]:
    out: dict[int, int] = {}
    for pipeline in plan.pipelines:
        alive = in_flight(generate(plan.schedule, len(pipeline.stages), pipeline.num_micro_batches))
        for stage, count in zip(pipeline.stages, alive, strict=True):
            for unit in stage.units:
                tokens = (unit.sequences[1] - unit.sequences[0]) * unit.num_tokens
                for rank, weight in zip(unit.ranks, unit.tp_split, strict=True):
                    tp = sum(unit.tp_split) / weight
                    out[rank] = count * _stage_activations(stage, spec, tokens, item, tp)
            for context in stage_contexts(spec, stage, plan.seq_length):
                for group in context.groups:
                    for member in group.members:
                        out[member.rank] += count * _context_activations(context, group, member, stage, item)
    return out


def _context_activations(
    context: StageContext, group: ContextGroup, member: Member, stage: Stage, item: int
) -> int:
    """Bytes that attention of a context member keeps beyond its own tokens': queries, keys, values, output and
    log-sum-exp are of the group's tokens and of the heads that the rank computes."""
    spec, kind = context.spec, stage.recompute.kind
    rows = stage.replicas[0][1] - stage.replicas[0][0]
    layers = {"none": stage.num_layers, "first": stage.num_layers - stage.recompute.layers}.get(kind, 0)
    keys = seen_tokens(group.tokens) if context.transport == "gather" else group.tokens
    own, seen = (sum(b - a for a, b in tokens) for tokens in (member.tokens, keys))
    q, kv = (b - a for a, b in (member.computed.q_heads, member.computed.kv_heads))
    held_q, held_kv = (b - a for a, b in (member.held.q_heads, member.held.kv_heads))
    there = item * spec.head_dim * 2 * (group.num_tokens * q + seen * kv) + 4 * group.num_tokens * q
    here = item * spec.head_dim * own * (held_q + 2 * held_kv) + 4 * own * held_q
    return layers * rows * max(there - here, 0)


def _stage_activations(stage: Stage, spec: ModelSpec, tokens: int, item: int, tp: float) -> int:
    """Bytes that one micro-batch keeps in a stage, and one layer's worth while a recomputed layer runs again."""
    kind, first = stage.recompute.kind, stage.recompute.layers
    full = {"full": stage.num_layers, "first": first}.get(kind, 0)
    rest = "selective" if kind == "selective" else "none"
    total = full * layer_activation_bytes(spec, tokens, "full", item, tp)
    total += (stage.num_layers - full) * layer_activation_bytes(spec, tokens, rest, item, tp)
    total += layer_activation_bytes(spec, tokens, "none", item, tp) if full else 0
    return total + (head_activation_bytes(spec, tokens, item, tp) if stage.head else 0)


def format_memory(memory: dict[int, Memory]) -> str:
    """A table with one row per run of ranks whose memory is the same."""
    rows: list[tuple[list[int], Memory]] = []
    for rank, needs in sorted(memory.items()):
        same = next((ranks for ranks, other in rows if other == needs), None)
        if same is None:
            rows.append(([rank], needs))
        else:
            same.append(rank)
    heads = ("weights", "gradients", "optimizer", "activations", "buffers", "total")
    lines = ["estimated memory per rank", f"{'ranks':<16}" + "".join(f"{h:>13}" for h in heads)]
    for ranks, needs in rows:
        values = [getattr(needs, head) for head in heads]
        lines.append(f"{rank_ranges(ranks):<16}" + "".join(f"{format_bytes(v):>13}" for v in values))
    return "\n".join(lines)
