"""What a model costs: FLOPs, parameters and exchanges of a TP group, as plain formulas of its configuration.

A multiply-add counts as 2 FLOPs; only matrix products count (the convention behind MFU). Recomputed work is
not counted: these are *model* FLOPs. Backward is twice forward, because each product has two operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from hetero_megatron.spec.expert_load import ExpertLoad, expert_adapter_ranks, plain_load
from hetero_megatron.spec.model_spec import LayerKind, ModelSpec
from hetero_megatron.spec.tensors import LogicalTensor, logical_tensors, trained_tensors

TP_COLLECTIVES = 4  # gathers and scatters per layer, in forward and in backward: two of attention, two of the MLP
TILE = 128  # tokens: a chunk of head and loss is a multiple, because products run at full speed only on whole tiles
CHUNK_ELEMENTS = 1 << 27  # logits that ``linear_cross_entropy`` has at once: few beside the weights, many to a product
# What operators of a loss read and write of a token beside a cross-entropy's and a teacher's head, in words of 4 bytes:
# (for each token of the vocabulary, besides).
Words = tuple[float, float]
PLAIN_WORDS: Words = (0.0, 0.0)
LOGITS_BYTES = 1 << 30  # more logits than this at once are never made, unless the user asks (--max-logits-mib)


def layers_alone(spec: ModelSpec, layers: Sequence[int]) -> ModelSpec:
    """A model of these layers and no others, for what an average one of them costs, where some layers have linear
    attention, see fewer tokens than others or are mixtures of experts. Any other model, and of no layers, as it is; and
    one with adapters of single layers, which are named by their numbers in the whole model."""
    if not layers or len({(kind.mixer, kind.reach, kind.mlp) for kind in spec.layer_kinds}) == 1 or _has_sites(spec):
        return spec
    return _layers_alone(spec, tuple(map(spec.layer, layers)))


def layers_differ(spec: ModelSpec) -> bool:
    """Whether some layers have another mixer or another kind of MLP than others."""
    return len({(kind.mixer, kind.mlp) for kind in spec.layer_kinds}) > 1


def layers_cost_unlike(spec: ModelSpec, length: int) -> bool:
    """Whether some layers have linear attention, or see fewer of ``length`` tokens, and others do not."""
    return len({(kind.mixer, min(kind.reach or length, length)) for kind in spec.layer_kinds}) > 1


@lru_cache(maxsize=1024)
def layers_by_kind(spec: ModelSpec) -> tuple[tuple[ModelSpec, float], ...]:
    """(a model of layers of one kind, their share of the layers) of each kind that costs otherwise; a model with one
    kind, or with adapters of single layers, as it is."""
    by_shape: dict[tuple[Any, ...], list[LayerKind]] = {}
    for kind in spec.layers:
        by_shape.setdefault(kind.shape(spec.head_dim), []).append(kind)
    if len(by_shape) == 1 or _has_sites(spec):
        return ((spec, 1.0),)
    alone = ((_layers_alone(spec, (kinds[0],)), len(kinds)) for kinds in by_shape.values())
    return tuple((model, count / spec.num_layers) for model, count in alone)


def _has_sites(spec: ModelSpec) -> bool:
    return spec.lora is not None and bool(spec.lora.sites)


@lru_cache(maxsize=1024)
def _layers_alone(spec: ModelSpec, kinds: tuple[LayerKind, ...]) -> ModelSpec:
    return replace(spec, num_layers=len(kinds), layer_kinds=kinds, notices=())


@lru_cache(maxsize=256)
def module_layer(spec: ModelSpec) -> ModelSpec:
    """A model of one layer as modules that predict further tokens have it, and no modules: for what such a layer costs,
    where formulas are of an average layer."""
    return replace(spec, num_layers=1, layer_kinds=(spec.layer(spec.num_layers),), mtp_layers=0, notices=())


def visible_pairs(length: int, window: int | None = None, chunk: int | None = None) -> int:
    """(query, key) pairs of causal attention in a document of ``length`` tokens: n(n+1)/2 without window or chunks."""
    if chunk is not None and chunk < length:
        chunks, remainder = divmod(length, chunk)
        return chunks * visible_pairs(chunk, window) + visible_pairs(remainder, window)
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


def attention_pairs(spec: ModelSpec, length: int, layers: Iterable[int] | None = None) -> int:
    """(query, key) pairs of causal attention in a document of ``length`` tokens, summed over ``layers`` (all)."""
    kinds = spec.layers if layers is None else [spec.layer(i) for i in layers]
    limits = Counter((kind.window, kind.chunk) for kind in kinds if kind.mixer == "attention")
    return sum(count * visible_pairs(length, *limit) for limit, count in limits.items())


def mean_attention_pairs(spec: ModelSpec, length: int) -> float:
    """The same of an average layer: where layers see unlike many tokens, what a cost that counts layers goes by."""
    limits = {(kind.window, kind.chunk) for kind in spec.layer_kinds}
    if len(limits) == 1 and spec.delta is None and attention_layers(spec) == 1:
        return visible_pairs(length, *limits.pop())
    return attention_pairs(spec, length) / spec.num_layers


def mlp_columns(spec: ModelSpec) -> float:
    """Feed-forward columns that a token passes in an average layer: of a mixture of experts, those of the experts that
    it chooses and of what all tokens share."""
    if spec.moe is None:
        return mlp_layers(spec) * spec.ffn_hidden_size
    share, moe_columns = spec.moe_share, spec.moe.top_k * spec.moe.ffn_hidden_size + spec.moe.shared_ffn
    return (mlp_layers(spec) - share) * spec.ffn_hidden_size + share * moe_columns


def common_columns(spec: ModelSpec, routed: float) -> float:
    """Feed-forward columns that every token passes in an average layer, if ``routed`` of the layers are mixtures of
    experts: those of a dense MLP, or of what all tokens share."""
    shared = spec.moe.shared_ffn if spec.moe is not None else 0
    return (mlp_layers(spec) - routed) * spec.ffn_hidden_size + routed * shared


def linear_layers(spec: ModelSpec) -> float:
    """The share of layers with linear attention."""
    return sum(kind.linear for kind in spec.layers) / spec.num_layers if spec.delta is not None else 0.0


def attention_layers(spec: ModelSpec) -> float:
    """The share of layers with attention that is not linear."""
    return mixer_layers(spec) - linear_layers(spec)


def mixer_layers(spec: ModelSpec) -> float:
    """The share of layers with attention, linear or not."""
    return 1 - _share(spec, mixer="none") if spec.single_blocks else 1.0


def mlp_layers(spec: ModelSpec) -> float:
    """The share of layers with an MLP, or a mixture of experts."""
    return 1 - _share(spec, mlp="none") if spec.single_blocks else 1.0


def tp_collectives(model: ModelSpec, load: ExpertLoad | None) -> float:
    """Of an average layer: a mixture of experts has those of its MLP only if all tokens share one."""
    if model.moe is None or load is None:
        return TP_COLLECTIVES / 2 * (mixer_layers(model) + mlp_layers(model))
    return TP_COLLECTIVES - 2 * load.layers * (not model.moe.shared_ffn)


def exchanges_of_head(model: ModelSpec) -> float:
    """Gathers or scatters of a micro-batch's activations in the head, in forward or in backward: of a module that
    predicts further tokens its embedding's, its layer's and the head's."""
    if not model.mtp_layers:
        return 1.0
    module_spec = module_layer(model)
    return 1.0 + model.mtp_layers * (2.0 + tp_collectives(module_spec, plain_load(module_spec, 1, 1.0, 1)))


