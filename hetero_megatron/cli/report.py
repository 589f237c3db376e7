"""``hetero-megatron report``: one page about a run: plan, timeline, loss, throughput, events."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetero_megatron.cli.arguments import ArgumentParser
from hetero_megatron.cli.output import check_writable, print_json, write_text
from hetero_megatron.errors import printable
from hetero_megatron.monitoring.run_page import read_run, run_page, summary


def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser("report", "One self-contained page about a run, while it runs or afterwards.")
    parser.add_argument("run", metavar="RUN_DIR", help="the --save directory of a run")
    parser.add_argument("--out", metavar="FILE", help="where the page goes (RUN_DIR/report.html)")
    parser.add_argument("--json", action="store_true", help="print one JSON object; a page only with --out")
    args = parser.parse_args(list(argv))
    out = Path(args.out) if args.out else None if args.json else Path(args.run) / "report.html"
    if out is not None and (args.out or out.parent.is_dir()):
        check_writable(str(out), "--out")
    run = read_run(args.run)
    if out is not None:
        write_text(out, "--out", run_page(run))
    if args.json:
        print_json(summary(run))
    else:
        print(f"wrote {printable(str(out))}")
    return 0
