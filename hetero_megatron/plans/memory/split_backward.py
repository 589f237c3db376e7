"""Bytes of activations where backward is split: while B_INPUT goes through the layers, what they keep becomes operands
of W, which may be more.

In a B_INPUT the layers before the one that computes have what they keep, those after it the operands of their weight
gradients, and it has both: at the worst moment, in its activation, all that it keeps is still there, as are the
gradient that goes around the MLP (before and after a norm), that of what ``down_proj`` put out (after the gather), the
product's, those of gate and up, and one helper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import mul

from hetero_megatron.plans.memory.activations import (
    RankWork,
    boundary_bytes,
    embedding_gradients,
    ends_bytes,
    ends_operand_bytes,
    kept_bytes,
    linear_bytes,
    linear_cores,
    numbers_bytes,
    operand_bytes,
    working_bytes,
)
from hetero_megatron.plans.memory.offloaded import LayerBytes, layer_bytes, worst_layer
from hetero_megatron.schedule.actions import LOOKAHEAD, SEND_LAG, Moment
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.activation_bytes import layer_operand_bytes
from hetero_megatron.spec.backward_bytes import Cores, layer_backward_bytes
from hetero_megatron.spec.flops import linear_layers, mlp_layers


def splitting_bytes(
    spec: ModelSpec, held: RankWork, layers: Sequence[LayerBytes] | None = None, kept: int | None = None,
    cores: Cores | None = None,
) -> int:  # fmt: skip
    """Bytes of one micro-batch of a chunk at the worst moment of its B_INPUT, all that it kept and will wait among
    them, with messages on their way.

    Args:
        layers, kept, cores: of a rank of a context group, whose attention is not that of :class:`RankWork`: bytes of
            the layers, on the device and in host memory; what the chunk keeps on the device; what cores work with.
    """
    spec = held.layers_spec or spec
    head, of_head = (sum(ends_bytes(spec, held)), ends_operand_bytes(spec, held)) if held.head else (0, 0)
    sizes = (held.item, held.tp, held.shards, held.load, linear_bytes(spec, held))
    cores = linear_cores(spec, held) if cores is None else cores
    in_layer = layer_backward_bytes(spec, held.tokens, *sizes, cores, split=True)
    kept = kept_bytes(spec, held) if kept is None else kept
    peak = kept + working_bytes(spec, replace(held, offloaded=0)) if held.head else 0  # operands of the head are made
    layers = layer_bytes(spec, held) if layers is None else layers
    # All that no layer has: rotary tables, and the output that the next stage got.
    on_device = sum(layer.kept - layer.host for layer in layers)
    outside_layers = kept - head - on_device
    if held.recompute == "elementwise" and not held.full and spec.moe is None and held.item == 2:
        # What is normed is made again while all gradients before it wait.
        normed = held.tokens * held.item * spec.hidden_size
        layers = [replace(layer, again=layer.again + normed) for layer in layers]
    operands = layer_operand_bytes(spec, held.tokens, held.item, held.tp, held.load)
    in_backward = outside_layers + of_head + in_layer + _moving(held) * boundary_bytes(spec, held)
    in_backward += numbers_bytes(held)
    in_layers = on_device + worst_layer(layers, held.ahead, 0.0, 0.0, operands)
    in_embedding = held.layers * operands - in_layer + boundary_bytes(spec, held) + embedding_gradients(spec, held)[1]
    return round(max(peak, in_backward + max(in_layers, in_embedding)))


def _moving(held: RankWork) -> int:
    """Messages of a micro-batch's size that are posted or on their way."""
    return (not (held.embed and held.head)) * LOOKAHEAD + (not held.embed) * SEND_LAG


def _weight_working(spec: ModelSpec, held: RankWork) -> float:
    """While W makes the gradients of weights: the largest one before it is added up, and messages."""
    spec = held.layers_spec or spec
    if spec.lora is not None:
        return _moving(held) * boundary_bytes(spec, held)
    columns = 2 * max(spec.ffn_hidden_size * (mlp_layers(spec) > 0), spec.num_heads * spec.head_dim) / held.tp
    projected = spec.delta.projected / held.tp if spec.delta is not None and linear_layers(spec) else 0.0
    vocabulary = spec.vocab_size / held.tp if held.head else 0.0
    widest = (held.item if held.item == 2 else 0) * spec.hidden_size * max(columns, projected, vocabulary)
    return widest + _moving(held) * boundary_bytes(spec, held)


def most_beside(spec: ModelSpec, held: RankWork) -> int:
    """Bytes that any backward of a micro-batch, whole, B_INPUT or W, works with beside what is kept or waits then."""
    of_input = splitting_bytes(spec, held) - kept_bytes(spec, held)
    return max(working_bytes(spec, held), of_input, round(_weight_working(spec, held)))


def split_activation_bytes(spec: ModelSpec, chunks: Sequence[RankWork], moments: Iterable[Moment]) -> int:
    """Most bytes of activations and of what backward works with, by what comes at each moment of a rank's stage."""
    kept = [kept_bytes(spec, chunk) for chunk in chunks]
    working = [working_bytes(spec, chunk) for chunk in chunks]
    return most_at_moments(spec, chunks, moments, kept, working, [splitting_bytes(spec, chunk) for chunk in chunks])


def most_at_moments(
    spec: ModelSpec, chunks: Sequence[RankWork], moments: Iterable[Moment], kept: Sequence[int],
    working: Sequence[int], splitting: Sequence[int],
) -> int:  # fmt: skip
    """The same; by chunk, what a micro-batch keeps, what a whole backward works with, :func:`splitting_bytes`."""
    waiting = [operand_bytes(spec, chunk) for chunk in chunks]
    weights = [_weight_working(spec, chunk) for chunk in chunks]
    split_working = [size - chunk_kept for size, chunk_kept in zip(splitting, kept, strict=True)]
    working_of_kind: dict[str, Sequence[float]] = {"B": working, "B_INPUT": split_working, "W": weights}
    return round(max(
        sum(map(mul, whole_counts, kept)) + sum(map(mul, split_counts, waiting)) + working_of_kind[kind][chunk]
        for whole_counts, split_counts, kind, chunk in moments
    ))  # fmt: skip
