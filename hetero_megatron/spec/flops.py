"""What a model costs: FLOPs, parameters and activation bytes, as plain formulas of its configuration.

A multiply-add counts as 2 FLOPs; only matrix products count (the convention behind MFU). Recomputed work is
not counted: these are *model* FLOPs. Backward is twice forward, because each product has two operands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache

from hetero_megatron.spec.expert_load import (
    ExpertLoad,
    expert_activation_bytes,
    expert_adapter_ranks,
    expert_backward_bytes,
    expert_operand_bytes,
    moe_layers,
    plain_load,
)
from hetero_megatron.spec.lora import NF4_CHUNK, NF4_MAKING
from hetero_megatron.spec.model_spec import EXPERT_ACTIVATIONS, ModelSpec
from hetero_megatron.spec.tensors import LogicalTensor, logical_tensors, trained_tensors

TILE = 128  # tokens: a chunk of head and loss is a multiple, because products run at full speed only on whole tiles
CHUNK_ELEMENTS = 1 << 27  # logits that ``linear_cross_entropy`` has at once: few beside the weights, many to a product
LOGITS_BYTES = 1 << 30  # more logits than this at once are never made, unless the user asks (--max-logits-mib)


def visible_pairs(length: int, window: int | None = None, chunk: int | None = None) -> int:
    """(query, key) pairs of causal attention in a document of ``length`` tokens: n(n+1)/2 without window or chunks."""
    if chunk is not None and chunk < length:
        whole, rest = divmod(length, chunk)
        return whole * visible_pairs(chunk, window) + visible_pairs(rest, window)
    full = min(length, window or length)
    return full * (full + 1) // 2 + (length - full) * full


def attention_pairs(spec: ModelSpec, length: int, layers: Iterable[int] | None = None) -> int:
    """(query, key) pairs of causal attention in a document of ``length`` tokens, summed over ``layers`` (all)."""
    kinds = spec.layers if layers is None else [spec.layer(i) for i in layers]
    limits = Counter((kind.window, kind.chunk) for kind in kinds)
    return sum(count * visible_pairs(length, *limit) for limit, count in limits.items())


def mean_attention_pairs(spec: ModelSpec, length: int) -> float:
    """The same of an average layer: where layers see unlike many tokens, what a cost that counts layers goes by."""
    limits = {(kind.window, kind.chunk) for kind in spec.layer_kinds}
    if len(limits) == 1:
        return visible_pairs(length, *limits.pop())
    return attention_pairs(spec, length) / spec.num_layers


def mlp_columns(spec: ModelSpec) -> float:
    """Feed-forward columns that a token passes in an average layer: of a mixture of experts, those of the experts that
    it chooses and of what all tokens share."""
    if spec.moe is None:
        return spec.ffn_hidden_size
    share, used = moe_layers(spec), spec.moe.top_k * spec.moe.ffn_hidden_size + spec.moe.shared_ffn
    return (1 - share) * spec.ffn_hidden_size + share * used


def common_columns(spec: ModelSpec, routed: float) -> float:
    """Feed-forward columns that every token passes in an average layer, if ``routed`` of the layers are mixtures of
    experts: those of a dense MLP, or of what all tokens share."""
    shared = spec.moe.shared_ffn if spec.moe is not None else 0
    return (1 - routed) * spec.ffn_hidden_size + routed * shared


def projection_elements(spec: ModelSpec) -> int:
    """Elements of the matrices before and after attention, biases and norms left out."""
    h, heads, mla = spec.hidden_size, spec.num_heads, spec.mla
    if mla is None:
        return 2 * h * (heads + spec.num_kv_heads) * spec.head_dim
    queries = heads * mla.qk_dim * (h if mla.q_rank is None else mla.q_rank)
    return h * mla.latents + queries + heads * (mla.kv_rank * (mla.nope_dim + mla.v_dim) + mla.v_dim * h)


def layer_matmul_flops(spec: ModelSpec) -> float:
    """Forward FLOPs per token of one (average) layer's projections and MLP: 2 x the matrix elements that it passes."""
    h = spec.hidden_size
    matrices = 3 if spec.gated else 2
    router = 0.0 if spec.moe is None else moe_layers(spec) * h * spec.moe.num_experts
    return 2 * (projection_elements(spec) + matrices * h * mlp_columns(spec) + router)


