"""Bytes of activations that a rank holds, by formula: of layers, and of what products in fp8 keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul
from typing import TYPE_CHECKING, NamedTuple

from hetero_megatron.plans.canonical import Recompute
from hetero_megatron.plans.fp8 import backward_bytes
from hetero_megatron.schedule import Held
from hetero_megatron.schedule.actions import LOOKAHEAD, SEND_LAG
from hetero_megatron.spec import ModelSpec, shares
from hetero_megatron.spec.activation_bytes import (
    head_activation_bytes,
    head_operand_bytes,
    layer_activation_bytes,
    layer_operand_bytes,
    mlp_widths,
    module_activation_bytes,
    module_operand_bytes,
)
from hetero_megatron.spec.backward_bytes import (
    Cores,
    adapters_again_bytes,
    head_backward_bytes,
    layer_backward_bytes,
    norm_backward_bytes,
    scatter_bytes,
)
from hetero_megatron.spec.expert_load import ExpertLoad
from hetero_megatron.spec.flops import LOGITS_BYTES, common_columns, linear_layers, module_layer
from hetero_megatron.spec.lora import NF4_CHUNK, NF4_MAKING

NUMBERS = 16  # bytes of each token that norms and the like keep of a layer beside its activations
DATA = 128  # bytes of each token for its number, label, place and the like

if TYPE_CHECKING:
    from hetero_megatron.plans.memory.offloaded import LayerBytes


@dataclass(frozen=True)
class RankWork:
    """What one rank of a stage works on, for its activations; of several chunks, one.

    Attributes:
        layers, embed, head: of the stage. A stage without embedding receives activations, one without head sends them.
        recompute: none | selective | elementwise | full | first, which has ``first`` layers recomputed whole.
        tokens: rows x sequence length on this rank's unit; item: bytes per element.
        tp: the rank has 1/tp of heads and columns; shards: and an equal part of the tokens, of so many.
        limit: of the bytes of logits, where the stage's head goes through chunks (:func:`chunk_limit`), else None.
        load: of routed experts, in an average layer of these; None: of a plain TP group.
        fp8: recipe of the fp8 that linear modules compute in; None: the dtype of the weights.
        rows: sequences of the tokens.
        untrained: the first layers, to which no gradient goes, so that they keep nothing.
        offloaded: the first layers, whose activations are in host memory; ahead: whose copies are under way at once.
        layers_spec: a model of these layers alone, where layers have unlike mixers; None: they are as the model's
            average one.
    """

    layers: int
    embed: bool
    head: bool
    recompute: str
    first: int
    tokens: int
    item: int
    tp: float
    shards: int
    limit: int | None = None
    load: ExpertLoad | None = None
    fp8: str | None = None
    rows: int = 1
    untrained: int = 0
    offloaded: int = 0
    ahead: int = 1
    layers_spec: ModelSpec | None = None

    @property
    def full(self) -> int:
        """Layers that are recomputed whole."""
        return Recompute(self.recompute, self.first).whole(self.layers)


def chunk_limit(
    spec: ModelSpec, units: Iterable[tuple[int, Sequence[int]]], item: int, limit: int = LOGITS_BYTES
) -> int | None:
    """``limit``, where head and loss of a stage go through chunks of tokens, because the logits of a micro-batch, in at
    least fp32, are more bytes on one of its ranks; None: all at once. All ranks of a stage call the same operators.

    Args:
        units: (tokens, tp_split) of each of the stage's.
    """
    rows = 1 + spec.mtp_layers  # modules that predict further tokens go through the head, too
    exceeds = any(
        rows * tokens * max(item, 4) * widest_vocabulary(spec, tuple(split)) > limit for tokens, split in units
    )
    return limit if exceeds else None


@lru_cache(maxsize=1024)
def widest_vocabulary(spec: ModelSpec, tp_split: tuple[int, ...]) -> int:
    """Rows of the head on the rank that has most of them."""
    return max(stop - start for start, stop in (share.vocab for share in shares(spec, tp_split)))


def boundary_bytes(spec: ModelSpec, held: RankWork) -> int:
    """Bytes of one micro-batch's activations between two stages on this rank."""
    return round(held.tokens * spec.hidden_size * held.item / held.shards)


