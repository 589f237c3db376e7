"""The gated delta rule by chunks of tokens, in plain torch: products of matrices inside a chunk, and one state from
chunk to chunk (Yang et al., 2024, section 3.3; formulas of backward are derived from theirs).

Inside a chunk of C tokens that begins with state S, with G the running sum of g, lambda = exp(G), kappa = exp(G_C - G)
and D_ij = exp(G_i - G_j) for j <= i:

    (1 + M) [U, W] = beta [v, lambda k]     M = beta (k k' D) below the diagonal
    V = U - W S                             what is written
    out = (lambda q) S + A V                A = q k' D
    S <- lambda_C S + (kappa k)' V

lambda, kappa and D are 0 between documents. Nothing but the arguments is kept for backward, which runs this again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from hetero_megatron.ops.spec import wide

Tensor = torch.Tensor
Documents = Sequence[Sequence[int]] | None
CHUNK = 64  # tokens, of sequences with as many


def _chunk(length: int) -> int:
    return min(CHUNK, length)


class UnitVectors(NamedTuple):
    """A normalised tensor x r: [n, b, key heads, 1, C, dk], and r."""

    x: Tensor
    r: Tensor

    def gradient(self, grad: Tensor, scale: float) -> Tensor:
        """Of ``scale`` x r -> of x; overwrites ``grad``."""
        dot = (grad * self.x).sum(-1, keepdim=True)
        return grad.sub_(self.x * dot).mul_(self.r * scale)


class Chunks(NamedTuple):
    """What chunks have before their states are known; [n, b, key heads, values of each, C, ..].

    ``keys`` [n, b, key heads, 1, C, C] is k k'; ``lower`` M with 1 on the diagonal; ``carried`` lambda_C. Where keys
    decay feature by feature (``ops/gated_delta_channels.py``) ``decay`` is g, ``keys`` has the decay in it, and
    ``together`` says which tokens are of one document (None: all).
    """

    q: UnitVectors
    k: UnitVectors
    v: Tensor
    beta: Tensor
    reach: Tensor  # lambda [.., C, 1]; feature by feature [.., C, dk]
    rest: Tensor  # kappa [.., C, 1]; [.., C, dk]
    carried: Tensor  # [.., 1, 1]; [.., dk, 1]
    decay: Tensor  # D
    keys: Tensor
    lower: Tensor
    written: Tensor  # U
    read: Tensor  # W
    inside: Tensor  # A
    together: Tensor | None = None


def split(x: Tensor, key_heads: int) -> Tensor:
    """[b, s, heads, ..] -> [n, b, key heads, heads of each, C, ..] in at least fp32, contiguous, ended with zeros."""
    b, s, heads = x.shape[:3]
    x, size = x.to(wide(x.dtype)), _chunk(s)
    if s % size:
        x = F.pad(x, (0, 0) * (x.dim() - 2) + (0, -s % size))
    x = x.reshape(b, -1, size, key_heads, heads // key_heads, *x.shape[3:])
    return x.permute(1, 0, 3, 4, 2, *range(5, x.dim())).contiguous()


def join(x: Tensor, length: int) -> Tensor:
    """The inverse, of ``length`` tokens: [b, s, heads, ..]."""
    x = x.permute(1, 0, 4, 2, 3, *range(5, x.dim()))
    return x.flatten(3, 4).flatten(1, 2)[:, :length]


def unit(x: Tensor, eps: float) -> UnitVectors:
    r = torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    return UnitVectors(x * r, r)


def document_masks(documents: Documents, length: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Of tokens in chunks, 1 or 0: the document began in an earlier chunk [n, b, 1, 1, C, 1]; it goes on after this one
    [n, b, 1, 1, C, 1]; one document goes through the chunk [n, b, 1, 1, 1, 1]; two tokens are of one document
    [n, b, 1, 1, C, C]. None: there is one document per row."""
    if documents is None or all(len(row) == 1 for row in documents):
        return None
    size = _chunk(length)
    marks = torch.zeros(len(documents), length + -length % size, dtype=torch.int64)
    for row, starts in enumerate(documents):
        marks[row, list(starts)] = 1
    number = marks.cumsum(1).view(len(documents), -1, size).transpose(0, 1)  # [n, b, C]
    previous_last = torch.cat([torch.ones_like(number[:1, :, -1:]), number[:-1, :, -1:]])
    last = number[..., -1:]
    masks = (
        (number == previous_last)[..., None], (number == last)[..., None], (previous_last == last)[..., None],
        number[..., None] == number[..., None, :],
    )  # fmt: skip
    entered, leaves, through, same_document = (x[:, :, None, None].to(like.device, like.dtype) for x in masks)
    return entered, leaves, through, same_document


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Documents, eps: float
) -> Chunks:
    """Arguments as the operator has them."""
    heads, length = k.shape[2], k.shape[1]
    unit_q, unit_k = (unit(split(x, heads), eps) for x in (q, k))
    values, write = split(v, heads), split(beta, heads)[..., None]
    running = split(g, heads).cumsum(-1)[..., None]
    total = running[..., -1:, :]
    causal = torch.ones(running.shape[-2], running.shape[-2], dtype=torch.bool, device=v.device).tril()
    decay = (running - running.transpose(-1, -2)).masked_fill_(~causal, -torch.inf).exp_()
    reach, rest, carried = running.exp(), (total - running).exp_(), total.exp()
    masks = document_masks(documents, length, decay)
    if masks is not None:
        entered, leaves, through, same_document = masks
        reach, rest, carried, decay = reach * entered, rest * leaves, carried * through, decay.mul_(same_document)
    keys = unit_k.x @ unit_k.x.transpose(-1, -2)
    inside = ((unit_q.x * q.shape[-1] ** -0.5) @ unit_k.x.transpose(-1, -2)) * decay
    lower = (keys * decay).mul_(write)
    written, read = solved(lower, values, unit_k.x * reach, write)
    return Chunks(unit_q, unit_k, values, write, reach, rest, carried, decay, keys, lower, written, read, inside)


