"""``hetero-megatron plugins list | new NAME | check NAME``: list plugins, create one, check one."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hetero_megatron.cli.arguments import Number, refuse_empty, seconds
from hetero_megatron.cli.output import check_writable, print_json, write_text
from hetero_megatron.errors import UserError
from hetero_megatron.training.exit import import_torch
from hetero_megatron.utils.text import plural

if TYPE_CHECKING:
    from hetero_megatron.platform.plugins import Plugin, Plugins


class _Parser(argparse.ArgumentParser):
    """Errors as in the rest of the program: one line, exit code 2."""

    def error(self, message: str) -> Any:
        raise UserError(message, field="plugins", accepted="hetero-megatron plugins --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hetero-megatron plugins", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    listing = commands.add_parser("list", help="platforms, plugins and their kernels on this machine")
    listing.add_argument("--json", action="store_true")
    new = commands.add_parser("new", help="write a complete plugin package into the folder NAME")
    new.add_argument("name")
    new.add_argument("--directory", default=".", help="where the folder NAME goes")
    check = commands.add_parser("check", help="run the conformance kit")
    check.add_argument("name", help="a plugin of `plugins list`, or aten or reference")
    check.add_argument("--json", action="store_true")
    check.add_argument("--platform", help="run on this platform; the plugin's own, else the one that is here")
    check.add_argument("--dtypes", default="fp32,bf16,fp16")
    check.add_argument("--operators", help="only these, separated by commas")
    check.add_argument("--quick", action="store_true", help="leave out the largest cases")
    check.add_argument("--no-speed", action="store_true", help="do not time anything")
    check.add_argument("--time-limit", type=seconds(1e9), default=300.0, metavar="SECONDS",
                       help="of one check, which is ended and fails when it takes longer; default 300")  # fmt: skip
    check.add_argument("--memory-limit", type=Number(float, 1e-3, 1e6), default=4.0, metavar="GIB",
                       help="by which the process of a kernel's checks may grow; default 4")  # fmt: skip
    check.add_argument("--profile", help="write measured rates for the planner to this file (JSON)")
    check.add_argument("--chip", default="", help="name of the chip in cluster files, for --profile")
    compare = commands.add_parser("compare", help="first diverging layer of two dumps of --dump-layers")
    compare.add_argument("one")
    compare.add_argument("other")
    compare.add_argument("--tolerance", type=Number(float, 0, 1e6), default=1e-3,
        help="largest relative error per tensor")  # fmt: skip
    compare.add_argument("--json", action="store_true")
    drift = commands.add_parser("drift", help="mean relative error between the losses of two runs")
    drift.add_argument("one", help="metrics.jsonl, or the --save directory that holds it")
    drift.add_argument("other")
    drift.add_argument("--threshold", type=Number(float, 0, 1e6), default=0.015)
    drift.add_argument("--json", action="store_true")
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 1 if a check failed."""
    refuse_empty(argv)
    args = _parser().parse_args(list(argv))
    return {"list": _list, "new": _new, "check": _check, "compare": _compare, "drift": _drift}[args.command](args)


