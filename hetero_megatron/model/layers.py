"""What attention and MLPs of all families are made of. Parameters carry the logical names of ``spec/tensors.py``.

Hidden states [b, s, h] go in and come out; heads and columns are those of this rank's share, so results are partial
sums over the TP group, which ``parallel/tensor.py`` adds from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from hetero_megatron.layout.mask import chunk_starts
from hetero_megatron.ops import KernelPlan
from hetero_megatron.ops.attention_op import AttentionOptions
from hetero_megatron.ops.dropout import SCORES, Draws, ScoreDropout, TabledDraws
from hetero_megatron.ops.gemm_fp8 import Maxima
from hetero_megatron.ops.int8_weight import narrow_product
from hetero_megatron.spec import ModelSpec, Rope, Share

if TYPE_CHECKING:
    from hetero_megatron.ops.int8_weight import Scales


@dataclass(frozen=True)
class Context:
    """Per micro-batch values that all layers share.

    Attributes:
        ropes: of each of the model's rotary embeddings (cos, sin), each [b, s, 1, pairs of features].
        counted: of the tokens between attention and MLP (under sequence parallelism a shard), which ones count in the
            loss; None: all.
        positions: [b, s], as in ``ropes``, where queries grow with them.
        draws: of dropout, None: there is none; with them
        tokens: the numbers of those same tokens, [s] int64;
        inside: the numbers of the tokens that attention and MLP see, [s] int64.
    """

    documents: Sequence[Sequence[int]] | None
    ropes: Mapping[Rope, tuple[torch.Tensor, torch.Tensor]]
    counted: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    draws: Draws | TabledDraws | None = None
    tokens: torch.Tensor | None = None
    inside: torch.Tensor | None = None

    def drop(self, x: torch.Tensor, kernels: KernelPlan, rate: float, layer: int, site: int) -> torch.Tensor:
        """Hidden states [b, s, h] under dropout."""
        if self.draws is None or not rate:
            return x
        key, sample = self.draws.key(layer, site), self.draws.sample
        return kernels.dropout(x, self.tokens, rate, key, sample, 0)  # type: ignore[no-any-return]


class Linear(nn.Module):
    """x W^T + b; values are set from outside, so none are drawn here."""

    def __init__(self, inputs: int, outputs: int, bias: bool, kernels: KernelPlan) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.scales: Scales | None = None  # of a frozen weight in few bits (ops/int8_weight.py)
        self.alone = kernels.fp8 is not None  # its product is not one with those of other weights
        self.maxima: Maxima | None = None  # of largest magnitudes, where other ranks have parts (parallel/tensor.py)

    def adapted(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What becomes of the product ``y`` of x and the weight; adapters replace it (``parallel/lora.py``).
        Both are [b, s, outputs]."""
        return y

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x: [b, s, inputs], bias: [outputs] -> [b, s, outputs]."""
        if self.scales is not None:
            y = narrow_product(self.kernels.gemm, x, self.weight, self.scales, bias)
        elif self.kernels.fp8 is None:
            y = self.kernels.gemm(x, self.weight, bias)
        else:
            y = getattr(self.kernels, self.kernels.fp8)(x, self.weight, bias, self.maxima)
        return self.adapted(y, x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, inputs] -> [b, s, outputs]."""
        return self.product(x, self.bias)


def lay_together(*linears: Linear) -> tuple[Linear, ...]:
    """Put their weights, and their biases, one after the other in one piece of memory each: then ``joint_products`` is
    one product. They stay parameters of their own."""
    for name in ("weight", "bias"):
        separate = [getattr(linear, name) for linear in linears]
        if separate[0] is None:
            continue
        joined = separate[0].new_empty(sum(map(len, separate)), *separate[0].shape[1:])
        for linear, rows in zip(linears, joined.split([len(tensor) for tensor in separate]), strict=True):
            setattr(linear, name, nn.Parameter(rows))
    return linears


