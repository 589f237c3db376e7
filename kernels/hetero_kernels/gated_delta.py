"""The gated delta rule of Gated DeltaNet (Yang et al., 2024), by chunks of tokens, forward and backward.

Inside a chunk of C tokens that begins with state S, with q and k normalised and q divided by sqrt(features), G the
running sum of g, lambda = exp(G), kappa = exp(G_C - G), and D_ij = exp(G_i - G_j) for j <= i:

    (1 + M) V = beta (v - lambda k S)       M = beta (k k' D) below the diagonal; V: what is written
    out = lambda q S + A V                  A = q k' D
    S <- lambda_C S + (kappa k)' V

lambda, kappa and D are 0 between documents. Pairs of tokens, (1 + M)^-1 and A, are made for all chunks at once
(``delta_pairs``); then one program for some features of a head's values goes from chunk to chunk (``delta_states``).
Backward makes both again, with every chunk's state kept; the gradients of the states go the other way
(``delta_state_gradients``), and all other ones are made for all chunks at once (``delta_query_gradients`` and
``delta_key_gradients``), a program for a key head with all its value heads, so that nothing is added up in memory.

Operands of products are bf16 where the arguments are, else in fp32: of fp16, whose range states and their gradients
may leave, with 10 bits of mantissa where the chip's table has ``tf32``. (1 + M)^-1 is made in fp32 always. Queries and
keys go into products as they are, and their norms into rows and columns afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from hetero_kernels.attention_rows import adjacent
from hetero_kernels.gated_delta_backward import delta_key_gradients, delta_query_gradients, delta_state_gradients
from hetero_kernels.gated_delta_forward import delta_pairs, delta_states
from hetero_kernels.limits import INTERPRETED, Limits, accumulator, cdiv, config, limits_of, power_of_two, wide

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
        decay = g[:, t].to(dtype).exp()
        if documents is not None and t:
            decay = decay * (documents[:, t] == documents[:, t - 1])[:, None]
        s = s * decay[..., None, None]
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


@dataclass(frozen=True)
class _Call:
    """What the kernels of one call have in common."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    documents: Tensor | None
    eps: float
    limits: Limits

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        smallest = 1 if INTERPRETED else 16  # of a matrix unit's operand
        return min(self._config("delta_pairs")["chunk"], max(power_of_two(self.k.shape[1]), smallest))

    @property
    def chunks(self) -> int:
        return cdiv(self.k.shape[1], self.chunk)

    @property
    def stored(self) -> torch.dtype:
        """Of what one kernel leaves for another: the dtype of operands."""
        return torch.bfloat16 if self.v.dtype == torch.bfloat16 else wide(self.v.dtype)

    @property
    def ends(self) -> tuple[int, int, int, int]:
        """Shape of a state per row and head."""
        return self.v.shape[0], self.v.shape[2], self.k.shape[3], self.v.shape[3]

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.stored, device=self.v.device)

    def pairs(self) -> tuple[Tensor, Tensor, Tensor]:
        """((1 + M)^-1, A, rates of rows): see ``delta_pairs``."""
        b, heads = self.ends[:2]
        inverse, inside = (self.empty(b, heads, self.chunks, self.chunk, self.chunk) for _ in range(2))
        rates = self.empty(b, heads, self.chunks, 4, self.chunk, dtype=wide(self.v.dtype))
        acc = accumulator(self.v.dtype)
        exact = "tf32x3" if acc == tl.float32 and self._tf32 else "ieee"
        levels = self.chunk.bit_length() - 1
        self.launch(
            delta_pairs, b * heads * self.chunks, (self.q, self.k, self.beta, *self.decay), (inverse, inside, rates),
            (self.g,), (*self.of_tokens, *self.products, exact, *self.dims[::2], self.chunk, levels),
        )  # fmt: skip
        return inverse, inside, rates

    def states(self, pairs: tuple[Tensor, ...], state: Tensor | None, results: Sequence[Tensor], out: bool) -> None:
        """``results``: out and the last state, or the state before each chunk and what is written."""
        found = (*results, *results)  # out, last, states, written: the kernel writes two of them
        state = None if state is None else state.contiguous()
        self.launch(
            delta_states, self.tiles("delta_states"), (self.q, self.k, self.v, self.beta),
            (*pairs, found[0] if state is None else state, *found), (self.v,),
            (out, state is not None, *self.products, *self.dims, self.block_v("delta_states"), self.chunk),
        )  # fmt: skip

    @property
    def decay(self) -> tuple[Tensor, Tensor]:
        """g, and numbers of documents, or anything."""
        return self.g, self.g if self.documents is None else self.documents

    @property
    def of_tokens(self) -> tuple[bool, float, float]:
        """DOCUMENTS, EPS, SCALE."""
        return self.documents is not None, self.eps, self.k.shape[3] ** -0.5

    @property
    def products(self) -> tuple[tl.dtype, tl.dtype, str]:
        """ACC, DOT, PRECISION."""
        acc, dtype = accumulator(self.v.dtype), self.v.dtype
        dot = tl.bfloat16 if dtype == torch.bfloat16 and not INTERPRETED else acc
        return acc, dot, "tf32" if dtype == torch.float16 and self._tf32 else "ieee"

    @property
    def dims(self) -> tuple[int, int, int]:
        """DIM, DIM_V, BLOCK_D."""
        dim = self.k.shape[3]
        return dim, self.v.shape[3], max(power_of_two(dim), 1 if INTERPRETED else 16)

    def tiles(self, op: str) -> int:
        """Programs of a kernel that goes from chunk to chunk."""
        b, heads, _, dim_v = self.ends
        return b * heads * cdiv(dim_v, self.block_v(op))

    @property
    def _tf32(self) -> bool:
        return "tf32" in self._config("delta_pairs")

    def _config(self, op: str) -> dict[str, int]:
        return config(op, self.k.shape[3], self.v.dtype, self.limits)

    def block_v(self, op: str) -> int:
        """BLOCK_V."""
        smallest = 1 if INTERPRETED else 16
        return min(self._config(op)["block_v"], max(power_of_two(self.v.shape[3]), smallest))

    def launch(
        self, kernel: Any, programs: int, inputs: Sequence[Tensor], others: Sequence[Tensor], strided: Sequence[Tensor],
        constants: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """In pieces where the grid may not hold all programs. Strides: of q, k and beta, then of ``strided``."""
        chosen = self._config(kernel.fn.__name__)
        strides = [n for x in (self.q, self.k, self.beta, *strided) for n in x.stride()[:3]]
        heads, key_heads, tokens = self.v.shape[2], self.k.shape[2], self.k.shape[1]
        for first in range(0, programs, self.limits.max_grid):
            grid = (min(self.limits.max_grid, programs - first),)
            kernel[grid](
                *inputs, *others, first, heads, heads // key_heads, tokens, self.chunks, *strides, *constants,
                num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
            )  # fmt: skip


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, documents: Tensor | None,
    eps: float, limits: Limits | None,
) -> _Call:  # fmt: skip
    b, tokens, heads, dim_v = v.shape
    key_heads, dim = k.shape[2:]
    assert g.dim() == 3, f"g {list(g.shape)}: the decay is one number per value head, not one per key feature"
    assert q.shape == k.shape and k.shape[:2] == v.shape[:2], "q, k and v do not fit together"
    assert heads % max(key_heads, 1) == 0, f"{heads} value heads over {key_heads} key heads"
    assert g.shape == beta.shape == v.shape[:3], f"g and beta: expected {list(v.shape[:3])}"
    assert q.dtype == k.dtype == v.dtype == beta.dtype, "q, k, v and beta have one dtype"
    assert state is None or state.shape == (b, heads, dim, dim_v), f"state: expected {[b, heads, dim, dim_v]}"
    if documents is not None:
        assert documents.shape == (b, tokens), f"documents {list(documents.shape)}: expected {[b, tokens]}"
        documents = documents.contiguous()
    q, k, v = adjacent(q), adjacent(k), adjacent(v)
    return _Call(q, k, v, g, beta, documents, eps, limits or limits_of(v.device))


