"""The gated delta rule of Gated DeltaNet (Yang et al., 2024), by chunks of tokens, forward and backward. What is
computed: ``delta_chunks.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hetero_kernels import delta_chunks
from hetero_kernels.limits import Limits, wide

Tensor = torch.Tensor


def gated_delta_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, *,
    documents: Tensor | None = None, eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`gated_delta_fwd`; token by token, S <- exp(g) S; S <- S + k outer (beta (v - k S)); out = q S."""
    dtype, group = wide(v.dtype), v.shape[2] // max(k.shape[2], 1)
    units = (x.to(dtype) * torch.rsqrt(x.to(dtype).square().sum(-1, keepdim=True) + eps) for x in (q, k))
    unit_q, unit_k = (x.repeat_interleave(group, dim=2) for x in units)
    s = v.new_zeros(*v.shape[::2], q.shape[-1], v.shape[-1], dtype=dtype) if state is None else state.to(dtype)
    outs = [torch.zeros_like(v[:, :0], dtype=dtype)]
    for t in range(v.shape[1]):
        decay = g[:, t].to(dtype).exp() if g.dim() == 4 else g[:, t].to(dtype).exp()[..., None]
        if documents is not None and t:
            decay = decay * (documents[:, t] == documents[:, t - 1])[:, None, None]
        s = s * decay[..., None]
        change = (v[:, t].to(dtype) - torch.einsum("bhd,bhde->bhe", unit_k[:, t], s)) * beta[:, t, :, None].to(dtype)
        s = s + unit_k[:, t, :, :, None] * change[:, :, None]
        outs.append(torch.einsum("bhd,bhde->bhe", unit_q[:, t], s)[:, None] * q.shape[-1] ** -0.5)
    return torch.cat(outs, 1).to(v.dtype), s


def document_numbers(documents: Sequence[Sequence[int]], tokens: int, device: torch.device) -> Tensor:
    """Start offsets per batch row (ascending, the first is 0) -> number of each token's document, int32 [b, tokens],
    without holding up the host."""
    marks = torch.zeros(len(documents), tokens, dtype=torch.int32)
    for row, starts in enumerate(documents):
        marks[row, [start for start in starts if start < tokens]] = 1
    numbers = marks.cumsum(1, dtype=torch.int32)
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, documents: Tensor | None,
    eps: float, limits: Limits | None,
) -> delta_chunks.DeltaCall:  # fmt: skip
    assert beta.dtype == v.dtype, "q, k, v and beta have one dtype"
    return delta_chunks.prepare(q, k, v, g, beta, state, documents, eps, True, limits)


def gated_delta_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, *,
    documents: Tensor | None = None, eps: float = 1e-6, limits: Limits | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule, with queries and keys normalised and queries divided by sqrt(dk).

    Args:
        q, k: [b, s, key heads, dk]; v: [b, s, value heads, dv], of which consecutive ones share a key head; views are
            fine.
        g: [b, s, value heads], at most 0, in at least fp32; or [b, s, value heads, dk], where every feature of a key
            decays by itself. beta: [b, s, value heads], in the dtype of v.
        state: [b, value heads, dk, dv] in at least fp32, before the first token; None: zeros.
        documents: int32 [b, s]: where it differs from the token before, the state is zeros again. See
            :func:`document_numbers`.
        eps: of the normalisation, x / sqrt(sum of x^2 + eps).

    Returns:
        out [b, s, value heads, dv] in v's dtype, and the state after the last token, in at least fp32.
    """
    return delta_chunks.forward(_prepare(q, k, v, g, beta, state, documents, eps, limits), state)


def gated_delta_bwd(
    dout: Tensor, dlast: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    state: Tensor | None = None, *, documents: Tensor | None = None, eps: float = 1e-6, limits: Limits | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """-> dq, dk, dv, dg, dbeta and dstate (None without a state), contiguous, in the dtypes of the arguments.

    Only they are needed: forward is run again, without its outputs.
    """
    return delta_chunks.backward(_prepare(q, k, v, g, beta, state, documents, eps, limits), state, dout, dlast)
