"""A run of decoder layers, with the embedding before or the head after it: one definition for all families.

It reads and runs like a single-device model. ``Share`` says how many heads, columns and rows this copy has;
tensor parallelism and recomputation are applied from outside (``parallel/``). Parameters carry the logical
names of ``spec/tensors.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import torch
from torch import nn

from hetero_megatron.model.moe import MoEMLP
from hetero_megatron.ops import KernelPlan, default_kernels, rope_frequencies, rope_tables, softcap
from hetero_megatron.ops.dropout import AFTER_ATTENTION, AFTER_MLP, EMBEDDING, SCORES, Draws, ScoreDropout
from hetero_megatron.spec import Dropout, LayerKind, ModelSpec, Rope, Share
from hetero_megatron.spec.dropout import NO_DROPOUT


class StageBatch(Protocol):
    """What the model needs to know about a micro-batch besides its tokens."""

    positions: torch.Tensor  # [b, s] int64
    documents: Sequence[Sequence[int]] | None  # document starts per row
    draws: Draws | None  # of dropout; None: there is none, as in evaluation and generation


@dataclass(frozen=True)
class Context:
    """Per micro-batch values that all layers share.

    Attributes:
        ropes: of each of the model's rotary embeddings (cos, sin), each [b, s, 1, pairs of features].
        draws: of dropout; with them ``tokens``: [s] int64, the number of each token of the residual stream.
    """

    documents: Sequence[Sequence[int]] | None
    ropes: Mapping[Rope, tuple[torch.Tensor, torch.Tensor]]
    draws: Draws | None = None
    tokens: torch.Tensor | None = None


class Linear(nn.Module):
    """x W^T + b; values are set from outside, so none are drawn here."""

    def __init__(self, inputs: int, outputs: int, bias: bool, kernels: KernelPlan) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T + ``bias``; adapters replace it (``parallel/lora.py``)."""
        return self.kernels.gemm(x, self.weight, bias)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.bias)


class Norm(nn.Module):
    def __init__(self, spec: ModelSpec, width: int, kernels: KernelPlan, kind: str | None = None) -> None:
        super().__init__()
        self.kernels, self.eps, self.offset = kernels, spec.norm_eps, spec.norm_offset
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if (kind or spec.norm) == "layer" else None

    def gain(self) -> torch.Tensor:
        """What the normalised x is multiplied with: 1 + w of a small w needs more than 16 bits."""
        if not self.offset:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + self.offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return self.kernels.rms_norm(x, self.gain(), self.eps)  # type: ignore[no-any-return]
        return self.kernels.layer_norm(x, self.gain(), self.bias, self.eps)  # type: ignore[no-any-return]

    def after_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        if self.bias is None:
            return self.kernels.add_rms_norm(x, residual, self.gain(), self.eps)  # type: ignore[no-any-return]
        total = x + residual
        return self.forward(total), total


class ProjectionNorm(nn.Module):
    """RMS norm over all heads of a projection [b, s, heads, d] of ``width`` features in the whole model, of which this
    copy has some heads: so the sum of squares comes from outside."""

    def __init__(self, spec: ModelSpec, heads: int, width: int) -> None:
        super().__init__()
        self.eps, self.width = spec.norm_eps, width
        self.weight = nn.Parameter(torch.empty(heads * spec.head_dim))

    def squares(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, heads] in at least fp32."""
        return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1)

    def forward(self, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """``total``: [b, s], the squares of the whole projection."""
        scale = torch.rsqrt(total / self.width + self.eps)[..., None, None]
        return (x.to(total.dtype) * scale).to(x.dtype) * self.weight.view(x.shape[-2:])


def sum_heads(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Squares [b, s, heads] and [b, s, kv_heads] -> their sums [b, s, 2]."""
    return torch.stack([q.sum(-1), k.sum(-1)], dim=-1)


class CoreAttention(nn.Module):
    """Softmax attention: a module of its own, so it can be recomputed or distributed. ``sinks``: [heads] or none.

    Args:
        layer: its number; first_head: that of its first query head; dropout: rate of the probabilities.
    """

    def __init__(
        self, spec: ModelSpec, kind: LayerKind, kernels: KernelPlan, layer: int, first_head: int, dropout: float
    ) -> None:
        super().__init__()
        self.window, self.softcap, self.kernels = kind.window, spec.attn_softcap, kernels
        self.layer, self.first_head, self.dropout = layer, first_head, dropout

    def score_dropout(self, draws: Draws | None, first_head: int) -> ScoreDropout | None:
        """Of query heads from ``first_head`` on."""
        if draws is None or not self.dropout:
            return None
        return ScoreDropout(self.dropout, draws.key(self.layer, SCORES), draws.sample, first_head)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        dropout = self.score_dropout(context.draws, self.first_head)
        out, _ = self.kernels.attention(q, k, v, sinks, context.documents, self.window, 0, 0, self.softcap, dropout)
        return cast(torch.Tensor, out)


