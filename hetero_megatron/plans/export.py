"""A plan in the formats of others, so that their tools can run or score it.

* ``flagscale``: the flags of its heterogeneous training (process meshes, layers per stage). It knows one pipeline shape
  whose meshes are of one chip type each, with equal micro-batches.
* ``megatron``, ``torchtitan``, ``deepspeed``, ``accelerate``: :mod:`hetero_megatron.plans.runtimes`.
* ``sailor``: the plan dictionary of its simulator (one data-parallel degree for all stages, GPU type, GPUs and TP of
  each replica, every replica in the zone of its published inputs). It divides the batch equally and rounds the number
  of micro-batches up, so that shares that differ by one micro-batch are equal to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

from hetero_megatron.cluster import Cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan, Stage
from hetero_megatron.plans.runtimes.degrees import unequal
from hetero_megatron.plans.runtimes.table import RUNTIMES, written

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec

FORMATS = ("flagscale", "sailor", *RUNTIMES)
SAILOR_GPUS = {  # our names begin with -> its profiles'; others keep their name
    "A100-40": "A100-40", "A100-80": "A100-80", "V100-16": "V100-16", "GH200": "GH-96", "RTX3090": "RTX-3090",
    "RTX2080": "RTX-2080", "TitanRTX": "Titan-RTX",
}  # fmt: skip
SAILOR_ZONE = "us-central1-a"


def export(kind: str, plan: Plan, spec: ModelSpec, cluster: Cluster, dtype: str) -> str:
    """The text of a file in another format, of a plan made for ``dtype``.

    Raises:
        UserError: a plan that the format cannot say.
    """
    for said, key, problem in ((plan.outer, "outer", "outer steps"), (plan.roles, "roles", "roles")):
        if said:
            raise UserError(f"{kind} cannot say {problem}", field=key, accepted=f"a plan without {key}")
    if kind in RUNTIMES:
        return written(kind, plan, spec, cluster, dtype)
    return {"flagscale": flagscale, "sailor": sailor}[kind](plan, cluster)


def _one_shape(plan: Plan, kind: str, rounded: bool = False) -> None:
    """Refuse what neither format can say: pipelines of unlike stages or shares; ``rounded``: the last micro-batch of a
    share may be missing."""
    first = plan.pipelines[0]
    most_micro_batches = -(-plan.global_batch_size // (len(plan.pipelines) * first.micro_batch_size))
    for p, pipeline in enumerate(plan.pipelines):
        alike = [s.layers for s in pipeline.stages] == [s.layers for s in first.stages]
        alike = alike and pipeline.micro_batch_size == first.micro_batch_size
        share = pipeline.num_micro_batches <= most_micro_batches if rounded else pipeline.batch_size == first.batch_size
        if not alike or not share:
            raise UserError(
                f"{kind} has one layer split and one share of the batch for all pipelines", field=f"pipelines[{p}]",
                accepted="a plan of equal pipelines",
            )  # fmt: skip
        for s, stage in enumerate(pipeline.stages):
            for unsayable, accepted in _unsayable(stage, plan.seq_length):
                field = f"pipelines[{p}].stages[{s}]"
                raise UserError(f"{kind} cannot say {unsayable}", field=field, accepted=accepted)


def _unsayable(stage: Stage, seq_length: int) -> Iterator[tuple[str, str]]:
    """What a stage has that is in neither format, and how to plan without it."""
    if len(stage.layers) > 1:
        yield "several ranges of layers", "one range (plan --more-schedules never)"
    yield from unequal(stage, seq_length)
    if stage.weights is not None:
        yield "divided weights", "whole weights"
    if stage.recompute.kind in ("selective", "elementwise"):
        yield f"{stage.recompute} recomputation of one stage", "none or full (plan --recompute none, or full)"


def flagscale(plan: Plan, cluster: Cluster) -> str:
    """Flags, one per line; meshes are runs of stages with one chip type and equal degrees."""
    _one_shape(plan, "FlagScale")
    if plan.schedule != "1f1b":
        raise UserError("FlagScale's meshes run one schedule", field="schedule", value=plan.schedule, accepted="1f1b")
    stages = plan.pipelines[0].stages

    def degrees(stage: Stage) -> tuple[str, int, int]:
        return cluster.ranks[stage.ranks[0]].chip, stage.units[0].tp, len(stage.units) * len(plan.pipelines)

    meshes: list[int] = []
    types: list[str] = []
    for (chip, tp, dp), run in groupby(stages, degrees):
        meshes += [tp, 1, 1, dp, len(list(run))]
        types.append(chip)
    for p, pipeline in enumerate(plan.pipelines):
        for s, (stage, first) in enumerate(zip(pipeline.stages, stages, strict=True)):
            if degrees(stage) != degrees(first):
                raise UserError(
                    "FlagScale has the same chips and degrees in all pipelines", field=f"pipelines[{p}].stages[{s}]",
                    accepted="a plan of equal pipelines",
                )  # fmt: skip
    count, rows = plan.pipelines[0].num_micro_batches, plan.pipelines[0].micro_batch_size
    lines = [
        "--enable-hetero",
        "--hetero-process-meshes " + " ".join(map(str, meshes)),
        "--hetero-pipeline-layer-split " + " ".join(str(s.num_layers) for s in stages),
        "--hetero-device-types " + " ".join(types),
        f"--micro-batch-size {max(1, rows // len(stages[0].units))}",
        f"--global-batch-size {plan.global_batch_size}",
        f"--seq-length {plan.seq_length}",
    ]
    recomputed = [s.num_layers if s.recompute.kind == "full" else s.recompute.layers for s in stages]
    if any(recomputed):
        runs = {"granularity": [int(n > 0) for n in recomputed], "method": [1] * len(stages), "num_layers": recomputed}
        for key, values in runs.items():
            lines.append(f"--recompute-{key.replace('_', '-')}-per-stage-micro-batch " + _runs(values, count))
    return "\n".join(lines) + "\n"


def _runs(values: list[int], count: int) -> str:
    """FlagScale's run-length lists: [stages, micro-batches, value]."""
    rows = [[len(list(run)), count, value] for value, run in groupby(values)]
    return "'" + json.dumps(rows) + "'"


