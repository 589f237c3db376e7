"""The conformance run of one plugin: registrations, platforms, kernels; a report for screen, JSON and planner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.ops import Signature
from hetero_megatron.ops.conformance import FAIL, PASS, SKIP, Finding, check_kernel
from hetero_megatron.ops.conformance.speed import Speed, attention_rows, device_rates, gemm_rows, measure
from hetero_megatron.ops.kernel import Kernel
from hetero_megatron.ops.operators import torch_registry
from hetero_megatron.ops.registry import unknown
from hetero_megatron.ops.stage import stage_operators
from hetero_megatron.platform import CPU, Accelerator
from hetero_megatron.platform.conformance import check_platform
from hetero_megatron.platform.platform import platform_here
from hetero_megatron.platform.plugins import Plugin, Plugins, Source, load_plugins
from hetero_megatron.spec import load_model, shares
from hetero_megatron.words import dtype_name, plural

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass
class Report:
    """What a conformance run found. ``profile``: measured rates of ``chip`` as a cluster file has them."""

    plugin: str
    platform: str
    chip: str = ""
    findings: list[dict[str, str]] = field(default_factory=list)
    speeds: list[dict[str, Any]] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.findings) and all(f["status"] != FAIL for f in self.findings)


def check_plugin(
    name: str, platform: str | None, dtypes: Sequence[str], operators: Sequence[str] | None, quick: bool, speed: bool,
    chip: str = "",
) -> Report:  # fmt: skip
    """Check everything that the plugin ``name`` registers.

    Raises:
        UserError: no such plugin, platform, dtype or operator.
    """
    dtypes = [dtype_name(dtype) for dtype in dtypes]
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES, "--dtypes")
    found = load_plugins()
    plugin = _plugin(found, name)
    for op in operators or ():
        found.registry.spec(op)
    accelerator = _accelerator(found, plugin, platform)
    report = Report(name, accelerator.name, chip)
    findings = [f for a in plugin.platforms for f in check_platform(a)]
    if platform is None and plugin.platforms and accelerator not in plugin.platforms:
        why = "; ".join(f"{a.name}: {a.absence()}" for a in plugin.platforms)
        findings.append(Finding(f"plugin {name}", "device", "", "", FAIL, f"none of its devices is here ({why})"))
    sound, problems = _registrations(plugin)
    findings += problems
    chosen = [k for k in sound if operators is None or k.op in operators]
    device = accelerator.device(0)
    for kernel in chosen:
        spec = found.registry.spec(kernel.op)
        wanted = [DTYPES[d] for d in dtypes if DTYPES[d] in accelerator.dtypes]
        findings += check_kernel(
            spec, kernel, device, lambda d: _signature(kernel.op, accelerator, d), wanted, quick  # noqa: B023
        )
    if plugin.error and not problems:
        findings.append(Finding(f"plugin {plugin.source.name}", "loads", "", "", FAIL, plugin.error))
    report.findings = [f.to_dict() for f in findings]
    if speed:
        failed = {f.kernel for f in findings if f.status == FAIL}
        _time(report, found, [k for k in chosen if str(k) not in failed], accelerator, [DTYPES[d] for d in dtypes])
    return report


def _plugin(found: Plugins, name: str) -> Plugin:
    """The plugin, or the kernels of torch's own providers as one."""
    if name in ("aten", "reference"):
        kernels = [k for k in torch_registry() if k.provider == name]
        return Plugin(Source(name, "hetero_megatron.ops", "built in"), kernels)
    return found.find(name)


def _accelerator(found: Plugins, plugin: Plugin, platform: str | None) -> Accelerator:
    if platform is not None:
        if platform not in found.platforms:
            raise unknown("platform", platform, found.platforms, "--platform")
        if not found.platforms[platform].available():
            raise UserError(found.platforms[platform].absence(), field="--platform", value=platform)
        return found.platforms[platform]
    own = [a for a in plugin.platforms if a.available()]
    if own or plugin.platforms:
        return own[0] if own else CPU()
    here = platform_here(found.platforms.values())
    return found.platforms[here] if here is not None else CPU()


