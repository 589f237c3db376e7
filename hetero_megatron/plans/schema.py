"""Every spelling of a plan (docs/plans.md) -> the canonical plan.

This module reads and expands; it refuses what it cannot expand. Laws that a canonical plan must obey are in
``validate.py``, which ``load_plan`` applies at the end.

How a stage is divided, in order of what is given:

* ``context``: as its groups say (``context.py``), with ``dp_split`` a list of groups per inner replica;
* ``ranks`` as a nested list: each inner list is one TP group;
* ``tp``, or the length of ``tp_split``: consecutive ranks form TP groups of that size;
* ``dp_split`` alone: as many TP groups as it has entries, of equal size;
* none of these: every rank is a group of its own (inner data parallelism).

Several groups divide the sequences of the micro-batch by ``dp_split``, without it evenly, and evenly
must come out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hetero_megatron.errors import UserError
from hetero_megatron.plans.canonical import (
    SCHEDULES,
    STAGE_DTYPES,
    VERSION,
    ActivationOffload,
    KeyValues,
    Optimizer,
    Outer,
    Pipeline,
    Plan,
    Recompute,
    Stage,
    Unit,
)
from hetero_megatron.plans.experts import read_experts, without_plain_experts
from hetero_megatron.plans.fields import (
    Source,
    first_layers,
    is_nested,
    nested_ranks,
    parse_layers,
    parse_ranks,
    require_few_ranks,
    tp_splits,
)
from hetero_megatron.plans.kernels import EVERY, OPERATORS, operator_problem
from hetero_megatron.plans.made_for import read_made_for
from hetero_megatron.plans.program import read_stored_schedule
from hetero_megatron.plans.shares import context_units
from hetero_megatron.plans.validate import validate
from hetero_megatron.plans.weights import read_weights
from hetero_megatron.utils.text import plural
from hetero_megatron.utils.yaml_document import Entry, from_data, read_document

if TYPE_CHECKING:
    from hetero_megatron.cluster import Cluster
    from hetero_megatron.spec import ModelSpec

PLAN_KEYS = (
    "version", "seq_length", "global_batch_size", "schedule", "islands", "outer", "roles", "allow_bridge", "made_for",
    "pipelines",
)  # fmt: skip
PIPELINE_KEYS = ("micro_batch_size", "num_micro_batches", "schedule", "repeat", "in_flight", "stages")
STAGE_KEYS = (
    "ranks", "layers", "tp", "tp_split", "dp_split", "context", "embed", "head",
    "recompute", "optimizer", "kernels", "chip", "kv", "order", "experts", "dtype", "weights", "activations",
)  # fmt: skip


@dataclass(frozen=True)
class Dimensions:
    """The sizes that expansion needs from around a stage."""

    seq_length: int
    num_heads: int
    micro_batch_size: int


def load_plan(
    path: str | os.PathLike[str] | Entry, spec: ModelSpec, cluster: Cluster | None = None, dtype: str | None = None,
    roles: Mapping[str, ModelSpec] | None = None,
) -> Plan:  # fmt: skip
    """Read, expand and validate a plan file (YAML, or JSON by its suffix).

    Args:
        path: the file, or what ``read_document`` has made of it.
        cluster: the plan is also checked against it, with the ``dtype`` that its chips must have. It adds nothing to
            the plan: :func:`~hetero_megatron.plans.islands.add_islands` does, where that is wanted.
        roles: by name, the model of a role that the plan may have ranks for.

    Raises:
        UserError: names the field, the value, what would be accepted, and file:line.
    """
    return _load(path if isinstance(path, Entry) else read_document(path), spec, cluster, dtype, roles or {})


def plan_from_dict(
    data: Mapping[str, Any], spec: ModelSpec, cluster: Cluster | None = None, dtype: str | None = None,
    roles: Mapping[str, ModelSpec] | None = None,
) -> Plan:  # fmt: skip
    """Expand and validate a plan that is spelled as Python data, with the same keys as a plan file."""
    return _load(from_data(data), spec, cluster, dtype, roles or {})


def _load(
    document: Entry, spec: ModelSpec, cluster: Cluster | None, dtype: str | None, roles: Mapping[str, ModelSpec]
) -> Plan:
    plan, source = expand(document, spec.num_heads)
    plan = without_plain_experts(plan, spec) if spec.moe is not None else plan
    role_entry = document.mapping(PLAN_KEYS).get("roles")
    if role_entry is not None:
        from hetero_megatron.plans.role_schema import with_roles

        plan = with_roles(plan, role_entry, roles, cluster, dtype, source, _all_pipelines)
    validate(plan, spec, cluster, dtype=dtype, source=source)
    return plan


def expand(document: Entry, num_heads: int) -> tuple[Plan, Source]:
    """Expand a spelled plan to canonical form but for its roles, without validating it."""
    keys = document.mapping(PLAN_KEYS, required=("seq_length", "global_batch_size", "pipelines"))
    if "version" in keys and keys["version"].integer() != VERSION:
        keys["version"].fail("unknown version of the plan format", accepted=str(VERSION))
    seq_length = keys["seq_length"].integer(1)
    pipelines, origin = _all_pipelines(keys["pipelines"], seq_length, num_heads)
    plan = Plan(
        seq_length=seq_length,
        global_batch_size=keys["global_batch_size"].integer(1),
        schedule=keys["schedule"].choice(SCHEDULES) if "schedule" in keys else "1f1b",
        pipelines=tuple(pipelines),
        islands=_islands(keys["islands"]) if "islands" in keys else (),
        outer=_outer(keys["outer"]) if "outer" in keys else None,
        allow_bridge=keys["allow_bridge"].flag() if "allow_bridge" in keys else False,
        made_for=read_made_for(keys["made_for"]) if "made_for" in keys else None,
    )
    return plan, Source(document.file, dict(document.lines()), tuple(origin))


def _all_pipelines(entry: Entry, seq_length: int, num_heads: int) -> tuple[list[Pipeline], list[int]]:
    """The pipelines of a plan, and by which entry each is spelled."""
    entries = entry.items()
    if not entries:
        entry.fail("a plan has at least one pipeline")
    pipelines: list[Pipeline] = []
    origin: list[int] = []
    ranks = 0
    for index, item in enumerate(entries):
        copies = _pipelines(item, seq_length, num_heads)
        pipelines += copies
        ranks += sum(len(pipeline.ranks) for pipeline in copies)
        require_few_ranks(item, ranks)
        origin += [index] * len(copies)
    return pipelines, origin


def _outer(entry: Entry) -> Outer:
    from hetero_megatron.plans.outer import read_outer

    return read_outer(entry)


def _islands(entry: Entry) -> tuple[tuple[int, ...], ...]:
    return tuple(sorted(tuple(sorted(parse_ranks(item))) for item in entry.items()))


def _pipelines(entry: Entry, seq_length: int, num_heads: int) -> list[Pipeline]:
    """One spelled pipeline -> its copies."""
    keys = entry.mapping(PIPELINE_KEYS, required=("micro_batch_size", "num_micro_batches", "stages"))
    size = keys["micro_batch_size"].integer(1)
    count = keys["num_micro_batches"].integer(1)
    entries = keys["stages"].items()
    if not entries:
        keys["stages"].fail("a pipeline has at least one stage")
    marks = [e.mapping(STAGE_KEYS, required=("ranks", "layers")) for e in entries]
    dimensions = Dimensions(seq_length, num_heads, size)
    embeds, heads = _holders(marks, "embed", 0), _holders(marks, "head", len(marks) - 1)
    stages = tuple(_stage(m, dimensions, e, h) for m, e, h in zip(marks, embeds, heads, strict=True))
    first = Pipeline(size, count, stages)
    if "schedule" in keys:
        first = replace(first, orders=_orders(keys["schedule"], first))
    if "in_flight" in keys:
        first = replace(first, in_flight=_in_flight(keys["in_flight"], len(stages)))
    repeat = keys["repeat"].integer(1) if "repeat" in keys else 1
    if repeat == 1:
        return [first]
    ranks = sorted(first.ranks)
    require_few_ranks(keys["repeat"], repeat * len(ranks))
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        keys["repeat"].fail(
            "only a pipeline on one block of consecutive ranks can be repeated",
            accepted="1, or pipelines written out",
        )
    return [shifted(first, k * len(ranks)) for k in range(repeat)]


def _in_flight(entry: Entry, stages: int) -> tuple[int, ...]:
    """One number for all stages, or one for each; () where that is what it would be anyway."""
    sizes = entry.integers(1) if isinstance(entry.value, list) else (entry.integer(1),) * stages
    if len(sizes) != stages:
        entry.fail(f"{plural(len(sizes), 'number')} for {plural(stages, 'stage')}", accepted="one per stage, or one")
    return () if sizes == (stages,) * stages else tuple(sizes)


def _orders(entry: Entry, pipeline: Pipeline) -> tuple[str, ...]:
    """A stored schedule."""
    try:
        return read_stored_schedule(entry.plain(), pipeline, entry.path)
    except UserError as error:
        raise UserError(
            error.problem, field=error.field, value=error.value, accepted=error.accepted, where=entry.where
        ) from None


def _holders(stages: list[dict[str, Entry]], key: str, default: int) -> list[bool]:
    """Which stages hold the embedding or head: those that say so; if none says ``true``, the default
    one unless it says ``false``."""
    flags = [stage[key].flag() if key in stage else None for stage in stages]
    if any(flags):
        return [bool(x) for x in flags]
    return [i == default and flags[i] is not False for i in range(len(stages))]


def shifted(pipeline: Pipeline, offset: int) -> Pipeline:
    """The same pipeline on ranks that are ``offset`` higher."""
    return replace(pipeline, stages=tuple(stage.on_ranks(lambda rank: rank + offset) for stage in pipeline.stages))


def _stage(keys: dict[str, Entry], dimensions: Dimensions, embed: bool, head: bool) -> Stage:
    layers = parse_layers(keys["layers"])
    if "context" in keys:
        if "tp" in keys:
            keys["tp"].fail("a stage with context groups cannot have it", accepted="TP groups as context members")
        units = context_units(keys, dimensions.seq_length, dimensions.num_heads, dimensions.micro_batch_size)
    else:
        for key in ("kv", "order"):
            if key in keys:
                keys[key].fail("it needs context groups", accepted="context: [{ranks, tokens, heads}, ...]")
        units = _replicas(keys, dimensions)
    kernels = keys["kernels"].any_mapping() if "kernels" in keys else {}
    return Stage(
        layers=layers,
        units=units,
        embed=embed,
        head=head,
        recompute=_recompute(keys.get("recompute"), sum(b - a for a, b in layers)),
        chip=keys["chip"].text() if "chip" in keys else None,
        optimizer=_optimizer(keys.get("optimizer")),
        kernels=tuple(sorted((name, _provider(name, provider)) for name, provider in kernels.items())),
        kv=_key_values(keys["kv"]) if "kv" in keys else None,
        experts=read_experts(keys["experts"]) if "experts" in keys else (),
        dtype=keys["dtype"].choice(STAGE_DTYPES) if "dtype" in keys else None,
        weights=read_weights(keys["weights"], sum(unit.tp for unit in units)) if "weights" in keys else None,
        activations=_activations(keys.get("activations"), sum(b - a for a, b in layers)),
    )


def _provider(operator: str, entry: Entry) -> str:
    problem = operator_problem(operator)
    if problem is not None:
        entry.fail(problem, accepted=", ".join((EVERY, *OPERATORS)))
    return entry.text()


def _replicas(keys: dict[str, Entry], dimensions: Dimensions) -> tuple[Unit, ...]:
    """The units of a stage without context groups: TP groups that divide the sequences."""
    groups = _tp_groups(keys)
    splits = tp_splits(keys.get("tp_split"), groups)
    size = dimensions.micro_batch_size
    if "dp_split" in keys:
        weights = keys["dp_split"].integers(1)
        if len(weights) != len(groups):
            keys["dp_split"].fail(
                f"{plural(len(weights), 'entry')} for {plural(len(groups), 'TP group')}",
                accepted=f"{plural(len(groups), 'entry')}, one per group",
            )
    elif size % len(groups):
        keys["ranks"].fail(
            f"micro_batch_size {size} does not divide evenly over {len(groups)} groups of ranks",
            accepted="tp: (ranks per group), a dp_split, or a micro_batch_size that is a multiple",
        )
    else:
        weights = (size // len(groups),) * len(groups)
    units, start = [], 0
    for ranks, split, weight in zip(groups, splits, weights, strict=True):
        rows = (start, start + weight)
        units.append(Unit(ranks, split, rows, ((0, dimensions.seq_length),), (0, dimensions.num_heads)))
        start += weight
    return tuple(units)


def _tp_groups(keys: dict[str, Entry]) -> list[tuple[int, ...]]:
    entry = keys["ranks"]
    nested = nested_ranks(entry)
    if nested is not None:
        if "tp" in keys and any(len(group) != keys["tp"].integer(1) for group in nested):
            keys["tp"].fail(f"the groups in ranks have sizes {sorted({len(g) for g in nested})}")
        return nested
    ranks = parse_ranks(entry)
    if "tp" in keys:
        size = keys["tp"].integer(1)
        if len(ranks) % size:
            keys["tp"].fail(
                f"{plural(len(ranks), 'rank')} cannot be divided into TP groups of {size}",
                accepted="a divisor of " + str(len(ranks)),
            )
    elif "tp_split" in keys and not is_nested(keys["tp_split"]):
        size = len(keys["tp_split"].items())
        if not size or len(ranks) % size:
            keys["tp_split"].fail(
                f"{plural(size, 'weight')} for {plural(len(ranks), 'rank')}",
                accepted="one weight per rank of a TP group",
            )
    elif "dp_split" in keys:
        groups = len(keys["dp_split"].items())
        if not groups or len(ranks) % groups:
            keys["dp_split"].fail(
                f"{plural(len(ranks), 'rank')} cannot be divided into {groups} equal groups",
                accepted="as many entries as there are inner replicas",
            )
        size = len(ranks) // groups
    else:
        size = 1
    return [ranks[i : i + size] for i in range(0, len(ranks), size)]


def _recompute(entry: Entry | None, num_layers: int) -> Recompute:
    """Reduced to one form: first 0 is none, first of all layers is full, and a stage without layers has
    none."""
    accepted = "none, selective, elementwise, full or {first: n}"
    if entry is None:
        return Recompute()
    if isinstance(entry.value, dict):
        return first_layers(_first(entry, num_layers), num_layers)
    if entry.value not in ("none", "selective", "elementwise", "full"):
        entry.fail("unknown recompute", accepted=accepted)
    return Recompute(entry.value) if num_layers else Recompute()


def _first(entry: Entry, num_layers: int) -> int:
    """``{first: n}`` of a stage's layers."""
    first = entry.mapping(("first",), required=("first",))["first"]
    count = first.integer(0)
    if count > num_layers:
        first.fail(f"the stage has only {plural(num_layers, 'layer')}", accepted=f"0 to {num_layers}")
    return count


