"""The logical tensors of a model, named as in Hugging Face and unfused, and which box of each a rank of a TP group
has.

Everything that moves weights or gradients starts here: a ``ModelSpec`` gives the list of tensors, ``shares`` cuts their
axes for the ranks of a TP group, and ``tensor_box`` is the part of one tensor that a share holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from hetero_megatron.errors import UserError
from hetero_megatron.layout import Box, cut_in_groups, cut_in_tiles
from hetero_megatron.spec.gated_delta import GatedDelta
from hetero_megatron.spec.lora import FEW_BITS_TARGETS, Lora
from hetero_megatron.spec.mla import MLA
from hetero_megatron.spec.model_spec import ModelSpec
from hetero_megatron.spec.state_space import StateSpace

MAGNITUDE = "lora_magnitude_vector"  # DoRA's lengths of rows, as peft calls them


@dataclass(frozen=True)
class Axis:
    """What an axis counts, and the ``unit`` of elements on whose multiples cuts fall.

    ``role``: q_heads, kv_heads, ffn, vocab, hidden, head_dim, position, rank (of an adapter) or latent; of linear
    attention: key_heads (each with its value heads), of Mamba-2 value_heads and key_heads (its groups, of which ranks
    may have copies), and taps (of a convolution); of a mixture of experts: experts
    (which are divided over ranks), expert_ffn, shared_ffn, and router (one per expert, never cut).
    """

    role: str
    unit: int = 1


@dataclass(frozen=True)
class LogicalTensor:
    """One parameter of the whole model. ``layer`` is its decoder layer, ``"embed"`` or ``"head"``; ``trained``: it has
    a gradient and optimizer states, and checkpoints hold it; ``by_load``: but its gradient is 0 and it has no such
    states, for not the optimizer moves it but how many tokens chose each expert; ``joint``: what it shares with those
    that lie beside it in a rank's memory; ``int8``, ``nf4``: it is frozen, and stored in 8 or 4
    bits (``ops/int8_weight.py``, ``ops/nf4_weight.py``)."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]
    layer: int | str
    trained: bool = True
    by_load: bool = False
    joint: str | None = None
    int8: bool = False
    nf4: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def per_expert(self) -> bool:
        """One matrix, bias or adapter of every expert."""
        return self.axes[0].role == "experts"

    @property
    def wide(self) -> bool:
        """It is in at least fp32 in a run of 16 bits, which would round away the small steps by which it moves."""
        return self.by_load or self.name.endswith(f"{MAGNITUDE}.weight")

    @property
    def is_bias(self) -> bool:
        return self.name.endswith("bias")


_HIDDEN, _RANK = Axis("hidden"), Axis("rank")


@lru_cache(maxsize=64)
def logical_tensors(spec: ModelSpec) -> tuple[LogicalTensor, ...]:
    """All parameters, in forward order. A tied head has no tensor of its own."""
    h, vocab = spec.hidden_size, Axis("vocab")
    out = [LogicalTensor("model.embed_tokens.weight", (spec.vocab_size, h), (vocab, _HIDDEN), "embed")]
    if spec.position == "learned":
        shape = (spec.max_position_embeddings, h)
        out.append(LogicalTensor("model.embed_positions.weight", shape, (Axis("position"), _HIDDEN), "embed"))
    for i in range(spec.num_layers):
        out += _layer(spec, i)
    out += _norm(spec, "model.norm", "head")
    for i in spec.predictions:
        out += _prediction(spec, i)
    if not spec.tied:
        out.append(LogicalTensor("lm_head.weight", (spec.vocab_size, h), (vocab, _HIDDEN), "head"))
    if spec.head_bias:
        out.append(LogicalTensor("lm_head.bias", (spec.vocab_size,), (vocab,), "head"))
    return tuple(out if spec.lora is None else _with_adapters(out, spec, spec.lora))


