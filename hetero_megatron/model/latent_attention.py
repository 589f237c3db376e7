"""Multi-head latent attention (DeepSeek-V2 and V3): low-rank latents of a token, and heads that project them up.

Under tensor parallelism the heads are cut: every rank computes the latents of all tokens whole, and of the projections
up those of its heads. Gradients of what is whole are sums over ranks, to which each adds what its heads contribute.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from hetero_megatron.model.layers import Context, CoreAttention, Linear, Norm, turn
from hetero_megatron.ops import KernelPlan
from hetero_megatron.spec import ModelSpec, Share


class LatentAttention(nn.Module):
    """x [b, s, h] -> [b, s, h]; see :class:`hetero_megatron.spec.MLA` for the sizes.

    The attention operators have one size of heads: what is smaller is filled with zeros, which changes no result. With
    128 features of values beside 192 of keys that is 1.2 times the attention's FLOPs and 1.5 times the values' memory.
    """

    def __init__(self, spec: ModelSpec, layer: int, share: Share, kernels: KernelPlan, dropout: float = 0.0) -> None:
        super().__init__()
        assert spec.mla is not None
        self.mla, self.rope, self.kernels = spec.mla, spec.layer(layer).rope, kernels
        mla, h = self.mla, spec.hidden_size
        self.heads, self.head_dim = share.q_heads[1] - share.q_heads[0], spec.head_dim
        self.q_a_proj: nn.Module | None = None
        if mla.q_rank is None:
            self.q_proj = Linear(h, self.heads * mla.qk_dim, bias=False, kernels=kernels)
        else:
            self.q_a_proj = Linear(h, mla.q_rank, bias=mla.bias, kernels=kernels)
            self.q_a_layernorm = Norm(spec, mla.q_rank, kernels, eps=mla.norm_eps)
            self.q_b_proj = Linear(mla.q_rank, self.heads * mla.qk_dim, bias=False, kernels=kernels)
        self.kv_a_proj_with_mqa = Linear(h, mla.kv_rank + mla.rope_dim, bias=mla.bias, kernels=kernels)
        self.kv_a_layernorm = Norm(spec, mla.kv_rank, kernels, eps=mla.norm_eps)
        self.kv_b_proj = Linear(mla.kv_rank, self.heads * (mla.nope_dim + mla.v_dim), bias=False, kernels=kernels)
        self.o_proj = Linear(self.heads * mla.v_dim, h, bias=spec.out_bias, kernels=kernels)
        self.core_attention = CoreAttention(spec, layer, kernels, share.q_heads[0], dropout)
        # Scores are computed with 1 / sqrt(head_dim).
        scale = mla.qk_dim**-0.5 if spec.attn_scale is None else spec.attn_scale
        self.query_scale = scale * self.head_dim**0.5

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        mla, heads = self.mla, self.heads
        if self.q_a_proj is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        latent, k_turned = self.kv_a_proj_with_mqa(x).split([mla.kv_rank, mla.rope_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (heads, mla.nope_dim + mla.v_dim))
        k, v = kv.split([mla.nope_dim, mla.v_dim], dim=-1)
        q, q_turned = q.unflatten(-1, (heads, mla.qk_dim)).split([mla.nope_dim, mla.rope_dim], dim=-1)
        k_turned = k_turned.unsqueeze(2)
        if self.rope is not None:  # copies: it may overwrite what it turns, which is a part of what others keep
            copies = q_turned.clone(), k_turned.clone()
            q_turned, k_turned = turn(self.kernels, self.rope, *copies, *context.ropes[self.rope])
        q = torch.cat([q, q_turned], dim=-1)
        k = torch.cat([k, k_turned.expand(-1, -1, heads, -1)], dim=-1)
        if self.query_scale != 1.0:
            q = q * self.query_scale
        q, k, v = (F.pad(t, (0, self.head_dim - t.shape[-1])) for t in (q, k, v))
        out = self.core_attention(q, k, v, None, context)[..., : mla.v_dim]
        return cast(torch.Tensor, self.o_proj(out.flatten(2)))
