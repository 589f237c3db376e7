"""Making proposals concrete: batch shares, exact layers, recompute, schedule and placement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_megatron.planner.estimate.layer_partition import best_split
from hetero_megatron.planner.estimate.stage_table import StageKind
from hetero_megatron.planner.estimate.template_score import TemplateScorer, best_recompute
from hetero_megatron.planner.template.plan_template import (
    PipelineReplicas,
    PipelineTemplate,
    PlanTemplate,
    StageTemplate,
    in_flight,
)
from hetero_megatron.planner.template.search_space import SearchSpace
from hetero_megatron.spec import ModelSpec


@dataclass(frozen=True)
class PipelineOutline:
    """``copies`` pipelines with these stages (layers not yet given) and micro-batches of ``size`` sequences."""

    stages: tuple[StageTemplate, ...]
    size: int
    copies: int


@dataclass(frozen=True)
class _AffinePipeline:
    """One kind of pipeline: its time is at least before[i] + m x seconds[i] for every stage."""

    skeleton: PipelineOutline
    seconds: tuple[float, ...]
    before: tuple[float, ...]

    def most(self, limit: float) -> int:
        return max(0, int(min((limit - b) / s for b, s in zip(self.before, self.seconds)) + 1e-9))


class TemplateBuilder:
    """Concrete candidates for combinations of skeletons."""

    def __init__(self, evaluator: TemplateScorer, model: ModelSpec, batch: int, space: SearchSpace) -> None:
        self.evaluator, self.tables, self.model = evaluator, evaluator.tables, model
        self.batch, self.space = batch, space
        self._shapes: dict[tuple[object, ...], PipelineTemplate | None] = {}

    def candidates(self, skeletons: Sequence[PipelineOutline], schedule: str) -> Iterator[PlanTemplate]:
        """Under both orders of placement; nothing when it does not fit or the batch cannot be divided."""
        replicas = sum(s.copies for s in skeletons)
        if replicas > self.batch:
            return
        guess = self.batch / sum(s.copies * s.size for s in skeletons)
        lines = []
        for skeleton in skeletons:
            shape = self.shape(skeleton, max(1, round(guess)), replicas, schedule)
            if shape is None:
                return
            lines.append(self._line(skeleton, shape))
        counts = divide(lines, self.batch)
        if counts is None:
            return
        parts: list[PipelineReplicas] = []
        for skeleton, found in zip(skeletons, counts):
            for m, copies in found:
                shape = self.shape(skeleton, m, replicas, schedule)
                if shape is None:
                    return
                parts.append(PipelineReplicas(shape, copies, m))
        for order in ("stage", "pipeline") if replicas > 1 else ("stage",):
            yield PlanTemplate(tuple(parts), schedule, order).merged()

    def shape(self, skeleton: PipelineOutline, m: int, replicas: int, schedule: str) -> PipelineTemplate | None:
        """Exact layers and recompute for ``m`` micro-batches."""
        key = (skeleton.stages, skeleton.size, m, replicas, schedule)
        if key not in self._shapes:
            self._shapes[key] = self._shape(skeleton, m, replicas, schedule)
        return self._shapes[key]

    def _shape(self, skeleton: PipelineOutline, m: int, replicas: int, schedule: str) -> PipelineTemplate | None:
        stages, last = skeleton.stages, len(skeleton.stages) - 1
        alive = in_flight(schedule, len(stages), m)
        if max(alive) > self.tables.depth:
            return None
        rows = []
        for s, stage in enumerate(stages):
            kind = StageKind(
                stage.group, stage.tp, stage.dp, skeleton.size, s == 0, s == last, replicas, self.space.recompute
            )
            table = self.tables.table(kind)
            rows.append(table.seconds[table.row(alive[s])])
        links = [
            self.tables.boundary(a, b, skeleton.size, self.tables.likely_same_node(a, b))
            for a, b in zip(stages, stages[1:])
        ]
        found = best_split(rows, links, m)
        if found is None:
            return None
        recompute = self.space.recompute or "none"
        made = PipelineTemplate(
            skeleton.size,
            tuple(
                StageTemplate(s.group, s.tp, s.dp, n, recompute, offload=self.tables.offloads(s.group))
                for s, n in zip(stages, found[1])
            ),
        )
        if self.space.recompute is not None:
            return made
        return best_recompute(self.tables, made, schedule, m, replicas)

    def _line(self, skeleton: PipelineOutline, shape: PipelineTemplate) -> _AffinePipeline:
        forward, backward = self.evaluator.stage_seconds(shape)
        trips = [*map(sum, self.evaluator.links(shape)), 0.0]
        seconds = tuple(f + b for f, b in zip(forward, backward))
        before, total = [], 0.0
        for t, trip in zip(seconds, trips):
            before.append(total)
            total += t + trip
        return _AffinePipeline(skeleton, seconds, tuple(before))


def divide(lines: Sequence[_AffinePipeline], batch: int) -> list[list[tuple[int, int]]] | None:
    """Per line [(micro-batches, copies)], such that all end about together and the sizes sum to ``batch``; None when no
    division comes out."""
    low, high = 0.0, max(max(b + batch * s for b, s in zip(x.before, x.seconds)) for x in lines) + 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(x.most(middle) * x.skeleton.size * x.skeleton.copies for x in lines) >= batch:
            high = middle
        else:
            low = middle
    pipelines = [(i, x.skeleton.size) for i, x in enumerate(lines) for _ in range(x.skeleton.copies)]
    counts = [max(1, lines[i].most(high)) for i, _ in pipelines]
    surplus = sum(c * size for c, (_, size) in zip(counts, pipelines)) - batch
    if surplus < 0:
        return None
    surplus = _take_off(lines, pipelines, counts, surplus)
    if surplus:
        return None
    found: list[dict[int, int]] = [{} for _ in lines]
    for count, (i, _) in zip(counts, pipelines):
        found[i][count] = found[i].get(count, 0) + 1
    return [sorted(row.items(), reverse=True) for row in found]


def _take_off(
    lines: Sequence[_AffinePipeline], pipelines: Sequence[tuple[int, int]], counts: list[int], surplus: int
) -> int:
    """Give up micro-batches of the pipelines that end last until nothing is too much; returns what is left over."""
    import heapq

    def end(p: int) -> float:
        line = lines[pipelines[p][0]]
        return max(b + counts[p] * s for b, s in zip(line.before, line.seconds))

    heap = [(-end(p), p) for p in range(len(pipelines)) if counts[p] > 1]
    heapq.heapify(heap)
    while surplus and heap:
        _, p = heapq.heappop(heap)
        size = pipelines[p][1]
        if size > surplus:
            continue
        counts[p] -= 1
        surplus -= size
        if counts[p] > 1:
            heapq.heappush(heap, (-end(p), p))
    if surplus:  # one micro-batch fewer of a larger size, some more of a smaller one
        for p, (_, size) in enumerate(pipelines):
            for q, (_, other) in enumerate(pipelines):
                if counts[p] > 1 and size > surplus and other < size and (size - surplus) % other == 0:
                    counts[p] -= 1
                    counts[q] += (size - surplus) // other
                    return 0
    return surplus
