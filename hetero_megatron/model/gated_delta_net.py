"""Gated DeltaNet (Yang et al., 2024): a layer's linear attention. Parameters carry the logical names of
``spec/tensors.py``.

Under tensor parallelism key heads are cut, each with its value heads; all is by head, so what a rank makes of its own
needs nothing of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

from hetero_megatron.model.layers import Context, Linear, Norm, joint_products, lay_together
from hetero_megatron.ops import KernelPlan
from hetero_megatron.spec import ModelSpec, Share

Tensor = torch.Tensor
Documents = Sequence[Sequence[int]] | None
NORM_EPS = 1e-6  # of queries and keys, whatever the model's is


class ConvFilters(nn.Module):
    """Weights [features, taps] of a causal convolution, and perhaps a bias."""

    def __init__(self, width: int, taps: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, taps))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None


class DeltaCore(nn.Module):
    """From projections to what the state gives: convolutions and the gated delta rule. A module of its own, so it can
    be recomputed, or keep a state."""

    def __init__(self, spec: ModelSpec, kernels: KernelPlan) -> None:
        super().__init__()
        assert spec.delta is not None
        self.delta, self.kernels = spec.delta, kernels

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, b: Tensor | None, a: Tensor, weights: tuple[Tensor, ...],
        context: Context,
    ) -> Tensor:  # fmt: skip
        """q, k: [b, s, key heads dk], v: [b, s, value heads dv]; b, a: [b, s, value heads]; weights: of the three
        convolutions, A_log and dt_bias -> [b, s, value heads, dv]."""
        q, k, v = self.convolved((q, k, v), weights, context.documents)
        return self.added(self.rule(q, k, v, *self.steps(b, a, weights), None, context.documents)[0], v, weights)

    def convolved(self, qkv: Sequence[Tensor], weights: tuple[Tensor, ...], documents: Documents) -> list[Tensor]:
        """Queries, keys and values after their convolutions, whose biases, if they have any, are the last weights."""
        biases = weights[6:] or (None,) * 3
        convolve = self.kernels.causal_conv
        return [convolve(x, w, b, documents) for x, w, b in zip(qkv, weights[:3], biases, strict=True)]

    def steps(self, b: Tensor | None, a: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """What is done to each value head's state by a token, [b, s, value heads]: the logarithm, at most 0, of what it
        is multiplied with, in at least fp32; and how much is written."""
        assert b is not None
        a_log, dt_bias = weights[3:5]
        dtype = torch.promote_types(a.dtype, torch.float32)
        return -a_log.to(dtype).exp() * F.softplus(a.to(dtype) + dt_bias.to(dtype)), b.sigmoid()

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, write: Tensor, state: Tensor | None, documents: Documents
    ) -> tuple[Tensor, Tensor]:
        """(out [b, s, value heads, dv], state [b, value heads, dk, dv])."""
        q, k = (x.unflatten(-1, (-1, self.delta.key_dim)) for x in (q, k))
        v = v.unflatten(-1, (-1, self.delta.value_dim))
        return self.kernels.gated_delta_rule(q, k, v, g, write, state, documents, NORM_EPS)  # type: ignore[no-any-return]

    def apart(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, write: Tensor, documents: Documents
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The rule with zero before it, and what would become of a state there: (out [b, s, value heads, dv]; what
        queries read of it, [b, s, value heads, dk]; the matrix that takes it through, [b, value heads, dk, dk], or one
        number, [b, value heads, 1, 1]; the last state)."""
        dk, dv = self.delta.key_dim, self.delta.value_dim
        rows, length, heads = g.shape[:3]
        v = v.unflatten(-1, (-1, dv))
        state = torch.eye(dk, dk + dv, dtype=g.dtype, device=v.device).roll(dv, 1).expand(rows, heads, -1, -1)
        values = torch.cat([v, v.new_zeros(rows, length, heads, dk)], -1)
        q, k = (x.unflatten(-1, (-1, dk)) for x in (q, k))
        both, last = self.kernels.gated_delta_rule(q, k, values, g, write, state, documents, NORM_EPS)
        out, read = both.split([dv, dk], -1)
        last, through = last.split([dv, dk], -1)
        return out, read, through, last

    def added(self, out: Tensor, v: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        """What the rule gives, [b, s, value heads, dv], and what goes past it."""
        return out


class GatedDeltaNet(nn.Module):
    """x [b, s, h] -> [b, s, h]; of a TP rank, a partial sum over its heads until ``o_proj`` adds them up."""

    def __init__(self, spec: ModelSpec, share: Share, kernels: KernelPlan) -> None:
        super().__init__()
        assert spec.delta is not None
        delta, h, heads = spec.delta, spec.hidden_size, share.key_heads[1] - share.key_heads[0]
        self.delta, self.kernels = delta, kernels
        value_heads = heads * delta.values_per_key
        keys, values = heads * delta.key_dim, value_heads * delta.value_dim
        self.q_proj, self.k_proj, self.v_proj, self.z_proj, self.b_proj, self.a_proj = (
            Linear(h, rows, bias=False, kernels=kernels)
            for rows in (keys, keys, values, values, value_heads, value_heads)
        )
        self.together = lay_together(self.q_proj, self.k_proj, self.v_proj, self.z_proj, self.b_proj, self.a_proj)
        self.q_conv, self.k_conv = (ConvFilters(keys, delta.kernel) for _ in "qk")
        self.v_conv = ConvFilters(values, delta.kernel)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(value_heads)) for _ in range(2))
        self.core_attention = DeltaCore(spec, kernels)
        self.norm = Norm(spec, delta.value_dim, kernels, "rms", delta.norm_eps, offset=0.0)
        self.o_proj = Linear(values, h, bias=False, kernels=kernels)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x: [b, s, h] -> [b, s, h]."""
        q, k, v, z, b, a = joint_products(self.together, x)
        weights = (self.q_conv.weight, self.k_conv.weight, self.v_conv.weight, self.A_log, self.dt_bias)
        out = self.core_attention(q, k, v, b, a, weights, context)
        return cast(Tensor, self.o_proj(self.activate(z, self.norm(out).flatten(2))))

    def activate(self, z: Tensor, normed: Tensor) -> Tensor:
        """SiLU of z times what is normalised, which ``o_proj`` reads: all [b, s, value heads dv]."""
        return self.kernels.swiglu(z, normed)  # type: ignore[no-any-return]
