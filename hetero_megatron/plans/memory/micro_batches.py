"""Bytes of one micro-batch of a stage, by rank and chunk."""

from __future__ import annotations

from hetero_megatron.plans.canonical import Stage
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.memory.activations import kept_bytes, operand_bytes
from hetero_megatron.plans.memory.of_plan import stage_work
from hetero_megatron.plans.memory.offloaded import layer_bytes
from hetero_megatron.plans.memory.split_backward import most_beside
from hetero_megatron.plans.routing import EVEN, Routing
from hetero_megatron.plans.shares import has_context
from hetero_megatron.spec import ModelSpec


def micro_batch_bytes(
    stage: Stage, spec: ModelSpec, item: int, routing: Routing = EVEN, fp8: Fp8 | None = None
) -> dict[int, list[tuple[int, int, int]]]:
    """By rank and chunk, bytes of one micro-batch in a stage without context groups: (from F to its backward, from
    B_INPUT to W, what a backward works with, split or not)."""
    return {
        rank: [(kept_bytes(spec, x), operand_bytes(spec, x), most_beside(spec, x)) for x in chunks]
        for rank, chunks in stage_work(stage, spec, item, routing=routing, fp8=fp8).items()
    }


def host_layers(
    stage: Stage, spec: ModelSpec, seq_length: int, item: int, routing: Routing = EVEN, fp8: Fp8 | None = None
) -> dict[int, list[list[float]]]:
    """By rank and chunk, bytes of a micro-batch in host memory of each layer."""
    work = stage_work(stage, spec, item, routing=routing, fp8=fp8)
    sizes_of_rank = {
        rank: [[layer.host for layer in layer_bytes(spec, x)] for x in chunks] for rank, chunks in work.items()
    }
    if not has_context(stage, seq_length):
        return sizes_of_rank
    from hetero_megatron.plans.memory.context_members import context_host_layers

    return sizes_of_rank | context_host_layers(spec, stage, seq_length, work)