def layer_attention_flops(spec: ModelSpec, pairs: float) -> float:
    """Forward FLOPs of one layer's softmax(q k^T) v: 4 d per head and visible (query, key) pair."""
    both = 2 * spec.head_dim if spec.mla is None else spec.mla.qk_dim + spec.mla.v_dim
    return 2 * spec.num_heads * both * pairs


def layer_flops(spec: ModelSpec, seq_length: int) -> float:
    """Forward FLOPs of one (average) layer for one sequence of one document."""
    pairs = mean_attention_pairs(spec, seq_length)
    return seq_length * layer_matmul_flops(spec) + layer_attention_flops(spec, pairs)


def head_flops(spec: ModelSpec, seq_length: int) -> int:
    """Forward FLOPs of the output head for one sequence."""
    return 2 * seq_length * spec.hidden_size * spec.vocab_size


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
    found: Counter[tuple[int, int, int]] = Counter()
    for layer, each in _adapted_layers(spec):
        for a, b in zip(layer[::2], layer[1::2]):
            found[b.shape[0], a.shape[1], a.shape[0]] += each
    return tuple((*sizes, count / spec.num_layers) for sizes, count in found.items())


@lru_cache(maxsize=256)
def _adapted_layers(spec: ModelSpec) -> tuple[tuple[tuple[LogicalTensor, ...], int], ...]:
    """(A's and B's of a layer, without those of experts; how many layers have such)."""
    if spec.lora is None:
        return ()
    layers: dict[int | str, list[LogicalTensor]] = {}
    for tensor in trained_tensors(spec):
        if len(tensor.shape) == 2 and (spec.lora.sites or tensor.layer == 0):
            layers.setdefault(tensor.layer, []).append(tensor)
    if not spec.lora.sites:  # all layers have the same
        return tuple((tuple(found), spec.num_layers) for found in layers.values())
    kinds: dict[object, list[tuple[LogicalTensor, ...]]] = {}
    for found in layers.values():
        kinds.setdefault(tuple((t.shape, t.axes) for t in found), []).append(tuple(found))
    return tuple((alike[0], len(alike)) for alike in kinds.values())


def _most_of_a_layer(spec: ModelSpec, sizes: Callable[[tuple[LogicalTensor, ...]], tuple[int, int]]) -> tuple[int, int]:
    """(whole, cut) elements that adapters keep in the layer in which these are most."""
    return max((sizes(layer) for layer, _ in _adapted_layers(spec)), key=sum, default=(0, 0))


def adapter_flops(spec: ModelSpec) -> float:
    """Forward FLOPs per token of the adapters of one (average) layer; of experts, those that a token chooses."""
    plain = 2.0 * sum(rank * (outputs + inputs) * share for outputs, inputs, rank, share in adapter_products(spec))
    if spec.moe is None:
        return plain
    widths = spec.hidden_size + spec.moe.ffn_hidden_size
    return plain + 2.0 * moe_layers(spec) * spec.moe.top_k * expert_adapter_ranks(spec) * widths


def dropped_inputs(spec: ModelSpec) -> tuple[int, int]:
    """Elements per token of one layer that adapters keep of their inputs under dropout, each its own: (of inputs that
    every rank of a TP group has whole, of those that are cut)."""
    if spec.lora is None or not spec.lora.dropout:
        return 0, 0

    def sizes(layer: tuple[LogicalTensor, ...]) -> tuple[int, int]:
        inputs = [t for t in layer if t.name.endswith("lora_A.weight")]
        cut = sum(t.shape[1] for t in inputs if t.axes[1].role in ("q_heads", "ffn"))
        return sum(t.shape[1] for t in inputs) - cut, cut

    return _most_of_a_layer(spec, sizes)


def scaled_outputs(spec: ModelSpec) -> tuple[int, int]:
    """Elements per token of one layer that DoRA keeps, the outputs of adapted matrices before they are scaled: (of
    those that every rank of a TP group has whole, of those that are cut)."""
    if spec.lora is None or not spec.lora.dora:
        return 0, 0

    def sizes(layer: tuple[LogicalTensor, ...]) -> tuple[int, int]:
        outputs = [t for t in layer if t.name.endswith("lora_B.weight")]
        cut = sum(t.shape[0] for t in outputs if t.axes[0].role in ("q_heads", "kv_heads", "ffn"))
        return sum(t.shape[0] for t in outputs) - cut, cut

    return _most_of_a_layer(spec, sizes)


def adapter_widths(spec: ModelSpec) -> int:
    """What the adapters of one layer keep between A and B, per token: their ranks, in the layer with most."""
    return _most_of_a_layer(spec, lambda layer: (sum(a.shape[0] for a in layer[::2]), 0))[0]


