"""Bytes that layers and head keep from forward to backward, as plain formulas of a model's configuration."""

from __future__ import annotations

from collections.abc import Callable

from hetero_megatron.spec.expert_load import (
    ExpertLoad,
    expert_activation_bytes,
    expert_operand_bytes,
    plain_load,
)
from hetero_megatron.spec.flops import (
    CHUNK_ELEMENTS,
    TILE,
    adapted_layers,
    attention_layers,
    chunk_tokens,
    common_columns,
    linear_layers,
    mixer_layers,
    mlp_layers,
    module_layer,
    products_of,
)
from hetero_megatron.spec.model_spec import EXPERT_ACTIVATIONS, ModelSpec
from hetero_megatron.spec.tensors import LogicalTensor

CUT_INPUTS = ("q_heads", "ffn", "key_heads", "value_heads")  # of which a rank of a TP group has a part


def _most_of_a_layer(spec: ModelSpec, sizes: Callable[[tuple[LogicalTensor, ...]], tuple[int, int]]) -> tuple[int, int]:
    """(whole, cut) elements that adapters keep in the layer in which these are most."""
    return max((sizes(layer) for layer, _ in adapted_layers(spec)), key=sum, default=(0, 0))


def dropped_inputs(spec: ModelSpec) -> tuple[int, int]:
    """Elements per token of one layer that adapters keep of their inputs under dropout, each its own: (of inputs that
    every rank of a TP group has whole, of those that are cut)."""
    if spec.lora is None or not spec.lora.dropout:
        return 0, 0

    def sizes(layer: tuple[LogicalTensor, ...]) -> tuple[int, int]:
        inputs = [t for t in layer if t.name.endswith("lora_A.weight")]
        cut = sum(t.shape[1] for t in inputs if t.axes[1].role in CUT_INPUTS)
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
    return _most_of_a_layer(spec, lambda layer: (sum(a.shape[0] for a, _ in products_of(layer)), 0))[0]


def mlp_widths(spec: ModelSpec) -> int:
    """What an MLP keeps between its projections, in widths of its hidden layer: gate, up and their product with SwiGLU
    (clamped too; another gate keeps its activation too), otherwise up and its activation."""
    if not spec.gated:
        return 2
    return 3 if spec.activation in EXPERT_ACTIVATIONS else 4


def norm_inputs(spec: ModelSpec) -> float:
    """Different inputs of a layer's norms, in hidden sizes."""
    if spec.single_blocks:
        return mixer_layers(spec) + mlp_layers(spec)
    return 1 if spec.parallel_block is not None else 4 if spec.norm_placement == "pre_post" else 2


def norm_outputs(spec: ModelSpec) -> float:
    """Outputs of a layer's norms that products read, in hidden sizes."""
    if spec.single_blocks:
        return norm_inputs(spec)
    if spec.parallel_block == "one_norm":
        return 1
    return 0 if spec.norm_placement == "post" else 2


def shared_inputs(spec: ModelSpec, routed: float, tp: float) -> float:
    """Inputs of MLPs after the gather, in hidden sizes: a mixture of experts has one only for what all tokens share,
    and without a TP group that is the router's; without one, attention and MLP share the output of their one norm."""
    if spec.parallel_block == "one_norm" and tp <= 1:
        return 0.0
    shared = spec.moe is not None and bool(spec.moe.shared_ffn) and tp > 1
    return mlp_layers(spec) - routed + routed * shared


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
    ropes = [kind.rope for kind in spec.layer_kinds if kind.rope is not None and not kind.linear]
    copied = sum(rope.interleaved or rope.width(spec.head_dim) < spec.head_dim for rope in ropes)
    return copied / len(spec.layer_kinds)


