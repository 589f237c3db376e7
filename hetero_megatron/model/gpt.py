"""A run of decoder layers, with the embedding before or the head after it: one definition for all families.

It reads and runs like a single-device model. ``Share`` says how many heads, columns and rows this copy has;
tensor parallelism and recomputation are applied from outside (``parallel/``). Parameters carry the logical
names of ``spec/tensors.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from hetero_megatron.ops import KernelPlan, default_kernels, rope_frequencies, rope_tables
from hetero_megatron.spec import ModelSpec, Share


class StageBatch(Protocol):
    """What the model needs to know about a micro-batch besides its tokens."""

    positions: torch.Tensor  # [b, s] int64
    documents: Sequence[Sequence[int]] | None  # document starts per row


@dataclass(frozen=True)
class Context:
    """Per micro-batch values that all layers share; rope is (cos, sin), each [b, s, 1, head_dim / 2]."""

    documents: Sequence[Sequence[int]] | None
    rope: tuple[torch.Tensor, torch.Tensor] | None


class Linear(nn.Module):
    """x W^T + b; values are set from outside, so none are drawn here."""

    def __init__(self, inputs: int, outputs: int, bias: bool, kernels: KernelPlan) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.gemm(x, self.weight, self.bias)  # type: ignore[no-any-return]


class Norm(nn.Module):
    def __init__(self, spec: ModelSpec, width: int, kernels: KernelPlan, kind: str | None = None) -> None:
        super().__init__()
        self.kernels, self.eps = kernels, spec.norm_eps
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if (kind or spec.norm) == "layer" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return self.kernels.rms_norm(x, self.weight, self.eps)  # type: ignore[no-any-return]
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)  # type: ignore[no-any-return]

    def after_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        if self.bias is None:
            return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)  # type: ignore[no-any-return]
        total = x + residual
        return self.forward(total), total


class CoreAttention(nn.Module):
    """Softmax attention; a module of its own so that it can be recomputed or distributed."""

    def __init__(self, window: int | None, kernels: KernelPlan) -> None:
        super().__init__()
        self.window, self.kernels = window, kernels

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> torch.Tensor:
        out, _ = self.kernels.attention(q, k, v, context.documents, self.window, 0, 0)
        return cast(torch.Tensor, out)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, share: Share, kernels: KernelPlan) -> None:
        super().__init__()
        self.kernels = kernels
        d, h = spec.head_dim, spec.hidden_size
        (q0, q1), (kv0, kv1) = share.q_heads, share.kv_heads
        self.heads, self.kv_heads, self.head_dim = q1 - q0, kv1 - kv0, d
        self.q_proj = Linear(h, self.heads * d, bias=spec.qkv_bias, kernels=kernels)
        self.k_proj = Linear(h, self.kv_heads * d, bias=spec.qkv_bias, kernels=kernels)
        self.v_proj = Linear(h, self.kv_heads * d, bias=spec.qkv_bias, kernels=kernels)
        self.o_proj = Linear(self.heads * d, h, bias=spec.out_bias, kernels=kernels)
        self.q_norm = Norm(spec, d, kernels, "rms") if spec.qk_norm else None
        self.k_norm = Norm(spec, d, kernels, "rms") if spec.qk_norm else None
        self.core_attention = CoreAttention(spec.sliding_window, kernels)
        # Where the query heads do not use the local key-value heads evenly, each one's head is looked up.
        users = [i // spec.queries_per_kv - kv0 for i in range(q0, q1)]
        local = max(kv1 - kv0, 1)
        each = max(len(users) // local, 1)
        even = len(users) % local == 0 and users == [i // each for i in range(len(users))]
        self.kv_of_query = None if even else users

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.heads, self.head_dim)
        k = self.k_proj(x).view(b, s, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(b, s, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rope is not None:
            q, k = self.kernels.rope(q, k, *context.rope)
        if self.kv_of_query is not None:
            k, v = k[:, :, self.kv_of_query], v[:, :, self.kv_of_query]
        out = self.core_attention(q, k, v, context).reshape(b, s, self.heads * self.head_dim)
        return cast(torch.Tensor, self.o_proj(out))


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec, share: Share, kernels: KernelPlan) -> None:
        super().__init__()
        self.kernels = kernels
        h, f = spec.hidden_size, share.ffn[1] - share.ffn[0]
        self.activation = spec.activation
        self.gate_proj = Linear(h, f, bias=spec.mlp_bias, kernels=kernels) if spec.activation == "swiglu" else None
        self.up_proj = Linear(h, f, bias=spec.mlp_bias, kernels=kernels)
        self.down_proj = Linear(f, h, bias=spec.mlp_bias, kernels=kernels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up_proj(x)
        if self.gate_proj is not None:
            y = self.kernels.swiglu(self.gate_proj(x), y)
        elif self.activation == "squared_relu":
            y = self.kernels.squared_relu(y)
        else:
            y = self.kernels.gelu(y, self.activation == "gelu_tanh")
        return cast(torch.Tensor, self.down_proj(y))


class Layer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(self, spec: ModelSpec, share: Share, kernels: KernelPlan) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec, spec.hidden_size, kernels)
        self.self_attn = Attention(spec, share, kernels)
        self.post_attention_layernorm = Norm(spec, spec.hidden_size, kernels)
        self.mlp = MLP(spec, share, kernels)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        attended = self.self_attn(self.input_layernorm(x), context)
        normed, x = self.post_attention_layernorm.after_sum(attended, x)
        return x + cast(torch.Tensor, self.mlp(normed))


class Head(nn.Module):
    """Logits of this share's vocabulary rows; holds no parameters where the embedding is tied."""

    def __init__(self, weight: nn.Parameter | None, rows: int, width: int, kernels: KernelPlan) -> None:
        super().__init__()
        self.kernels = kernels
        if weight is None:
            self.weight = nn.Parameter(torch.empty(rows, width))
        self._tied = [weight] if weight is not None else []  # a list hides it from named_parameters

    @property
    def matrix(self) -> torch.Tensor:
        """[rows, width], its own or the embedding's."""
        return self._tied[0] if self._tied else self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.gemm(x, self.matrix, None)  # type: ignore[no-any-return]


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

    ``forward(x, batch)`` maps tokens [b, s] (with ``embed``) or hidden states [b, s, h] to hidden states, or
    (with ``head``) to logits [b, s, vocabulary share]; with a ``part``, only that of it. Parameters are left
    uninitialised.
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
    ) -> None:
        super().__init__()
        self.kernels = kernels = kernels or default_kernels(spec, share, head, dtype, device)
        self.has_embed, self.has_head = embed, head
        self._freqs = None
        if spec.position == "rope":
            # On the device from the start (no parameter or buffer: no checkpoint holds it): a copy in each forward
            # would make the host wait for all that the device has queued.
            self._freqs = rope_frequencies(spec.head_dim, spec.rope_theta, spec.rope_scaling).to(device)
        rows, h = share.vocab[1] - share.vocab[0], spec.hidden_size
        with _default_dtype(dtype), torch.device(device):
            self.model = nn.ModuleDict()
            if embed or (head and spec.tied):
                self.model["embed_tokens"] = Embedding(rows, h)
            if embed and spec.position == "learned":
                self.model["embed_positions"] = Embedding(spec.max_position_embeddings, h)
            self.model["layers"] = nn.ModuleDict({str(i): Layer(spec, share, kernels) for i in layers})
            if head:
                self.model["norm"] = Norm(spec, h, kernels)
                tied = cast(Embedding, self.model["embed_tokens"]).weight if spec.tied else None
                self.lm_head = Head(tied, rows, h, kernels)

    def layers(self) -> Iterable[Layer]:
        return cast(Iterable[Layer], cast(nn.ModuleDict, self.model["layers"]).values())

    def forward(self, x: torch.Tensor, batch: StageBatch, part: StagePart | None = None) -> torch.Tensor:
        layers = self.layers() if part is None else [self.model["layers"][str(i)] for i in part.layers]  # type: ignore[index]
        if self.has_embed and (part is None or part.embed):
            x = self.model["embed_tokens"](x)
            if "embed_positions" in self.model:
                x = x + self.model["embed_positions"](batch.positions)
        rope = None if self._freqs is None else rope_tables(batch.positions, self._freqs, x.dtype)
        context = Context(batch.documents, rope)
        for layer in layers:
            x = layer(x, context)
        return self.lm_head(self.model["norm"](x)) if self.has_head and (part is None or part.head) else x


class _default_dtype:
    """Parameters created inside get this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
