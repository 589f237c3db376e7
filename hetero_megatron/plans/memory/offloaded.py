"""Bytes of activations that are in host memory from a layer's forward to its backward, and of the device meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.activation_bytes import layer_activation_bytes
from hetero_megatron.spec.expert_load import ExpertLoad, plain_load
from hetero_megatron.spec.flops import common_columns, layers_alone

FEW_BYTES = 16  # per token of its layer: a saved tensor that has fewer stays on the device


class ChunkWork(Protocol):
    """What must be known of a rank's chunk of layers; :class:`~hetero_megatron.plans.memory.activations.RankWork` says
    what it is."""

    @property
    def layers(self) -> int: ...
    @property
    def embed(self) -> bool: ...
    @property
    def recompute(self) -> str: ...
    @property
    def full(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def item(self) -> int: ...
    @property
    def tp(self) -> float: ...
    @property
    def shards(self) -> int: ...
    @property
    def load(self) -> ExpertLoad | None: ...
    @property
    def untrained(self) -> int: ...
    @property
    def offloaded(self) -> int: ...
    @property
    def layers_spec(self) -> ModelSpec | None: ...


@dataclass(frozen=True)
class LayerBytes:
    """Of one micro-batch in a layer: all that is kept, what of it goes to host memory, and what its backward makes
    again."""

    kept: float
    host: float
    again: float = 0.0

    def times(self, rows: int) -> LayerBytes:
        """Of so many sequences."""
        return LayerBytes(rows * self.kept, rows * self.host, rows * self.again)


def layer_models(spec: ModelSpec, held: ChunkWork) -> list[ModelSpec]:
    """By layer of a chunk, a model of what it is: of that layer alone where ``layers_spec`` says which they are, else
    an average one."""
    chunk_spec = held.layers_spec or spec
    if held.layers_spec is None or chunk_spec.num_layers != held.layers:
        return [chunk_spec] * held.layers
    return [layers_alone(chunk_spec, (i,)) for i in range(held.layers)]


def load_of(model: ModelSpec, held: ChunkWork) -> ExpertLoad | None:
    """The load of the experts of one of :func:`layer_models`."""
    load = held.load
    if load is None or model.num_layers > 1 or held.layers_spec is None:
        return load
    return replace(load, layers=model.moe_share)


def chunk_layers(
    held: ChunkWork, models: Sequence[ModelSpec], kept: Callable[[str, ModelSpec], float], given: float,
    product: Callable[[ModelSpec], float | None], lse: float = 0.0,
) -> tuple[LayerBytes, ...]:  # fmt: skip
    """The layers of a chunk.

    Args:
        models: :func:`layer_models`.
        kept: bytes of such a layer by kind of recompute.
        given: bytes of a chunk's input, as a layer keeps it: what the stage before sends stays, as its gradient belongs
            to it; what a frozen embedding gives is not kept.
        product: :func:`product_bytes` of such a layer, of the same tokens.
        lse: bytes of the log-sum-exp of attention where they are too few to go.
    """
    rest = held.recompute if held.recompute in ("selective", "elementwise") else "none"
    kinds, different = {"none", rest, *(("full",) if held.full else ())}, {id(model): model for model in models}
    of_models = {n: ({kind: kept(kind, x) for kind in kinds}, product(x)) for n, x in different.items()}
    layers = []
    for i, model in enumerate(models):
        whole, (bytes_of, most_again) = i < held.full, of_models[id(model)]
        each = 0.0 if held.untrained > i and not whole else bytes_of["full" if whole else rest]
        goes = each - (0.0 if whole or rest == "selective" else lse) - (given if i == 0 else 0.0)
        again = bytes_of["none"] - each if whole or rest == "elementwise" else 0.0
        if not whole and most_again is not None:
            again = min(again, most_again)
        layers.append(LayerBytes(each, max(goes, 0.0) if i < held.offloaded else 0.0, again))
    return tuple(layers)


@lru_cache(maxsize=4096)
def layer_bytes(spec: ModelSpec, held: ChunkWork) -> tuple[LayerBytes, ...]:
    """Those of a stage without context groups."""
    models, spec = layer_models(spec, held), held.layers_spec or spec
    given = 0 if input_goes(spec, held) else round(held.tokens * spec.hidden_size * held.item / held.shards)
    lse = 4 * held.tokens * spec.num_heads / held.tp
    few = lse if lse < FEW_BYTES * held.tokens / held.shards else 0.0

    def kept(kind: str, model: ModelSpec) -> int:
        sizes = (held.item, held.tp, held.shards, load_of(model, held))
        return layer_activation_bytes(model, held.tokens, kind, *sizes)

    return chunk_layers(held, models, kept, given, lambda model: product_bytes(model, held, held.tokens), few)


def product_bytes(spec: ModelSpec, held: ChunkWork, tokens: int) -> float | None:
    """Of what elementwise recompute makes again, what is there at the worst moment of a layer's backward: what the
    activation puts out, whose memory is free again when what a norm puts out is made; in a layer of experts alone,
    theirs, which go before what all tokens share; None: all of it."""
    if spec.moe is None:
        return held.item * tokens * common_columns(spec, 0.0) / held.tp
    if not spec.single_blocks:
        return None
    load = load_of(spec, held) or plain_load(spec, tokens, 1 / held.tp, held.shards)
    assert load is not None
    dense = tokens * (common_columns(spec, 0.0) - spec.moe_share * spec.ffn_hidden_size) / held.tp
    return held.item * (dense + spec.moe_share * load.rows * load.columns)


def input_goes(spec: ModelSpec, held: ChunkWork) -> bool:
    """Whether what the first layer of a chunk keeps of its input goes to host memory."""
    return held.embed and spec.lora is None


def in_host(layers: Sequence[LayerBytes]) -> int:
    """Bytes of one micro-batch."""
    return round(sum(layer.host for layer in layers))


def layer_moments(
    layers: Sequence[LayerBytes], ahead: int, backward: float | Sequence[float], passed: float = 0.0,
    operands: float = 0.0,
) -> list[float]:  # fmt: skip
    """Of every layer, bytes beside what is kept on the device of all layers at the worst moment of its backward: it has
    come back, as do ``ahead`` layers before it, and of those after it there are the operands of weight gradients that
    wait.

    Args:
        backward: of any layer, or of each; passed: the gradient that the last one got, which the others have, too;
            operands: of a layer, where backward is split.
    """
    moments, gone, last = [0.0] * len(layers), 0.0, len(layers) - 1
    for i in reversed(range(len(layers))):
        there = sum(layer.host for layer in layers[max(i - ahead, 0) : i + 1])
        working = backward[i] if isinstance(backward, Sequence) else backward
        moments[i] = working + layers[i].again + there - gone + (passed if i < last else 0.0)
        gone += layers[i].kept - layers[i].host - operands
    return moments


def worst_layer(
    layers: Sequence[LayerBytes], ahead: int, backward: float, passed: float = 0.0, operands: float = 0.0
) -> float:
    """The most of :func:`layer_moments`."""
    return max([0.0, *layer_moments(layers, ahead, backward, passed, operands)])


def coming(layers: Sequence[LayerBytes], ahead: int) -> float:
    """Bytes that come back while backward is in the head."""
    return sum(layer.host for layer in layers[max(len(layers) - ahead, 0) :])
