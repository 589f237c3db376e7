"""Mamba-2 (Dao and Gu, 2024) as a layer's mixer. Parameters carry the logical names of ``spec/tensors.py``: those of
linear attention, in whose terms C is a query, B a key, x a value, and a group of heads a key head.

Under tensor parallelism heads are cut, and groups as key-value heads of attention are: where there are fewer of them
than ranks, ranks have copies, and the norm over a group's heads adds up over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from hetero_megatron.model.gated_delta_net import ConvFilters, DeltaCore, Documents
from hetero_megatron.model.layers import Context, Linear, joint_products, lay_together
from hetero_megatron.ops import KernelPlan
from hetero_megatron.spec import ModelSpec, Share
from hetero_megatron.spec.state_space import StateSpace

Tensor = torch.Tensor


def groups_of(share: Share, each: int) -> list[int]:
    """Of each local head, the local number of its group of ``each`` heads."""
    return [head // each - share.key_heads[0] for head in range(*share.value_heads)]


class StateSpaceCore(DeltaCore):
    """From projections to what the state gives, D x included."""

    def __init__(self, spec: ModelSpec, share: Share, kernels: KernelPlan) -> None:
        super().__init__(spec, kernels)
        assert isinstance(spec.delta, StateSpace)
        self.step_limits = spec.delta.step_limits
        groups, count = groups_of(share, spec.delta.values_per_key), share.key_heads[1] - share.key_heads[0]
        each = max(len(groups) // max(count, 1), 1)
        even = len(groups) == each * count and groups == [i // each for i in range(len(groups))]
        # On the device from the start: a list would be uploaded at every use.
        self.group_of_head = None if even or not groups else torch.tensor(groups)

    def steps(self, b: Tensor | None, a: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """(dt A, dt), both in at least fp32; there is no b."""
        a_log, dt_bias = weights[3:5]
        dtype, (low, high) = torch.promote_types(a.dtype, torch.float32), self.step_limits
        step = F.softplus(a.to(dtype) + dt_bias.to(dtype))
        if low > 0 or high is not None:
            step = step.clamp(low, high)
        return -a_log.to(dtype).exp() * step, step

    def rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, write: Tensor, state: Tensor | None, documents: Documents
    ) -> tuple[Tensor, Tensor]:
        """(out [b, s, heads, dv], state [b, heads, dk, dv])."""
        q, k = (self._of_groups(x) for x in (q, k))
        v = v.unflatten(-1, (-1, self.delta.value_dim))
        return self.kernels.state_space_rule(q, k, v, g, write, state, documents)  # type: ignore[no-any-return]

    def apart(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, write: Tensor, documents: Documents
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As of linear attention; a token multiplies a state before it with one number."""
        out, last = self.rule(q, k, v, g, write, None, documents)
        reach = g.cumsum(1).exp()
        for row, starts in enumerate(documents or ()):
            if len(starts) > 1:
                first = (torch.arange(g.shape[1], device=g.device) < starts[1])[:, None].to(reach.dtype)
                reach = torch.cat([reach[:row], (reach[row] * first)[None], reach[row + 1 :]])
        queries = self._of_groups(q).to(reach.dtype)[..., None, :]  # of a group, not of each of its heads: it is kept
        read = queries * reach.unflatten(2, (queries.shape[2], -1))[..., None]
        return out, read.flatten(2, 3).to(v.dtype), reach[:, -1, :, None, None], last

    def _of_groups(self, x: Tensor) -> Tensor:
        """[b, s, groups dk] -> [b, s, groups, dk]; of each head its own, where heads use groups unevenly."""
        x = x.unflatten(-1, (-1, self.delta.key_dim))
        return x if self.group_of_head is None else x.index_select(2, self.group_of_head)

    def added(self, out: Tensor, v: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
        """out + D x."""
        return torch.addcmul(out, v.view_as(out), weights[5].to(out.dtype)[:, None])


class GatedGroupNorm(nn.Module):
    """RMS norm of silu(z) y over all heads of a group, of which other ranks may have some."""

    def __init__(self, delta: StateSpace, share: Share) -> None:
        super().__init__()
        heads = share.value_heads[1] - share.value_heads[0]
        self.groups, self.width = delta.key_heads, delta.values_per_key * delta.value_dim
        self.heads, self.eps = heads, delta.norm_eps
        self.weight = nn.Parameter(torch.empty(heads * delta.value_dim))
        # On the device from the start; numbers of groups in the model.
        self.group_of_head = torch.tensor(groups_of(share, delta.values_per_key), dtype=torch.int64)
        self.group_of_head += share.key_heads[0]
        self.over_ranks: Callable[[Tensor], Tensor] | None = None  # adds up what ranks have (parallel/tensor.py)

    def totals(self, x: Tensor) -> Tensor:
        """[b, s, heads], one number of each -> for each, the sum over its group."""
        sums = x.new_zeros(*x.shape[:2], self.groups).index_add_(2, self.group_of_head, x)
        return (sums if self.over_ranks is None else self.over_ranks(sums)).index_select(2, self.group_of_head)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """z, y: [b, s, heads dv] -> the same."""
        return cast(Tensor, _GatedNorm.apply(z, y, self.weight, self))


class _GatedNorm(torch.autograd.Function):
    """Keeps its inputs and a number of each head."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, y: Tensor, weight: Tensor, norm: GatedGroupNorm) -> Tensor:
        dtype = torch.promote_types(y.dtype, torch.float32)
        ctx.norm = norm
        if not y.numel():  # no heads
            scale = norm.totals(y.new_zeros(*y.shape[:2], norm.heads, dtype=dtype))
            ctx.save_for_backward(z, y, weight, scale)
            return torch.empty_like(y)
        x = F.silu(z.to(dtype)).mul_(y).unflatten(-1, (norm.heads, -1))
        scale = norm.totals(x.square().sum(-1)).div_(norm.width).add_(norm.eps).rsqrt_()
        ctx.save_for_backward(z, y, weight, scale)
        return x.mul_(scale[..., None]).flatten(-2).to(y.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, y, weight, scale = ctx.saved_tensors
        norm: GatedGroupNorm = ctx.norm
        if not y.numel():
            norm.totals(scale)
            return torch.zeros_like(z), torch.zeros_like(y), torch.zeros_like(weight), None
        wide_z, dims = z.to(scale.dtype), (norm.heads, -1)
        gate = F.silu(wide_z)
        normed = (gate * y).unflatten(-1, dims).mul_(scale[..., None])
        d_weight = (grad * normed.flatten(-2)).sum((0, 1)).to(weight.dtype)
        d_normed = (grad.to(scale.dtype) * weight).unflatten(-1, dims)
        dot = norm.totals((d_normed * normed).sum(-1)).div_(norm.width)[..., None]
        d_x = d_normed.sub_(normed.mul_(dot)).mul_(scale[..., None]).flatten(-2)
        d_z = torch.ops.aten.silu_backward(d_x * y, wide_z)
        return d_z.to(z.dtype), d_x.mul_(gate).to(y.dtype), d_weight, None


class StateSpaceMixer(nn.Module):
    """x [b, s, h] -> [b, s, h]; of a TP rank, a partial sum over its heads until ``o_proj`` adds them up."""

    def __init__(self, spec: ModelSpec, share: Share, kernels: KernelPlan) -> None:
        super().__init__()
        assert isinstance(spec.delta, StateSpace)
        delta, h = spec.delta, spec.hidden_size
        groups, heads = (b - a for a, b in (share.key_heads, share.value_heads))
        keys, values = groups * delta.key_dim, heads * delta.value_dim
        self.q_proj, self.k_proj, self.v_proj, self.z_proj, self.a_proj = (
            Linear(h, rows, bias=delta.proj_bias, kernels=kernels) for rows in (keys, keys, values, values, heads)
        )
        self.together = lay_together(self.q_proj, self.k_proj, self.v_proj, self.z_proj, self.a_proj)
        self.q_conv, self.k_conv, self.v_conv = (
            ConvFilters(width, delta.kernel, delta.conv_bias) for width in (keys, keys, values)
        )
        self.A_log, self.dt_bias, self.D = (nn.Parameter(torch.empty(heads)) for _ in range(3))
        self.core_attention = StateSpaceCore(spec, share, kernels)
        self.norm = GatedGroupNorm(delta, share)
        self.o_proj = Linear(values, h, bias=delta.proj_bias, kernels=kernels)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """x: [b, s, h] -> [b, s, h]."""
        q, k, v, z, a = joint_products(self.together, x)
        filters = (self.q_conv, self.k_conv, self.v_conv)
        weights = (*(f.weight for f in filters), self.A_log, self.dt_bias, self.D)
        weights += tuple(f.bias for f in filters if f.bias is not None)
        out = self.core_attention(q, k, v, None, a, weights, context)
        return cast(Tensor, self.o_proj(self.activate(z, out.flatten(2))))

    def activate(self, z: Tensor, out: Tensor) -> Tensor:
        """What ``o_proj`` reads: all [b, s, heads dv]."""
        return cast(Tensor, self.norm(z, out))
