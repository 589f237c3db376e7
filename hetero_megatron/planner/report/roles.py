"""What the user reads about the placement of a teacher or a reference."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

from hetero_megatron.html.page import page, section
from hetero_megatron.html.pictures import Bar, bars
from hetero_megatron.planner.whatif.role_placement import Alternative, RolePlacement
from hetero_megatron.plans.dump import format_plan, format_roles
from hetero_megatron.plans.roles import GENERATOR
from hetero_megatron.predictor.report.prediction import format_prediction, format_seconds
from hetero_megatron.predictor.report.prediction_page import prediction_pictures
from hetero_megatron.predictor.simulate.role_prediction import RolloutPrediction
from hetero_megatron.spec import ModelSpec
from hetero_megatron.utils.text import plural, rank_ranges, word

_BEST, _OTHER = "#34a06f", "#4c8bf5"


def format_placement(placement: RolePlacement, model: ModelSpec) -> str:
    """The chosen placement with its plan, and each alternative beside it."""
    best, name, chips = placement.best, placement.asked.name, [rank.chip for rank in placement.cluster.ranks]
    assert best.plan is not None and best.prediction is not None
    lines = [f"{name}: {_where(best, placement)}, {format_seconds(best.step_seconds)} per step: {_why(placement)}", ""]
    lines += [f"  {_line(one, placement, best.step_seconds)}" for one in placement.alternatives]
    tried = f"{plural(placement.searched, 'split')} of the chips searched, of {placement.splits}"
    lines += [f"  ({tried}; messages of both models over one network card are not counted together)", ""]
    lines += [format_plan(best.plan, model, chips), *format_roles(best.plan, {name: placement.asked.model}, chips)]
    if best.role_plan is not None:
        lines += ["", f"for hetero-megatron score: {format_plan(best.role_plan, placement.asked.model, chips)}"]
    return "\n".join([*lines, "", format_prediction(best.prediction)])


def _where(one: Alternative, placement: RolePlacement) -> str:
    if one.way == "own chips":
        kinds = dict[str, int]()
        for rank in one.ranks:
            chip = placement.cluster.ranks[rank].chip
            kinds[chip] = kinds.get(chip, 0) + 1
        chips = " and ".join(f"{n} {chip}" for chip, n in kinds.items())
        return f"chips of its own ({word(len(one.ranks), 'rank')} {rank_ranges(one.ranks)}, {chips})"
    if one.way == "same chips":
        return "the same chips, before each step"
    return "a file, computed once on all chips"


def _line(one: Alternative, placement: RolePlacement, best: float) -> str:
    name = placement.asked.name
    if one.step_seconds == math.inf:
        return f"{one.way + ':':<12}none: {one.problem}"
    trained, role = format_seconds(one.trained_seconds), format_seconds(one.role_seconds)
    parts = {
        "own chips": f"step {trained}, {name} {role} {_when(one)}, {_where(one, placement)}",
        "same chips": f"step {trained} and before it {name} {role}",
        "file": f"step {trained}, and {role} of each batch once for {_passes(placement)}",
    }[one.way]
    times = f", {one.step_seconds / best:.2f} x as long" if one.step_seconds > best else ""
    return f"{one.way + ':':<12}{format_seconds(one.step_seconds)} per step ({parts}){times}"


def _when(one: Alternative) -> str:
    said = None if one.prediction is None else one.prediction.role
    return "before it" if isinstance(said, RolloutPrediction) and not said.ahead else "at the same time"


def _why(placement: RolePlacement) -> str:
    """In one sentence."""
    best, name = placement.best, placement.asked.name
    if name == GENERATOR and best.way == "same chips":
        return "chips that sample and train in turn lose less by it than either would by chips that it has not"
    if name == GENERATOR and _when(best) == "before it":
        return "these chips sample faster than they would train, though the others wait meanwhile (--generator-ahead)"
    if best.way == "own chips":
        longer = "the step" if best.trained_seconds >= best.role_seconds else f"the {name}'s forward"
        return f"both work at the same time, and only the longer of the two counts: {longer}"
    if best.way == "same chips":
        return "the trained model loses more by chips that it has not than by waiting for a forward"
    return f"all chips train, and the {name}'s forward over the data is done once for {_passes(placement)}"


def _passes(placement: RolePlacement) -> str:
    return f"{placement.epochs:g} {word(placement.epochs, 'pass', 'passes')} over the data"


def placement_json(placement: RolePlacement) -> Mapping[str, Any]:
    """Seconds; the best alternative first."""
    rows = [
        {
            "way": one.way, "step_seconds": one.step_seconds if one.step_seconds < math.inf else None,
            "trained_seconds": one.trained_seconds, "role_seconds": one.role_seconds, "ranks": list(one.ranks),
            "problem": one.problem,
        }
        for one in placement.alternatives
    ]  # fmt: skip
    return {"role": placement.asked.name, "model": placement.asked.model.name, "alternatives": rows,
            "searched": placement.searched, "splits": placement.splits, "epochs": placement.epochs}  # fmt: skip


def placement_page(placement: RolePlacement, model: ModelSpec) -> str:
    """Self-contained HTML: a bar for each alternative, the plan, memory and timeline of the best, and the text."""
    best = placement.best
    assert best.prediction is not None
    rows = [
        Bar(one.way, format_seconds(one.step_seconds), ((_BEST if one is best else _OTHER, one.step_seconds),))
        for one in placement.alternatives if one.step_seconds < math.inf
    ]  # fmt: skip
    heading = f"{model.name} beside a {placement.asked.name}: the best placement found"
    parts = [f"<h1>{html.escape(heading)}</h1>", section("Placements", "predicted seconds per step"), bars(rows)]
    parts.append(prediction_pictures(best.prediction, placement.cluster, model))
    parts += [section("The report"), f"<pre>{html.escape(format_placement(placement, model))}</pre>"]
    return page(heading, "".join(parts))
