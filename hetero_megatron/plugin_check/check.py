"""The conformance run of one plugin: registrations, platforms, kernels; a report for screen, JSON and planner.

This module decides what runs next and attributes failures. The plugin's code runs in another process
(:mod:`check_process`, :mod:`check_worker`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hetero_megatron.errors import UserError
from hetero_megatron.plugin_check import Event
from hetero_megatron.plugin_check.process import CheckLimits, Worker
from hetero_megatron.utils.text import did_you_mean, dtype_name

FAIL, SKIP = "FAIL", "skip"  # as in ops.conformance, whose import would import torch
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
DEATHS, HANGS = 10, 2  # of one kernel, after which the rest of it is not run


@dataclass
class Report:
    """Result of a conformance run. ``profile``: measured rates of ``chip`` as in a cluster file; ``notes``: limitations
    of the results."""

    plugin: str
    platform: str
    chip: str = ""
    notes: list[str] = field(default_factory=list)
    findings: list[dict[str, str]] = field(default_factory=list)
    speeds: list[dict[str, Any]] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.findings) and all(f["status"] != FAIL for f in self.findings)


class Show(Protocol):
    """Receives progress events."""

    def start(self, report: Report) -> None: ...

    def under_way(self, kernel: str, place: Sequence[str]) -> None: ...

    def add(self, finding: dict[str, str]) -> None: ...


def check_plugin(
    name: str, platform: str | None, dtypes: Sequence[str], operators: Sequence[str] | None, quick: bool, speed: bool,
    chip: str = "", limits: CheckLimits = CheckLimits(), show: Show | None = None,  # noqa: B008 (it is frozen)
) -> Report:  # fmt: skip
    """Check everything that the plugin ``name`` registers. Nothing that it does ends this process.

    Raises:
        UserError: no such plugin, platform, dtype or operator.
    """
    dtypes = [dtype_name(dtype) for dtype in dtypes]
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise _unknown_dtype(dtype)
    request = {
        "name": name, "platform": platform, "operators": list(operators) if operators is not None else None,
        "dtypes": [DTYPES[d] for d in dtypes], "quick": quick,
    }  # fmt: skip
    run = _PluginCheck(request, Report(name, platform or "", chip), Worker(limits), show)
    try:
        run.everything(speed, dtypes)
    finally:
        run.worker.close()
    return run.report


def _unknown_dtype(name: str) -> UserError:
    problem = f"no such dtype{did_you_mean(name, sorted(DTYPES))}"
    return UserError(problem, field="--dtypes", value=name, accepted=", ".join(sorted(DTYPES)))


@dataclass
class _PluginCheck:
    """One run: its report, and the worker process, which is replaced when it dies."""

    asked: Event
    report: Report
    worker: Worker
    show: Show | None
    without: dict[str, str] = field(default_factory=dict)  # modules of plugins that end the process that loads them

    def everything(self, speed: bool, dtypes: Sequence[str]) -> None:
        description = self._load()
        name = f"plugin {description['plugin']}"
        self.report.platform, self.report.notes = description["platform"], description["notes"]
        if self.show:
            self.show.start(self.report)
        for index, platform in enumerate(description["platforms"]):
            last = self._request(f"platform {platform}", platform=index)[-1]
            if last["event"] == "died":
                self._fail(f"platform {platform}", self.worker.place, last["reason"])
        for finding in description["findings"]:
            self._keep(finding)
        for index, kernel in enumerate(description["kernels"]):
            self._kernel(index, kernel["name"])
        if description["error"]:
            self._fail(name, ("loads", "", ""), description["error"])
        if speed:
            self._time(description["kernels"], description["chip"], dtypes)

    def _load(self) -> Event:
        """Start the process and load all plugins; a plugin that kills it is left out on the next try."""
        while True:
            name = module = ""
            last: Event = {}
            for last in self.worker.request(**self.asked, without=list(self.without)):
                if last["event"] == "loading":
                    name, module = last["name"], last["module"]
            if last["event"] == "ready":
                return last
            if last["event"] == "refused":
                raise UserError(last["problem"])
            self.worker.stop()
            if not module or module in self.without:
                raise UserError(f"the plugins cannot be asked what they have: {last['reason']}", field="plugins check")
            self.without[module] = f"while it was loaded, {last['reason']}"
            if self.asked["name"] in (name, module):
                return {
                    "plugin": name, "platform": "none", "platforms": [], "kernels": [], "findings": [], "notes": [],
                    "chip": "", "error": self.without[module],
                }  # fmt: skip
            print(f"plugin {name} is left out: {self.without[module]}", file=sys.stderr)

    def _request(self, subject: str, /, **asked: Any) -> list[Event]:
        """Events of a request; findings are stored, including one for a step that kills the process."""
        if not self.worker.alive:
            self._load()
        events = []
        for event in self.worker.request(**asked):
            events.append(event)
            if event["event"] == "finding":
                self._keep({key: event[key] for key in ("kernel", "check", "dtype", "case", "status", "detail")})
            elif event["event"] == "begin" and self.show:
                self.show.under_way(subject, self.worker.place)
        return events

    def _kernel(self, index: int, name: str) -> None:
        """All checks of one kernel. A step that kills the process only loses its own result."""
        last_step: list[str] | None = None
        deaths = hangs = 0
        while True:
            events = self._request(name, kernel=index, after=last_step)
            last, steps = events[-1], [[e["dtype"], e["case"]] for e in events if e["event"] == "step"]
            if last["event"] == "done":
                return
            deaths, hangs = deaths + 1, hangs + last["hung"]
            place = self.worker.place
            if len(steps) > 1 and last["crashed"]:
                self._blame(index, name, steps[-1], last["reason"])
            else:
                self._fail(name, place, last["reason"])
            if not steps or place[0] == "supports" or deaths >= DEATHS or hangs >= HANGS:
                last_place = " ".join(filter(None, place))
                self._fail(name, ("not run", place[1], ""), f"the checks after {last_place}, where it was given up")
                return
            last_step = steps[-1]

    def _blame(self, index: int, name: str, step: list[str], reason: str) -> None:
        """Attribute a crash after several steps: to the last one, or to memory damage by an earlier one."""
        place = self.worker.place
        last = self._request(name, kernel=index, only=step)[-1]
        if last["event"] == "died":
            self._fail(name, self.worker.place, last["reason"])
        else:
            note = "here, though this case ends well in a process of its own: an earlier case has damaged the process"
            self._fail(name, ("memory", *place[1:]), f"{reason} {note}")

    def _keep(self, finding: dict[str, str]) -> None:
        self.report.findings.append(finding)
        if self.show:
            self.show.add(finding)

    def _fail(self, kernel: str, place: Sequence[str], detail: str) -> None:
        check, dtype, case = place
        finding = {"kernel": kernel, "check": check, "dtype": dtype, "case": case, "status": FAIL, "detail": detail}
        self._keep(finding)

    def _time(self, kernels: Sequence[Event], chip: str, dtypes: Sequence[str]) -> None:
        """Speeds of the kernels without failures, and their profile for the planner."""
        failed = {f["kernel"] for f in self.report.findings if f["status"] == FAIL}
        timed_kernels = [(i, k) for i, k in enumerate(kernels) if k["name"] not in failed and not k["interpreted"]]
        rows: dict[str, Any] = {}
        for dtype in dtypes if timed_kernels else ():
            *_, value, last = [None, *self._request("device", rates=DTYPES[dtype])]
            if last["event"] == "died":
                self._fail("device", self.worker.place, last["reason"])
                continue
            row: dict[str, Any] = {"bytes_per_second": round(value["rates"][0])}
            served = False
            for index, kernel in timed_kernels:
                events = self._request(kernel["name"], speed=index, dtype=DTYPES[dtype], rates=value["rates"])
                if events[-1]["event"] == "died":
                    self._fail(kernel["name"], self.worker.place, events[-1]["reason"])
                for event in events:
                    kind = event.pop("event")
                    served = served or kind == "serves"
                    if kind == "speed":
                        self.report.speeds.append(event)
                    elif kind == "rows" and event["op"].startswith("gemm_fp8_"):
                        # Of a section of its own, whatever the dtype that is quantised (predictor/cost/rates.py).
                        rows[event["op"].removeprefix("gemm_")] = {"gemm": event["rows"]}
                    elif kind == "rows":
                        row[event["op"]] = event["rows"]
            if served:
                rows[dtype] = row
        if rows:
            self.report.profile = {"rates": {"chips": {self.report.chip or chip: rows}}}
