"""Step time and memory of a candidate, exact under the cost model: what the search compares by.

The time is that of the pipelines' schedules (every action, transfers over the links that the placement gives), then
what of gradient synchronisation does not hide behind the last backward, optimizer and spread of parameters.
``predict`` judges the few best again, on concrete plans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_megatron.cluster import Link
from hetero_megatron.planner.loads import Loads, sync_loads
from hetero_megatron.planner.place import Placed, Units, place
from hetero_megatron.planner.pool import Pool
from hetero_megatron.planner.shape import Candidate, PipelineShape, StageShape, in_flight
from hetero_megatron.planner.tables import Kind, Tables
from hetero_megatron.planner.timing import closed_form, seconds

EXACT = 400_000  # micro-batches x stages of one pipeline above which the recurrence is extrapolated


@dataclass(frozen=True)
class Score:
    """Seconds of a step and, per part, of its pipelines; ``over``: bytes by which the worst stage exceeds its chip
    (0: fits)."""

    step_seconds: float
    pipelines: tuple[float, ...]
    over: int = 0
    over_stage: tuple[int, int] = (0, 0)  # (part, stage)


class Evaluator:
    """Scores candidates over one pool."""

    def __init__(self, tables: Tables, pool: Pool) -> None:
        self.tables, self.pool, self.costs = tables, pool, tables.costs
        self.node = {
            r: (g, n) for g, group in enumerate(pool.groups) for n, ranks in enumerate(group.ranks) for r in ranks
        }
        self.evaluated = 0
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
        users = self._users(placed)
        index = 0
        for p, part in enumerate(candidate.parts):
            worst = 0.0
            for _ in range(part.copies):
                shape, m, units = placed.pipelines[index]
                index += 1
                near = tuple(self.sharing(a, b, users) for a, b in zip(units, units[1:]))
                key = (p, near)
                if key not in times:
                    times[key] = self.pipeline_seconds(shape, m, candidate.schedule, near)
                worst = max(worst, times[key])
            by_part.append(worst)
        end, over, where = self._ends(placed, by_part)
        return Score(end, tuple(by_part), over, where)

    def nodes(self, units: Units) -> set[tuple[int, int]]:
        """Nodes that a stage lies in."""
        return {self.node[unit[0]] for unit in units} | {self.node[unit[-1]] for unit in units}

    def sharing(self, a: Units, b: Units, users: Mapping[tuple[int, int], int]) -> int:
        """0 where two stages lie in one node; else how many pipelines send through the busier node's cards."""
        nodes = self.nodes(a) | self.nodes(b)
        return 0 if len(nodes) == 1 else max(users[n] for n in nodes)

    def _users(self, placed: Placed) -> Mapping[tuple[int, int], int]:
        """By node: how many pipelines send activations through its cards (replicas do it at the same time)."""
        users: dict[tuple[int, int], int] = {}
        for _, _, stages in placed.pipelines:
            found: set[tuple[int, int]] = set()
            lies = [self.nodes(units) for units in stages]
            for a, b in zip(lies, lies[1:]):
                if len(a | b) > 1:
                    found |= a | b
            for node in found:
                users[node] = users.get(node, 0) + 1
        return users

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

    def links(self, shape: PipelineShape, sharing: Sequence[int] | None = None) -> list[float]:
        """Seconds of a transfer over each boundary; ``sharing``: 0 in one node, else the pipelines at its cards."""
        found = []
        for s, (a, b) in enumerate(zip(shape.stages, shape.stages[1:])):
            count = sharing[s] if sharing is not None else int(not self.tables.likely_same_node(a, b))
            found.append(self.tables.boundary(a, b, shape.micro_batch_size, count == 0, max(1, count)))
        return found

    def pipeline_seconds(
        self,
        shape: PipelineShape,
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

    def _least_after(
        self, stage: StageShape, size: int, pipelines: int, embed: bool, head: bool
    ) -> tuple[float, float]:
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

    def _ends(self, placed: Placed, by_part: Sequence[float]) -> tuple[float, int, tuple[int, int]]:
        """(when all parameters are updated everywhere; bytes over; where)."""
        parts = placed.candidate.parts
        loads = sync_loads(placed, self.pool, self.costs, self.node)
        backward, done = self._backward_ends(placed, by_part)
        barrier = spread = 0.0
        begin: dict[tuple[int, int], float] = {}
        for at, partners in loads.partners.items():
            ready = max(done[p] for p in partners)
            own = loads.own[at] * self._own_beta(parts[at[0]].shape.stages[at[1]])
            last = ready + exposed(own * self.costs.wide, backward[at], parts[at[0]].shape.stages[at[1]].layers)
            chip = self.pool.groups[parts[at[0]].shape.stages[at[1]].group].chip
            add = loads.moved[at] * self.costs.wide / self.costs.chip_rates(chip).bytes_per_second
            spread = max(spread, own * self.costs.item)
            start = max(done[p] - backward[p] for p in partners)
            for node in loads.nodes[at]:
                begin[node] = min(begin.get(node, math.inf), start)
                one = loads.cards[node] * loads.slow[node] * self.costs.wide
                last = max(last, ready + one / max(4, self.tables.layers))
            barrier = max(barrier, last + add)
        for node, load in loads.cards.items():
            seconds_ = load * loads.slow[node]
            barrier = max(barrier, begin[node] + seconds_ * self.costs.wide)
            spread = max(spread, seconds_ * self.costs.item)
        barrier = max([barrier + loads.latency, *by_part])
        optimizer, over, where = self._states(placed, loads)
        return barrier + optimizer + spread, over, where

    def _own_beta(self, stage: StageShape) -> float:
        """Seconds per byte of a chip's own link inside its node."""
        link = self.pool.intra[stage.group]
        return 1 / link.bandwidth if link is not None else 0.0

    def _states(self, placed: Placed, loads: Loads) -> tuple[float, int, tuple[int, int]]:
        """(seconds of the slowest optimizer, bytes over, where)."""
        optimizer, over, where = 0.0, 0, (0, 0)
        for p, part in enumerate(placed.candidate.parts):
            count = len(part.shape.stages)
            alive = in_flight(placed.candidate.schedule, count, part.num_micro_batches)
            for s, stage in enumerate(part.shape.stages):
                choice = self.tables.choice(stage, s == 0, s == count - 1)
                replicas = stage.layers / loads.shared[p, s] if stage.layers else float(placed.candidate.pipelines)
                optimizer = max(optimizer, self.costs.optimizer_seconds(choice, replicas))  # type: ignore[arg-type]
                needs = self.costs.memory_bytes(choice, part.shape.micro_batch_size, alive[s], replicas)  # type: ignore[arg-type]
                excess = needs.total - self.costs.memory_limit(choice.chip)
                if excess > over:
                    over, where = excess, (p, s)
        return optimizer, over, where

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
                if s + 1 < len(times):
                    drain += times[s] + links[s]
        return backward, done


def exposed(reduce: float, backward: float, layers: int) -> float:
    """Seconds of a gradient reduction after the last backward of its stage has ended: a layer's gradients travel while
    the layers before it are still in backward; those of the first layer cannot."""
    return max(reduce - backward, reduce / max(1, layers))


def best_recompute(
    tables: Tables, shape: PipelineShape, schedule: str, micro_batches: int, replicas: int
) -> PipelineShape | None:
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
