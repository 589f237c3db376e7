"""The state-space rule of Mamba-2 by chunks of tokens, in plain torch: products of matrices inside a chunk, and one
state from chunk to chunk (Dao and Gu, 2024, section 6).

Inside a chunk of C tokens that begins with state S, with G the running sum of g, lambda = exp(G), kappa = exp(G_C - G),
D_ij = exp(G_i - G_j) for j <= i, and V = write v:

    out = lambda (q S) + A V    A = q k' D
    S <- lambda_C S + k' (kappa V)

lambda, kappa and D are 0 between documents. Heads of a group have one q and one k, so that products with states are of
all of them at once: a group's states lie side by side, [dk, heads of each dv]. Nothing but the arguments is kept for
backward, which runs this again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional as F

from hetero_megatron.ops.gated_delta_chunks import CHUNK, Documents, document_masks, empty_state
from hetero_megatron.ops.spec import wide

Tensor = torch.Tensor


class _StateChunks(NamedTuple):
    """What chunks have before their states are known.

    ``q``, ``k`` [n, b, groups, C, dk]; ``v`` and what is written V [n, b, groups, C, heads of each, dv]; ``write`` and
    lambda, kappa [.., C, heads of each, 1]; lambda_C [.., 1, heads of each, 1]; D and A [.., heads of each, C, C].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    write: Tensor
    written: Tensor
    reach: Tensor
    rest: Tensor
    carried: Tensor
    decay: Tensor
    inside: Tensor


def _split(x: Tensor, groups: int) -> Tensor:
    """[b, s, heads, ..] -> [n, b, groups, C, heads of each, ..] in at least fp32, contiguous, ended with zeros."""
    b, s, heads = x.shape[:3]
    x, size = x.to(wide(x.dtype)), min(CHUNK, s)
    if s % size:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -s % size))
    x = x.reshape(b, -1, size, groups, heads // groups, *x.shape[3:])
    return x.permute(1, 0, 3, 2, 4, *range(5, x.dim())).contiguous()


def _join(x: Tensor, length: int) -> Tensor:
    """The inverse, of ``length`` tokens: [b, s, heads, ..]."""
    return x.permute(1, 0, 3, 2, 4, *range(5, x.dim())).flatten(3, 4).flatten(1, 2)[:, :length]


def _pairs_first(x: Tensor) -> Tensor:
    """[.., C, heads, d] -> [.., heads, C, d]."""
    return x.transpose(-3, -2)


def _decays(g: Tensor) -> Tensor:
    """[.., C, heads] -> D [.., heads, C, C], each the exponential of a sum over the tokens between two: in fp32 the
    difference of two sums from the chunk's start would be inexact after a token that forgets nearly all."""
    size = g.shape[-2]
    causal = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    sums = g.mT[..., None].expand(*g.mT.shape, size).tril(-1)
    return _exp(sums.cumsum_(-2).masked_fill_(~causal, -torch.inf))


def _exp(x: Tensor) -> Tensor:
    """The exponential of x, at most 0, in its memory; 0 far below what a sum with 1 would notice: products with numbers
    next to the smallest ones take a CPU many times as long."""
    return F.threshold(x, 3 * math.log(torch.finfo(x.dtype).eps), -torch.inf, inplace=True).exp_()


def _prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, write: Tensor, documents: Documents) -> _StateChunks:
    """Arguments as the operator has them."""
    groups, length = k.shape[2], k.shape[1]
    queries, keys = (_split(x, groups).squeeze(-2) for x in (q, k))
    values, factors = _split(v, groups), _split(write, groups)[..., None]
    logs = _split(g, groups)  # [n, b, groups, C, heads of each]
    decay = _decays(logs)
    reach = _exp(logs.cumsum(-2))[..., None]
    rest, carried = decay[..., -1, :, None].transpose(-3, -2), reach[..., -1:, :, :]
    masks = document_masks(documents, length, decay)
    if masks is not None:  # made for tokens after heads
        entered, leaves, through, same_document = masks
        reach, rest, carried = (x * _pairs_first(m) for x, m in ((reach, entered), (rest, leaves), (carried, through)))
        decay.mul_(same_document)
    inside = (queries @ keys.mT)[..., None, :, :] * decay
    return _StateChunks(queries, keys, values, factors, values * factors, reach, rest, carried, decay, inside)


def _first_state(state: Tensor | None, c: _StateChunks) -> Tensor:
    """[b, groups, dk, heads of each, dv], contiguous."""
    b, groups, _, each, dv = c.v.shape[1:]
    if state is None:
        return c.v.new_zeros(b, groups, c.k.shape[-1], each, dv)
    return state.to(c.v.dtype).view(b, groups, each, c.k.shape[-1], dv).transpose(2, 3).contiguous()