def normed_copies(kind: str, itemsize: int) -> int:
    """What norms of queries and keys keep, in widths of both: their inputs; before weights of each head, or of a whole
    projection, what these multiply, too; of 16 bits, a whole projection as it is, which values lie beside, and twice in
    fp32."""
    if kind == "projection":
        return 6 if itemsize == 2 else 2
    return 2 if kind == "each_head" else 1


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
    - with a gate on attention's output, cut: what it is the sigmoid of, that, and the product, 3 q;
    - of linear attention, instead of attention's part, what
      :func:`~hetero_megatron.spec.delta_bytes.delta_activation_bytes` says;
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
    if spec.moe is not None:
        load = load or plain_load(spec, tokens, 1 / tp, shards or max(1, round(tp)))
    routed = load.layers if load is not None else 0.0
    shard = norm_inputs(spec) * h / (shards or tp)
    elementwise = recompute == "elementwise"
    inputs = (mixer_layers(spec) + shared_inputs(spec, routed, tp)) * h
    latents, widths = latent_widths(spec), mlp_widths(spec)
    if elementwise:
        inputs, latents, widths = ungathered_inputs(spec, routed, shards or tp) * h, latents // 2, widths - 1
    gathered = inputs + adapter_widths(spec) + latents
    cut = 2 * q + 2 * kv + value_widths(spec) + turned_copies(spec) * (q + kv) + 3 * q * spec.attn_gate
    if spec.qk_norm:
        cut += (q + kv) * normed_copies(spec.qk_norm, itemsize)
    attention, linear = attention_layers(spec), linear_layers(spec)
    cut = attention * cut + widths * common_columns(spec, routed)
    for uncut_width, cut_width in (dropped_inputs(spec), scaled_outputs(spec)):
        gathered, cut = gathered + uncut_width, cut + cut_width
    lse = 0 if recompute == "selective" else 4 * attention * spec.num_heads
    if linear:
        from hetero_megatron.spec.delta_bytes import delta_activation_bytes

        assert spec.delta is not None
        lse += linear * delta_activation_bytes(spec, recompute, itemsize, tp)
        gathered += linear * spec.delta.low_rank
    experts = routed * expert_activation_bytes(spec, load, itemsize, elementwise) if load is not None else 0.0
    return round(tokens * (itemsize * (shard + gathered + cut / tp) + lse / tp) + experts)


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
    if spec.moe is not None:
        load = load or plain_load(spec, tokens, 1 / tp, max(1, round(tp)))
    routed = load.layers if load is not None else 0.0
    dropped = dropped_inputs(spec)
    linear = linear_layers(spec)
    cut: float = attention_layers(spec) * (2 * q + 2 * kv + q * spec.attn_gate)
    low_rank = 0.0
    if linear:
        from hetero_megatron.spec.delta_bytes import delta_operands

        assert spec.delta is not None
        cut, low_rank = cut + linear * delta_operands(spec, tp), 2 * linear * spec.delta.low_rank
    cut += len(spec.mlp_projections) * common_columns(spec, routed) + dropped[1]
    of_mlp, of_mixer = shared_inputs(spec, routed, tp), mixer_layers(spec)
    outputs = 1 if spec.parallel_block is not None and tp <= 1 else of_mixer + of_mlp
    inputs = (of_mixer + of_mlp + outputs) * h + 2 * adapter_widths(spec) + dropped[0] + low_rank
    experts = routed * expert_operand_bytes(spec, load, itemsize) if load is not None else 0.0
    return round(tokens * itemsize * (inputs + cut / tp) + experts)


def module_activation_bytes(
    spec: ModelSpec, tokens: int, recompute: str = "none", itemsize: int = 2, tp: float = 1.0,
    shards: int | None = None, load: ExpertLoad | None = None,
) -> int:  # fmt: skip
    """Bytes that one module that predicts further tokens keeps before the head, arguments as of a layer: the inputs of
    its two norms and what they put out, 4 h on the token shard, and what its layer keeps. Recomputed whole, the two
    inputs, and not the input of its final norm, which the head's formula counts."""
    hidden_bytes = round(tokens * spec.hidden_size / (shards or tp)) * itemsize
    if recompute == "full":
        return hidden_bytes
    return 4 * hidden_bytes + layer_activation_bytes(module_layer(spec), tokens, recompute, itemsize, tp, shards, load)


def module_operand_bytes(
    spec: ModelSpec, tokens: int, itemsize: int = 2, tp: float = 1.0, shards: int | None = None,
    load: ExpertLoad | None = None,
) -> int:  # fmt: skip
    """Bytes of the operands of its weight gradients, which wait from B_INPUT to W where backward is split: of its
    projection, 3 h on the token shard, and of its layer."""
    hidden_bytes = round(tokens * spec.hidden_size / (shards or tp)) * itemsize
    return 3 * hidden_bytes + layer_operand_bytes(module_layer(spec), tokens, itemsize, tp, load)


def head_operand_bytes(spec: ModelSpec, tokens: int, itemsize: int = 2, tp: float = 1.0, chunked: bool = False) -> int:
    """The same of the head: its input and the gradients of the logits; none where head and loss go through chunks of
    tokens, whose weight gradient is not put off, or where it is frozen."""
    if chunked or spec.lora is not None:
        return 0
    return round(tokens * itemsize * (spec.hidden_size + spec.vocab_size / tp))


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
