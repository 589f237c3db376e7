"""The fast estimate of a template's step time and memory, used for ranking and never reported.

Step time = the pipelines' schedules with their transfers + the part of gradient reduction not hidden by the last
backward + optimizer + all-gather of parameters. The step simulator times the best few templates again as concrete
plans; ``benchmarks/bench_planner_optimal.py`` prints how far the two agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_megatron.cluster import format_bytes
from hetero_megatron.planner.estimate.pipeline_score import PipelineScorer, TemplateBounds
from hetero_megatron.planner.estimate.stage_tables import StageTables
from hetero_megatron.planner.estimate.sync_estimate import sync_ends
from hetero_megatron.planner.estimate.sync_segments import LastBackward, LinkTable, SyncLoads, sync_loads
from hetero_megatron.planner.problem import PlanningProblem, SearchWork
from hetero_megatron.planner.template.device_pool import DevicePool, make_pool
from hetero_megatron.planner.template.plan_template import (
    NodeClasses,
    PipelineTemplate,
    PlacedTemplate,
    PlanTemplate,
    StageId,
    StageTemplate,
    chips_key,
    in_flight,
    node_classes,
    place,
)
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.link_model import LinkKind
from hetero_megatron.predictor.simulate.next_forward import FirstForward, first_forward
from hetero_megatron.utils.cached_method import cached_by, cached_method, share_results

DEPTH, LARGE_DEPTH, LARGE = 48, 32, 512  # most micro-batches in flight (and stages); the same above LARGE chips
LEAST_DEPTH = 16  # on few chips or with few layers
SCORED = 1_750  # work of a score, in the time of an action of a schedule


@dataclass(frozen=True)
class TemplateScore:
    """Attributes:
        step_seconds: of a step.
        pipelines: seconds of the pipelines of each part.
        over: bytes by which the worst stage exceeds its chip (0: fits)."""

    step_seconds: float
    pipelines: tuple[float, ...]
    over: int = 0


@dataclass(frozen=True)
class StepEnds:
    """What of a step does not depend on the order of a pipeline's actions, as estimated under 1F1B.

    Attributes:
        tails: by stage, seconds from the end of its last backward until its gradients are reduced.
        after: seconds from the last reduced gradient until the next step can begin.
        replicas: by stage, pipelines that hold its layers, on average.
        reducing: by stage, ranks of each group in which its gradients are reduced.
        sharing: by part and stage boundary, 0: inside one node, else how many pipelines share the node's cards.
    """

    tails: Mapping[StageId, float]
    after: float
    replicas: Mapping[StageId, float]
    reducing: Mapping[StageId, list[int]]
    sharing: tuple[tuple[int, ...], ...]


class TemplateScorer(PipelineScorer):
    """Estimates step times of templates over one pool. Placements of equal stages and times of equal stages and
    pipelines are cached. ``work``: what the search does that this scorer is of."""

    def __init__(
        self, tables: StageTables, pool: DevicePool, like: TemplateScorer | None = None, work: SearchWork | None = None
    ) -> None:
        """Args:
            like: a scorer over the same groups and costs, whose times and needs of stages can be shared."""
        self.work = work or SearchWork()
        super().__init__(tables, pool)
        if like is not None:
            share_results(like, self, "stage", "pipeline_seconds", "needs")
        self.link_table = LinkTable(pool, tables.costs)
        self.bounds = TemplateBounds(self, self.link_table)
        self.node = {
            r: (g, n) for g, group in enumerate(pool.groups) for n, ranks in enumerate(group.ranks) for r in ranks
        }
        self.evaluated = 0

    def restricted(self, groups: Sequence[int]) -> TemplateScorer:
        """A scorer over the chips of some groups, renumbered."""
        return self.for_pool(self.pool.restricted(groups))

    def for_pool(self, pool: DevicePool, offload: frozenset[str] | None = None) -> TemplateScorer:
        """A scorer over other chips, or with the optimizers of these chip types in host memory."""
        return TemplateScorer(self.tables.for_pool(pool, offload=offload), pool, work=self.work)

    def offloading(self, chips: frozenset[str]) -> TemplateScorer:
        """A scorer over the same chips with the optimizers of these chip types in host memory."""
        return TemplateScorer(self.tables.for_pool(self.pool, offload=chips), self.pool, self, self.work)

    def lending(self) -> TemplateScorer:
        """A scorer over the same chips by which other pipelines may own all optimizer states of a stage."""
        return TemplateScorer(self.tables.lending(), self.pool, work=self.work)

    def score(self, template: PlanTemplate, limit: float = math.inf) -> TemplateScore | None:
        """The score, or None when the TP groups do not pack into the nodes; ``limit``: for slower steps a lower bound
        is returned instead of the estimate."""
        classes = self._classes(template)
        return None if classes is None else self._score(template, classes, limit)

    @cached_by(chips_key)
    def _classes(self, template: PlanTemplate) -> NodeClasses | None:
        placed = place(template, self.pool)
        return None if placed is None else node_classes(placed, self.node)

    def score_placed(self, placed: PlacedTemplate) -> TemplateScore:
        return self._score(placed.template, node_classes(placed, self.node))

    def _score(self, template: PlanTemplate, classes: NodeClasses, limit: float = math.inf) -> TemplateScore:
        self.evaluated += 1
        self.work.add(SCORED)
        by_part = [
            max(
                self.pipeline_seconds(part.shape, part.num_micro_batches, template.schedule, sharing)
                for sharing in rows
            )
            for part, rows in zip(template.parts, classes.sharing, strict=True)
        ]
        if limit < math.inf:
            bound = max(
                x + self.bounds.sync_tail(part.shape, self.links(part.shape), template.pipelines)
                for part, x in zip(template.parts, by_part)
            )
            if bound >= limit:
                return TemplateScore(bound, tuple(by_part))
        end, over = self._step_end(template, classes, by_part)
        return TemplateScore(end, tuple(by_part), over)

    def ends(self, template: PlanTemplate) -> StepEnds | None:
        """None when the TP groups do not pack into the nodes."""
        classes = self._classes(template)
        if classes is None:
            return None
        by_part = [
            max(
                self.pipeline_seconds(part.shape, part.num_micro_batches, template.schedule, sharing)
                for sharing in rows
            )
            for part, rows in zip(template.parts, classes.sharing, strict=True)
        ]
        loads, backward_ends, summed, end, _ = self._reduction(template, classes, by_part)
        stages, ranks = self._stages(template), self._ranks(template, classes)
        return StepEnds(
            {stage_id: summed[stage_id] - backward_ends[stage_id] for stage_id in backward_ends},
            end - max(summed.values()),
            {stage_id: (stage.layers or 1) / loads.shared[stage_id] for stage_id, stage in stages.items()},
            self.tables.communicators.reducing((segment.held for segment in loads.segments), stages, ranks),
            tuple(tuple(map(max, zip(*rows))) for rows in classes.sharing),
        )  # fmt: skip

    def _step_end(self, template: PlanTemplate, classes: NodeClasses, by_part: Sequence[float]) -> tuple[float, int]:
        """(seconds until the next step can begin, bytes over)."""
        *_, end, over = self._reduction(template, classes, by_part)
        return end, over

    def _reduction(
        self, template: PlanTemplate, classes: NodeClasses, by_part: Sequence[float]
    ) -> tuple[SyncLoads, dict[StageId, float], dict[StageId, float], float, int]:
        """(loads; by stage, seconds until its last backward ends, until its gradients are reduced; seconds until the
        next step can begin; bytes over)."""
        gradient_bytes = self.costs.options.gradient_bytes or self.costs.wide
        loads = sync_loads(template, classes, self.link_table, self.costs)
        times = self._backward_ends(template, by_part)
        chips = {stage_id: self.pool.groups[stage.group].chip for stage_id, stage in self._stages(template).items()}
        backward_ends = {stage_id: when.done for stage_id, when in times.items()}
        summed = sync_ends(loads, self.costs, chips, backward_ends, gradient_bytes, times)
        barrier = max(summed.values()) + self._barrier_seconds(template)
        update, over = self._update_and_memory(template, loads, classes)
        updated = {stage_id: barrier + seconds_ for stage_id, seconds_ in update.items()}
        written = sync_ends(loads, self.costs, chips, updated, self.costs.item)
        beside = self._beside(template, classes, loads) if self.costs.options.gather_ahead else {}
        ends = (beside[i].end(updated[i], at) if i in beside else at for i, at in written.items())
        return loads, backward_ends, summed, max(*updated.values(), *ends), over

    def _beside(
        self, template: PlanTemplate, classes: NodeClasses, loads: SyncLoads
    ) -> dict[StageId, FirstForward]:
        """By stage, beside what its parameters come, where they need not be unpacked."""
        packed = {stage_id for x in loads.segments if x.ranks != x.copies for stage_id in x.held}
        beside: dict[StageId, FirstForward] = {}
        for p, (part, rows) in enumerate(zip(template.parts, classes.sharing, strict=True)):
            sharing = tuple(map(max, zip(*rows)))
            forward, links = self.stage_seconds(part.shape, sharing)[0], self.links(part.shape, sharing)
            begin, last = 0.0, len(links)
            for s, (stage, seconds_) in enumerate(zip(part.shape.stages, forward, strict=True)):
                if (p, s) not in packed:
                    ends = s == 0, s == last
                    beside[p, s] = first_forward(self.costs, stage.tp, stage.layers, *ends, begin, seconds_)
                begin += seconds_ + (links[s][0] if s < last else 0.0)
        return beside

    @staticmethod
    def _stages(template: PlanTemplate) -> dict[StageId, StageTemplate]:
        return {(p, s): x for p, part in enumerate(template.parts) for s, x in enumerate(part.shape.stages)}

    def _ranks(self, template: PlanTemplate, classes: NodeClasses) -> dict[StageId, int]:
        stages = self._stages(template)
        return {stage_id: n * stages[stage_id].tp for stage_id, n in classes.units.items()}

    def _barrier_seconds(self, template: PlanTemplate) -> float:
        """Of the barrier before the update."""
        usage = template.usage(len(self.pool.groups))
        kinds = self._link_kinds(tuple(g for g, n in enumerate(usage) if n))
        return self.costs.links.barrier_seconds(kinds, sum(usage))

    @cached_method
    def _link_kinds(self, groups: tuple[int, ...]) -> tuple[LinkKind, ...]:
        """The links between nodes of some groups, and inside them."""
        ways = [(g, h, False) for g in groups for h in groups] + [(g, g, True) for g in groups]
        home = [group.home for group in self.pool.groups]
        return tuple(
            (home[g], home[h], same_node)
            for g, h, same_node in ways
            if self.link_table.between(g, h, same_node) is not None
        )

    def _update_and_memory(
        self, template: PlanTemplate, loads: SyncLoads, classes: NodeClasses
    ) -> tuple[dict[StageId, float], int]:
        update: dict[StageId, float] = {}
        stages, ranks = self._stages(template), self._ranks(template, classes)
        communicators, over = self.tables.communicators, 0
        reducing = communicators.reducing((segment.held for segment in loads.segments), stages, ranks)
        for p, part in enumerate(template.parts):
            count, size = len(part.shape.stages), part.shape.micro_batch_size
            alive = in_flight(template.schedule, count, part.num_micro_batches)
            for s, stage in enumerate(part.shape.stages):
                replicas = (stage.layers or 1) / loads.shared[p, s]
                update[p, s], excess = self.needs(stage, size, s == 0, s == count - 1, alive[s], replicas)
                over = max(over, excess + communicators.counted(part.shape.stages, s, reducing[p, s]))
        return update, over

    @cached_method
    def needs(
        self, stage: StageTemplate, size: int, embed: bool, head: bool, alive: int, replicas: float
    ) -> tuple[float, int]:
        """(seconds of the optimizer's step, bytes of memory beyond the chip's limit, negative where it fits)."""
        choice = self.tables.choice(stage, embed, head)
        needs = self.costs.memory_bytes(choice, size, alive, self.tables.owners(replicas))
        return self.costs.optimizer_seconds(choice, replicas), needs.total - self.costs.memory_limit(choice.chip)

    def _backward_ends(self, template: PlanTemplate, by_part: Sequence[float]) -> dict[StageId, LastBackward]:
        """The last backward of every stage; the first stage's ends last."""
        last_backwards: dict[StageId, LastBackward] = {}
        for p, part in enumerate(template.parts):
            priced, links, messages = self._each(part.shape), self.links(part.shape), self.messages(part.shape)
            busy = [x.forward + x.backward + 2 * sum(host) for x, host in zip(priced, messages, strict=True)]
            saved, grads_at = priced[busy.index(max(busy))].saved, by_part[p]
            for s, (stage, x, (sent, received)) in enumerate(zip(part.shape.stages, priced, messages)):
                begin = grads_at - sent - x.backward
                last_backwards[p, s] = LastBackward(begin - saved, grads_at - saved, x.layer, x.plain, stage.layers)
                if s < len(links):
                    grads_at = begin - received - links[s][1]
        return last_backwards


