"""Step time and memory of a candidate, exact under the cost model: what the search compares by.

The time is that of the pipelines' schedules (every action, transfers over the links that the placement gives), then
what of gradient synchronisation does not hide behind the last backward, optimizer and spread of parameters.
``predict`` judges the few best again, on concrete plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hetero_megatron.plan.buckets import IN_FLIGHT
from hetero_megatron.planner.cost.memory import equal_shares, held_elements
from hetero_megatron.planner.cost.sync_host_cost import RankHost
from hetero_megatron.planner.estimate.pipeline_time import Link, Links, closed_form, seconds
from hetero_megatron.planner.estimate.stage_table import StageTables
from hetero_megatron.planner.estimate.sync_loads import (
    LinkTable,
    SyncLoads,
    SyncSegment,
    bounded,
    own_seconds,
    sync_loads,
)
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.node_classes import At, NodeClasses, chips_key, node_classes
from hetero_megatron.planner.template.placement import PlacedTemplate, place
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
    in_flight,
)

EXACT = 400_000  # micro-batches x stages of one pipeline above which the recurrence is extrapolated


@dataclass(frozen=True)
class TemplateScore:
    """Seconds of a step and, per part, of its pipelines; ``over``: bytes by which the worst stage exceeds its chip
    (0: fits)."""

    step_seconds: float
    pipelines: tuple[float, ...]
    over: int = 0


@dataclass(frozen=True)
class StageSeconds:
    """Of one micro-batch in a stage: with messages of the host; without them, a layer's backward and that of all but
    the embedding; what the first backward of a step takes less than the others."""

    forward: float
    backward: float
    own: float
    layer: float
    plain: float
    saved: float


class TemplateScorer:
    """Scores candidates over one pool. What plans have in common is kept: where stages of the same chips lie, seconds
    of equal stages and pipelines."""

    def __init__(self, tables: StageTables, pool: DevicePool, like: TemplateScorer | None = None) -> None:
        """``like``: one over the same tables, whose stages and pipelines cost the same."""
        self.tables, self.pool, self.costs = tables, pool, tables.costs
        self.ways = LinkTable(pool, tables.costs)
        self.node = {
            r: (g, n) for g, group in enumerate(pool.groups) for n, ranks in enumerate(group.ranks) for r in ranks
        }
        self.evaluated = 0
        self._tails: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self._grounds: dict[tuple[object, ...], NodeClasses | None] = {}
        self._stages: dict[tuple[StageTemplate, int, bool, bool], StageSeconds] = like._stages if like else {}
        self._pipelines: dict[tuple[object, ...], float] = like._pipelines if like else {}
        self._needs: dict[tuple[object, ...], tuple[float, int]] = like._needs if like else {}
        self._barriers: dict[tuple[int, ...], float] = {}

    def score(self, candidate: PlanTemplate, limit: float = math.inf) -> TemplateScore | None:
        """None when the TP groups do not pack into the nodes. ``limit``: of a step that takes at least so long, a lower
        bound will do."""
        key = chips_key(candidate)
        if key not in self._grounds:
            placed = place(candidate, self.pool)
            self._grounds[key] = None if placed is None else node_classes(placed, self.node)
        ground = self._grounds[key]
        return None if ground is None else self._score(candidate, ground, limit)

    def score_placed(self, placed: PlacedTemplate) -> TemplateScore:
        return self._score(placed.candidate, node_classes(placed, self.node))

    def _score(self, candidate: PlanTemplate, ground: NodeClasses, limit: float = math.inf) -> TemplateScore:
        self.evaluated += 1
        by_part = [
            max(self._known_seconds(part.shape, part.num_micro_batches, candidate.schedule, near) for near in rows)
            for part, rows in zip(candidate.parts, ground.near, strict=True)
        ]
        if limit < math.inf:
            least = max(self._least_end(part, x, candidate.pipelines) for part, x in zip(candidate.parts, by_part))
            if least >= limit:
                return TemplateScore(least, tuple(by_part))
        end, over = self._ends(candidate, ground, by_part)
        return TemplateScore(end, tuple(by_part), over)

    def _least_end(self, part: PipelineReplicas, seconds_: float, pipelines: int) -> float:
        """Of a step, at least, when the pipelines of a part are known to take so long."""
        shape = part.shape
        return seconds_ + self.least_after(shape.stages, shape.micro_batch_size, self.links(shape), pipelines)

    def _known_seconds(self, shape: PipelineTemplate, m: int, schedule: str, near: tuple[int, ...]) -> float:
        key = (shape, m, schedule, near)
        if key not in self._pipelines:
            self._pipelines[key] = self.pipeline_seconds(shape, m, schedule, near)
        return self._pipelines[key]

    def least(self, candidate: PlanTemplate) -> float:
        """Lower bound on the step of a candidate, wherever it lies: of each of its pipelines, the closed form over the
        better of the links that each boundary may have, and what follows at least."""
        worst = 0.0
        for part in candidate.parts:
            shape, stages = part.shape, part.shape.stages
            forward, backward = self.stage_seconds(shape)
            link = [self._least_link(a, b, shape.micro_batch_size) for a, b in zip(stages, stages[1:])]
            compute = closed_form(forward, backward, link, part.num_micro_batches, candidate.schedule)
            worst = max(worst, compute + self.least_after(stages, shape.micro_batch_size, link, candidate.pipelines))
        return worst

    def _least_link(self, a: StageTemplate, b: StageTemplate, size: int) -> Link:
        places = (True, False) if self.tables.likely_same_node(a, b) else (False,)
        found = [self.tables.boundary(a, b, size, near) for near in places]
        return min(there for there, _ in found), min(back for _, back in found)

    def stage(self, stage: StageTemplate, size: int, embed: bool, head: bool) -> StageSeconds:
        """Of one micro-batch of ``size`` sequences."""
        key = (stage, size, embed, head)
        if key not in self._stages:
            costs = self.costs
            choice = self.tables.choice(stage, embed, head)
            messages = costs.message_seconds(choice.chip) * ((not embed) + (not head))
            own = costs.backward_seconds(choice, size)
            bare, plain = (costs.backward_seconds(self.tables.choice(stage, False, end), size) for end in (False, head))
            layer = (bare - costs.action_seconds(choice.chip)) / stage.layers if stage.layers else 0.0
            saved = costs.held_elements(choice) * costs.item * costs.chip_rates(choice.chip).accumulate_beta
            self._stages[key] = StageSeconds(
                costs.forward_seconds(choice, size) + messages, own + messages, own, layer, plain, saved
            )
        return self._stages[key]

    def saved_seconds(self, stage: StageTemplate, embed: bool, head: bool) -> float:
        """What the first backward of a step takes less than the others."""
        return self.stage(stage, stage.dp, embed, head).saved

    def _each(self, shape: PipelineTemplate) -> list[StageSeconds]:
        last = len(shape.stages) - 1
        return [self.stage(x, shape.micro_batch_size, s == 0, s == last) for s, x in enumerate(shape.stages)]

    def stage_seconds(self, shape: PipelineTemplate) -> tuple[list[float], list[float]]:
        """(forward, backward) per stage of one micro-batch, messages of the host included."""
        found = self._each(shape)
        return [x.forward for x in found], [x.backward for x in found]

    def links(self, shape: PipelineTemplate, sharing: Sequence[int] | None = None) -> list[Link]:
        """Seconds of the transfers over each boundary; ``sharing``: 0 in one node, else the pipelines at its cards."""
        found = []
        for s, (a, b) in enumerate(zip(shape.stages, shape.stages[1:])):
            count = sharing[s] if sharing is not None else int(not self.tables.likely_same_node(a, b))
            found.append(self.tables.boundary(a, b, shape.micro_batch_size, count == 0, max(1, count)))
        return found

    def pipeline_seconds(
        self,
        shape: PipelineTemplate,
        micro_batches: int,
        schedule: str,
        sharing: Sequence[int] | None = None,
        exact: bool = True,
    ) -> float:
        forward, backward = self.stage_seconds(shape)
        link = self.links(shape, sharing)
        if not exact:
            return closed_form(forward, backward, link, micro_batches, schedule)
        if len(forward) * micro_batches <= EXACT:
            return seconds(forward, backward, link, micro_batches, schedule)
        few = max(8 * len(forward), EXACT // len(forward) // 2)
        a, b = (seconds(forward, backward, link, n, schedule) for n in (few, 2 * few))
        return b + (b - a) / few * (micro_batches - 2 * few)

    def least_after(self, stages: Sequence[StageTemplate], size: int, links: Links, pipelines: int) -> float:
        """Lower bound on what follows the end of a pipeline with these stages, in any plan of ``pipelines`` pipelines:
        synchronisation over the best link that replicas could have between them, no states to update if others may."""
        after, drain, saved, last = 0.0, 0.0, 0.0, len(stages) - 1
        update = self.least_update if pipelines > 1 else 0.0
        for s, stage in enumerate(stages):
            reduce, latency, rest = self.least_tail(stage, pipelines, s == 0, s == last)
            own = self.stage(stage, size, s == 0, s == last)
            after, update = max(after, exposed(reduce, own.own, stage.layers) + latency - drain), max(update, rest)
            drain += own.own + (links[s][1] if s < last else 0.0)
            saved = max(saved, own.saved)
        return after + update - saved

    @cached_property
    def least_update(self) -> float:
        """Seconds in which all chips together update all parameters, however these are divided."""
        costs, chips = self.costs, [(g.chip, g.chips) for g in self.pool.groups]
        total = held_elements(costs.model, costs.model.num_layers, True, True, equal_shares(costs.model, 1)[0])

        def most(seconds_: float) -> float:
            left = [(n, chip, seconds_ - costs.chip_rates(chip).step_seconds) for chip, n in chips]
            return sum(n * costs.operators(chip).most_updated(x) for n, chip, x in left if x > 0)

        low, high = 0.0, 1e-6
        while most(high) < total:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if most(middle) >= total else (middle, high)
        return low

    def least_tail(self, stage: StageTemplate, pipelines: int, embed: bool, head: bool) -> tuple[float, float, float]:
        """(seconds that the stage's gradients travel at least, latency of that, seconds of what follows when all are
        summed), by which :meth:`least_after` goes."""
        key = (stage.group, stage.tp, stage.dp, stage.layers, stage.offload, pipelines, embed, head)
        if key not in self._tails:
            self._tails[key] = self._least_tail(stage, pipelines, embed, head)
        return self._tails[key]

    def _least_tail(self, stage: StageTemplate, pipelines: int, embed: bool, head: bool) -> tuple[float, float, float]:
        choice = self.tables.choice(stage, embed, head)
        # Other pipelines may own nearly all states.
        optimizer = self.costs.optimizer_seconds(choice, math.inf if pipelines > 1 else 1)
        if pipelines * stage.dp == 1 or not stage.layers:
            return 0.0, 0.0, optimizer
        copies, item = pipelines * stage.dp, self.costs.wide
        moved = self.costs.held_elements(self.tables.choice(stage, False, False)) * (copies - 1) / copies
        # Some may go to copies in the node, the others through its cards, which the TP group shares.
        (inside, a), (outside, b) = (bounded(self.ways, stage.group, self.pool, near) for near in (True, False))
        if self.pool.groups[stage.group].per_node <= stage.tp:
            inside = math.inf
        rate = sum(1 / beta if beta else math.inf for beta in (inside, outside * stage.tp) if beta < math.inf)
        wire = moved / rate if rate else 0.0
        return wire * item, min(a, b), optimizer + wire * self.costs.item + min(a, b)

    def _ends(self, candidate: PlanTemplate, ground: NodeClasses, by_part: Sequence[float]) -> tuple[float, int]:
        """(when all parameters are updated everywhere; bytes over)."""
        loads = sync_loads(candidate, ground, self.ways, self.costs)
        times = self._backward_ends(candidate, by_part)
        chips = {
            (p, s): self.pool.groups[stage.group].chip
            for p, part in enumerate(candidate.parts)
            for s, stage in enumerate(part.shape.stages)
        }
        done = {at: when.done for at, when in times.items()}
        summed = self._travel(loads, chips, done, times, self.costs.options.gradient_bytes or self.costs.wide)
        barrier = max(summed.values()) + self._barrier_seconds(candidate)
        update, over = self._states(candidate, loads)
        updated = {at: barrier + seconds_ for at, seconds_ in update.items()}
        written = self._travel(loads, chips, updated, None, self.costs.item)
        return max(written.values()), over

    def _travel(
        self,
        loads: SyncLoads,
        chips: Mapping[At, str],
        idle: Mapping[At, float],
        times: Mapping[At, _LastBackward] | None,
        item: float,
    ) -> dict[At, float]:
        """When the ranks of each stage are done with all runs: gradients as ``times`` has them, else parameters. The
        rules are those of ``simulate.grad_sync.Synchronisation``, but a run's buckets are taken together."""
        hosts = {at: RankHost() for at in idle}
        free: dict[object, float] = {}
        sharded = self.costs.options.sharded
        for run in loads.runs:
            ready = late = 0.0
            after = {}
            share = 1 / run.buckets  # of the run, that only the last bucket is
            for at in run.held:
                pack, after[at] = (
                    own_seconds(run, at, self.costs, chips[at], item, times is None)
                    if sharded else (0.0, 0.0)
                )  # fmt: skip
                first = last = idle[at]
                if times is not None and self.costs.options.overlap:
                    first, last = times[at].span(run, at, share)
                sent = hosts[at].send(last, pack)
                late, ready = max(late, sent), max(ready, sent - (last - first) - pack * (1 - share))
            begin = max([ready, *(free.get(port, 0.0) for port in run.ports)])
            end = max(begin + run.link * item, late + run.link * item * share)
            for port, seconds_ in run.ports.items():
                free[port] = max(begin + seconds_ * item, late + seconds_ * item * share)
                end = max(end, free[port])
            # A bucket is sent once the one IN_FLIGHT before it has arrived, so of long ways there are so many in a row.
            each, rows = max(run.link, *run.ports.values(), 0.0) * item * share, -(-run.buckets // IN_FLIGHT)
            end = max(end + run.latency, begin + rows * (each + run.latency))
            for at, seconds_ in after.items():
                hosts[at].under_way.append((end, seconds_ * share))
                hosts[at].delay += seconds_ * (1 - share)
        return {at: host.finish(idle[at]) for at, host in hosts.items()}

    def _barrier_seconds(self, candidate: PlanTemplate) -> float:
        """As :mod:`hetero_megatron.planner.simulate.step` has it: once around a ring of all ranks."""
        usage = candidate.usage(len(self.pool.groups))
        used, ranks = tuple(g for g, n in enumerate(usage) if n), sum(usage)
        if used not in self._barriers:
            ways = [self.ways.between(g, h) for g in used for h in used]
            ways += [self.ways.between(g, g, True) for g in used]
            known = [way for way in ways if way is not None]
            self._barriers[used] = max((way.single + way.message for way in known), default=0.0)
        return (ranks - 1) * self._barriers[used]

    def _states(self, candidate: PlanTemplate, loads: SyncLoads) -> tuple[dict[At, float], int]:
        """(seconds of each stage's optimizer, bytes over)."""
        update: dict[At, float] = {}
        over = 0
        for p, part in enumerate(candidate.parts):
            count, size = len(part.shape.stages), part.shape.micro_batch_size
            alive = in_flight(candidate.schedule, count, part.num_micro_batches)
            for s, stage in enumerate(part.shape.stages):
                replicas = (stage.layers or 1) / loads.shared[p, s]
                key = (stage, size, s == 0, s == count - 1, alive[s], replicas)
                if key not in self._needs:
                    choice = self.tables.choice(stage, s == 0, s == count - 1)
                    needs = self.costs.memory_bytes(choice, size, alive[s], replicas)
                    self._needs[key] = (
                        self.costs.optimizer_seconds(choice, replicas),
                        needs.total - self.costs.memory_limit(choice.chip),
                    )
                update[p, s], beyond = self._needs[key]
                over = max(over, beyond)
        return update, over

    def _backward_ends(self, candidate: PlanTemplate, by_part: Sequence[float]) -> dict[At, _LastBackward]:
        """Of every stage's last backward (the first stage's is the last of all)."""
        found: dict[At, _LastBackward] = {}
        for p, part in enumerate(candidate.parts):
            each, links, drain = self._each(part.shape), self.links(part.shape), 0.0
            last = len(each) - 1
            saved = max(each, key=lambda x: x.forward + x.backward).saved
            for s, (stage, x) in enumerate(zip(part.shape.stages, each)):
                done = by_part[p] - drain - saved - (x.backward - x.own if s else 0.0)
                found[p, s] = _LastBackward(done - x.own, done, x.layer, x.plain, stage.layers)
                if s < last:
                    drain += x.backward + links[s][1]
        return found


@dataclass(frozen=True)
class _LastBackward:
    """Seconds: when it begins and ends, each of its layers, and all but the embedding's part."""

    begin: float
    done: float
    layer: float
    plain: float
    layers: int

    def span(self, run: SyncSegment, at: At, share: float) -> tuple[float, float]:
        """When the gradients of the first and of the last bucket of a run are there."""
        lowest = run.lowest[at]
        last = self.done if run.embed else self.begin + self.plain - lowest * self.layer
        above = last - self.begin - (self.layers - lowest) * self.layer if not run.embed else 0.0
        first = max(self.begin + above, last - (1 - share) * (self.layers - lowest) * self.layer)
        return min(first, last), last


def exposed(reduce: float, backward: float, layers: int) -> float:
    """Seconds of a gradient reduction after the last backward of its stage has ended: a layer's gradients travel while
    the layers before it are still in backward; those of the first layer cannot."""
    return max(reduce - backward, reduce / max(1, layers))


def best_recompute(
    tables: StageTables, shape: PipelineTemplate, schedule: str, micro_batches: int, replicas: int
) -> PipelineTemplate | None:
    """The shape with the fastest recompute of each stage that fits; None when a stage does not."""
    alive = in_flight(schedule, len(shape.stages), micro_batches)
    size, last = shape.micro_batch_size, len(shape.stages) - 1
    stages = []
    for s, stage in enumerate(shape.stages):
        made = tables.fastest(stage, size, s == 0, s == last, alive[s], replicas)
        if made is None:
            return None
        stages.append(made)
    return PipelineTemplate(size, tuple(stages))