def _with_adapters(tensors: Sequence[LogicalTensor], spec: ModelSpec, lora: Lora) -> Iterator[LogicalTensor]:
    """The frozen base, of which projections may be in 8 bits, and after each adapted matrix its A, unless one before it
    has it, and B, which are cut where it is; of the experts of a layer, one of each per expert. With DoRA also the
    lengths of its rows."""
    from hetero_megatron.spec.adapter_choice import adapters_among  # which knows all families

    adapter_of = adapters_among(tensors, spec, lora)
    for tensor in tensors:
        module, _, kind = tensor.name.rpartition(".")
        in_few_bits = kind == "weight" and module.rpartition(".")[2] in FEW_BITS_TARGETS
        int8, nf4 = (in_few_bits and lora.base_dtype == name for name in ("int8", "nf4"))
        yield replace(tensor, trained=False, int8=int8, nf4=nf4)
        adapter = adapter_of.get(module) if kind == "weight" else None
        if adapter is None:
            continue
        (*experts, outputs, inputs), (*expert_axes, rows, columns) = tensor.shape, tensor.axes
        for name, shape, axes in (
            ("lora_A", (adapter.rank, inputs), (_RANK, columns)),
            ("lora_B", (outputs, adapter.rank), (rows, _RANK)),
        ):  # fmt: skip
            if name == "lora_B" or adapter.first == module:
                yield LogicalTensor(f"{module}.{name}.weight", (*experts, *shape), (*expert_axes, *axes), tensor.layer)
        if lora.dora:
            of_rows = (*expert_axes, rows)
            yield LogicalTensor(f"{module}.{MAGNITUDE}.weight", (*experts, outputs), of_rows, tensor.layer)


def trained_tensors(spec: ModelSpec) -> tuple[LogicalTensor, ...]:
    """Those that an optimizer changes: all, or with adapters only these."""
    return tuple(t for t in logical_tensors(spec) if t.trained)


def untrained_layers(spec: ModelSpec) -> int:
    """The first layers without adapters: nothing before or in them is trained, so that no gradient goes there."""
    if spec.lora is None or not (spec.lora.sites or spec.hybrid):
        return 0
    layers = (t.layer for t in trained_tensors(spec) if isinstance(t.layer, int))
    return min(layers, default=spec.num_layers)


def _layer(spec: ModelSpec, i: int) -> Iterator[LogicalTensor]:
    base = f"model.layers.{i}"
    kind, delta = spec.layer(i), spec.delta
    if spec.norm_placement != "post":
        yield from _norm(spec, f"{base}.input_layernorm", i)
    if kind.linear and delta is not None:
        name, h = f"{base}.linear_attn", spec.hidden_size
        yield from _state_space(delta, name, h, i) if isinstance(delta, StateSpace) else _gated_delta(delta, name, h, i)
    elif kind.mixer == "attention":
        yield from _attention(spec, base, i) if spec.mla is None else _latent_attention(spec, spec.mla, base, i)
    if spec.parallel_block != "one_norm" and not kind.single:
        yield from _norm(spec, f"{base}.post_attention_layernorm", i)
    if spec.norm_placement == "pre_post":
        yield from _norm(spec, f"{base}.pre_feedforward_layernorm", i)
    columns, ffn = spec.ffn_hidden_size, Axis("ffn")
    if kind.mlp != "none":
        yield from _moe(spec, i) if kind.mlp == "moe" else _mlp(spec, f"{base}.mlp", columns, ffn, i)
    if spec.norm_placement != "pre":
        yield from _norm(spec, f"{base}.post_feedforward_layernorm", i)


def _prediction(spec: ModelSpec, i: int) -> Iterator[LogicalTensor]:
    """A module that predicts further tokens: it belongs to the head. All ranks of a TP group have all of its projection
    and compute their own tokens."""
    base, h = f"model.layers.{i}", spec.hidden_size
    for name in ("enorm", "hnorm"):
        yield from _norm(spec, f"{base}.{name}", "head")
    yield LogicalTensor(f"{base}.eh_proj.weight", (h, 2 * h), (_HIDDEN, _HIDDEN), "head")
    yield from (replace(tensor, layer="head") for tensor in _layer(spec, i))
    yield from _norm(spec, f"{base}.shared_head.norm", "head")


def _attention(spec: ModelSpec, base: str, i: int) -> Iterator[LogicalTensor]:
    q, kv = Axis("q_heads", spec.head_dim), Axis("kv_heads", spec.head_dim)
    nq, nkv, h = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
    projections = [("q_proj", nq, q), ("k_proj", nkv, kv), ("v_proj", nkv, kv)]
    projections += [("g_proj", nq, q)] if spec.attn_gate else []
    yield from _rows_of_one(f"{base}.self_attn", projections, h, spec.qkv_bias, i)
    if spec.qk_norm not in (None, "l2"):
        common, per_head = spec.qk_norm in ("head", "head_layer"), ((spec.head_dim,), (Axis("head_dim"),))
        for letter, axis, rows in (("q", q, nq), ("k", kv, nkv)):
            shape, axes = per_head if common else ((rows,), (axis,))
            for kind in ("weight", "bias") if spec.qk_norm == "head_layer" else ("weight",):
                yield LogicalTensor(f"{base}.self_attn.{letter}_norm.{kind}", shape, axes, i)
    if spec.sinks:
        yield LogicalTensor(f"{base}.self_attn.sinks", (spec.num_heads,), (Axis("q_heads"),), i)
    yield LogicalTensor(f"{base}.self_attn.o_proj.weight", (h, nq), (_HIDDEN, q), i)
    if spec.out_bias:
        yield LogicalTensor(f"{base}.self_attn.o_proj.bias", (h,), (_HIDDEN,), i)