def kept_bytes(spec: ModelSpec, held: RankWork) -> int:
    """Bytes that one micro-batch keeps in a stage from forward to backward on the device: in its layers, for all of
    them the rotary tables, and in the head, or the output that the next stage gets."""
    from hetero_megatron.plans.memory.offloaded import in_host, layer_bytes

    spec, layers = held.layers_spec or spec, layer_bytes(spec, held)
    total = round(sum(layer.kept for layer in layers)) - in_host(layers) + beside_layers(spec, held)
    return total + (sum(ends_bytes(spec, held)) if held.head else 0)


def beside_layers(spec: ModelSpec, held: RankWork) -> int:
    """Bytes that one micro-batch keeps outside of layers and head: rotary tables, and what the next stage gets."""
    tables = sum(held.tokens * rope.width(spec.head_dim) * max(held.item, 4) for rope in spec.ropes)
    return tables + (0 if held.head else boundary_bytes(spec, held))


def ends_bytes(spec: ModelSpec, held: RankWork) -> tuple[int, int]:
    """Bytes that one micro-batch keeps (in head and loss, in modules that predict further tokens)."""
    sizes, count = (held.item, held.tp, held.shards), spec.mtp_layers
    head = head_activation_bytes(spec, (1 + count) * held.tokens, *sizes, held.limit)
    if not count:
        return head, 0
    kind = held.recompute if held.recompute != "first" else "none"
    return head, count * module_activation_bytes(spec, held.tokens, kind, *sizes, module_load(held))


def module_load(held: RankWork) -> ExpertLoad | None:
    """The load of a module's experts: as in a layer of the stage that is a mixture; None: of a plain TP group."""
    return replace(held.load, layers=1.0) if held.load is not None and held.load.layers else None


def host_kept_bytes(spec: ModelSpec, held: RankWork) -> int:
    """Bytes that one micro-batch keeps in host memory."""
    if not held.offloaded:
        return 0
    from hetero_megatron.plans.memory.offloaded import in_host, layer_bytes

    return in_host(layer_bytes(spec, held))


class ChunkMoments(NamedTuple):
    """Bytes of a chunk beside what a micro-batch keeps there, moment by moment.

    Attributes:
        logits, head: in the head, before its weight has a gradient and at the worst moment; 0 without one.
        layers: in backward of each layer, at the worst moment of it, less what the layers after it have given back.
        kept: of what is kept, what head and modules have, and what each layer has on the device.
        passing: messages between stages and numbers of tokens, at any moment.
        boundary: a gradient between two layers.
        brought: the gradient of a tied head, which autograd keeps until it adds the embedding's.
        embedding: in backward of the embedding, whose gradient is as large as itself before it is added to the sum.
    """

    logits: int
    head: int
    layers: tuple[int, ...]
    kept: tuple[int, tuple[int, ...]]
    passing: int
    boundary: int
    brought: int = 0
    embedding: int = 0

    @property
    def most(self) -> int:
        """At the worst moment of backward."""
        in_layers = max((0, *self.layers)) - self.kept[0] + self.brought
        return max(self.logits, self.head, in_layers, self.embedding) + self.passing


def working_bytes(
    spec: ModelSpec, held: RankWork, layers: Sequence[LayerBytes] | None = None, cores: Cores | None = None
) -> int:  # fmt: skip
    """Bytes beside what is kept, at the worst moment of a backward.

    That is in the head, or in a layer: in the last one when what the head kept is gone, and all others are still there,
    or in the last one that is run again, or of which more comes back from host memory. On top: receives that are
    posted, and gradients on their way to the stage before.

    Args:
        layers, cores: of a rank of a context group.
    """
    return backward_moments(spec, held, layers, cores).most


