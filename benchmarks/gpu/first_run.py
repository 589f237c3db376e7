"""The first run on an accelerator, in one command of under nine minutes: is it right, is it fast, does it fit.

    python benchmarks/gpu/first_run.py --out docs/results/first_run.md [--platform nvidia] [--seconds 540]
    python benchmarks/gpu/first_run.py --size small --platform cpu        # minutes on a laptop: what CI runs

Writes one page. Each part runs in a process of its own, for a share of ``--seconds``: one that fails or takes too long
is a line on the page and leaves the others their time.

- conformance: ``hetero-megatron plugins check`` of the platform and of every plugin that registers kernels for it
- parity: 20 training steps against transformers with the same weights and batches, in fp32 and bf16
- training: tokens/s, MFU and memory of a Llama, ours with and without device graphs beside transformers,
  transformers + torch.compile, and Liger-Kernel where it is installed; predicted beside measured memory; a profiler
  trace (``--trace``)
- attention: every provider, and torch's own
- kernels: benchmarks/gpu/bench_kernels.py where there is Triton and a GPU, else the speeds of ``plugins check``

Exits with 1 if something was wrong or failed, with 2 if the platform is not here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

# Shares of --seconds, in the order in which the parts run: what says most comes first.
PARTS = {
    "about": 0.06, "parity fp32": 0.08, "parity bf16": 0.08, "ours": 0.15, "graphs": 0.12, "transformers": 0.08,
    "compile": 0.25, "liger": 0.12, "attention": 0.12, "conformance": 0.3, "kernels": 0.3,
}  # fmt: skip
LEAST = 45  # seconds that a part is given: imports alone take some
FAILED = "failed"


def run_part(name: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """What a part found; {"failed": why} where it did not end well."""
    script = "first_run_kernels.py" if name in ("conformance", "kernels", "attention") else "first_run_training.py"
    words = [sys.executable, str(HERE / script), name, "--size", options.size, "--seconds", f"{seconds:.0f}"]
    words += ["--platform", options.platform] if options.platform else []
    words += ["--trace", options.trace] if options.trace and name == "ours" else []
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    if options.size == "small":  # threads of so little work only wait for each other
        environment["OMP_NUM_THREADS"] = "1"
    began = time.monotonic()
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=max(seconds, 1.0)
        )
    except subprocess.TimeoutExpired:
        return {FAILED: f"it did not end in {seconds:.0f} s"}
    took = time.monotonic() - began
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        errors = [line for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
        return {FAILED: (errors or ["it said nothing"])[-1][:300], "seconds": took}
    return {**json.loads(lines[-1]), "seconds": took}


def page(options: argparse.Namespace, found: dict[str, dict[str, Any]], seconds: float) -> str:
    """The results as Markdown."""
    about = found["about"]
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
    sides = {name: found[name] for name in names if "rate" in found[name]}
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
    for side in (found["ours"], found["graphs"]):
        if "predicted" in side:
            said, seen = side["predicted"], side["measured"]
            of_it = f"predicted {said / 2**20:,.0f} MiB, measured {seen / 2**20:,.0f} MiB ({said / seen - 1:+.1%})"
            lines += ["", f"Memory of the step, {side['side']}: {of_it}."]
        if "hosts" in side:
            took = f"{side['hosts'] * 1e3:.1f} ms of a step of {side['step_ms']:.1f} ms"
            lines += ["", f"Host, {side['side']}: {took} to queue its work."]
    ours = found["ours"]
    if "operators" in ours:
        lines += ["", "| operators that take most | ms per step | calls |", "|---|---:|---:|"]
        lines += [f"| `{name[:70]}` | {ms:.2f} | {calls} |" for name, ms, calls in ours["operators"]]
    return [*lines, ""]


def parity_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    rows = []
    for name in ("parity fp32", "parity bf16"):
        part = found[name]
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
    rows = found["conformance"].get("plugins", [])
    if rows:
        lines += ["## Conformance", "", "| plugin | checks | failed | skipped |", "|---|---:|---:|---:|"]
        lines += [f"| {r['plugin']} | {r['checks']} | {r['failed']} | {r['skipped']} |" for r in rows] + [""]
    for name, title in (("attention", "Attention"), ("kernels", "Kernels")):
        rows = found[name].get("rows", [])
        if rows:
            keys = list(rows[0])
            lines += [f"## {title}", "", f"| {' | '.join(keys)} |", "|" + "---|" * len(keys)]
            lines += ["| " + " | ".join(str(row.get(key, "")) for key in keys) + " |" for row in rows] + [""]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", help="name of a plugin's platform; default: the one accelerator that is here")
    parser.add_argument("--size", choices=["full", "small"], default="full")
    parser.add_argument("--seconds", type=float, default=540, help="for everything")
    parser.add_argument("--out", help="file for the page; default: standard output")
    parser.add_argument("--trace", help="file for the profiler's trace")
    options = parser.parse_args()
    options.words = sys.argv[1:]
    began, found = time.monotonic(), dict[str, dict[str, Any]]()
    for name, share in PARTS.items():
        left = options.seconds - (time.monotonic() - began)
        given = min(left, max(share * options.seconds, LEAST))
        found[name] = run_part(name, options, given) if left > 5 else {FAILED: "no time was left"}
        said = found[name].get(FAILED) or found[name].get("left_out") or "; ".join(found[name].get("wrong", [])) or "ok"
        print(f"[{time.monotonic() - began:5.0f} s] {name}: {said}", file=sys.stderr, flush=True)
        if name == "about" and FAILED in found[name]:
            return 2
    text = page(options, found, time.monotonic() - began)
    if options.out:
        Path(options.out).write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(FAILED in part or part.get("wrong") for part in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
