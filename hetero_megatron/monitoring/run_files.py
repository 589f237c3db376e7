"""What a run left in its --save directory, read and checked: metrics.jsonl, events.jsonl. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.html.page import KINDS
from hetero_megatron.monitoring import log_fields as f
from hetero_megatron.monitoring import metrics, record, rewind
from hetero_megatron.monitoring.run_pictures import PLAN
from hetero_megatron.testbed.report import MEANING
from hetero_megatron.utils.files import json_lines, text_lines

_SECONDS = f.number(0)
_LAST_TIME = 253402300799  # seconds since 1970: the end of the year 9999, beyond which there are no dates
_STEP = f.record(
    {"step": f.integer(), "loss": f.maybe(f.number()), "step_seconds": _SECONDS, "tokens": f.integer()},
    {
        "expert_load": f.record({"max_over_mean": f.numbered(f.number(0)), "rank_rows": f.array(f.integer())}),
        "loss_tokens": f.integer(), "pairs": f.integer(),
        "load_balancing_loss": f.maybe(f.number()), "z_loss": f.maybe(f.number()),
        "predicted_step_seconds": f.maybe(_SECONDS), "tgs_per_chip": f.maybe(f.mapping(f.number(0))),
        **dict.fromkeys(("busy_seconds", "bubble_seconds", "communication_seconds"), f.array(_SECONDS)),
    },
)  # fmt: skip
_VALIDATION = f.record({"step": f.integer(), "validation_loss": f.maybe(f.number())})
_TEST = f.record({"step": f.integer(), "test_loss": f.maybe(f.number())})
_EMULATION = f.record({"step": f.integer(), "emulation": f.record(
    {},
    {
        "chips": f.one_of(*MEANING), "links": f.text, "foreign_cores": f.number(0), "disturbed": f.flag,
        "overrun": f.number(0), "late": f.number(0), "spread": f.number(0), "invalid": f.flag,
    },
)})  # fmt: skip
_CHART = f.record({
    "title": f.text, "labels": f.array(f.text),
    "rows": f.array(f.array(f.row(f.integer(0, len(KINDS) - 1), f.number(), _SECONDS, f.integer(-1)))),
})  # fmt: skip
_EVENT = {"time": f.number(0, _LAST_TIME), "text": f.text}
_MEMORY = f.record({"parts": f.mapping(f.number(0)), "limit": f.number(0)})
_START = {
    "first_step": f.integer(1), "fingerprint": f.text, "ranks": f.array(f.integer()), "chips": f.numbered(f.text),
    "model": f.record({"name": f.text, "num_layers": f.integer(1)}), "plan": PLAN,
    "prediction": f.maybe(f.record(
        {"step_seconds": _SECONDS, "charts": f.array(_CHART)},
        {"busy": f.numbered(_SECONDS), "memory": f.numbered(_MEMORY)},
    )),
}  # fmt: skip
_TIMELINE = {
    "step": f.integer(), "seconds": _SECONDS,
    "ranks": f.numbered(f.array(f.row(f.one_of(*KINDS), f.number(), _SECONDS, f.integer(-1)))),
}  # fmt: skip
EVENTS: Mapping[str, f.Check] = {
    "start": f.record(
        {**_EVENT, **_START}, {"nodes": f.numbered(f.text), "steps": f.integer(), "outer": f.array(f.text)}
    ),
    "timeline": f.record({**_EVENT, **_TIMELINE}),
    "experts": f.record({**_EVENT, "step": f.integer(), "layers": f.numbered(f.some(f.array(f.integer())))}),
    "elastic": f.record({**_EVENT, "step": f.integer(), "seconds": f.mapping(_SECONDS), "bytes": f.integer()}),
    "straggler": f.record({**_EVENT, "step": f.integer()}, {"rank": f.integer(), "ratio": f.number(0)}),
    **dict.fromkeys(("end", "error", "launcher"), f.record(_EVENT, {"step": f.integer()})),
}


@dataclass(frozen=True)
class RunFiles:
    """What a run left: one record per step (the last where a step was run twice), evaluations, events in order.

    ``emulation``: what the last start of the job emulated, and how far it can be believed; flags of earlier ones stay.
    """

    directory: Path
    steps: Sequence[Mapping[str, Any]]
    validations: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    repeated: int = 0  # steps that were run more than once
    checkpoints: Sequence[str] = field(default_factory=tuple)
    emulation: Mapping[str, Any] = field(default_factory=dict)

    def last(self, kind: str) -> Mapping[str, Any] | None:
        return next((e for e in reversed(self.events) if e["kind"] == kind), None)


def read_run(directory: str) -> RunFiles:
    """Read and check metrics.jsonl and events.jsonl.

    Raises:
        UserError: no such directory, no metrics in it, or a line that is not what a run writes (file:line).
    """
    path = Path(directory)
    if not os.path.isdir(directory):
        raise UserError("no such directory", field="RUN_DIR", value=directory, accepted="the --save directory of a run")
    if not os.path.lexists(path / metrics.FILE):
        raise UserError(
            f"holds no {metrics.FILE}", field="RUN_DIR", value=directory, accepted="the --save directory of a run"
        )
    steps: dict[int, Mapping[str, Any]] = {}
    validations, repeated, emulation = [], _replaced(path / rewind.REPLACED), dict[str, Any]()
    for position, line in json_lines(path / metrics.FILE):
        if "validation_loss" in line:
            f.require(line, _VALIDATION, "what a line of metrics holds", position)
            validations.append(line)
        elif "test_loss" in line:
            f.require(line, _TEST, "what a line of metrics holds", position)
        elif "emulation" in line:
            f.require(line, _EMULATION, "what a line of metrics holds", position)
            new = line["emulation"]
            emulation |= new | {flag: True for flag in ("invalid", "disturbed") if emulation.get(flag)}
        else:
            f.require(line, _STEP, "what a line of metrics holds", position)
            repeated += line["step"] in steps
            steps[line["step"]] = line
    if not steps:
        raise UserError("holds no step yet", field="RUN_DIR", value=directory, where=str(path / metrics.FILE))
    saved = sorted(p.name for p in path.glob("iter_*") if re.fullmatch(r"iter_\d{7,19}", p.name) and p.is_dir())
    ordered = [steps[s] for s in sorted(steps)]
    return RunFiles(path, ordered, validations, list(_events(path / record.FILE)), repeated, saved, emulation)


def _events(path: Path) -> Iterator[Mapping[str, Any]]:
    if not os.path.lexists(path):
        return
    for position, line in json_lines(path):
        kind = line.get("kind")
        if not isinstance(kind, str) or kind not in EVENTS:
            raise UserError("is not an event", field="kind", value=kind, accepted=", ".join(EVENTS), where=position)
        f.require(line, EVENTS[kind], f"what an event of kind {kind} holds", position)
        yield line


def _replaced(path: Path) -> int:
    """How many steps were run again; what is not a step in there was put aside because it is none."""
    if not os.path.lexists(path):
        return 0
    keys = [rewind.recorded(line, str(path)) for _, line in text_lines(path)]
    return sum(key is not None and key[0] == "step" for key in keys)