def backward_moments(
    spec: ModelSpec, held: RankWork, layers: Sequence[LayerBytes] | None = None, cores: Cores | None = None
) -> ChunkMoments:
    """The moments of which :func:`working_bytes` is the worst."""
    from hetero_megatron.plans.memory.offloaded import coming, layer_bytes, layer_models, layer_moments, load_of

    spec = held.layers_spec or spec
    tokens, boundary = held.tokens, boundary_bytes(spec, held)
    if _runs_forward_alone(held):
        forward = forward_bytes(spec, held)
        return ChunkMoments(0, 0, forward, (0, (0,) * held.layers), LOOKAHEAD * boundary, boundary)
    passed, head, in_head, logits = 0 if held.head else boundary, 0, 0, 0
    layers = layer_bytes(spec, held) if layers is None else layers
    cores = linear_cores(spec, held) if cores is None else cores
    sizes, in_fp8, models = (held.item, held.tp, held.shards), linear_bytes(spec, held), layer_models(spec, held)
    of_models = {
        id(x): layer_backward_bytes(x, tokens, *sizes, load_of(x, held), in_fp8, cores)
        for x in {id(x): x for x in models}.values()
    }
    again = [adapters_again_bytes(x, tokens, *sizes, held.head) if i < held.full else 0 for i, x in enumerate(models)]
    backward = [max(of_models[id(x)], size) for x, size in zip(models, again, strict=True)]
    in_layers = [round(x) for x in layer_moments(layers, held.ahead, backward, passed)]
    coming_back = round(coming(layers, held.ahead))
    if held.layers and held.tp > 1:  # or in forward, where the last layer's sums meet
        in_layers[-1] = max(in_layers[-1], round(_summing_bytes(spec, held)) - passed)
    if held.head:
        rows = (1 + spec.mtp_layers) * tokens
        head, modules = ends_bytes(spec, held)
        of_head = head_backward_bytes(spec, rows, held.item, held.tp, held.limit is not None)
        logits, in_head = (size + coming_back for size in of_head)
        # In the norm, whose input is still there.
        in_head = max(in_head, norm_backward_bytes(boundary, held.item) + boundary + coming_back - head)
        if modules:
            in_head, head = max(in_head, _in_module(spec, held) - head), head + modules
    moving = (not (held.embed and held.head)) * LOOKAHEAD + (not held.embed) * SEND_LAG
    kept = head, tuple(round(layer.kept - layer.host) for layer in layers)
    passing = moving * boundary + numbers_bytes(held)
    brought, of_embedding = embedding_gradients(spec, held)
    in_embedding = of_embedding + boundary - head - sum(kept[1])
    return ChunkMoments(logits, in_head, tuple(in_layers), kept, passing, boundary, brought, in_embedding)


def embedding_gradients(spec: ModelSpec, held: RankWork) -> tuple[int, int]:
    """(bytes of a tied head's gradient, which autograd keeps until it adds the embedding's, while chunks of logits add
    theirs to the sum; of all gradients of the embedding beside their sum, before they are added up)."""
    if not held.embed or spec.lora is not None:
        return 0, 0
    whole = round(spec.vocab_size * spec.hidden_size * held.item / held.tp)
    tied = spec.tied and held.head and held.limit is None
    return (whole, 3 * whole) if tied else (0, whole)


def linear_cores(spec: ModelSpec, held: RankWork) -> Cores | None:
    """Of a rank with all tokens, what backward of its linear attention works with; None where it has none."""
    if not linear_layers(spec):
        return None
    from hetero_megatron.spec.delta_bytes import delta_core_bytes

    recompute = held.recompute if held.full < held.layers else "full"
    return Cores(None, delta_core_bytes(spec, recompute, held.item, held.rows, held.tokens, held.tp) / held.tp)


