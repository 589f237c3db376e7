"""Linear attention across context groups: put in place of a layer's core, from outside the model.

Every rank computes its own runs of tokens (``plans/linear_attention.py``) at the same time, as if the state before each
were zero. What the state before adds is linear in it: beside its values, a run computes with as many further features
as keys have, whose values are zero and whose first state is the identity. They give what each of its queries reads of
the state before, and the matrix that takes that state through the run. So only states go along the chain of runs, one
small product each; in backward their gradients go the other way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Piece
from hetero_megatron.model.gated_delta_net import DeltaCore
from hetero_megatron.model.layers import Context
from hetero_megatron.parallel.head_exchange import HeadExchange
from hetero_megatron.plans.context_plan import StageContext
from hetero_megatron.plans.linear_attention import chain, convolved, looked_at, place_among, state_moves

Tensor = torch.Tensor
Documents = Sequence[Sequence[int]] | None
Peers = list[tuple[int, slice]]  # (rank, local value heads)


@dataclass(frozen=True)
class OwnRun:
    """A run of this rank.

    Attributes:
        number: in the chain; tokens: of the sequence.
        local_slice, seen: where they are among the rank's tokens, and, after ``past`` tokens at which convolutions look
            back, among all that these look at.
        before, after: with whom its first and its last state are exchanged.
    """

    number: int
    tokens: tuple[int, int]
    local_slice: slice
    seen: slice
    past: int
    before: Peers
    after: Peers


class StageStates:
    """What all layers of linear attention of a stage share on one rank."""

    def __init__(self, context: StageContext, comm: Comm) -> None:
        delta = context.spec.delta
        assert delta is not None
        self.comm, self.key_dim, self.value_dim = comm, delta.key_dim, delta.value_dim
        member = context.member(comm.rank)
        self.first_head = member.held.value_heads[0]
        self.heads = tuple(b - a for a, b in (member.held.key_heads, member.held.value_heads))
        seen, (keys, values) = looked_at(context, member.tokens), convolved(context)
        before, after = (sum(b - a for a, b in tokens) for tokens in (member.tokens, seen))
        shapes = [((before, heads), (after, heads)) for heads in (self.heads[0], *self.heads)]
        self.look_back = HeadExchange(comm.group(context.ranks), [keys, keys, values], shapes)
        all_runs = chain(context)
        self.starts = [run.tokens[0] for run in all_runs]
        moves, self.runs = state_moves(all_runs), list[OwnRun]()
        for number, run in enumerate(all_runs):
            if run.tokens not in member.tokens:
                continue
            (a, b), past = run.tokens, min(delta.kernel - 1, run.tokens[0])
            received = moves[number - 1].receives(comm.rank) if number else []
            sent = moves[number].sends(comm.rank) if number < len(moves) else []
            local_slice, at = place_among(member.tokens, (a, b)), place_among(seen, (a - past, b))
            peers = [(p.src, self._heads(p)) for p in received], [(p.dst, self._heads(p)) for p in sent]
            self.runs.append(OwnRun(number, (a, b), local_slice, at, past, *peers))

    def _heads(self, piece: Piece) -> slice:
        return slice(piece.box.lo[0] - self.first_head, piece.box.hi[0] - self.first_head)

    def by_heads(self, *qkv: Tensor) -> list[Tensor]:
        """Each [b, s, heads n] -> [b, s, heads, n]."""
        heads = (self.heads[0], *self.heads)
        return [x.unflatten(-1, (count, x.shape[-1] // max(count, 1))) for x, count in zip(qkv, heads, strict=True)]

    def goes_on(self, number: int, documents: Documents) -> bool:
        """Whether some row's document began before run ``number``, so that there is a state before it."""
        if number >= len(self.starts):
            return False
        return any(self.starts[number] not in row for row in documents or ((0,),))

    def send(self, state: Tensor, peers: Peers, tag: int) -> list[Any]:
        """state: [b, value heads, dk, dv]."""
        return [self.comm.isend(state[:, heads].contiguous(), peer, tag) for peer, heads in peers]

    def receive(self, like: Tensor, peers: Peers, tag: int) -> Tensor:
        """A tensor like ``like``, [b, value heads, dk, dv]; every head comes from one rank."""
        parts = [(heads, torch.empty_like(like[:, heads], memory_format=torch.contiguous_format)) for _, heads in peers]
        arriving = [self.comm.irecv(part, peer, tag) for (peer, _), (_, part) in zip(peers, parts, strict=True)]
        for handle in arriving:
            handle.wait()
        if len(parts) == 1 and parts[0][1].shape == like.shape:
            return parts[0][1]
        state = torch.empty_like(like)
        for heads, part in parts:
            state[:, heads] = part
        return state


def starts_within(documents: Documents, a: int, b: int) -> Documents:
    """Of tokens a to b, where documents start."""
    if documents is None:
        return None
    return [[0, *(start - a for start in row if a < start < b)] for row in documents]


