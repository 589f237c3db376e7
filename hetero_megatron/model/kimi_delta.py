"""Kimi Delta Attention (Kimi Linear): Gated DeltaNet whose keys decay feature by feature.

Under tensor parallelism heads are cut; every rank makes the few features of all tokens that decay and gate come from,
and of what is made of them that of its heads.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from hetero_megatron.model.gated_delta_net import ConvFilters, DeltaCore
from hetero_megatron.model.layers import Context, Linear, Norm, joint_products, lay_together
from hetero_megatron.ops import KernelPlan
from hetero_megatron.spec import ModelSpec, Share

Tensor = torch.Tensor


class KimiDeltaCore(DeltaCore):
    def steps(self, b: Tensor | None, a: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """As of Gated DeltaNet, but that each row of a head's state is multiplied with a number of its own:
        a [b, s, heads dk], and the first result [b, s, heads, dk]."""
        *filters, a_log, dt_bias = weights
        decay, write = super().steps(b, a, (*filters, a_log.repeat_interleave(self.delta.key_dim), dt_bias))
        return decay.unflatten(-1, (-1, self.delta.key_dim)), write


class KimiDeltaNet(nn.Module):
    """x [b, s, h] -> [b, s, h]; of a TP rank, a partial sum over its heads until ``o_proj`` adds them up."""

    def __init__(self, spec: ModelSpec, share: Share, kernels: KernelPlan) -> None:
        super().__init__()
        delta, h, (first, end) = spec.delta, spec.hidden_size, share.key_heads
        assert delta is not None and delta.by_feature
        self.delta, self.kernels = delta, kernels
        value_heads = (end - first) * delta.values_per_key
        keys, values, decays = (end - first) * delta.key_dim, value_heads * delta.value_dim, value_heads * delta.key_dim
        self.q_proj, self.k_proj, self.v_proj, self.b_proj = (
            Linear(h, rows, bias=False, kernels=kernels) for rows in (keys, keys, values, value_heads)
        )
        self.together = lay_together(self.q_proj, self.k_proj, self.v_proj, self.b_proj)
        self.f_a_proj, self.g_a_proj = (Linear(h, delta.key_dim, bias=False, kernels=kernels) for _ in "fg")
        self.f_b_proj, self.g_b_proj = (
            Linear(delta.key_dim, rows, bias=False, kernels=kernels) for rows in (decays, values)
        )
        self.q_conv, self.k_conv = (ConvFilters(keys, delta.kernel) for _ in "qk")
        self.v_conv = ConvFilters(values, delta.kernel)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(n)) for n in (value_heads, decays))
        self.core_attention = KimiDeltaCore(spec, kernels)
        self.norm = Norm(spec, delta.value_dim, kernels, "rms", delta.norm_eps, offset=0.0)
        self.o_proj = Linear(values, h, bias=False, kernels=kernels)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x: [b, s, h] -> [b, s, h]."""
        q, k, v, b = joint_products(self.together, x)
        a, z = self.f_b_proj(self.f_a_proj(x)), self.g_b_proj(self.g_a_proj(x))
        weights = (self.q_conv.weight, self.k_conv.weight, self.v_conv.weight, self.A_log, self.dt_bias)
        out = self.core_attention(q, k, v, b, a, weights, context)
        return cast(Tensor, self.o_proj(self.activate(z, self.norm(out).flatten(2))))

    def activate(self, z: Tensor, normed: Tensor) -> Tensor:
        """The sigmoid of z times what is normalised, which ``o_proj`` reads: all [b, s, value heads dv]."""
        return z.sigmoid() * normed
