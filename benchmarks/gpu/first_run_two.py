"""The first run on two accelerators of one host, in one command of eight minutes: do they train together, and rightly.

    python benchmarks/gpu/first_run_two.py --out docs/results/first_run_two.md [--platform nvidia] [--minutes 8]
    python benchmarks/gpu/first_run_two.py --size small --platform cpu

Ten steps of one model, the same weights and batches each time: on one accelerator, then with two pipeline stages, two
tensor-parallel ranks, two replicas, and two stages between which everything goes by the bridge. Each case is two
processes; losses are compared with those of one, and the page is written anew after each. What one accelerator cannot
show shows here: kernels that are loaded beside waiting receives, groups that connect at their first collective,
messages that hold up compute.

Exits with 1 if a case failed or its losses differ.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from parts import FAILED, emit, run

ROOT, HERE = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent
STEPS = 10
SHAPES = {  # hidden, layers, heads, KV heads, feed-forward, vocabulary, tokens per sequence, sequences per step
    "full": (2048, 8, 16, 8, 5632, 32000, 2048, 8),
    "small": (32, 2, 4, 2, 96, 128, 16, 4),
}
ONE = "one"
CASES = (ONE, "pipeline", "tensor", "replicas", "bridge")
LIMIT = {"full": 3e-2, "small": 3e-2}  # bf16, relative: AdamW makes steps of rounding noise


def plan_of(case: str, layers: int, batch: int, length: int) -> dict[str, Any]:
    """As of a plan's file."""
    whole, half = [0, layers], layers // 2
    stages: dict[str, list[list[dict[str, Any]]]] = {
        ONE: [[{"ranks": [0], "layers": whole}]],
        "tensor": [[{"ranks": [0, 1], "layers": whole, "tp": 2}]],
        "pipeline": [[{"ranks": [0], "layers": [0, half]}, {"ranks": [1], "layers": [half, layers]}]],
        "replicas": [[{"ranks": [r], "layers": whole}] for r in range(2)],
    }
    stages["bridge"] = stages["pipeline"]
    rows = batch // len(stages[case])
    pipelines = [{"micro_batch_size": 1, "num_micro_batches": rows, "stages": s} for s in stages[case]]
    made = {"version": 1, "seq_length": length, "global_batch_size": batch, "pipelines": pipelines}
    return made | ({"allow_bridge": True} if case == "bridge" else {})


def train(case: str, options: argparse.Namespace) -> None:
    """One rank of a case."""
    import torch
    from first_run_training import CLIP, LR, batches, config_of, fetcher

    from hetero_megatron.comm import start_comm, stop_comm
    from hetero_megatron.model import initial_values
    from hetero_megatron.plans import plan_from_dict
    from hetero_megatron.plans.compile import CompiledPlan
    from hetero_megatron.platform import choose_platform
    from hetero_megatron.platform.plugins import load_plugins
    from hetero_megatron.spec.hf_config import from_hf_config
    from hetero_megatron.training.config import OptimizerConfig
    from hetero_megatron.training.kernels import rank_kernels
    from hetero_megatron.training.rank_platform import plan_for
    from hetero_megatron.training.runtime import Runtime
    from hetero_megatron.training.train import optimizer_factory

    rank, shape = int(os.environ["RANK"]), SHAPES[options.size]
    length, batch = shape[-2:]
    platform = choose_platform(load_plugins().platforms.values(), options.platform, None, rank)
    if case == "bridge" and platform.accelerator is not None:  # as if the other were another vendor's
        platform.accelerator.reach = lambda: str(rank)  # type: ignore[method-assign]
    comm, registry = start_comm(platform, 60), load_plugins().registry
    spec = from_hf_config(config_of(shape))
    plan = plan_for(plan_from_dict(plan_of(case, shape[1], batch, length), spec), comm.islands)
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    kernels = rank_kernels(plan, spec, rank, registry, platform, torch.bfloat16)
    runtime = Runtime(
        compiled, comm, torch.bfloat16, lambda t, box: initial_values(t, box, spec, 0),
        optimizer_factory(OptimizerConfig(), kernel=kernels.adamw), kernels=kernels,
    )  # fmt: skip
    data, seconds = batches(shape, 4), list[float]()
    found: dict[str, Any] = {"losses": [], "chip": platform.chip()}
    for i in range(STEPS):
        start = time.perf_counter()
        found["losses"].append(runtime.train_step(fetcher(data[i % 4]), 0, batch, LR, 0.0, CLIP).loss)
        platform.synchronize()
        seconds.append(time.perf_counter() - start)
        if i > 2:
            found |= {"rate": batch * length / statistics.median(seconds[2:]), "peak": platform.peak_memory()}
        emit(found)
    stop_comm(platform)


