"""Parts of first_run.py about operators: run by it, one per process; each prints one JSON object."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from first_run_training import platform_of
from parts import emit

from hetero_megatron.errors import UserError
from hetero_megatron.ops.conformance.speed import best_seconds
from hetero_megatron.ops.kernel_plan import resolve
from hetero_megatron.ops.spec import Signature
from hetero_megatron.platform import Platform
from hetero_megatron.platform.plugins import load_plugins
from hetero_megatron.plugin_check.check import check_plugin

SHAPES = {  # batch, tokens, heads, KV heads, head size
    "full": [(1, 16384, 32, 8, 128), (4, 4096, 32, 8, 128), (8, 2048, 32, 8, 64)],
    "small": [(1, 64, 4, 2, 16)],
}
HERE = Path(__file__).resolve().parent
FIRST = ("nvidia", "amd", "ascend", "sdpa", "triton")  # plugins, in the order in which they are checked

WITHOUT = (None, None, None, 0, 0, None, None)  # attention's arguments from sinks on


def seconds_of(platform: Platform, call: Callable[..., torch.Tensor], qkv: list[torch.Tensor]) -> tuple[float, float]:
    """(forward, backward) of attention; backward by keeping the graph."""
    forward = best_seconds(lambda: call(*qkv), platform.synchronize)
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = call(*leaves)
    seed = torch.ones_like(out)
    backward = best_seconds(
        lambda: torch.autograd.grad(out, leaves, seed, retain_graph=True), platform.synchronize
    )  # fmt: skip
    return forward, backward


def sides_of(platform: Platform, heads: int, kv: int, size: int) -> dict[str, Callable[..., torch.Tensor] | str]:
    """Attention by every provider that is here (why not, where one cannot serve), and torch's own."""
    registry = load_plugins().registry
    accelerator = platform.accelerator
    arch = accelerator.arch(platform.device.index or 0) if accelerator is not None else ()
    sides: dict[str, Callable[..., torch.Tensor] | str] = {}
    for kernel in registry.kernels("attention"):
        signature = Signature(
            "attention", platform.device.type, torch.bfloat16, platform.name, arch,
            dims={"heads": (heads,), "kv_heads": (kv,), "head_dim": (size,)},
        )  # fmt: skip
        try:
            plan = resolve(registry, [signature], {"attention": kernel.provider}, "--provider")
        except UserError as error:
            sides[kernel.provider] = str(error)
        else:
            sides[kernel.provider] = lambda q, k, v, run=plan.attention: run(q, k, v, *WITHOUT)[0]  # type: ignore[misc]

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return sides | {"torch's scaled_dot_product_attention": sdpa}


def attention(options: argparse.Namespace) -> dict[str, Any]:
    platform, rows, wrong = platform_of(options.platform), list[dict[str, Any]](), list[str]()
    end = time.monotonic() + options.seconds
    for b, s, heads, kv, size in SHAPES[options.size]:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(b, s, n, size, generator=generator).to(platform.device, torch.bfloat16) for n in (heads, kv, kv)
        )
        flops = 4 * b * heads * size * s * s / 2
        for name, call in sides_of(platform, heads, kv, size).items():
            row = {"shape": f"{b} x {s} x {heads}/{kv} x {size}", "provider": name}
            if isinstance(call, str):  # why it does not serve this here
                continue
            if time.monotonic() > end - 5:
                rows.append({**row, "forward ms": "-", "TFLOP/s": "-", "backward ms": "-", "backward TFLOP/s": "-"})
                continue
            if "reference" in name and s > 4096:  # whose scores would not fit
                continue
            try:
                forward, backward = seconds_of(platform, call, [q, k, v])
            except Exception as error:  # a provider that breaks is a result
                wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
                continue
            rows.append({
                **row, "forward ms": f"{forward * 1e3:.3f}", "TFLOP/s": f"{flops / forward / 1e12:.3g}",
                "backward ms": f"{backward * 1e3:.3f}", "backward TFLOP/s": f"{2.5 * flops / backward / 1e12:.3g}",
            })  # fmt: skip
            emit({"rows": rows, "wrong": wrong})
    return {"rows": rows, "wrong": wrong}


