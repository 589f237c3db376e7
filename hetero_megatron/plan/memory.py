"""What a rank needs in memory, by formula: the one set that planning, prediction and training use. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import mul
from typing import Any

from hetero_megatron.plan.buckets import BUCKET_BYTES, IN_FLIGHT, backward_order
from hetero_megatron.plan.fp8_memory import backward_bytes
from hetero_megatron.schedule import Held
from hetero_megatron.schedule.actions import LOOKAHEAD, SEND_LAG
from hetero_megatron.spec import LogicalTensor, ModelSpec, Share, shares, stage_tensors, tensor_box
from hetero_megatron.spec.expert_load import ExpertLoad
from hetero_megatron.spec.flops import (
    LOGITS_BYTES,
    head_activation_bytes,
    head_backward_bytes,
    head_operand_bytes,
    layer_activation_bytes,
    layer_backward_bytes,
    layer_operand_bytes,
)

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
ADAM_MOMENTS = 2
SCALE_BYTES = 4  # of an output channel of a weight in 8 bits, fp32


def moments_of(optimizer: str) -> int:
    """What ``--optimizer`` keeps per element, beside the master."""
    return ADAM_MOMENTS if optimizer == "adam" else 1


def cannot_offload(moments: int, dtype: str) -> tuple[str, str] | None:
    """(why an optimizer cannot be in host memory, flags of what can), None where it can."""
    if moments != ADAM_MOMENTS:
        return "only Adam runs in host memory", "--optimizer adam"
    if dtype == "fp64":
        return "the update in host memory is fp32", "--bf16, --fp16 or fp32"
    return None


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes of one rank.

    Attributes:
        weights: parameters; gradients: accumulated, in at least fp32.
        optimizer: moments, and fp32 masters of 16-bit weights, of the elements that the rank owns.
        activations: kept for backward by all micro-batches in flight, what backward works with, and what is on its way
            between stages.
        buffers: gradients packed, received and summed when they travel.
        overhead: of the framework, before the first tensor.
        communicators: buffers of the communication library.
        graphs: memory of device graphs beside the activations, which then are there all step long, too.
        host: fp32 masters and moments of an offloaded optimizer: in the host's memory, so not part of ``total``.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    overhead: int = 0
    host: int = 0
    communicators: int = 0
    graphs: int = 0

    @property
    def lasting(self) -> int:
        """What is there all step long."""
        return self.overhead + self.communicators + self.weights + self.gradients + self.optimizer + self.graphs

    @property
    def total(self) -> int:
        if self.graphs:
            return self.lasting + self.activations + self.buffers
        # Buckets travel when most activations of the last micro-batch are gone.
        return self.lasting + max(self.activations, self.buffers)

    def parts(self) -> dict[str, int]:
        """What ``total`` is made of."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "host"}

    @property
    def largest(self) -> str:
        """The part that is most of it."""
        parts = self.parts()
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True)
class RankWork:
    """What one rank of a stage works on, for its activations; of several chunks, one.

    Attributes:
        layers, embed, head: of the stage. A stage without embedding receives activations, one without head sends them.
        recompute: none | selective | full | first; ``first`` layers are recomputed whole where it says so.
        tokens: rows x sequence length on this rank's unit; item: bytes per element.
        tp: the rank has 1/tp of heads and columns; shards: and an equal part of the tokens, of so many.
        limit: of the bytes of logits, where the stage's head goes through chunks (:func:`chunk_limit`), else None.
        load: of routed experts, in an average layer of these; None: of a plain TP group.
        fp8: recipe of the fp8 that linear modules compute in; None: the dtype of the weights.
        rows: sequences of the tokens.
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

    @property
    def full(self) -> int:
        """Layers that are recomputed whole."""
        return {"full": self.layers, "first": self.first}.get(self.recompute, 0)


def chunk_limit(
    spec: ModelSpec, units: Iterable[tuple[int, Sequence[int]]], item: int, limit: int = LOGITS_BYTES
) -> int | None:
    """``limit``, where head and loss of a stage go through chunks of tokens, because the logits of a micro-batch, in at
    least fp32, are more bytes on one of its ranks; None: all at once. All ranks of a stage call the same operators.

    Args:
        units: (tokens, tp_split) of each of the stage's.
    """
    over = any(tokens * max(item, 4) * widest_vocabulary(spec, tuple(split)) > limit for tokens, split in units)
    return limit if over else None


@lru_cache(maxsize=1024)
def widest_vocabulary(spec: ModelSpec, tp_split: tuple[int, ...]) -> int:
    """Rows of the head on the rank that has most of them."""
    return max(stop - start for start, stop in (share.vocab for share in shares(spec, tp_split)))


def boundary_bytes(spec: ModelSpec, held: RankWork) -> int:
    """Bytes of one micro-batch's activations between two stages on this rank."""
    return round(held.tokens * spec.hidden_size * held.item / held.shards)