def _activations(entry: Entry | None, num_layers: int) -> ActivationOffload | None:
    """None where no layer's are offloaded."""
    if entry is None:
        return None
    keys = entry.mapping(("offload", "ahead"), required=("offload",))
    offload = keys["offload"]
    if isinstance(offload.value, dict):
        layers = _first(offload, num_layers)
    elif offload.value in ("all", "none"):
        layers = num_layers if offload.value == "all" else 0
    else:
        offload.fail("unknown layers", accepted="all, none or {first: n}")
    ahead = keys["ahead"].integer(1) if "ahead" in keys else 1
    return ActivationOffload(layers, ahead) if layers else None


def _optimizer(entry: Entry | None) -> Optimizer:
    if entry is None:
        return Optimizer()
    keys = entry.mapping(("offload", "shard_weights", "share"))
    if "shard_weights" in keys and keys.pop("shard_weights").flag():
        entry.fail("weights are divided by a key of their own", accepted="weights: {gather: step}, or layer")
    share = keys.pop("share").integer() if "share" in keys else 1
    return Optimizer(**{key: value.flag() for key, value in keys.items()}, share=share)


def _key_values(entry: Entry) -> KeyValues:
    keys = entry.mapping(("transport", "block"))
    transport = keys["transport"].choice(("ring", "gather")) if "transport" in keys else "ring"
    return KeyValues(transport, keys["block"].integer(0) if "block" in keys else 0)
