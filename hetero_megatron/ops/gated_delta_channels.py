"""The gated delta rule by chunks of tokens where every feature of a key decays by itself (Kimi Delta Attention), in
plain torch. The formulas are those of ``ops/gated_delta_chunks.py`` with g, lambda and kappa per feature, and

    A_ij = sum over features of q_i k_j exp(G_i - G_j)     M_ij = beta_i times the same of k_i and k_j

exp(G_i - G_j) is not lambda_i / lambda_j, which overflows: for rows of the second half of a block and columns of the
first half it is exp(G_i - G_m) exp(G_m - G_j), where m is the last token of the first half, and neither is above 1.
Products of such halves, of blocks of 2, 4, 8 .. tokens, are all pairs of a chunk. What is in these exponents is summed
up from g: after a strong decay the difference of two of its running sums would have lost the weak ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from hetero_megatron.ops import gated_delta_chunks as chunks
from hetero_megatron.ops.gated_delta_chunks import Chunks, Documents

Tensor = torch.Tensor


class _Halves(NamedTuple):
    """Blocks of ``2 half`` tokens: how rows of their second halves and columns of their first ones decay to the last
    token of the first, both [.., blocks, half, dk]."""

    half: int
    rows: Tensor
    columns: Tensor

    def of_rows(self, x: Tensor) -> Tensor:
        """[.., tokens, dk] -> the second halves [.., blocks, half, dk], a view."""
        return x.unflatten(-2, (-1, 2, self.half)).select(-3, 1)

    def of_columns(self, x: Tensor) -> Tensor:
        return x.unflatten(-2, (-1, 2, self.half)).select(-3, 0)

    def of_pairs(self, x: Tensor) -> Tensor:
        """[.., tokens, tokens] -> these rows and columns of each block [.., half, half, blocks], a view."""
        blocks = x.unflatten(-1, (-1, 2, self.half)).unflatten(-4, (-1, 2, self.half))
        return blocks[..., 1, :, :, 0, :].diagonal(dim1=-4, dim2=-2)


def _halves(g: Tensor) -> Iterator[_Halves]:
    """Of g [.., tokens, dk], a power of two of tokens."""
    half = 1
    while half < g.shape[-2]:
        blocks = g.unflatten(-2, (-1, 2, half))
        yield _Halves(half, blocks[..., 1, :, :].cumsum(-2).exp_(), _left(blocks[..., 0, :, :]))
        half *= 2


def _left(g: Tensor) -> Tensor:
    """[.., tokens, dk]: how each token decays up to the last one, exp of the sum of g after it."""
    after = torch.cat([g[..., 1:, :], torch.zeros_like(g[..., :1, :])], -2)
    return after.flip(-2).cumsum(-2).flip(-2).exp_()


def _filled(x: Tensor) -> Tensor:
    """[.., C, dk] with zeros after the last row up to a power of two."""
    more = (1 << (x.shape[-2] - 1).bit_length()) - x.shape[-2]
    return F.pad(x, (0, 0, 0, more)) if more else x


def pairs(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """sum over features of x_i y_j exp(G_i - G_j) for j <= i, and else 0: [.., C, dk] each -> [.., C, C]."""
    count = g.shape[-2]
    x, y, g = map(_filled, (x, y, g))
    out = g.new_zeros(*g.shape[:-1], g.shape[-2])
    out.diagonal(dim1=-2, dim2=-1).copy_((x * y).sum(-1).expand(g.shape[:-1]))
    for halves in _halves(g):
        rows, columns = halves.of_rows(x) * halves.rows, halves.of_columns(y) * halves.columns
        halves.of_pairs(out).copy_((rows @ columns.transpose(-1, -2)).movedim(-3, -1))
    return out[..., :count, :count]


def pair_gradients(grad: Tensor, x: Tensor, y: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Of x and y, each [.., C, dk], from that of ``pairs``; that of G is x times the first less y times the second."""
    count = g.shape[-2]
    x, y, g = map(_filled, (x, y, g))
    more = g.shape[-2] - count
    grad = F.pad(grad, (0, more, 0, more)) if more else grad
    diagonal = grad.diagonal(dim1=-2, dim2=-1)[..., None]
    d_x, d_y = diagonal * y, diagonal * x
    for halves in _halves(g):
        block = halves.of_pairs(grad).movedim(-1, -3)
        halves.of_rows(d_x).addcmul_(block @ (halves.of_columns(y) * halves.columns), halves.rows)
        rows = halves.of_rows(x) * halves.rows
        halves.of_columns(d_y).addcmul_(block.transpose(-1, -2) @ rows, halves.columns)
    return d_x[..., :count, :], d_y[..., :count, :]


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Documents, eps: float
) -> Chunks:
    """Arguments as the operator has them."""
    heads = k.shape[2]
    unit_q, unit_k = (chunks.unit(chunks.split(x, heads), eps) for x in (q, k))
    values, write = chunks.split(v, heads), chunks.split(beta, heads)[..., None]
    g = chunks.split(g, heads)
    reach, rest = g.cumsum(-2).exp_(), _left(g)
    carried = reach[..., -1:, :].transpose(-1, -2)
    keys = pairs(unit_k.x, unit_k.x, g)
    inside = pairs(unit_q.x * q.shape[-1] ** -0.5, unit_k.x, g)
    masks, together = chunks.document_masks(documents, k.shape[1], g), None
    if masks is not None:
        entered, leaves, through, together = masks
        reach, rest, carried = reach * entered, rest * leaves, carried * through
        keys, inside = keys * together, inside * together
    lower = keys * write
    written, read = chunks.solved(lower, values, unit_k.x * reach, write)
    return Chunks(
        unit_q, unit_k, values, write, reach, rest, carried, g, keys, lower, written, read, inside, together
    )