def _runs_forward_alone(held: RankWork) -> bool:
    """Whether no gradient goes to any of its layers: one at a time is there."""
    return held.untrained == held.layers > 0 and not held.head


def forward_bytes(spec: ModelSpec, held: RankWork) -> tuple[int, ...]:
    """Bytes in forward of each layer, more than it keeps on the device: what goes to host memory or will be made again
    (of it, attention's part is gone when the MLP's is there), a weight of few bits, and what a layer and its parts put
    out; or what is added up over a TP group. Never more than in backward, unless something else is there as well."""
    from hetero_megatron.plans.memory.offloaded import layer_bytes

    spec = held.layers_spec or spec
    if _runs_forward_alone(held):
        whole = layer_activation_bytes(spec, held.tokens, "none", held.item, held.tp, held.shards, held.load)
        if spec.delta is not None and spec.delta.rule == "state_space_rule":
            # Its forward works with half of what its backward does, that of the gated delta rule with less than a
            # layer would keep.
            core = linear_cores(spec, replace(held, recompute="none", first=0))
            whole += 0 if core is None else round(core.linear / 2)
        return (whole,) * held.layers
    layers = layer_bytes(spec, held)
    row = held.tokens * held.item
    outputs, again = 3.0 * row * spec.hidden_size, math.inf
    if held.item == 2:  # what is normed, in fp32
        outputs += 4 * row * spec.hidden_size
    if spec.moe is None and spec.delta is None:
        attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        again = row * max((mlp_widths(spec) + 1) * spec.ffn_hidden_size, attention) / held.tp
    weight_elements = spec.hidden_size * common_columns(spec, 0.0) / held.tp
    weight = 0.0
    if spec.in_few_bits:
        weight = held.item * weight_elements + NF4_MAKING * min(NF4_CHUNK, weight_elements) * spec.in_nf4
    summed = _summing_bytes(spec, held) if held.tp > 1 else 0.0
    going = [sum(x.host for x in layers[max(i - held.ahead, 0) : i + 1]) for i in range(len(layers))]
    worked = [max(min(layer.again, again) + outputs + weight, summed) for layer in layers]
    return tuple(round(size + hosted) for size, hosted in zip(worked, going, strict=True))


def numbers_bytes(held: RankWork) -> int:
    """Bytes of numbers, labels and places of tokens, and of what norms keep of each, of the micro-batches in flight."""
    return round(held.tokens * (NUMBERS * held.layers / held.shards + DATA))


def _summing_bytes(spec: ModelSpec, held: RankWork) -> float:
    """Bytes in the forward of a layer while what its MLP put out is added up over the TP group: beside what it keeps,
    what its norms put out and the layer before it added, and what elementwise recompute will make again."""
    output_bytes = float(held.tokens * spec.hidden_size * held.item)
    summed = scatter_bytes(output_bytes, held.shards, held.item, held.rows) + 3 * output_bytes / held.shards
    if held.recompute != "elementwise" or spec.moe is not None:
        return summed
    return summed + output_bytes + held.tokens * held.item * spec.ffn_hidden_size / held.tp


def _in_module(spec: ModelSpec, held: RankWork) -> int:
    """Bytes beside what is kept at the worst moment of backward through a module that predicts further tokens: what its
    layer needs, and the gradients of what the head got of all modules."""
    module_spec, sizes = module_layer(spec), (held.item, held.tp, held.shards)
    worst = layer_backward_bytes(module_spec, held.tokens, *sizes, module_load(held))
    if held.recompute in ("full", "elementwise"):
        load = module_load(held)
        worst += layer_activation_bytes(module_spec, held.tokens, "none", *sizes, load)
        worst -= layer_activation_bytes(module_spec, held.tokens, held.recompute, *sizes, load)
    return worst + (1 + spec.mtp_layers) * boundary_bytes(spec, held)


