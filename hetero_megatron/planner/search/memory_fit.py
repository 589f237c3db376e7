"""Exact memory fit of placed templates: recompute levels and shares of optimizer states.

The scorer's tables divide states evenly among a pipeline's replicas. That is inexact when memory is tight: replicas
with other TP or inner DP degrees own other parts, small tensors have a single owner, and only the two largest
neighbouring buckets travel at once. None of this depends on recompute, so the memory left for activations on every rank
is computed once per placement, and each stage then takes its fastest recompute level that fits.

If that is slower than without any states, and replicas have memory to spare, states are divided unequally (``optimizer:
{share: n}`` in a plan): the share of stages over their limit is lowered in proportion, repeatedly.
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
    state_bytes,
    trained_elements,
)
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.simulate.memory_report import estimate_memory
from hetero_megatron.planner.template.placement import PlacedTemplate, to_plan
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate, StageTemplate, in_flight

Level = tuple[float, StageTemplate, int, int]  # (backward seconds, stage, bytes per micro-batch, working bytes)
Key = tuple[object, ...]
StageId = tuple[int, int]  # (pipeline, stage)
LayerRanges = list[tuple[float, list[StageId]]]  # (bytes of optimizer states, stages that hold them)
MEAN = 0.95  # a rank owns at least this part of its stage's mean of states
BALANCING = 40  # rounds of lowering shares by the continuous formula
ROUNDS = 2  # rounds of lowering shares with states placed exactly
TIGHT = 0.999  # part of the memory for states that is used, because small tensors have one owner
FINEST = 100  # largest share


@dataclass(frozen=True)
class StateRoom:
    """Bytes of one rank.

    Attributes:
        free: memory without weights, gradients and overhead.
        optimizer: its optimizer states; buffers: gradient buckets under way.
    """

    free: int
    optimizer: int
    buffers: int

    @property
    def room(self) -> int:
        """Bytes for activations; -1 where states and buckets alone do not fit."""
        room = self.free - self.optimizer
        return room if self.buffers <= room else -1


class MemoryFit:
    """Fits templates of one scorer whose parts are single pipelines.

    Args:
        recompute: one level for all stages; None: the fastest of each.
        shares: whether replicas may own unequal shares of the states.

    Attributes:
        computed: number of placements whose states were computed exactly.
    """

    def __init__(self, scorer: TemplateScorer, recompute: str | None = None, shares: bool = True) -> None:
        self.scorer, self.recompute, self.shares = scorer, recompute, shares
        self.computed = 0  # placements whose states were counted
        self._known: dict[Key, dict[int, MemoryBytes]] = {}
        self._levels: dict[Key, list[Level]] = {}
        self._known_limits: dict[Key, tuple[int, int]] = {}
        self._beside: dict[Key, dict[StageId, int]] = {}

    def fits(self, placed: PlacedTemplate) -> tuple[list[PlanTemplate], PlanTemplate | None]:
        """(templates that fit: with equal shares and, where these cost recompute or do not fit, with unequal ones, each
        with the fastest recompute; a template that no other way to fit beats, None where all ways were tried or ruled
        out)."""
        template = placed.template
        least, sure = self._best_case_levels(placed)
        if least is None:
            return [], None
        if sure:
            return [with_levels(template, least)], None
        ranges, stages, found, even = self._layer_ranges(placed), _stages(placed), [], None
        if self._may_fit_equally(placed, ranges):
            even = self._fastest_that_fit(placed, {rank: s.room for rank, s in self.states(placed).items()})
            if even is not None:
                found.append(with_levels(template, even))
        if not self.shares or len(template.parts) == 1 or least == even:
            return found, None
        if not _division_exists(ranges, stages, self._state_room(placed, None)):
            return found, None
        shared = self._with_unequal_shares(placed, least, ranges)
        if shared is not None:
            return [*found, with_levels(template, shared)], None
        return found, with_levels(template, least)

    def _best_case_levels(self, placed: PlacedTemplate) -> tuple[list[list[Level]] | None, bool]:
        """(fastest level of each stage if others owned its states and buckets took no memory, None if even so it does
        not fit; whether these levels fit whoever owns the states)."""
        beside, rows, sure, left = self._communicators(placed), [], True, -self._all_states
        ranks = sum(shape.chips for shape, _, _ in placed.pipelines)
        for p, (shape, m, _) in enumerate(placed.pipelines):
            last, size = len(shape.stages) - 1, shape.micro_batch_size
            alive = in_flight(placed.template.schedule, last + 1, m)
            row = []
            for s, stage in enumerate(shape.stages):
                free, most = (x - beside[p, s] for x in self._limits(stage, s == 0, s == last, ranks))
                level = self.fastest(stage, size, s == 0, s == last, alive[s], free)
                if level is None:
                    return None, False
                row.append(level)
                sure = sure and alive[s] * level[2] + level[3] <= most
                least = min(alive[s] * kept + work for _, _, kept, work in self.levels(stage, size, s == 0, s == last))
                left += stage.chips * (free - least)
            rows.append(row)
        return (rows if left >= 0 else None), sure

    def _communicators(self, placed: PlacedTemplate) -> dict[StageId, int]:
        """Bytes beyond what is set aside for communicators, of a rank of each stage."""
        what = tuple(tuple((s.group, s.tp, s.dp, s.layers) for s in shape.stages) for shape, _, _ in placed.pipelines)
        if what not in self._beside:
            stages, known = _stages(placed), self.scorer.tables.communicators
            holders = (row for _, row in self._layer_ranges(placed))
            reducing = known.reducing(holders, stages, {at: stage.chips for at, stage in stages.items()})
            self._beside[what] = {
                (p, s): known.counted(placed.pipelines[p][0].stages, s, sizes) for (p, s), sizes in reducing.items()
            }
        return self._beside[what]

    def _limits(self, stage: StageTemplate, embed: bool, head: bool, ranks: int) -> tuple[int, int]:
        """(bytes for activations on the stage's fullest rank if it owns no states, the same if it owns all that it
        holds and receives its largest buckets from all ``ranks`` at once)."""
        key = (stage.group, stage.tp, stage.layers, embed, head, ranks)
        if key not in self._known_limits:
            costs = self.scorer.costs
            choice = self.scorer.tables.choice(stage, embed, head)
            held, trained = costs.held_elements(choice), costs.trained_elements(choice)
            weights, gradients, optimizer = state_bytes(held, trained, costs.item, costs.options.moments, trained)
            free = costs.memory_limit(choice.chip) - costs.overhead(choice.chip) - weights - gradients
            known = [bucket_elements(costs.model, embed, head, x) for x in equal_shares(costs.model, stage.tp)]
            buckets = min(trained, max(together for _, together in known)) * costs.wide * ranks if ranks > 1 else 0
            room = free - optimizer
            self._known_limits[key] = free, room if buckets <= room else -1
        return self._known_limits[key]

    @cached_property
    def _all_states(self) -> int:
        costs = self.scorer.costs
        total = trained_elements(costs.model, costs.model.num_layers, True, True, equal_shares(costs.model, 1)[0])
        return state_bytes(total, total, costs.item, costs.options.moments)[2]

    def _fastest_that_fit(self, placed: PlacedTemplate, rooms: Mapping[int, int]) -> list[list[Level]] | None:
        """By pipeline and stage, the fastest level that fits into the memory ``rooms`` of all its ranks; None if one
        does not."""
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

    def _may_fit_equally(self, placed: PlacedTemplate, ranges: LayerRanges) -> bool:
        stages = _stages(placed)
        owned = _owned(ranges, stages, dict.fromkeys(stages, 1.0))
        return all(MEAN * owned[at] <= room for at, room in self._state_room(placed, None).items())

    def _state_room(self, placed: PlacedTemplate, levels: list[list[Level]] | None) -> dict[StageId, int]:
        """By stage, bytes for optimizer states on a rank with these levels (None: those that keep least)."""
        ranks = sum(part.shape.chips for part in placed.template.parts)
        found, beside = {}, self._communicators(placed)
        for p, (shape, m, _) in enumerate(placed.pipelines):
            last = len(shape.stages) - 1
            alive = in_flight(placed.template.schedule, last + 1, m)
            for s, stage in enumerate(shape.stages):
                rows = [levels[p][s]] if levels else self.levels(stage, shape.micro_batch_size, s == 0, s == last)
                free = self._limits(stage, s == 0, s == last, ranks)[0]
                found[p, s] = free - beside[p, s] - min(alive[s] * kept + work for _, _, kept, work in rows)
        return found

    def _with_unequal_shares(
        self, placed: PlacedTemplate, levels: list[list[Level]], ranges: LayerRanges
    ) -> list[list[Level]] | None:
        """These levels with shares under which they fit; None where none were found."""
        rooms = self._state_room(placed, levels)
        for p, (_, _, units) in enumerate(placed.pipelines):
            for s, stage in enumerate(units):  # buckets change little with shares
                own = [self.states(placed)[rank] for unit in stage for rank in unit]
                rooms[p, s] = min(rooms[p, s], *(x.free - x.buffers for x in own))
        if not _division_exists(ranges, _stages(placed), rooms):
            return None
        weights = self._balance_weights(placed, ranges, rooms)
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

    def _layer_ranges(self, placed: PlacedTemplate) -> LayerRanges:
        """Ranges of layers with the same holders, embedding first, head last."""
        costs, share = self.scorer.costs, equal_shares(self.scorer.costs.model, 1)[0]
        starts = [list(itertools.accumulate((s.layers for s in x.stages), initial=0)) for x, _, _ in placed.pipelines]
        cuts = sorted({n for row in starts for n in row})

        def state(layers: int, embed: bool, head: bool) -> float:
            held = trained_elements(costs.model, layers, embed, head, share)
            return float(state_bytes(held, held, costs.item, costs.options.moments)[2])

        found = [(state(0, True, False), [(p, 0) for p in range(len(starts))])]
        for a, b in itertools.pairwise(cuts):
            holders = [
                (p, s) for p, row in enumerate(starts) for s, (lo, hi) in enumerate(itertools.pairwise(row))
                if lo <= a and b <= hi
            ]  # fmt: skip
            found.append((state(b - a, False, False), holders))
        return [*found, (state(0, False, True), [(p, len(row) - 2) for p, row in enumerate(starts)])]

    def _balance_weights(
        self, placed: PlacedTemplate, ranges: LayerRanges, rooms: Mapping[StageId, int]
    ) -> list[list[float]] | None:
        """Weights [pipeline][stage] under which no stage owns more than fits if states were divided exactly by weight;
        None where lowering the shares of stages over their limit does not converge."""
        stages = _stages(placed)
        weight = dict.fromkeys(stages, 1.0)
        for _ in range(BALANCING):
            owned = _owned(ranges, stages, weight)
            over = {at: own / (TIGHT * rooms[at]) if rooms[at] > 0 else math.inf for at, own in owned.items()}
            if max(over.values()) <= 1:
                return [[weight[p, s] for s in range(len(x.stages))] for p, (x, _, _) in enumerate(placed.pipelines)]
            if min(over.values()) >= 1:
                return None
            # Slightly more than needed, so that the iteration ends.
            weight = {at: w / (over[at] * 1.003) if over[at] > 1 else w for at, w in weight.items()}
            if min(weight.values()) * FINEST < max(weight.values()):
                return None
        return None

    def states(self, placed: PlacedTemplate) -> dict[int, StateRoom]:
        """By rank. Independent of chip types, so placements that differ only in those are computed once."""
        costs = self.scorer.costs
        ranks = sorted(rank for _, _, units in placed.pipelines for stage in units for unit in stage for rank in unit)
        number = {rank: i for i, rank in enumerate(ranks)}
        layout = tuple(
            tuple(tuple(tuple(number[r] for r in u) for u in stage) for stage in x) for _, _, x in placed.pipelines
        )
        what = tuple(tuple((s.layers, s.share) for s in shape.stages) for shape, _, _ in placed.pipelines)
        if (layout, what) not in self._known:
            self.computed += 1
            # Neither recompute nor the number of micro-batches changes states.
            pipelines = tuple((_plain(x), 1, units) for (x, _, _), units in zip(placed.pipelines, layout, strict=True))
            plan = to_plan(replace(placed, pipelines=pipelines), costs.cluster, costs.seq_length, costs.model.num_heads)
            self._known[layout, what] = estimate_memory(plan, costs.model, costs.dtype, costs.options.moments)
        known, found, beside = self._known[layout, what], {}, self._communicators(placed)
        stage_of = {
            r: (p, s) for p, (_, _, x) in enumerate(placed.pipelines) for s, u in enumerate(x) for t in u for r in t
        }  # fmt: skip
        for rank, i in number.items():
            chip, needs = costs.cluster.ranks[rank].chip, known[i]
            optimizer = needs.optimizer
            if not costs.options.sharded:
                held = needs.gradients // costs.wide
                optimizer = state_bytes(held, held, costs.item, costs.options.moments)[2]
            free = costs.memory_limit(chip) - costs.overhead(chip) - needs.weights - needs.gradients
            free -= beside[stage_of[rank]]
            found[rank] = StateRoom(free, optimizer, needs.buffers)
        return found

    def fastest(self, stage: StageTemplate, size: int, embed: bool, head: bool, alive: int, room: int) -> Level | None:
        """The fastest recompute level whose activations take at most ``room`` bytes; None if none does."""
        if room < 0:
            return None
        levels = self.levels(stage, size, embed, head)
        return next((row for row in levels if alive * row[2] + row[3] <= room), None)

    def levels(self, stage: StageTemplate, size: int, embed: bool, head: bool) -> list[Level]:
        """All recompute levels of a stage, fastest first."""
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


def with_levels(template: PlanTemplate, levels: list[list[Level]]) -> PlanTemplate:
    """The template with the stages of these levels."""
    parts = tuple(
        replace(part, shape=_shape(part.shape, row)) for part, row in zip(template.parts, levels, strict=True)
    )
    return replace(template, parts=parts)


def _shape(shape: PipelineTemplate, levels: list[Level]) -> PipelineTemplate:
    return replace(shape, stages=tuple(stage for _, stage, _, _ in levels))


def _plain(shape: PipelineTemplate) -> PipelineTemplate:
    return replace(shape, stages=tuple(replace(s, recompute="none", first=0) for s in shape.stages))


def _over(states: StateRoom, cap: int) -> float:
    """Memory needed / available on a rank; above 1 it does not fit. ``cap``: bytes for states."""
    own = states.optimizer / cap if cap else math.inf if states.optimizer else 0.0
    return max(own, (states.optimizer + states.buffers) / states.free if states.free > 0 else math.inf)


def _stages(placed: PlacedTemplate) -> dict[StageId, StageTemplate]:
    return {(p, s): x for p, (shape, _, _) in enumerate(placed.pipelines) for s, x in enumerate(shape.stages)}


def _owned(
    ranges: LayerRanges, stages: Mapping[StageId, StageTemplate], weight: Mapping[StageId, float]
) -> dict[StageId, float]:
    """By stage, bytes of states on each of its ranks if divided exactly by weight."""
    owned = dict.fromkeys(stages, 0.0)
    for size, holders in ranges:
        total = sum(weight[at] * stages[at].chips for at in holders)
        for at in holders:
            owned[at] += size * weight[at] / total
    return owned


def _division_exists(
    ranges: LayerRanges, stages: Mapping[StageId, StageTemplate], rooms: Mapping[StageId, int]
) -> bool:
    """Whether the states can be divided at all: no set of ranges needs more than all its holders have room for together
    (sufficient by max-flow = min-cut)."""

    def fits(i: int, size: float, holders: frozenset[StageId]) -> bool:
        if size > sum(max(rooms[at], 0) * stages[at].chips for at in holders):
            return False
        return all(fits(j + 1, size + ranges[j][0], holders | set(ranges[j][1])) for j in range(i, len(ranges)))

    return fits(0, 0.0, frozenset())
