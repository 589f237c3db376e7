"""The fast estimate of a template's step time and memory: what the search ranks by, and never reports.

The time is that of the pipelines' schedules (every action, transfers over the links that the placement gives), then
what of gradient synchronisation does not hide behind the last backward, optimizer and spread of parameters. The step
simulator times the few best again, on concrete plans; ``benchmarks/bench_planner_optimal.py`` prints how far the two
agree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.planner.cost.layer_cost import CostModel
from hetero_megatron.planner.estimate.link_table import LinkTable
from hetero_megatron.planner.estimate.lower_bounds import TemplateBounds
from hetero_megatron.planner.estimate.pipeline_score import PipelineScorer
from hetero_megatron.planner.estimate.stage_table import StageTables
from hetero_megatron.planner.estimate.sync_estimate import LastBackward, SyncLoads, sync_ends, sync_loads
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.template.device_pool import DevicePool, make_pool
from hetero_megatron.planner.template.node_classes import At, NodeClasses, chips_key, node_classes
from hetero_megatron.planner.template.placement import PlacedTemplate, place
from hetero_megatron.planner.template.plan_template import PipelineTemplate, PlanTemplate, in_flight

DEPTH, LARGE_DEPTH, LARGE = 48, 32, 512  # pipeline stages that the search goes up to, above so many chips


@dataclass(frozen=True)
class TemplateScore:
    """Seconds of a step and, per part, of its pipelines; ``over``: bytes by which the worst stage exceeds its chip
    (0: fits)."""

    step_seconds: float
    pipelines: tuple[float, ...]
    over: int = 0


class TemplateScorer(PipelineScorer):
    """Estimates the step time of templates over one pool. What plans have in common is kept: where stages of the same
    chips lie, seconds of equal stages and pipelines."""

    def __init__(self, tables: StageTables, pool: DevicePool, like: TemplateScorer | None = None) -> None:
        """``like``: one over the same tables, whose stages and pipelines cost the same."""
        super().__init__(tables, pool, like)
        self.link_table = LinkTable(pool, tables.costs)
        self.bounds = TemplateBounds(self, self.link_table)
        self.node = {
            r: (g, n) for g, group in enumerate(pool.groups) for n, ranks in enumerate(group.ranks) for r in ranks
        }
        self.evaluated = 0
        self._classes: dict[tuple[object, ...], NodeClasses | None] = {}
        self._needs: dict[tuple[object, ...], tuple[float, int]] = like._needs if like else {}
        self._barriers: dict[tuple[int, ...], float] = {}

    def restricted(self, groups: Sequence[int]) -> TemplateScorer:
        """Over the chips of some groups alone, which are numbered anew."""
        return self.over(self.pool.restricted(groups))

    def over(self, pool: DevicePool, offload: frozenset[str] | None = None) -> TemplateScorer:
        """Over other chips, or with the optimizers of these chip types in host memory."""
        return TemplateScorer(self.tables.over(pool, offload=offload), pool)

    def offloading(self, chips: frozenset[str]) -> TemplateScorer:
        """Over the same chips, with the optimizers of these types in host memory."""
        return TemplateScorer(self.tables.over(self.pool, offload=chips), self.pool, like=self)

    def score(self, template: PlanTemplate, limit: float = math.inf) -> TemplateScore | None:
        """None when the TP groups do not pack into the nodes. ``limit``: of a step that takes at least so long, a lower
        bound will do."""
        key = chips_key(template)
        if key not in self._classes:
            placed = place(template, self.pool)
            self._classes[key] = None if placed is None else node_classes(placed, self.node)
        classes = self._classes[key]
        return None if classes is None else self._score(template, classes, limit)

    def score_placed(self, placed: PlacedTemplate) -> TemplateScore:
        return self._score(placed.template, node_classes(placed, self.node))

    def _score(self, template: PlanTemplate, classes: NodeClasses, limit: float = math.inf) -> TemplateScore:
        self.evaluated += 1
        by_part = [
            max(self.known_seconds(part.shape, part.num_micro_batches, template.schedule, near) for near in rows)
            for part, rows in zip(template.parts, classes.near, strict=True)
        ]
        if limit < math.inf:
            least = max(
                x + self.bounds.after_pipeline(part.shape, self.links(part.shape), template.pipelines)
                for part, x in zip(template.parts, by_part)
            )
            if least >= limit:
                return TemplateScore(least, tuple(by_part))
        end, over = self._ends(template, classes, by_part)
        return TemplateScore(end, tuple(by_part), over)

    def _ends(self, template: PlanTemplate, classes: NodeClasses, by_part: Sequence[float]) -> tuple[float, int]:
        """(when all parameters are updated everywhere; bytes over)."""
        wide = self.costs.options.gradient_bytes or self.costs.wide
        loads = sync_loads(template, classes, self.link_table, self.costs)
        times = self._backward_ends(template, by_part)
        chips = {
            (p, s): self.pool.groups[stage.group].chip
            for p, part in enumerate(template.parts)
            for s, stage in enumerate(part.shape.stages)
        }
        done = {at: when.done for at, when in times.items()}
        summed = sync_ends(loads, self.costs, chips, done, wide, times)
        barrier = max(summed.values()) + self._barrier_seconds(template)
        update, over = self._states(template, loads)
        updated = {at: barrier + seconds_ for at, seconds_ in update.items()}
        written = sync_ends(loads, self.costs, chips, updated, self.costs.item)
        return max(written.values()), over

    def _barrier_seconds(self, template: PlanTemplate) -> float:
        """As :mod:`hetero_megatron.planner.simulate.step` has it: once around a ring of all ranks."""
        usage = template.usage(len(self.pool.groups))
        used, ranks = tuple(g for g, n in enumerate(usage) if n), sum(usage)
        if used not in self._barriers:
            ways = [self.link_table.between(g, h) for g in used for h in used]
            ways += [self.link_table.between(g, g, True) for g in used]
            known = [way for way in ways if way is not None]
            self._barriers[used] = max((way.single + way.message for way in known), default=0.0)
        return (ranks - 1) * self._barriers[used]

    def _states(self, template: PlanTemplate, loads: SyncLoads) -> tuple[dict[At, float], int]:
        """(seconds of each stage's optimizer, bytes over)."""
        update: dict[At, float] = {}
        over = 0
        for p, part in enumerate(template.parts):
            count, size = len(part.shape.stages), part.shape.micro_batch_size
            alive = in_flight(template.schedule, count, part.num_micro_batches)
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

    def _backward_ends(self, template: PlanTemplate, by_part: Sequence[float]) -> dict[At, LastBackward]:
        """Of every stage's last backward (the first stage's is the last of all)."""
        found: dict[At, LastBackward] = {}
        for p, part in enumerate(template.parts):
            each, links, drain = self._each(part.shape), self.links(part.shape), 0.0
            last = len(each) - 1
            saved = max(each, key=lambda x: x.forward + x.backward).saved
            for s, (stage, x) in enumerate(zip(part.shape.stages, each)):
                done = by_part[p] - drain - saved - (x.backward - x.own if s else 0.0)
                found[p, s] = LastBackward(done - x.own, done, x.layer, x.plain, stage.layers)
                if s < last:
                    drain += x.backward + links[s][1]
        return found


def make_scorer(problem: PlanningProblem, costs: CostModel | None = None) -> TemplateScorer:
    """A scorer over the chips of a cluster that compute in the dtype.

    Args:
        costs: the cost model, when the caller has one for this problem.
    """
    if costs is None:
        costs = CostModel(problem.model, problem.cluster, problem.seq_length, problem.dtype, problem.options.costs)
    known, layers = costs.rates, problem.model.num_layers
    pool = make_pool(problem.cluster, lambda a, b: known.link(a, b).as_link(), problem.dtype)
    depth = min(DEPTH if pool.chips <= LARGE else LARGE_DEPTH, layers + 2, max(pool.chips, 16))
    return TemplateScorer(StageTables(costs, pool, layers, depth), pool)


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
