"""A plan as text: the short spelling of a plan file, which expands to the same plan again, and the picture that is
printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import yaml

from hetero_megatron.layout import cut
from hetero_megatron.plans.canonical import (
    VERSION,
    ExpertGroup,
    KeyValues,
    Optimizer,
    Outer,
    Pipeline,
    Plan,
    Recompute,
    Stage,
    Unit,
)
from hetero_megatron.plans.program import stored_schedule
from hetero_megatron.plans.schema import shifted
from hetero_megatron.plans.weights import spelled_weights
from hetero_megatron.spec import ModelSpec, shares
from hetero_megatron.utils.text import plural, rank_ranges
from hetero_megatron.utils.yaml_document import QuotingDumper


def to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as YAML or JSON data, with the keys of a plan file."""
    return {
        "version": VERSION,
        "seq_length": plan.seq_length,
        "global_batch_size": plan.global_batch_size,
        "schedule": plan.schedule,
        **({"islands": [rank_ranges(ranks) for ranks in plan.islands]} if plan.islands else {}),
        **({"outer": _outer(plan.outer)} if plan.outer is not None else {}),
        **({"roles": {name: {"pipelines": _pipelines(role)} for name, role in plan.roles}} if plan.roles else {}),
        **({"allow_bridge": True} if plan.allow_bridge else {}),
        **({"made_for": plan.made_for.plain()} if plan.made_for is not None else {}),
        "pipelines": _pipelines(plan),
    }


def _pipelines(plan: Plan) -> list[dict[str, Any]]:
    pipelines: list[dict[str, Any]] = []
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
    return pipelines


def _outer(outer: Outer) -> dict[str, Any]:
    from hetero_megatron.plans.outer import spelled_outer

    return spelled_outer(outer)


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
    return str(yaml.dump(value, default_flow_style=True, sort_keys=False, width=1 << 30, Dumper=QuotingDumper)).strip()


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
    if stage.activations is not None:
        all_layers, ahead = stage.activations.layers == stage.num_layers, stage.activations.ahead
        entry["activations"] = {"offload": "all" if all_layers else {"first": stage.activations.layers}}
        entry["activations"] |= {"ahead": ahead} if ahead != 1 else {}
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
    alike = len(set(splits)) == 1
    entry["tp_split"] = list(splits[0]) if alike else [list(split) for split in splits]


def _ends(pipeline: Pipeline, index: int, entry: dict[str, Any]) -> None:
    """``embed`` and ``head`` where they are not where they would be by default."""
    for key, default in (("embed", 0), ("head", len(pipeline.stages) - 1)):
        holders = [s for s, stage in enumerate(pipeline.stages) if getattr(stage, key)]
        if holders != [default] and index in (holders or [default]):
            entry[key] = bool(holders)


def _has_context(stage: Stage) -> bool:
    all_tokens = stage.units[0].tokens
    divided = any(
        unit.group or unit.tokens != all_tokens or unit.heads != stage.units[0].heads for unit in stage.units
    )
    return stage.kv is not None or divided or len(all_tokens) != 1


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


INNER = 24  # characters inside a box
PER_ROW = 4  # boxes in a row: 4 x 27 + 1 = 109 columns at most
MOST_GROUPS = 24


def format_plan(plan: Plan, spec: ModelSpec, chips: Sequence[str] | None = None) -> str:
    """Boxes per pipeline and stage, at most 109 columns wide; pipelines that differ only in ranks are folded.

    Args:
        chips: name of the chip of every rank, if known.
    """
    groups = _alike(plan)
    lines = [
        f"plan {plan.fingerprint()}: {plan.world_size} rank{'s' if plan.world_size > 1 else ''}, {len(plan.pipelines)} "
        f"pipeline{'s' if len(plan.pipelines) > 1 else ''}, {plan.schedule}",
        f"{spec.name}: {plural(spec.num_layers, 'layer')}, {plural(spec.num_heads, 'head')} ({spec.num_kv_heads} KV), "
        f"hidden {spec.hidden_size}; {plural(plan.global_batch_size, 'sequence')} of "
        f"{plural(plan.seq_length, 'token')} per step",
    ]
    for members in groups[:MOST_GROUPS]:
        lines += ["", _title(plan, members)]
        stages = [
            _box(plan, members, s, spec, chips)
            for s in range(len(plan.pipelines[members[0]].stages))
        ]
        for start in range(0, len(stages), PER_ROW):
            lines += _row(stages[start : start + PER_ROW], start)
    if len(groups) > MOST_GROUPS:
        hidden = sum(len(members) for members in groups[MOST_GROUPS:])
        lines += ["", f"… and {hidden} more pipelines"]
    return "\n".join(lines)


def format_roles(plan: Plan, specs: Mapping[str, ModelSpec], chips: Sequence[str] | None = None) -> Iterator[str]:
    """Each role as :func:`format_plan` has a plan; ``specs``: its model."""
    for name, other in plan.roles:
        yield f"\nrole {name}: {format_plan(other, specs[name], chips)}"