def kept_bytes(spec: ModelSpec, held: RankWork) -> int:
    """Bytes that one micro-batch keeps in a stage from forward to backward: in its layers, for all of them the rotary
    tables, and in the head, or the output that the next stage gets."""
    rest = "selective" if held.recompute == "selective" else "none"
    sizes = (held.item, held.tp, held.shards)
    total = held.full * layer_activation_bytes(spec, held.tokens, "full", *sizes, held.load)
    total += (held.layers - held.full) * layer_activation_bytes(spec, held.tokens, rest, *sizes, held.load)
    total += sum(held.tokens * rope.width(spec.head_dim) * max(held.item, 4) for rope in spec.ropes)
    if held.head:
        return total + head_activation_bytes(spec, held.tokens, *sizes, held.limit)
    return total + boundary_bytes(spec, held)


def working_bytes(spec: ModelSpec, held: RankWork) -> int:
    """Bytes beside what is kept, at the worst moment of a backward.

    That is in the head, or in the last layer when what the head kept is gone; all other layers are still there then.
    Where all layers are recomputed whole, the last one is there as if it had kept everything; where only the first ones
    are, the last one is not run again, and gone when they are. On top: receives that are posted, and gradients on
    their way to the stage before.
    """
    tokens, sizes = held.tokens, (held.item, held.tp, held.shards)
    layer, head, in_head = layer_backward_bytes(spec, tokens, *sizes, held.load, linear_bytes(spec, held)), 0, 0
    if held.full == held.layers > 0:
        layer += layer_activation_bytes(spec, tokens, "none", *sizes, held.load)
        layer -= layer_activation_bytes(spec, tokens, "full", *sizes, held.load)
    if held.head:
        head = head_activation_bytes(spec, tokens, *sizes, held.limit)
        in_head = head_backward_bytes(spec, tokens, held.item, held.tp, held.limit is not None)
    moving = (not (held.embed and held.head)) * LOOKAHEAD + (not held.embed) * SEND_LAG
    return max(in_head, layer - head) + moving * boundary_bytes(spec, held)


def linear_bytes(spec: ModelSpec, held: RankWork) -> Callable[[float, float], float] | None:
    """Of a linear module in fp8 with so many (outputs, inputs), bytes of its backward; None: none is in fp8."""
    if held.fp8 is None:
        return None
    recipe, length, item, trained = held.fp8, held.tokens / held.rows, held.item, spec.lora is None
    return lambda n, k: backward_bytes(recipe, held.rows, length, n, k, item, trained)


def operand_bytes(spec: ModelSpec, held: RankWork) -> int:
    """Bytes that one micro-batch keeps in a stage from B_INPUT to W, where backward is split."""
    sizes = (held.tokens, held.item, held.tp)
    total = held.layers * layer_operand_bytes(spec, *sizes, held.load)
    return total + (head_operand_bytes(spec, *sizes, held.limit is not None) if held.head else 0)


