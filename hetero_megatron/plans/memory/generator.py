"""Memory of sampling: weights, keys and values of the answers that a pipeline samples at once, and what prompts and
draws work with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hetero_megatron.plans.canonical import Optimizer, Pipeline, Recompute, Stage
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.memory.of_plan import ITEM_BYTES, MemoryBytes
from hetero_megatron.plans.shares import rank_shares
from hetero_megatron.spec import ModelSpec, Share

DRAWN_ARRAYS = 6  # fp64 or int64, over rows and vocabulary, while a token is drawn (``generation/sampling.py``)


def sampling_stage(stage: Stage, rows: int, length: int) -> Stage:
    """What works of a stage where tokens come one by one: its first TP group, on whole sequences."""
    unit = replace(stage.units[0], sequences=(0, rows), tokens=((0, length),))
    return replace(
        stage, units=(unit,), recompute=Recompute(), optimizer=Optimizer(), kv=None, experts=(), weights=None,
        activations=None,
    )  # fmt: skip


def sampling_pipeline(pipeline: Pipeline, rows: int, length: int) -> Pipeline:
    """What works of a pipeline while it samples ``rows`` answers."""
    stages = tuple(sampling_stage(stage, rows, length) for stage in pipeline.stages)
    return replace(pipeline, micro_batch_size=rows, num_micro_batches=1, stages=stages, orders=(), in_flight=())


def head_bytes(compiled: CompiledPlan, dtype: str) -> int:
    """Of the logits of one token of each row, which the head is asked about."""
    rows = max(pipeline.micro_batch_size for pipeline in compiled.plan.pipelines)
    return rows * compiled.spec.vocab_size * ITEM_BYTES[dtype]


def generator_memory(
    compiled: CompiledPlan, dtype: str, forward: Mapping[int, MemoryBytes]
) -> dict[int, MemoryBytes]:
    """By rank; answers with their prompts fill sequences, at most.

    Args:
        forward: of a forward over such sequences, by rank, with logits of :func:`head_bytes`.
    """
    plan, spec, item = compiled.plan, compiled.spec, ITEM_BYTES[dtype]
    memory = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            drawn = DRAWN_ARRAYS * 8 * pipeline.micro_batch_size * spec.vocab_size if stage.head else 0
            for rank, share in rank_shares(spec, stage).items():
                of_rank, kept = forward[rank], _kept_inputs(pipeline, stage, plan.seq_length, spec, item)
                cache = cache_bytes(spec, stage, share, pipeline.micro_batch_size, plan.seq_length, item)
                working = max(of_rank.activations - kept, 0) + drawn
                memory[rank] = MemoryBytes(activations=working, second_model=of_rank.second_model + cache)
    return memory


def cache_bytes(spec: ModelSpec, stage: Stage, share: Share, rows: int, length: int, item: int) -> int:
    """Of keys and values, and states of linear attention, of ``rows`` sequences of ``length`` tokens on a rank."""
    heads = share.kv_heads[1] - share.kv_heads[0]
    total = 0
    for layer in stage.layer_indices():
        kind = spec.layer_kinds[layer % len(spec.layer_kinds)]
        if kind.mixer == "attention":
            total += 2 * rows * heads * length * spec.head_dim * item
        elif kind.linear and spec.delta is not None:
            states = share.value_heads[1] - share.value_heads[0]
            total += rows * states * spec.delta.key_dim * spec.delta.value_dim * max(item, 4)
    return total


def _kept_inputs(pipeline: Pipeline, stage: Stage, length: int, spec: ModelSpec, item: int) -> int:
    """Inputs of layers, which a forward for backward keeps and one of prompts does not: all but one."""
    tokens = pipeline.micro_batch_size * length // len(stage.ranks)
    return max(stage.num_layers - 1, 0) * tokens * spec.hidden_size * item
