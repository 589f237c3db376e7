"""Which small pipelines tell every chip type's costs apart. No torch.

An action takes ``fixed + layers x layer (+ embedding) (+ head)`` seconds. First every group of chips trains a model of
few layers alone, which shows stragglers. Then each chip type is at the front of a pipeline and at its end, with no
layers beside the embedding or head and with many, and in the middle with many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

from hetero_megatron.cluster import Cluster
from hetero_megatron.plans import Pipeline, Plan, Recompute, Stage, Unit, plan_from_dict
from hetero_megatron.plans.program import ADAPTIVE
from hetero_megatron.predictor.cost.rates import model_fingerprint
from hetero_megatron.spec import ModelSpec

FEW, MANY = 1, 3  # layers of a stage; many on the fastest chip type, on others as many as take about as long
MICRO_BATCHES = 8  # of a pipeline, at least; one less of larger ones, which take longer
MEASURED_GROUPS = 2  # TP groups per chip type that are in pipelines
Group = tuple[int, ...]  # ranks
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A plan, of a model with as many layers; ``warm_up``: sequences of a first step, which fill its pipelines.
    ``fingerprint``: of the model whose layers they are."""

    plan: Plan
    spec: ModelSpec
    fingerprint: str
    title: str
    warm_up: int


@dataclass(frozen=True)
class Runs:
    """Runs at one TP degree and micro-batch size; ``groups``: by chip type, those that take part."""

    cluster: Cluster
    spec: ModelSpec
    seq_length: int
    tp: int
    micro_batch_size: int
    groups: Mapping[str, Sequence[Group]]

    def alone(self, count: int | None = None) -> Run:
        """A model of few layers on each of the first ``count`` groups of a type (None: all), side by side."""
        return self._run([[g] for groups in self.groups.values() for g in groups[:count]], [FEW])

    def recomputing(self, kind: str) -> Run:
        """The same on one group of a type, with recompute of a kind."""
        run = self.alone(1)
        plan = run.plan.with_stages(lambda stage: replace(stage, recompute=Recompute(kind)))
        return replace(run, plan=plan, title=f"{run.title}, {kind} recompute")

    def pipelines(self, many: Mapping[str, int]) -> list[Run]:
        """With every chip type in front once; ``many``: layers by chip type, see :func:`depths`."""
        chips, runs = list(self.groups), []
        for i in range(len(chips)):
            order = [(g, chip) for chip in chips[i:] + chips[:i] for g in self.groups[chip][:MEASURED_GROUPS]]
            layers = [many[chip] for _, chip in order]
            for depth in [layers] if len(order) == 1 else [[0, *layers[1:]], [*layers[:-1], 0]]:
                runs.append(self._run([[g for g, _ in order]], depth))
        return runs

    def exchanges(self) -> list[Run]:
        """Replicas of one stage on some chips of each type, which exchange gradients and parameters."""
        replicas = sorted([g] for groups in self.groups.values() for g in groups[:MEASURED_GROUPS])
        return [self._run(replicas, [n], 1) for n in (FEW, MANY)] if len(replicas) > 1 else []

    def _run(self, pipelines: Sequence[Sequence[Group]], layers: Sequence[int], count: int | None = None) -> Run:
        """Pipelines with these ``layers`` in their stages and ``count`` micro-batches (None: more than fill them)."""
        size = self.micro_batch_size
        count = count or max(MICRO_BATCHES - (size > 1), len(layers) + 3)
        spans = [[end - n, end] if n else [] for n, end in zip(layers, accumulate(layers), strict=True)]
        stages = [[{"ranks": [*g], "tp": self.tp, "layers": s} for g, s in zip(p, spans)] for p in pipelines]
        data = {
            "version": 1, "seq_length": self.seq_length, "global_batch_size": count * size * len(pipelines),
            "schedule": "1f1b",
            "pipelines": [{"micro_batch_size": size, "num_micro_batches": count, "stages": s} for s in stages],
        }  # fmt: skip
        small = replace(self.spec, num_layers=sum(layers))
        chips = [[f"{self.cluster.ranks[g[0]].chip} x{n}" for g, n in zip(p, layers, strict=True)] for p in pipelines]
        title = f"tp {self.tp}, micro-batch {size}: " + " | ".join(dict.fromkeys(map(", ".join, chips)))
        plan, warm_up = plan_from_dict(data, small, self.cluster), size * len(layers) * len(pipelines)
        return Run(plan, small, model_fingerprint(self.spec), title, warm_up)


def one_rank(rank: int, spec: ModelSpec, rows: int = 1, length: int = 1) -> Plan:
    """All of a model on one rank of the job, of a micro-batch of ``rows`` sequences."""
    unit = Unit((rank,), (1,), (0, rows), ((0, length),), (0, spec.num_heads))
    stage = Stage(((0, spec.num_layers),), (unit,), True, True)
    return Plan(length, rows, "1f1b", (Pipeline(rows, 1, (stage,)),))


def half_split(plan: Plan) -> Plan:
    """A plan under 1F1B with every second backward split, its W put off past the next backward: so one step shows what
    B, B_INPUT and W take beside each other."""
    pipelines = []
    for pipeline in plan.pipelines:
        stages, count = len(pipeline.stages), pipeline.num_micro_batches
        warm_up = [min(stages - s - 1, count) for s in range(stages)]
        backwards = [("B", "I")[m % 2] + "W" * (m > 0 and m % 2 == 0) for m in range(count)]
        backwards[-1] += "W" * (count % 2 == 0)
        orders = (
            "F" * n + "".join("F" * (m < count - n) + letters for m, letters in enumerate(backwards)) for n in warm_up
        )
        pipelines.append(replace(pipeline, orders=tuple(orders)))
    return replace(plan, schedule=ADAPTIVE, pipelines=tuple(pipelines))


def degrees(cluster: Cluster, spec: ModelSpec) -> tuple[int, ...]:
    """TP degrees to measure unless told otherwise: powers of 2 up to a node's chips, and 2 in any case."""
    largest = min(spec.num_heads, max(2, *(group.chips_per_node for group in cluster.nodes)))
    return tuple(2**i for i in range(largest.bit_length()))


def depths(cluster: Cluster, seconds: Mapping[str, float]) -> dict[str, int]:
    """Layers of each chip type where they are to be many, so that nobody waits; ``seconds``: of the same work."""
    fastest = min(seconds.values(), default=0.0)
    layers = {chip: max(FEW, round(MANY * fastest / chip_seconds)) for chip, chip_seconds in seconds.items()}
    return {rank.chip: layers.get(rank.chip, MANY) for rank in cluster.ranks}


def steady(kind: str, seconds: Sequence[T], later: int) -> list[T]:
    """Of a stage's forwards or backwards (``kind`` F or B) in a step of 1F1B, in order, those during which every stage
    has something to do, without the first one; ``later``: how many stages follow. Stages that share memory or a core's
    caches take longer then, as in a step."""
    return list(seconds[max(1, later) :] if kind == "F" else seconds[1 : len(seconds) - later])
