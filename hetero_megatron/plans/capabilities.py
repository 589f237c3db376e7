"""What this version can run: the one table that validation refuses by and the planner searches within."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetero_megatron.plans.canonical import SCHEDULES, Plan, Stage
from hetero_megatron.plans.fields import Source, stages
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec


@dataclass(frozen=True)
class Capability:
    """``what`` names the feature in a refusal; ``instead`` is what this version accepts."""

    supported: bool
    what: str
    instead: str = ""


_SCHEDULES = "1f1b, gpipe, interleaved or zero-bubble"
TABLE: dict[str, Capability] = {
    "schedule.1f1b": Capability(True, "schedule 1f1b"),
    "schedule.gpipe": Capability(True, "schedule gpipe"),
    "schedule.interleaved": Capability(True, "the interleaved schedule"),
    "schedule.zero-bubble": Capability(True, "the zero-bubble schedule"),
    "schedule.adaptive": Capability(True, "the adaptive schedule"),
    "layers.chunks": Capability(True, "virtual chunks (several layer ranges in a stage)"),
    "context": Capability(True, "context groups (context and head parallelism)"),
    "tp": Capability(True, "tensor parallelism with sequence parallelism"),
    "tp_split": Capability(True, "uneven tensor parallelism"),
    "dp_split": Capability(True, "inner data parallelism"),
    "ranks.unequal": Capability(True, "inner replicas of unequal TP"),
    "recompute.none": Capability(True, "no recompute"),
    "recompute.selective": Capability(True, "selective recompute"),
    "recompute.elementwise": Capability(True, "recompute of elementwise results"),
    "recompute.full": Capability(True, "full recompute"),
    "recompute.first": Capability(True, "recompute of the first layers"),
    "optimizer.offload": Capability(True, "offload of the optimizer to host memory"),
    "activations": Capability(True, "activations in host memory between forward and backward"),
    "weights": Capability(True, "weights divided over inner replicas, gathered when they are used"),
    "kernels": Capability(True, "a kernel plan per stage"),
    "islands": Capability(True, "gradients summed, and routed tokens spread, inside islands of ranks"),
    "outer": Capability(True, "outer steps between islands"),
    "roles": Capability(True, "models that only run forward, on ranks of their own"),
    "allow_bridge": Capability(True, "tensor-parallel and context groups that no communication library joins"),
    "dtype.fp8": Capability(True, "products in fp8"),
    "experts": Capability(True, "experts divided over ranks"),
}


def supports(feature: str) -> bool:
    """Whether this version can run a feature of the table; KeyError for a name that is not in it."""
    return TABLE[feature].supported


def used_features(plan: Plan) -> Iterator[tuple[str, str, object]]:
    """(feature, path, value) of everything in a plan that needs a capability."""
    yield f"schedule.{plan.schedule}", "schedule", plan.schedule
    if plan.islands:
        yield "islands", "islands", [list(ranks) for ranks in plan.islands]
    if plan.outer is not None:
        yield "outer", "outer.every", plan.outer.every
    if plan.roles:
        yield "roles", "roles", [name for name, _ in plan.roles]
    if plan.allow_bridge:
        yield "allow_bridge", "allow_bridge", True
    reported = set()
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for feature, key, value in _stage_features(stage):
                if feature not in reported:  # the first use is the one to report
                    reported.add(feature)
                    yield feature, f"pipelines[{p}].stages[{s}].{key}", value


def _stage_features(stage: Stage) -> Iterator[tuple[str, str, object]]:
    if len(stage.layers) > 1:
        yield "layers.chunks", "layers", [list(r) for r in stage.layers]
    if (
        stage.kv is not None
        or any(unit.group or len(unit.tokens) != 1 for unit in stage.units)
        or len({unit.tokens for unit in stage.units}) > 1
        or len({unit.heads for unit in stage.units}) > 1
    ):
        yield "context", "context", f"{len(stage.units)} members"
    if any(unit.tp > 1 for unit in stage.units):
        yield "tp", "tp", max(unit.tp for unit in stage.units)
    if any(len(set(unit.tp_split)) > 1 for unit in stage.units):
        yield "tp_split", "tp_split", stage.units[0].tp_split
    if len(stage.replicas) > 1:
        yield "dp_split", "dp_split", stage.dp_split
    if len({unit.tp for unit in stage.units}) > 1:
        yield "ranks.unequal", "ranks", stage.ranks
    yield f"recompute.{stage.recompute.kind}", "recompute", str(stage.recompute)
    if stage.optimizer.offload:
        yield "optimizer.offload", "optimizer.offload", True
    if stage.activations is not None:
        yield "activations", "activations.offload", stage.activations.layers
    if stage.weights is not None:
        yield "weights", "weights.shard", list(stage.weights.shard)
    if stage.dtype == "fp8":
        yield "dtype.fp8", "dtype", stage.dtype
    if stage.experts:
        yield "experts", "experts", f"{len(stage.experts)} groups"
    if stage.kernels:
        yield "kernels", "kernels", dict(stage.kernels)


def features_are_supported(plan: Plan, source: Source) -> None:
    if plan.schedule not in SCHEDULES:
        raise source.error("unknown schedule", "schedule", plan.schedule, "one of " + ", ".join(SCHEDULES))
    for feature, path, value in used_features(plan):
        capability = TABLE[feature]
        if not capability.supported:
            raise source.error(f"this version cannot run {capability.what}", path, value, capability.instead)


def predictions_fit(plan: Plan, spec: ModelSpec, source: Source) -> None:
    """Refuse plans in which modules that predict further tokens have nothing to predict, or that do with them what is
    not known. They are on the stage with the head, after its layers; a last stage with no layers has them to itself."""
    depth = spec.mtp_layers
    if depth >= plan.seq_length:
        raise source.error(
            f"{plural(depth, 'module')} would predict tokens beyond a sequence of {plan.seq_length}",
            "--mtp-num-layers", depth, f"at most {plan.seq_length - 1}",
        )  # fmt: skip
    for path, _, stage in stages(plan):
        for key, feature in (("weights", "divides its weights"), ("activations", "has activations in host memory")):
            if stage.head and getattr(stage, key) is not None:
                raise source.error(
                    f"a stage that {feature} knows no modules that predict further tokens", f"{path}.{key}", "a choice",
                    f"none on the stage with the head, or a model without modules (it has {depth})",
                )  # fmt: skip
