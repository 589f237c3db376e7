"""Rows of tokens -> rows sorted by expert, and back: what lies around the grouped products of experts.

Both ways are gathers, so that nothing depends on the order in which a device adds: ``rows`` says which token each
sorted row is of, ``slots`` where the sorted rows of each token are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

from hetero_megatron.ops.grouped_gemm import on_host
from hetero_megatron.ops.spec import (
    ATEN,
    Bounds,
    Case,
    Kernel,
    OpSpec,
    autograd_backward,
    normal,
    reference_forward,
    wide,
)


def permute_definition(x: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor]:
    """x[rows]. x: [tokens, h]; rows: [n] int64; slots: [tokens, k] int64, each row's number once, -1: none."""
    return (x[rows],)


def unpermute_definition(
    y: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor]:
    """out[t] = sum over j of weights[t, j] y[slots[t, j]] in at least fp32, without the slots that are -1.

    Args:
        y: [n, h]; weights: [tokens, k], at least fp32; rows: [n] int64, each row's token; slots: [tokens, k] int64.
    """
    w = wide(y.dtype)
    is_live = slots >= 0
    factors = torch.where(is_live, weights.to(w), 0.0)
    padded = torch.cat([y.to(w), y.new_zeros(1, y.shape[1], dtype=w)])  # -1 is the last row: zeros
    return ((padded[slots] * factors[..., None]).sum(1).to(y.dtype),)


