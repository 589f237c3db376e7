"""GRPO in plain torch, after the formulas in TRL's documentation (GRPOTrainer, 1.16); tests/slow/test_trl.py has TRL
say them itself."""

from __future__ import annotations

import numpy as np
import torch

from hetero_megatron.spec.grpo import Grpo


def advantages(g: Grpo, rewards: torch.Tensor) -> torch.Tensor:
    """``rewards``: [answers], group after group."""
    groups = rewards.view(-1, g.group_size)
    found = groups - groups.mean(1, keepdim=True)
    if g.scale_rewards == "group":
        found = found / (groups.std(1, keepdim=True) + 1e-4)
    elif g.scale_rewards == "batch":
        found = found / (rewards.std() + 1e-4)
    return found.flatten()


def loss_of(
    g: Grpo, policy: torch.Tensor, old: torch.Tensor, reference: torch.Tensor, advantage: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, float]]:  # fmt: skip
    """(loss, facts) of log-probabilities [answers, tokens], where ``mask`` is 1."""
    a = advantage[:, None]
    ratio = torch.exp(policy - old)
    clipped = torch.clamp(ratio, 1 - g.eps_lower, 1 + g.eps_upper)
    kl = torch.exp(reference - policy) - (reference - policy) - 1
    kl = kl * ratio if g.weighs_kl else kl
    each = -torch.minimum(ratio * a, clipped * a) + g.beta * kl
    low, high = (ratio < 1 - g.eps_lower) & (a < 0), (ratio > 1 + g.eps_upper) & (a > 0)
    shown = {"clip_ratio/low_mean": low, "clip_ratio/high_mean": high, "clip_ratio/region_mean": low | high, "kl": kl}
    facts = {name: ((value * mask).sum() / mask.sum()).item() for name, value in shown.items() if name in g.facts}
    if g.loss_type == "grpo":
        return ((each * mask).sum(1) / mask.sum(1)).mean(), facts
    if g.loss_type == "dr_grpo":
        return (each * mask).sum() / (len(each) * g.max_new_tokens), facts
    return (each * mask).sum() / mask.sum(), facts


def drawn(logits: torch.Tensor, key: list[int]) -> int:
    """A token, from the likeliest one down, by a number that is drawn for ``key``."""
    p = np.exp(logits.double().numpy() - logits.max().item())
    order = np.argsort(-p, kind="stable")
    sums = np.cumsum(p[order])
    return int(order[np.searchsorted(sums, np.random.RandomState(key).random_sample() * sums[-1], side="right")])
