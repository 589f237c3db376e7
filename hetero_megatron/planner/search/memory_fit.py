"""Recompute and shares of optimizer states that fit exactly: with states on the ranks that will have them.

The search's tables divide states evenly among the replicas of a pipeline. Where memory binds that is wrong either way:
replicas with other TP or inner DP degrees own other parts, small tensors are owned whole, and of the buckets only the
two largest neighbours travel at once. None of that depends on recompute, so the room that states leave on every rank is
computed once per way in which stages lie on ranks, and each stage then takes its fastest level that fits into it.

Where that is not the level that it could have without any states, and replicas have room to spare, they may take over:
each stage's share of the states it holds copies of (``optimizer: {share: n}`` in a plan) is lowered by how much it is
over, as often as that helps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hetero_megatron.plan.memory import (
    MemoryBytes,
    bucket_elements,
    equal_shares,
    held_elements,
    state_bytes,
)
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.simulate.memory_report import estimate_memory
from hetero_megatron.planner.template.placement import PlacedTemplate, to_plan
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate, StageTemplate, in_flight

Level = tuple[float, StageTemplate, int, int]  # backward seconds, the stage, bytes kept per micro-batch, working bytes
Key = tuple[object, ...]
At = tuple[int, int]  # pipeline, stage
Spans = list[tuple[float, list[At]]]
MEAN = 0.95  # of the mean of states each rank of a stage owns at least
BALANCING = 40  # rounds of lowering shares by formula
ROUNDS = 2  # the same with states placed exactly
TIGHT = 0.999  # of the memory that states may take is used: small tensors are owned whole
FINEST = 100  # largest share


@dataclass(frozen=True)
class StateRoom:
    """Bytes of one rank: ``free`` beside weights, gradients and overhead, its part of the optimizer, and buckets."""

    free: int
    optimizer: int
    buffers: int

    @property
    def room(self) -> int:
        """For activations; -1 where states and buckets alone do not fit."""
        room = self.free - self.optimizer
        return room if self.buffers <= room else -1


class MemoryFit:
    """Fits candidates of one scorer, whose parts are single pipelines.

    Args:
        recompute: one level for all stages, or None for the fastest of each.
        shares: whether replicas may own unequal shares of the states.
    """

    def __init__(self, scorer: TemplateScorer, recompute: str | None = None, shares: bool = True) -> None:
        self.scorer, self.recompute, self.shares = scorer, recompute, shares
        self.computed = 0  # placements whose states were counted
        self._known: dict[Key, dict[int, MemoryBytes]] = {}
        self._levels: dict[Key, list[Level]] = {}
        self._known_limits: dict[Key, tuple[int, int]] = {}

    def fits(self, placed: PlacedTemplate) -> tuple[list[PlanTemplate], PlanTemplate | None]:
        """(the candidate with the fastest recompute of each stage that fits on all its ranks, with equal shares and,
        where these cost recompute or do not fit, with unequal ones; None, or a candidate that no way to fit it beats
        where other shares were not ruled out)."""
        candidate = placed.template
        least, sure = self._without_states(candidate)
        if least is None:
            return [], None
        if sure:
            return [candidate_of(candidate, least)], None
        spans, stages, found, even = self._spans(placed), _stages(placed), [], None
        if self._may_fit(placed, spans):
            even = self._choose(placed, {rank: s.room for rank, s in self.states(placed).items()})
            if even is not None:
                found.append(candidate_of(candidate, even))
        if not self.shares or len(candidate.parts) == 1 or least == even:
            return found, None
        if not _divisible(spans, stages, self._room(placed, None)):
            return found, None
        shared = self._shared(placed, least, spans)
        if shared is not None:
            return [*found, candidate_of(candidate, shared)], None
        return found, candidate_of(candidate, least)

    def _without_states(self, candidate: PlanTemplate) -> tuple[list[list[Level]] | None, bool]:
        """(the fastest level of each stage as if others owned its states and buckets took no memory, None if a stage or
        all states do not fit even so; whether that fits whoever owns them)."""
        ranks = sum(part.shape.chips for part in candidate.parts)
        rows, sure, left = [], True, -self._all_states
        for part in candidate.parts:
            last, size = len(part.shape.stages) - 1, part.shape.micro_batch_size
            alive = in_flight(candidate.schedule, last + 1, part.num_micro_batches)
            row = []
            for s, stage in enumerate(part.shape.stages):
                free, most = self._limits(stage, s == 0, s == last, ranks)
                level = self.fastest(stage, size, s == 0, s == last, alive[s], free)
                if level is None:
                    return None, False
                row.append(level)
                sure = sure and alive[s] * level[2] + level[3] <= most
                least = min(alive[s] * kept + work for _, _, kept, work in self.levels(stage, size, s == 0, s == last))
                left += stage.chips * (free - least)
            rows.append(row)
        return (rows if left >= 0 else None), sure

    def _limits(self, stage: StageTemplate, embed: bool, head: bool, ranks: int) -> tuple[int, int]:
        """Bytes for activations on the stage's fullest rank when it owns no states, and when it owns all that it holds
        and what all ``ranks`` hold of its largest buckets arrives at once."""
        key = (stage.group, stage.tp, stage.layers, embed, head, ranks)
        if key not in self._known_limits:
            costs = self.scorer.costs
            choice = self.scorer.tables.choice(stage, embed, head)
            held = costs.held_elements(choice)
            weights, gradients, optimizer = state_bytes(held, held, costs.item, costs.options.moments)
            free = costs.memory_limit(choice.chip) - costs.overhead(choice.chip) - weights - gradients
            known = [bucket_elements(costs.model, embed, head, x) for x in equal_shares(costs.model, stage.tp)]
            buckets = min(held, max(together for _, together in known)) * costs.wide * ranks if ranks > 1 else 0
            room = free - optimizer
            self._known_limits[key] = free, room if buckets <= room else -1
        return self._known_limits[key]

    @cached_property
    def _all_states(self) -> int:
        """Bytes of all optimizer states."""
        costs = self.scorer.costs
        total = held_elements(costs.model, costs.model.num_layers, True, True, equal_shares(costs.model, 1)[0])
        return state_bytes(total, total, costs.item, costs.options.moments)[2]

    def _choose(self, placed: PlacedTemplate, rooms: Mapping[int, int]) -> list[list[Level]] | None:
        """By pipeline and stage, the fastest level that fits into the rooms of all its ranks."""
        found = []
        for shape, m, units in placed.pipelines:
            alive = in_flight(placed.template.schedule, len(shape.stages), m)
            row = []
            for s, stage in enumerate(shape.stages):
                room = min(rooms[rank] for unit in units[s] for rank in unit)
                level = self.fastest(stage, shape.micro_batch_size, s == 0, s == len(alive) - 1, alive[s], room)
                if level is None:
                    return None
                row.append(level)
            found.append(row)
        return found

    def _may_fit(self, placed: PlacedTemplate, spans: Spans) -> bool:
        """Whether states come near to fitting with equal shares."""
        stages = _stages(placed)
        owned = _owned(spans, stages, dict.fromkeys(stages, 1.0))
        return all(MEAN * owned[at] <= room for at, room in self._room(placed, None).items())

    def _room(self, placed: PlacedTemplate, levels: list[list[Level]] | None) -> dict[At, int]:
        """By stage: bytes that states may take on a rank, with these levels or those that keep least."""
        ranks = sum(part.shape.chips for part in placed.template.parts)
        found = {}
        for p, (shape, m, _) in enumerate(placed.pipelines):
            last = len(shape.stages) - 1
            alive = in_flight(placed.template.schedule, last + 1, m)
            for s, stage in enumerate(shape.stages):
                rows = [levels[p][s]] if levels else self.levels(stage, shape.micro_batch_size, s == 0, s == last)
                free = self._limits(stage, s == 0, s == last, ranks)[0]
                found[p, s] = free - min(alive[s] * kept + work for _, _, kept, work in rows)
        return found

    def _shared(self, placed: PlacedTemplate, levels: list[list[Level]], spans: Spans) -> list[list[Level]] | None:
        """These levels with shares under which they fit; None where none were found."""
        rooms = self._room(placed, levels)
        for p, (_, _, units) in enumerate(placed.pipelines):
            for s, stage in enumerate(units):  # buckets change little with shares
                own = [self.states(placed)[rank] for unit in stage for rank in unit]
                rooms[p, s] = min(rooms[p, s], *(x.free - x.buffers for x in own))
        if not _divisible(spans, _stages(placed), rooms):
            return None
        weights = self._balanced(placed, spans, rooms)
        for _ in range(ROUNDS if weights is not None else 0):
            assert weights is not None
            largest = max(w for row in weights for w in row)
            shares = [[max(1, round(FINEST * w / largest)) for w in row] for row in weights]
            common = math.gcd(*(n for row in shares for n in row))
            shares = [[n // common for n in row] for row in shares]
            shared = [
                [(seconds, replace(stage, share=n), kept, work) for (seconds, stage, kept, work), n in zip(row, ns)]
                for row, ns in zip(levels, shares)
            ]  # fmt: skip
            pipelines = tuple((_shape(p[0], row), *p[1:]) for p, row in zip(placed.pipelines, shared))
            states = self.states(replace(placed, pipelines=pipelines))
            over = [
                [max(_over(states[r], rooms[p, s]) for unit in stage for r in unit) for s, stage in enumerate(units)]
                for p, (_, _, units) in enumerate(placed.pipelines)
            ]
            if max(map(max, over)) <= 1:
                return shared
            weights = [[n / (x * 1.02) if x > 1 else n for n, x in zip(ns, row)] for ns, row in zip(shares, over)]
        return None

    def _spans(self, placed: PlacedTemplate) -> Spans:
        """(bytes of the states, stages that hold them) of each run of layers with the same holders, and of the ends."""
        costs, share = self.scorer.costs, equal_shares(self.scorer.costs.model, 1)[0]
        starts = [list(itertools.accumulate((s.layers for s in x.stages), initial=0)) for x, _, _ in placed.pipelines]
        cuts = sorted({n for row in starts for n in row})

        def state(layers: int, embed: bool, head: bool) -> float:
            held = held_elements(costs.model, layers, embed, head, share)
            return float(state_bytes(held, held, costs.item, costs.options.moments)[2])

        found = [(state(0, True, False), [(p, 0) for p in range(len(starts))])]
        for a, b in itertools.pairwise(cuts):
            holders = [
                (p, s) for p, row in enumerate(starts) for s, (lo, hi) in enumerate(itertools.pairwise(row))
                if lo <= a and b <= hi
            ]  # fmt: skip
            found.append((state(b - a, False, False), holders))
        return [*found, (state(0, False, True), [(p, len(row) - 2) for p, row in enumerate(starts)])]

    def _balanced(self, placed: PlacedTemplate, spans: Spans, rooms: Mapping[At, int]) -> list[list[float]] | None:
        """Weights under which no stage's ranks own more than they may if states were divided exactly by weight; None
        where lowering what is over does not lead there."""
        stages = _stages(placed)
        weight = dict.fromkeys(stages, 1.0)
        for _ in range(BALANCING):
            owned = _owned(spans, stages, weight)
            over = {at: own / (TIGHT * rooms[at]) if rooms[at] > 0 else math.inf for at, own in owned.items()}
            if max(over.values()) <= 1:
                return [[weight[p, s] for s in range(len(x.stages))] for p, (x, _, _) in enumerate(placed.pipelines)]
            if min(over.values()) >= 1:
                return None
            # A little more than needed, or it would come ever closer and never there.
            weight = {at: w / (over[at] * 1.003) if over[at] > 1 else w for at, w in weight.items()}
            if min(weight.values()) * FINEST < max(weight.values()):
                return None
        return None

    def states(self, placed: PlacedTemplate) -> dict[int, StateRoom]:
        """By rank. What ranks hold and own does not depend on their chips, so placements that differ in these alone are
        counted once."""
        costs = self.scorer.costs
        ranks = sorted(rank for _, _, units in placed.pipelines for stage in units for unit in stage for rank in unit)
        number = {rank: i for i, rank in enumerate(ranks)}
        lies = tuple(
            tuple(tuple(tuple(number[r] for r in u) for u in stage) for stage in x) for _, _, x in placed.pipelines
        )
        what = tuple(tuple((s.layers, s.share) for s in shape.stages) for shape, _, _ in placed.pipelines)
        if (lies, what) not in self._known:
            self.computed += 1
            # Neither recompute nor the number of micro-batches changes states; the plan is only looked at, never run.
            pipelines = tuple((_plain(x), 1, units) for (x, _, _), units in zip(placed.pipelines, lies, strict=True))
            plan = to_plan(replace(placed, pipelines=pipelines), costs.cluster, costs.seq_length, costs.model.num_heads)
            self._known[lies, what] = estimate_memory(plan, costs.model, costs.dtype, costs.options.moments)
        known, found = self._known[lies, what], {}
        for rank, i in number.items():
            chip, needs = costs.cluster.ranks[rank].chip, known[i]
            optimizer = needs.optimizer
            if not costs.options.sharded:
                held = needs.weights // costs.item
                optimizer = state_bytes(held, held, costs.item, costs.options.moments)[2]
            free = costs.memory_limit(chip) - costs.overhead(chip) - needs.weights - needs.gradients
            found[rank] = StateRoom(free, optimizer, needs.buffers)
        return found

    def fastest(self, stage: StageTemplate, size: int, embed: bool, head: bool, alive: int, room: int) -> Level | None:
        """The fastest recompute whose activations take at most ``room`` bytes."""
        if room < 0:
            return None
        levels = self.levels(stage, size, embed, head)
        return next((row for row in levels if alive * row[2] + row[3] <= room), None)

    def levels(self, stage: StageTemplate, size: int, embed: bool, head: bool) -> list[Level]:
        """Fastest first."""
        key = (stage.group, stage.tp, stage.dp, stage.layers, stage.share, size, embed, head)
        if key not in self._levels:
            found = self._make_levels(replace(stage, recompute="none", first=0), size, embed, head)
            self._levels[key] = sorted(found, key=lambda level: level[0])
        return self._levels[key]

    def _make_levels(self, stage: StageTemplate, size: int, embed: bool, head: bool) -> list[Level]:
        tables, costs = self.scorer.tables, self.scorer.costs
        kinds = [("none", 0), ("selective", 0), ("full", 0)]
        if tables.first:
            kinds += [("first", n) for n in range(1, stage.layers)]
        if self.recompute is not None:
            kinds = [(self.recompute, 0)]
        found = []
        for recompute, first in kinds if stage.layers else kinds[:1]:
            made = replace(stage, recompute=recompute, first=first)
            choice = tables.choice(made, embed, head)
            found.append((costs.backward_seconds(choice, size), made, *costs.activation_bytes(choice, size)))
        return found


def candidate_of(candidate: PlanTemplate, levels: list[list[Level]]) -> PlanTemplate:
    """The candidate with these stages."""
    parts = tuple(
        replace(part, shape=_shape(part.shape, row)) for part, row in zip(candidate.parts, levels, strict=True)
    )
    return replace(candidate, parts=parts)


def _shape(shape: PipelineTemplate, levels: list[Level]) -> PipelineTemplate:
    return replace(shape, stages=tuple(stage for _, stage, _, _ in levels))


def _plain(shape: PipelineTemplate) -> PipelineTemplate:
    return replace(shape, stages=tuple(replace(s, recompute="none", first=0) for s in shape.stages))


def _over(states: StateRoom, cap: int) -> float:
    """How many times what it may have a rank has: above 1 it does not fit."""
    own = states.optimizer / cap if cap else math.inf if states.optimizer else 0.0
    return max(own, (states.optimizer + states.buffers) / states.free if states.free > 0 else math.inf)


def _stages(placed: PlacedTemplate) -> dict[At, StageTemplate]:
    return {(p, s): x for p, (shape, _, _) in enumerate(placed.pipelines) for s, x in enumerate(shape.stages)}


def _owned(spans: Spans, stages: Mapping[At, StageTemplate], weight: Mapping[At, float]) -> dict[At, float]:
    """By stage: bytes of states on each of its ranks, divided exactly by weight."""
    owned = dict.fromkeys(stages, 0.0)
    for size, holders in spans:
        total = sum(weight[at] * stages[at].chips for at in holders)
        for at in holders:
            owned[at] += size * weight[at] / total
    return owned


def _divisible(spans: Spans, stages: Mapping[At, StageTemplate], rooms: Mapping[At, int]) -> bool:
    """Whether there is any division of the states: no set of spans may need more than all that hold any of it have
    room for together (which is enough for a division, by max-flow = min-cut)."""

    def fits(i: int, size: float, holders: frozenset[At]) -> bool:
        if size > sum(max(rooms[at], 0) * stages[at].chips for at in holders):
            return False
        return all(fits(j + 1, size + spans[j][0], holders | set(spans[j][1])) for j in range(i, len(spans)))

    return fits(0, 0.0, frozenset())
