"""Which small pipelines to run so that every chip type's costs can be told apart. No torch.

A stage's action takes ``fixed + layers x layer (+ embed) (+ head)`` seconds. Every chip type runs at the front of the
pipeline and at its end, with no layers and with many; in between, where there are chips enough, with many; and with a
model of one layer alone, which tells "fixed" from embedding and head. Their own seconds are seen where there are no
layers beside them: as differences of stages with layers they would carry those stages' noise.

Runs are short: slow chips have fewer layers, so that nobody waits for them. A step that warms up comes first, and of
the others the actions count during which all stages are busy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, median, median_low

import numpy as np

from hetero_megatron.cluster import Cluster
from hetero_megatron.plan import Plan, plan_from_dict
from hetero_megatron.planner.cost.layer_cost import SWAPS
from hetero_megatron.spec import ModelSpec

FEW, MANY = 1, 3  # layers of a stage; of slower chips fewer than many, see :func:`depths`
MICRO_BATCHES = 7  # of a pipeline, at least; one less of larger ones, which take longer
ROUNDS = 10  # of fitting and weighing
FAR = 1.5  # standard deviations, beyond which an observation counts less
MEASURED_GROUPS = 2  # TP groups per chip type that are measured in full; the others are spot-checked


@dataclass(frozen=True)
class Run:
    """One pipeline, or replicas of one stage each; ``spec`` has as many layers as ``plan``."""

    plan: Plan
    spec: ModelSpec
    tp: int
    micro_batch_size: int
    title: str

    @property
    def warm_up(self) -> int:
        """Sequences of a first step that does not count: as many as fill the pipelines, which initialise what is lazy
        and allocate what larger steps need."""
        return self.micro_batch_size * sum(len(p.stages) for p in self.plan.pipelines)

    def later_stages(self, rank: int) -> int:
        """Stages after that of ``rank``."""
        for pipeline in self.plan.pipelines:
            for s, stage in enumerate(pipeline.stages):
                if rank in stage.ranks:
                    return len(pipeline.stages) - 1 - s
        raise AssertionError(f"rank {rank} has no stage")

    def steps(self, asked: int) -> int:
        """To measure, where ``asked`` are for micro-batches of 1: as many sequences; at least one step."""
        return max(1, asked // self.micro_batch_size)


@dataclass(frozen=True)
class Observation:
    """Compute seconds of one action of one stage (medians), and their spread (max - min over micro-batches, relative);
    ``apart``: what a forward and a backward took besides, in exchanges with the TP group (mean: some exchanges wait
    long, in every pipeline)."""

    chip: str
    ranks: tuple[int, ...]
    tp: int
    micro_batch_size: int
    layers: int
    embed: bool
    head: bool
    forward: float
    backward: float
    spread: float
    apart: tuple[float, float] = (0.0, 0.0)

    @property
    def swaps(self) -> int:
        """Exchanges with the TP group, each way."""
        return 0 if self.tp == 1 else SWAPS * self.layers + self.embed + self.head


@dataclass(frozen=True)
class Costs:
    """Seconds (forward, backward) of one layer, embedding, head, and the fixed part of an action."""

    fixed: tuple[float, float]
    layer: tuple[float, float]
    embed: tuple[float, float]
    head: tuple[float, float]

    def stage(self, layers: int, embed: bool, head: bool) -> tuple[float, float]:
        forward, backward = (
            self.fixed[i] + layers * self.layer[i] + embed * self.embed[i] + head * self.head[i] for i in (0, 1)
        )
        return forward, backward


def steady(kind: str, seconds: Sequence[float], later: int) -> list[float]:
    """Of a stage's forwards or backwards (``kind`` F or B) in a step of 1F1B, in order, those during which every stage
    has something to do, without the first one; ``later``: how many stages follow."""
    return list(seconds[max(1, later) :] if kind == "F" else seconds[1 : len(seconds) - later])


def tp_groups(cluster: Cluster, tp: int) -> dict[str, list[tuple[int, ...]]]:
    """Groups of ``tp`` neighbouring chips of a type, by chip type: inside nodes, or across them where no node of that
    type has so many chips."""
    nodes: dict[str, dict[str, list[int]]] = {}
    for rank in cluster.ranks:
        nodes.setdefault(rank.chip, {}).setdefault(rank.node, []).append(rank.rank)
    found = {}
    for chip, by_node in nodes.items():
        inside = list(by_node.values())
        joined = [[r for ranks in inside for r in ranks]]
        parts = inside if max(map(len, inside)) >= tp else joined
        found[chip] = [tuple(ranks[i : i + tp]) for ranks in parts for i in range(0, len(ranks) - tp + 1, tp)]
    return {chip: groups for chip, groups in found.items() if groups}


def degrees(cluster: Cluster, spec: ModelSpec) -> tuple[int, ...]:
    """TP degrees to measure unless told otherwise: powers of 2 up to a node's chips, and 2 in any case."""
    most = min(spec.num_heads, max(2, *(group.chips_per_node for group in cluster.nodes)))
    return tuple(2**i for i in range(most.bit_length()))


