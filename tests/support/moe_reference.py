"""Balanced mixtures of experts from the definitions, over transformers' models in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.moe import Balancing, MoE


class BalancedModel:
    """Replaces the routers of a transformers model by those of ``spec`` with other options, and keeps what they did.

    Attributes:
        spec: with the options; routers: the model's, in the order of layers, with ``logits`` and ``experts`` of the
            last forward.
    """

    def __init__(self, hf: torch.nn.Module, spec: ModelSpec, options: dict[str, Any], balancing: Balancing) -> None:
        assert spec.moe is not None
        self.moe, self.balancing = replace(spec.moe, **options), balancing
        self.spec = replace(spec, moe=self.moe)
        names = ("topkrouter", "llama4router")
        self.routers: list[Any] = [m for m in hf.modules() if type(m).__name__.lower().endswith(names)]
        for router in self.routers:
            bias = None
            if self.moe.score_bias:
                bias = torch.randn(self.moe.num_experts).to(router.weight.dtype) * 0.1
            router.register_buffer("e_score_correction_bias", bias)
            router.forward = self._forward(router)

    def _forward(self, router: Any) -> Any:
        def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = x.reshape(-1, x.shape[-1]) @ router.weight.T
            if self.moe.router_bias:
                logits = logits + router.bias
            weights, experts = route(logits, router.e_score_correction_bias, self.moe)
            router.logits, router.experts = logits, experts
            if type(router).__name__ == "Llama4Router":
                return torch.zeros_like(logits).scatter(1, experts, weights), logits
            return logits, weights, experts

        return forward

    def losses(
        self, counted: torch.Tensor, further: Sequence[torch.Tensor] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(sequence loss, z-loss) of the last forward, summed over layers, of [b, s] tokens of which some count;
        ``further``: those of the last layers, which predict further tokens."""
        sequence, z = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        of_layers = [*[counted] * (len(self.routers) - len(further)), *further]
        for router, its in zip(self.routers, of_layers, strict=True):
            logits = router.logits.view(*counted.shape, -1)
            for row, mask in zip(logits, its, strict=True):
                sequence = sequence + mask.sum() * naive_sequence_loss(row, self.moe) / counted.sum()
                z = z + sum(row[t].exp().sum().log() ** 2 for t in range(len(row)) if mask[t]) / counted.sum()
        return sequence, z

    def loads(self) -> list[list[int]]:
        return [[int((r.experts == e).sum()) for e in range(self.moe.num_experts)] for r in self.routers]

    @torch.no_grad()
    def move_bias(self) -> None:
        for router, load in zip(self.routers, self.loads(), strict=True):
            mean = sum(load) / len(load)
            for e, count in enumerate(load):
                if self.moe.score_bias and count != mean:
                    router.e_score_correction_bias[e] += self.balancing.bias_rate * (1 if count < mean else -1)


def route(logits: torch.Tensor, bias: torch.Tensor | None, moe: MoE) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's report, section 2.1.2, Mixtral's softmax and gpt-oss' over the best, token by token."""
    scores = {"sigmoid": logits.sigmoid(), "softmax": logits.softmax(-1), "topk_softmax": logits}[moe.score]
    weights, experts = [], []
    size = moe.num_experts // moe.groups
    for token in scores:
        choice = (token.detach() if bias is None else token.detach() + bias).tolist()
        groups = [sorted(choice[g * size : (g + 1) * size])[-moe.group_size :] for g in range(moe.groups)]
        best = sorted(range(moe.groups), key=lambda g: -sum(groups[g]))[: moe.top_groups]
        allowed = [e for e in range(moe.num_experts) if e // size in best]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: moe.top_k]
        mine = token[chosen].softmax(-1) if moe.score == "topk_softmax" else token[chosen]
        weights.append(moe.scale * (mine / mine.sum() if moe.normalize else mine))
        experts.append(torch.tensor(chosen))
    return torch.stack(weights), torch.stack(experts)


def naive_sequence_loss(logits: torch.Tensor, moe: MoE) -> torch.Tensor:
    """DeepSeek-V3's report, equations 17 to 20, without the coefficient: sum_i f_i P_i."""
    length, experts = logits.shape
    scores = logits.sigmoid() if moe.score == "sigmoid" else logits.softmax(-1)
    shares = scores / scores.sum(-1, keepdim=True)
    total = torch.zeros((), dtype=logits.dtype)
    for i in range(experts):
        f = 0.0
        for t in range(length):
            f += float(i in scores[t].topk(moe.top_k).indices) * experts / (moe.top_k * length)
        total = total + f * shares[:, i].mean()
    return total