def _as_states(x: Tensor) -> Tensor:
    """[b, groups, dk, heads of each, dv] -> [b, heads, dk, dv]."""
    return x.transpose(2, 3).flatten(1, 2)


def _states(c: _StateChunks, first: Tensor) -> tuple[Tensor, Tensor]:
    """(state before each chunk [n, b, groups, dk, heads of each, dv], the last state)."""
    added = (c.k.mT @ (c.written * c.rest).flatten(-2)).view(len(c.k), *first.shape)
    states = torch.empty_like(added)
    state = first
    for i in range(len(added)):
        states[i] = state
        state = added[i].addcmul_(state, c.carried[i])
    return states, state.clone()  # a part would hold all of them


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, write: Tensor, state: Tensor | None, documents: Documents
) -> tuple[Tensor, Tensor]:
    """As the definition (``ops/state_space.py``)."""
    if not v.numel():  # an empty share of a tensor-parallel rank, or no tokens
        return torch.zeros_like(v), empty_state(q, v, state)
    with torch.no_grad():
        c = _prepare(q, k, v, g, write, documents)
        states, last = _states(c, _first_state(state, c))
        out = (c.q @ states.flatten(-2)).view_as(c.v).mul_(c.reach)
        out += _pairs_first(c.inside @ _pairs_first(c.written))
        return _join(out, v.shape[1]).to(v.dtype), _as_states(last)


def backward(
    grad: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, write: Tensor, state: Tensor | None,
    documents: Documents,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of the six tensors, in their dtypes; none of a state that was not given."""
    if not v.numel():
        zeros = [torch.zeros_like(x) for x in (q, k, v, g, write)]
        return (*zeros, None if state is None else grad_state.clone())
    with torch.no_grad():
        c = _prepare(q, k, v, g, write, documents)
        *tokens, d_first = _gradients(c, _first_state(state, c), _split(grad, k.shape[2]), grad_state)
    gradients = [_join(x, v.shape[1]).to(like.dtype) for x, like in zip(tokens, (q, k, v, g, write), strict=True)]
    return (*gradients, None if state is None else _as_states(d_first).to(state.dtype))


def _gradients(c: _StateChunks, first: Tensor, grad: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    """Of q, k, v, g and write as chunks have them, and of the first state. Tensors are let go as soon as nothing needs
    them: ``spec/delta_bytes.py`` says how many there are at once."""
    before = _states(c, first)[0]
    # out = lambda (q S) + A V; running: of G
    read = (c.q @ before.flatten(-2)).view_as(c.v)
    reached = grad * c.reach
    running = (read.mul_(reached)).sum(-1, keepdim=True)
    del read
    d_q = reached.flatten(-2) @ before.flatten(-2).mT
    after, d_first = _state_gradients(c, reached, _first_state(grad_state, c))
    del reached
    total = (before.mul_(after).sum((-3, -1)))[..., None, :, None] * c.carried
    del before
    # S <- lambda_C S + k' (kappa V)
    kept = c.written * c.rest
    d_k = kept.flatten(-2) @ after.flatten(-2).mT
    d_written = (c.k @ after.flatten(-2)).view_as(c.v).mul_(c.rest)
    del after, kept
    d_rest = (d_written * c.written).sum(-1, keepdim=True)
    running -= d_rest
    running[..., -1:, :, :] += d_rest.sum(-3, keepdim=True) + total
    # A = q k' D
    by_head = _pairs_first(grad).contiguous()
    d_written += _pairs_first(c.inside.mT @ by_head)
    d_inside = by_head @ _pairs_first(c.written).mT
    del by_head
    pairs = (d_inside * c.decay).sum(-3)
    d_inside.mul_(c.inside)
    running += (d_inside.sum(-1) - d_inside.sum(-2)).mT[..., None]
    del d_inside
    d_q += pairs @ c.k
    d_k += pairs.mT @ c.q
    d_g = running.flip(-3).cumsum(-3).flip(-3)[..., 0]
    d_write = (d_written * c.v).sum(-1)
    return d_q[..., None, :], d_k[..., None, :], d_written.mul_(c.write), d_g, d_write, d_first


def _state_gradients(c: _StateChunks, reached: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """(gradient of the state after each chunk, of the first state), from lambda times the gradient of the outputs and
    the gradient of the last state."""
    direct = (c.q.mT @ reached.flatten(-2)).view(len(c.q), *last.shape)
    after = torch.empty_like(direct)
    state = last
    for i in reversed(range(len(after))):
        after[i] = state
        state = direct[i].addcmul_(state, c.carried[i])
    return after, state.clone()
