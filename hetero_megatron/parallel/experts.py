"""Expert parallelism, applied to a plain model stage from outside: routed tokens go to where their experts are.

A group of ranks exchanges tokens. Each token goes once to every rank that has some of its experts (or some columns of
them), with its weights; the rank sends back the weighted sum of what its experts made of it, and the sums of all ranks
are added where the token lives. How many tokens go where is known only then, so every exchange is preceded by one of
counts, by member and by expert: the host reads them together, once. All ranks of a group go through the same exchanges
in the same order, also those without tokens or experts.

In two hops (``plans/experts.py``) a token goes once to each island that has some of its experts, where the rank that
gets it exchanges it inside the island as if it were one of its own. So sums are added over the ranks of an island in
ascending order, rounded to the dtype of tokens, and then over islands in the order of the ranks that sent them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hetero_megatron.comm import Comm, Group, Work
from hetero_megatron.model import GPTStage
from hetero_megatron.model.moe import MoEMLP
from hetero_megatron.ops.grouped_gemm import with_host_values
from hetero_megatron.ops.spec import wide
from hetero_megatron.plans import Stage
from hetero_megatron.plans.canonical import ExpertGroup
from hetero_megatron.plans.experts import TokenHops, destinations, expert_groups, token_hops
from hetero_megatron.plans.shares import Islands
from hetero_megatron.spec.moe import MoE

# (tokens [n, h], weights [n, k], experts [n, k], ends [experts] of the rows of each) -> [n, h]
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Table = list[list[bool]]


@dataclass(frozen=True)
class Ways:
    """Where one rank sends its tokens in one hop. A *key* names an expert, and where it matters whose token it is.

    Attributes:
        group: ranks that exchange tokens.
        table: [members, keys] bool, who gets the tokens of which keys from here.
        names: [members, keys] int64, what a key is called there.
        gives, takes: by member, whether tokens may go to it, and come from it.
        experts: by member, how many it has, each of which is sent the number of its rows; 0 where it passes tokens on.
    """

    group: Group
    table: torch.Tensor
    names: torch.Tensor
    gives: tuple[bool, ...]
    takes: tuple[bool, ...]
    experts: tuple[int, ...]


class Routes:
    """Where one rank's tokens go, for one micro-batch in one layer.

    Attributes:
        rows: by member of the group, which of my tokens it gets, ascending.
        here: by member, [rows, k], which of the token's choices are of experts there.
        counts: by member, how many tokens come from it.
        ends: [experts here], where the rows of each expert end when all that come are sorted by expert.
    """

    def __init__(self, ways: Ways, keys: torch.Tensor) -> None:
        """``keys``: [tokens, k]; -1: none."""
        self.ways, self.group = ways, ways.group
        self._under_way: tuple[Work, list[torch.Tensor]] | None = None
        hits = ways.table[:, keys] & (keys >= 0)  # [members, tokens, k]
        members = hits.any(-1)
        sent = torch.cat([members.sum(1, keepdim=True), self._count_rows(hits, keys)], 1)
        received = self._exchange_counts(sent)
        self.ends = received[:, 1:].sum(0).cumsum(0)
        values = self.read(torch.cat([sent[:, 0], received[:, 0], self.ends]))
        to, self.counts = values[: self.group.size], values[self.group.size : 2 * self.group.size]
        with_host_values(self.ends, values[2 * self.group.size :])
        self.rows = self.taken(members, to)
        self.here = [hits[i, rows] for i, rows in enumerate(self.rows)]

    def taken(self, members: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """[members, tokens] bool, of which each row has so many -> the tokens of each member, ascending. The host knows
        the counts already, so that nothing holds it up here."""
        total, flat = sum(counts), members.flatten()
        places = torch.where(flat, flat.cumsum(0) - 1, total)  # those of nobody go behind the end
        tokens = torch.arange(members.shape[1], device=members.device).expand_as(members).flatten()
        sorted_by_member = tokens.new_empty(total + 1).scatter_(0, places, tokens)[:total]
        return list(sorted_by_member.split(list(counts)))

    def _count_rows(self, hits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """``hits`` [members, tokens, k] -> [members, most experts of a member], the rows for each expert there."""
        most = max(self.ways.experts)
        if not most:
            return keys.new_empty(len(hits), 0)
        experts = torch.where(hits, self.ways.names[:, keys], most)  # what is not there is counted behind the end
        first = torch.arange(len(hits), device=keys.device)[:, None] * (most + 1)
        places = (experts.flatten(1) + first).flatten()
        rows = keys.new_zeros(len(hits) * (most + 1)).index_add_(0, places, torch.ones_like(places))
        return rows.view(len(hits), most + 1)[:, :most]

    def _exchange_counts(self, sent: torch.Tensor) -> torch.Tensor:
        """``sent`` [members, 1 + most experts of a member]: tokens for each member, and rows for each of its experts ->
        [members, 1 + experts here], what comes from each; only between those between which tokens may go."""
        ways, mine = self.ways, self.group.index
        received = sent.new_zeros(self.group.size, 1 + ways.experts[mine])
        give = [row[: 1 + n if some else 0] for row, n, some in zip(sent, ways.experts, ways.gives, strict=True)]
        take = [row if some else row[:0] for row, some in zip(received, ways.takes, strict=True)]
        self.group.exchange(give, take).wait()
        received[mine] = sent[mine, : received.shape[1]]
        return received

    def read(self, counts: torch.Tensor) -> list[int]:
        """How many tokens go to each member, how many come, and ``ends``: the only wait for the device of an exchange
        and of the products of its experts."""
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
    # Contiguous, a tensor of one column or row may still have any stride there, which the view as bytes refuses.
    matrices = [x.contiguous().as_strided((x.shape[0], x.shape[1]), (x.shape[1], 1)) for x in tensors]
    return torch.cat([x.view(torch.uint8) for x in matrices], dim=1)


def _unpack(packed: torch.Tensor, *like: torch.Tensor) -> list[torch.Tensor]:
    """What was packed, each with the dtype and the number of columns of one of ``like``."""
    columns, offset = [], 0
    for x in like:
        part = x.new_empty(packed.shape[0], x.shape[1])
        size = x.shape[1] * x.element_size()
        # Where it lies need not be aligned for its dtype.
        part.view(torch.uint8).copy_(packed[:, offset : offset + size])
        columns.append(part)
        offset += size
    return columns


class _Send(torch.autograd.Function):
    """Sends tokens [n, h] with their weights [n, k] off, and passes both on to :class:`_Arrive`; in backward, takes
    what comes back of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, routes: Routes
    ) -> tuple[torch.Tensor, ...]:
        ctx.routes, ctx.tokens = routes, x.shape[0]
        parts = []
        for rows, is_here, names in zip(routes.rows, routes.here, routes.ways.names, strict=True):
            local_experts = torch.where(is_here, names[keys[rows]], -1)
            parts.append(_pack(local_experts, weights[rows].where(is_here, 0.0), x[rows]))
        routes.start(parts, routes.counts)
        ctx.like = weights.new_empty(0, weights.shape[1]), x.new_empty(0, x.shape[1])
        return x.view_as(x), weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        routes: Routes = ctx.routes
        parts = [_unpack(part, *ctx.like) for part in routes.arrive()]
        masked = [part[0].where(mask, 0.0) for part, mask in zip(parts, routes.here, strict=True)]
        dx = routes.scatter_sum([part[1] for part in parts], ctx.tokens)
        return dx, routes.scatter_sum(masked, ctx.tokens), None, None