def activation_bytes(spec: ModelSpec, chunks: Sequence[RankWork], states: Iterable[Held]) -> int:
    """Bytes of activations that a rank holds at most, and of what backward works with; ``states``: of its stage, from
    :func:`~hetero_megatron.schedule.held_states`."""
    kept = [kept_bytes(spec, chunk) for chunk in chunks]
    waiting = [operand_bytes(spec, chunk) for chunk in chunks]
    return most_held(kept, waiting, states) + max(working_bytes(spec, chunk) for chunk in chunks)


def graph_bytes(spec: ModelSpec, chunks: Sequence[RankWork], states: Iterable[Held]) -> int:
    """Bytes that layers take as device graphs, beside their activations and what eager backward works with.

    Of each micro-batch in flight, a layer has both parts of its output and the gradients of both parts of its input to
    itself, and a chunk those of its ends and what forward of its last layer worked with. Chunks share nothing, though
    not all of them have most micro-batches in flight at once. Backward works in memory of its own.
    """
    states = list(states)
    most = [max(whole[c] for whole, _ in states) for c in range(len(chunks))]
    kept = [kept_bytes(spec, chunk) for chunk in chunks]
    total = sum(map(mul, most, kept)) - max(sum(map(mul, whole, kept)) for whole, _ in states)
    backward = 0
    for flying, chunk in zip(most, chunks, strict=True):
        if not chunk.layers:
            continue
        sizes = (chunk.item, chunk.tp, chunk.shards, chunk.load)
        whole = layer_activation_bytes(spec, chunk.tokens, "none", *sizes)
        # Recomputed whole, a layer takes the sum of its input: a copy, and two tensors of output where one was kept.
        hidden = 3 * chunk.layers + 2 * chunk.full + 4
        total += flying * (hidden * boundary_bytes(spec, chunk) + whole)
        again = whole if chunk.full or chunk.recompute == "selective" else 0
        worked = layer_backward_bytes(spec, chunk.tokens, *sizes, linear_bytes(spec, chunk))
        backward = max(backward, worked + again)
    return total + backward


def most_held(kept: Sequence[int], waiting: Sequence[int], states: Iterable[Held]) -> int:
    """The most bytes at once; ``kept``, ``waiting``: of a micro-batch in each chunk before its backward, and between
    its B_INPUT and W."""
    return max(sum(map(mul, whole, kept)) + sum(map(mul, split, waiting)) for whole, split in states)


def held_elements(spec: ModelSpec, layers: int, embed: bool, head: bool, share: Share) -> int:
    """Parameters that a rank holds, in layers that are average ones where their kinds differ."""
    return round(layers * _layer_elements(spec, share, False)) + _elements(spec, _ends(embed, head), share)


def trained_elements(spec: ModelSpec, layers: int, embed: bool, head: bool, share: Share) -> int:
    """Those of :func:`held_elements` that have gradients and optimizer states: all, or with adapters only these."""
    return round(layers * _layer_elements(spec, share, True)) + _elements(spec, _ends(embed, head), share, True)


@lru_cache(maxsize=4096)
def saved_per_layer(spec: ModelSpec, share: Share, item: int) -> float:
    """Bytes that the weights of an average layer take less than ``item`` per element because some are in 8 bits."""
    return _mean_over_layers(spec, lambda tensors: saved_in_int8(tensors, share, item))


def saved_in_int8(tensors: Iterable[LogicalTensor], share: Share, item: int) -> int:
    """Bytes that those of a rank's tensors that are in 8 bits take less than ``item`` per element."""
    boxes = (tensor_box(t, share) for t in tensors if t.int8)
    return sum(box.size * (item - 1) - SCALE_BYTES * math.prod(box.shape[:-1]) for box in boxes)


def _ends(embed: bool, head: bool) -> str:
    return ("embed" if embed else "") + ("head" if head else "")