class Attention(nn.Module):
    def __init__(
        self, spec: ModelSpec, kind: LayerKind, share: Share, kernels: KernelPlan, layer: int, dropout: Dropout
    ) -> None:
        super().__init__()
        self.kernels, self.rope = kernels, kind.rope
        d, h = spec.head_dim, spec.hidden_size
        (q0, q1), (kv0, kv1) = share.q_heads, share.kv_heads
        self.heads, self.kv_heads, self.head_dim = q1 - q0, kv1 - kv0, d
        self.q_proj = Linear(h, self.heads * d, bias=spec.qkv_bias, kernels=kernels)
        self.k_proj = Linear(h, self.kv_heads * d, bias=spec.qkv_bias, kernels=kernels)
        self.v_proj = Linear(h, self.kv_heads * d, bias=spec.qkv_bias, kernels=kernels)
        self.o_proj = Linear(self.heads * d, h, bias=spec.out_bias, kernels=kernels)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.sum_heads = sum_heads  # tensor parallelism adds up over its ranks
        if spec.qk_norm == "head":
            self.q_norm, self.k_norm = (Norm(spec, d, kernels, "rms") for _ in "qk")
        elif spec.qk_norm == "projection":
            self.q_norm = ProjectionNorm(spec, self.heads, spec.num_heads * d)
            self.k_norm = ProjectionNorm(spec, self.kv_heads, spec.num_kv_heads * d)
        self.sinks = nn.Parameter(torch.empty(self.heads)) if spec.sinks else None
        self.core_attention = CoreAttention(spec, kind, kernels, layer, q0, dropout.attention)
        # Scores are computed with 1 / sqrt(d); a family's other scale goes into the queries.
        self.query_scale = 1.0 if spec.attn_scale is None else spec.attn_scale * d**0.5
        # Where the query heads do not use the local key-value heads evenly, each one's head is looked up.
        users = [i // spec.queries_per_kv - kv0 for i in range(q0, q1)]
        local = max(kv1 - kv0, 1)
        each = max(len(users) // local, 1)
        even = len(users) % local == 0 and users == [i // each for i in range(len(users))]
        # On the device from the start: a list would be uploaded at every use.
        self.kv_of_query = None if even else torch.tensor(users)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.heads, self.head_dim)
        k = self.k_proj(x).view(b, s, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(b, s, self.kv_heads, self.head_dim)
        if isinstance(self.q_norm, ProjectionNorm) and isinstance(self.k_norm, ProjectionNorm):
            totals = self.sum_heads(self.q_norm.squares(q), self.k_norm.squares(k))
            q, k = self.q_norm(q, totals[..., 0]), self.k_norm(k, totals[..., 1])
        elif self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = self._turn(q, k, *context.ropes[self.rope])
        if self.query_scale != 1.0:
            q = q * self.query_scale
        if self.kv_of_query is not None:
            k, v = k.index_select(2, self.kv_of_query), v.index_select(2, self.kv_of_query)
        out = self.core_attention(q, k, v, self.sinks, context).reshape(b, s, self.heads * self.head_dim)
        return cast(torch.Tensor, self.o_proj(out))


    def _turn(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k [b, s, heads, d] by the rotary embedding. Interleaved pairs come out as halves: of both alike, so
        that their products are the same."""
        assert self.rope is not None
        turned, both = 2 * cos.shape[-1], (q, k)
        parts = [x[..., :turned] for x in both] if turned < self.head_dim else [*both]
        if self.rope.interleaved:
            parts = [x.unflatten(-1, (turned // 2, 2)).transpose(-1, -2).flatten(-2) for x in parts]
        q, k = self.kernels.rope(*parts, cos, sin)
        if turned == self.head_dim:
            return q, k
        q, k = (torch.cat([x, rest[..., turned:]], dim=-1) for x, rest in zip((q, k), both, strict=True))
        return q, k


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec, columns: int, kernels: KernelPlan) -> None:
        super().__init__()
        self.kernels = kernels
        h, f = spec.hidden_size, columns
        self.activation = spec.activation
        self.gate_proj = Linear(h, f, bias=spec.mlp_bias, kernels=kernels) if spec.gated else None
        self.up_proj = Linear(h, f, bias=spec.mlp_bias, kernels=kernels)
        self.down_proj = Linear(f, h, bias=spec.mlp_bias, kernels=kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up_proj(x)
        if self.gate_proj is None:
            squared = self.activation == "squared_relu"
            y = self.kernels.squared_relu(y) if squared else self.kernels.gelu(y, self.activation == "gelu_tanh")
        elif self.activation == "swiglu":
            y = self.kernels.swiglu(self.gate_proj(x), y)
        else:
            y = self.kernels.gelu(self.gate_proj(x), self.activation == "geglu_tanh") * y
        return cast(torch.Tensor, self.down_proj(y))


def _mlp(spec: ModelSpec, kind: LayerKind, share: Share, kernels: KernelPlan) -> nn.Module:
    if kind.mlp == "dense":
        return MLP(spec, share.ffn[1] - share.ffn[0], kernels)
    assert spec.moe is not None
    shared = MLP(spec, share.shared_ffn[1] - share.shared_ffn[0], kernels) if spec.moe.shared_ffn else None
    return MoEMLP(spec, share, kernels, shared)


class Layer(nn.Module):
    """A decoder layer: attention and MLP, each with a norm before it, after it or both, added to the residual stream.

    The norms have the names of ``spec/tensors.py``; ``before`` and ``after`` say what they are for. ``number``: of the
    layer in the model.
    """

    def __init__(
        self, spec: ModelSpec, number: int, share: Share, kernels: KernelPlan, dropout: Dropout = NO_DROPOUT
    ) -> None:
        super().__init__()
        self.residual_scale, kind = spec.residual_scale, spec.layer(number)
        self.number, self.dropout, self.kernels = number, dropout.hidden, kernels
        norm = partial(Norm, spec, spec.hidden_size, kernels)
        if spec.norm_placement != "post":
            self.input_layernorm = norm()
        self.self_attn = Attention(spec, kind, share, kernels, number, dropout)
        self.post_attention_layernorm = norm()
        if spec.norm_placement == "pre_post":
            self.pre_feedforward_layernorm = norm()
        self.mlp = _mlp(spec, kind, share, kernels)
        if spec.norm_placement != "pre":
            self.post_feedforward_layernorm = norm()
        names: dict[str, tuple[str | None, ...]] = {
            "pre": ("input_layernorm", None, "post_attention_layernorm", None),
            "pre_post": (
                "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ),
            "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        }  # fmt: skip
        self._names = names[spec.norm_placement]

    def norms(self) -> tuple[Norm | None, ...]:
        """Before attention, after it, before the MLP, after it."""
        return tuple(None if name is None else getattr(self, name) for name in self._names)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        before_attention, after_attention, before_mlp, after_mlp = self.norms()
        y = x if before_attention is None else before_attention(x)
        y = self._added(self.self_attn(y, context), after_attention, AFTER_ATTENTION, context)
        if before_mlp is not None:
            y, x = before_mlp.after_sum(y, x)
        else:
            y = x = x + y
        return x + self._added(self.mlp(y), after_mlp, AFTER_MLP, context)

    def _added(self, y: torch.Tensor, norm: Norm | None, site: int, context: Context) -> torch.Tensor:
        """What a block adds to the residual stream."""
        y = y if norm is None else norm(y)
        y = y if self.residual_scale == 1.0 else y * self.residual_scale
        return _dropped(y, self.kernels, self.dropout, self.number, site, context)


def _dropped(
    x: torch.Tensor, kernels: KernelPlan, rate: float, layer: int, site: int, context: Context
) -> torch.Tensor:
    """Hidden states [b, s, h] under dropout."""
    if context.draws is None or not rate:
        return x
    return kernels.dropout(x, context.tokens, rate, context.draws.key(layer, site), context.draws.sample, 0)  # type: ignore[no-any-return]


class Head(nn.Module):
    """Logits of this share's vocabulary rows; holds no parameters where the embedding is tied."""

    def __init__(
        self, spec: ModelSpec, weight: nn.Parameter | None, rows: int, width: int, kernels: KernelPlan
    ) -> None:
        super().__init__()
        self.kernels, self.softcap = kernels, spec.logit_softcap
        if weight is None:
            self.weight = nn.Parameter(torch.empty(rows, width))
        self._tied = [weight] if weight is not None else []  # a list hides it from named_parameters

    @property
    def matrix(self) -> torch.Tensor:
        """[rows, width], its own or the embedding's."""
        return self._tied[0] if self._tied else self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.kernels.gemm(x, self.matrix, None)
        return logits if self.softcap is None else softcap(logits, self.softcap)


class Embedding(nn.Module):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(indices, self.weight)


@dataclass(frozen=True)
class StagePart:
    """A part of a stage that a micro-batch passes at once: some of its layers, with its embedding or head or not."""

    layers: Sequence[int]
    embed: bool
    head: bool


class GPTStage(nn.Module):
    """Layers ``layers`` of a model, with embedding and head where asked.

    Args:
        share: this copy's part of heads, feed-forward columns and vocabulary rows.
        layers: global indices of its decoder layers, ascending.
        kernels: which provider serves which operator; None: the default ones for ``dtype`` and ``device``.
        seq_length: of the run, which decides between the short and long factors of ``longrope``.
        dropout: of training: of batches with ``draws``.

    ``forward(x, batch)`` maps tokens [b, s] (with ``embed``) or hidden states [b, s, h] to hidden states, or
    (with ``head``) to logits [b, s, vocabulary share]; with a ``part``, only that of it. Parameters are left
    uninitialised. ``token_numbers``: [s] int64, which tokens of each sequence the hidden states are of, where they are
    not the first ones.
    """

    def __init__(
        self,
        spec: ModelSpec,
        share: Share,
        layers: Sequence[int],
        embed: bool,
        head: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kernels: KernelPlan | None = None,
        seq_length: int = 0,
        dropout: Dropout = NO_DROPOUT,
    ) -> None:
        super().__init__()
        self.kernels = kernels = kernels or default_kernels(spec, share, head, dtype, device, dropout=dropout)
        self.dropout, self.token_numbers = dropout.hidden, cast(torch.Tensor | None, None)
        self.has_embed, self.has_head = embed, head
        # As the dtype of the weights has it: Gemma was trained with that number.
        self.embed_scale, self.logit_scale = torch.tensor(spec.embed_scale, dtype=dtype).item(), spec.logit_scale
        # On the device from the start (no parameter or buffer: no checkpoint holds it): a copy in each forward
        # would make the host wait for all that the device has queued.
        # A stage without layers has them too: calibration takes what an action costs besides its layers to be alike.
        used = dict.fromkeys(spec.layer(i).rope for i in (layers or range(spec.num_layers)))
        self._freqs = {
            rope: rope_frequencies(rope, spec.head_dim, rope.is_long(seq_length)).to(device)
            for rope in used if rope is not None
        }  # fmt: skip
        rows, h = share.vocab[1] - share.vocab[0], spec.hidden_size
        with _default_dtype(dtype), torch.device(device):
            self.model = nn.ModuleDict()
            if embed or (head and spec.tied):
                self.model["embed_tokens"] = Embedding(rows, h)
            if embed and spec.position == "learned":
                self.model["embed_positions"] = Embedding(spec.max_position_embeddings, h)
            self.model["layers"] = nn.ModuleDict({str(i): Layer(spec, i, share, kernels, dropout) for i in layers})
            if head:
                self.model["norm"] = Norm(spec, h, kernels)
                tied = cast(Embedding, self.model["embed_tokens"]).weight if spec.tied else None
                self.lm_head = Head(spec, tied, rows, h, kernels)

    def layers(self) -> Iterable[Layer]:
        return cast(Iterable[Layer], cast(nn.ModuleDict, self.model["layers"]).values())

    def forward(self, x: torch.Tensor, batch: StageBatch, part: StagePart | None = None) -> torch.Tensor:
        layers = self.layers() if part is None else [self.model["layers"][str(i)] for i in part.layers]  # type: ignore[index]
        embedded = self.has_embed and (part is None or part.embed)
        if embedded:
            x = self.model["embed_tokens"](x)
            x = x if self.embed_scale == 1.0 else x * self.embed_scale
            if "embed_positions" in self.model:
                x = x + self.model["embed_positions"](batch.positions)
        ropes = self._rope_tables(batch.positions, x.dtype)
        draws = batch.draws
        context = Context(batch.documents, ropes, draws, None if draws is None else self._tokens(x))
        if embedded:
            x = _dropped(x, self.kernels, self.dropout, 0, EMBEDDING, context)
        for layer in layers:
            x = layer(x, context)
        if not (self.has_head and (part is None or part.head)):
            return x
        x = self.model["norm"](x)  # the logits are scaled through it, however head and loss are computed
        return self.lm_head(x if self.logit_scale == 1.0 else x * self.logit_scale)

    def _tokens(self, x: torch.Tensor) -> torch.Tensor:
        found = self.token_numbers
        found = torch.arange(x.shape[1], device=x.device) if found is None else found
        assert len(found) == x.shape[1], f"{len(found)} token numbers for {x.shape[1]} tokens"
        return found

    def _rope_tables(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> dict[Rope, tuple[torch.Tensor, torch.Tensor]]:
        return {rope: rope_tables(positions, f, dtype, rope.attention_factor) for rope, f in self._freqs.items()}


class _default_dtype:
    """Parameters created inside get this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
