"""What each rank of a stage works on in a micro-batch, and the bytes of one, by rank and chunk."""

from __future__ import annotations

from collections.abc import Iterator

from hetero_megatron.plans.canonical import Stage
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.fp8_checks import stage_fp8
from hetero_megatron.plans.memory.activations import RankWork, chunk_limit, kept_bytes, operand_bytes
from hetero_megatron.plans.memory.offloaded import layer_bytes
from hetero_megatron.plans.memory.split_backward import most_beside
from hetero_megatron.plans.routing import EVEN, Routing, mean_loads
from hetero_megatron.plans.shares import Islands, has_context
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import LOGITS_BYTES, layers_alone, layers_differ
from hetero_megatron.spec.tensors import untrained_layers


def logits_limit(stage: Stage, spec: ModelSpec, item: int, logits_bytes: int = LOGITS_BYTES) -> int | None:
    """:func:`chunk_limit` of a stage of a plan."""
    sizes = [(unit.micro_batch_tokens, unit.tp_split) for unit in stage.units] if stage.head else []
    return chunk_limit(spec, sizes, item, logits_bytes)


def stage_work(
    stage: Stage, spec: ModelSpec, item: int, logits_bytes: int = LOGITS_BYTES, routing: Routing = EVEN,
    fp8: Fp8 | None = None, islands: Islands = (),
) -> dict[int, tuple[RankWork, ...]]:  # fmt: skip
    """What each rank of a stage works on, by chunk."""
    limit = logits_limit(stage, spec, item, logits_bytes)
    dtype = stage_fp8(stage, fp8) if fp8 is not None else None
    recipe = dtype.recipe if dtype is not None else None
    loads = [mean_loads(spec, stage, range(*chunk), routing, islands) if spec.moe else None for chunk in stage.chunks]
    models = [layers_alone(spec, range(*chunk)) if layers_differ(spec) else None for chunk in stage.chunks]
    runs = _chunks(stage, untrained_layers(spec))
    chunks = [(*run, load, chunk_spec) for run, load, chunk_spec in zip(runs, loads, models, strict=True)]
    work = {}
    ahead = stage.activations.ahead if stage.activations is not None else 1
    for unit in stage.units:
        tokens, rows = unit.micro_batch_tokens, unit.sequences[1] - unit.sequences[0]
        for rank, weight in zip(unit.ranks, unit.tp_split, strict=True):
            work[rank] = tuple(
                RankWork(
                    layers, embed, head, stage.recompute.kind, first, tokens, item, sum(unit.tp_split) / weight,
                    unit.tp, limit if head else None, None if load is None else load[rank], recipe, rows, untrained,
                    offloaded, ahead, chunk_spec,
                ) for layers, embed, head, first, untrained, offloaded, load, chunk_spec in chunks
            )  # fmt: skip
    return work


def _chunks(stage: Stage, untrained: int) -> Iterator[tuple[int, bool, bool, int, int, int]]:
    """Of each run of layers (how many, embedding, head, how many of the stage's first recomputed layers, how many are
    before all that is trained, how many of the stage's first that are in host memory)."""
    passed, last = 0, len(stage.chunks) - 1
    offloaded = stage.activations.layers if stage.activations is not None else 0
    for c, (a, b) in enumerate(stage.chunks):
        full, hosted = (min(max(count - passed, 0), b - a) for count in (stage.recompute.layers, offloaded))
        yield b - a, stage.embed and c == 0, stage.head and c == last, full, min(untrained, b) if a == 0 else 0, hosted
        passed += b - a


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
