"""One pipeline over all chips of a cluster under each pipeline schedule, with the best layers for each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hetero_megatron.cluster import Cluster
from hetero_megatron.plan import Plan, plan_from_dict, validate
from hetero_megatron.plan.dump import to_dict
from hetero_megatron.planner.cost.layer_cost import CostModel, CostOptions
from hetero_megatron.planner.search.schedule_search import adapted, interleaved
from hetero_megatron.planner.simulate.step import predict
from hetero_megatron.spec import ModelSpec

PROMISING = 4  # divisions of the layers that a schedule is made for


def schedule_plans(
    cluster: Cluster, spec: ModelSpec, seq_length: int, batch: int, dtype: str
) -> list[tuple[str, str, dict[str, Any]]]:
    """(name, schedule, plan) of the fastest predicted plan under each schedule: divisions of the layers within one
    of those by speed at every cut, micro-batches of 1; for the adaptive one, the best divisions under 1F1B and
    zero-bubble."""
    costs = CostModel(spec, cluster, seq_length, dtype, CostOptions())
    found: dict[str, list[tuple[float, Plan]]] = {}

    def judge(plan: Plan | None) -> None:
        if plan is None:
            return
        validate(plan, spec, cluster, dtype=dtype)
        prediction = predict(plan, spec, cluster, dtype, costs)
        if not prediction.over:
            found.setdefault(plan.schedule, []).append((prediction.step_seconds, plan))

    plain = list(_divisions(cluster, spec, seq_length, batch))
    for plan in plain:
        for schedule in ("1f1b", "zero-bubble"):
            judge(replace(plan, schedule=schedule))
        for chunks in (2, 3):
            judge(interleaved(plan, chunks))
    for schedule in ("1f1b", "zero-bubble"):
        for _, plan in sorted(found[schedule], key=lambda row: row[0])[:PROMISING]:
            start = replace(plan, schedule="1f1b")
            judge(adapted(start, predict(start, spec, cluster, dtype, costs), costs))
    best = {schedule: min(rows, key=lambda row: row[0])[1] for schedule, rows in found.items()}
    return [(schedule, schedule, to_dict(plan)) for schedule, plan in best.items()]


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