class _Arrive(torch.autograd.Function):
    """What :class:`_Send` passed on -> (tokens, weights, keys) of the rows that come to this rank; weights are 0, and
    keys -1, where an expert is elsewhere. Backward only sends gradients off: it gives :class:`_Send` zeros that take
    no memory, and what was made between the two in forward goes backward while they are on their way."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, routes: Routes
    ) -> tuple[torch.Tensor, ...]:
        ctx.routes = routes
        ctx.zeros = [t.new_zeros(()).expand(t.shape) for t in (x, weights)]
        got_keys, got_weights, got_x = _unpack(torch.cat(routes.arrive()), keys, weights, x)
        ctx.mark_non_differentiable(got_keys)
        return got_x, got_weights, got_keys

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
        ways: hop after hop; experts: those that are here.
    """

    def __init__(self, ways: Sequence[Ways], experts: Compute) -> None:
        self.ways, *further = ways
        self.further = ExpertExchange(further, experts) if further else None
        self.compute = experts
        self.find_routes: Callable[[Ways, torch.Tensor], Routes] = Routes

    @property
    def hops(self) -> list[ExpertExchange]:
        return [self, *(self.further.hops if self.further is not None else ())]

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        routes = self.find_routes(self.ways, keys)
        x, weights = _Send.apply(x, weights, keys, routes)
        return partial(self._arrive, x, weights, keys, routes)

    def _arrive(self, x: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, routes: Routes) -> torch.Tensor:
        tokens = x.shape[0]
        x, weights, keys = _Arrive.apply(x, weights, keys, routes)
        if self.further is None:
            y = self.compute(x, weights, keys, routes.ends)
        else:
            y = self.further.through(x, weights, keys)
        return _Combine.apply(y, tokens, routes)  # type: ignore[no-any-return]

    def through(self, x: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """There and back at once."""
        return self(x, weights, keys)()


class Receivers:
    """Which ranks of a group get whose tokens of which experts: the plan's word on it, as tensors.

    Args:
        ranks: senders and receivers, ascending.
    """

    def __init__(self, group: ExpertGroup, num_experts: int, islands: Islands, device: torch.device) -> None:
        self.group, self.num_experts, self.islands, self.device = group, num_experts, islands, device
        first = {rank: member.experts[0] for member in group.members for rank in member.ranks}
        self.counts = {r: member.experts[1] - member.experts[0] for member in group.members for r in member.ranks}
        self.numbers = torch.arange(num_experts, device=device)
        self.local = {rank: self.numbers - first[rank] for rank in group.ranks}  # an expert's number there

    def of(self, sender: int) -> tuple[tuple[int, ...], ...]:
        return destinations(self.group, sender, self.num_experts, self.islands)

    def table(self, sender: int, among: Mapping[int, Container[int]]) -> Table:
        """[among][experts]: by key, whether some of its ranks are among an expert's receivers."""
        to = self.of(sender)
        return [[any(r in ranks for r in receivers) for receivers in to] for ranks in among.values()]

    def ways(
        self, group: Group, table: Table, names: torch.Tensor, takes: Iterable[bool], to_relays: bool = False
    ) -> Ways:
        ways_table = torch.tensor(table, device=self.device)
        experts = tuple(0 if to_relays else self.counts[rank] for rank in group.ranks)
        return Ways(group, ways_table, names, tuple(map(any, table)), tuple(takes), experts)

    def straight(self, group: Group) -> Ways:
        """One hop: every rank that has some of a token's experts gets it."""
        ranks_of_rank = {rank: (rank,) for rank in group.ranks}
        names = torch.stack([self.local[rank] for rank in group.ranks])
        table = self.table(group.comm.rank, ranks_of_rank)
        takes = [any(group.comm.rank in ranks for ranks in self.of(sender)) for sender in group.ranks]
        return self.ways(group, table, names, takes)

    def to_islands(self, group: Group, hops: TokenHops) -> Ways:
        """The first of two hops: once to each island with some of a token's experts. A key says whose token it is."""
        own_rank, relays = group.comm.rank, hops.relays(group.comm.rank)
        table = self.table(own_rank, {rank: relays.get(rank, ()) for rank in group.ranks})
        names = (self.numbers + self.num_experts * group.index).expand(group.size, -1)
        own_island = hops.island(own_rank)
        takes = [
            hops.relay(sender, own_island) == own_rank and self._wants(sender, own_island) for sender in group.ranks
        ]
        return self.ways(group, table, names, takes, to_relays=True)

    def _wants(self, sender: int, island: tuple[int, ...]) -> bool:
        """Whether tokens of ``sender`` may go to an island."""
        return any(rank in island for ranks in self.of(sender) for rank in ranks)

    def inside(self, group: Group, hops: TokenHops, senders: tuple[int, ...]) -> Ways:
        """The second hop, in the island ``group``: keys are (sender, expert) of ``senders``, the whole group."""
        ranks_of_rank = {rank: (rank,) for rank in group.ranks}
        relays = [hops.relay(sender, group.ranks) for sender in senders]
        tables = [self.table(sender, ranks_of_rank) for sender in senders]
        from_relays = {relay for table, relay in zip(tables, relays, strict=True) if any(table[group.index])}
        nobody = [False] * self.num_experts
        passes = [relay == group.comm.rank for relay in relays]
        whole_table = [
            [to for table, is_passed in zip(tables, passes, strict=True) for to in (table[i] if is_passed else nobody)]
            for i in range(group.size)
        ]
        names = torch.stack([self.local[rank].repeat(len(senders)) for rank in group.ranks])
        return self.ways(group, whole_table, names, (rank in from_relays for rank in group.ranks))


def expert_ways(moe: MoE, members: ExpertGroup, comm: Comm, islands: Islands) -> list[Ways]:
    """The hops of one group, as the plan's ``islands`` say: one or two."""
    receivers = Receivers(members, moe.num_experts, islands, comm.device)
    ranks, hops = tuple(sorted(members.ranks)), token_hops(moe, members, islands)
    if hops is None:
        return [receivers.straight(comm.group(ranks))]
    island = comm.group(hops.island(comm.rank))
    return [receivers.to_islands(comm.group(ranks), hops), receivers.inside(island, hops, ranks)]


def apply_expert_parallel(model: GPTStage, stage: Stage, comm: Comm, islands: Islands = ()) -> None:
    """Make the mixture-of-experts layers of ``model`` exchange tokens as ``stage`` says; ``islands``: the plan's."""
    mlps = [layer.mlp for layer in model.layers() if isinstance(layer.mlp, MoEMLP)]
    if not mlps:
        return
    moe = mlps[0].gate.moe
    members = next(g for g in expert_groups(stage, moe.num_experts) if comm.rank in g.ranks)
    if len(members.ranks) > 1:
        ways = expert_ways(moe, members, comm, islands if stage.experts else ())
        for mlp in mlps:
            mlp.dispatch = ExpertExchange(ways, mlp.experts)