def joint_products(linears: Sequence[Linear], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What each of them makes of ``x`` [b, s, inputs]: [b, s, its outputs]."""
    if any(linear.alone for linear in linears):
        return tuple(linear(x) for linear in linears)
    weights, biases = zip(*((linear.weight, linear.bias) for linear in linears), strict=True)
    products = linears[0].kernels.joint_gemm(x, weights, biases)
    return tuple(linear.adapted(y, x) for linear, y in zip(linears, products, strict=True))


def activation_of(spec: ModelSpec, kernels: KernelPlan) -> Callable[..., torch.Tensor]:
    """What makes of (gate and) up, [..., columns] each, what ``down_proj`` of an MLP or of experts reads."""
    alpha, limit = spec.swiglu_alpha, spec.swiglu_limit
    activations: dict[str, Callable[..., torch.Tensor]] = {
        "swiglu": lambda gate, up: kernels.swiglu(gate, up),
        "clamped_swiglu": lambda gate, up: kernels.clamped_swiglu(gate, up, alpha, limit),
        "geglu": lambda gate, up: kernels.gelu(gate, False) * up,
        "geglu_tanh": lambda gate, up: kernels.gelu(gate, True) * up,
        "gelu": lambda up: kernels.gelu(up, False),
        "gelu_tanh": lambda up: kernels.gelu(up, True),
        "squared_relu": lambda up: kernels.squared_relu(up),
    }
    return activations[spec.activation]


class Norm(nn.Module):
    def __init__(
        self, spec: ModelSpec, width: int, kernels: KernelPlan, kind: str | None = None, eps: float | None = None,
        offset: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.kernels, self.eps = kernels, spec.norm_eps if eps is None else eps
        self.offset = spec.norm_offset if offset is None else offset
        self.weight = nn.Parameter(torch.empty(width))
        self.bias: torch.Tensor | None = None
        if (kind or spec.norm) == "layer":
            # On the device from the start; a bias that no checkpoint holds is no parameter.
            self.bias = nn.Parameter(torch.empty(width)) if spec.norm_bias else torch.zeros(width)

    def gain(self) -> torch.Tensor:
        """What the normalised x is multiplied with: [width]; 1 + w of a small w needs more than 16 bits."""
        if not self.offset:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + self.offset

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The norm of x [.., width]; with a ``residual`` of its shape: (norm of x + residual, x + residual)."""
        if self.bias is not None:
            total = x if residual is None else x + residual
            y = self.kernels.layer_norm(total, self.gain(), self.bias, self.eps)
            return y if residual is None else (y, total)
        if residual is None:
            return self.kernels.rms_norm(x, self.gain(), self.eps)
        return self.kernels.add_rms_norm(x, residual, self.gain(), self.eps)


class L2Norm(nn.Module):
    """RMS norm of each head of [b, s, heads, d] without weights."""

    def __init__(self, spec: ModelSpec, kernels: KernelPlan) -> None:
        super().__init__()
        # On the device from the start; no parameter: no checkpoint holds it.
        self.kernels, self.eps, self.ones = kernels, spec.norm_eps, torch.ones(spec.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, heads, d] -> the same."""
        return self.kernels.rms_norm(x, self.ones, self.eps)  # type: ignore[no-any-return]


class EachHeadNorm(nn.Module):
    """LayerNorm of each head of [b, s, heads, d] without a bias, with weights for each head."""

    def __init__(self, spec: ModelSpec, heads: int, kernels: KernelPlan) -> None:
        super().__init__()
        d = spec.head_dim
        self.kernels, self.eps, self.ones, self.zeros = kernels, spec.norm_eps, torch.ones(d), torch.zeros(d)
        self.weight = nn.Parameter(torch.empty(heads * d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, s, heads, d] -> the same."""
        normed: torch.Tensor = self.kernels.layer_norm(x, self.ones, self.zeros, self.eps)
        return normed * self.weight.view(x.shape[-2:])


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
        self, spec: ModelSpec, layer: int, kernels: KernelPlan, first_head: int = 0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        kind = spec.layer(layer)
        self.window, self.chunk, self.softcap, self.kernels = kind.window, kind.chunk, spec.attn_softcap, kernels
        self.layer, self.first_head, self.dropout = layer, first_head, dropout

    def score_dropout(self, draws: Draws | TabledDraws | None, first_head: int) -> ScoreDropout | None:
        """Which attention probabilities are dropped, of query heads from ``first_head`` on; None: none are."""
        if draws is None or not self.dropout:
            return None
        return ScoreDropout(self.dropout, draws.key(self.layer, SCORES), draws.sample, first_head)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """q: [b, s, heads, d], k, v: [b, s, kv_heads, d], sinks: [heads] -> [b, s, heads, d]."""
        dropout = self.score_dropout(context.draws, self.first_head)
        documents = self._documents(context.documents, q.shape[0], q.shape[1])
        options = AttentionOptions(documents, self.window, softcap=self.softcap, dropout=dropout)
        out, _ = self.kernels.attention(q, k, v, sinks, *options)
        return cast(torch.Tensor, out)

    def _documents(
        self, documents: Sequence[Sequence[int]] | None, rows: int, length: int
    ) -> Sequence[Sequence[int]] | None:
        """A layer that attends in chunks sees each as a document of its own."""
        if self.chunk is None or self.chunk >= length:
            return documents
        return [chunk_starts(starts, length, self.chunk) for starts in documents or [(0,)] * rows]


def turn(
    kernels: KernelPlan, rope: Rope, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [b, s, heads, d] by the rotary embedding. Interleaved pairs come out as halves: of both alike, so that
    their products are the same."""
    turned, unturned = 2 * cos.shape[-1], (q, k)
    turns_all = turned == q.shape[-1]
    parts = [*unturned] if turns_all else [x[..., :turned] for x in unturned]
    if rope.interleaved:
        parts = [x.unflatten(-1, (turned // 2, 2)).transpose(-1, -2).flatten(-2) for x in parts]
    q, k = kernels.rope(*parts, cos, sin)
    if turns_all:
        return q, k
    q, k = (torch.cat([x, original[..., turned:]], dim=-1) for x, original in zip((q, k), unturned, strict=True))
    return q, k


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, layer: int, share: Share, kernels: KernelPlan, dropout: float = 0.0) -> None:
        super().__init__()
        self.kernels, self.rope = kernels, spec.layer(layer).rope
        d, h = spec.head_dim, spec.hidden_size
        (q0, q1), (kv0, kv1) = share.q_heads, share.kv_heads
        self.heads, self.kv_heads, self.head_dim = q1 - q0, kv1 - kv0, d
        self.q_proj = Linear(h, self.heads * d, bias=spec.qkv_bias, kernels=kernels)
        self.k_proj = Linear(h, self.kv_heads * d, bias=spec.qkv_bias, kernels=kernels)
        self.v_proj = Linear(h, self.kv_heads * d, bias=spec.qkv_bias, kernels=kernels)
        of_x = [self.q_proj, self.k_proj, self.v_proj]
        if spec.attn_gate:
            self.g_proj = Linear(h, self.heads * d, bias=spec.qkv_bias, kernels=kernels)
            of_x.append(self.g_proj)
        self.together = lay_together(*of_x)
        self.o_proj = Linear(self.heads * d, h, bias=spec.out_bias, kernels=kernels)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.sum_heads = sum_heads  # tensor parallelism adds up over its ranks
        if spec.qk_norm == "head":
            self.q_norm, self.k_norm = (Norm(spec, d, kernels, "rms") for _ in "qk")
        elif spec.qk_norm == "head_layer":
            self.q_norm, self.k_norm = (Norm(spec, d, kernels, "layer") for _ in "qk")
        elif spec.qk_norm == "each_head":
            self.q_norm, self.k_norm = (EachHeadNorm(spec, n, kernels) for n in (self.heads, self.kv_heads))
        elif spec.qk_norm == "projection":
            self.q_norm = ProjectionNorm(spec, self.heads, spec.num_heads * d)
            self.k_norm = ProjectionNorm(spec, self.kv_heads, spec.num_kv_heads * d)
        self.turned_norm = L2Norm(spec, kernels) if spec.qk_norm == "l2" and self.rope is not None else None
        self.sinks = nn.Parameter(torch.empty(self.heads)) if spec.sinks else None
        self.core_attention = CoreAttention(spec, layer, kernels, share.q_heads[0], dropout)
        # Scores are computed with 1 / sqrt(d); a family's other scale goes into the queries.
        self.query_scale = 1.0 if spec.attn_scale is None else spec.attn_scale * d**0.5
        self.growth = spec.query_growth if spec.layer(layer).query_growth else 0.0
        self.growth_length, self.growth_offset = spec.query_growth_length, spec.query_growth_offset
        # Where the query heads do not use the local key-value heads evenly, each one's head is looked up.
        users = [i // spec.queries_per_kv - kv0 for i in range(q0, q1)]
        local = max(kv1 - kv0, 1)
        queries_per_kv = max(len(users) // local, 1)
        alternates_evenly = len(users) % local == 0 and users == [i // queries_per_kv for i in range(len(users))]
        # On the device from the start: a list would be uploaded at every use.
        self.kv_of_query = None if alternates_evenly else torch.tensor(users)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """x: [b, s, h] -> [b, s, h]; of a TP rank, a partial sum over its heads until ``o_proj`` adds them up."""
        b, s, _ = x.shape
        heads = (self.heads, self.kv_heads, self.kv_heads)
        projected = joint_products(self.together, x)
        q, k, v = (y.unflatten(-1, (n, self.head_dim)) for y, n in zip(projected[:3], heads, strict=True))
        if isinstance(self.q_norm, ProjectionNorm) and isinstance(self.k_norm, ProjectionNorm):
            totals = self.sum_heads(self.q_norm.squares(q), self.k_norm.squares(k))
            q, k = self.q_norm(q, totals[..., 0]), self.k_norm(k, totals[..., 1])
        elif self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope is not None:
            q, k = turn(self.kernels, self.rope, q, k, *context.ropes[self.rope])
        if self.turned_norm is not None:
            q, k = self.turned_norm(q), self.turned_norm(k)
        if self.query_scale != 1.0:
            q = q * self.query_scale
        if self.growth:
            q = q * self._growth(context, q.dtype)
        if self.kv_of_query is not None:
            k, v = k.index_select(2, self.kv_of_query), v.index_select(2, self.kv_of_query)
        out = self.core_attention(q, k, v, self.sinks, context).reshape(b, s, self.heads * self.head_dim)
        for gate in projected[3:]:
            out = out * gate.sigmoid()
        return cast(torch.Tensor, self.o_proj(out))

    def _growth(self, context: Context, dtype: torch.dtype) -> torch.Tensor:
        """[b, s, 1, 1]: what queries are multiplied with by their position."""
        assert context.positions is not None
        passed = (context.positions + self.growth_offset).div(self.growth_length, rounding_mode="floor")
        wide_dtype = torch.promote_types(dtype, torch.float32)
        return (1 + self.growth * passed.to(wide_dtype).log1p()).to(dtype)[..., None, None]
