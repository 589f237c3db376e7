"""Training state as boxes in ranks' memories: which step it is of, who holds what, and how it moves to other owners.

A rank holds parts of the state of one or more steps: what it owns, copies of what a peer owned, both of a step that
others may not have completed. All ranks say what they hold; the newest step whose boxes cover every tensor is the one
to go on from, and what moves is the transfer from the layout of these holders to that of the new plan's owners.

With outer steps a step is complete where one island's state is, for that has the global one, too; of those that are,
the one counts of which most islands are complete. An island that is not begins from the global weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import torch

from hetero_megatron.checkpoint.outer_state import outer_tensors, source_of
from hetero_megatron.checkpoint.state import (
    ISLAND,
    MODEL,
    OPTIMIZER,
    logical_name,
    make_states,
    merge_numbers,
    owned_tensors,
    states_of,
)
from hetero_megatron.comm import Group
from hetero_megatron.layout import Box, Layout, Piece, refine, tiles, transfer
from hetero_megatron.parallel.optimizer import ShardedOptimizer
from hetero_megatron.parallel.outer_steps import OuterMoment, OuterSteps
from hetero_megatron.plans.canonical import Outer
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.outer import owners_by_island
from hetero_megatron.spec import ModelSpec, trained_tensors

Boxed = dict[str, list[tuple[Box, torch.Tensor]]]
MOST_ELEMENTS = 8 << 20  # of tensors that move at once, together


@dataclass(frozen=True)
class Moment:
    """Where a run was: steps and sequences that are done, the state of the loss scale, and the optimizer's numbers."""

    step: int
    consumed: int
    scale: dict[str, float]
    numbers: dict[str, float]
    outer: OuterMoment | None = None

    @property
    def order(self) -> tuple[int, ...]:
        """Later moments have larger ones."""
        return (self.step, *(self.outer.order if self.outer is not None else ()))


@dataclass(frozen=True)
class Held:
    """Parts of the state at a moment, by name as in a checkpoint."""

    moment: Moment
    tensors: Boxed

    def said(self) -> Holding:
        return Holding(self.moment, {name: [box for box, _ in parts] for name, parts in self.tensors.items()})


@dataclass(frozen=True)
class Holding:
    """The same without values."""

    moment: Moment
    boxes: dict[str, list[Box]]


@dataclass(frozen=True)
class HeldMoment:
    """The moment to go on from, and who holds its state.

    Attributes:
        kinds: of the optimizer's states (``exp_avg``, …).
        layouts: by name, which boxes each holder has; ranks: of the holders.
        islands: of outer steps, those whose state is complete.
    """

    moment: Moment
    kinds: tuple[str, ...]
    layouts: Mapping[str, Layout]
    ranks: tuple[int, ...]
    islands: tuple[int, ...] = ()


def owned_state(
    optimizer: ShardedOptimizer, spec: ModelSpec, outer: OuterSteps | None = None
) -> tuple[Boxed, dict[str, float]]:
    """(boxes that this rank owns, in the optimizer's own memory; the optimizer's numbers)."""
    if outer is not None:
        tensors, numbers = outer_tensors(outer, spec, True, reading=True)
    else:
        tensors, numbers = owned_tensors(optimizer, spec)
    return {name: list(tensor.parts.values()) for name, tensor in tensors.items()}, numbers


def newest(said: Sequence[Sequence[Holding]], spec: ModelSpec) -> HeldMoment | None:
    """Of what each rank says it holds, the newest moment that is complete; None: no moment is."""
    by_moment: dict[tuple[int, ...], list[tuple[int, Holding]]] = defaultdict(list)
    for rank, holdings in enumerate(said):
        for holding in holdings:
            by_moment[holding.moment.order].append((rank, holding))
    most = max((_islands(holders) for holders in by_moment.values()), default=0)
    best: HeldMoment | None = None
    for _, holders in sorted(by_moment.items(), key=itemgetter(0), reverse=True):
        found = _complete(holders, spec)
        if found is not None and (best is None or len(found.islands) > len(best.islands)):
            best = found
        if best is not None and len(best.islands) == most:  # what is older is not looked at
            break
    return best


def _islands(holders: Sequence[tuple[int, Holding]]) -> int:
    """Of outer steps, those that the moment knows; 0 without."""
    outer = holders[0][1].moment.outer
    return len(outer.tokens[0]) if outer is not None else 0