def _share(spec: ModelSpec, **fields: str) -> float:
    ((name, value),) = fields.items()
    return sum(getattr(kind, name) == value for kind in spec.layers) / spec.num_layers


def delta_flops(spec: ModelSpec) -> float:
    """Forward FLOPs per token of the rule of linear attention in an average layer."""
    delta = spec.delta
    return 0.0 if delta is None else linear_layers(spec) * 2 * delta.state_products * delta.value_width * delta.key_dim


def projection_elements(spec: ModelSpec) -> float:
    """Elements of the matrices before and after attention of an average layer, biases and norms left out."""
    attention, delta = attention_layers(spec) * _attention_elements(spec), spec.delta
    return attention if delta is None else attention + linear_layers(spec) * delta.elements(spec.hidden_size)


def _attention_elements(spec: ModelSpec) -> int:
    h, heads, mla = spec.hidden_size, spec.num_heads, spec.mla
    if mla is None:
        return 2 * h * (heads + spec.num_kv_heads) * spec.head_dim + h * heads * spec.head_dim * spec.attn_gate
    queries = heads * mla.qk_dim * (h if mla.q_rank is None else mla.q_rank)
    return h * mla.latents + queries + heads * (mla.kv_rank * (mla.nope_dim + mla.v_dim) + mla.v_dim * h)


def layer_matmul_flops(spec: ModelSpec) -> float:
    """Forward FLOPs per token of one (average) layer's projections and MLP: 2 x the matrix elements that it passes; and
    of linear attention, which are as many for every token."""
    h = spec.hidden_size
    matrices = len(spec.mlp_projections)
    router = 0.0 if spec.moe is None else spec.moe_share * h * spec.moe.num_experts
    return 2 * (projection_elements(spec) + matrices * h * mlp_columns(spec) + router) + delta_flops(spec)


def layer_attention_flops(spec: ModelSpec, pairs: float) -> float:
    """Forward FLOPs of one layer's softmax(q k^T) v: 4 d per head and visible (query, key) pair."""
    head_features = 2 * spec.head_dim if spec.mla is None else spec.mla.qk_dim + spec.mla.v_dim
    return 2 * spec.num_heads * head_features * pairs


