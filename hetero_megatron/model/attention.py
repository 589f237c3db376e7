"""Attention with projections of its own for queries, keys and values."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from hetero_megatron.model.layers import (
    Context,
    CoreAttention,
    L2Norm,
    Linear,
    Norm,
    ProjectionNorm,
    joint_products,
    lay_together,
    sum_heads,
    turn,
)
from hetero_megatron.ops import KernelPlan
from hetero_megatron.spec import ModelSpec, Share


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
        self.together = lay_together(self.q_proj, self.k_proj, self.v_proj)
        self.o_proj = Linear(self.heads * d, h, bias=spec.out_bias, kernels=kernels)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.sum_heads = sum_heads  # tensor parallelism adds up over its ranks
        if spec.qk_norm == "head":
            self.q_norm, self.k_norm = (Norm(spec, d, kernels, "rms") for _ in "qk")
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
        each = max(len(users) // local, 1)
        even = len(users) % local == 0 and users == [i // each for i in range(len(users))]
        # On the device from the start: a list would be uploaded at every use.
        self.kv_of_query = None if even else torch.tensor(users)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        b, s, _ = x.shape
        heads = (self.heads, self.kv_heads, self.kv_heads)
        found = joint_products(self.together, x)
        q, k, v = (y.unflatten(-1, (n, self.head_dim)) for y, n in zip(found, heads, strict=True))
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
        return cast(torch.Tensor, self.o_proj(out))

    def _growth(self, context: Context, dtype: torch.dtype) -> torch.Tensor:
        """[b, s, 1, 1]: what queries are multiplied with by their position."""
        assert context.positions is not None
        passed = (context.positions + self.growth_offset).div(self.growth_length, rounding_mode="floor")
        wide = torch.promote_types(dtype, torch.float32)
        return (1 + self.growth * passed.to(wide).log1p()).to(dtype)[..., None, None]