def _complete(holders: Sequence[tuple[int, Holding]], spec: ModelSpec) -> HeldMoment | None:
    """What there is of a moment that each of them says it holds; None: too little to go on from."""
    boxes: dict[str, dict[int, tuple[Box, ...]]] = defaultdict(dict)
    for i, (_, holding) in enumerate(holders):
        for name, parts in holding.boxes.items():
            boxes[name][i] = tuple(parts)
    moments = [holding.moment for _, holding in holders]
    first, outer = moments[0], moments[0].outer
    kinds = tuple(sorted({kind for name in boxes if (kind := _kind(name))}))
    shapes = {tensor.name: tensor.shape for tensor in trained_tensors(spec)}
    layouts = {name: Layout(shapes[logical_name(name)], by_holder) for name, by_holder in boxes.items()}
    prefixes = [""] if outer is None else [f"{ISLAND}.{i}." for i in range(_islands(holders))]
    whole = [all(name in layouts and _covers(layouts[name]) for name in _wanted(spec, kinds, p)) for p in prefixes]
    if not any(whole):
        return None
    numbers = merge_numbers([moment.numbers for moment in moments])
    missing = tuple(prefix for prefix, is_whole in zip(prefixes, whole, strict=True) if not is_whole)
    return HeldMoment(
        replace(first, numbers=numbers), kinds, {n: x for n, x in layouts.items() if not n.startswith(missing)},
        tuple(rank for rank, _ in holders),
        tuple(i for i, is_whole in enumerate(whole) if is_whole and outer is not None),
    )  # fmt: skip


def _kind(name: str) -> str | None:
    """Of an optimizer's state."""
    parts = name.split(".", 4)
    parts = parts[2:] if parts[0] == ISLAND else parts
    return parts[1] if parts[0] == OPTIMIZER else None


def _wanted(spec: ModelSpec, kinds: Sequence[str], prefix: str) -> Iterator[str]:
    """Names of all tensors of a complete state, or of an island's."""
    for tensor in trained_tensors(spec):
        yield f"{prefix}{MODEL}.{tensor.name}"
        for kind in () if tensor.by_load else states_of(tensor, kinds):
            yield f"{prefix}{OPTIMIZER}.{kind}.{tensor.name}"


def _covers(layout: Layout) -> bool:
    whole_box, boxes = Box.whole(layout.shape), {box for _, box in layout.items()}
    return tiles(whole_box, boxes) or sum(cell.box.size for cell in refine(layout)) == whole_box.size


def origins(source: HeldMoment, outer: Outer) -> list[int | None]:
    """By island of the plan, which island of the source it goes on with: the one of which its ranks hold most, as long
    as there are some; None: it begins from the global weights."""
    held: dict[tuple[int, int], int] = {}
    for name, layout in source.layouts.items():
        for island in source.islands if name.startswith(f"{ISLAND}.") else ():
            if name.startswith(f"{ISLAND}.{island}.{MODEL}."):
                for holder in layout.ranks:
                    to = next((i for i, ranks in enumerate(outer.islands) if source.ranks[holder] in ranks), None)
                    if to is not None:
                        held[to, island] = held.get((to, island), 0) + layout.elements(holder)
    found: list[int | None] = [None] * len(outer.islands)
    for to, island in sorted(held, key=lambda pair: (-held[pair], pair)):
        if found[to] is None and island not in found:
            found[to] = island
    left = [island for island in source.islands if island not in found]
    return [left.pop(0) if island is None and left else island for island in found]


@dataclass(frozen=True)
class Target:
    """A tensor of the new state: its name there, that of the one of the source that it comes from, and its owners."""

    name: str
    source: str
    owners: Layout


def targets(source: HeldMoment, compiled: CompiledPlan) -> list[Target]:
    """Whatever has to come from somewhere. Where only one side has outer steps, weights are the global ones, moments
    those of one island."""
    outer, names = compiled.plan.outer, source.layouts
    by_island = owners_by_island(outer, compiled.buckets)
    everywhere = {
        name: Layout(layout.shape, {r: b for island in by_island for r, b in island[name].boxes.items()})
        for name, layout in by_island[0].items()
    }
    if source.moment.outer is None:
        return [Target(name, name, everywhere[logical_name(name)]) for name in names]
    first = f"{ISLAND}.{source.islands[0]}."
    own = [name.removeprefix(first) for name in names if name.startswith(first)]
    if outer is None:
        moments = [name for name in own if name.startswith(f"{OPTIMIZER}.")]
        pairs = [(name, name) for name in names if name.startswith(f"{MODEL}.")] + [(n, first + n) for n in moments]
        return [Target(name, origin, everywhere[logical_name(name)]) for name, origin in pairs]
    islands = origins(source, outer)
    found = [Target(n, n, everywhere[logical_name(n)]) for n in names if not n.startswith(f"{ISLAND}.")]
    for i, owners in enumerate(by_island):
        for name in own:
            origin = source_of(f"{ISLAND}.{i}.{name}", islands, first, outer.compressed)
            if origin is not None:
                found.append(Target(f"{ISLAND}.{i}.{name}", origin, owners[logical_name(name)]))
    return found