def layer_flops(spec: ModelSpec, seq_length: int) -> float:
    """Forward FLOPs of one (average) layer for one sequence of one document."""
    pairs = mean_attention_pairs(spec, seq_length)
    return seq_length * layer_matmul_flops(spec) + layer_attention_flops(spec, pairs)


def head_flops(spec: ModelSpec, seq_length: int) -> int:
    """Forward FLOPs of the output head for one sequence; with what comes before it of modules that predict further
    tokens, each of which goes through it, too."""
    h = spec.hidden_size
    head = 2 * seq_length * h * spec.vocab_size
    if not spec.mtp_layers:
        return head
    module = round(layer_flops(module_layer(spec), seq_length)) + 2 * seq_length * 2 * h * h
    return head + spec.mtp_layers * (head + module)


def sequence_flops(spec: ModelSpec, seq_length: int) -> int:
    """Forward and backward FLOPs of the whole model for one sequence: about 6 N per token (4 N of a frozen base), plus
    attention."""
    layers = round(spec.num_layers * seq_length * layer_matmul_flops(spec))
    attention = round(layer_attention_flops(spec, attention_pairs(spec, seq_length)))
    head = head_flops(spec, seq_length)
    if spec.lora is None:
        return 3 * (layers + attention + head)
    # What is frozen has no weight gradients.
    return 2 * (layers + head) + 3 * (attention + round(spec.num_layers * seq_length * adapter_flops(spec)))


@lru_cache(maxsize=256)
def adapter_products(spec: ModelSpec) -> tuple[tuple[int, int, int, float], ...]:
    """(outputs, inputs, rank, in which share of the layers) of the adapters of an average layer, without those of
    experts."""
    layers_of_sizes: Counter[tuple[int, int, int]] = Counter()
    for layer, layer_count in adapted_layers(spec):
        for a, b in products_of(layer):
            layers_of_sizes[sum(part.shape[0] for part in b), a.shape[1], a.shape[0]] += layer_count
    return tuple((*sizes, count / spec.num_layers) for sizes, count in layers_of_sizes.items())


@lru_cache(maxsize=256)
def adapted_layers(spec: ModelSpec) -> tuple[tuple[tuple[LogicalTensor, ...], int], ...]:
    """(A's and B's of a layer, without those of experts; how many layers have such)."""
    if spec.lora is None:
        return ()
    layers: dict[int | str, list[LogicalTensor]] = {}
    for tensor in trained_tensors(spec):
        if len(tensor.shape) == 2 and not tensor.per_expert:
            layers.setdefault(tensor.layer, []).append(tensor)
    kinds: dict[object, list[tuple[LogicalTensor, ...]]] = {}
    for tensors in layers.values():
        kinds.setdefault(tuple((t.shape, t.axes) for t in tensors), []).append(tuple(tensors))
    return tuple((equal_layers[0], len(equal_layers)) for equal_layers in kinds.values())


def products_of(layer: Iterable[LogicalTensor]) -> list[tuple[LogicalTensor, list[LogicalTensor]]]:
    """Of the A's and B's of a layer: each A, with the B's that multiply what it makes."""
    products: list[tuple[LogicalTensor, list[LogicalTensor]]] = []
    for tensor in layer:
        if tensor.name.endswith("lora_A.weight"):
            products.append((tensor, []))
        else:
            products[-1][1].append(tensor)
    return products


def adapter_flops(spec: ModelSpec) -> float:
    """Forward FLOPs per token of the adapters of one (average) layer; of experts, those that a token chooses."""
    flops = 2.0 * sum(rank * (outputs + inputs) * share for outputs, inputs, rank, share in adapter_products(spec))
    if spec.moe is None:
        return flops
    widths = spec.hidden_size + spec.moe.ffn_hidden_size
    return flops + 2.0 * spec.moe_share * spec.moe.top_k * expert_adapter_ranks(spec) * widths


def trained_count(spec: ModelSpec) -> int:
    """Parameters that are trained."""
    return sum(t.size for t in logical_tensors(spec) if t.trained)


def parameter_count(spec: ModelSpec) -> int:
    """All parameters; a tied head counts once."""
    return sum(t.size for t in logical_tensors(spec))


def layer_parameters(spec: ModelSpec) -> int:
    """Parameters of the first decoder layer."""
    return sum(t.size for t in logical_tensors(spec) if t.layer == 0)


def chunk_tokens(limit: int, per_token: float) -> int:
    """Tokens per chunk of head and loss, whole tiles where they are that many, if the logits of a token in at least
    fp32 are ``per_token`` bytes: a chunk's logits, probabilities and their gradients are within ``limit``."""
    rows = max(int(limit // 4 // per_token), 1)
    return rows // TILE * TILE or rows