def trained_count(spec: ModelSpec) -> int:
    """Parameters that are trained."""
    return sum(t.size for t in logical_tensors(spec) if t.trained)


def parameter_count(spec: ModelSpec) -> int:
    """All parameters; a tied head counts once."""
    return sum(t.size for t in logical_tensors(spec))


def layer_parameters(spec: ModelSpec) -> int:
    """Parameters of one decoder layer."""
    return sum(t.size for t in logical_tensors(spec) if t.layer == 0)


def mlp_widths(spec: ModelSpec) -> int:
    """What an MLP keeps between its projections, in widths of its hidden layer: gate, up and their product with SwiGLU
    (clamped too; another gate keeps its activation too), otherwise up and its activation."""
    if not spec.gated:
        return 2
    return 3 if spec.activation in EXPERT_ACTIVATIONS else 4


def norm_inputs(spec: ModelSpec) -> int:
    """Different inputs of a layer's norms, in hidden sizes."""
    return 1 if spec.parallel_block is not None else 4 if spec.norm_placement == "pre_post" else 2


def norm_outputs(spec: ModelSpec) -> int:
    """Outputs of a layer's norms that products read, in hidden sizes."""
    if spec.parallel_block == "one_norm":
        return 1
    return 0 if spec.norm_placement == "post" else 2


def shared_inputs(spec: ModelSpec, routed: float, tp: float) -> float:
    """Inputs of MLPs after the gather, in hidden sizes: a mixture of experts has one only for what all tokens share,
    and without a TP group that is the router's; without one, attention and MLP share the output of their one norm."""
    if spec.parallel_block == "one_norm" and tp <= 1:
        return 0.0
    shared = spec.moe is not None and bool(spec.moe.shared_ffn) and tp > 1
    return 1 - routed + routed * shared


def ungathered_inputs(spec: ModelSpec, routed: float, shards: float) -> float:
    """Inputs of attention and MLP that are not made again, in hidden sizes: those that no norm puts out, each rank's
    own tokens of them."""
    if spec.norm_placement != "post":
        return 0.0
    return (1 + shared_inputs(spec, routed, 1.0)) / shards


def latent_widths(spec: ModelSpec) -> int:
    """Latents of a token with multi-head latent attention, before and after their norms."""
    return 0 if spec.mla is None else 2 * ((spec.mla.q_rank or 0) + spec.mla.kv_rank)


def turned_copies(spec: ModelSpec) -> float:
    """Queries and keys before their rotation, in widths of both: where only some features turn, or interleaved pairs,
    the rotation does not overwrite them, and values, which lie beside them, keep them. Norms before it let them go."""
    if spec.mla is not None or spec.qk_norm not in (None, "l2"):
        return 0.0
    ropes = [kind.rope for kind in spec.layer_kinds if kind.rope is not None]
    copied = sum(rope.interleaved or rope.width(spec.head_dim) < spec.head_dim for rope in ropes)
    return copied / len(spec.layer_kinds)


def value_widths(spec: ModelSpec) -> int:
    """The input of ``o_proj``, where it is not the output of the attention operator (whose heads are filled up)."""
    return 0 if spec.mla is None or spec.mla.v_dim == spec.head_dim else spec.num_heads * spec.mla.v_dim