class ContextDelta(nn.Module):
    """Stands in for a layer's :class:`~hetero_megatron.model.gated_delta_net.DeltaCore`."""

    def __init__(self, shared: StageStates, core: DeltaCore) -> None:
        super().__init__()
        self.shared, self.inner = shared, core

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, b: Tensor | None, a: Tensor, weights: tuple[Tensor, ...],
        context: Context,
    ) -> Tensor:  # fmt: skip
        """As the core, of the rank's own tokens."""
        shared, documents = self.shared, context.documents
        decay, write = self.inner.steps(b, a, weights)
        seen = [x.flatten(2) for x in shared.look_back(*shared.by_heads(q, k, v))]
        outs, carried = list[Tensor](), list[Tensor | None]()
        for run in shared.runs:
            start, end = run.tokens
            looked = starts_within(documents, start - run.past, end)
            convolved = self.inner.convolved([x[:, run.seen] for x in seen], weights, looked)
            q, k, v = (x[:, run.past :] for x in convolved)
            rows, goes_on = starts_within(documents, start, end), shared.goes_on(run.number, documents)
            out, *rest = self._run(q, k, v, decay[:, run.local_slice], write[:, run.local_slice], rows, goes_on)
            outs.append(self.inner.added(out, v, weights))
            carried += rest
        outs = outs or [seen[2].unflatten(-1, (-1, shared.value_dim))]  # without tokens
        outs = list(_Carry.apply(shared, documents, len(outs), *outs, *carried))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, write: Tensor, documents: Documents, goes_on: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Of a run with zero before it (out [b, s, value heads, dv], last state); where something is before it, too
        what queries read of that [b, s, value heads, dk], and what becomes of it [b, value heads, dk, dk]:
        (out, read, through, last state)."""
        if goes_on:
            return self.inner.apart(q, k, v, g, write, documents)
        out, last = self.inner.rule(q, k, v, g, write, None, documents)
        return out, None, None, last


class _Carry(torch.autograd.Function):
    """Adds to the outputs of runs what they read of the states before them."""

    @staticmethod
    def forward(ctx: Any, shared: StageStates, documents: Documents, count: int, *tensors: Any) -> tuple[Tensor, ...]:
        """tensors: ``count`` outputs; then of each run read, through and last (:meth:`ContextDelta._run`)."""
        outs, rest = list(tensors[:count]), tensors[count:]
        sent, saved = list[Any](), list[Tensor]()
        for i, run in enumerate(shared.runs):
            read, through, last = rest[3 * i : 3 * i + 3]
            if read is not None:
                state = shared.receive(last, run.before, 2 * run.number)
                state = _kept(state, run, documents)
                outs[i] = outs[i].to(state.dtype).add(_per_head(read.to(state.dtype), state)).to(outs[i].dtype)
                last = _taken(through, state).add_(last)
                saved += [read, through, state]
            if shared.goes_on(run.number + 1, documents):
                sent += shared.send(last, run.after, 2 * run.number + 2)
        for handle in sent:
            handle.wait()
        # All ranks save something here, so that all exchange again where this is recomputed.
        ctx.save_for_backward(*saved, outs[0].new_empty(0))
        ctx.shared, ctx.documents, ctx.likes = shared, documents, [None if x is None else _like(x) for x in rest]
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        shared, documents = ctx.shared, ctx.documents
        *saved, _ = ctx.saved_tensors
        gradients: list[Tensor | None] = [None] * len(ctx.likes)
        sent = list[Any]()
        for i, run in reversed(list(enumerate(shared.runs))):
            like_read, _, like_last = ctx.likes[3 * i : 3 * i + 3]
            d_last = grads[i].new_zeros(like_last[0], dtype=like_last[1])
            if shared.goes_on(run.number + 1, documents):
                d_last = shared.receive(d_last, run.after, 2 * run.number + 3)
            gradients[3 * i + 2] = d_last
            if like_read is None:
                continue
            state, through, read = saved.pop(), saved.pop(), saved.pop()
            grad = grads[i].to(state.dtype)
            d_state = _taken(through.mT, d_last).add_(torch.einsum("bshk,bshv->bhkv", read.to(grad.dtype), grad))
            gradients[3 * i] = _per_head(grad, state.mT).to(read.dtype)
            of_one = through.shape[-1] == 1  # number
            gradients[3 * i + 1] = (d_last * state).sum((2, 3), True) if of_one else torch.matmul(d_last, state.mT)
            sent += shared.send(_kept(d_state, run, documents), run.before, 2 * run.number + 1)
        for handle in sent:
            handle.wait()
        return None, None, None, *grads, *gradients


def _like(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    return x.shape, x.dtype


def _taken(through: Tensor, state: Tensor) -> Tensor:
    """The state [b, heads, dk, dv] after a run: ``through`` is a matrix for each head, or one number."""
    return through * state if through.shape[-1] == 1 else torch.matmul(through, state)


def _per_head(x: Tensor, matrix: Tensor) -> Tensor:
    """[b, s, heads, m], [b, heads, m, n] -> [b, s, heads, n]."""
    return torch.matmul(x.transpose(1, 2), matrix).transpose(1, 2)


def _kept(state: Tensor, run: OwnRun, documents: Documents) -> Tensor:
    """Zero in rows in which a document begins with the run."""
    fresh = [run.tokens[0] in row for row in documents or ()]
    if not any(fresh):
        return state
    return state.masked_fill(torch.tensor(fresh, device=state.device)[:, None, None, None], 0.0)