def _gated_delta(delta: GatedDelta, base: str, h: int, i: int) -> Iterator[LogicalTensor]:
    """All but the norm is cut by key heads, each with its value heads."""
    per_key, taps = delta.values_per_key, Axis("taps")
    keys, values, heads = (Axis("key_heads", n) for n in (delta.key_dim, per_key * delta.value_dim, per_key))
    qkv = (("q", delta.key_width, keys), ("k", delta.key_width, keys), ("v", delta.value_width, values))
    gates, decays = [("z", delta.value_width, values), ("a", delta.value_heads, heads)], heads
    if delta.by_feature:
        gates, decays = [], Axis("key_heads", per_key * delta.key_dim)
    rows = (*qkv, *gates[:1], ("b", delta.value_heads, heads), *gates[1:])
    yield from _rows_of_one(base, [(f"{letter}_proj", n, axis) for letter, n, axis in rows], h, False, i)
    if delta.by_feature:
        for letter, n, axis in (("f", delta.decays, decays), ("g", delta.value_width, values)):
            yield from _down(f"{base}.{letter}_a_proj", delta.key_dim, h, False, i)
            yield LogicalTensor(f"{base}.{letter}_b_proj.weight", (n, delta.key_dim), (axis, Axis("latent")), i)
    for letter, n, axis in qkv:
        yield LogicalTensor(f"{base}.{letter}_conv.weight", (n, delta.kernel), (axis, taps), i)
    for name, n, axis in (("A_log", delta.value_heads, heads), ("dt_bias", delta.decays, decays)):
        yield LogicalTensor(f"{base}.{name}", (n,), (axis,), i)
    yield LogicalTensor(f"{base}.norm.weight", (delta.value_dim,), (Axis("head_dim"),), i)
    yield LogicalTensor(f"{base}.o_proj.weight", (h, delta.value_width), (_HIDDEN, values), i)


def _state_space(delta: StateSpace, base: str, h: int, i: int) -> Iterator[LogicalTensor]:
    """C, B, x, the gate z and the step sizes a of Mamba-2, called as in linear attention."""
    taps = Axis("taps")
    keys, values, heads = Axis("key_heads", delta.key_dim), Axis("value_heads", delta.value_dim), Axis("value_heads")
    qkv = (("q", delta.key_width, keys), ("k", delta.key_width, keys), ("v", delta.value_width, values))
    rows = (*qkv, ("z", delta.value_width, values), ("a", delta.value_heads, heads))
    yield from _rows_of_one(base, [(f"{letter}_proj", n, axis) for letter, n, axis in rows], h, delta.proj_bias, i)
    for letter, n, axis in qkv:
        yield LogicalTensor(f"{base}.{letter}_conv.weight", (n, delta.kernel), (axis, taps), i)
        if delta.conv_bias:
            yield LogicalTensor(f"{base}.{letter}_conv.bias", (n,), (axis,), i)
    for name in ("A_log", "dt_bias", "D"):
        yield LogicalTensor(f"{base}.{name}", (delta.value_heads,), (heads,), i)
    yield LogicalTensor(f"{base}.norm.weight", (delta.value_width,), (values,), i)
    yield LogicalTensor(f"{base}.o_proj.weight", (h, delta.value_width), (_HIDDEN, values), i)
    if delta.proj_bias:
        yield LogicalTensor(f"{base}.o_proj.bias", (h,), (_HIDDEN,), i)