def make_scorer(problem: PlanningProblem, costs: CostModel | None = None) -> TemplateScorer:
    """A scorer over the chips of the problem's cluster that support its dtype. ``costs``: the cost model, when the
    caller already has one for this problem."""
    if costs is None:
        costs = CostModel(problem.model, problem.cluster, problem.seq_length, problem.dtype, problem.options.costs)
    rates, layers = costs.rates, problem.model.num_layers
    pool = make_pool(problem.cluster, lambda a, b: rates.link(a, b).as_link(), problem.dtype)
    depth = max(LEAST_DEPTH, min(DEPTH if pool.chips <= LARGE else LARGE_DEPTH, layers + 2, pool.chips))
    tables = StageTables(costs, pool, layers, depth, away=problem.activations_away())
    return TemplateScorer(tables, pool)


def best_recompute(
    tables: StageTables, shape: PipelineTemplate, schedule: str, micro_batches: int, replicas: int
) -> PipelineTemplate | None:
    """The shape with the fastest recompute of each stage that fits; None when a stage does not fit."""
    alive = in_flight(schedule, len(shape.stages), micro_batches)
    size, last = shape.micro_batch_size, len(shape.stages) - 1
    stages = []
    for s, stage in enumerate(shape.stages):
        communicator_bytes = tables.communicators.of_equal_pipelines(shape.stages, s, replicas)
        fastest = tables.fastest(stage, size, s == 0, s == last, alive[s], replicas, communicator_bytes)
        if fastest is None:
            return None
        stages.append(fastest)
    return PipelineTemplate(size, tuple(stages))


def no_room(scorer: TemplateScorer) -> str:
    """What leaves nothing for a model on any chip; empty where some chip has room."""
    costs, overheads = scorer.costs, []
    for chip in dict.fromkeys(group.chip for group in scorer.pool.groups):
        limit, overhead = costs.memory_limit(chip), costs.overhead(chip)
        if overhead < limit:
            return ""
        overheads.append(f"{format_bytes(overhead)} of the {format_bytes(limit)} to use on each {chip}")
    return f"framework and communicators alone take {', '.join(overheads)}"
