"""The state-space rule of Mamba-2 (Dao and Gu, 2024), by chunks of tokens, forward and backward: the kernels of the
gated delta rule without its correction and its norms (``delta_chunks.py``)."""

from __future__ import annotations

import torch

from hetero_kernels import delta_chunks
from hetero_kernels.limits import Limits, wide

Tensor = torch.Tensor


def state_space_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, write: Tensor, state: Tensor | None = None, *,
    documents: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`state_space_fwd`; token by token, S <- exp(g) S + k outer (write v); out = q S."""
    dtype, group = wide(v.dtype), v.shape[2] // max(k.shape[2], 1)
    wide_q, wide_k = (x.to(dtype).repeat_interleave(group, dim=2) for x in (q, k))
    s = v.new_zeros(*v.shape[::2], q.shape[-1], v.shape[-1], dtype=dtype) if state is None else state.to(dtype)
    outs = [torch.zeros_like(v[:, :0], dtype=dtype)]
    for t in range(v.shape[1]):
        decay = g[:, t].to(dtype).exp()
        if documents is not None and t:
            decay = decay * (documents[:, t] == documents[:, t - 1])[:, None]
        written = v[:, t].to(dtype) * write[:, t, :, None].to(dtype)
        s = s * decay[..., None, None] + wide_k[:, t, :, :, None] * written[:, :, None]
        outs.append(torch.einsum("bhd,bhde->bhe", wide_q[:, t], s)[:, None])
    return torch.cat(outs, 1).to(v.dtype), s


def state_space_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, write: Tensor, state: Tensor | None = None, *,
    documents: Tensor | None = None, limits: Limits | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The state-space rule; in the terms of Mamba q is C, k is B, v is x, ``write`` dt, and g dt A.

    Args:
        q, k: [b, s, groups, dk]; v: [b, s, heads, dv], of which consecutive ones share a group; views are fine.
        g: [b, s, heads], at most 0; write: the same; both in at least fp32.
        state: [b, heads, dk, dv] in at least fp32, before the first token; None: zeros.
        documents: int32 [b, s]: where it differs from the token before, the state is zeros again.

    Returns:
        out [b, s, heads, dv] in v's dtype, and the state after the last token, in at least fp32.
    """
    call = delta_chunks.prepare(q, k, v, g, write, state, documents, 0.0, False, limits)
    return delta_chunks.forward(call, state)


def state_space_bwd(
    dout: Tensor, dlast: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, write: Tensor,
    state: Tensor | None = None, *, documents: Tensor | None = None, limits: Limits | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """-> dq, dk, dv, dg, dwrite and dstate (None without a state), contiguous, in the dtypes of the arguments.

    Only they are needed: forward is run again, without its outputs.
    """
    call = delta_chunks.prepare(q, k, v, g, write, state, documents, 0.0, False, limits)
    return delta_chunks.backward(call, state, dout, dlast)