def all_runs(
    cluster: Cluster,
    spec: ModelSpec,
    seq_length: int,
    tp_degrees: Sequence[int],
    micro_batch_sizes: Sequence[int],
    many: Mapping[str, int],
) -> list[Run]:
    """Of every TP degree and micro-batch size; ``many``: as :func:`depths` returns it."""
    kinds = [(cluster, spec, seq_length, tp, size) for tp in tp_degrees for size in micro_batch_sizes]
    return [run for kind in kinds for run in full_runs(*kind, many)] + spot_checks(*kinds[0])


def full_runs(
    cluster: Cluster, spec: ModelSpec, seq_length: int, tp: int, micro_batch_size: int, many: Mapping[str, int]
) -> list[Run]:
    """The runs that determine every chip type's costs at this TP degree and micro-batch size."""
    groups = {chip: found[:MEASURED_GROUPS] for chip, found in tp_groups(cluster, tp).items()}
    chips = list(groups)
    kind = (cluster, spec, seq_length, tp, micro_batch_size)
    orders = [[(g, many[chip]) for chip in chips[i:] + chips[:i] for g in groups[chip]] for i in range(len(chips))]
    runs = [
        _run(*kind, [[g for g, _ in order]], layers) for order in orders for layers in _layers([n for _, n in order])
    ]
    return runs + (one_layer_runs(*kind) if max(map(len, orders), default=0) > 1 else [])


def one_layer_runs(cluster: Cluster, spec: ModelSpec, seq_length: int, tp: int, micro_batch_size: int) -> list[Run]:
    """A model of few layers on one group of each chip type alone, all at once; nothing where there are no groups."""
    groups = [found[:1] for found in tp_groups(cluster, tp).values()]
    return [_run(cluster, spec, seq_length, tp, micro_batch_size, groups, [FEW])] if groups else []


def depths(cluster: Cluster, observations: Sequence[Observation]) -> dict[str, int]:
    """Layers of each chip type where they are to be many: as long as ``MANY`` take the fastest, by what was observed of
    models of one layer; ``MANY`` of what was not observed."""
    seconds = {o.chip: o.forward + o.backward for o in observations}
    fastest = min(seconds.values(), default=0.0)
    found = {chip: max(FEW, round(MANY * fastest / own)) for chip, own in seconds.items()}
    return {rank.chip: found.get(rank.chip, MANY) for rank in cluster.ranks}


def _layers(many: Sequence[int]) -> list[list[int]]:
    """Of each stage in the two runs of one order of groups: none at one end, and many elsewhere."""
    if len(many) == 1:
        return [[FEW], [MANY]]
    return [[0, *many[1:]], [*many[:-1], 0]]


def spot_checks(cluster: Cluster, spec: ModelSpec, seq_length: int, tp: int, micro_batch_size: int) -> list[Run]:
    """Runs that touch every group that :func:`full_runs` left out."""
    rest = [g for found in tp_groups(cluster, tp).values() for g in found[MEASURED_GROUPS:]]
    kind = (cluster, spec, seq_length, tp, micro_batch_size)
    return [_run(*kind, [rest[i : i + 8]], [MANY] * len(rest[i : i + 8])) for i in range(0, len(rest), 8)]