def linear_bytes(spec: ModelSpec, held: RankWork) -> Callable[[float, float], float] | None:
    """Of a linear module in fp8 with so many (outputs, inputs), bytes of its backward; None: none is in fp8."""
    if held.fp8 is None:
        return None
    recipe, length, item, trained = held.fp8, held.tokens / held.rows, held.item, spec.lora is None
    return lambda n, k: backward_bytes(recipe, held.rows, length, n, k, item, trained)


def operand_bytes(spec: ModelSpec, held: RankWork) -> int:
    """Bytes that one micro-batch keeps in a stage from B_INPUT to W, where backward is split."""
    spec = held.layers_spec or spec
    sizes = (held.tokens, held.item, held.tp)
    total = held.layers * layer_operand_bytes(spec, *sizes, held.load)
    return total + (ends_operand_bytes(spec, held) if held.head else 0)


def ends_operand_bytes(spec: ModelSpec, held: RankWork) -> int:
    """The same of the head, and of modules that predict further tokens."""
    rows = (1 + spec.mtp_layers) * held.tokens
    head = head_operand_bytes(spec, rows, held.item, held.tp, held.limit is not None)
    if not spec.mtp_layers:
        return head
    module_bytes = module_operand_bytes(spec, held.tokens, held.item, held.tp, held.shards, module_load(held))
    return head + spec.mtp_layers * module_bytes


def activation_bytes(spec: ModelSpec, chunks: Sequence[RankWork], states: Iterable[Held]) -> int:
    """Bytes of activations that a rank holds at most, and of what whole backwards work with; ``states``: of its stage,
    from :func:`~hetero_megatron.schedule.held_states`."""
    kept = [kept_bytes(spec, chunk) for chunk in chunks]
    waiting = [operand_bytes(spec, chunk) for chunk in chunks]
    working = max(working_bytes(spec, chunk) for chunk in chunks)
    return most_held(kept, waiting, states) + working


def graph_bytes(spec: ModelSpec, chunks: Sequence[RankWork], states: Iterable[Held]) -> int:
    """Bytes that layers take as device graphs, beside their activations and what eager backward works with.

    Of each micro-batch in flight, a layer has both parts of its output and the gradients of both parts of its input to
    itself, and a chunk those of its ends and what forward of its last layer worked with. Chunks share nothing, though
    not all of them have most micro-batches in flight at once. Backward works in memory of its own.
    """
    states = list(states)
    most_in_flight = [max(counts[c] for counts, _ in states) for c in range(len(chunks))]
    kept = [kept_bytes(spec, chunk) for chunk in chunks]
    total = sum(map(mul, most_in_flight, kept)) - max(sum(map(mul, counts, kept)) for counts, _ in states)
    backward = 0
    for flying, chunk in zip(most_in_flight, chunks, strict=True):
        if not chunk.layers:
            continue
        spec = chunk.layers_spec or spec
        sizes = (chunk.item, chunk.tp, chunk.shards, chunk.load)
        unrecomputed = layer_activation_bytes(spec, chunk.tokens, "none", *sizes)
        # Recomputed whole, a layer takes the sum of its input: a copy, and two tensors of output where one was kept.
        hidden = 3 * chunk.layers + 2 * chunk.full + 4
        total += flying * (hidden * boundary_bytes(spec, chunk) + unrecomputed)
        recomputed_bytes = unrecomputed if chunk.full or chunk.recompute in ("selective", "elementwise") else 0
        worked = layer_backward_bytes(spec, chunk.tokens, *sizes, linear_bytes(spec, chunk))
        backward = max(backward, worked + recomputed_bytes)
    return total + backward


def most_held(kept: Sequence[int], waiting: Sequence[int], states: Iterable[Held]) -> int:
    """The most bytes at once; ``kept``, ``waiting``: of a micro-batch in each chunk before its backward, and between
    its B_INPUT and W."""
    return max(
        sum(map(mul, whole_counts, kept)) + sum(map(mul, split_counts, waiting))
        for whole_counts, split_counts in states
    )
