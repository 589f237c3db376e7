"""A plan -> Megatron's parallel flags, where all ranks have the same degrees: the inverse of ``importers.megatron``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from hetero_megatron.errors import UserError
from hetero_megatron.plans.canonical import Pipeline, Plan, Stage
from hetero_megatron.plans.importers.megatron import ELEMENTWISE, from_megatron
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.spec import ModelSpec


def degrees_of(plan: Plan, spec: ModelSpec, runtime: str) -> MegatronParallel:
    """The flags that describe the plan but for the numbers of its ranks (:func:`rank_order`).

    Args:
        runtime: who cannot say it, for messages.

    Raises:
        UserError: names the first place where the plan is not one of equal degrees.
    """
    plan = by_replica(plan)
    for p, s, stage in _stages(plan):
        for unsayable, accepted_plan in unequal(stage, plan.seq_length):
            raise UserError(
                f"{runtime} cannot say {unsayable}", field=f"pipelines[{p}].stages[{s}]", accepted=accepted_plan
            )
    flags = _flags(plan, spec)
    try:
        written = from_megatron(flags, spec)
        field = difference(_unnumbered(plan), _unnumbered(written))
    except UserError as error:
        field = error.field or "pipelines"
    if field:
        accepted = "a plan of equal pipelines and degrees (plan --for)"
        raise UserError(f"{runtime} has the same degrees on every rank", field=field, accepted=accepted)
    return flags


def by_replica(plan: Plan) -> Plan:
    """The plan with a pipeline of its own for every inner replica that has all weights and computes as much as others:
    the same step."""
    pipelines: list[Pipeline] = []
    for pipeline in plan.pipelines:
        count = len(pipeline.stages[0].units)
        size, remainder = divmod(pipeline.micro_batch_size, count)
        alike = all(len(s.units) == len(s.replicas) == count and len(set(s.dp_split)) == 1 for s in pipeline.stages)
        if count == 1 or remainder or not alike or any(s.weights is not None for s in pipeline.stages):
            pipelines.append(pipeline)
            continue
        for i in range(count):
            stages = tuple(
                replace(s, units=(replace(s.units[i], sequences=(0, size), group=0),)) for s in pipeline.stages
            )
            pipelines.append(replace(pipeline, micro_batch_size=size, stages=stages))
    return replace(plan, pipelines=tuple(pipelines))


def unequal(stage: Stage, seq_length: int) -> Iterator[tuple[str, str]]:
    """What a stage has that equal degrees cannot say, and how to plan without it."""
    if len({unit.tp for unit in stage.units}) > 1:
        yield "replicas with unlike tensor parallelism in one stage", "equal degrees"
    if any(len(set(unit.tp_split)) > 1 for unit in stage.units):
        yield "uneven tensor-parallel shares", "equal shares"
    if any(unit.num_tokens != seq_length for unit in stage.units):
        yield "context groups", "whole sequences (plan --context never)"
    if stage.experts:
        yield "divided experts", "experts on the ranks of a tensor-parallel group"
    if stage.optimizer.offload:
        yield "an offloaded optimizer", "optimizers on the chips (plan --offload never)"
    if stage.activations is not None:
        yield "activations in host memory", "activations on the chips"
    if stage.weights is not None and len(set(stage.weights.shard)) > 1:
        yield "uneven shares of weights", "equal shares"


def rank_order(plan: Plan, flags: MegatronParallel, spec: ModelSpec) -> tuple[int, ...]:
    """The plan's rank for each of the runtime's, which number tensor, then data, then pipeline parallel."""
    numbered = from_megatron(flags, spec)
    pairs = [
        pair for stage, numbered_stage in zip(by_replica(plan).stages, numbered.stages, strict=True)
        for pair in zip(numbered_stage.ranks, stage.ranks, strict=True)
    ]  # fmt: skip
    return tuple(rank for _, rank in sorted(pairs))


def node_order(order: Sequence[int], cluster: Cluster, runtime: str) -> tuple[str, ...]:
    """Nodes in the order in which the runtime has to start them.

    Raises:
        UserError: a node's ranks do not follow each other, or not in the order of its cards.
    """
    places = [(cluster.ranks[rank].node, cluster.ranks[rank].local) for rank in order]
    nodes = tuple(dict.fromkeys(node for node, _ in places))
    if places != sorted(places, key=lambda place: (nodes.index(place[0]), place[1])):
        problem = f"{runtime} numbers the ranks of a node one after another"
        raise UserError(problem, field="pipelines", accepted="a plan whose stages take nodes in turn (plan --for)")
    return nodes


def renumbered(plan: Plan, order: Sequence[int]) -> Plan:
    """The plan with rank ``order[i]`` where it has ``i``."""
    return plan.with_stages(lambda stage: stage.on_ranks(order.__getitem__))


def _flags(plan: Plan, spec: ModelSpec) -> MegatronParallel:
    first = plan.pipelines[0]
    stages, replicas = first.stages, len(first.stages[0].units)
    size = first.micro_batch_size // replicas
    layers = [stage.num_layers for stage in stages]
    chunks = first.chunks
    blocks = [stage.chunks[c] for c in range(chunks) for stage in stages]
    weights = stages[0].weights
    recompute = next((stage.recompute for stage in stages if stage.recompute.kind != "none"), None)
    # The first layers of a stage: "full" is as many as the fullest stage has.
    recomputed = max(stage.recomputed for stage in stages)
    all_recomputed = all(stage.recomputed == stage.num_layers for stage in stages)
    partly = ("selective", "elementwise")  # of every layer
    granularity = None if recompute is None else "selective" if recompute.kind in partly else "full"
    equal_layers = chunks == 1 and len(set(layers)) == 1
    return MegatronParallel(
        world_size=plan.world_size, seq_length=plan.seq_length, micro_batch_size=max(1, size),
        global_batch_size=plan.global_batch_size, tensor_model_parallel_size=stages[0].units[0].tp,
        pipeline_model_parallel_size=len(stages),
        pipeline_model_parallel_layout=None if equal_layers else layout([b - a for a, b in blocks]),
        recompute_granularity=granularity,
        recompute_method=None if granularity != "full" else "uniform" if all_recomputed else "block",
        recompute_num_layers=None if granularity != "full" else 1 if all_recomputed else recomputed,
        recompute_modules=ELEMENTWISE if recompute is not None and recompute.kind == "elementwise" else None,
        use_torch_fsdp2=weights is not None and weights.gather == "layer",
        torch_fsdp2_no_reshard_after_forward=weights is not None and not weights.reshard_after_forward,
        schedule=None if plan.schedule in ("1f1b", "interleaved") else plan.schedule,
    )  # fmt: skip


def layout(counts: Sequence[int]) -> str | None:
    """Megatron's pipeline layout of (virtual) stages with so many layers, embedding before and loss after them; None
    where nothing need be said."""
    if len(counts) == 1:
        return None
    cells = ["t" * count for count in counts]
    return "|".join(["E" + cells[0], *cells[1:-1], cells[-1] + "L"])


def _unnumbered(plan: Plan) -> tuple[Any, ...]:
    """What the plan says but for who its ranks are."""
    shapes = []
    for pipeline in plan.pipelines:
        stages = []
        for stage in pipeline.stages:
            kind = stage.recompute.kind
            recomputed = kind if kind in ("selective", "elementwise") and stage.num_layers else stage.recomputed
            stages.append({
                "layers": stage.chunks, "embed": stage.embed, "head": stage.head,
                "units": tuple(replace(unit, ranks=(0,) * unit.tp) for unit in stage.units),
                "recompute": recomputed, "weights": stage.weights, "optimizer": stage.optimizer.share,
            })  # fmt: skip
        shapes.append({"micro_batch_size": pipeline.micro_batch_size, "stages": stages,
                       "num_micro_batches": pipeline.num_micro_batches, "orders": pipeline.orders})  # fmt: skip
    return ({"schedule": plan.schedule, "global_batch_size": plan.global_batch_size, "pipelines": shapes},)


def difference(mine: Any, other: Any, path: str = "") -> str:
    """Where two values of records, lists and mappings first differ; empty: nowhere."""
    if is_dataclass(mine) and type(mine) is type(other) and not isinstance(mine, type):
        mine, other = ({f.name: getattr(x, f.name) for f in fields(x)} for x in (mine, other))
    if isinstance(mine, dict) and isinstance(other, dict) and mine.keys() == other.keys():
        pairs = [(f"{path}.{key}".lstrip("."), mine[key], other[key]) for key in mine]
    elif isinstance(mine, list | tuple) and isinstance(other, list | tuple) and len(mine) == len(other):
        pairs = [(f"{path}[{i}]" if path else "", a, b) for i, (a, b) in enumerate(zip(mine, other, strict=True))]
    else:
        return "" if mine == other else path or "plan"
    return next((first for pair_path, a, b in pairs if (first := difference(a, b, pair_path))), "")


def _stages(plan: Plan) -> Iterator[tuple[int, int, Stage]]:
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            yield p, s, stage
