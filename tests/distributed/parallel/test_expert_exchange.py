"""The exchange of routed tokens by itself: every token comes back to its place, what is in between overlaps it, and
over the link between two islands it goes once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.ops.grouped_gemm import on_host
from hetero_megatron.parallel.experts import ExpertExchange, Routes, expert_ways
from hetero_megatron.plans.canonical import ExpertGroup, ExpertMember
from hetero_megatron.plans.experts import destinations, token_hops
from hetero_megatron.predictor.cost.expert_cost import token_bytes
from hetero_megatron.spec.expert_load import INDEX
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.moe_models import MOE_FAMILIES
from tests.support.pool import shared_pool

EXPERTS, WIDTH, TOP_K = 6, 5, 3
SPEC = from_hf_config(MOE_FAMILIES["mixtral"])
assert SPEC.moe is not None
SPEC = replace(SPEC, hidden_size=WIDTH, moe=replace(SPEC.moe, num_experts=EXPERTS, top_k=TOP_K))
TOKENS = (7, 0, 12, 5, 9)  # by rank; one may have none
# (who holds which experts, islands)
GROUPS: dict[str, tuple[list[Any], tuple[tuple[int, ...], ...]]] = {
    "uneven": ([((0,), (0, 5)), ((1,), (5, 6)), ((2,), (0, 0))], ()),
    "hot_experts_replicated": ([((2,), (0, 4)), ((0,), (2, 6)), ((1,), (0, 6))], ()),
    "columns_shared": ([((1, 0), (0, 3)), ((2,), (3, 6))], ()),
    "nodes_of_two": ([((0,), (0, 2)), ((1,), (2, 3)), ((2,), (3, 5)), ((3,), (5, 6))], ((0, 1), (2, 3))),
    "unequal_nodes_and_a_rank_without_experts": (
        [((3,), (0, 2)), ((1,), (0, 0)), ((4,), (2, 3)), ((0,), (3, 4)), ((2,), (4, 6))], ((0, 3), (1, 2, 4))),
    "replicas_in_both_nodes": (
        [((0,), (0, 4)), ((1,), (0, 2)), ((2,), (2, 4)), ((3,), (3, 5)), ((4,), (5, 6))], ((0, 1), (2, 3, 4))),
    "columns_shared_across_nodes": (
        [((0, 4), (0, 3)), ((3, 1), (2, 5)), ((2,), (4, 6))], ((0, 1, 2), (3, 4))),
    "a_node_whose_ranks_only_send": (
        [((0,), (0, 0)), ((1,), (0, 0)), ((2,), (0, 2)), ((3,), (2, 4)), ((4,), (4, 6))], ((0, 1), (2, 3, 4))),
    "nodes_of_one_rank_and_of_four": (
        [((4,), (0, 1)), ((0,), (1, 2)), ((1,), (2, 3)), ((2,), (3, 4)), ((3,), (4, 6))], ((0, 1, 2, 3),)),
}  # fmt: skip


def group_of(name: str) -> ExpertGroup:
    return ExpertGroup(tuple(ExpertMember(ranks, held, (1,) * len(ranks)) for ranks, held in GROUPS[name][0]))


class Scaled:
    """In place of experts: expert e multiplies by e + 1; of ranks that share its columns each does its part."""

    def __init__(self, first: int, ranks: int) -> None:
        self.first, self.ranks = first, ranks

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        assert ends.tolist() == on_host(ends) == [int(((chosen >= 0) & (chosen <= e)).sum()) for e in range(len(ends))]
        factors = torch.where(chosen >= 0, weights * (self.first + chosen + 1.0), 0.0).sum(1, keepdim=True)
        return (x * factors / self.ranks).to(x.dtype)


def routed(rank: int) -> torch.Tensor:
    """[tokens, k], what the tokens of a rank choose."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.rand(TOKENS[rank], EXPERTS, generator=generator).argsort(-1)[:, :TOP_K].contiguous()


