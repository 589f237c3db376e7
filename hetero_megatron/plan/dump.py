"""Canonical plan -> the short spelling of a plan file, which expands to the same plan again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml

from hetero_megatron.plan.canonical import (
    VERSION,
    ExpertGroup,
    KeyValues,
    Optimizer,
    Pipeline,
    Plan,
    Recompute,
    Stage,
    Unit,
)
from hetero_megatron.plan.pipeline_schedule import stored_schedule
from hetero_megatron.plan.schema import shifted
from hetero_megatron.plan.weights import spelled_weights
from hetero_megatron.utils.text import rank_ranges


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as YAML or JSON data, with the keys of a plan file."""
    pipelines = []
    index = 0
    while index < len(plan.pipelines):
        first = plan.pipelines[index]
        copies = _copies(plan.pipelines[index:])
        entry: dict[str, Any] = {
            "micro_batch_size": first.micro_batch_size,
            "num_micro_batches": first.num_micro_batches,
        }
        if copies > 1:
            entry["repeat"] = copies
        if first.in_flight:
            entry["in_flight"] = list(first.in_flight)
        if first.orders:
            entry["schedule"] = stored_schedule(first)
        entry["stages"] = [_stage(first, s) for s in range(len(first.stages))]
        pipelines.append(entry)
        index += copies
    return {
        "version": VERSION,
        "seq_length": plan.seq_length,
        "global_batch_size": plan.global_batch_size,
        "schedule": plan.schedule,
        **({"islands": [rank_ranges(ranks) for ranks in plan.islands]} if plan.islands else {}),
        **({"allow_bridge": True} if plan.allow_bridge else {}),
        **({"made_for": plan.made_for.plain()} if plan.made_for is not None else {}),
        "pipelines": pipelines,
    }


def dump_yaml(plan: Plan) -> str:
    """The plan as the text of a plan file, one line per stage."""
    data = to_dict(plan)
    lines = [f"{key}: {_flow(value)}" for key, value in data.items() if key != "pipelines"] + ["pipelines:"]
    for pipeline in data["pipelines"]:
        keys = [f"{key}: {_flow(value)}" for key, value in pipeline.items() if key != "stages"] + ["stages:"]
        lines += [f"  - {keys[0]}"] + [f"    {key}" for key in keys[1:]]
        for stage in pipeline["stages"]:
            lines.append(f"      - {_flow(stage)}")
    return "\n".join(lines) + "\n"


def _flow(value: Any) -> str:
    """On one line."""
    if not isinstance(value, dict | list):
        return str(value)
    return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=1 << 30)).strip()


def _copies(pipelines: Sequence[Pipeline]) -> int:
    """How many pipelines at the start are the first one, shifted by blocks of consecutive ranks."""
    first, ranks = pipelines[0], sorted(pipelines[0].ranks)
    if ranks != list(range(ranks[0], ranks[0] + len(ranks))):
        return 1
    copies = 1
    while copies < len(pipelines) and pipelines[copies] == shifted(first, copies * len(ranks)):
        copies += 1
    return copies


def _stage(pipeline: Pipeline, index: int) -> dict[str, Any]:
    stage = pipeline.stages[index]
    entry: dict[str, Any] = {"ranks": _ranks(stage.ranks)}
    entry["layers"] = list(stage.layers[0]) if len(stage.layers) == 1 else [list(r) for r in stage.layers]
    if _has_context(stage):
        rows = [[unit for unit in stage.units if unit.sequences == replica] for replica in stage.replicas]
        entry["context"] = [_context(units) for units in rows] if len(rows) > 1 else _context(rows[0])
        if len(rows) > 1:
            entry["dp_split"] = list(stage.dp_split)
        if stage.kv is not None and stage.kv != KeyValues():
            entry["kv"] = {"transport": stage.kv.transport, "block": stage.kv.block}
        elif stage.kv is not None:
            entry["kv"] = {"transport": stage.kv.transport}
    else:
        _division(stage, entry)
    _tp_split(stage, entry)
    _ends(pipeline, index, entry)
    if stage.recompute != Recompute():
        first = stage.recompute.kind == "first"
        entry["recompute"] = {"first": stage.recompute.layers} if first else stage.recompute.kind
    if stage.chip is not None:
        entry["chip"] = stage.chip
    if stage.optimizer != Optimizer():
        entry["optimizer"] = {k: v for k, v in asdict(stage.optimizer).items() if v != getattr(Optimizer(), k)}
    if stage.weights is not None:
        entry["weights"] = spelled_weights(stage.weights)
    if stage.kernels:
        entry["kernels"] = dict(stage.kernels)
    if stage.dtype is not None:
        entry["dtype"] = stage.dtype
    if stage.experts:
        entry["experts"] = [_expert_group(group) for group in stage.experts]
    return entry


def _expert_group(group: ExpertGroup) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "ranks": [m.ranks[0] if len(m.ranks) == 1 else list(m.ranks) for m in group.members],
        "experts": [list(m.experts) if m.experts[0] < m.experts[1] else [] for m in group.members],
    }
    if any(len(set(m.split)) > 1 for m in group.members):
        entry["split"] = [list(m.split) for m in group.members]
    return entry


def _ranks(ranks: Sequence[int]) -> Any:
    text = rank_ranges(ranks)
    return int(text) if text.isdigit() else text


def _division(stage: Stage, entry: dict[str, Any]) -> None:
    sizes = {unit.tp for unit in stage.units}
    if len(sizes) > 1:
        entry["ranks"] = [list(unit.ranks) for unit in stage.units]
    elif sizes != {1}:
        entry["tp"] = sizes.pop()
    if len(set(stage.dp_split)) > 1:
        entry["dp_split"] = list(stage.dp_split)


def _tp_split(stage: Stage, entry: dict[str, Any]) -> None:
    splits = [unit.tp_split for unit in stage.units]
    if all(set(split) == {1} for split in splits):
        return
    one = len(set(splits)) == 1
    entry["tp_split"] = list(splits[0]) if one else [list(split) for split in splits]


def _ends(pipeline: Pipeline, index: int, entry: dict[str, Any]) -> None:
    """``embed`` and ``head`` where they are not where they would be by default."""
    for key, default in (("embed", 0), ("head", len(pipeline.stages) - 1)):
        held = [s for s, stage in enumerate(pipeline.stages) if getattr(stage, key)]
        if held != [default] and index in (held or [default]):
            entry[key] = bool(held)


def _has_context(stage: Stage) -> bool:
    whole = stage.units[0].tokens
    divided = any(
        unit.group or unit.tokens != whole or unit.heads != stage.units[0].heads for unit in stage.units
    )
    return stage.kv is not None or divided or len(whole) != 1


def _context(every: Sequence[Unit]) -> list[dict[str, Any]]:
    """The groups of one inner replica."""
    groups = []
    for group in dict.fromkeys(unit.group for unit in every):
        units = [unit for unit in every if unit.group == group]
        flat = all(unit.tp == 1 for unit in units)
        groups.append(
            {
                "ranks": [unit.ranks[0] for unit in units] if flat else [list(unit.ranks) for unit in units],
                "intervals": [[list(i) for i in unit.tokens] for unit in units],
                "heads": [unit.heads[1] - unit.heads[0] for unit in units],
            }
        )
    return groups