def environments(options: argparse.Namespace, count: int) -> list[dict[str, str]]:
    paths = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "plugins"), str(HERE), os.environ.get("PYTHONPATH", "")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1",
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    if options.size == "small":
        common["OMP_NUM_THREADS"] = "1"
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def wrong(found: dict[str, Any], one: dict[str, Any], limit: float) -> str:
    """What is wrong with a case; empty: nothing."""
    if FAILED in found:
        return f"{found[FAILED]} (after {len(found.get('losses', ()))} steps)"
    pairs = list(zip(found["losses"], one.get("losses", ()), strict=False))
    worst = max((abs(a / b - 1) for a, b in pairs), default=0.0)
    return f"losses differ by {worst:.1e}, allowed are {limit:.0e}" if worst > limit else ""


def page(options: argparse.Namespace, cases: dict[str, dict[str, Any]], seconds: float) -> str:
    one = cases[ONE]
    lines = [
        f"# First run on two: {one.get('chip', options.platform or 'unknown')}", "",
        f"`python benchmarks/gpu/first_run_two.py {' '.join(options.words)}`, {seconds:.0f} s; {STEPS} steps each.", "",
        "| case | tokens/s | against one | peak MiB | losses | |", "|---|---:|---:|---:|---|---|",
    ]  # fmt: skip
    for case, found in cases.items():
        rate, losses = found.get("rate"), found.get("losses", [])
        against = f"{rate / one['rate']:.2f}" if rate and one.get("rate") else "-"
        shown = f"{losses[0]:.4f} → {losses[-1]:.4f}" if losses else "-"
        peak = f"{found['peak'] / 2**20:,.0f}" if "peak" in found else "-"
        said = wrong(found, one, LIMIT[options.size]) or "ok"
        lines.append(f"| {case} | {f'{rate:,.0f}' if rate else '-'} | {against} | {peak} | {shown} | {said} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="?", choices=CASES, help="of one rank, for this command itself")
    parser.add_argument("--platform", help="name of a plugin's platform; default: the one accelerator that is here")
    parser.add_argument("--size", choices=sorted(SHAPES), default="full")
    parser.add_argument("--minutes", type=float, default=8, help="for everything (default 8)")
    parser.add_argument("--only", default="", help=f"cases, separated by commas, after {ONE}: {', '.join(CASES[1:])}")
    parser.add_argument("--out", help="file for the page; default: standard output")
    options = parser.parse_args()
    if options.case:
        train(options.case, options)
        return 0
    options.words = sys.argv[1:]
    asked = [word.strip() for word in options.only.split(",") if word.strip()]
    if unknown := [case for case in asked if case not in CASES]:
        parser.error(f"--only: no case {unknown[0]!r}; there are {', '.join(CASES[1:])}")
    wanted = [case for case in CASES if not asked or case in asked or case == ONE]
    began, cases, text = time.monotonic(), dict[str, dict[str, Any]](), ""
    for number, case in enumerate(wanted):
        left = 60 * options.minutes - (time.monotonic() - began)
        words = [sys.executable, str(Path(__file__)), case, "--size", options.size]
        words += ["--platform", options.platform] if options.platform else []
        given = left / (len(wanted) - number) if left > 5 else 0.0
        ranks = environments(options, 1 if case == ONE else 2)
        cases[case] = run(words, ranks, given, ROOT) if given else {FAILED: "no time was left"}
        said = wrong(cases[case], cases[ONE], LIMIT[options.size]) or "ok"
        print(f"[{time.monotonic() - began:5.0f} s] {case}: {said}", file=sys.stderr, flush=True)
        text = page(options, cases, time.monotonic() - began)
        if options.out:
            Path(options.out).write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(wrong(found, cases[ONE], LIMIT[options.size]) for found in cases.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
