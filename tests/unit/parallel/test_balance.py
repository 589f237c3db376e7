"""The losses that balance experts, against their definitions, transformers' function, and autograd."""

from __future__ import annotations

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hetero_megatron.parallel.balance import sequence_loss, z_loss
from hetero_megatron.spec.moe import MoE
from tests.support.moe_reference import naive_sequence_loss

ROWS, TOKENS, EXPERTS = 3, 11, 6


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, TOKENS, EXPERTS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def counts_of(logits: torch.Tensor, k: int, own: list[int]) -> torch.Tensor:
    """[rows, experts + 1]: how often each expert is among the k best, and ``own``."""
    best = logits.topk(k, dim=-1).indices
    load = torch.stack([(best == e).sum((1, 2)) for e in range(EXPERTS)], dim=1)
    return torch.cat([load, torch.tensor(own)[:, None]], dim=1)


@pytest.mark.parametrize("score", ["softmax", "topk_softmax", "sigmoid"])
@pytest.mark.parametrize("parts", [[11], [4, 0, 7]])
def test_sequence_loss_is_its_definition(score: str, parts: list[int]) -> None:
    """A sequence whose tokens are on several ranks: the sum of their parts, gradients of each one's own tokens."""
    moe = MoE(EXPERTS, 2, 4, score=score)
    logits, own = logits_of(1).requires_grad_(), [11, 4, 0]
    want = sum(n * naive_sequence_loss(row, moe) for n, row in zip(own, logits, strict=True))
    assert isinstance(want, torch.Tensor)
    (grad,) = torch.autograd.grad(want, logits)
    counts = counts_of(logits.detach(), 2, own)
    total, start = torch.zeros((), dtype=torch.float64), 0
    for n in parts:
        mine = slice(start, start + n)
        value, got = sequence_loss(logits.detach()[:, mine].flatten(0, 1), counts, moe, TOKENS)
        torch.testing.assert_close(got.view(ROWS, n, EXPERTS), grad[:, mine], rtol=1e-12, atol=1e-13)
        total, start = total + value, start + n
    torch.testing.assert_close(total, want.detach(), rtol=1e-12, atol=0.0)


def test_of_one_sequence_and_layer_it_is_transformers_loss() -> None:
    """That is not divided by the number of experts per token."""
    for row, k in zip(logits_of(2), (1, 2, 3), strict=True):
        want = load_balancing_loss_func((row,), EXPERTS, k)
        assert isinstance(want, torch.Tensor)
        counts = counts_of(row[None], k, [1])
        value, _ = sequence_loss(row, counts, MoE(EXPERTS, k, 4), TOKENS)
        torch.testing.assert_close(value, want.double() / k, rtol=1e-6, atol=0.0)  # theirs is in fp32


def test_where_all_are_equal_it_is_one() -> None:
    counts = torch.tensor([[4] * EXPERTS + [1]])
    value, grad = sequence_loss(torch.zeros(12, EXPERTS, dtype=torch.float64), counts, MoE(EXPERTS, 2, 4), 12)
    assert abs(value - 1) < 1e-14 and grad.abs().max() < 1e-14


@pytest.mark.parametrize("masked", [False, True])
def test_z_loss(masked: bool) -> None:
    logits = logits_of(3).requires_grad_()
    counted = torch.rand(ROWS, TOKENS) < 0.5 if masked else None
    squares = logits.exp().sum(-1).log() ** 2
    want = squares.sum() if counted is None else squares[counted].sum()
    (grad,) = torch.autograd.grad(want, logits)
    value, got = z_loss(logits.detach().flatten(0, 1), counted)
    torch.testing.assert_close(value, want.detach(), rtol=1e-12, atol=0.0)
    torch.testing.assert_close(got.view_as(grad), grad, rtol=1e-12, atol=1e-13)


def test_of_no_tokens() -> None:
    for rows in (0, 2):
        logits, counts = torch.zeros(0, EXPERTS), torch.zeros(rows, EXPERTS + 1, dtype=torch.int64)
        assert sequence_loss(logits, counts, MoE(EXPERTS, 2, 4), 8)[1].shape == (0, EXPERTS)
        assert z_loss(logits, torch.zeros(rows, 0, dtype=torch.bool))[0] == 0
