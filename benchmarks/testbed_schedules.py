"""One pipeline over all chips of a cluster under each pipeline schedule, with the best layers for each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hetero_megatron.cluster import Cluster
from hetero_megatron.planner.search.schedule_search import adapted, interleaved
from hetero_megatron.plans import Plan, plan_from_dict, validate
from hetero_megatron.plans.dump import to_dict
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import ModelSpec

CHUNKS = 2, 3  # of layers per stage
PROMISING = 4  # divisions of the layers that a schedule is made for


def schedule_plans(
    cluster: Cluster, spec: ModelSpec, seq_length: int, batch: int, dtype: str
) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, kind, plan) of the fastest predicted plan under each schedule, with one range of layers per stage and with
    several: divisions of the layers within one of those by speed at every cut, micro-batches of 1; for the adaptive
    ones, the best divisions under the others."""
    costs = CostModel(spec, cluster, seq_length, dtype, CostOptions())
    found: dict[str, list[tuple[float, Plan, Plan]]] = {}

    def judge(plan: Plan | None, whole: Plan) -> None:
        if plan is None:
            return
        validate(plan, spec, cluster, dtype=dtype)
        prediction = predict(plan, spec, cluster, dtype, costs)
        if not prediction.over:
            found.setdefault(kind_of(plan), []).append((prediction.step_seconds, plan, whole))

    for plan in _divisions(cluster, spec, seq_length, batch):
        for schedule in ("1f1b", "zero-bubble"):
            judge(replace(plan, schedule=schedule), plan)
        for cut in filter(None, (interleaved(plan, chunks) for chunks in CHUNKS)):
            judge(cut, plan)
            judge(replace(cut, schedule="zero-bubble"), plan)
    for kind in tuple(found):
        for _, plan, whole in sorted(found[kind], key=lambda row: row[0])[:PROMISING]:
            start = replace(plan, schedule="interleaved" if plan.pipelines[0].chunks > 1 else "1f1b")
            judge(adapted(start, predict(whole, spec, cluster, dtype, costs), costs), whole)
    best = {kind: min(rows, key=lambda row: row[0])[1] for kind, rows in found.items()}
    return [(kind, kind, to_dict(plan)) for kind, plan in best.items()]


def kind_of(plan: Plan) -> str:
    """The plan's schedule, and whether its stages have several chunks of layers."""
    chunked = plan.pipelines[0].chunks > 1 and plan.schedule != "interleaved"
    return f"{plan.schedule}, chunks" if chunked else plan.schedule


def cuts_by_speed(num_layers: int, speeds: Sequence[float]) -> list[int]:
    """Where stages of such speeds begin, and the end of the last: as many layers each as it is fast."""
    return [round(num_layers * sum(speeds[:i]) / sum(speeds)) for i in range(len(speeds) + 1)]


def _divisions(cluster: Cluster, spec: ModelSpec, seq_length: int, batch: int) -> Iterator[Plan]:
    """Of the layers, in the order of the ranks."""
    ranks = range(cluster.world_size)
    speeds = [cluster.chip_of(r).speed or 1.0 for r in ranks]
    first, *cuts, last = cuts_by_speed(spec.num_layers, speeds)
    for moved in itertools.product((-1, 0, 1), repeat=len(cuts)):
        ends = [first, *(cut + by for cut, by in zip(cuts, moved)), last]
        if all(a < b for a, b in itertools.pairwise(ends)):
            yield plan_from_dict(_described(ranks, ends, seq_length, batch), spec, cluster)


def _described(ranks: Sequence[int], ends: Sequence[int], seq_length: int, batch: int) -> dict[str, Any]:
    stages = [{"ranks": [r], "layers": [ends[i], ends[i + 1]]} for i, r in enumerate(ranks)]
    pipeline = {"micro_batch_size": 1, "num_micro_batches": batch, "stages": stages}
    head = {"version": 1, "seq_length": seq_length, "global_batch_size": batch, "schedule": "1f1b"}
    return {**head, "pipelines": [pipeline]}
