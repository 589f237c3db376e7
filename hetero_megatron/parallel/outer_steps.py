"""Outer steps of one rank: what its island went from the global weights is exchanged, and moves these.

Global weights, their momentum and the differences are divided over an island's ranks as the masters of its optimizer
are. What passes between two ranks of unlike islands is where the boxes that they own overlap, the same both ways, so
islands of unlike plans need no common layout. Every island adds up the differences in the order of islands and rounds
alike, so global weights are the same everywhere, bit for bit. Where differences are compressed, all islands add what
they decode to, the own one too; what an island's lost by that goes into its next one (error feedback).

An exchange leaves no trace in the state until all of it has come: what is torn by a peer's loss has not begun, and is
begun again by the islands that are left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

import torch

from hetero_megatron.comm import Comm, Work
from hetero_megatron.layout import Box, Layout, reduction
from hetero_megatron.parallel.optimizer import ShardedOptimizer
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.outer import fragment_tensors, owners_by_island

if TYPE_CHECKING:
    from hetero_megatron.parallel.compress import Codes


@dataclass
class OuterPiece:
    """What this rank owns of a tensor: its island's own weights (``master``), the global ones with their momentum, and
    what compression has lost so far of the differences (None: there is none)."""

    name: str
    box: Box
    master: torch.Tensor
    weights: torch.Tensor
    momentum: torch.Tensor | None
    lost: torch.Tensor | None = None


@dataclass
class Fragment:
    """Tensors that are exchanged together.

    Attributes:
        routes: by rank of another island, (piece, box) of what both own, in the same order on both sides.
        counts: elements of the message for each rank of the plan; bytes of a compressed one.
        tokens: by island, those that count in the loss since the last exchange began.
    """

    pieces: list[OuterPiece]
    routes: dict[int, list[tuple[int, Box]]]
    counts: list[int]
    tokens: list[float]


@dataclass
class Exchange:
    """One that has begun.

    Attributes:
        tokens: of the fragment when it began.
        deltas: of this rank's pieces, with what earlier ones lost; codes: what compression makes of them.
        sums: weighted over all islands, in place of these; None: they are not there yet.
    """

    work: Work | None
    tokens: list[float]
    deltas: list[torch.Tensor]
    codes: list[Codes]
    sums: list[torch.Tensor] | None = None


@dataclass(frozen=True)
class OuterMoment:
    """Where outer steps are.

    Attributes:
        updates: optimizer steps that were taken.
        tokens: by fragment and island, those that count in the loss since the last exchange began.
        due: an exchange is to end before the next step.
        under_way: the sums of one that began are there, and are not taken yet.
    """

    updates: int
    tokens: list[list[float]]
    due: bool
    under_way: bool

    @property
    def order(self) -> tuple[int, bool, bool]:
        """Later moments have larger ones."""
        return self.updates, not self.due, self.under_way


class OuterSteps:
    """Built on every rank of the plan, whose weights are the same everywhere then.

    Attributes:
        index: of this rank's island; places: by island, its ranks' places in the plan.
        updates: optimizer steps that were taken.
        fragments: in the order of their exchanges.
        exchange: the one that is under way.
        due: an exchange is to end before the next step.
    """

    def __init__(self, compiled: CompiledPlan, comm: Comm, optimizer: ShardedOptimizer) -> None:
        plan, outer = compiled.plan, compiled.plan.outer
        assert outer is not None
        self.outer, self.optimizer, self.comm = outer, optimizer, comm
        self.group = comm.group(plan.ranks, lane=-1)
        self.index, self.updates = outer.island(comm.rank), 0
        self.places = [[plan.ranks.index(rank) for rank in ranks] for ranks in outer.islands]
        owners = owners_by_island(outer, compiled.buckets)
        masters: dict[str, list[tuple[Box, torch.Tensor]]] = defaultdict(list)
        for name, box, master in optimizer.owned():
            masters[name].append((box, master))
        self.fragments = [
            self._fragment([(n, *own_masters) for n in names for own_masters in masters[n]], owners)
            for names in fragment_tensors(compiled.spec, outer)
        ]
        self.exchange: Exchange | None = None
        self.due, self._tokens = False, [0.0] * len(self.places)
        optimizer.after_update = self.after_update

    def _fragment(
        self, owned: Sequence[tuple[str, Box, torch.Tensor]], owners: Sequence[dict[str, Layout]]
    ) -> Fragment:
        pieces, order = [], {name: n for n, name in enumerate(dict.fromkeys(name for name, _, _ in owned))}
        common: dict[int, list[tuple[int, tuple[int, ...], int, Box]]] = defaultdict(list)
        for i, (name, box, master) in enumerate(owned):
            momentum = torch.zeros_like(master) if self.outer.momentum else None
            lost_values = torch.zeros_like(master) if self.outer.compressed else None
            pieces.append(OuterPiece(name, box, master, master.detach().clone(), momentum, lost_values))
            for island, layouts in enumerate(owners):
                if island == self.index:
                    continue
                own_layout = Layout(layouts[name].shape, {self.comm.rank: (box,)})
                for piece in reduction(own_layout, layouts[name]).pieces:
                    common[piece.dst].append((order[name], piece.box.lo, i, piece.box))
        # By tensor and place in it, which are the same on the other side, however that is cut.
        routes = {rank: [(i, box) for _, _, i, box in sorted(parts, key=_by_place)] for rank, parts in common.items()}
        counts = [self._count([box for _, box in routes.get(rank, ())]) for rank in self.group.ranks]
        return Fragment(pieces, routes, counts, [0.0] * len(self.places))

    def _count(self, boxes: Sequence[Box]) -> int:
        if self.outer.compressed:
            from hetero_megatron.parallel.compress import size_of

            return size_of(boxes, self.outer.compress)
        return sum(box.size for box in boxes)

    def take_weights(self) -> None:
        """The masters, which are the same on all islands, are the global weights from which training goes on."""
        for piece in self._pieces():
            piece.weights.copy_(piece.master)

    @torch.no_grad()
    def begin_from_global(self) -> None:
        """This island begins from the global weights, which others have moved already."""
        for piece in self._pieces():
            piece.master.copy_(piece.weights)

    def _pieces(self) -> Iterator[OuterPiece]:
        return (piece for fragment in self.fragments for piece in fragment.pieces)

    def count(self, tokens: Sequence[float]) -> None:
        """Of each island so many tokens count in the loss of the step that is about to be taken."""
        self._tokens = list(tokens)

    def moment(self) -> OuterMoment:
        has_sums = self.exchange is not None and self.exchange.sums is not None
        return OuterMoment(self.updates, [fragment.tokens for fragment in self.fragments], self.due, has_sums)

    def begin_at(self, moment: OuterMoment, islands: Sequence[int | None]) -> None:
        """Be at that moment, with zeros in place of the sums of an exchange that was under way.

        Args:
            islands: by island, which of the moment's it goes on with; None: it begins now.
        """
        self.updates, self.due, self.exchange = moment.updates, moment.due, None
        for fragment, tokens in zip(self.fragments, moment.tokens, strict=True):
            fragment.tokens = [0.0 if i is None else tokens[i] for i in islands]
        if moment.under_way:
            sums = [torch.zeros_like(piece.weights) for piece in self.current.pieces]
            self.exchange = Exchange(None, [], [], [], sums)

    @property
    def current(self) -> Fragment:
        """The one whose exchange is under way or due."""
        return self.fragments[(self.updates - 1) // self.outer.period % len(self.fragments)]

    @torch.no_grad()
    def after_update(self) -> bool:
        """The masters have changed. Begin or end an exchange, if it is time; called on all ranks.

        Returns:
            whether the masters have changed once more.

        Raises:
            CommError: a peer is gone.
        """
        self.updates += 1
        for fragment in self.fragments:
            fragment.tokens = [a + b for a, b in zip(fragment.tokens, self._tokens, strict=True)]
        self.due = self.updates % self.outer.period == 0
        return self.catch_up()

    @torch.no_grad()
    def catch_up(self) -> bool:
        """Begin or end the exchange that is to have begun, or ended, by now, also one that was torn; called on all
        ranks.

        Returns:
            whether the masters have changed.

        Raises:
            CommError: a peer is gone.
        """
        position = self.updates % self.outer.period
        if self.exchange is None and (self.due or position and position >= self.outer.period - self.outer.delay):
            self.exchange = self._start(self.current)
        if not self.due:
            return False
        self.comm.activity, fragment = "an outer step", self.current
        assert self.exchange is not None
        self._finish(fragment, self._settled(fragment, self.exchange))
        self.exchange, self.due = None, False
        return True

    def settle(self) -> None:
        """Wait for the exchange that is under way; called on all ranks."""
        if self.exchange is not None:
            self._settled(self.current, self.exchange)

    def _start(self, fragment: Fragment) -> Exchange:
        deltas = [piece.weights - piece.master for piece in fragment.pieces]
        codes = self._codes(fragment, deltas) if self.outer.compressed else []
        parts = self._compressed(fragment, codes) if self.outer.compressed else [
            deltas[i][box.slices(fragment.pieces[i].box)].reshape(-1)
            for r in self.group.ranks for i, box in fragment.routes.get(r, ())
        ]  # fmt: skip
        dtype = torch.uint8 if self.outer.compressed else self._dtype
        flat = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
        work = self.group.all_to_all(flat.to(self.comm.device), fragment.counts, fragment.counts)
        return Exchange(work, fragment.tokens, deltas, codes)

    def _codes(self, fragment: Fragment, deltas: Sequence[torch.Tensor]) -> list[Codes]:
        """Of differences, which get what earlier ones lost."""
        from hetero_megatron.parallel.compress import encode

        for piece, delta in zip(fragment.pieces, deltas, strict=True):
            assert piece.lost is not None
            delta.add_(piece.lost)
        return [encode(d, p.box, self.outer.compress) for p, d in zip(fragment.pieces, deltas, strict=True)]

    def _compressed(self, fragment: Fragment, codes: Sequence[Codes]) -> list[torch.Tensor]:
        """Messages in the order of ranks."""
        from hetero_megatron.parallel.compress import to_bytes

        routes = (fragment.routes[r] for r in self.group.ranks if r in fragment.routes)
        return [to_bytes([codes[i].part(box) for i, box in route], self.outer.compress) for route in routes]

    def _take_codes(self, fragment: Fragment, exchange: Exchange) -> None:
        """What is sent counts here, too; what it lost goes into the next one."""
        from hetero_megatron.parallel.compress import decode

        for piece, delta, codes in zip(fragment.pieces, exchange.deltas, exchange.codes, strict=True):
            assert piece.lost is not None
            decoded = decode(codes, delta.dtype)
            torch.sub(delta, decoded, out=piece.lost)
            delta.copy_(decoded)
        exchange.codes = []

    def _came(self, message: torch.Tensor, boxes: Sequence[Box]) -> Iterator[torch.Tensor]:
        """Differences of these boxes that another rank sent."""
        if self.outer.compressed:
            from hetero_megatron.parallel.compress import decode, from_bytes

            return (decode(codes, self._dtype) for codes in from_bytes(message, boxes, self.outer.compress))
        parts = message.split([box.size for box in boxes])
        return (part.view(box.shape) for box, part in zip(boxes, parts, strict=True))

    @property
    def _dtype(self) -> torch.dtype:
        params = self.optimizer.sync.params.values()
        return torch.promote_types(next(iter(params)).dtype, torch.float32)

    def _settled(self, fragment: Fragment, exchange: Exchange) -> list[torch.Tensor]:
        """The sums of the exchange, once they are here; from then on it is a part of the state."""
        if exchange.sums is not None:
            return exchange.sums
        assert exchange.work is not None
        received = exchange.work.wait()
        if self.comm.accelerator is not None:  # else a device would go on with what a torn transfer did not bring
            self.comm.accelerator.synchronize()
        self.comm.check()
        assert received is not None
        by_rank = dict(zip(self.group.ranks, received.split(fragment.counts), strict=True))
        if self.outer.compressed:
            self._take_codes(fragment, exchange)
        sums = [torch.zeros_like(delta) for delta in exchange.deltas]
        total = sum(exchange.tokens) or 1.0  # nothing counts where only islands are left that have just come
        shares = [tokens / total for tokens in exchange.tokens]
        for island, (ranks, share) in enumerate(zip(self.outer.islands, shares, strict=True)):
            if island == self.index:
                for own, delta in zip(sums, exchange.deltas, strict=True):
                    own += delta.mul_(share)  # a product added at once would be rounded as the memory happens to lie
                continue
            for rank in (rank for rank in ranks if rank in fragment.routes):
                route = fragment.routes[rank]
                message = by_rank[rank].to(sums[0].device)
                for (i, box), delta in zip(route, self._came(message, [box for _, box in route]), strict=True):
                    target = sums[i][box.slices(fragment.pieces[i].box)]
                    target += delta.mul_(share)
        fragment.tokens = [since - then for since, then in zip(fragment.tokens, exchange.tokens, strict=True)]
        exchange.work, exchange.deltas, exchange.sums = None, [], sums
        return sums

    def _finish(self, fragment: Fragment, sums: Sequence[torch.Tensor]) -> None:
        """SGD on the global weights, and what of it the island takes over."""
        outer = self.outer
        for piece, step in zip(fragment.pieces, sums, strict=True):
            if piece.momentum is not None:
                piece.momentum.mul_(outer.momentum).add_(step)
                step = step.add_(piece.momentum * outer.momentum) if outer.nesterov else piece.momentum
            piece.weights.sub_(step * outer.lr)
            if outer.mixing < 1:
                piece.master.sub_(piece.weights).mul_(outer.mixing).add_(piece.weights)

    def owned(self) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """(logical name, box, global weights) of what this rank owns; nothing outside the first island, which has
        all."""
        return ((p.name, p.box, p.weights) for p in self._pieces() if self.index == 0)

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Context in which the model has the global weights; called on all ranks."""
        self._swap()
        try:
            self.optimizer.all_gather()
            yield
        finally:  # also where a peer is lost meanwhile
            self._swap()
        self.optimizer.all_gather()

    @torch.no_grad()
    def _swap(self) -> None:
        for piece in self._pieces():
            own_master = piece.master.clone()
            piece.master.copy_(piece.weights)
            piece.weights.copy_(own_master)


_by_place = itemgetter(0, 1)
