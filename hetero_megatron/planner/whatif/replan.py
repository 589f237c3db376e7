"""Planning again within a fraction of a second after nodes were lost or added.

A :class:`WarmPlanner` keeps the cost tables and the best pipelines (outlines) of the last search. For new numbers of
nodes it chooses how many of each pipeline to use, divides the batch, solves layers and recompute exactly, and scores
the best few; it does not look for new kinds of pipelines. A full search can follow in the background. If the last
search tried context groups, they are tried again with cached layouts. ``prepare`` plans ahead for the loss of any one
node; then only the placement on ranks is left to do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.subset import shrink
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.pipeline_time import bottleneck
from hetero_megatron.planner.estimate.template_score import TemplateScorer
from hetero_megatron.planner.problem import PlanningProblem
from hetero_megatron.planner.search.context_stages import ContextStages
from hetero_megatron.planner.search.driver import SearchResult, search
from hetero_megatron.planner.search.materialize import PipelineOutline, TemplateBuilder
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import PlanTemplate, StageTemplate, place, renumbered, to_plan
from hetero_megatron.plans import Plan, validate
from hetero_megatron.plans.islands import with_islands_where_quick
from hetero_megatron.predictor.simulate.stage_cost import with_dtypes
from hetero_megatron.utils.cached_method import cached_method

MOST_OUTLINES, MOST_TRIED, CHIPS_SCORED = 24, 5, 10240


@dataclass(frozen=True)
class WarmPlan:
    """A plan for ``pool``: a template, or, with context groups, a plan on the pool's own ranks. ``seconds``: per step.
    """

    seconds: float
    plan: PlanTemplate | Plan
    pool: DevicePool


@dataclass(frozen=True)
class NodeLoss:
    """The plan after the loss of ``node``, or of any other of the ``alike`` nodes of its group.

    Attributes:
        plan: on the ranks of ``cluster`` (the remaining nodes); None: there is none, because of ``problem``.
        seconds: duration of planning again.
        warm: made from known pipelines, without another search.
    """

    node: str
    alike: int
    seconds: float
    plan: Plan | None = None
    cluster: Cluster | None = None
    step_seconds: float = 0.0
    warm: bool = True
    problem: str = ""


class WarmPlanner:
    """Replans a model on a cluster whose nodes come and go. ``result``: of the search of the whole cluster, when the
    caller has it."""

    def __init__(self, problem: PlanningProblem, result: SearchResult | None = None) -> None:
        # Known pipelines have one chip type per stage.
        self.problem = problem
        self.model, self.cluster, self.batch = problem.model, problem.cluster, problem.global_batch_size
        self.result = result or search(problem)
        self.outlines = self._outlines()
        self._ready: dict[tuple[int, ...], WarmPlan] = {}
        self._context = ContextStages() if self.result.context_tried else None

    def _outlines(self) -> list[PipelineOutline]:
        """Distinct pipelines of the best plans, best first, and variants with fewer stages of one kind."""
        by_stages: dict[tuple[tuple[StageTemplate, ...], int], PipelineOutline] = {}
        for template in self.result.ranked:
            for part in template.parts:
                stages = tuple(StageTemplate(s.group, s.tp, s.dp) for s in part.shape.stages)
                for variant in _variants(stages):
                    by_stages.setdefault(
                        (variant, part.shape.micro_batch_size), PipelineOutline(variant, part.shape.micro_batch_size, 1)
                    )
        return list(by_stages.values())[:MOST_OUTLINES]

    def without(self, nodes: Sequence[str]) -> tuple[Plan, Cluster, float]:
        """(plan, cluster of its ranks, predicted step seconds) without these nodes.

        Raises:
            UserError: an unknown node, or no known pipeline fits the remaining nodes; a full search may still find a
                plan.
        """
        lost_nodes = set(nodes)
        keep = [r.rank for r in self.cluster.ranks if r.node not in lost_nodes]
        node_names = {r.node for r in self.cluster.ranks}
        if not lost_nodes <= node_names:
            raise UserError("the cluster has no such node", field="node", value=sorted(lost_nodes - node_names)[0])
        smaller = self._smaller(set(keep))
        shape = tuple(g.nodes for g in smaller.groups)
        warm = self._ready.get(shape) or self._search(smaller)
        if warm is None:
            raise UserError(
                "none of the known pipelines fits the nodes that are left", field="node", value=", ".join(nodes),
                accepted="a full search: hetero-megatron plan --without",
            )  # fmt: skip
        remaining_cluster = shrink(self.cluster, keep)
        plan = self._on_ranks(warm, smaller, {rank: i for i, rank in enumerate(keep)})
        plan = with_islands_where_quick(plan, self.model, remaining_cluster)
        validate(plan, self.model, remaining_cluster, dtype=self.problem.dtype)
        return plan, remaining_cluster, warm.seconds

    def losses(self) -> list[NodeLoss]:
        """Plans for the loss of one node, once per node group: its nodes are interchangeable."""
        used = {r for group in self.result.pool.groups for node in group.ranks for r in node}
        groups = {r.group: r.node for r in reversed(self.cluster.ranks) if r.rank in used}
        alike = {group.name: group.count for group in self.cluster.nodes}
        return [self._loss(node, alike[group]) for group, node in reversed(groups.items())]

    def _loss(self, node: str, alike: int) -> NodeLoss:
        """Replan without ``node``; where no known pipeline fits, search."""
        started, warm = time.monotonic(), True
        try:
            plan, smaller, step_seconds = self.without([node])
        except UserError:
            keep, warm = [r.rank for r in self.cluster.ranks if r.node != node], False
            try:
                smaller = shrink(self.cluster, keep)
                best = search(self.problem.on(smaller)).best
            except UserError as error:
                problem = error.problem if keep else "no chip is left"
                return NodeLoss(node, alike, time.monotonic() - started, warm=False, problem=problem)
            plan, step_seconds = best.plan, best.step_seconds
        return NodeLoss(node, alike, time.monotonic() - started, plan, smaller, step_seconds, warm)

    def _on_ranks(self, warm_plan: WarmPlan, pool: DevicePool, number: Mapping[int, int]) -> Plan:
        """The plan on the ranks of ``pool``, with node counts as ``warm_plan.pool`` has, renumbered by ``number``."""
        if isinstance(warm_plan.plan, Plan):
            ranks = ([r for g in p.groups for node in g.ranks for r in node] for p in (warm_plan.pool, pool))
            return renumbered(warm_plan.plan, {a: number[b] for a, b in zip(*ranks, strict=True)})
        placed = place(warm_plan.plan, pool)
        assert placed is not None, "it was evaluated on these chips"
        plan = to_plan(placed, self.cluster, self.problem.seq_length, self.model.num_heads)
        return renumbered(with_dtypes(plan, self.result.scorer.costs), number)

    def prepare(self) -> None:
        """Plan ahead for the loss of any one node, once per group of equal nodes."""
        for group in self.result.pool.groups:
            lost_ranks = set(group.ranks[0])
            smaller = self._smaller({r for g in self.result.pool.groups for n in g.ranks for r in n} - lost_ranks)
            warm = self._search(smaller) if smaller.chips else None
            if warm is not None:
                self._ready[tuple(g.nodes for g in smaller.groups)] = warm

    def _smaller(self, left: set[int]) -> DevicePool:
        """The pool with only these ranks (whole nodes); empty groups are kept, so that tables stay valid."""
        pool = self.result.pool
        groups = tuple(replace(g, ranks=tuple(node for node in g.ranks if node[0] in left)) for g in pool.groups)
        inter = tuple(
            tuple(None if g == h and groups[g].nodes < 2 else link for h, link in enumerate(row))
            for g, row in enumerate(pool.inter)
        )
        return DevicePool(groups, pool.intra, inter)

    def _search(self, pool: DevicePool) -> WarmPlan | None:
        """The best plan from known pipelines and context groups on these nodes; None when nothing fits."""
        best = self._pipelines(pool)
        if self._context is not None:
            with_nodes = pool.restricted([i for i, g in enumerate(pool.groups) if g.nodes])
            seconds_to_beat = best.seconds if best is not None else math.inf
            with_context = self._context.search(self.problem, self.result.scorer.for_pool(with_nodes), seconds_to_beat)
            if with_context is not None:
                return WarmPlan(with_context.step_seconds, with_context.plan, pool)
        return best

    def _pipelines(self, pool: DevicePool) -> WarmPlan | None:
        warm_scorer = self.result.scorer
        stages = (s for p in self.result.best.template.parts for s in p.shape.stages)
        away = frozenset(pool.groups[s.group].chip for s in stages if s.offload)
        scorer = TemplateScorer(
            warm_scorer.tables.for_pool(pool, offload=away) if away else warm_scorer.tables, pool, like=warm_scorer
        )
        builder = TemplateBuilder(self.problem, scorer)
        bounded: list[tuple[float, int, PlanTemplate]] = []
        for i, rows in enumerate(self._combinations(pool)):
            if bounded and i >= MOST_TRIED:
                break
            for template in builder.templates(rows, self.result.best.template.schedule):
                bounded.append((scorer.bounds.lower_bound(template), len(bounded), template))
        best: WarmPlan | None = None
        most_scored = max(2, min(10, CHIPS_SCORED // max(pool.chips, 1)))  # scoring takes longer with more chips
        for i, (bound, _, template) in enumerate(sorted(bounded, key=lambda row: row[:2])):
            if best is not None and (bound >= best.seconds or i >= most_scored):
                break
            score = scorer.score(template, best.seconds if best is not None else math.inf)
            if score is not None and score.over == 0 and (best is None or score.step_seconds < best.seconds):
                best = WarmPlan(score.step_seconds, template, pool)
        return best

    def _combinations(self, pool: DevicePool) -> Iterator[list[PipelineOutline]]:
        """As many pipelines of one kind as fit, then others on the remaining chips; combinations with the least
        estimated time first."""
        speeds = [self._speed(outline) for outline in self.outlines]
        usages = [
            [sum(s.chips for s in outline.stages if s.group == g) for g in range(len(pool.groups))]
            for outline in self.outlines
        ]
        rows: list[tuple[float, int, list[PipelineOutline]]] = []
        for i in range(len(self.outlines)):
            chips_left, chosen, rate, late = list(pool.counts), [], 0.0, 0.0
            for j in (i, *range(i), *range(i + 1, len(self.outlines))):
                copies = min(n // u for n, u in zip(chips_left, usages[j]) if u)
                if copies:
                    outline = self.outlines[j]
                    chosen.append(replace(outline, copies=copies))
                    chips_left = [n - copies * u for n, u in zip(chips_left, usages[j])]
                    rate, late = rate + copies * speeds[j], late + copies * outline.size * (len(outline.stages) - 1)
                    if len(chosen) == 1 or not any(chips_left):
                        rows.append(((self.batch + late) / rate, len(rows), list(chosen)))
            if any(chips_left):
                rows.append(((self.batch + late) / rate if rate else math.inf, len(rows), chosen))
        yielded: set[frozenset[tuple[tuple[StageTemplate, ...], int, int]]] = set()
        for _, _, chosen in sorted(rows, key=lambda row: row[:2]):
            key = frozenset((s.stages, s.size, s.copies) for s in chosen)
            if chosen and key not in yielded:
                yielded.add(key)
                yield chosen

    @cached_method
    def _speed(self, outline: PipelineOutline) -> float:
        """Sequences per second of a pipeline without bubbles, with its layers divided optimally."""
        layers, last = self.model.num_layers, len(outline.stages) - 1
        rows = []
        for s, stage in enumerate(outline.stages):
            one_layer, two_layers = (
                self.result.scorer.stage(replace(stage, layers=n), outline.size, s == 0, s == last) for n in (1, 2)
            )
            first, second = one_layer.forward + one_layer.backward, two_layers.forward + two_layers.backward
            rows.append(2 * first - second + (second - first) * np.arange(layers + 1))
        return outline.size / bottleneck(np.stack(rows), layers)


def _variants(stages: tuple[StageTemplate, ...]) -> Iterator[tuple[StageTemplate, ...]]:
    """The pipeline itself; then with fewer stages of one kind; then without one kind."""
    yield stages
    kinds = list(dict.fromkeys(stages))
    for kind in kinds:
        count = stages.count(kind)
        for fewer in dict.fromkeys((count - 1, count // 2, 0)):
            if fewer < count:
                kept, of_kind = [], 0
                for stage in stages:
                    of_kind += stage == kind
                    if stage != kind or of_kind <= fewer:
                        kept.append(stage)
                if kept:
                    yield tuple(kept)