def _alike(plan: Plan) -> list[list[int]]:
    """Pipelines grouped by what they are apart from their ranks, in order of first appearance."""
    groups: dict[Pipeline, list[int]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        stages = tuple(
            replace(s, units=tuple(replace(u, ranks=(0,) * u.tp) for u in s.units)) for s in pipeline.stages
        )
        groups.setdefault(replace(pipeline, stages=stages), []).append(p)
    return list(groups.values())


def _title(plan: Plan, members: list[int]) -> str:
    first = plan.pipelines[members[0]]
    percent = 100 * first.batch_size / plan.global_batch_size
    name = f"pipeline {members[0]}" if len(members) == 1 else f"pipelines {_short(rank_ranges(members), 40)}"
    alike = "" if len(members) == 1 else f" ({len(members)} alike), each"
    return (
        f"{name}{alike}: {plural(first.batch_size, 'sequence')} per step ({percent:.3g} %) = "
        f"{plural(first.num_micro_batches, 'micro-batch')} of {first.micro_batch_size}"
    )


def _box(
    plan: Plan, members: list[int], index: int, spec: ModelSpec, chips: Sequence[str] | None
) -> list[str]:
    """The lines inside a box, all of the same number."""
    stage = plan.pipelines[members[0]].stages[index]
    ranks = [rank for p in members for rank in plan.pipelines[p].stages[index].ranks]
    name = "rank" if len(ranks) == 1 else "ranks"
    text = f"{name} {rank_ranges(ranks)}"
    if len(text) > INNER:
        ascending = ranks == sorted(ranks)
        text = f"{plural(len(ranks), 'rank')} {f'{ranks[0]}…{ranks[-1]}' if ascending else rank_ranges(ranks)}"
    kinds = list(dict.fromkeys(chips[rank] for rank in ranks)) if chips is not None else []
    chip = ", ".join(kinds) or stage.chip or ""
    lines = [text, *([chip] if chips is not None or any(_chips(plan)) else []), _bar(stage, spec.num_layers)]
    lines += [_content(stage), degrees(stage), f"recompute {stage.recompute}"]
    if any(s.dtype is not None for p in plan.pipelines for s in p.stages):
        lines.append(f"products in {stage.dtype}" if stage.dtype else "")
    if any(s.weights is not None for p in plan.pipelines for s in p.stages):
        lines.append(_weights(stage))
    if any(s.activations is not None for s in plan.stages):
        lines.append(f"{plural(stage.activations.layers, 'layer')} offloaded" if stage.activations else "")
    if any(len(set(u.tp_split)) > 1 for p in plan.pipelines for s in p.stages for u in s.units):
        lines += _cuts(stage, spec)
    return [_short(line, INNER) for line in lines]


def _chips(plan: Plan) -> list[str]:
    return [stage.chip for pipeline in plan.pipelines for stage in pipeline.stages if stage.chip]


def _bar(stage: Stage, num_layers: int) -> str:
    """The whole model as a line, with this stage's layers filled."""
    cells = ["░"] * INNER
    edges = [a for a, _ in cut(INNER, [1] * num_layers)] + [INNER] if num_layers else [INNER]
    for a, b in (r for r in stage.layers if r[0] < r[1]):
        first = min(edges[a], INNER - 1)
        for i in range(first, max(edges[b], first + 1)):
            cells[i] = "█"
    return "".join(cells)


def _content(stage: Stage) -> str:
    ranges = ",".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in stage.layers if a < b)
    layers = (
        f"{'layer' if stage.num_layers == 1 else 'layers'} {ranges} ({stage.num_layers})"
        if ranges
        else "no layers"
    )
    return " ".join([*(["E"] if stage.embed else []), layers, *(["L"] if stage.head else [])])


def degrees(stage: Stage) -> str:
    """``tp 2  dp 2 (3:1)  context 3+1``."""

    def ratio(numbers: Sequence[int]) -> str:
        return (
            f"{len(numbers)}" if len(set(numbers)) == 1 else f"{len(numbers)} ({':'.join(map(str, numbers))})"
        )

    texts = [f"tp {ratio(split)}" for split in dict.fromkeys(unit.tp_split for unit in stage.units)]
    if len(stage.replicas) > 1:
        texts.append(f"dp {ratio(stage.dp_split)}")
    if len(stage.units) > len(stage.replicas):
        units = [u for u in stage.units if u.sequences == stage.replicas[0]]
        members = [sum(u.group == g for u in units) for g in dict.fromkeys(u.group for u in units)]
        texts.append("context " + "+".join(map(str, members)))
    return "  ".join(texts)


def _weights(stage: Stage) -> str:
    """``weights 3:1 by layer``, of a stage that divides them."""
    if stage.weights is None:
        return ""
    shares = "equally" if len(set(stage.weights.shard)) == 1 else ":".join(map(str, stage.weights.shard))
    return f"weights {shares} by {stage.weights.gather}"


def _cuts(stage: Stage, spec: ModelSpec) -> list[str]:
    """What the ranks of a TP group get of MLP and vocabulary, on two lines, which are empty where shares are equal."""
    lines = []
    for name, applies in (("ffn", True), ("vocab", stage.embed or stage.head)):
        sizes = {
            ":".join(str(b - a) for a, b in (getattr(share, name) for share in shares(spec, split)))
            for split in dict.fromkeys(u.tp_split for u in stage.units) if len(set(split)) > 1
        }  # fmt: skip
        lines.append(f"{name} {', '.join(sorted(sizes))}" if sizes and applies else "")
    return lines


def _row(boxes: list[list[str]], first: int) -> list[str]:
    titles = [f" stage {first + i} " for i in range(len(boxes))]
    top = "┌" + "┬".join("─" + title + "─" * (INNER + 1 - len(title)) for title in titles) + "┐"
    body = [
        "│" + "│".join(f" {line:<{INNER}} " for line in lines) + "│" for lines in zip(*boxes, strict=True)
    ]
    return [top, *body, "└" + "┴".join("─" * (INNER + 2) for _ in boxes) + "┘"]


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def format_layers(stage: Stage) -> str:
    """``0-7``, or ``0-3, 8-11`` with several chunks; ``none`` of one without layers."""
    return ", ".join(f"{a}-{b - 1}" if a < b else "none" for a, b in stage.chunks)
