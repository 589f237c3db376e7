"""A mixture-of-experts MLP: a router, experts of which this copy has some, and what all tokens share.

Tokens come and go as [batch, tokens, hidden], the tokens that this rank has: under sequence parallelism a shard, which
is routed where it is. ``MoE.dispatch`` brings tokens to their experts; here all experts are on this rank, and
``parallel/experts.py`` puts the exchange between ranks in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from hetero_megatron.model.layers import activation_of
from hetero_megatron.ops import KernelPlan
from hetero_megatron.ops.int8_weight import narrow_product
from hetero_megatron.ops.moe_permute import routed_rows
from hetero_megatron.spec import ModelSpec, Share

if TYPE_CHECKING:
    from hetero_megatron.ops.int8_weight import Scales

# (tokens [n, h], weights [n, k], experts [n, k]) sends tokens off; calling what it returns gives the experts' output
Dispatch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Callable[[], torch.Tensor]]
# (experts [n, k], how many are here, ends [experts] or None) -> (rows, slots, ends), see ops.moe_permute.routed_rows
Sort = Callable[[torch.Tensor, int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
# (weights, logits, experts, sequences, mask [b, s] of the tokens that count in the loss or None) -> weights
Observe = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor | None], torch.Tensor]


class GroupedLinear(nn.Module):
    """x W[g]^T + b[g] for rows sorted by group; weight: [groups, outputs, inputs], bias: [groups, outputs] or None.

    Args:
        adds_bias: false where another rank of those that have some columns of each expert adds it.
    """

    def __init__(
        self, groups: int, inputs: int, outputs: int, kernels: KernelPlan, bias: bool, adds_bias: bool = True
    ) -> None:
        super().__init__()
        self.kernels, self.adds_bias = kernels, adds_bias
        self.weight = nn.Parameter(torch.empty(groups, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(groups, outputs)) if bias else None
        self.scales: Scales | None = None  # of frozen weights in 8 bits, one per output (ops/int8_weight.py)

    def adapted(self, y: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """What becomes of the product ``y`` of x and the weights; adapters replace it (``parallel/lora.py``)."""
        return y

    def product(self, x: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor) -> torch.Tensor:
        """x: [rows, inputs], bias: [groups, outputs] -> [rows, outputs]."""
        if self.scales is not None:
            y = narrow_product(self.kernels.grouped_gemm, x, self.weight, self.scales, bias, ends)
        else:
            y = self.kernels.grouped_gemm(x, self.weight, bias, ends)
        return self.adapted(y, x, ends)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.bias if self.adds_bias else None, ends)


class Experts(nn.Module):
    """The experts that this rank has, or some columns of each.

    ``forward(x [n, h], weights [n, k], chosen [n, k])``: for each row the weighted sum [n, h] of what its chosen
    experts (numbers on this rank; -1: none, or one elsewhere) make of it. ``ends`` [experts], where the rows of each
    expert end when they are sorted, saves a wait for the device where they were counted before.
    """

    def __init__(self, spec: ModelSpec, share: Share, kernels: KernelPlan) -> None:
        super().__init__()
        self.kernels = kernels
        self.sort: Sort = routed_rows
        (a, b), (c, d), h = share.experts, share.expert_ffn, spec.hidden_size
        assert spec.moe is not None
        self.first, self.count, bias = a, b - a, spec.moe.bias
        self.weigh_inputs = spec.moe.weigh_inputs
        self.gate_proj = GroupedLinear(b - a, h, d - c, kernels, bias) if spec.gated else None
        self.up_proj = GroupedLinear(b - a, h, d - c, kernels, bias)
        # Outputs of ranks that share an expert's columns are added up, its bias once.
        self.down_proj = GroupedLinear(b - a, d - c, h, kernels, bias, adds_bias=c == 0 and d > 0)
        self.activate = activation_of(spec, kernels)

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, slots, ends = self.sort(chosen, self.count, ends)
        routed = self.kernels.moe_permute(x, rows, slots)
        if self.weigh_inputs:
            routed = routed * _by_row(weights, slots, len(rows)).to(routed.dtype)[:, None]
            weights = torch.ones_like(weights)
        columns = (projection(routed, ends) for projection in (self.gate_proj, self.up_proj) if projection is not None)
        y = self.down_proj(self.activate(*columns), ends)
        return self.kernels.moe_unpermute(y, weights, rows, slots)  # type: ignore[no-any-return]


def _by_row(weights: torch.Tensor, slots: torch.Tensor, rows: int) -> torch.Tensor:
    """Weights [tokens, k] of choices -> [rows], of the rows in which ``slots`` [tokens, k] puts them (-1: none)."""
    targets = torch.where(slots >= 0, slots, rows).flatten()
    return weights.new_zeros(rows + 1).scatter(0, targets, weights.flatten())[:rows]


class Router(nn.Module):
    """Weights and experts of each token. ``observe``: sees what was chosen, to balance it (``parallel/balance.py``)."""

    def __init__(self, spec: ModelSpec, kernels: KernelPlan) -> None:
        super().__init__()
        assert spec.moe is not None
        self.moe, self.kernels = spec.moe, kernels
        self.weight = nn.Parameter(torch.empty(spec.moe.num_experts, spec.hidden_size))
        self.bias = nn.Parameter(torch.empty(spec.moe.num_experts)) if spec.moe.router_bias else None
        self.e_score_correction_bias: nn.Parameter | None = None
        if spec.moe.score_bias:  # it moves by small steps, which 16 bits would round away
            wide = torch.promote_types(self.weight.dtype, torch.float32)
            self.e_score_correction_bias = nn.Parameter(torch.empty(spec.moe.num_experts, dtype=wide))
        self.observe: Observe | None = None

    def forward(self, x: torch.Tensor, counted: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [b, s, h], and the mask [b, s] of tokens that count in the loss (None: all) -> weights [b s, top_k] in at
        least fp32, experts [b s, top_k] int64."""
        logits = self.kernels.gemm(x.flatten(0, 1), self.weight, self.bias)
        bias = self.e_score_correction_bias
        weights, experts = self.kernels.router_topk(logits, None if bias is None else bias.detach(), *self.moe.router)
        if self.observe is not None:
            weights = self.observe(weights, logits, experts, x.shape[0], counted)
        return weights, experts