def check(options: argparse.Namespace, plugin: str, seconds: float, speed: bool) -> dict[str, Any]:
    """The report of ``plugins check``."""
    words = [sys.executable, "-m", "hetero_megatron.cli.main", "plugins", "check", plugin, "--json"]
    words += ["--platform", options.platform] if options.platform else []
    words += [] if speed else ["--no-speed"]
    words += ["--quick"] if options.size == "small" else []
    words += ["--operators", "rms_norm,gemm", "--dtypes", "fp32"] if options.size == "small" else []
    done = subprocess.run(words, capture_output=True, text=True, timeout=seconds)
    if not done.stdout.strip():
        raise SystemExit(f"plugins check {plugin}: {(done.stderr.strip().splitlines() or ['nothing said'])[-1]}")
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def plugins_to_check(options: argparse.Namespace) -> list[str]:
    """The platform's, and those whose kernels this machine can run."""
    platform, found = platform_of(options.platform), load_plugins()
    names = []
    for plugin in found.plugins:
        its = any(a.name == platform.name for a in plugin.platforms)
        runs = platform.device.type not in ("cpu", "emu") and plugin.kernels
        if plugin.ok and (its or runs):
            names.append(plugin.source.name)
    return names


class Findings:
    """Counts findings as they come, and says them now and then: a check that does not end has said what it found.

    Raises:
        TimeoutError: at a finding after ``end``.
    """

    def __init__(self, end: float) -> None:
        self.end, self.said = end, 0.0
        self.rows: list[dict[str, Any]] = []
        self.wrong: list[str] = []

    def start(self, report: Any) -> None:
        self.rows.append({"plugin": report.plugin, "checks": 0, "failed": 0, "skipped": 0})

    def under_way(self, kernel: str, place: Sequence[str]) -> None:
        """Nobody looks."""

    def add(self, f: Mapping[str, str]) -> None:
        row = self.rows[-1]
        row["checks"] += 1
        row["skipped"] += f["status"] == "skip"
        if f["status"] == "FAIL":
            row["failed"] += 1
            if row["failed"] <= 5:
                self.wrong.append(f"{f['kernel']} {f['check']} {f['dtype']} {f['case']}: {f['detail'][:200]}")
        if time.monotonic() > self.said + 1:
            emit(self.found())
            self.said = time.monotonic()
        if time.monotonic() > self.end:
            raise TimeoutError

    def found(self) -> dict[str, Any]:
        return {"plugins": self.rows, "wrong": self.wrong}


def conformance(options: argparse.Namespace) -> dict[str, Any]:
    """Of small cases; the plugins of fused attention first, for they train by themselves."""
    findings, small = Findings(time.monotonic() + options.seconds - 5), options.size == "small"
    dtypes, operators = (["fp32"], ["rms_norm", "gemm"]) if small else (["bf16", "fp32"], None)
    names = sorted(plugins_to_check(options), key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    left = deque(names)
    try:
        while left:
            check_plugin(left[0], options.platform, dtypes, operators, True, False, show=findings)  # type: ignore[arg-type]
            left.popleft()
    except TimeoutError:
        findings.wrong.append(f"no time was left for what remained of {', '.join(left)}")
    return findings.found()


def kernels(options: argparse.Namespace) -> dict[str, Any]:
    """bench_kernels.py where there are Triton and a GPU; else what ``plugins check`` measures."""
    platform = platform_of(options.platform)
    if platform.device.type not in ("cpu", "emu") and importlib.util.find_spec("triton") is not None:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "kernels.json"
            words = [sys.executable, str(HERE / "bench_kernels.py"), "--out", str(out)]
            words += ["--seconds", str(max(options.seconds - 30, 1))]
            with suppress(subprocess.TimeoutExpired):  # what it has written by then counts
                subprocess.run(words, capture_output=True, text=True, timeout=max(options.seconds - 5, 1))
            cases = json.loads(out.read_text())["cases"] if out.exists() else {}
        wrong = [f"{case['op']} {case['shape']}: {text}" for case in cases.values() for text in case["wrong"]]
        return {"rows": [row for case in cases.values() for row in bench_rows(case)], "wrong": wrong}
    rows = []
    for plugin in plugins_to_check(options):
        for s in check(options, plugin, options.seconds - 5, True)["speeds"]:
            rows.append({
                "kernel": s["kernel"], "dtype": s["dtype"], "case": s["case"], "direction": s["direction"],
                "ms": f"{s['seconds'] * 1e3:.3f}", "of the floor": f"{s['floor'] / s['seconds']:.0%}",
            })  # fmt: skip
    return {"rows": rows}


def bench_rows(case: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per side of a case of bench_kernels.py."""
    rows = []
    for side, numbers in case["sides"].items():
        row = {"kernel": case["op"], "case": case["shape"], "side": side}
        for direction in ("forward", "backward"):
            ms, share = numbers.get(f"{direction}_ms"), numbers.get(f"{direction}_share")
            row[f"{direction} ms"] = "-" if ms is None else f"{ms:.3f}"
            row[f"{direction} of the floor"] = "-" if share is None else f"{share:.0%}"
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["attention", "conformance", "kernels"])
    parser.add_argument("--platform")
    parser.add_argument("--size", default="small")
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    parts = {"attention": attention, "conformance": conformance, "kernels": kernels}
    emit(parts[options.part](options))


if __name__ == "__main__":
    main()
