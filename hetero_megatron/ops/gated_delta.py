"""The gated delta rule as an operator: linear attention of Gated DeltaNet (Yang et al., 2024). Its definition, token by
token; the chunks that serve it are in ``ops/gated_delta_chunks.py``.

Documents that are packed into one row do not meet: a state begins anew at each one's first token. (transformers' and
FLA's plain functions go on along the row.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hetero_megatron.ops import gated_delta_channels, gated_delta_chunks
from hetero_megatron.ops.spec import (
    ATEN,
    Bounds,
    Capability,
    Case,
    Kernel,
    OpSpec,
    normal,
    reference_forward,
    uniform,
    wide,
)

Tensor = torch.Tensor
Documents = Sequence[Sequence[int]] | None
CHANNELS = "decay per key feature"  # what a kernel may lack


def normalised(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum of x^2 + eps) over the last axis, in at least fp32."""
    x = x.to(wide(x.dtype))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def definition(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, documents: Documents, eps: float
) -> tuple[Tensor, Tensor]:
    """For each value head, with q and k of its key head normalised and q divided by sqrt(key features), token by token

        S <- exp(g) S;  S <- S + k outer (beta (v - k S));  out = q S

    Args:
        q, k: [b, s, key heads, dk]; v: [b, s, value heads, dv], of which consecutive ones share a key head.
        g: [b, s, value heads], at most 0, in at least fp32; or [b, s, value heads, dk], where every feature of a key
            decays by itself: exp(g) multiplies the rows of S. beta: [b, s, value heads], in the dtype of v.
        state: [b, value heads, dk, dv] in at least fp32, before the first token; None: zeros.
        documents: starts of each row's documents, the first 0; at those after it the state is zeros again.
        eps: of the normalisation.

    Returns:
        out [b, s, value heads, dv] in the dtype of v, and the state after the last token, as ``state``.
    """
    kind, repeat = wide(v.dtype), v.shape[2] // max(k.shape[2], 1)
    wide_q, wide_k = (normalised(x, eps).repeat_interleave(repeat, dim=2) for x in (q, k))
    wide_q = wide_q * q.shape[-1] ** -0.5
    state_t = (
        v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1], dtype=kind) if state is None else state.to(kind)
    )
    starts = [set(row[1:]) for row in documents or ()]
    decays = g.exp() if g.dim() == 4 else g.exp()[..., None]
    columns = (x.to(kind)[..., None].unbind(1) for x in (wide_q, wide_k, decays, beta))
    outs = []
    for t, (q_t, k_t, decay, write, v_t) in enumerate(zip(*columns, v.to(kind).unbind(1), strict=True)):
        fresh = [t in row for row in starts]
        if any(fresh):
            state_t = state_t.masked_fill(torch.tensor(fresh, device=v.device)[:, None, None, None], 0.0)
        state_t = state_t * decay
        change = (v_t - (k_t * state_t).sum(-2)) * write
        state_t = state_t + k_t * change[:, :, None]
        outs.append((q_t * state_t).sum(-2))
    out = torch.stack(outs, 1) if outs else torch.zeros_like(v, dtype=kind)
    return out.to(v.dtype), state_t


def _reference_backward(grad: Tensor, grad_state: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
    """Autograd through the definition."""
    *tensors, documents, eps = saved
    inputs: list[Any] = [None if x is None else x.detach().requires_grad_() for x in tensors]
    with torch.enable_grad():
        q, k, v, g, beta, state = inputs
        outputs = definition(q, k, v, g, beta, state, documents, eps)
        differentiated = [x for x in inputs if x is not None]
        input_gradients = iter(torch.autograd.grad(outputs, differentiated, (grad, grad_state), allow_unused=True))
    gradients = [None if x is None else next(input_gradients) for x in inputs]
    return tuple(
        torch.zeros_like(x) if d is None and x is not None else d for x, d in zip(inputs, gradients, strict=True)
    )


def _fake(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    state = v.new_empty(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1], dtype=wide(v.dtype))
    return torch.empty_like(v), state


def flops(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    """Of the definition: k S, its correction and q S."""
    return 6 * v.numel() * q.shape[-1]


def random_case(
    name: str, b: int, s: int, heads: tuple[int, int], dims: tuple[int, int], documents: Documents = None,
    state: bool = False, seed: int = 0, eps: float = 1e-6, channels: bool = False,
) -> Case:  # fmt: skip
    """Arguments with ``heads`` key and value heads of ``dims`` features; ``channels``: each of keys decays by itself,
    some so much that nothing is left after a few tokens."""
    (key_heads, value_heads), (dk, dv) = heads, dims
    q, k = (normal(b, s, key_heads, dk, seed=seed + i) for i in (0, 1))
    v = normal(b, s, value_heads, dv, seed=seed + 2)
    g = -uniform(b, s, value_heads, *[dk] * channels, seed=seed + 3, low=0.0, high=2.0).square()
    g = g * uniform(dk, seed=seed + 6, low=0.0, high=3.0).exp() if channels else g
    beta = uniform(b, s, value_heads, seed=seed + 4, low=0.0, high=1.0)
    first_state = normal(b, value_heads, dk, dv, seed=seed + 5) if state else None
    return Case(name, (q, k, v, g, beta, first_state, documents, eps), (CHANNELS,) * channels)


def _cases() -> Iterable[Case]:
    yield random_case("one chunk", 2, 5, (2, 2), (8, 8))
    yield random_case("odd", 1, 7, (3, 3), (5, 7), seed=9, eps=0.37)
    yield random_case("a state before", 2, 4, (1, 2), (8, 4), state=True)
    yield random_case("one token", 2, 1, (2, 4), (8, 8), state=True)
    yield random_case("chunks and documents", 2, 66, (1, 2), (4, 6), documents=[[0, 1, 63, 64], [0]], state=True)
    yield random_case("features, one chunk", 2, 5, (2, 4), (6, 3), channels=True)
    yield random_case("features, odd", 1, 7, (3, 3), (5, 7), seed=9, eps=0.37, channels=True)
    yield random_case("features, one token", 2, 1, (1, 1), (4, 8), state=True, channels=True)
    yield random_case(
        "features, chunks and documents", 2, 70, (1, 2), (4, 6), documents=[[0, 1, 63, 64], [0]], state=True,
        channels=True,
    )  # fmt: skip


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    return (gated_delta_channels if args[3].dim() == 4 else gated_delta_chunks).forward(*args)


def _backward(*args: Any) -> tuple[Tensor | None, ...]:
    return (gated_delta_channels if args[5].dim() == 4 else gated_delta_chunks).backward(*args)


_TENSORS = ("q", "k", "v", "g", "beta", "state")
SPEC = OpSpec(
    name="gated_delta_rule", tensors=_TENSORS, options=("documents", "eps"), results=("out", "last"), saves=_TENSORS,
    gradients=_TENSORS, optional=("state",), wide=("g", "state"), definition=definition,
    forward=reference_forward(definition), backward=_reference_backward, fake=_fake, flops=flops, cases=_cases,
    features=(CHANNELS,), schema=None, bounds=Bounds((1e-5, 1e-5), (3e-3, 3e-3), (2e-2, 2e-2)),
    speed=lambda: random_case("1x1024, 4 heads of 64", 1, 1024, (2, 4), (64, 64)),
)  # fmt: skip
KERNELS = (Kernel("gated_delta_rule", "aten", ATEN, _forward, _backward, Capability(features=(CHANNELS,))),)