def solved(lower: Tensor, values: Tensor, reached: Tensor, write: Tensor) -> tuple[Tensor, Tensor]:
    """(U, W) of ``values`` v and ``reached`` lambda k, contiguous."""
    sides = torch.cat([values, reached], -1).mul_(write)
    both = torch.linalg.solve_triangular(lower, sides, upper=False, unitriangular=True)
    del sides
    written, read = (x.contiguous() for x in both.split([values.shape[-1], reached.shape[-1]], -1))
    return written, read


def _first_state(state: Tensor | None, c: Chunks) -> Tensor:
    """[b, key heads, values of each, dk, dv]."""
    shape = (*c.v.shape[1:4], c.k.x.shape[-1], c.v.shape[-1])
    return c.v.new_zeros(shape) if state is None else state.to(c.v.dtype).reshape(shape)


def states_of(c: Chunks, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(state before each chunk [n, ..], what each writes V, the last state)."""
    n = len(c.v)
    states, written = first.new_empty(n, *first.shape), torch.empty_like(c.v)
    state = first
    for i in range(n):
        states[i] = state
        torch.sub(c.written[i], c.read[i] @ state, out=written[i])
        keys_left = (c.k.x[i] * c.rest[i]).transpose(-1, -2)
        state = (keys_left @ written[i]).addcmul_(state, c.carried[i])
    return states, written, state


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, documents: Documents, eps: float,
    prepare: Callable[..., Chunks] = _prepare,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As the definition (``ops/gated_delta.py``)."""
    if not v.numel():  # an empty share of a tensor-parallel rank, or no tokens
        return torch.zeros_like(v), empty_state(q, v, state)
    with torch.no_grad():
        c = prepare(q, k, v, g, beta, documents, eps)
        states, written, last = states_of(c, _first_state(state, c))
        out = (c.q.x * (c.reach * q.shape[-1] ** -0.5)) @ states
        out += c.inside @ written
        return join(out, v.shape[1]).to(v.dtype), last.flatten(1, 2)


def empty_state(q: Tensor, v: Tensor, state: Tensor | None) -> Tensor:
    shape = (v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    return v.new_zeros(shape, dtype=wide(v.dtype)) if state is None else state.clone()


def state_gradients(c: Chunks, grad: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the state after each chunk, of what each writes, of the first state), from those of the results."""
    scale = c.k.x.shape[-1] ** -0.5
    grads_after = last.new_empty(len(grad), *last.shape)
    change = c.inside.transpose(-1, -2) @ grad
    grad_state = last
    for i in reversed(range(len(grad))):
        grads_after[i] = grad_state
        change[i] += (c.k.x[i] * c.rest[i]) @ grad_state
        direct = (c.q.x[i] * (c.reach[i] * scale)).transpose(-1, -2) @ grad[i]
        grad_state = direct.sub_(c.read[i].transpose(-1, -2) @ change[i]).addcmul_(grad_state, c.carried[i])
    return grads_after, change, grad_state


def by_states(c: Chunks, first: Tensor, grad: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    """Gradients of kappa k; of the logarithm of lambda_C [.., carried's, 1]; of lambda q; of A; of beta v and
    beta lambda k, where they are solved for; of M below the diagonal; and of the first state."""
    before, written = states_of(c, first)[:2]
    grad = split(grad, c.k.x.shape[2])
    grads_after, change, d_first = state_gradients(c, grad, grad_state.to(c.v.dtype).reshape(before.shape[1:]))
    # out = (lambda q) S + A V, and the next state.
    d_left = written @ grads_after.transpose(-1, -2)
    by_row = c.carried.shape[-2] > 1  # of lambda_C
    d_carried = grads_after.mul_(before).sum(-1 if by_row else (-1, -2), keepdim=True) * c.carried
    del grads_after
    d_reach_q = grad @ before.transpose(-1, -2)
    d_inside = grad @ written.transpose(-1, -2)
    del grad, written
    # (1 + M) [U, W] = beta [v, lambda k]
    sides = torch.cat([change, (change @ before.transpose(-1, -2)).neg_()], -1)
    del change, before
    both = torch.linalg.solve_triangular(c.lower.transpose(-1, -2), sides, upper=True, unitriangular=True)
    del sides
    d_sides, d_reach_k = both.split([c.v.shape[-1], c.k.x.shape[-1]], -1)
    d_lower = d_sides @ c.written.transpose(-1, -2)
    d_lower += d_reach_k @ c.read.transpose(-1, -2)
    return d_left, d_carried, d_reach_q, d_inside, d_sides, d_reach_k, d_lower.neg_().tril_(-1), d_first


def _gradients(c: Chunks, first: Tensor, grad: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    """Of q, k, v, g, beta as chunks have them, and of the first state. Tensors are let go as soon as nothing needs
    them: ``spec/delta_bytes.py`` says how many there are at once."""
    scale, group_axis = c.k.x.shape[-1] ** -0.5, (3,)  # the axis of the value heads of a key head
    d_left, d_carried, d_reach_q, d_inside, d_sides, d_reach_k, d_lower, d_first = by_states(c, first, grad, grad_state)
    # A = q k' D and M = beta k k' D
    running = _rows_less_columns(d_inside * c.inside) + _rows_less_columns(d_lower * c.lower)
    summed = d_inside.mul_(c.decay).sum(group_axis, keepdim=True)
    del d_inside
    d_beta = (d_lower.mul_(c.decay) * c.keys).sum(-1, keepdim=True)
    pairs = d_lower.mul_(c.beta).sum(group_axis, keepdim=True)
    del d_lower
    # lambda q, and then q
    running += (d_reach_q * c.q.x).sum(-1, keepdim=True) * (c.reach * scale)
    d_q = (summed @ c.k.x).add_(d_reach_q.mul_(c.reach).sum(group_axis, keepdim=True))
    del d_reach_q
    # beta [v, lambda k], lambda, kappa and lambda_C, and then k
    reached = (d_reach_k * c.k.x).sum(-1, keepdim=True) * c.reach
    d_rest = (d_left * c.k.x).sum(-1, keepdim=True) * c.rest
    d_beta += reached + (d_sides * c.v).sum(-1, keepdim=True)
    running += reached * c.beta - d_rest
    running[..., -1:, :] += d_rest.sum(-2, keepdim=True) + d_carried
    d_g = running.flip(-2).cumsum(-2).flip(-2)[..., 0]
    d_left.mul_(c.rest).addcmul_(d_reach_k, c.beta * c.reach)
    d_k = (summed.transpose(-1, -2) @ c.q.x).mul_(scale).add_((pairs + pairs.transpose(-1, -2)) @ c.k.x)
    d_k += d_left.sum(group_axis, keepdim=True)
    del d_left
    return (
        c.q.gradient(d_q, scale), c.k.gradient(d_k, 1.0), d_sides * c.beta, d_g, d_beta[..., 0], d_first
    )  # fmt: skip


def _rows_less_columns(x: Tensor) -> Tensor:
    """[.., C, C] -> [.., C, 1]: the gradient of G where x is that of exp(G_i - G_j) times it."""
    return (x.sum(-1) - x.sum(-2))[..., None]


def backward(
    grad: Tensor, grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None,
    documents: Documents, eps: float, prepare: Callable[..., Chunks] = _prepare,
    gradients_of: Callable[..., tuple[Tensor, ...]] = _gradients,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of the six tensors, in their dtypes; none of a state that was not given."""
    if not v.numel():
        zeros = [torch.zeros_like(x) for x in (q, k, v, g, beta)]
        return (*zeros, None if state is None else grad_state.clone())
    with torch.no_grad():
        c = prepare(q, k, v, g, beta, documents, eps)
        *tokens, d_first = gradients_of(c, _first_state(state, c), grad, grad_state)
    gradients = [join(x, v.shape[1]).to(like.dtype) for x, like in zip(tokens, (q, k, v, g, beta), strict=True)]
    return (*gradients, None if state is None else d_first.flatten(1, 2).to(state.dtype))
