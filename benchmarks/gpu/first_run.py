"""The first run on an accelerator, in one command of under nine minutes: is it right, is it fast, does it fit.

    python benchmarks/gpu/first_run.py --out docs/results/first_run.md [--platform nvidia] [--minutes 9]
    python benchmarks/gpu/first_run.py --only "parity bf16,ours" --minutes 3
    python benchmarks/gpu/first_run.py --size small --platform cpu        # minutes on a laptop: what CI runs

Writes one page, anew after each part. Each runs in a process of its own, in this order, for a share of the time: one
that fails or takes too long is a line on the page, with what it had found by then, and leaves the others their time.

- about: what the chip is, and how fast it multiplies and copies
- parity: 20 training steps against transformers with the same weights and batches, in bf16 and (late) in fp32
- training: tokens/s, MFU and memory of a Llama, ours with and without device graphs beside transformers,
  transformers + torch.compile, and Liger-Kernel where it is installed; predicted beside measured memory; a profiler
  trace (``--trace``)
- attention: every provider, and torch's own
- conformance: ``hetero-megatron plugins check --quick`` of the platform and of every plugin with kernels for it
- kernels: benchmarks/gpu/bench_kernels.py where there is Triton and a GPU, else the speeds of ``plugins check``

Exits with 1 if something was wrong or failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from pathlib import Path
from typing import Any

from parts import FAILED, run

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

# Shares of the time, in the order in which the parts run: what says most comes first, and all together have enough.
PARTS = {
    "about": 0.1, "parity bf16": 0.1, "ours": 0.14, "transformers": 0.08, "compile": 0.16, "attention": 0.1,
    "conformance": 0.12, "graphs": 0.08, "parity fp32": 0.05, "liger": 0.04, "kernels": 0.03,
}  # fmt: skip
LEAST = {"about": 120}  # seconds that a part is given: the first import of torch on a cold disk takes most of it
LEAST_OTHERS = 45


def run_part(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What a part found; ``FAILED``: why it did not end well."""
    script = "first_run_kernels.py" if name in ("conformance", "kernels", "attention") else "first_run_training.py"
    words = [sys.executable, str(HERE / script), name, "--size", options.size, "--seconds", f"{seconds:.0f}"]
    words += ["--platform", options.platform] if options.platform else []
    words += ["--trace", options.trace] if options.trace and name == "ours" else []
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    if options.size == "small":  # threads of so little work only wait for each other
        environment["OMP_NUM_THREADS"] = "1"
    return run(words, [environment], max(seconds, 1.0), ROOT)


def page(options: argparse.Namespace, found: dict[str, dict[str, Any]], seconds: float) -> str:
    """The results as Markdown."""
    about = found.get("about", {})
    lines = [
        f"# First run: {about.get('chip', options.platform or 'unknown')}", "",
        f"{datetime.date.today()}, `python benchmarks/gpu/first_run.py {' '.join(options.words)}`, {seconds:.0f} s; "
        f"torch {about.get('torch', '?')}, platform {about.get('platform', '?')}, "
        f"{about.get('dtype', '?')} products {tera(about.get('flops'))} TFLOP/s, copies "
        f"{tera(about.get('bandwidth'))} TB/s (measured).", "",
        *problems(found), *training_lines(found), *parity_lines(found), *kernel_lines(found),
    ]  # fmt: skip
    return "\n".join(lines).rstrip() + "\n"


def tera(value: float | None) -> str:
    return "?" if value is None else f"{value / 1e12:.3g}"


def problems(found: dict[str, dict[str, Any]]) -> list[str]:
    """Parts that failed, and what was wrong in the others."""
    rows = [f"- {name}: {part[FAILED]}" for name, part in found.items() if FAILED in part]
    rows += [f"- {name}: left out, {part['left_out']}" for name, part in found.items() if "left_out" in part]
    rows += [f"- {name}: WRONG, {text}" for name, part in found.items() for text in part.get("wrong", [])]
    return ["## What did not come out", "", *rows, ""] if rows else []


