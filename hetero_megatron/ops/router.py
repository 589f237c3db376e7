"""Which experts a token goes to, and with what weight."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from hetero_megatron.ops.spec import ATEN, Bounds, Case, Kernel, OpSpec, normal, reference_forward, seeded, wide

SCORES = ("softmax", "topk_softmax", "sigmoid")
TINY = 1e-20  # added to a sum of sigmoids before it divides, as in DeepSeek-V3


def scores_of(logits: torch.Tensor, score: str) -> torch.Tensor:
    """By which experts are chosen (without the bias), in at least fp32; [tokens, experts]."""
    z = logits.to(wide(logits.dtype))
    return {"softmax": lambda: z.softmax(-1), "topk_softmax": lambda: z, "sigmoid": z.sigmoid}[score]()


def choose(
    scores: torch.Tensor, bias: torch.Tensor | None, top_k: int, groups: int, top_groups: int, group_size: int
) -> torch.Tensor:
    """The ``top_k`` experts of each token, best first, [tokens, top_k] int64; of equals the one with the lower number.

    Args:
        bias: [experts], added for the choice only (DeepSeek-V3's balancing without a loss).
        groups: of consecutive experts, of which only the ``top_groups`` best may be chosen from; a group is as good as
            the sum of its ``group_size`` best experts (DeepSeek-V2: 1, V3: 2).
    """
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if top_groups < groups:
        tokens, experts = choice.shape
        parts = choice.view(tokens, groups, experts // groups)
        best = _top(parts.topk(group_size, dim=-1).values.sum(-1), top_groups)
        allowed = torch.zeros(tokens, groups, dtype=torch.bool, device=choice.device).scatter_(1, best, True)
        choice = parts.masked_fill(~allowed[..., None], -math.inf).view(tokens, experts)
    return _top(choice, top_k)


def _top(values: torch.Tensor, count: int) -> torch.Tensor:
    """``torch.topk`` leaves open which of equals it takes."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()


def definition(
    logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, score: str, normalize: bool, scale: float, groups: int,
    top_groups: int, group_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(weights [tokens, top_k] in at least fp32, experts [tokens, top_k] int64).

    Args:
        logits: [tokens, experts].
        score: ``softmax`` over all experts, then the best (Mixtral, Qwen, OLMoE, DeepSeek-V2); ``topk_softmax``:
            softmax over the best (gpt-oss); ``sigmoid`` of each (DeepSeek-V3).
        normalize: the weights of a token sum to ``scale``; they are multiplied by it in any case.
        bias, groups, top_groups, group_size: see :func:`choose`.
    """
    scores = scores_of(logits, score)
    experts = choose(scores.detach(), bias, top_k, groups, top_groups, group_size)
    expert_scores = scores.gather(-1, experts)
    if score == "topk_softmax":
        expert_scores = expert_scores.softmax(-1)
    elif normalize:
        expert_scores = expert_scores / (expert_scores.sum(-1, keepdim=True) + (TINY if score == "sigmoid" else 0.0))
    return expert_scores * scale, experts


def backward(
    grad: torch.Tensor, logits: torch.Tensor, experts: torch.Tensor, top_k: int, score: str, normalize: bool,
    scale: float, groups: int, top_groups: int, group_size: int,
) -> tuple[torch.Tensor]:  # fmt: skip
    scores = scores_of(logits, score)
    g = grad.to(scores.dtype) * scale
    picked = scores.gather(-1, experts)
    if score == "topk_softmax":
        probs = picked.softmax(-1)
        g = probs * (g - (g * probs).sum(-1, keepdim=True))
    elif normalize:
        total = picked.sum(-1, keepdim=True) + (TINY if score == "sigmoid" else 0.0)
        g = (g - (g * picked).sum(-1, keepdim=True) / total) / total
    if score == "softmax":
        dlogits = scores * -(g * picked).sum(-1, keepdim=True)
        dlogits.scatter_add_(-1, experts, g * picked)
    else:
        dlogits = torch.zeros_like(scores).scatter_(-1, experts, g * picked * (1 - picked) if score == "sigmoid" else g)
    return (dlogits.to(logits.dtype),)


def _reference_backward(grad: torch.Tensor, logits: torch.Tensor, experts: torch.Tensor, *options: Any) -> Any:
    """By autograd through the definition, with the choice that forward made."""
    _, score, normalize, scale, *_ = options
    with torch.enable_grad():
        z = logits.detach().requires_grad_()
        picked = scores_of(z, score).gather(-1, experts)
        if score == "topk_softmax":
            picked = picked.softmax(-1)
        elif normalize:
            picked = picked / (picked.sum(-1, keepdim=True) + (TINY if score == "sigmoid" else 0.0))
        return torch.autograd.grad(seeded([picked * scale], [grad]), z)


def _apart(tokens: int, experts: int, seed: int) -> torch.Tensor:
    """Logits of which no two of a token are nearly equal, so that every dtype chooses alike."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(tokens, experts, generator=generator).argsort(-1).double()
    return (order - experts / 2) * (8.0 / max(experts, 8))


def _cases() -> Iterable[Case]:
    for name, tokens, experts, k, score, normalize, scale in (
        ("softmax", 9, 8, 2, "softmax", False, 1.0), ("softmax, normalized", 7, 13, 3, "softmax", True, 1.0),
        ("topk_softmax", 9, 8, 4, "topk_softmax", False, 1.0), ("sigmoid", 6, 16, 4, "sigmoid", True, 2.5),
        ("one expert", 3, 1, 1, "softmax", True, 1.0), ("all experts", 4, 5, 5, "softmax", False, 16.0),
        ("no tokens", 0, 8, 2, "softmax", True, 1.0), ("many rows", 65_537, 4, 1, "softmax", False, 1.0),
        ("256 experts", 5, 256, 8, "sigmoid", True, 2.5),
    ):  # fmt: skip
        yield Case(name, (_apart(tokens, experts, 1), None, k, score, normalize, scale, 1, 1, 1))
    bias = torch.arange(16).double().remainder(3) / 4
    yield Case("bias", (_apart(6, 16, 2), bias, 4, "sigmoid", True, 2.5, 1, 1, 1))
    yield Case("groups, bias", (_apart(6, 16, 2), bias, 4, "sigmoid", True, 2.5, 4, 2, 2))
    yield Case("groups", (_apart(6, 16, 3), None, 3, "softmax", False, 1.0, 4, 2, 1))
    yield Case("three of six groups", (_apart(7, 12, 6), None, 4, "softmax", True, 0.7, 6, 3, 2))
    yield Case("groups by their best", (_apart(7, 16, 7), None, 4, "sigmoid", True, 1.0, 4, 3, 3))
    yield Case("ties", (torch.tensor([[1.0, 2, 2, 0], [3, 3, 3, 3]]).double(), None, 2, "softmax", True, 1.0, 1, 1, 1))
    yield Case("offset view", (_apart(9, 24, 4)[1:, 2:19], None, 3, "softmax", True, 1.0, 1, 1, 1))
    yield Case("huge", (_apart(4, 8, 5) * 1000, None, 2, "topk_softmax", True, 1.0, 1, 1, 1))


def fake(logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=wide(logits.dtype)), logits.new_empty(shape, dtype=torch.int64)


SPEC = OpSpec(
    name="router_topk",
    tensors=("logits", "bias"),
    options=("top_k", "score", "normalize", "scale", "groups", "top_groups", "group_size"),
    schema=None,
    results=("weights", "experts"),
    fixed=("experts",),
    saves=("logits", "experts"),
    gradients=("logits",),
    optional=("bias",),
    wide=("bias",),
    definition=definition,
    forward=reference_forward(definition),
    backward=_reference_backward,
    fake=fake,
    flops=lambda logits, *_: 8 * logits.numel(),
    cases=_cases,
    speed=lambda: Case("4096x64", (normal(4096, 64, seed=1), None, 8, "softmax", True, 1.0, 1, 1, 1)),
    bounds=Bounds((1e-6, 2e-6), (1e-6, 1e-3), (1e-6, 5e-3)),  # weights are in fp32
)
KERNELS = (Kernel("router_topk", "aten", ATEN, reference_forward(definition), backward, traceable=True),)