def exchange_runs(cluster: Cluster, spec: ModelSpec, seq_length: int) -> list[Run]:
    """One replica of a few layers on each of some chips of every type: what packing, summing and unpacking cost."""
    ranks = sorted(r for found in tp_groups(cluster, 1).values() for (r,) in found[:MEASURED_GROUPS])
    replicas = [[(r,)] for r in ranks]
    depths = (FEW, MANY) if len(ranks) > 1 else ()
    return [_run(cluster, spec, seq_length, 1, 1, replicas, [layers], 1) for layers in depths]


@dataclass(frozen=True)
class Phase:
    """What one rank did for one bucket: ``kind`` is pack, add or unpack, of so many bytes in ``calls`` messages."""

    chip: str
    kind: str
    bytes: int
    calls: int
    seconds: float


PHASES = ("pack", "add", "unpack")


def solve_phases(found: Sequence[Phase]) -> tuple[float, float, float, float]:
    """(pack, add, unpack: seconds per byte; fixed seconds per call) of one chip type, by least squares."""
    rows = np.array([[f.bytes * (f.kind == kind) for kind in PHASES] + [f.calls] for f in found], float)
    seconds = np.array([f.seconds for f in found])
    scale = rows.max(axis=0)
    solution, *_ = np.linalg.lstsq(rows / scale, seconds, rcond=1e-9)
    if solution[3] < 0:  # nothing fixed to be seen
        solution, *_ = np.linalg.lstsq(rows[:, :3] / scale[:3], seconds, rcond=1e-9)
        solution = np.append(solution, 0.0)
    pack, add, unpack, fixed = np.maximum(solution / scale, 0.0).tolist()
    return pack, add, unpack, fixed


def _run(
    cluster: Cluster,
    spec: ModelSpec,
    seq_length: int,
    tp: int,
    micro_batch_size: int,
    pipelines: Sequence[Sequence[tuple[int, ...]]],
    layers: Sequence[int],
    count: int | None = None,
) -> Run:
    """Pipelines alike with ``layers`` in their stages and ``count`` micro-batches in each (None: more than fill
    them)."""
    count = count or max(MICRO_BATCHES - (micro_batch_size > 1), len(layers) + 1)
    small = replace(spec, num_layers=sum(layers))
    ends = list(accumulate(layers))
    spans = [[end - n, end] if n else [] for n, end in zip(layers, ends)]
    body = [
        {
            "micro_batch_size": micro_batch_size, "num_micro_batches": count,
            "stages": [{"ranks": list(g), "tp": tp, "layers": span} for g, span in zip(groups, spans, strict=True)],
        }
        for groups in pipelines
    ]  # fmt: skip
    data = {
        "version": 1, "seq_length": seq_length, "global_batch_size": count * micro_batch_size * len(pipelines),
        "schedule": "1f1b", "pipelines": body,
    }  # fmt: skip
    chips = (
        ", ".join(f"{cluster.ranks[g[0]].chip} x{n}" for g, n in zip(groups, layers)) for groups in pipelines
    )
    return Run(plan_from_dict(data, small, cluster), small, tp, micro_batch_size, " | ".join(chips))


def jitter(steps: Sequence[Sequence[float]]) -> float:
    """Standard deviation of a second of compute, if it grows with the root of the seconds; ``steps``: those of like
    parts of steps, of each rank in each run. The one that 68 of 100 deviations do not exceed, so that a single outlier
    does not count.
    """
    found: list[float] = []
    for seconds in steps:
        mean, count = fmean(seconds), len(seconds)
        if count > 1:
            found += [abs(s - mean) * (count / (count - 1) / mean) ** 0.5 for s in seconds]
    return sorted(found)[int(0.68 * len(found))] if found else 0.0


def solve(
    observations: Sequence[Observation], fixed: tuple[float, float] | None = None
) -> dict[tuple[int, int], Costs]:
    """Least squares over all observations of one chip type; relative errors count.

    Args:
        fixed: the fixed part, where shorter sequences have told it already.

    Returns:
        Costs by (TP degree, micro-batch size); the fixed part is the same for all.
    """
    keys = sorted({(o.tp, o.micro_batch_size) for o in observations})
    rows = np.zeros((len(observations), 1 + 3 * len(keys)))
    for row, o in zip(rows, observations):
        at = 1 + 3 * keys.index((o.tp, o.micro_batch_size))
        row[0], row[at : at + 3] = 1.0, (o.layers, o.embed, o.head)
    forward, backward = (
        _least_squares(rows, np.array(seconds), None if fixed is None else fixed[i])
        for i, seconds in enumerate(([o.forward for o in observations], [o.backward for o in observations]))
    )
    pairs = list(zip(forward, backward))
    return {key: Costs(pairs[0], *pairs[1 + 3 * i : 4 + 3 * i]) for i, key in enumerate(keys)}