@lru_cache(maxsize=4096)
def _layer_elements(spec: ModelSpec, share: Share, trained: bool) -> float:
    """Of an average layer."""
    return _mean_over_layers(spec, lambda tensors: _size(tensors, share, trained))


def _mean_over_layers(spec: ModelSpec, size: Callable[[Iterable[LogicalTensor]], int]) -> float:
    """Of the tensors of an average layer; dense MLPs and mixtures of experts have unlike ones."""
    kinds: dict[str, list[int]] = {}
    for layer, kind in enumerate(spec.layers):
        kinds.setdefault(kind.mlp, []).append(layer)
    sizes = [len(alike) * size(stage_tensors(spec, alike[:1], False, False)) for alike in kinds.values()]
    return sum(sizes) / spec.num_layers


@lru_cache(maxsize=4096)
def _elements(spec: ModelSpec, what: str, share: Share, trained: bool = False) -> int:
    return _size(stage_tensors(spec, (), "embed" in what, "head" in what), share, trained)


def _size(tensors: Iterable[LogicalTensor], share: Share, trained: bool) -> int:
    return sum(tensor_box(t, share).size for t in tensors if t.trained or not trained)


@lru_cache(maxsize=1024)
def equal_shares(spec: ModelSpec, tp: int) -> tuple[Share, ...]:
    """The distinct shares of an equal split over ``tp`` ranks."""
    return tuple(dict.fromkeys(shares(spec, (1,) * tp)))


@lru_cache(maxsize=4096)
def bucket_sizes(spec: ModelSpec, embed: bool, head: bool, share: Share) -> list[int]:
    """Elements of the buckets of a rank with ``IN_FLIGHT`` decoder layers, in the order of backward."""
    sizes: list[int] = []
    for segment in backward_order(stage_tensors(spec, range(IN_FLIGHT), embed, head)):
        for size in (tensor_box(tensor, share).size for tensor in segment):
            if sizes and 4 * (sizes[-1] + size) <= BUCKET_BYTES:
                sizes[-1] += size
            else:
                sizes.append(size)
    return sizes


def bucket_elements(spec: ModelSpec, embed: bool, head: bool, share: Share) -> tuple[int, int]:
    """Elements of (the largest bucket, those that are under way at once) on a rank with decoder layers."""
    # More layers fill buckets that are not full here.
    sizes = [max(size, BUCKET_BYTES // 4) for size in bucket_sizes(spec, embed, head, share)]
    return max(sizes), max(sum(sizes[i : i + IN_FLIGHT]) for i in range(len(sizes)))


def host_bytes(owned: float, moments: int = 2) -> int:
    """Of an offloaded optimizer: masters are copies in fp32 whatever the dtype of the weights, and so are moments."""
    return round(4 * owned * (moments + 1))


def state_bytes(
    held: int, owned: float, item: int, moments: int = 2, trained: int | None = None, saved: int = 0
) -> tuple[int, int, int]:
    """(weights, gradients, optimizer) of a rank that holds and owns so many elements; ``trained``: of those held, None:
    all; ``saved``: bytes, by weights in 8 bits."""
    wide = max(item, 4)
    master = 4 if item == 2 else 0
    return held * item - saved, (held if trained is None else trained) * wide, round(owned * (moments * wide + master))


def buffer_bytes(held: Any, owned: Any, copies: float, item: int, dense: bool) -> tuple[Any, Any]:
    """Of a bucket that several ranks hold, on one of them or on several in arrays: (while it is under way, while what
    came is added up).

    Gradients of a dense bucket leave from where they are kept, and their sums lie there: only what comes needs memory,
    and of more than two ranks it comes in one piece with the own part. Else they are packed, and sums are new.

    Args:
        held, owned: elements; copies: ranks that hold the same ones.
    """
    wide, taken = max(item, 4), owned * (copies - 1)
    if dense:
        come = wide * (taken + (owned if copies > 2 else 0))
        return come, come
    return wide * (held - owned + taken), wide * (taken + owned)