def _registrations(plugin: Plugin) -> tuple[list[Kernel], list[Finding]]:
    """(kernels that can be run, what is wrong with the others)."""
    registry, sound, problems = torch_registry(), list[Kernel](), list[Finding]()
    if plugin.source.module == "hetero_megatron.ops":
        return plugin.kernels, []
    for kernel in plugin.kernels:
        problem = registry.problem(kernel)
        if problem is None:
            registry.register(kernel)
            sound.append(kernel)
            problems.append(Finding(str(kernel), "registration", "", "", PASS))
        else:
            problems.append(Finding(str(kernel), "registration", "", "", FAIL, problem.problem))
    return sound, problems if any(p.status == FAIL for p in problems) else []


def _signature(op: str, accelerator: Accelerator, dtype: torch.dtype) -> Signature:
    """What the small preset model would ask for."""
    spec = load_model("tiny")
    dims = dict(stage_operators(spec, shares(spec, (1,))[0], True, 1)).get(op, {})
    return Signature(op, accelerator.device_type, dtype, accelerator.name, accelerator.arch(0), dims)


def _time(
    report: Report, found: Plugins, kernels: Sequence[Kernel], accelerator: Accelerator, dtypes: Sequence[torch.dtype]
) -> None:
    device, sync = accelerator.device(0), accelerator.synchronize
    chip: dict[str, Any] = {}
    for dtype in dtypes:
        able = [k for k in kernels if not k.reasons(_signature(k.op, accelerator, dtype)) and not k.interpreted]
        if not able:
            continue
        rates = device_rates(device, dtype, sync)
        row: dict[str, Any] = {"bytes_per_second": round(rates[0])}
        for kernel in able:
            spec = found.registry.spec(kernel.op)
            for measured in measure(spec, kernel, device, dtype, rates, sync):
                report.speeds.append(asdict(measured) | {"share": measured.share})
            if kernel.op == "gemm":
                row["gemm"] = gemm_rows(kernel, device, dtype, sync)
            if kernel.op == "attention":
                row["attention"] = attention_rows(spec, kernel, device, dtype, sync)
        chip[next(n for n, d in DTYPES.items() if d == dtype)] = row
    if chip:
        report.profile = {"rates": {"chips": {report.chip or accelerator.chip(0): chip}}}


def print_report(report: Report) -> None:
    """A line per kernel and check, failures with their cases."""
    print(f"plugin {report.plugin} on platform {report.platform}")
    for (kernel, check), findings in _groups(report.findings):
        failed = [f for f in findings if f["status"] == FAIL]
        skipped = [f for f in findings if f["status"] == SKIP]
        passed = len(findings) - len(failed) - len(skipped)
        status = "FAIL" if failed else "pass" if passed else "skip"
        dtypes = "/".join(dict.fromkeys(f["dtype"] for f in findings if f["dtype"] and f["status"] != SKIP))
        note = f"{passed} cases" if passed > 1 else ""
        print(f"  {status}  {kernel:<32}{check:<26}{dtypes:<26}{note}".rstrip())
        for f in failed[:3]:
            print(f"        {' '.join(filter(None, (f['dtype'], f['case'])))}: {f['detail']}")
        if len(failed) > 3:
            print(f"        and {len(failed) - 3} more")
        if skipped and not passed and not failed:
            print(f"        {skipped[0]['detail']}")
    if report.speeds:
        print(f"  {'speed':<52}{'case':<26}{'ms':>10}{'of the floor':>14}")
        for s in report.speeds:
            speed = Speed(s["kernel"], s["dtype"], s["case"], s["direction"], s["seconds"], s["floor"])
            what = f"{speed.kernel} {speed.direction} {speed.dtype}"
            print(f"  {what:<52}{speed.case:<26}{speed.seconds * 1e3:>10.3f}{speed.share:>13.0%}")
    failures = sum(f["status"] == FAIL for f in report.findings)
    total = sum(f["status"] != SKIP for f in report.findings)
    if not report.findings:
        print("nothing was registered, so nothing was checked")
    else:
        left = f", {len(report.findings) - total} skipped" if total < len(report.findings) else ""
        print(f"{plural(total, 'check')}, " + ("all passed" if not failures else f"{failures} FAILED") + left)


def _groups(findings: Sequence[dict[str, str]]) -> Iterator[tuple[tuple[str, str], list[dict[str, str]]]]:
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for f in findings:
        groups.setdefault((f["kernel"], f["check"]), []).append(f)
    return iter(groups.items())
