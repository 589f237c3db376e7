"""Training state as boxes in ranks' memories: which step it is of, who holds what, and how it moves to other owners.

A rank holds parts of the state of one or more steps: what it owns, copies of what a peer owned, both of a step that
others may not have completed. All ranks say what they hold; the newest step whose boxes cover every tensor is the one
to go on from, and what moves is the transfer from the layout of these holders to that of the new plan's owners."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from hetero_megatron.checkpoint.state import MODEL, OPTIMIZER, make_states, merge_numbers, owned_tensors, states_of
from hetero_megatron.comm import Group
from hetero_megatron.layout import Box, Layout, Piece, refine, tiles, transfer
from hetero_megatron.parallel.optimizer import ShardedOptimizer
from hetero_megatron.plans.compile import CompiledPlan
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
    """

    moment: Moment
    kinds: tuple[str, ...]
    layouts: Mapping[str, Layout]
    ranks: tuple[int, ...]


def owned_state(optimizer: ShardedOptimizer, spec: ModelSpec) -> tuple[Boxed, dict[str, float]]:
    """(boxes that this rank owns, in the optimizer's own memory; the optimizer's numbers)."""
    tensors, numbers = owned_tensors(optimizer, spec)
    return {name: list(tensor.parts.values()) for name, tensor in tensors.items()}, numbers


def newest(said: Sequence[Sequence[Holding]], spec: ModelSpec) -> HeldMoment | None:
    """Of what each rank says it holds, the newest moment that is complete; None: no moment is."""
    holders = [(rank, holding) for rank, holdings in enumerate(said) for holding in holdings]
    for step in sorted({holding.moment.step for _, holding in holders}, reverse=True):
        of_step = [(rank, holding) for rank, holding in holders if holding.moment.step == step]
        boxes: dict[str, dict[int, tuple[Box, ...]]] = defaultdict(dict)
        for i, (_, holding) in enumerate(of_step):
            for name, parts in holding.boxes.items():
                boxes[name][i] = tuple(parts)
        kinds = tuple(sorted({name.split(".")[1] for name in boxes if name.startswith(OPTIMIZER + ".")}))
        layouts = {}
        for name, shape in _wanted(spec, kinds):
            layout = Layout(shape, boxes.get(name, {}))
            if not _covers(layout):
                break
            layouts[name] = layout
        else:
            moments = [holding.moment for _, holding in of_step]
            numbers = merge_numbers([moment.numbers for moment in moments])
            first = moments[0]
            return HeldMoment(
                Moment(step, first.consumed, first.scale, numbers), kinds, layouts, tuple(r for r, _ in of_step)
            )
    return None


def _wanted(spec: ModelSpec, kinds: Sequence[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of a complete state."""
    for tensor in trained_tensors(spec):
        yield f"{MODEL}.{tensor.name}", tensor.shape
        for kind in () if tensor.by_load else states_of(tensor, kinds):
            yield f"{OPTIMIZER}.{kind}.{tensor.name}", tensor.shape


def _covers(layout: Layout) -> bool:
    whole_box, boxes = Box.whole(layout.shape), {box for _, box in layout.items()}
    return tiles(whole_box, boxes) or sum(cell.box.size for cell in refine(layout)) == whole_box.size


def restore(
    source: HeldMoment, held: Sequence[Held], optimizer: ShardedOptimizer | None, compiled: CompiledPlan, group: Group
) -> int:
    """Fill what the owners under ``compiled`` own, from whoever holds it. Called on all ranks of the job.

    Args:
        held: what this rank said that it holds, in that order.
        optimizer: None on a rank that is not in the plan, which only gives.
        group: all ranks of the job, ascending.

    Returns:
        bytes that this rank sent.
    """
    same_moment = [h for h in held if h.moment.step == source.moment.step]
    holders = [i for i, rank in enumerate(source.ranks) if rank == group.comm.rank]
    tensors_by_holder = {
        i: {name: dict(parts) for name, parts in h.tensors.items()} for i, h in zip(holders, same_moment, strict=True)
    }
    taken: Boxed = {}
    if optimizer is not None:
        make_states(optimizer, source.kinds, source.moment.numbers)
        taken, _ = owned_state(optimizer, compiled.spec)
    final = (bucket for bucket in compiled.buckets if bucket.onward is None)
    owners = {name: layout for bucket in final for name, layout in bucket.owners.items()}
    sent = 0
    for names in _batches(source.layouts):
        pieces = [(name, *_piece(piece, source)) for name in names for piece in moves(name, source, owners)]
        sent += _move(pieces, tensors_by_holder, taken, group)
    if optimizer is not None:
        optimizer.all_gather()
    return sent


def _batches(layouts: Mapping[str, Layout]) -> Iterator[list[str]]:
    """Names in order, so many at once that little memory is needed beside them."""
    total, batch_of = 0, {}
    for name, layout in layouts.items():
        batch_of[name] = total // MOST_ELEMENTS
        total += Box.whole(layout.shape).size
    for _, names in groupby(layouts, batch_of.__getitem__):
        yield list(names)


def moves(name: str, source: HeldMoment, owners: Mapping[str, Layout]) -> tuple[Piece, ...]:
    """From holders to owners, of which rank r has the number -1 - r; where it can, nothing leaves its rank."""
    logical = name.split(".", 1 if name.startswith(MODEL + ".") else 2)[-1]
    layout = owners[logical]
    numbered = Layout(layout.shape, {-1 - rank: boxes for rank, boxes in layout.boxes.items()})
    return transfer(source.layouts[name], numbered, lambda holder, to: float(source.ranks[holder] != -1 - to)).pieces


def _piece(piece: Piece, source: HeldMoment) -> tuple[int, int, int, Box]:
    """(holder, its rank, the owner's rank, which box)."""
    return piece.src, source.ranks[piece.src], -1 - piece.dst, piece.box


Move = tuple[str, int, int, int, Box]  # name, holder, its rank, the owner's rank, which box


@torch.no_grad()
def _move(
    pieces: Sequence[Move], given: Mapping[int, Mapping[str, Mapping[Box, torch.Tensor]]], taken: Boxed, group: Group
) -> int:
    """Both sides list what passes between two ranks in one order, so no index travels with the data. It passes through
    host memory, where copies are, and all ranks have some."""
    own_rank = group.comm.rank
    outgoing: dict[int, list[torch.Tensor]] = defaultdict(list)
    incoming: dict[int, list[torch.Tensor]] = defaultdict(list)
    for name, holder, src, dst, box in pieces:
        if src == own_rank:
            outgoing[dst].append(_part(given[holder][name].items(), box))
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
