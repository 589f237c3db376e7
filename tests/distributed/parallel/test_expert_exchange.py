"""The exchange of routed tokens by itself: every token comes back to its place, and what is in between overlaps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.parallel.experts import ExpertExchange, Routes
from hetero_megatron.plan.canonical import ExpertGroup, ExpertMember
from tests.support.pool import shared_pool

EXPERTS, WIDTH, TOP_K = 6, 5, 3
GROUPS = {
    "uneven": [((0,), (0, 5)), ((1,), (5, 6)), ((2,), (0, 0))],
    "hot_experts_replicated": [((2,), (0, 4)), ((0,), (2, 6)), ((1,), (0, 6))],
    "columns_shared": [((1, 0), (0, 3)), ((2,), (3, 6))],
}


class Scaled:
    """In place of experts: expert e multiplies by e + 1; of ranks that share its columns each does its part."""

    def __init__(self, first: int, ranks: int) -> None:
        self.first, self.ranks = first, ranks

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        factors = torch.where(chosen >= 0, weights * (self.first + chosen + 1.0), 0.0).sum(1, keepdim=True)
        return x * factors / self.ranks


def exchanged(comm: Comm, members: list[Any]) -> Any:
    comm.create_groups([(0, 1, 2)])
    if comm.rank > 2:
        return None
    group = ExpertGroup(tuple(ExpertMember(ranks, held, (1,) * len(ranks)) for ranks, held in members))
    mine = next(m for m in group.members if comm.rank in m.ranks)
    events: list[str] = []

    class Watched(Routes):
        def start(self, *args: Any) -> None:
            events.append("start")
            super().start(*args)

        def arrive(self) -> list[torch.Tensor]:
            events.append("arrive")
            return super().arrive()

    experts: Any = Scaled(mine.experts[0], len(mine.ranks))
    exchange = ExpertExchange(experts, comm.group((0, 1, 2)), group, EXPERTS)
    exchange.find_routes = Watched
    generator = torch.Generator().manual_seed(comm.rank)
    tokens = (7, 0, 12)[comm.rank]  # a rank may have none
    x = torch.randn(tokens, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(tokens, TOP_K, dtype=torch.float64, generator=generator).requires_grad_()
    chosen = torch.rand(tokens, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K].contiguous()

    class Between(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            events.append("between")
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            events.append("between")
            return grad * 2

    finish = exchange(x, weights, chosen)
    shared = Between.apply(x)
    out = finish() + shared
    grad = torch.randn(out.shape, dtype=out.dtype, generator=generator)
    out.backward(grad)
    factors = (weights * (chosen + 1.0)).sum(1, keepdim=True)
    want = x * factors + 2 * x
    dx, dweights = torch.autograd.grad(want, (x, weights), grad)
    errors = [(a - b).abs().max().item() if a.numel() else 0.0
              for a, b in ((out, want), (x.grad, dx), (weights.grad, dweights))]
    return errors, events


@pytest.mark.parametrize("name", GROUPS)
def test_every_token_comes_back_to_its_place(name: str) -> None:
    """With gradients, on every rank; in both directions, what lies between runs while tokens are under way."""
    for errors, events in shared_pool().run(exchanged, GROUPS[name])[:3]:
        assert max(errors) < 1e-13
        forward = ["start", "between", "arrive", "start", "arrive"]
        assert events == [*forward, "start", "arrive", "start", "between", "arrive"]