def gather_sum(y: torch.Tensor, weights: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    """[tokens, h]: of each token its rows of y [n, h], times ``weights`` [tokens, k], added in the order of slots."""
    tokens, k = slots.shape
    w = wide(y.dtype)
    if not y.shape[0] or not tokens:
        return y.new_zeros(tokens, y.shape[1])
    is_live, indices = slots >= 0, slots.clamp_min(0)
    factors = is_live.to(w) if weights is None else weights.to(w) * is_live
    if y.dtype == w and y.device.type == "cpu":  # in one pass over the rows
        return F.embedding_bag(indices, y, mode="sum", per_sample_weights=factors)
    out = y.index_select(0, indices[:, 0]).to(w).mul_(factors[:, :1])
    for j in range(1, k):
        out.addcmul_(y.index_select(0, indices[:, j]).to(w), factors[:, j : j + 1])
    return out.to(y.dtype)


def permute(x: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor]:
    return (x.index_select(0, rows),)  # copies rows; indexing copies elements


def permute_backward(dy: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor]:
    return (gather_sum(dy, None, slots),)


def unpermute(
    y: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor]:
    return (gather_sum(y, weights, slots),)


def unpermute_backward(
    dout: torch.Tensor, y: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    w, n = wide(y.dtype), y.shape[0]
    indices = torch.where(slots >= 0, slots, n).flatten()  # choices that are elsewhere share a further row
    factors = y.new_zeros(n + 1, dtype=w).scatter_(0, indices, weights.to(w).flatten())[:n]
    gathered = dout.index_select(0, rows).to(w)  # [n, h]
    products = y.new_zeros(n + 1, 1, 1, dtype=w)
    torch.bmm(gathered[:, None], y.to(w)[:, :, None], out=products[:n])  # vecdot would write [n, h] first
    dweights = products.flatten().index_select(0, indices).view(weights.shape).to(weights.dtype)
    return gathered.mul_(factors[:, None]).to(y.dtype), dweights


def routed_rows(
    indices: torch.Tensor, experts: int, ends: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, slots, ends) for tokens that are routed to experts.

    Args:
        indices: [tokens, k] int64, experts of each token; -1 (or anything that is no expert): none.
        ends: where they are known before; None: they are counted.

    Returns:
        rows: [n], the token of each sorted row: by expert, tokens ascending in each.
        slots: [tokens, k], where each choice is among the rows, or -1.
        ends: [experts], where the rows of each expert end.
    """
    flat = indices.flatten()
    is_live = (flat >= 0) & (flat < experts)
    expert = torch.where(is_live, flat, experts)
    order = expert.sort(stable=True).indices
    if ends is None:
        ends = flat.new_zeros(experts + 1).index_add_(0, expert, torch.ones_like(expert))[:experts].cumsum(0)
    host_ends = on_host(ends)  # the only wait for the device, if any: products find the ends there
    order = order[: host_ends[-1] if host_ends else 0]
    slots = torch.full_like(flat, -1)
    slots[order] = torch.arange(order.shape[0], device=flat.device)
    return order // max(indices.shape[1], 1), slots.view(indices.shape), ends


def _routing(tokens: int, experts: int, k: int, absent: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens + experts)
    expert_indices = torch.rand(tokens, experts, generator=generator).topk(min(k, experts)).indices
    if absent:
        expert_indices[torch.rand(expert_indices.shape, generator=generator) < 0.5] = -1
    return routed_rows(expert_indices, experts)[:2]


_SHAPES = (
    ("plain", 16, 4, 2, 24, False), ("some elsewhere", 9, 5, 3, 17, True), ("one", 1, 1, 1, 1, False),
    ("no tokens", 0, 3, 2, 8, False), ("long", 5, 4, 4, 5003, False), ("many rows", 65_537, 3, 1, 3, False),
)  # fmt: skip


def _permute_cases() -> Iterable[Case]:
    for name, tokens, experts, k, h, absent in _SHAPES:
        yield Case(name, (normal(tokens, h, seed=1), *_routing(tokens, experts, k, absent)))
    yield Case("offset view", (normal(12, 24, seed=1)[1:, 2:19], *_routing(11, 4, 2)))


def _unpermute_cases() -> Iterable[Case]:
    for name, tokens, experts, k, h, absent in _SHAPES:
        rows, slots = _routing(tokens, experts, k, absent)
        yield Case(name, (normal(len(rows), h, seed=1), normal(*slots.shape, seed=2).abs(), rows, slots))


SPECS = (
    OpSpec(
        name="moe_permute", tensors=("x", "rows", "slots"), options=(), results=("y",), saves=("rows", "slots"),
        gradients=("x",), definition=permute_definition, forward=reference_forward(permute_definition),
        backward=lambda dy, rows, slots: unpermute_definition(dy, dy.new_ones(slots.shape), rows, slots),
        fake=lambda x, rows, slots: (x.new_empty(rows.shape[0], x.shape[1]),), flops=lambda x, rows, slots: 0,
        cases=_permute_cases, schema=None,
        speed=lambda: Case("4096x512", (normal(4096, 512, seed=1), *_routing(4096, 8, 2))),
    ),
    OpSpec(
        name="moe_unpermute", tensors=("y", "weights", "rows", "slots"), options=(), results=("out",),
        saves=("y", "weights", "rows", "slots"), gradients=("y", "weights"), wide=("weights",),
        definition=unpermute_definition, forward=reference_forward(unpermute_definition),
        backward=autograd_backward(unpermute_definition, lambda y, weights, rows, slots: (y, weights, rows, slots), 1,
                                   (0, 1)),
        fake=lambda y, weights, rows, slots: (y.new_empty(slots.shape[0], y.shape[1]),),
        flops=lambda y, weights, rows, slots: 2 * y.numel(), cases=_unpermute_cases, schema=None,
        bounds=Bounds((1e-6, 2e-6), (1e-3, 1e-3), (5e-3, 5e-3)),
        speed=lambda: Case("4096x512", _unpermute_speed()),
    ),
)  # fmt: skip


def _unpermute_speed() -> tuple[torch.Tensor, ...]:
    rows, slots = _routing(4096, 8, 2)
    return normal(len(rows), 512, seed=1), normal(*slots.shape, seed=2).abs(), rows, slots


KERNELS = (
    Kernel("moe_permute", "aten", ATEN, permute, permute_backward, traceable=True),
    Kernel("moe_unpermute", "aten", ATEN, unpermute, unpermute_backward, traceable=True),
)