def _gradients(c: Chunks, first: Tensor, grad: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    """Of q, k, v, g, beta as chunks have them, and of the first state."""
    scale, group_axis = c.k.x.shape[-1] ** -0.5, (3,)  # the axis of the value heads of a key head
    d_left, d_carried, d_reach_q, d_inside, d_sides, d_reach_k, d_lower, d_first = chunks.by_states(
        c, first, grad, grad_state
    )
    # A and M, of pairs
    d_beta = (d_lower * c.keys).sum(-1, keepdim=True)
    d_lower.mul_(c.beta)
    if c.together is not None:
        d_lower.mul_(c.together)
        d_inside.mul_(c.together)
    d_q, d_k = pair_gradients(d_inside, c.q.x * scale, c.k.x, c.decay)
    del d_inside
    running = (d_q * c.q.x).mul_(scale).sub_(d_k * c.k.x)
    for sign, change in zip((1, -1), pair_gradients(d_lower, c.k.x, c.k.x, c.decay), strict=True):
        running.addcmul_(change, c.k.x, value=sign)
        d_k += change
    del d_lower, change
    # lambda q, and then q
    d_reach_q.mul_(c.reach)
    running.addcmul_(d_reach_q, c.q.x, value=scale)
    d_q = d_q.add_(d_reach_q).sum(group_axis, keepdim=True)
    del d_reach_q
    # beta [v, lambda k], lambda, kappa and lambda_C, and then k
    d_beta += (d_sides * c.v).sum(-1, keepdim=True)
    reached = d_reach_k.mul(c.reach)
    d_beta += (reached * c.k.x).sum(-1, keepdim=True)
    reached.mul_(c.beta)
    d_left.mul_(c.rest)
    running.addcmul_(reached, c.k.x).addcmul_(d_left, c.k.x, value=-1)
    running[..., -1:, :] += (d_left * c.k.x).sum(-2, keepdim=True) + d_carried.transpose(-1, -2)
    d_k = d_k.add_(reached).add_(d_left).sum(group_axis, keepdim=True)
    del reached, d_left
    d_g = running.flip(-2).cumsum(-2).flip(-2)
    return (
        c.q.gradient(d_q, scale), c.k.gradient(d_k, 1.0), d_sides * c.beta, d_g, d_beta[..., 0], d_first
    )  # fmt: skip


forward = partial(chunks.forward, prepare=_prepare)
backward = partial(chunks.backward, prepare=_prepare, gradients_of=_gradients)
