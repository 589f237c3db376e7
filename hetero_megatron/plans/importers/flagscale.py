"""FlagScale's process meshes -> a plan.

A mesh is one chip type with its own degrees; a pipeline runs through all meshes. Where every mesh has
the same data parallel degree, that becomes pipelines, as with Megatron's flags; otherwise the greatest
common divisor of the degrees becomes pipelines and the rest is inner data parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import TYPE_CHECKING

from hetero_megatron.layout import cut
from hetero_megatron.plans.canonical import Interval, Pipeline, Plan, Recompute, Stage
from hetero_megatron.plans.fields import Blame, FlagSource, first_layers, flag_error
from hetero_megatron.plans.importers.megatron import micro_batches
from hetero_megatron.plans.importers.megatron_stages import context_flags, context_members, intervals
from hetero_megatron.utils.text import plural, word

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec

MESHES = "hetero_process_meshes"


@dataclass(frozen=True)
class FlagScaleParallel:
    """FlagScale's hetero flags, named like them.

    Args:
        hetero_process_meshes: groups of five: tensor, context, expert, data, pipeline parallel of each mesh.
        hetero_pipeline_layer_split: decoder layers of every pipeline stage.
        hetero_device_types: one chip name per mesh; empty: not checked.
        micro_batch_size: sequences per micro-batch and data-parallel rank of the first mesh.
        recompute_*_per_stage_micro_batch: run-length lists ``[stages, micro-batches, value,
            micro-batches, value, …]``.
    """

    seq_length: int
    hetero_process_meshes: Sequence[int]
    hetero_pipeline_layer_split: Sequence[int]
    hetero_device_types: Sequence[str] = ()
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    world_size: int | None = None
    recompute_granularity_per_stage_micro_batch: Sequence[Sequence[int]] | None = None
    recompute_method_per_stage_micro_batch: Sequence[Sequence[int]] | None = None
    recompute_num_layers_per_stage_micro_batch: Sequence[Sequence[int]] | None = None
    schedule: str = "1f1b"
    cp_comm_type: Sequence[str] = ("p2p",)


@dataclass(frozen=True)
class Mesh:
    tp: int
    cp: int
    dp: int
    pp: int
    first_rank: int
    chip: str | None

    @property
    def size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp


def from_flagscale(flags: FlagScaleParallel, spec: ModelSpec) -> Plan:
    """Build the plan that FlagScale's flags describe, with its numbering of ranks (meshes in order).

    Raises:
        UserError: names the flag; expert parallelism and recompute that changes between micro-batches are
            refused by name; also for a plan that breaks a law of ``validate``.
    """
    from hetero_megatron.plans.validate import validate

    meshes = _meshes(flags)
    split = _layer_split(flags, meshes, spec.num_layers)
    if "a2a+p2p" in flags.cp_comm_type and any(mesh.cp > 1 for mesh in meshes):
        problem = "process meshes do not say into which two levels context parallelism is divided"
        raise flag_error("cp_comm_type", " ".join(flags.cp_comm_type), problem, "p2p, allgather or a2a")
    rows = meshes[0].dp * flags.micro_batch_size  # sequences in one micro-batch of the whole mesh
    for mesh in meshes:
        if rows % mesh.dp:
            raise flag_error(
                MESHES,
                list(flags.hetero_process_meshes),
                f"the micro-batch of {plural(rows, 'sequence')} (data parallel of the first mesh x micro-batch size) "
                f"does not divide over data parallel {mesh.dp}",
                f"a multiple of {mesh.dp} sequences",
            )
    count = micro_batches(flags.global_batch_size, rows)
    pipelines = gcd(*(mesh.dp for mesh in meshes))
    recomputes = _recomputes(flags, split, count)
    for i, mesh in enumerate(meshes):
        if mesh.cp > 1 and mesh.dp > pipelines:
            per_pipeline = plural(mesh.dp // pipelines, "data-parallel rank")
            problem = f"mesh {i} has context parallelism and {per_pipeline} per pipeline"
            accepted = f"cp 1, or data parallel {pipelines} (what all meshes have in common)"
            raise flag_error(MESHES, list(flags.hetero_process_meshes), problem, accepted)
    built = tuple(
        _pipeline(
            meshes,
            split,
            recomputes,
            p,
            pipelines,
            rows // pipelines,
            count,
            (flags.seq_length, spec.num_heads),
            flags.cp_comm_type,
        )
        for p in range(pipelines)
    )
    plan = Plan(flags.seq_length, rows * count, flags.schedule, built)
    validate(plan, spec, source=FlagSource(blame=partial(_blame, flags, meshes)))
    return plan


def _blame(flags: FlagScaleParallel, meshes: list[Mesh], key: str, stage: int) -> Blame | None:
    """The flag behind a key of the plan that was built from flags."""
    stage_words = f"stage {stage}, counted from 0"
    split = ("hetero_pipeline_layer_split", stage_words, "a layer for every stage between the first and the last")
    recomputes = [f"recompute_{setting}_per_stage_micro_batch" for setting in ("num_layers", "granularity")]
    mesh = next((i for i, m in enumerate(meshes) if stage < sum(n.pp for n in meshes[: i + 1])), 0)
    names = {
        **dict.fromkeys(("layers", "embed", "head"), split),
        **dict.fromkeys(("tp", "context", "dp_split"), (MESHES, f"mesh {mesh}, counted from 0")),
        "recompute": (next((n for n in recomputes if getattr(flags, n)), recomputes[-1]), stage_words),
        "chip": ("hetero_device_types", f"mesh {mesh}, counted from 0"),
        **{name: (name,) for name in ("seq_length", "global_batch_size", "schedule")},
    }
    if key not in names:
        return None
    name, *words = names[key]
    value = getattr(flags, name)
    return Blame(name, list(value) if isinstance(value, tuple) else value, *words)


def _pipeline(
    meshes: list[Mesh],
    split: list[Interval],
    recomputes: list[Recompute],
    index: int,
    pipelines: int,
    rows: int,
    count: int,
    sizes: tuple[int, int],
    comm_type: Sequence[str],
) -> Pipeline:
    """Pipeline ``index``: its part of the data-parallel ranks of every mesh."""
    stages: list[Stage] = []
    total = sum(mesh.pp for mesh in meshes)
    for mesh in meshes:
        inner = mesh.dp // pipelines
        for p in range(mesh.pp):
            first = mesh.first_rank + (p * mesh.dp + index * inner) * mesh.cp * mesh.tp
            tps = [tuple(range(r, r + mesh.tp)) for r in range(first, first + inner * mesh.cp * mesh.tp, mesh.tp)]
            units, kv = context_members(context_flags(mesh.cp, comm_type, None), tps[: mesh.cp], rows, *sizes)
            if inner > 1:
                intervals = cut(rows, [1] * inner)
                units = tuple(
                    replace(units[0], ranks=tp, sequences=interval) for tp, interval in zip(tps, intervals, strict=True)
                )
            s = len(stages)
            layers = (split[s],) if split[s][0] < split[s][1] else ()
            stages.append(Stage(layers, units, s == 0, s == total - 1, recomputes[s], mesh.chip, kv=kv))
    return Pipeline(rows, count, tuple(stages))


def _meshes(flags: FlagScaleParallel) -> list[Mesh]:
    numbers, chips = list(flags.hetero_process_meshes), list(flags.hetero_device_types)
    if not numbers or len(numbers) % 5 or min(numbers) < 1:
        raise flag_error(
            MESHES, numbers, "not groups of five positive integers", "tp cp ep dp pp for each mesh"
        )
    groups = [numbers[i : i + 5] for i in range(0, len(numbers), 5)]
    if chips and len(chips) != len(groups):
        problem = f"{plural(len(chips), 'name')} for {plural(len(groups), 'mesh', 'meshes')}"
        raise flag_error("hetero_device_types", chips, problem, "one per mesh")
    if flags.micro_batch_size < 1:
        raise flag_error("micro_batch_size", flags.micro_batch_size, "too small", "an integer >= 1")
    meshes: list[Mesh] = []
    for i, (tp, cp, ep, dp, pp) in enumerate(groups):
        if ep != 1:
            raise flag_error(
                MESHES, numbers, f"mesh {i} asks for expert parallelism {ep}, not runnable here", "ep 1"
            )
        first = sum(mesh.size for mesh in meshes)
        meshes.append(Mesh(tp, cp, dp, pp, first, chips[i] if chips else None))
    total = sum(mesh.size for mesh in meshes)
    if flags.world_size is not None and flags.world_size != total:
        started = f"{flags.world_size} {word(flags.world_size, 'was')} started"
        raise flag_error(MESHES, numbers, f"the meshes use {plural(total, 'rank')}, {started}", str(total))
    return meshes


def _layer_split(flags: FlagScaleParallel, meshes: list[Mesh], num_layers: int) -> list[Interval]:
    split, stages = list(flags.hetero_pipeline_layer_split), sum(mesh.pp for mesh in meshes)
    name = "hetero_pipeline_layer_split"
    if len(split) != stages:
        problem = f"{plural(len(split), 'entry')} for {plural(stages, 'pipeline stage')}"
        raise flag_error(name, split, problem, plural(stages, "integer"))
    if min(split) < 0 or sum(split) != num_layers:
        raise flag_error(
            name, split, f"it sums to {plural(sum(split), 'layer')}, the model has {num_layers}", str(num_layers)
        )
    return intervals(split)


def _recomputes(flags: FlagScaleParallel, split: list[Interval], count: int) -> list[Recompute]:
    """One recompute per stage, from FlagScale's three lists; granularity 1 is full, method 0 uniform, 1
    block."""
    granularity = _per_stage(flags, "recompute_granularity_per_stage_micro_batch", len(split), count)
    if granularity is None:
        return [Recompute()] * len(split)
    method = _per_stage(flags, "recompute_method_per_stage_micro_batch", len(split), count) or [0] * len(
        split
    )
    number = _per_stage(flags, "recompute_num_layers_per_stage_micro_batch", len(split), count) or [1] * len(
        split
    )
    recomputes = []
    for (a, b), on, block, layers in zip(split, granularity, method, number, strict=True):
        if on and not block and layers > 1:
            name = "recompute_num_layers_per_stage_micro_batch"
            raise flag_error(name, layers, "uniform recompute in chunks of several layers is missing", "1")
        recomputes.append(first_layers(layers if block else b - a, b - a) if on else Recompute())
    return recomputes


def _per_stage(flags: FlagScaleParallel, name: str, stages: int, count: int) -> list[int] | None:
    """Decode run-length lists to one value per stage; refuse a value that changes between micro-batches."""
    lists: Sequence[Sequence[int]] | None = getattr(flags, name)
    if lists is None:
        return None
    values: list[int] = []
    for row in map(list, lists):
        if len(row) < 3 or len(row) % 2 == 0 or min(row) < 0:
            raise flag_error(name, row, "not a run-length list", "[stages, micro-batches, value, ...]")
        if sum(row[1::2]) != count:
            problem = f"it covers {sum(row[1::2])} of {plural(count, 'micro-batch')}"
            raise flag_error(name, row, problem, f"sums of {count}")
        used = {value for run, value in zip(row[1::2], row[2::2], strict=True) if run}
        if len(used) > 1:
            raise flag_error(
                name, row, "recompute that changes between micro-batches is not runnable here", "one value"
            )
        values += [used.pop()] * row[0]
    if len(values) != stages:
        raise flag_error(
            name, list(map(list, lists)), f"{plural(len(values), 'stage')} of {stages}",
            f"{plural(stages, 'stage')} in all",
        )
    return values