def _list(args: argparse.Namespace) -> int:
    import_torch()
    from hetero_megatron.platform.plugins import load_plugins

    loaded = load_plugins()
    platforms = [_platform_row(loaded, name) for name in loaded.platforms]
    plugins = [_plugin_row(plugin) for plugin in loaded.plugins]
    kernels = [
        {"operator": k.op, "provider": k.provider, "kind": k.kind, "version": k.version} for k in loaded.registry
    ]
    if args.json:
        print_json({"platforms": platforms, "plugins": plugins, "kernels": kernels})
        return 0
    print(f"{'platform':<12}{'vendor':<16}{'device':<8}{'backend':<9}{'here':<14}tested by this project")
    for row in platforms:
        tested = "yes" if row["tested"] else "UNTESTED: written from the adapter's documentation"
        absence = "FAILS" if row["failure"] else "no device" if row["installed"] else "no adapter"
        devices = f"{row['devices']} x" if row["devices"] else absence
        backend = "/".join(row["backends"])
        print(f"{row['name']:<12}{row['vendor']:<16}{row['device']:<8}{backend:<9}{devices:<14}{tested}")
        if row["failure"]:
            print(f"    {row['failure']}")
    print(f"\n{'plugin':<16}{'found by':<14}{'version':<10}registers")
    for row in plugins:
        state = f"BROKEN: {row['error']}" if row["error"] else row["registers"]
        print(f"{row['name']:<16}{row['origin']:<14}{row['version'] or '-':<10}{state}")
    print(f"\n{'operator':<22}providers, the first that can serve is used")
    for op in sorted(loaded.registry.specs):
        print(f"{op:<22}{', '.join(k.provider for k in loaded.registry.kernels(op))}")
    return 0


def _platform_row(plugins: Plugins, name: str) -> dict[str, Any]:
    a = plugins.platforms[name]
    available = a.available()
    return {
        "name": a.name, "vendor": a.vendor, "device": a.device_type, "backends": list(a.backends),
        "installed": a.installed(), "devices": a.device_count() if available else 0,
        "chip": a.chip(0) if available else "", "tested": a.tested, "failure": a.failure(),
    }  # fmt: skip


def _plugin_row(plugin: Plugin) -> dict[str, Any]:
    parts = [f"platform {a.name}" for a in plugin.platforms]
    if plugin.kernels:
        providers = ", ".join(sorted({k.provider for k in plugin.kernels}))
        parts.append(f"{plural(len(plugin.kernels), 'kernel')} ({providers})")
    parts += [f"direct backend {b.name}{'' if b.installed() else ' (not installed)'}" for b in plugin.directs]
    source = plugin.source
    return {"name": source.name, "module": source.module, "origin": source.origin, "version": source.version,
            "error": plugin.error, "registers": ", ".join(parts) or "nothing"}  # fmt: skip


def _new(args: argparse.Namespace) -> int:
    from pathlib import Path

    from hetero_megatron.cli.scaffold import write_plugin

    folder = write_plugin(args.name, Path(args.directory))
    place = shlex.quote(str(folder))
    print(f"wrote {folder}: next, pip install -e {place} && hetero-megatron plugins check {args.name}")
    return 0


def _check(args: argparse.Namespace) -> int:
    import_torch()
    from hetero_megatron.plugin_check.check import check_plugin
    from hetero_megatron.plugin_check.process import CheckLimits
    from hetero_megatron.plugin_check.report import Table

    check_writable(args.profile, "--profile")
    table = None if args.json else Table()
    report = check_plugin(
        args.name, args.platform, args.dtypes.split(","), args.operators.split(",") if args.operators else None,
        args.quick, not args.no_speed, args.chip, CheckLimits(args.time_limit, int(args.memory_limit * 2**30)), table,
    )  # fmt: skip
    if args.profile:
        write_text(args.profile, "--profile", json.dumps(report.profile, indent=1))
    if table is None:
        print_json({**asdict(report), "ok": report.ok})
    else:
        table.finish(report)
        if args.profile:
            print(f"rates for the planner: {args.profile}")
    return 0 if report.ok else 1


def _compare(args: argparse.Namespace) -> int:
    import_torch()
    from hetero_megatron.training.alignment.dump import compare_dumps

    comparison = compare_dumps(args.one, args.other, args.tolerance)
    print_json(comparison.to_dict()) if args.json else print(comparison.text())
    return 0 if comparison.ok else 1


def _drift(args: argparse.Namespace) -> int:
    from hetero_megatron.training.alignment.drift import loss_drift

    drift = loss_drift(args.one, args.other, args.threshold)
    print_json(asdict(drift) | {"ok": drift.ok}) if args.json else print(drift.text())
    return 0 if drift.ok else 1