def training_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """Tokens/s, MFU and memory, side by side."""
    names = ("ours", "graphs", "transformers", "compile", "liger")
    sides = {name: found[name] for name in names if "rate" in found.get(name, {})}
    if not sides:
        return []
    first = next(iter(sides.values()))
    lines = [
        "## Training", "", f"{first['model']}, {first['dtype']}, AdamW, clipped; {first['batch']}.", "",
        "| side | tokens/s | MFU | step ms | peak MiB |", "|---|---:|---:|---:|---:|",
    ]  # fmt: skip
    for _name, side in sides.items():
        lines.append(
            f"| {side['side']} | {side['rate']:,.0f} | {side['mfu']:.1%} | {side['step_ms']:.1f} | "
            f"{side['peak'] / 2**20:,.0f} |"
        )
    for side in (found.get("ours", {}), found.get("graphs", {})):
        if "predicted" in side:
            said, seen = side["predicted"], side["measured"]
            of_it = f"predicted {said / 2**20:,.0f} MiB, measured {seen / 2**20:,.0f} MiB ({said / seen - 1:+.1%})"
            lines += ["", f"Memory of the step, {side['side']}: {of_it}."]
        if "busy" in side:
            lines += ["", f"Kernels, {side['side']}: {side['busy'] * 1e3:.1f} ms of a profiled step."]
    ours = found.get("ours", {})
    if "operators" in ours:
        lines += ["", "| what takes most | ms per step | calls |", "|---|---:|---:|"]
        lines += [f"| `{name[:70]}` | {ms:.2f} | {calls} |" for name, ms, calls in ours["operators"]]
    return [*lines, ""]


def parity_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for name in ("parity fp32", "parity bf16"):
        part = found.get(name, {})
        if "errors" in part:
            rows.append(
                f"| {name.split()[1]} | {len(part['errors'])} | {part['losses'][0]:.4f} → {part['losses'][-1]:.4f} | "
                f"{max(part['errors']):.2e} | {part['limit']:.0e} |"
            )
    if not rows:
        return []
    head = ["| dtype | steps | loss | largest relative difference | allowed |", "|---|---:|---|---:|---:|"]
    return ["## Parity with transformers", "", *head, *rows, ""]


def kernel_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    rows = found.get("conformance", {}).get("plugins", [])
    if rows:
        lines += ["## Conformance", "", "| plugin | checks | failed | skipped |", "|---|---:|---:|---:|"]
        lines += [f"| {r['plugin']} | {r['checks']} | {r['failed']} | {r['skipped']} |" for r in rows] + [""]
    for name, title in (("attention", "Attention"), ("kernels", "Kernels")):
        rows = found.get(name, {}).get("rows", [])
        if rows:
            keys = list(rows[0])
            lines += [f"## {title}", "", f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
            lines += ["| " + " | ".join(str(row.get(key, "")) for key in keys) + " |" for row in rows] + [""]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", help="name of a plugin's platform; default: the one accelerator that is here")
    parser.add_argument("--size", choices=["full", "small"], default="full")
    parser.add_argument("--minutes", type=float, default=9, help="for everything (default 9)")
    parser.add_argument("--only", default="", help=f"parts, separated by commas: {', '.join(PARTS)}")
    parser.add_argument("--out", help="file for the page; default: standard output")
    parser.add_argument("--trace", help="file for the profiler's trace")
    options = parser.parse_args()
    options.words = sys.argv[1:]
    asked = [word.strip() for word in options.only.split(",") if word.strip()] or list(PARTS)
    if unknown := [name for name in asked if name not in PARTS]:
        parser.error(f"--only: no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    shares = {name: share for name, share in PARTS.items() if name in asked}
    began, found, total = time.monotonic(), dict[str, dict[str, Any]](), 60 * options.minutes
    for name, share in shares.items():
        left = total - (time.monotonic() - began)
        given = min(left, max(share / sum(shares.values()) * total, LEAST.get(name, LEAST_OTHERS)))
        found[name] = run_part(name, options, given) if left > 5 else {FAILED: "no time was left"}
        said = found[name].get(FAILED) or found[name].get("left_out") or "; ".join(found[name].get("wrong", [])) or "ok"
        print(f"[{time.monotonic() - began:5.0f} s] {name}: {said}", file=sys.stderr, flush=True)
        text = page(options, found, time.monotonic() - began)
        if options.out:  # whoever ends this command keeps what there is
            Path(options.out).write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(FAILED in part or part.get("wrong") for part in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