def _latent_attention(spec: ModelSpec, mla: MLA, base: str, i: int) -> Iterator[LogicalTensor]:
    """Projections up are cut by heads; projections down and the latents' norms are not."""
    base, h, heads, latent = f"{base}.self_attn", spec.hidden_size, spec.num_heads, Axis("latent")
    qk, kv, v = (Axis("q_heads", n) for n in (mla.qk_dim, mla.nope_dim + mla.v_dim, mla.v_dim))
    if mla.q_rank is None:
        yield LogicalTensor(f"{base}.q_proj.weight", (heads * mla.qk_dim, h), (qk, _HIDDEN), i)
    else:
        yield from _down(f"{base}.q_a_proj", mla.q_rank, h, mla.bias, i)
        yield LogicalTensor(f"{base}.q_a_layernorm.weight", (mla.q_rank,), (latent,), i)
        yield LogicalTensor(f"{base}.q_b_proj.weight", (heads * mla.qk_dim, mla.q_rank), (qk, latent), i)
    yield from _down(f"{base}.kv_a_proj_with_mqa", mla.kv_rank + mla.rope_dim, h, mla.bias, i)
    yield LogicalTensor(f"{base}.kv_a_layernorm.weight", (mla.kv_rank,), (latent,), i)
    rows = heads * (mla.nope_dim + mla.v_dim)
    yield LogicalTensor(f"{base}.kv_b_proj.weight", (rows, mla.kv_rank), (kv, latent), i)
    yield LogicalTensor(f"{base}.o_proj.weight", (h, heads * mla.v_dim), (_HIDDEN, v), i)
    if spec.out_bias:
        yield LogicalTensor(f"{base}.o_proj.bias", (h,), (_HIDDEN,), i)


def _down(name: str, rows: int, h: int, bias: bool, i: int) -> Iterator[LogicalTensor]:
    yield LogicalTensor(f"{name}.weight", (rows, h), (Axis("latent"), _HIDDEN), i)
    if bias:
        yield LogicalTensor(f"{name}.bias", (rows,), (Axis("latent"),), i)


def _rows_of_one(
    parent: str, projections: Iterable[tuple[str, int, Axis]], h: int, bias: bool, i: int
) -> Iterator[LogicalTensor]:
    """Matrices (name, rows, their axis) that multiply one input, and then their biases: a rank keeps each kind in one
    piece of memory, in this order, and makes one product of them."""
    for name, rows, axis in projections:
        yield LogicalTensor(f"{parent}.{name}.weight", (rows, h), (axis, _HIDDEN), i, joint=f"{parent}.weight")
    for name, rows, axis in projections if bias else ():
        yield LogicalTensor(f"{parent}.{name}.bias", (rows,), (axis,), i, joint=f"{parent}.bias")


def _mlp(spec: ModelSpec, name: str, columns: int, axis: Axis, i: int) -> Iterator[LogicalTensor]:
    h = spec.hidden_size
    rows = [(column, columns, axis) for column in spec.mlp_projections[:-1]]
    yield from _rows_of_one(name, rows, h, spec.mlp_bias, i)
    yield LogicalTensor(f"{name}.down_proj.weight", (h, columns), (_HIDDEN, axis), i)
    if spec.mlp_bias:
        yield LogicalTensor(f"{name}.down_proj.bias", (h,), (_HIDDEN,), i)


def _moe(spec: ModelSpec, i: int) -> Iterator[LogicalTensor]:
    moe, h, name = spec.moe, spec.hidden_size, f"model.layers.{i}.mlp"
    assert moe is not None
    router, experts, columns = Axis("router"), Axis("experts"), Axis("expert_ffn")
    yield LogicalTensor(f"{name}.gate.weight", (moe.num_experts, h), (router, _HIDDEN), i)
    if moe.router_bias:
        yield LogicalTensor(f"{name}.gate.bias", (moe.num_experts,), (router,), i)
    if moe.score_bias:
        yield LogicalTensor(f"{name}.gate.e_score_correction_bias", (moe.num_experts,), (router,), i, by_load=True)
    for column in spec.mlp_projections[:-1]:
        shape = (moe.num_experts, moe.ffn_hidden_size, h)
        yield LogicalTensor(f"{name}.experts.{column}.weight", shape, (experts, columns, _HIDDEN), i)
        if moe.bias:
            yield LogicalTensor(f"{name}.experts.{column}.bias", shape[:2], (experts, columns), i)
    shape = (moe.num_experts, h, moe.ffn_hidden_size)
    yield LogicalTensor(f"{name}.experts.down_proj.weight", shape, (experts, _HIDDEN, columns), i)
    if moe.bias:
        yield LogicalTensor(f"{name}.experts.down_proj.bias", shape[:2], (experts, _HIDDEN), i)
    if moe.shared_ffn:
        yield from _mlp(spec, f"{name}.shared_expert", moe.shared_ffn, Axis("shared_ffn"), i)
    if moe.shared_gate:
        yield LogicalTensor(f"{name}.shared_expert_gate.weight", (1, h), (Axis("gate"), _HIDDEN), i)


def expert_tensor(tensor: LogicalTensor, expert: int) -> LogicalTensor:
    """One expert's matrix or bias of a tensor over experts, with Hugging Face's name of it."""
    assert tensor.per_expert, tensor
    name = tensor.name.replace(".experts.", f".experts.{expert}.")
    return replace(tensor, name=name, shape=tensor.shape[1:], axes=tensor.axes[1:])


