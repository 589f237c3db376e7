"""Step time and memory of a candidate, exact under the cost model: what the search compares by.

The time is that of the pipelines' schedules (every action, transfers over the links that the placement gives), then what
of gradient synchronisation does not hide behind the last backward, optimizer and spread of parameters. ``predict`` judges the few best again, on concrete plans.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.cluster import Link
from hetero_megatron.planner.place import Placed, Units, place
from hetero_megatron.planner.pool import Pool
from hetero_megatron.planner.shape import Candidate, PipelineShape, StageShape, in_flight
from hetero_megatron.planner.tables import Kind, Tables
from hetero_megatron.planner.timing import closed_form, seconds

EXACT = 400_000  # micro-batches x stages of one pipeline above which the recurrence is extrapolated


@dataclass(frozen=True)
class Score:
    """Seconds of a step and, per part, of its pipelines; ``over``: bytes by which the worst stage exceeds its chip (0: fits)."""

    step_seconds: float
    pipelines: tuple[float, ...]
    over: int = 0
    over_stage: tuple[int, int] = (0, 0)  # (part, stage)


@dataclass(frozen=True)
class _Holder:
    """One stage of one pipeline: its layers [a, b), and copies of it that lie alike."""

    part: int
    stage: int
    start: int
    stop: int
    copies: int


class Evaluator:
    """Scores candidates over one pool."""

    def __init__(self, tables: Tables, pool: Pool) -> None:
        self.tables, self.pool, self.costs = tables, pool, tables.costs
        self.node = {r: (g, n) for g, group in enumerate(pool.groups) for n, ranks in enumerate(group.ranks) for r in ranks}
        self.evaluated = 0
        self._sync: dict[tuple[object, ...], tuple[float, float]] = {}
        self._after: dict[tuple[object, ...], tuple[float, float]] = {}

    def score(self, candidate: Candidate) -> Score | None:
        """None when the TP groups do not pack into the nodes."""
        placed = place(candidate, self.pool)
        return None if placed is None else self.score_placed(placed)

    def score_placed(self, placed: Placed) -> Score:
        self.evaluated += 1
        candidate = placed.candidate
        times: dict[tuple[object, ...], float] = {}
        by_part: list[float] = []
        index = 0
        for p, part in enumerate(candidate.parts):
            worst = 0.0
            for _ in range(part.copies):
                shape, m, units = placed.pipelines[index]
                index += 1
                near = tuple(self.together(a, b) for a, b in zip(units, units[1:]))
                key = (p, near)
                if key not in times:
                    times[key] = self.pipeline_seconds(shape, m, candidate.schedule, near)
                worst = max(worst, times[key])
            by_part.append(worst)
        ends, over, where = self._ends(placed, by_part)
        return Score(max(ends), tuple(by_part), over, where)

    def together(self, a: Units, b: Units) -> bool:
        """Whether two stages lie in one node."""
        nodes = {self.node[unit[0]] for unit in (*a, *b)} | {self.node[unit[-1]] for unit in (*a, *b)}
        return len(nodes) == 1

    def stage_seconds(self, shape: PipelineShape) -> tuple[list[float], list[float]]:
        """(forward, backward) per stage of one micro-batch, messages of the host included."""
        forward, backward = [], []
        last = len(shape.stages) - 1
        for s, stage in enumerate(shape.stages):
            choice = self.tables.choice(stage, s == 0, s == last)
            messages = self.costs.message_seconds(choice.chip) * ((s > 0) + (s < last))
            forward.append(self.costs.forward_seconds(choice, shape.micro_batch_size) + messages)
            backward.append(self.costs.backward_seconds(choice, shape.micro_batch_size) + messages)
        return forward, backward

    def links(self, shape: PipelineShape, near: Sequence[bool] | None = None) -> list[float]:
        """Seconds of a transfer over each boundary."""
        found = []
        for s, (a, b) in enumerate(zip(shape.stages, shape.stages[1:])):
            same = near[s] if near is not None else self.tables.likely_same_node(a, b)
            found.append(self.tables.boundary(a, b, shape.micro_batch_size, same))
        return found

    def pipeline_seconds(
        self, shape: PipelineShape, micro_batches: int, schedule: str, near: Sequence[bool] | None = None, exact: bool = True
    ) -> float:
        forward, backward = self.stage_seconds(shape)
        link = self.links(shape, near)
        if not exact:
            return closed_form(forward, backward, link, micro_batches, schedule)
        if len(forward) * micro_batches <= EXACT:
            return seconds(forward, backward, link, micro_batches, schedule)
        few = max(8 * len(forward), EXACT // len(forward) // 2)
        a, b = (seconds(forward, backward, link, n, schedule) for n in (few, 2 * few))
        return b + (b - a) / few * (micro_batches - 2 * few)

    def least_after(self, stages: Sequence[StageShape], size: int, links: Sequence[float], pipelines: int) -> float:
        """Lower bound on what follows the end of a pipeline with these stages, in any plan of ``pipelines`` pipelines:
        synchronisation over the best link that replicas could have between them, states divided among all chips."""
        after, drain, last = 0.0, 0.0, len(stages) - 1
        for s, stage in enumerate(stages):
            key = (stage, size, pipelines, s == 0, s == last)
            if key not in self._after:
                self._after[key] = self._least_after(stage, size, pipelines, s == 0, s == last)
            own, backward = self._after[key]
            after = max(after, own - drain)
            drain += backward + (links[s] if s < last else 0.0)
        return after

    def _least_after(self, stage: StageShape, size: int, pipelines: int, embed: bool, head: bool) -> tuple[float, float]:
        choice = self.tables.choice(stage, embed, head)
        backward = self.costs.backward_seconds(choice, size)
        optimizer = self.costs.optimizer_seconds(choice, -(-self.pool.chips // stage.dp))
        best = math.inf if pipelines * stage.dp > 1 and stage.layers else 0.0
        if best:
            one = StageShape(stage.group, stage.tp, 1, stage.layers)
            others = [(self.tables.choice(one, False, False), stage.layers)] * (pipelines - 1)
            mine = (self.tables.choice(stage, False, False), stage.layers)
            group = self.pool.groups[stage.group]
            ends: list[tuple[Link | None, bool]] = [(x, False) for x in self.pool.inter[stage.group]]
            if group.per_node > stage.tp:
                ends.append((self.pool.intra[stage.group], True))
            for link, near in ends:
                if link is not None:
                    reduce, spread = self.costs.sync_parts([mine, *others], link, near)
                    best = min(best, exposed(reduce, backward, stage.layers) + spread)
        return best + optimizer, backward

    def _holders(self, placed: Placed) -> list[_Holder]:
        holders = []
        for p, part in enumerate(placed.candidate.parts):
            start = 0
            for s, stage in enumerate(part.shape.stages):
                holders.append(_Holder(p, s, start, start + stage.layers, part.copies))
                start += stage.layers
        return holders

    def _ends(self, placed: Placed, by_part: Sequence[float]) -> tuple[list[float], int, tuple[int, int]]:
        """(per stage, when its parameters are updated everywhere; bytes over; where)."""
        parts = placed.candidate.parts
        holders = self._holders(placed)
        backward, done = self._backward_ends(placed, by_part)
        cuts = sorted({h.start for h in holders} | {h.stop for h in holders})
        reduce: dict[tuple[int, int], float] = defaultdict(float)
        spread: dict[tuple[int, int], float] = defaultdict(float)
        shared: dict[tuple[int, int], float] = defaultdict(float)  # sum over layers of dp / copies
        ready = dict(done)
        links = self._worst_links(placed)
        for a, b in zip(cuts, cuts[1:]):
            inside = [h for h in holders if h.start <= a and h.stop >= b]
            copies = sum(h.copies * parts[h.part].shape.stages[h.stage].dp for h in inside)
            link, near = links(inside)
            stages = [(parts[h.part].shape.stages[h.stage], h.copies) for h in inside]
            cost = self._sync_parts(stages, b - a, link, near) if copies > 1 else (0.0, 0.0)
            last = max(done[h.part, h.stage] for h in inside)
            for h in inside:
                at = (h.part, h.stage)
                reduce[at] += cost[0]
                spread[at] += cost[1]
                ready[at] = max(ready[at], last)
                shared[at] += (b - a) * parts[h.part].shape.stages[h.stage].dp / copies
        ends, over, where = [], 0, (0, 0)
        for h in holders:
            at, shape = (h.part, h.stage), parts[h.part].shape
            stage = shape.stages[h.stage]
            choice = self.tables.choice(stage, h.stage == 0, h.stage == len(shape.stages) - 1)
            replicas = stage.layers / shared[at] if stage.layers else float(placed.candidate.pipelines)
            optimizer = self.costs.optimizer_seconds(choice, replicas)  # type: ignore[arg-type]
            ends.append(ready[at] + exposed(reduce[at], backward[at], stage.layers) + spread[at] + optimizer)
            alive = in_flight(placed.candidate.schedule, len(shape.stages), parts[h.part].num_micro_batches)[h.stage]
            needs = self.costs.memory_bytes(choice, shape.micro_batch_size, alive, replicas).total  # type: ignore[arg-type]
            excess = needs - self.costs.memory_limit(choice.chip)
            if excess > over:
                over, where = excess, at
        return ends, over, where

    def _backward_ends(
        self, placed: Placed, by_part: Sequence[float]
    ) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
        """Per stage: seconds of one backward, and when its last one ends (the first stage's is the last of all)."""
        backward: dict[tuple[int, int], float] = {}
        done: dict[tuple[int, int], float] = {}
        for p, part in enumerate(placed.candidate.parts):
            times, links, drain = self.stage_seconds(part.shape)[1], self.links(part.shape), 0.0
            for s, seconds_ in enumerate(times):
                backward[p, s], done[p, s] = seconds_, by_part[p] - drain
                drain += seconds_ + (links[s] if s < len(links) else 0.0)
        return backward, done

    def _sync_parts(
        self, stages: list[tuple[StageShape, int]], layers: int, link: Link, near: bool
    ) -> tuple[float, float]:
        key = (tuple((s.group, s.tp, s.dp, n) for s, n in stages), layers, link, near)
        if key not in self._sync:
            choices = [
                (self.tables.choice(StageShape(s.group, s.tp, s.dp, layers), False, False), layers)
                for s, n in stages
                for _ in range(n)
            ]
            self._sync[key] = self.costs.sync_parts(choices, link, near)
        return self._sync[key]

    def _worst_links(self, placed: Placed):  # type: ignore[no-untyped-def]
        """A function: holders of a segment -> (slowest link between them, whether all lie in one node)."""
        first: list[int] = []
        index = 0
        for part in placed.candidate.parts:
            first.append(index)
            index += part.copies

        def find(inside: list[_Holder]) -> tuple[Link, bool]:
            nodes = set()
            for h in inside:
                for copy in range(h.copies):
                    for unit in placed.pipelines[first[h.part] + copy][2][h.stage]:
                        nodes.add(self.node[unit[0]])
                        if len(unit) > 1:
                            nodes.add(self.node[unit[-1]])
                    if len(nodes) > 64:  # enough to know that it leaves the node and which groups are there
                        break
            groups = sorted({g for g, _ in nodes})
            if len(nodes) == 1:
                link = self.pool.intra[groups[0]] or next(x for x in self.pool.inter[groups[0]] if x is not None)
                return link, True
            found = [
                self.pool.inter[g][h]
                for i, g in enumerate(groups)
                for h in groups[i:]
                if g != h or sum(1 for n in nodes if n[0] == g) > 1
            ]
            return max((x for x in found if x is not None), key=lambda x: 1 / x.bandwidth), False

        return find


def exposed(reduce: float, backward: float, layers: int) -> float:
    """Seconds of a gradient reduction after the last backward of its stage has ended: a layer's gradients travel while
    the layers before it are still in backward; those of the first layer cannot."""
    return max(reduce - backward, reduce / max(1, layers))


def best_recompute(tables: Tables, shape: PipelineShape, schedule: str, micro_batches: int, replicas: int) -> PipelineShape | None:
    """The shape with the fastest recompute of each stage that fits; None when a stage does not."""
    alive = in_flight(schedule, len(shape.stages), micro_batches)
    last = len(shape.stages) - 1
    stages = []
    for s, stage in enumerate(shape.stages):
        kind = Kind(stage.group, stage.tp, stage.dp, shape.micro_batch_size, s == 0, s == last, replicas)
        table = tables.table(kind)
        if not table.seconds[table.row(alive[s]), stage.layers] < float("inf"):
            return None
        recompute, first = table.choice(alive[s], stage.layers)
        stages.append(StageShape(stage.group, stage.tp, stage.dp, stage.layers, recompute, first, stage.offload))
    return PipelineShape(shape.micro_batch_size, tuple(stages))
