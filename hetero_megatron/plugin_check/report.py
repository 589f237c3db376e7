"""The table of ``plugins check``, printed as checks finish."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_megatron.errors import printable
from hetero_megatron.plugin_check.check import FAIL, SKIP, Report
from hetero_megatron.utils.text import plural


def _on_one_line(text: str) -> str:
    """Text of a plugin without control or unprintable characters."""
    return printable(text).replace("\n", "\\n")


class Table:
    """Lines of a kernel's checks in one dtype are printed when the kernel goes on to another."""

    def __init__(self) -> None:
        self._group: list[Mapping[str, str]] = []
        self._live = sys.stderr.isatty()

    def start(self, report: Report) -> None:
        """The first line: what is checked where, and limitations of the results."""
        notes = "".join(f"; {note}" for note in report.notes)
        print(f"plugin {report.plugin} on platform {report.platform}{notes}", flush=True)

    def under_way(self, kernel: str, place: Sequence[str]) -> None:
        """The running check, on a terminal."""
        if self._live:
            words = _on_one_line(" ".join(filter(None, (kernel, *place))))
            print(f"\r\033[K  {words[:76]}", end="", file=sys.stderr, flush=True)

    def add(self, finding: Mapping[str, str]) -> None:
        if self._group and any(finding[key] != self._group[0][key] for key in ("kernel", "dtype")):
            self.flush()
        self._group.append(finding)

    def flush(self) -> None:
        checks: dict[str, list[Mapping[str, str]]] = {}
        for finding in self._group:
            checks.setdefault(finding["check"], []).append(finding)
        self._group = []
        if self._live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
        for findings in checks.values():
            _print_check(findings)
        sys.stdout.flush()

    def finish(self, report: Report) -> None:
        self.flush()
        _print_speeds(report.speeds)
        failures = sum(f["status"] == FAIL for f in report.findings)
        total = sum(f["status"] != SKIP for f in report.findings)
        if not report.findings:
            print("nothing was registered, so nothing was checked")
            return
        skipped_text = f", {len(report.findings) - total} skipped" if total < len(report.findings) else ""
        checks = plural(total, "check")
        print(f"{checks}, " + ("all passed" if not failures else f"{failures} FAILED") + skipped_text)


def print_report(report: Report) -> None:
    """All of a report at once."""
    table = Table()
    table.start(report)
    for finding in report.findings:
        table.add(finding)
    table.finish(report)


def _print_check(findings: Sequence[Mapping[str, str]]) -> None:
    """A line for one check of one kernel in one dtype, and its failures with their cases."""
    failed = [f for f in findings if f["status"] == FAIL]
    skipped = [f for f in findings if f["status"] == SKIP]
    passed = len(findings) - len(failed) - len(skipped)
    status = "FAIL" if failed else "pass" if passed else "skip"
    note = f"{passed} cases" if passed > 1 else ""
    kernel, check, dtype = (findings[0][key] for key in ("kernel", "check", "dtype"))
    print(f"  {status}  {_on_one_line(kernel):<31} {check:<25} {dtype:<11} {note}".rstrip())
    for f in failed[:3]:
        print(f"        {_on_one_line(': '.join(filter(None, (f['case'], f['detail']))))}")
    if len(failed) > 3:
        print(f"        and {len(failed) - 3} more")
    if skipped and not passed and not failed:
        print(f"        {_on_one_line(skipped[0]['detail'])}")


def _print_speeds(speeds: Sequence[Mapping[str, Any]]) -> None:
    if speeds:
        print(f"  {'speed':<52}{'case':<26}{'ms':>10}{'of the floor':>14}")
    for s in speeds:
        measured_case = f"{s['kernel']} {s['direction']} {s['dtype']}"
        print(f"  {_on_one_line(measured_case):<52}{s['case']:<26}{s['seconds'] * 1e3:>10.3f}{s['share']:>13.0%}")