class Between(torch.autograd.Function):
    """In place of a shared expert."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, events: list[str]) -> torch.Tensor:
        ctx.events = events
        events.append("between")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.events.append("between")
        return grad * 2, None


def exchanged(comm: Comm, name: str, dtype: torch.dtype = torch.float64) -> Any:
    assert SPEC.moe is not None
    group, islands = group_of(name), GROUPS[name][1]
    ranks = tuple(sorted(group.ranks))
    hops = token_hops(SPEC.moe, group, islands)
    comm.create_groups([ranks, *(hops.islands if hops else ())])
    if comm.rank not in ranks:
        return None
    mine = next(m for m in group.members if comm.rank in m.ranks)
    events: list[str] = []

    class Watched(Routes):
        def start(self, *args: Any) -> None:
            events.append("start")
            super().start(*args)

        def arrive(self) -> list[torch.Tensor]:
            events.append("arrive")
            return super().arrive()

    exchange = ExpertExchange(expert_ways(SPEC.moe, group, comm, islands), Scaled(mine.experts[0], len(mine.ranks)))
    for hop in exchange.hops:
        hop.find_routes = Watched
    generator = torch.Generator().manual_seed(comm.rank)
    tokens = TOKENS[comm.rank]
    x = torch.randn(tokens, WIDTH, dtype=dtype, generator=generator).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    weights = torch.rand(tokens, TOP_K, dtype=wide, generator=generator).requires_grad_()
    chosen = routed(comm.rank)
    before = dict(comm.sent_bytes)
    finish = exchange(x, weights, chosen)
    shared = Between.apply(x, events)
    out = finish() + shared
    grad = torch.randn(out.shape, dtype=out.dtype, generator=generator)
    out.backward(grad)
    factors = (weights * (chosen + 1.0)).sum(1, keepdim=True)
    want = x * factors + 2 * x
    dx, dweights = torch.autograd.grad(want, (x, weights), grad.to(want.dtype))
    errors = [(a - b).abs().max().item() if a.numel() else 0.0
              for a, b in ((out, want), (x.grad, dx), (weights.grad, dweights))]
    sent = {rank: comm.sent_bytes[rank] - before.get(rank, 0) for rank in ranks if rank != comm.rank}
    return errors, events, sent


@pytest.mark.parametrize("name", GROUPS)
def test_every_token_comes_back_to_its_place(name: str) -> None:
    """With gradients, on every rank; in both directions, what lies between runs while tokens are under way."""
    assert SPEC.moe is not None
    group, islands = group_of(name), GROUPS[name][1]
    two = token_hops(SPEC.moe, group, islands) is not None
    assert two == bool(islands)
    found = shared_pool().run(exchanged, name)
    inner = ["start", "arrive"] * 2 if two else []
    forward = ["start", "between", "arrive", *inner, "start", "arrive"]
    for rank in group.ranks:
        errors, events, _ = found[rank]
        assert max(errors) < 1e-13
        assert events == [*forward, "start", "arrive", *inner, "start", "between", "arrive"]


@pytest.mark.parametrize("name", [name for name, (_, islands) in GROUPS.items() if islands])
def test_bytes_between_islands(name: str) -> None:
    """Against counting: a token crosses once to each other island with some of its experts, and once back; straight it
    would have gone to each rank there."""
    group, islands = group_of(name), GROUPS[name][1]
    island = {rank: next((i for i, ranks in enumerate(islands) if rank in ranks), -1 - rank) for rank in group.ranks}
    to = {rank: destinations(group, rank, EXPERTS, islands) for rank in group.ranks}
    pairs, straight = 0, 0
    for rank in group.ranks:
        for choice in routed(rank).numpy():
            ranks = np.unique([r for e in choice for r in to[rank][e]])
            there = [island[r] for r in ranks if island[r] != island[rank]]
            straight += len(there)
            pairs += len(set(there))
    found = shared_pool().run(exchanged, name)
    crossed = sum(
        size for rank in group.ranks for peer, size in found[rank][2].items() if island[peer] != island[rank]
    )
    each = sum(token_bytes(SPEC, 8))
    counts = crossed - pairs * each
    assert 0 < pairs < straight
    assert 0 <= counts <= INDEX * len(group.ranks) * len(set(island.values())), "beside tokens only their counts cross"


def test_two_hops_in_16_bits() -> None:
    """An island's sum is rounded once more on its way: a few roundings of bf16, weights' gradients are wider."""
    for result in shared_pool().run(exchanged, "unequal_nodes_and_a_rank_without_experts", torch.bfloat16)[:5]:
        out, dx, dweights = result[0]
        assert out < 0.25 and dx < 0.25 and dweights < 0.5, result[0]