def _norm(spec: ModelSpec, name: str, layer: int | str) -> Iterator[LogicalTensor]:
    yield LogicalTensor(f"{name}.weight", (spec.hidden_size,), (_HIDDEN,), layer)
    if spec.norm == "layer" and spec.norm_bias:
        yield LogicalTensor(f"{name}.bias", (spec.hidden_size,), (_HIDDEN,), layer)


def stage_tensors(spec: ModelSpec, layers: Iterable[int], embed: bool, head: bool) -> tuple[LogicalTensor, ...]:
    """What a stage with these layers holds; with tied weights, or modules that predict further tokens, the head stage
    has the embedding matrix too."""
    return _stage_tensors(spec, frozenset(layers), embed, head)


@lru_cache(maxsize=512)
def _stage_tensors(spec: ModelSpec, chosen: frozenset[int], embed: bool, head: bool) -> tuple[LogicalTensor, ...]:
    def held(tensor: LogicalTensor) -> bool:
        if tensor.layer == "embed":
            return embed or (head and spec.embeds_last and tensor.name == "model.embed_tokens.weight")
        return head if tensor.layer == "head" else tensor.layer in chosen

    return tuple(t for t in logical_tensors(spec) if held(t))


Interval = tuple[int, int]


@dataclass(frozen=True)
class Share:
    """One rank's half-open part of each cut axis, in units (heads, feed-forward columns, vocabulary, experts).

    ``expert_ffn``: columns of each of its experts; ``shared_ffn``: of what all tokens share in a mixture of experts;
    ``key_heads``, ``value_heads``: of linear attention.
    """

    q_heads: Interval
    kv_heads: Interval
    ffn: Interval
    vocab: Interval
    experts: Interval = (0, 0)
    expert_ffn: Interval = (0, 0)
    shared_ffn: Interval = (0, 0)
    key_heads: Interval = (0, 0)
    value_heads: Interval = (0, 0)


def whole_share(spec: ModelSpec) -> Share:
    """The share of a rank that is alone."""
    return shares(spec, (1,))[0]


def shares(spec: ModelSpec, tp_split: Sequence[int], heads: Interval | None = None) -> tuple[Share, ...]:
    """One share per TP rank, in proportion to ``tp_split``.

    Attention is cut at KV heads while there are at least as many as ranks, else at query heads, and then
    ranks whose query heads use the same KV head hold copies of it. Feed-forward and vocabulary are cut at multiples
    of 128, 64 or 8 columns and rows where they are large enough (:func:`~hetero_megatron.layout.cut_in_tiles`). Heads
    of Mamba-2 and its groups are cut as query and KV heads are. Shares
    of heads and vocabulary may be empty. Every rank has its columns of all experts, unless a plan divides the experts
    themselves (``plans/experts.py``).

    Args:
        heads: the query heads that the group computes (default all).

    Raises:
        UserError: some rank would get no feed-forward column.
    """
    begin, end = heads or (0, spec.num_heads)
    ffn, vocab = (cut_in_tiles(size, tuple(tp_split)) for size in (spec.ffn_hidden_size, spec.vocab_size))
    if any(a == b for a, b in ffn):
        raise UserError(
            f"gives a rank none of the {spec.ffn_hidden_size} feed-forward columns",
            field="tp_split", value=list(tp_split),
            accepted="weights that leave every rank at least one column",
        )  # fmt: skip
    q, kv = cut_in_groups((begin, end), spec.queries_per_kv, tp_split)
    moe = spec.moe
    sizes = (0, 0, 0) if moe is None else (moe.num_experts, moe.ffn_hidden_size, moe.shared_ffn)
    experts = [(0, sizes[0])] * len(tp_split)
    columns, shared = (cut_in_tiles(size, tuple(tp_split)) for size in sizes[1:])
    states = ([(0, 0)] * len(tp_split),) * 2 if spec.delta is None else spec.delta.heads(tp_split)
    return tuple(map(Share, q, kv, ffn, vocab, experts, columns, shared, *states))


def tensor_box(tensor: LogicalTensor, share: Share) -> Box:
    """The box of a logical tensor that a rank with this share holds (axes of other roles whole)."""
    lo, hi = [], []
    for axis, size in zip(tensor.axes, tensor.shape, strict=True):
        a, b = getattr(share, axis.role, (0, size // axis.unit))
        lo.append(a * axis.unit)
        hi.append(b * axis.unit)
    return Box(tuple(lo), tuple(hi))