def restore(
    source: HeldMoment, held: Sequence[Held], optimizer: ShardedOptimizer | None, compiled: CompiledPlan, group: Group,
    outer: OuterSteps | None = None,
) -> int:  # fmt: skip
    """Fill what the owners under ``compiled`` own, from whoever holds it. Called on all ranks of the job. An exchange
    of outer steps that was torn is made anew, between the islands that are there.

    Args:
        held: what this rank said that it holds, in that order.
        optimizer: None on a rank that is not in the plan, which only gives.
        group: all ranks of the job, ascending.

    Returns:
        bytes that this rank sent.
    """
    same_moment = [h for h in held if h.moment.order == source.moment.order]
    holders = [i for i, rank in enumerate(source.ranks) if rank == group.comm.rank]
    tensors_by_holder = {
        i: {name: dict(parts) for name, parts in h.tensors.items()} for i, h in zip(holders, same_moment, strict=True)
    }
    taken: Boxed = {}
    islands: list[int | None] = []
    if optimizer is not None:
        make_states(optimizer, source.kinds, source.moment.numbers)
        if outer is not None and source.moment.outer is not None:
            islands = origins(source, outer.outer)
            outer.begin_at(source.moment.outer, islands)
        taken, _ = owned_state(optimizer, compiled.spec, outer if islands else None)
    sent = 0
    for batch in _batches(targets(source, compiled)):
        pieces = [(target.name, target.source, *_piece(piece, source)) for target in batch
                  for piece in moves(source.layouts[target.source], source.ranks, target.owners)]  # fmt: skip
        sent += _move(pieces, tensors_by_holder, taken, group)
    if outer is not None:
        if not islands:
            outer.take_weights()
        elif islands[outer.index] is None:
            outer.begin_from_global()
        outer.catch_up()
    if optimizer is not None:
        optimizer.all_gather()
    return sent


def _batches(found: Sequence[Target]) -> Iterator[list[Target]]:
    """In order, so many at once that little memory is needed beside them."""
    total, batch_of = 0, []
    for target in found:
        batch_of.append(total // MOST_ELEMENTS)
        total += Box.whole(target.owners.shape).size
    for _, batch in groupby(zip(batch_of, found, strict=True), lambda pair: pair[0]):
        yield [target for _, target in batch]


def moves(held: Layout, ranks: Sequence[int], owners: Layout) -> tuple[Piece, ...]:
    """From holders, which are on these ranks, to owners, of which rank r has the number -1 - r; where it can, nothing
    leaves its rank."""
    numbered = Layout(owners.shape, {-1 - rank: boxes for rank, boxes in owners.boxes.items()})
    return transfer(held, numbered, lambda holder, to: float(ranks[holder] != -1 - to)).pieces


def _piece(piece: Piece, source: HeldMoment) -> tuple[int, int, int, Box]:
    """(holder, its rank, the owner's rank, which box)."""
    return piece.src, source.ranks[piece.src], -1 - piece.dst, piece.box


Move = tuple[str, str, int, int, int, Box]  # target, its source, holder, its rank, the owner's rank, which box


@torch.no_grad()
def _move(
    pieces: Sequence[Move], given: Mapping[int, Mapping[str, Mapping[Box, torch.Tensor]]], taken: Boxed, group: Group
) -> int:
    """Both sides list what passes between two ranks in one order, so no index travels with the data. It passes through
    host memory, where copies are, and all ranks have some."""
    own_rank = group.comm.rank
    outgoing: dict[int, list[torch.Tensor]] = defaultdict(list)
    incoming: dict[int, list[torch.Tensor]] = defaultdict(list)
    for name, source, holder, src, dst, box in pieces:
        if src == own_rank:
            outgoing[dst].append(_part(given[holder][source].items(), box))
        if dst == own_rank:
            incoming[src].append(_part(taken[name], box))
    for target, values in zip(incoming.pop(own_rank, []), outgoing.pop(own_rank, []), strict=True):
        target.copy_(values)
    sent_bytes = [sum(part.nbytes for part in outgoing[rank]) for rank in group.ranks]
    takes_bytes = [sum(part.nbytes for part in incoming[rank]) for rank in group.ranks]
    parts = (as_bytes(part).cpu() for rank in group.ranks for part in outgoing[rank])
    flat = torch.cat([torch.empty(0, dtype=torch.uint8), *parts])
    received = group.all_to_all(flat, sent_bytes, takes_bytes).wait()
    assert received is not None
    offset = 0
    for part in (part for rank in group.ranks for part in incoming[rank]):
        values = received[offset : offset + part.nbytes].clone().view(part.dtype)  # a view would have to be aligned
        part.copy_(values.view(part.shape))
        offset += part.nbytes
    return sum(sent_bytes)


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    return part.detach().contiguous().view(-1).view(torch.uint8)


def _part(parts: Iterable[tuple[Box, torch.Tensor]], box: Box) -> torch.Tensor:
    """The values of a box inside one of ``parts``."""
    origin, values = next((o, v) for o, v in parts if o.contains(box))
    return values.detach()[box.slices(origin)]
