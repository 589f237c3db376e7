"""Expert parallelism, applied to a plain model stage from outside: routed tokens go to where their experts are.

A group of ranks exchanges tokens. Each token goes once to every rank that has some of its experts (or some columns of
them), with its weights; the rank sends back the weighted sum of what its experts made of it, and the sums of all ranks
are added where the token lives. How many tokens go where is known only then, so every exchange is preceded by one of
counts. All ranks of a group go through the same exchanges in the same order, also those without tokens or experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hetero_megatron.comm import Comm, Group, Handle
from hetero_megatron.model import GPTStage
from hetero_megatron.model.moe import Experts, MoEMLP
from hetero_megatron.ops.spec import wide
from hetero_megatron.plan import Stage
from hetero_megatron.plan.canonical import ExpertGroup
from hetero_megatron.plan.experts import destinations, expert_groups


class Routes:
    """Where one rank's tokens go, for one micro-batch in one layer.

    Attributes:
        rows: by member of the group, which of my tokens it gets, ascending.
        here: by member, [rows, k], which of the token's choices are of experts there.
        counts: by member, how many tokens come from it.
    """

    def __init__(self, group: Group, table: torch.Tensor, chosen: torch.Tensor) -> None:
        """``table``: [members, experts] bool, who gets the tokens of which experts from me; ``chosen``: [tokens, k]."""
        hits = table[:, chosen]  # [members, tokens, k]
        self.rows = self.taken(hits.any(-1))
        self.here = [hits[i, rows] for i, rows in enumerate(self.rows)]
        self.group = group
        self._under_way: tuple[Handle, list[torch.Tensor]] | None = None
        self.counts = self.read(self._exchange_counts(chosen.device))

    def taken(self, members: torch.Tensor) -> list[torch.Tensor]:
        """[members, tokens] bool -> the tokens of each member."""
        return [row.nonzero().flatten() for row in members]

    def _exchange_counts(self, device: torch.device) -> torch.Tensor:
        mine = [torch.tensor([len(rows)], dtype=torch.int64, device=device) for rows in self.rows]
        theirs = [torch.zeros_like(x) for x in mine]
        self.group.exchange(mine, theirs).wait()
        theirs[self.group.index] = mine[self.group.index]
        return torch.cat(theirs)

    def read(self, counts: torch.Tensor) -> list[int]:
        """Waits for the device."""
        return counts.tolist()  # type: ignore[no-any-return]

    def start(self, parts: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
        """Send part i [n, ...] to member i; from member i, ``counts[i]`` rows like them will come. My own part is what
        I gave."""
        received = [
            part if i == self.group.index else part.new_empty(count, *part.shape[1:])
            for i, (part, count) in enumerate(zip(parts, counts, strict=True))
        ]
        assert self._under_way is None, "one exchange at a time"
        self._under_way = self.group.exchange([part.contiguous() for part in parts], received), received

    def arrive(self) -> list[torch.Tensor]:
        """What came of the exchange that was started."""
        assert self._under_way is not None
        (handle, received), self._under_way = self._under_way, None
        handle.wait()
        return received

    def swap(self, parts: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        self.start(parts, counts)
        return self.arrive()

    @property
    def sent(self) -> list[int]:
        return [len(rows) for rows in self.rows]

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x [tokens, ...] -> what each member gets of it."""
        return [x[rows] for rows in self.rows]

    def scatter_sum(self, parts: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
        """Parts [rows, h] of every member -> their sums by token [tokens, h], added in the order of the group."""
        first = parts[0]
        total = first.new_zeros(tokens, *first.shape[1:], dtype=wide(first.dtype))
        for rows, part in zip(self.rows, parts, strict=True):
            total[rows] += part.to(total.dtype)  # a row occurs once in a part
        return total.to(first.dtype)


def _pack(*tensors: torch.Tensor) -> torch.Tensor:
    """Tensors [n, ...] as one [n, bytes]: one message instead of several."""
    return torch.cat([x.contiguous().flatten(1).view(torch.uint8) for x in tensors], dim=1)


def _unpack(packed: torch.Tensor, *like: torch.Tensor) -> list[torch.Tensor]:
    """What was packed, each with the dtype and the number of columns of one of ``like``."""
    found, at = [], 0
    for x in like:
        size = x.shape[1] * x.element_size()
        found.append(packed[:, at : at + size].contiguous().view(x.dtype))
        at += size
    return found


class _Send(torch.autograd.Function):
    """Sends tokens [n, h] with their weights [n, k] off, and passes both on to :class:`_Arrive`; in backward, takes
    what comes back of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, local: torch.Tensor, routes: Routes
    ) -> tuple[torch.Tensor, ...]:
        ctx.routes, ctx.tokens = routes, x.shape[0]
        parts = []
        for i, (rows, here) in enumerate(zip(routes.rows, routes.here, strict=True)):
            numbers = torch.where(here, local[i][chosen[rows]], -1)
            parts.append(_pack(numbers, weights[rows].where(here, 0.0), x[rows]))
        routes.start(parts, routes.counts)
        ctx.like = weights.new_empty(0, weights.shape[1]), x.new_empty(0, x.shape[1])
        return x.view_as(x), weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        routes: Routes = ctx.routes
        parts = [_unpack(part, *ctx.like) for part in routes.arrive()]
        here = [part[0].where(mask, 0.0) for part, mask in zip(parts, routes.here, strict=True)]
        dx = routes.scatter_sum([part[1] for part in parts], ctx.tokens)
        return dx, routes.scatter_sum(here, ctx.tokens), None, None, None


class _Arrive(torch.autograd.Function):
    """What :class:`_Send` passed on -> (tokens, weights, chosen) of the rows that come to this rank; weights are 0, and
    chosen -1, where an expert is elsewhere. Backward only sends gradients off: it gives :class:`_Send` zeros that take
    no memory, and what was made between the two in forward goes backward while they are on their way."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, routes: Routes
    ) -> tuple[torch.Tensor, ...]:
        ctx.routes = routes
        ctx.zeros = [t.new_zeros(()).expand(t.shape) for t in (x, weights)]
        numbers, got_weights, got_x = _unpack(torch.cat(routes.arrive()), chosen, weights, x)
        ctx.mark_non_differentiable(numbers)
        return got_x, got_weights, numbers

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor, dweights: torch.Tensor, _: Any) -> tuple[Any, ...]:
        routes: Routes = ctx.routes
        routes.start(list(_pack(dweights, dx).split(routes.counts)), routes.sent)
        return *ctx.zeros, None, None