class MoEMLP(nn.Module):
    """The MLP of a layer of kind ``moe``.

    Args:
        shared: the MLP that all tokens use, or None.
    """

    def __init__(self, spec: ModelSpec, share: Share, kernels: KernelPlan, shared: nn.Module | None) -> None:
        super().__init__()
        assert spec.moe is not None
        self.kernels = kernels
        self.gate = Router(spec, kernels)
        self.experts = Experts(spec, share, kernels)
        self.dispatch: Dispatch = partial(partial, self.experts.forward)
        self.shared_expert = shared
        self.shared_expert_gate = SharedGate(spec, kernels) if spec.moe.shared_gate else None

    def forward(self, x: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
        """``counted``: [b, s], which tokens count in the loss; None: all."""
        weights, experts = self.gate(x, counted)
        arrive = self.dispatch(x.flatten(0, 1), weights, experts)
        shared = self._shared(x)  # while tokens are on their way
        y = arrive().view(x.shape)
        return y if shared is None else y + shared

    def _shared(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.shared_expert is None:
            return None
        shared = cast(torch.Tensor, self.shared_expert(x))
        return shared if self.shared_expert_gate is None else self.shared_expert_gate(x).sigmoid() * shared


class SharedGate(nn.Module):
    """One logit per token, by which the shared expert counts."""

    def __init__(self, spec: ModelSpec, kernels: KernelPlan) -> None:
        super().__init__()
        self.kernels = kernels
        self.weight = nn.Parameter(torch.empty(1, spec.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.gemm(x, self.weight, None)  # type: ignore[no-any-return]