def _least_squares(rows: np.ndarray, seconds: np.ndarray, first: float | None) -> list[float]:
    """``x >= 0`` for which ``rows @ x`` is next to most ``seconds``, relatively: what would be negative is 0, and the
    others are solved again. ``first``: x[0], if known."""
    rows = rows / seconds[:, None]
    found = np.zeros(rows.shape[1])
    found[0] = first or 0.0
    wanted = 1.0 - rows[:, 0] * found[0]
    used = list(range(first is not None, rows.shape[1]))
    while used:
        some = _most_agree(rows[:, used], wanted)
        if (some >= 0).all():
            found[used] = some
            break
        used.pop(int(np.argmin(some * rows[:, used].max(axis=0))))
    return [float(x) for x in found]


def _most_agree(rows: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares in which what is far off counts as far as its distance, not as its square (Huber): a run during
    which the machine had other things to do."""
    weights = np.ones(len(wanted))
    for _ in range(ROUNDS):
        # What a single chip alone does not tell apart: the smallest solution.
        found, *_ = np.linalg.lstsq(rows * weights[:, None], wanted * weights, rcond=1e-9)
        off = np.abs(rows @ found - wanted)
        deviation = 1.48 * np.median(off)
        if deviation < 1e-12:
            break
        weights = np.sqrt(np.minimum(1.0, FAR * deviation / np.maximum(off, 1e-12)))
    return found


def waiting(observations: Sequence[tuple[Observation, float]]) -> tuple[float, float]:
    """What TP groups took for one exchange, forward and backward, beyond the seconds that their links explain, which
    stand beside each observation: mean over all exchanges, at least 0."""
    swaps = sum(o.swaps for o, _ in observations)
    forward, backward = (sum(o.apart[i] - o.swaps * seconds for o, seconds in observations) / swaps for i in (0, 1))
    return max(0.0, forward), max(0.0, backward)


def spread(observations: Sequence[Observation]) -> float:
    """Median relative spread."""
    return median(o.spread for o in observations)


def stragglers(
    observations: Sequence[Observation], costs: Mapping[tuple[str, int, int], Costs], tolerance: float
) -> dict[tuple[int, ...], float]:
    """Groups that are slower than their chip type by more than ``tolerance``: ranks -> times slower (median)."""
    slower: dict[tuple[int, ...], list[float]] = {}
    for o in observations:
        alike = [
            p
            for p in observations
            if (p.chip, p.tp, p.micro_batch_size, p.layers, p.embed, p.head)
            == (o.chip, o.tp, o.micro_batch_size, o.layers, o.embed, o.head)
        ]
        several = len({p.ranks for p in alike}) > 1
        expected = median_low(p.forward + p.backward for p in alike) if several else sum(_expected(o, costs))
        slower.setdefault(o.ranks, []).append((o.forward + o.backward) / expected)
    return {ranks: median(values) for ranks, values in slower.items() if median(values) > 1 + tolerance}


def slow_ranks(slow: Collection[tuple[int, ...]], observations: Sequence[Observation]) -> set[int]:
    """The ranks of slow groups, unless nothing would be left of their chip type; where one of a group's is slow alone,
    the others are not to blame."""
    alone = {ranks[0] for ranks in slow if len(ranks) == 1}
    found = alone | {rank for ranks in slow if not alone & set(ranks) for rank in ranks}
    for chip in {o.chip for o in observations}:
        measured = {rank for o in observations if o.chip == chip for rank in o.ranks}
        found -= measured if measured <= found else set()
    return found


def _expected(o: Observation, costs: Mapping[tuple[str, int, int], Costs]) -> tuple[float, float]:
    return costs[o.chip, o.tp, o.micro_batch_size].stage(o.layers, o.embed, o.head)