class _Combine(torch.autograd.Function):
    """Rows [n, h] that this rank has worked on -> the sums of what all ranks made of this rank's tokens."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, tokens: int, routes: Routes) -> torch.Tensor:
        ctx.routes = routes
        return routes.scatter_sum(routes.swap(list(y.split(routes.counts)), routes.sent), tokens)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        routes: Routes = ctx.routes
        return torch.cat(routes.swap(routes.gather(dout), routes.counts)), None, None


class ExpertExchange:
    """In place of a layer's own experts, for all of this rank's tokens (see ``model.moe.Dispatch``).

    Args:
        experts: those that are here; group: the ranks that exchange tokens; members: the plan's word on who has what.
    """

    def __init__(self, experts: Experts, group: Group, members: ExpertGroup, num_experts: int) -> None:
        self.experts, self.group = experts, group
        self.find_routes: Callable[[Group, torch.Tensor, torch.Tensor], Routes] = Routes
        device = group.comm.device
        to = destinations(members, group.comm.rank, num_experts)
        self.table = torch.tensor([[r in ranks for ranks in to] for r in group.ranks], device=device)
        first = {rank: member.experts[0] for member in members.members for rank in member.ranks}
        numbers = torch.arange(num_experts, device=device)
        self.local = torch.stack([numbers - first[r] for r in group.ranks])  # [members, experts]

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        routes = self.find_routes(self.group, self.table, chosen)
        x, weights = _Send.apply(x, weights, chosen, self.local, routes)
        return partial(self._arrive, x, weights, chosen, routes)

    def _arrive(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, routes: Routes) -> torch.Tensor:
        rows = _Arrive.apply(x, weights, chosen, routes)
        return _Combine.apply(self.experts(*rows), x.shape[0], routes)  # type: ignore[no-any-return]


def apply_expert_parallel(model: GPTStage, stage: Stage, comm: Comm) -> None:
    """Make the mixture-of-experts layers of ``model`` exchange tokens as ``stage`` says."""
    for layer in model.layers():
        if not isinstance(layer.mlp, MoEMLP):
            continue
        num_experts = layer.mlp.gate.moe.num_experts
        members = next(g for g in expert_groups(stage, num_experts) if comm.rank in g.ranks)
        if len(members.ranks) > 1:
            group = comm.group(tuple(sorted(members.ranks)))
            layer.mlp.dispatch = ExpertExchange(layer.mlp.experts, group, members, num_experts)
