"""Roles in a plan: models beside the one that is trained that only run forward, each on ranks of its own, cut as the
plan has it for that role (a generator: the trained model, which samples answers there); and which ranks hold what such
a model says of the samples of a batch, and what is sent between them.

Both plans cut a batch as they please. The index space is (sample of the batch, position); each rank with a head has the
boxes of its micro-batches, and what the boxes of two ranks have in common is one message. No torch."""

from __future__ import annotations

from typing import NamedTuple

from hetero_megatron.layout import Box, Layout, Transfer, transfer
from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.fields import Source, stages
from hetero_megatron.plans.shares import head_micro_batches

OTHER_MODELS = ("reference", "teacher")  # roles of models with weights of their own
GENERATOR = "generator"  # of the model that is trained
ROLES = (GENERATOR, *OTHER_MODELS)


def role_plan(plan: Plan, role: str) -> Plan | None:
    """The plan of a role; None: it has no ranks of its own."""
    return dict(plan.roles).get(role)


def roles_are_apart(plan: Plan, source: Source) -> None:
    """Every rank has one role."""
    place_of_rank = {rank: source.spelled(path) for path, _, stage in stages(plan) for rank in stage.ranks}
    for name, other in plan.roles:
        for path, _, stage in stages(other):
            for rank in stage.ranks:
                if rank in place_of_rank:
                    problem = f"rank {rank} has a role already, in {place_of_rank[rank]}"
                    accepted = "ranks that train nothing, and have no other role"
                    raise source.error(problem, f"roles.{name}.{path}.ranks", rank, accepted)
        place_of_rank |= dict.fromkeys(other.ranks, f"roles.{name}")


class HeadPart(NamedTuple):
    """Samples [begin, end) of a batch, and the intervals of tokens of each that a rank has, strung together."""

    begin: int
    end: int
    tokens: tuple[tuple[int, int], ...]

    def slices(self, box: Box) -> tuple[slice, slice] | None:
        """Where a box of the batch is in the part; None: not in it."""
        offset = 0
        for a, b in self.tokens:
            if Box((self.begin, a), (self.end, b)).contains(box):
                rows, columns = box.slices(Box((self.begin, a - offset), (self.end, b)))
                return rows, columns
            offset += b - a
        return None


def head_parts(plan: Plan, batch_size: int, whole: bool = False) -> dict[int, list[HeadPart]]:
    """By rank with a head, its micro-batches of a batch; ``whole``: all positions of their samples, also where ranks
    divide them."""
    parts: dict[int, list[HeadPart]] = {}
    for _, unit, (begin, end) in head_micro_batches(plan, batch_size):
        for rank in unit.ranks if begin < end else ():
            parts.setdefault(rank, []).append(HeadPart(begin, end, ((0, plan.seq_length),) if whole else unit.tokens))
    return parts


def head_layout(plan: Plan, batch_size: int, whole: bool = False) -> Layout:
    """Over (sample of the batch, position): who has the head for what; ``whole``: as of :func:`head_parts`."""
    boxes = {
        rank: tuple(Box((part.begin, a), (part.end, b)) for part in parts for a, b in part.tokens)
        for rank, parts in head_parts(plan, batch_size, whole).items()
    }
    return Layout((batch_size, plan.seq_length), boxes)


def score_transfer(source: Plan, target: Plan, batch_size: int, whole: bool) -> Transfer:
    """What ranks of the role's plan ``source`` send to those of ``target`` for a batch."""
    return transfer(head_layout(source, batch_size, whole), head_layout(target, batch_size, whole))
