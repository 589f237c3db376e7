"""The state-space rule of Mamba-2 (Dao and Gu, 2024) as an operator: the gated delta rule without its correction. Its
definition, token by token; the chunks that serve it are in ``ops/state_space_chunks.py``.

Documents that are packed into one row do not meet: a state begins anew at each one's first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hetero_megatron.ops.gated_delta import Documents
from hetero_megatron.ops.spec import (
    ATEN,
    Bounds,
    Case,
    Kernel,
    OpSpec,
    autograd_backward,
    normal,
    reference_forward,
    uniform,
    wide,
)
from hetero_megatron.ops.state_space_chunks import backward, forward

Tensor = torch.Tensor


def definition(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, write: Tensor, state: Tensor | None, documents: Documents
) -> tuple[Tensor, Tensor]:
    """For each head, with q and k of its group (in the terms of Mamba: C and B; v is x, write dt, and g dt A), token by
    token

        S <- exp(g) S + k outer (write v);  out = q S

    Args:
        q, k: [b, s, groups, dk]; v: [b, s, heads, dv], of which consecutive ones share a group.
        g, write: [b, s, heads], in at least fp32; g at most 0.
        state: [b, heads, dk, dv] in at least fp32, before the first token; None: zeros.
        documents: starts of each row's documents, the first 0; at those after it the state is zeros again.

    Returns:
        out [b, s, heads, dv] in the dtype of v, and the state after the last token, as ``state``.
    """
    kind, repeat = wide(v.dtype), v.shape[2] // max(k.shape[2], 1)
    wide_q, wide_k = (x.to(kind).repeat_interleave(repeat, dim=2) for x in (q, k))
    state_t = (
        v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1], dtype=kind) if state is None else state.to(kind)
    )
    starts: list[set[int]] = [set(row[1:]) for row in documents or ()]
    written = v.to(kind) * write[..., None]
    columns = (x.unbind(1) for x in (wide_q[..., None], wide_k[..., None], written[..., None, :]))
    outs = []
    for t, (q_t, k_t, v_t, decay) in enumerate(zip(*columns, g.exp()[..., None, None].unbind(1), strict=True)):
        fresh = [t in row for row in starts]
        if any(fresh):
            state_t = state_t.masked_fill(torch.tensor(fresh, device=v.device)[:, None, None, None], 0.0)
        state_t = state_t * decay + k_t * v_t
        outs.append((q_t * state_t).sum(-2))
    out = torch.stack(outs, 1) if outs else torch.zeros_like(v, dtype=kind)
    return out.to(v.dtype), state_t


def _reference_backward(*values: Any) -> tuple[Tensor | None, ...]:
    """Autograd through the definition; gradients of what its outputs do not depend on are zeros."""
    gradients = autograd_backward(definition, lambda *args: args, 2, tuple(range(6)))(*values)
    inputs = values[2:8]
    return tuple(
        torch.zeros_like(x) if d is None and x is not None else d for x, d in zip(inputs, gradients, strict=True)
    )


def _fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    state = v.new_empty(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1], dtype=wide(v.dtype))
    return torch.empty_like(v), state


def flops(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    """Of the definition: what is written, and q S."""
    return 4 * v.numel() * q.shape[-1]


def random_case(
    name: str, b: int, s: int, heads: tuple[int, int], dims: tuple[int, int],
    documents: Sequence[Sequence[int]] | None = None, state: bool = False, seed: int = 0, decay: float = 2.0,
) -> Case:  # fmt: skip
    """Arguments with ``heads`` groups and heads of ``dims`` features; decays down to exp(-``decay``^2)."""
    (groups, count), (dk, dv) = heads, dims
    q, k = (normal(b, s, groups, dk, seed=seed + i, scale=dk**-0.25) for i in (0, 1))
    v = normal(b, s, count, dv, seed=seed + 2)
    g = -uniform(b, s, count, seed=seed + 3, low=0.0, high=decay).square()
    write = uniform(b, s, count, seed=seed + 4, low=0.0, high=1.5)
    first_state = normal(b, count, dk, dv, seed=seed + 5) if state else None
    return Case(name, (q, k, v, g, write, first_state, documents))


def _cases() -> Iterable[Case]:
    yield random_case("one chunk", 2, 5, (2, 2), (8, 8))
    yield random_case("odd", 1, 7, (3, 3), (5, 7), seed=9)
    yield random_case("a state before", 2, 4, (1, 3), (8, 4), state=True)
    yield random_case("one token", 2, 1, (2, 4), (8, 8), state=True)
    yield random_case("all is forgotten", 1, 70, (1, 2), (4, 6), state=True, decay=30.0)
    yield random_case("chunks and documents", 2, 66, (1, 2), (4, 6), documents=[[0, 1, 63, 64], [0]], state=True)


_TENSORS = ("q", "k", "v", "g", "write", "state")
SPEC = OpSpec(
    name="state_space_rule", tensors=_TENSORS, options=("documents",), results=("out", "last"), saves=_TENSORS,
    gradients=_TENSORS, optional=("state",), wide=("g", "write", "state"), definition=definition,
    forward=reference_forward(definition), backward=_reference_backward, fake=_fake, flops=flops, cases=_cases,
    schema=None, bounds=Bounds((1e-5, 1e-5), (3e-3, 3e-3), (2e-2, 2e-2)),
    speed=lambda: random_case("1x1024, 8 heads of 64", 1, 1024, (1, 8), (128, 64)),
)  # fmt: skip
KERNELS = (Kernel("state_space_rule", "aten", ATEN, forward, backward),)
