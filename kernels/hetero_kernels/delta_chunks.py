"""The gated delta rule (Yang et al., 2024) and the state-space rule (Dao and Gu, 2024) by chunks of tokens: what is
launched for them, forward and backward.

Inside a chunk of C tokens that begins with state S, with q and k normalised and q divided by sqrt(features), G the
running sum of g, lambda = exp(G), kappa = exp(G_C - G), and D_ij = exp(G_i - G_j) for j <= i:

    (1 + M) V = beta (v - lambda k S)       M = beta (k k' D) below the diagonal; V: what is written
    out = lambda q S + A V                  A = q k' D
    S <- lambda_C S + (kappa k)' V

lambda, kappa and D are 0 between documents. The state-space rule has q and k as they are, and V = beta v: its kernels
are the same without DELTA. Where every feature of a key decays by itself (Kimi Delta Attention), G has features, A and
M are other sums, and the kernels of pairs are those of ``gated_delta_features.py``.

Pairs of tokens, (1 + M)^-1 and A, are made for all chunks at once (``delta_pairs``); then one program for some features
of a head's values goes from chunk to chunk (``delta_states``). Backward makes both again, with every chunk's state
kept; the gradients of the states go the other way (``delta_state_gradients``), and all other ones are made for all
chunks at once (``delta_query_gradients`` and ``delta_key_gradients``), a program for a key head with all its value
heads, so that nothing is added up in memory.

Operands of products are bf16 where the arguments are, else in fp32: of fp16, whose range states and their gradients
may leave, with 10 bits of mantissa where the chip's table has ``tf32``. (1 + M)^-1 is made in fp32 always. Queries and
keys go into products as they are, and their norms into rows and columns afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl

from hetero_kernels.attention_rows import adjacent
from hetero_kernels.gated_delta_backward import delta_key_gradients, delta_query_gradients, delta_state_gradients
from hetero_kernels.gated_delta_features import delta_feature_gradients, delta_feature_pairs, delta_unit_gradients
from hetero_kernels.gated_delta_forward import delta_pairs, delta_states
from hetero_kernels.limits import INTERPRETED, Limits, accumulator, cdiv, config, limits_of, power_of_two, wide

Tensor = torch.Tensor


class Pairs(NamedTuple):
    """(1 + M)^-1 (anything without it), A, and what products with states are multiplied with (``delta_pairs``;
    ``delta_feature_pairs``: lambda_C); q, k as they are read by, and k as it is written by, products with states."""

    inverse: Tensor
    inside: Tensor
    rates: Tensor
    q: Tensor
    read_k: Tensor
    left_k: Tensor


@dataclass(frozen=True)
class DeltaCall:
    """What the kernels of one call have in common. ``delta``: of the delta rule, else of the state-space rule."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    documents: Tensor | None
    eps: float
    delta: bool
    limits: Limits

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        smallest = 1 if INTERPRETED else 16  # of a matrix unit's operand
        op = "delta_feature_pairs" if self.by_feature else "delta_pairs"
        return min(self.config(op)["chunk"], max(power_of_two(self.k.shape[1]), smallest))

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

    @property
    def by_feature(self) -> bool:
        """Every feature of a key decays by itself."""
        return self.g.dim() == 4

    def pairs(self) -> Pairs:
        b, heads, dim, _ = self.ends
        inside = self.empty(b, heads, self.chunks, self.chunk, self.chunk)
        inverse = torch.empty_like(inside) if self.delta else inside
        if self.by_feature:
            carried = self.empty(b, heads, self.chunks, dim, dtype=wide(self.v.dtype))
            operands = [self.empty(b, self.k.shape[1], heads, dim) for _ in range(3)]
            self.launch(
                delta_feature_pairs, b * heads * self.chunks, (self.q, self.k, self.beta, *self.decay),
                (inverse, inside, carried, *operands), (self.g,),
                (*self.of_tokens[1:], *self.products, self.exact, dim, self.block_f("delta_feature_pairs"), self.chunk,
                 self.levels),
            )  # fmt: skip
            return Pairs(inverse, inside, carried, *operands)
        rates = self.empty(b, heads, self.chunks, 4, self.chunk, dtype=wide(self.v.dtype))
        self.launch(
            delta_pairs, b * heads * self.chunks, (self.q, self.k, self.beta, *self.decay), (inverse, inside, rates),
            (self.g,), (*self.of_tokens, *self.products, self.exact, *self.dims[::2], self.chunk, self.levels),
        )  # fmt: skip
        return Pairs(inverse, inside, rates, self.q, self.k, self.k)

    def states(self, pairs: Pairs, state: Tensor | None, results: Sequence[Tensor], out: bool) -> None:
        """``results``: out and the last state, or the state before each chunk and what is written."""
        found = (*results, *results)  # out, last, states, written: the kernel writes two of them
        state = None if state is None else state.contiguous()
        self.launch(
            delta_states, self.tiles("delta_states"), (*pairs[3:], self.v, self.beta),
            (*pairs[:3], found[0] if state is None else state, *found), (self.v,),
            (out, state is not None, self.delta, self.by_feature, *self.products, *self.dims,
             self.block_v("delta_states"), self.chunk),
        )  # fmt: skip

    def state_gradients(self, pairs: Pairs, dout: Tensor, dlast: Tensor, results: Sequence[Tensor]) -> None:
        """``results``: dv, the gradients of what is written, of the state after each chunk, and of the first one."""
        op = "delta_state_gradients"
        self.launch(
            delta_state_gradients, self.tiles(op), (*pairs[3:], self.beta),
            (*pairs[:3], dout, dlast, *results), (dout,),
            (self.delta, self.by_feature, *self.products, *self.dims, self.block_v(op), self.chunk),
        )  # fmt: skip

    def token_gradients(
        self, dout: Tensor, written: Tensor, change: Tensor, before: Tensor, after: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dg and dbeta."""
        dq, dk, dg, dbeta = map(contiguous_like, (self.q, self.k, self.g, self.beta))
        b, heads = self.ends[:2]
        key_heads, tokens = self.k.shape[2], self.k.shape[1]
        programs = b * key_heads * self.chunks
        if self.by_feature:
            self._feature_gradients(dout, (written, change, before, after), (dq, dk, dg, dbeta))
            return dq, dk, dg, dbeta
        of_keys = self.empty(b, key_heads, self.chunks, self.chunk, self.chunk)
        running = self.empty(b, tokens, heads, dtype=wide(self.v.dtype))
        inputs, constants = (self.q, self.k, self.beta, *self.decay), (*self.of_tokens, *self.products, *self.dims)
        self.launch(
            delta_query_gradients, programs, inputs, (dout, written, before, dq, of_keys, running), (self.g, dout),
            (*constants, self.block_v("delta_query_gradients"), self.chunk),
        )  # fmt: skip
        self.launch(
            delta_key_gradients, programs, inputs,
            (self.v, written, change, before, after, of_keys, running, dk, dg, dbeta), (self.g, self.v),
            (*constants, self.block_v("delta_key_gradients"), self.chunk),
        )  # fmt: skip
        return dq, dk, dg, dbeta

    def _feature_gradients(self, dout: Tensor, made: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        b, heads, dim, _ = self.ends
        op, tokens = "delta_feature_gradients", self.k.shape[1]
        units = [self.empty(b, tokens, heads, dim, dtype=wide(self.v.dtype)) for _ in range(2)]
        self.launch(
            delta_feature_gradients, b * heads * self.chunks, (self.q, self.k, self.beta, *self.decay),
            (self.v, dout, *made, *units, *results[2:]), (self.g, self.v, dout),
            (*self.of_tokens[1:], *self.products, *self.dims[:2], self.block_f(op), self.block_v(op), self.chunk,
             self.levels),
        )  # fmt: skip
        self.launch(
            delta_unit_gradients, b * self.k.shape[2] * self.chunks, (self.q, self.k), (*units, *results[:2]), (),
            (self.eps, self.products[0], *self.dims[::2], self.chunk),
        )  # fmt: skip

    @property
    def decay(self) -> tuple[Tensor, Tensor]:
        """g, and numbers of documents, or anything."""
        return self.g, self.g if self.documents is None else self.documents

    @property
    def of_tokens(self) -> tuple[bool, bool, float, float]:
        """DELTA, DOCUMENTS, EPS, SCALE."""
        scale = self.k.shape[3] ** -0.5 if self.delta else 1.0
        return self.delta, self.documents is not None, self.eps, scale

    @property
    def products(self) -> tuple[tl.dtype, tl.dtype, str]:
        """ACC, DOT, PRECISION."""
        acc, dtype = accumulator(self.v.dtype), self.v.dtype
        dot = tl.bfloat16 if dtype == torch.bfloat16 and not INTERPRETED else acc
        return acc, dot, "tf32" if dtype == torch.float16 and self._tf32 else "ieee"

    @property
    def exact(self) -> str:
        """PRECISION of (1 + M)^-1."""
        return "tf32x3" if accumulator(self.v.dtype) == tl.float32 and self._tf32 else "ieee"

    @property
    def levels(self) -> int:
        return self.chunk.bit_length() - 1

    @property
    def dims(self) -> tuple[int, int, int]:
        """DIM, DIM_V, BLOCK_D."""
        dim = self.k.shape[3]
        return dim, self.v.shape[3], max(power_of_two(dim), 1 if INTERPRETED else 16)

    @property
    def _tf32(self) -> bool:
        return "tf32" in self.config("delta_feature_pairs" if self.by_feature else "delta_pairs")

    def config(self, op: str) -> dict[str, int]:
        return config(op, self.k.shape[3], self.v.dtype, self.limits)

    def block_v(self, op: str) -> int:
        """BLOCK_V."""
        smallest = 1 if INTERPRETED else 16
        return min(self.config(op)["block_v"], max(power_of_two(self.v.shape[3]), smallest))

    def block_f(self, op: str) -> int:
        """BLOCK_F: of features of keys."""
        return min(self.config(op)["block_f"], self.dims[2])

    def tiles(self, op: str) -> int:
        """Programs of a kernel that goes from chunk to chunk."""
        b, heads, _, dim_v = self.ends
        return b * heads * cdiv(dim_v, self.block_v(op))

    def launch(
        self, kernel: Any, programs: int, inputs: Sequence[Tensor], others: Sequence[Tensor], strided: Sequence[Tensor],
        constants: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """In pieces where the grid may not hold all programs.

        Args:
            inputs: q and k first, whose strides go in; then beta's, and those of ``strided``.
        """
        chosen = self.config(kernel.fn.__name__)
        strides = [n for x in (*inputs[:2], self.beta, *strided) for n in x.stride()[:3]]
        heads, key_heads, tokens = self.v.shape[2], inputs[1].shape[2], self.k.shape[1]
        for first in range(0, programs, self.limits.max_grid):
            grid = (min(self.limits.max_grid, programs - first),)
            kernel[grid](
                *inputs, *others, first, heads, heads // key_heads, tokens, self.chunks, *strides, *constants,
                num_warps=chosen["num_warps"], num_stages=chosen["num_stages"],
            )  # fmt: skip


def contiguous_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, documents: Tensor | None,
    eps: float, delta: bool, limits: Limits | None,
) -> DeltaCall:  # fmt: skip
    """Check what the two rules have in common."""
    b, tokens, heads, dim_v = v.shape
    key_heads, dim = k.shape[2:]
    assert q.shape == k.shape and k.shape[:2] == v.shape[:2], "q, k and v do not fit together"
    assert heads % max(key_heads, 1) == 0, f"{heads} value heads over {key_heads} key heads"
    assert beta.shape == v.shape[:3], f"{'beta' if delta else 'write'}: expected {list(v.shape[:3])}"
    decays = (beta.shape, (*beta.shape, dim)) if delta else (beta.shape,)
    assert g.shape in decays, f"g {list(g.shape)}: expected {' or '.join(str(list(x)) for x in decays)}"
    assert q.dtype == k.dtype == v.dtype, "q, k and v have one dtype"
    assert state is None or state.shape == (b, heads, dim, dim_v), f"state: expected {[b, heads, dim, dim_v]}"
    if documents is not None:
        assert documents.shape == (b, tokens), f"documents {list(documents.shape)}: expected {[b, tokens]}"
        documents = documents.contiguous()
    q, k, v, g = adjacent(q), adjacent(k), adjacent(v), adjacent(g) if g.dim() == 4 else g
    return DeltaCall(q, k, v, g, beta, documents, eps, delta, limits or limits_of(v.device))


def forward(call: DeltaCall, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """out, contiguous, and the last state, in at least fp32."""
    out, last = contiguous_like(call.v), call.empty(*call.ends, dtype=wide(call.v.dtype))
    if not call.v.numel():
        return out, last.zero_() if state is None else last.copy_(state)
    call.states(call.pairs(), state, (out, last), True)
    return out, last


def backward(
    call: DeltaCall, state: Tensor | None, dout: Tensor, dlast: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv, dg, dbeta and dstate (None without a state), contiguous, in the dtypes of the arguments.

    Only they are needed: forward is run again, without its outputs.
    """
    v, dv = call.v, contiguous_like(call.v)
    first = call.empty(*call.ends, dtype=wide(v.dtype) if state is None else state.dtype)
    if not v.numel():
        first.copy_(dlast)
        dq, dk, dg, dbeta = (contiguous_like(x).zero_() for x in (call.q, call.k, call.g, call.beta))
        return dq, dk, dv, dg, dbeta, None if state is None else first
    pairs, (b, heads, dim, dim_v) = call.pairs(), call.ends
    before, after = (call.empty(b, heads, call.chunks, dim, dim_v) for _ in range(2))
    written, change = (call.empty(*v.shape) for _ in range(2))
    call.states(pairs, state, (before, written), False)
    dout = adjacent(dout)
    call.state_gradients(pairs, dout, dlast.contiguous(), (dv, change, after, first))
    del pairs
    dq, dk, dg, dbeta = call.token_gradients(dout, written, change, before, after)
    return dq, dk, dv, dg, dbeta, None if state is None else first
