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

from hetero_megatron.planner.estimate.stage_table import AWAY, RECOMPUTES
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.template.plan_template import (
    PlacedTemplate,
    PlanTemplate,
    StageTemplate,
    Units,
    in_flight,
    to_plan,
)
from hetero_megatron.plans.memory.of_plan import MemoryBytes, estimate_memory, state_bytes
from hetero_megatron.utils.cached_method import cached_by

# (backward seconds, stage, bytes per micro-batch, working bytes, bytes per micro-batch in host memory)
Level = tuple[float, StageTemplate, int, int, int]
Key = tuple[object, ...]
StageId = tuple[int, int]  # (pipeline, stage)
LayerRanges = list[tuple[float, list[StageId]]]  # (bytes of optimizer states, stages that hold them)
Levels = dict[StageId, Level]
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
        host: a chip's part of its node's memory; inf: not known. offloaded: optimizer states that are there.
    """

    free: int
    optimizer: int
    buffers: int
    host: float = math.inf
    offloaded: int = 0

    @property
    def room(self) -> int:
        """Bytes for activations; -1 where states and buckets alone do not fit."""
        room = self.free - self.optimizer
        return room if self.buffers <= room else -1


@dataclass(frozen=True)
class _PlacedStage:
    """``alive``: micro-batches in flight; ``ranks``: of each TP group."""

    stage: StageTemplate
    size: int
    embed: bool
    head: bool
    alive: int
    ranks: Units

    def memory(self, level: Level) -> int:
        """Bytes of activations."""
        return self.alive * level[2] + level[3]

    def in_host(self, level: Level) -> int:
        """The same in host memory."""
        return self.alive * level[4]


def _what_levels_depend_on(x: _PlacedStage) -> tuple[object, ...]:
    stage = x.stage
    return stage.group, stage.tp, stage.dp, stage.layers, stage.share, x.size, x.embed, x.head


class MemoryFit:
    """Fits templates of one scorer whose parts are single pipelines.

    Args:
        recompute: one level for all stages; None: the fastest of each.

    Attributes:
        computed: number of placements whose states were computed exactly.
    """

    def __init__(self, scorer: TemplateScorer, recompute: str | None = None) -> None:
        self.scorer, self.recompute = scorer, recompute
        self.computed = 0
        self._memory: dict[Key, dict[int, MemoryBytes]] = {}

    def best_case(self, placed: PlacedTemplate) -> tuple[PlanTemplate | None, bool]:
        """(the template with the fastest recompute that could fit if other ranks owned all states, None if nothing
        does; whether it fits whoever owns them). No way to fit is faster; computes no states."""
        levels, sure = _OneFit(self, placed).best_case_levels()
        return (None if levels is None else _with_levels(placed.template, levels)), sure

    def fits(self, placed: PlacedTemplate) -> list[PlanTemplate]:
        """Templates that fit: with equal shares and, where these cost recompute or do not fit, with unequal ones, each
        with the fastest recompute."""
        template, fit = placed.template, _OneFit(self, placed)
        best_case, certain = fit.best_case_levels()
        if best_case is None:
            return []
        if certain:
            return [_with_levels(template, best_case)]
        fitting, equal_shares = [], fit.with_equal_shares()
        if equal_shares is not None:
            fitting.append(_with_levels(template, equal_shares))
        if len(template.parts) == 1 or best_case == equal_shares or not fit.division_exists(fit.state_room(None)):
            return fitting
        shared = fit.with_unequal_shares(best_case)
        return fitting if shared is None else [*fitting, _with_levels(template, shared)]

    @cached_by(lambda x, ranks: (x.stage.group, x.stage.tp, x.stage.layers, x.embed, x.head, ranks))
    def limits(self, x: _PlacedStage, ranks: int) -> tuple[int, int]:
        """(bytes for activations on the stage's fullest rank if it owns no states, the same if it owns all that it
        holds and receives its largest buckets from all ``ranks`` at once)."""
        costs, memory = self.scorer.costs, self.scorer.costs.memory
        choice = self.scorer.tables.choice(x.stage, x.embed, x.head)
        trained = memory.trained(*choice.cut)
        weights, gradients, optimizer = memory.states(*choice.cut, trained)
        free = costs.memory_limit(choice.chip) - costs.overhead(choice.chip) - weights - gradients
        bucket_elements, _ = memory.buckets(x.stage.tp, x.embed, x.head)
        buckets = min(trained, bucket_elements) * costs.wide * ranks if ranks > 1 else 0
        room = free - optimizer
        return free, room if buckets <= room else -1

    @cached_property
    def all_states(self) -> int:
        return self.scorer.costs.memory.whole[2]

    def states(self, placed: PlacedTemplate, beside: Mapping[StageId, int]) -> dict[int, StateRoom]:
        """By rank. Independent of chip types, so placements that differ only in those are computed once. ``beside``:
        by stage, bytes of communicators beyond what is set aside."""
        costs = self.scorer.costs
        stage_of_rank = {
            r: (p, s) for p, (_, _, x) in enumerate(placed.pipelines) for s, u in enumerate(x) for t in u for r in t
        }  # fmt: skip
        number = {rank: i for i, rank in enumerate(sorted(stage_of_rank))}
        layout = tuple(
            tuple(tuple(tuple(number[r] for r in u) for u in stage) for stage in x) for _, _, x in placed.pipelines
        )
        stage_keys = tuple(tuple((s.layers, s.share) for s in shape.stages) for shape, _, _ in placed.pipelines)
        if (layout, stage_keys) not in self._memory:
            self.computed += 1
            # Neither recompute nor the number of micro-batches changes states.
            pipelines = tuple((x.plain, 1, units) for (x, _, _), units in zip(placed.pipelines, layout, strict=True))
            plan = to_plan(replace(placed, pipelines=pipelines), costs.cluster, costs.seq_length, costs.model.num_heads)
            self._memory[layout, stage_keys] = estimate_memory(
                plan, costs.model, costs.dtype, costs.options.moments, muon=costs.options.muon
            )
        memory_of, rooms = self._memory[layout, stage_keys], {}
        for rank, i in number.items():
            chip, needs = costs.cluster.ranks[rank].chip, memory_of[i]
            optimizer = needs.optimizer
            if not costs.options.sharded:
                elements = needs.gradients // costs.wide
                optimizer = state_bytes(elements, elements, costs.item, costs.options.moments)[2]
            free = costs.memory_limit(chip) - costs.overhead(chip) - needs.weights - needs.gradients
            host = costs.cluster.group_of(rank).host_memory_per_chip
            rooms[rank] = StateRoom(free - beside[stage_of_rank[rank]], optimizer, needs.buffers, host, needs.host)
        return rooms

    @cached_by(lambda x: (x.stage.group, x.stage.tp, x.stage.dp, x.stage.layers, x.stage.offload, x.embed, x.head))
    def host_limits(self, x: _PlacedStage) -> tuple[float, float]:
        """Of a chip's part of its node's memory, bytes for activations: (if it owns no states, if it owns all that it
        holds and these are there)."""
        choice = self.scorer.tables.choice(x.stage, x.embed, x.head)
        costs = self.scorer.costs
        host_memory = costs.home(choice).host_memory_per_chip
        return host_memory, host_memory - costs.host_states(replace(choice, dp=1), 1)

    def fastest(self, x: _PlacedStage, room: int, host: float) -> Level | None:
        """The fastest recompute level whose activations take at most ``room`` bytes, and ``host`` bytes of host memory;
        None if none does."""
        fitting = (row for row in self.levels(x) if x.memory(row) <= room and (not row[4] or x.in_host(row) <= host))
        return next(fitting, None) if room >= 0 else None

    @cached_by(_what_levels_depend_on)
    def levels(self, x: _PlacedStage) -> list[Level]:
        """All recompute levels of a stage, fastest first."""
        stage, tables, costs = x.stage, self.scorer.tables, self.scorer.costs
        kinds = [(kind, 0, 0) for kind in RECOMPUTES]
        if tables.first:
            kinds += [("first", n, 0) for n in range(1, stage.layers)]
        if self.recompute is not None:
            kinds = [(self.recompute, 0, 0)]
        if self.scorer.pool.groups[stage.group].chip in tables.away:
            kinds += [("none", 0, n) for n in range(1, stage.layers)] + [(kind, 0, stage.layers) for kind in AWAY]
        levels = []
        for recompute, first, away in kinds if stage.layers else kinds[:1]:
            candidate = replace(stage, recompute=recompute, first=first, away=away)
            choice = tables.choice(candidate, x.embed, x.head)
            seconds = costs.backward_seconds(choice, x.size)
            if away:
                seconds += costs.copy_waits(choice, x.size)[0]
            host_bytes = round(sum(costs.host_layers(choice, x.size))) if away else 0
            levels.append((seconds, candidate, *costs.activation_bytes(choice, x.size), host_bytes))
        return sorted(levels, key=lambda level: level[0])


class _OneFit:
    """Of one placed template."""

    def __init__(self, fit: MemoryFit, placed: PlacedTemplate) -> None:
        self.fit, self.placed, self.stages = fit, placed, dict[StageId, _PlacedStage]()
        for p, (shape, m, units) in enumerate(placed.pipelines):
            last, size = len(shape.stages) - 1, shape.micro_batch_size
            alive = in_flight(placed.template.schedule, last + 1, m)
            for s, stage in enumerate(shape.stages):
                self.stages[p, s] = _PlacedStage(stage, size, s == 0, s == last, alive[s], units[s])
        self.ranges = self._layer_ranges()
        self.beside = self._communicators()

    def best_case_levels(self) -> tuple[Levels | None, bool]:
        """(fastest level of each stage if others owned its states and buckets took no memory, None if even so it does
        not fit; whether these levels fit whoever owns the states)."""
        fit, levels, certain, spare_bytes = self.fit, dict[StageId, Level](), True, -self.fit.all_states
        ranks = sum(x.stage.chips for x in self.stages.values())
        for place, x in self.stages.items():
            free, least_room = (n - self.beside[place] for n in fit.limits(x, ranks))
            host_room, least_host = fit.host_limits(x)
            level = fit.fastest(x, free, host_room)
            if level is None:
                return None, False
            levels[place] = level
            certain = certain and x.memory(level) <= least_room and (not level[4] or x.in_host(level) <= least_host)
            spare_bytes += x.stage.chips * (free - min(map(x.memory, fit.levels(x))))
        return (levels if spare_bytes >= 0 else None), certain

    def with_equal_shares(self) -> Levels | None:
        """By stage, the fastest level that fits on all its ranks; None if one stage does not."""
        owned = self._owned(dict.fromkeys(self.stages, 1.0))
        if any(MEAN * owned[place] > room for place, room in self.state_room(None).items()):
            return None
        states, levels = self.fit.states(self.placed, self.beside), dict[StageId, Level]()
        for place, x in self.stages.items():
            rooms = [states[rank] for unit in x.ranks for rank in unit]
            level = self.fit.fastest(x, min(r.room for r in rooms), min(r.host - r.offloaded for r in rooms))
            if level is None:
                return None
            levels[place] = level
        return levels

    def state_room(self, levels: Levels | None) -> dict[StageId, int]:
        """By stage, bytes for optimizer states on a rank with these levels (None: those that keep least)."""
        fit, ranks = self.fit, sum(x.stage.chips for x in self.stages.values())
        return {
            place: fit.limits(x, ranks)[0] - self.beside[place]
            - min(x.memory(level) for level in ([levels[place]] if levels else fit.levels(x)))
            for place, x in self.stages.items()
        }  # fmt: skip

    def with_unequal_shares(self, levels: Levels) -> Levels | None:
        """These levels with shares under which they fit; None where none were found."""
        rooms, states = self.state_room(levels), self.fit.states(self.placed, self.beside)
        for place, x in self.stages.items():  # buckets change little with shares
            rooms[place] = min(rooms[place], *(states[r].free - states[r].buffers for unit in x.ranks for r in unit))
        weights = self._balance_weights(rooms) if self.division_exists(rooms) else None
        for _ in range(ROUNDS if weights is not None else 0):
            assert weights is not None
            largest = max(weights.values())
            shares = {place: max(1, round(FINEST * w / largest)) for place, w in weights.items()}
            common = math.gcd(*shares.values())
            shared = {
                place: (level[0], replace(level[1], share=shares[place] // common), *level[2:])
                for place, level in levels.items()
            }
            shapes = [part.shape for part in _with_levels(self.placed.template, shared).parts]
            pipelines = tuple((shape, *p[1:]) for shape, p in zip(shapes, self.placed.pipelines, strict=True))
            states = self.fit.states(replace(self.placed, pipelines=pipelines), self.beside)
            fill = {
                place: max(_over(states[r], rooms[place], x.in_host(levels[place])) for u in x.ranks for r in u)
                for place, x in self.stages.items()
            }
            if max(fill.values()) <= 1:
                return shared
            weights = {place: n / (fill[place] * 1.02) if fill[place] > 1 else n for place, n in shares.items()}
        return None

    def division_exists(self, rooms: Mapping[StageId, int]) -> bool:
        """Whether the states can be divided at all: no set of ranges needs more than all its holders have room for
        together (sufficient by max-flow = min-cut)."""
        ranges = self.ranges

        def fits(i: int, size: float, holders: frozenset[StageId]) -> bool:
            if size > sum(max(rooms[place], 0) * self.stages[place].stage.chips for place in holders):
                return False
            return all(fits(j + 1, size + ranges[j][0], holders | set(ranges[j][1])) for j in range(i, len(ranges)))

        return fits(0, 0.0, frozenset())

    def _layer_ranges(self) -> LayerRanges:
        """Ranges of layers with the same holders, embedding first, head last."""
        memory = self.fit.scorer.costs.memory
        shapes = [shape for shape, _, _ in self.placed.pipelines]
        starts = [list(itertools.accumulate((s.layers for s in x.stages), initial=0)) for x in shapes]
        cuts = sorted({n for row in starts for n in row})

        def state(layers: int, embed: bool, head: bool) -> float:
            cut = 1, layers, embed, head
            return float(memory.states(*cut, memory.trained(*cut))[2])

        ranges = [(state(0, True, False), [(p, 0) for p in range(len(starts))])]
        for a, b in itertools.pairwise(cuts):
            holders = [
                (p, s) for p, row in enumerate(starts) for s, (lo, hi) in enumerate(itertools.pairwise(row))
                if lo <= a and b <= hi
            ]  # fmt: skip
            ranges.append((state(b - a, False, False), holders))
        return [*ranges, (state(0, False, True), [(p, len(row) - 2) for p, row in enumerate(starts)])]

    def _communicators(self) -> dict[StageId, int]:
        """Bytes beyond what is set aside for communicators, of a rank of each stage."""
        stages, communicators = (
            {place: x.stage for place, x in self.stages.items()},
            self.fit.scorer.tables.communicators,
        )
        chips = {place: stage.chips for place, stage in stages.items()}
        reducing = communicators.reducing((holders for _, holders in self.ranges), stages, chips)
        shapes = [shape.stages for shape, _, _ in self.placed.pipelines]
        return {(p, s): communicators.counted(shapes[p], s, sizes) for (p, s), sizes in reducing.items()}

    def _owned(self, weight: Mapping[StageId, float]) -> dict[StageId, float]:
        """By stage, bytes of states on each of its ranks if divided exactly by weight."""
        owned = dict.fromkeys(self.stages, 0.0)
        for size, holders in self.ranges:
            total = sum(weight[place] * self.stages[place].stage.chips for place in holders)
            for place in holders:
                owned[place] += size * weight[place] / total
        return owned

    def _balance_weights(self, rooms: Mapping[StageId, int]) -> dict[StageId, float] | None:
        """Weights under which no stage owns more than fits if states were divided exactly by weight; None where
        lowering the shares of stages over their limit does not converge."""
        weight = dict.fromkeys(self.stages, 1.0)
        for _ in range(BALANCING):
            owned = self._owned(weight)
            fill = {
                place: owned_bytes / (TIGHT * rooms[place]) if rooms[place] > 0 else math.inf
                for place, owned_bytes in owned.items()
            }
            if max(fill.values()) <= 1:
                return weight
            if min(fill.values()) >= 1:
                return None
            # Slightly more than needed, so that the iteration ends.
            weight = {place: w / (fill[place] * 1.003) if fill[place] > 1 else w for place, w in weight.items()}
            if min(weight.values()) * FINEST < max(weight.values()):
                return None
        return None


def _with_levels(template: PlanTemplate, levels: Levels) -> PlanTemplate:
    """The template with the stages of these levels."""
    shapes = [
        replace(part.shape, stages=tuple(levels[p, s][1] for s in range(len(part.shape.stages))))
        for p, part in enumerate(template.parts)
    ]
    return replace(template, parts=tuple(replace(x, shape=y) for x, y in zip(template.parts, shapes, strict=True)))


def _over(states: StateRoom, cap: int, there: int) -> float:
    """Memory needed / available on a rank; above 1 it does not fit. ``cap``: bytes for states; ``there``: of
    activations in host memory."""
    fill = states.optimizer / cap if cap else math.inf if states.optimizer else 0.0
    if there:
        room = states.host - there
        fill = max(fill, states.offloaded / room if room > 0 else math.inf)
    return max(fill, (states.optimizer + states.buffers) / states.free if states.free > 0 else math.inf)