def sailor(plan: Plan, cluster: Cluster) -> str:
    """JSON of Sailor's plan dictionary; Sailor counts embedding and head as layers of their own."""
    _one_shape(plan, "Sailor", rounded=True)
    if plan.schedule != "1f1b":
        raise UserError("Sailor knows one schedule", field="schedule", value=plan.schedule, accepted="1f1b")
    if any(s.recompute.kind != "none" for p in plan.pipelines for s in p.stages):
        raise UserError("Sailor knows no recomputation", field="recompute", accepted="none (plan --recompute none)")
    first = plan.pipelines[0].stages
    layers, groups = [], []
    start = 0
    for s, stage in enumerate(first):
        count = stage.num_layers + (s == 0) + (s == len(first) - 1)
        layers.append(list(range(start, start + count)))
        start += count
        replicas = []
        for pipeline in plan.pipelines:
            for unit in pipeline.stages[s].units:
                name = sailor_gpu(cluster.ranks[unit.ranks[0]].chip)
                replicas.append([[[name, unit.tp, SAILOR_ZONE]], unit.tp])
        groups.append(replicas)
    degrees = {len(g) for g in groups}
    if len(degrees) > 1:
        raise UserError("Sailor has one data-parallel degree for all stages", field="stages", value=sorted(degrees))
    used: dict[str, int] = {}
    for number in plan.ranks:
        name = sailor_gpu(cluster.ranks[number].chip)
        used[name] = used.get(name, 0) + 1
    row = {
        "num_stages": len(first),
        "layers_per_stage": layers,
        "tmp_per_stage": groups,
        "dp": [degrees.pop()] * len(first),
    }
    size = plan.pipelines[0].micro_batch_size // len(first[0].units)
    data = {"pipeline_list": [row], "mbs": size, "gbs": plan.global_batch_size, "used_gpus": used}
    return json.dumps(data) + "\n"


def sailor_gpu(chip: str) -> str:
    """Sailor's name of a chip."""
    return next((name for start, name in SAILOR_GPUS.items() if chip.startswith(start)), chip)