def gated_delta_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None, *,
    documents: Tensor | None = None, eps: float = 1e-6, limits: Limits | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gated delta rule, with queries and keys normalised and queries divided by sqrt(dk).

    Args:
        q, k: [b, s, key heads, dk]; v: [b, s, value heads, dv], of which consecutive ones share a key head; views are
            fine.
        g: [b, s, value heads], at most 0, in at least fp32; beta: the same, in the dtype of v.
        state: [b, value heads, dk, dv] in at least fp32, before the first token; None: zeros.
        documents: int32 [b, s]: where it differs from the token before, the state is zeros again. See
            :func:`document_numbers`.
        eps: of the normalisation, x / sqrt(sum of x^2 + eps).

    Returns:
        out [b, s, value heads, dv] in v's dtype, and the state after the last token, in at least fp32.
    """
    call = _prepare(q, k, v, g, beta, state, documents, eps, limits)
    out, last = call.empty(*v.shape, dtype=v.dtype), call.empty(*call.ends, dtype=wide(v.dtype))
    if not v.numel():
        return out, last.zero_() if state is None else last.copy_(state)
    call.states(call.pairs(), state, (out, last), True)
    return out, last


def gated_delta_bwd(
    dout: Tensor, dlast: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
    state: Tensor | None = None, *, documents: Tensor | None = None, eps: float = 1e-6, limits: Limits | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """-> dq, dk, dv, dg, dbeta and dstate (None without a state), contiguous, in the dtypes of the arguments.

    Only they are needed: forward is run again, without its outputs.
    """
    call = _prepare(q, k, v, g, beta, state, documents, eps, limits)
    dq, dk, dv, dg, dbeta = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta))
    first = call.empty(*call.ends, dtype=wide(v.dtype) if state is None else state.dtype)
    if not v.numel():
        first.copy_(dlast)
        return dq.zero_(), dk.zero_(), dv, dg.zero_(), dbeta.zero_(), None if state is None else first
    pairs, (b, heads, dim, dim_v) = call.pairs(), call.ends
    before, after = (call.empty(b, heads, call.chunks, dim, dim_v) for _ in range(2))
    written, change = (call.empty(*v.shape) for _ in range(2))
    call.states(pairs, state, (before, written), False)
    dout, dlast = adjacent(dout), dlast.contiguous()
    op = "delta_state_gradients"
    call.launch(
        delta_state_gradients, call.tiles(op), (call.q, call.k, call.beta),
        (*pairs, dout, dlast, dv, change, after, first), (dout,),
        (*call.products, *call.dims, call.block_v(op), call.chunk),
    )  # fmt: skip
    del pairs
    programs = b * k.shape[2] * call.chunks
    of_keys = call.empty(b, k.shape[2], call.chunks, call.chunk, call.chunk)
    running = call.empty(b, k.shape[1], heads, dtype=wide(v.dtype))
    inputs, constants = (call.q, call.k, call.beta, *call.decay), (*call.of_tokens, *call.products, *call.dims)
    call.launch(
        delta_query_gradients, programs, inputs, (dout, written, before, dq, of_keys, running), (call.g, dout),
        (*constants, call.block_v("delta_query_gradients"), call.chunk),
    )  # fmt: skip
    call.launch(
        delta_key_gradients, programs, inputs,
        (call.v, written, change, before, after, of_keys, running, dk, dg, dbeta), (call.g, call.v),
        (*constants, call.block_v("delta_key_gradients"), call.chunk),
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta, None if state is None else first