def layer_activation_bytes(
    spec: ModelSpec, tokens: int, recompute: str = "none", itemsize: int = 2, tp: float = 1.0,
    shards: int | None = None, load: ExpertLoad | None = None,
) -> int:  # fmt: skip
    """Bytes that one layer keeps from forward to backward, as ``model/gpt.py`` saves them.

    Counted per token, in elements (h hidden, q and kv the widths of queries and keys, f feed-forward):

    - on the token shard: both norms' inputs, 2 h (of attention and MLP on one input, 1 h);
    - after the gather, on every rank whole: the inputs of QKV and of the MLP, 2 h;
    - of a mixture of experts, instead of a dense MLP's share, what
      :func:`~hetero_megatron.spec.expert_load.expert_activation_bytes` says, and what all tokens use;
    - cut by ``tp``: q, k, v (q and k after rotation) and the attention output, 2 q + 2 kv; with SwiGLU gate, up
      and their product, 3 f, otherwise up and its activation, 2 f; q/k norms save their inputs too, q + kv, and a
      rotation of some features what it turns (:func:`turned_copies`); the log-sum-exp is one fp32 number per head;
    - of multi-head latent attention, whole: the latents before and after their norms; cut: what ``o_proj`` gets;
    - of adapters, whole: what is between A and B, their rank each; and, under dropout, their inputs; with DoRA,
      the outputs before they are scaled.

    ``full`` keeps the layer's input only. ``selective`` recomputes the attention core: a flash kernel keeps no
    scores, so only the log-sum-exp is saved that way. ``elementwise`` keeps no output of a norm that a product reads,
    before the gather or after it, and no product of gate and up (or activation).

    Args:
        tokens: tokens of the micro-batch (rows x sequence length).
        recompute: none | selective | elementwise | full; a stage's ``first: n`` is n layers full and the rest none.
        tp: this rank's share is 1 / tp of heads and columns; need not be an integer.
        shards: of the tokens, one to each rank of the TP group, all equal; None: ``tp``.
        load: of the routed experts of a mixture; None: :func:`~hetero_megatron.spec.expert_load.plain_load`.
    """
    h, q, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if recompute == "full":
        return round(tokens * h / (shards or tp)) * itemsize
    load = load or plain_load(spec, tokens, 1 / tp, shards or max(1, round(tp)))
    routed = load.layers if load is not None else 0.0
    shard = norm_inputs(spec) * h / (shards or tp)
    again = recompute == "elementwise"
    inputs, latents, widths = (1 + shared_inputs(spec, routed, tp)) * h, latent_widths(spec), mlp_widths(spec)
    if again:
        inputs, latents, widths = ungathered_inputs(spec, routed, shards or tp) * h, latents // 2, widths - 1
    gathered = inputs + adapter_widths(spec) + latents
    cut = 2 * q + 2 * kv + value_widths(spec) + widths * common_columns(spec, routed)
    cut += turned_copies(spec) * (q + kv)
    if spec.qk_norm:
        cut += (q + kv) * (2 if spec.qk_norm == "each_head" else 1)  # what is multiplied with weights of each head too
    for whole, part in (dropped_inputs(spec), scaled_outputs(spec)):
        gathered, cut = gathered + whole, cut + part
    lse = 0 if recompute == "selective" else 4 * spec.num_heads
    experts = routed * expert_activation_bytes(spec, load, itemsize, again) if load is not None else 0.0
    return round(tokens * (itemsize * (shard + gathered + cut / tp) + lse / tp) + experts)


def layer_backward_bytes(
    spec: ModelSpec, tokens: int, itemsize: int = 2, tp: float = 1.0, shards: int | None = None,
    load: ExpertLoad | None = None, linear: Callable[[float, float], float] | None = None,
) -> int:  # fmt: skip
    """Bytes that backward through one layer needs beside what the layer keeps, at the worst moment of autograd's.

    The gradient that goes around the MLP is there all the time (h on the token shard). The worst moment is one of:

    - in the activation: its input's gradients are written, one helper beside them, while the input is still kept and
      the product is gone: 2 f with SwiGLU (gate's and up's gradients beside the product's), otherwise 1 f;
    - in ``down_proj``: the gradient that comes in (h, whole), the product's (f), the weight's before it is added up
      (of a frozen weight in 8 bits, what is made of it);
    - its addition to the fp32 sum, which makes a wide copy of a 16-bit gradient;
    - with TP, a gather or scatter of tokens: what is sent, what is received, and the result, 3 h.

    Args:
        linear: where linear modules are in fp8, bytes of the backward of one with so many (outputs, inputs) beside its
            operands; None: in the dtype of the weights.
    """
    load = load or plain_load(spec, tokens, 1 / tp, shards or max(1, round(tp)))
    routed = load.layers if load is not None else 0.0
    h, f = spec.hidden_size, (common_columns(spec, 0.0 if routed < 1 else 1.0)) / tp
    row = tokens * itemsize
    weight = h * f if spec.lora is None or spec.in_few_bits else 0
    inside = (2 if spec.gated else 1) * f
    if linear is not None:
        heads = spec.num_heads * (spec.head_dim if spec.mla is None else spec.mla.v_dim) / tp
        worst = max(row * inside, *(row * h + linear(h, width) for width in (f, heads) if width))
    else:
        making = NF4_MAKING * min(NF4_CHUNK, weight) if spec.in_nf4 else 0
        worst = max(row * inside, row * (h + f) + weight * itemsize + making)
        if itemsize == 2 and not spec.in_few_bits:
            worst = max(worst, weight * (itemsize + 4))
    if tp > 1:
        worst = max(worst, row * 3 * h)
    if load is not None and routed:
        worst = max(worst, expert_backward_bytes(spec, load, itemsize))
    return round(row * h / (shards or tp) + worst)


