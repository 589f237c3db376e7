"""Plans of a model that only runs forward, on given chips: pipelines of equal or unlike cells, each a TP group in one
node, with layers by the speed and the memory of their cells and micro-batches by the speed of the pipelines."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.forward_only import ForwardRole
from hetero_megatron.plans.memory.forward_only import with_role
from hetero_megatron.plans.memory.memory_report import OverLimit, over_limit
from hetero_megatron.predictor.cost.cost_options import CostOptions, StageChoice
from hetero_megatron.predictor.cost.layer_cost import CostModel, UnitSeconds
from hetero_megatron.predictor.simulate.beside import role_costs
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import parameter_count

MICRO_BATCHES = (1, 2, 4, 8)
TP, DEEP = (1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16)  # chips of a cell, and cells of a pipeline
MOST_JUDGED, ENOUGH = 12, 3  # plans that are simulated, and of those that fit
Cell = tuple[int, ...]  # ranks of a TP group


@dataclass(frozen=True)
class ForwardQuestion:
    """A model that only runs forward over the batches of another one. ``words``, ``forwards``: as of
    :class:`~hetero_megatron.plans.forward_only.ForwardRole`."""

    name: str
    model: ModelSpec
    seq_length: int
    global_batch_size: int
    dtype: str
    options: CostOptions
    words: int
    forwards: int = 1


@dataclass(frozen=True)
class ForwardPlan:
    """A plan on the ranks of a cluster, and the seconds of its forwards over a batch."""

    plan: Plan
    seconds: float


class ForwardPlans:
    """Of one question on the chips of a cluster."""

    def __init__(self, asked: ForwardQuestion, cluster: Cluster) -> None:
        options = CostOptions(margin=asked.options.margin, logits_bytes=asked.options.logits_bytes)
        self._asked, self._cluster = asked, cluster
        self._costs = CostModel(asked.model, cluster, asked.seq_length, asked.dtype, options)
        self._unit_seconds: dict[tuple[str, int, int], UnitSeconds] = {}
        self._weights = parameter_count(asked.model) * self._costs.item

    def best(self) -> ForwardPlan:
        """The fastest that fits.

        Raises:
            UserError: none does; names the chip that lacks least.
        """
        sizes = [size for size in MICRO_BATCHES if self._asked.global_batch_size % size == 0]
        estimates = [estimate for pipelines in self._structures() for size in sizes
                     if (estimate := self._estimated(pipelines, size)) is not None]  # fmt: skip
        ranked = sorted(estimates, key=lambda estimate: estimate[0])[:MOST_JUDGED]
        fastest, nearest = fastest_fitting((self._judged(data) for _, data in ranked), ENOUGH)
        if fastest is not None:
            return fastest
        raise self._refusal(nearest)

    def _refusal(self, nearest: OverLimit | None) -> UserError:
        asked, cluster = self._asked, self._cluster
        weights = self._weights / 2**30
        lacks = "" if nearest is None else f": at best {nearest}"
        problem = f"the {asked.name}, {weights:.3g} GiB of weights, fits on no chips that are tried for it{lacks}"
        return UserError(problem, field=f"--{asked.name}-hf", value=asked.model.name, where=cluster.file,
                         accepted="a smaller model, or more chips or memory in the cluster file")  # fmt: skip

    def _structures(self) -> Iterator[list[list[Cell]]]:
        """Pipelines as sequences of cells: of any depth over all chips, and of each kind of chips as shallow as it
        holds the model."""
        model = self._asked.model
        seen: set[tuple[tuple[Cell, ...], ...]] = set()
        for tp in TP:
            if model.num_heads % tp or model.num_kv_heads % tp:
                continue
            cells = tp_cells(self._cluster, tp)
            ways = [_runs(cells, depth) for depth in DEEP if depth <= min(len(cells), model.num_layers)]
            by_kind: dict[str, list[Cell]] = {}
            for cell in cells:
                by_kind.setdefault(self._cluster.ranks[cell[0]].chip, []).append(cell)
            if len(by_kind) > 1:
                depths = {kind: self._least_depth(kind, tp) for kind in by_kind}
                fits = {kind: of_kind for kind, of_kind in by_kind.items() if depths[kind] <= len(of_kind)}
                ways.append([run for kind, of_kind in fits.items() for run in _runs(of_kind, depths[kind])])
            for way in ways:
                key = tuple(map(tuple, way))
                if way and key not in seen:
                    seen.add(key)
                    yield way

    def _least_depth(self, kind: str, tp: int) -> int:
        """Cells of this kind that hold the weights."""
        room = tp * (self._costs.memory_limit(kind) - self._costs.chip_rates(kind).overhead_bytes)
        return math.ceil(self._weights / room) if room > 0 else 1 << 30

    def _seconds(self, cell: Cell, size: int) -> UnitSeconds:
        place = self._cluster.ranks[cell[0]]
        key = place.group, len(cell), size
        if key not in self._unit_seconds:
            stage = StageChoice(place.chip, len(cell), 1, 1, True, True, home=place.group)
            self._unit_seconds[key] = self._costs.parts(stage, size)
        return self._unit_seconds[key]

    def _estimated(self, pipelines: Sequence[Sequence[Cell]], size: int) -> tuple[float, dict[str, Any]] | None:
        """(seconds without messages, the plan's spelling) with layers by speed and memory, and micro-batches of
        ``size``; None: layers find no room."""
        asked, divided_pipelines = self._asked, list[tuple[Sequence[Cell], list[int], float]]()
        for cells in pipelines:
            divided = self._layers(cells, size)
            if divided is not None:
                divided_pipelines.append((cells, *divided))
        if not divided_pipelines:
            return None
        speeds = [(slowest, len(cells)) for cells, _, slowest in divided_pipelines]
        counts = _micro_batches(speeds, asked.global_batch_size // size)
        spelled, seconds = [], 0.0
        for (cells, layers, slowest), count in zip(divided_pipelines, counts, strict=True):
            ends = [sum(layers[: i + 1]) for i in range(len(layers))]
            stages = [{"ranks": list(cell), "layers": [end - n, end], "tp": len(cell)}
                      for cell, n, end in zip(cells, layers, ends, strict=True)]  # fmt: skip
            if count:
                spelled.append({"micro_batch_size": size, "num_micro_batches": count, "stages": stages})
                seconds = max(seconds, (count + len(cells) - 1) * slowest)
        data = {"seq_length": asked.seq_length, "global_batch_size": asked.global_batch_size, "pipelines": spelled}
        return seconds, data

    def _layers(self, cells: Sequence[Cell], size: int) -> tuple[list[int], float] | None:
        """(layers of each cell, seconds of the slowest): each next layer goes where it ends first, which is the best
        division for stages whose seconds grow alike with each layer; None: they find no room."""
        last, total = len(cells) - 1, self._asked.model.num_layers
        parts = [self._seconds(cell, size) for cell in cells]
        before = [p.action + (i == 0) * p.embed[0] + (i == last) * p.head[0] for i, p in enumerate(parts)]
        room = [self._room(cell, (i == 0) + (i == last)) for i, cell in enumerate(cells)]
        layers = [1] * len(cells)
        if min(room) < 1 or len(cells) > total:
            return None
        while sum(layers) < total:
            free = [i for i in range(len(cells)) if layers[i] < room[i]]
            if not free:
                return None
            best = min(free, key=lambda i: before[i] + (layers[i] + 1) * parts[i].layer[0])
            layers[best] += 1
        return layers, max(b + n * p.layer[0] for b, n, p in zip(before, layers, parts, strict=True))

    def _room(self, cell: Cell, ends: int) -> int:
        """Most layers that a cell holds beside embedding and head (``ends`` of the two)."""
        model, chip = self._asked.model, self._cluster.ranks[cell[0]].chip
        table = model.vocab_size * model.hidden_size * self._costs.item
        layer = (self._weights - table * (1 if model.tied else 2)) / model.num_layers
        room = len(cell) * (self._costs.memory_limit(chip) - self._costs.chip_rates(chip).overhead_bytes)
        return max(int((room - ends * table) // layer), 0)

    def _judged(self, data: dict[str, Any]) -> ForwardPlan | OverLimit | None:
        """The plan with its seconds, or the rank that lacks most; None: the model's tensors cannot be cut so."""
        asked, cluster = self._asked, self._cluster
        try:
            plan = plan_from_dict(data, asked.model, cluster, asked.dtype)
        except UserError:
            return None
        compiled = CompiledPlan(plan, asked.model, pairs=asked.name == "reference")
        role = ForwardRole(asked.name, compiled, asked.words, asked.forwards)
        memory = with_role({}, plan, role, asked.dtype, asked.options.logits_bytes, cluster)
        chips = {rank: cluster.ranks[rank].chip for rank in plan.ranks}
        limits = {rank: self._costs.memory_limit(chip) - int(self._costs.chip_rates(chip).overhead_bytes)
                  for rank, chip in chips.items()}  # fmt: skip
        if over := over_limit(memory, limits, chips):
            return over[0]
        return ForwardPlan(plan, role_costs(role, cluster, asked.dtype, asked.options).seconds)


def fastest_fitting(
    judged: Iterable[ForwardPlan | OverLimit | None], enough: int
) -> tuple[ForwardPlan | None, OverLimit | None]:
    """(the fastest of the first ``enough`` plans that fit, what lacks least among those before that do not)."""
    fitting, nearest = list[ForwardPlan](), None
    for one in judged:
        if isinstance(one, ForwardPlan):
            fitting.append(one)
            if len(fitting) == enough:
                break
        elif one is not None and (nearest is None or one.over < nearest.over):
            nearest = one
    return min(fitting, key=lambda plan: plan.seconds, default=None), nearest


def tp_cells(cluster: Cluster, tp: int) -> list[Cell]:
    """TP groups inside nodes; chips of a node that none has place for are left idle."""
    nodes: dict[str, list[int]] = {}
    for rank in cluster.ranks:
        nodes.setdefault(rank.node, []).append(rank.rank)
    return [tuple(ranks[i : i + tp]) for ranks in nodes.values() for i in range(0, len(ranks) - tp + 1, tp)]


def _runs(cells: Sequence[Cell], depth: int) -> list[list[Cell]]:
    """Cells in runs of ``depth``; those that are left over make the last run longer."""
    runs = [list(cells[i : i + depth]) for i in range(0, len(cells) - depth + 1, depth)]
    if runs:
        runs[-1] += cells[depth * len(runs) :]
    return runs


def _micro_batches(pipelines: Sequence[tuple[float, int]], count: int) -> list[int]:
    """Of pipelines with (seconds of the slowest stage, stages) each, such that the last one ends first."""
    counts = [0] * len(pipelines)
    ends = [(seconds * depth, i) for i, (seconds, depth) in enumerate(pipelines)]
    heapq.heapify(ends)
    for _ in range(count):
        end, i = heapq.heappop(ends)
        counts[i] += 1
        heapq.heappush(ends, (end + pipelines[i][0], i))
    return counts