def layer_operand_bytes(
    spec: ModelSpec, tokens: int, itemsize: int = 2, tp: float = 1.0, load: ExpertLoad | None = None
) -> int:
    """Bytes of the operands of one layer's weight gradients, which wait from B_INPUT to W where backward is split.

    Per token, in elements: after the gather, whole, the inputs of QKV and of the MLP and the gradients of what
    ``o_proj`` and ``down_proj`` put out, 4 h; cut by ``tp``, gradients of q, k, v, the attention output, gradients of
    up (and, with SwiGLU, gate), and ``down_proj``'s input, 2 q + 2 kv + 2 f (3 f). Attention and MLP on one input put
    out what has one gradient.
    """
    h, q, kv = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    load = load or plain_load(spec, tokens, 1 / tp, max(1, round(tp)))
    routed = load.layers if load is not None else 0.0
    dropped = dropped_inputs(spec)
    cut = 2 * q + 2 * kv + (3 if spec.gated else 2) * common_columns(spec, routed) + dropped[1]
    of_mlp = shared_inputs(spec, routed, tp)
    outputs = 1 if spec.parallel_block is not None and tp <= 1 else 1 + of_mlp
    inputs = (1 + of_mlp + outputs) * h + 2 * adapter_widths(spec) + dropped[0]
    experts = routed * expert_operand_bytes(spec, load, itemsize) if load is not None else 0.0
    return round(tokens * itemsize * (inputs + cut / tp) + experts)


def head_operand_bytes(spec: ModelSpec, tokens: int, itemsize: int = 2, tp: float = 1.0, chunked: bool = False) -> int:
    """The same of the head: its input and the gradients of the logits; none where head and loss go through chunks of
    tokens, whose weight gradient is not put off, or where it is frozen."""
    if chunked or spec.lora is not None:
        return 0
    return round(tokens * itemsize * (spec.hidden_size + spec.vocab_size / tp))


def chunk_tokens(limit: int, per_token: float) -> int:
    """Tokens per chunk of head and loss, whole tiles where they are that many, if the logits of a token in at least
    fp32 are ``per_token`` bytes: a chunk's logits, probabilities and their gradients are within ``limit``."""
    rows = max(int(limit // 4 // per_token), 1)
    return rows // TILE * TILE or rows


def head_activation_bytes(
    spec: ModelSpec, tokens: int, itemsize: int = 2, tp: float = 1.0, shards: int | None = None,
    limit: int | None = None,
) -> int:  # fmt: skip
    """Bytes that the head keeps: norm input, head input, and the probabilities in at least fp32.

    Args:
        limit: of the logits, where head and loss go through the tokens in chunks: nothing of them is kept, but in
            forward there are a chunk's, and their gradients. None: all at once.
    """
    h = spec.hidden_size
    per_token = max(itemsize, 4) * spec.vocab_size / tp
    logits = tokens * per_token
    if limit is not None:
        rows, copies = min(tokens, chunk_tokens(limit, per_token)), 2.0 if itemsize >= 4 else 2.5
        if tp == 1 and spec.plain_head and spec.lora is None:  # head and loss are one operator
            rows = min(rows, max(CHUNK_ELEMENTS // spec.vocab_size // TILE, 1) * TILE)
            copies = 2.0 if itemsize >= 4 else 1.5  # logits become their gradients, which are cast
        logits = rows * per_token * copies
    return round(tokens * itemsize * (h / (shards or tp) + h) + logits)


def head_backward_bytes(
    spec: ModelSpec, tokens: int, itemsize: int = 2, tp: float = 1.0, chunked: bool = False
) -> int:  # fmt: skip
    """Bytes that head and loss need beside what they keep, at the worst moment: 16-bit logits beside their wide
    probabilities, or the gradients of the head's input and, before it is added up, of its weight, to whose sum chunks
    of tokens add theirs."""
    h, vocab, wide = spec.hidden_size, spec.vocab_size / tp, max(itemsize, 4)
    weight = vocab * h * itemsize if spec.lora is None and not chunked else 0
    gradients = tokens * itemsize * h + weight
    logits = tokens * itemsize * vocab if itemsize < wide and not chunked else 0
    if logits:  # the wide probabilities are gone before the products of backward
        gradients -= tokens * (wide - itemsize) * vocab
    return round(max(logits, gradients))
