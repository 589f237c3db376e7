"""Check every Triton kernel against fp64 on one NVIDIA GPU, and time it beside what else there is.

    python benchmarks/gpu/bench_kernels.py [--only rms_norm,attention] [--check] [--tests] [--out results.json]

Beside torch eager, torch.compile, F.rms_norm, F.linear_cross_entropy (where torch has it), cuDNN's attention (forced)
and Liger-Kernel (where installed). Per side: device milliseconds of forward and backward (median, L2 emptied), the
share of the floor that is reached (measured copy bandwidth, or measured matmul rate), host microseconds per call, and
peak memory of forward and backward. At the end, which targets are met. Exits with 1 if a result is wrong, and with 2
if there is no GPU. ``--tests`` runs the repository's kernel tests on the GPU first (odd shapes, masks, fences).
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "kernels")]

import torch  # noqa: E402


def cases(device: torch.device, only: list[str]) -> Iterator[Any]:
    """One after another, so that only one case's tensors exist."""
    import loss_cases as loss
    import row_cases as row

    model = [(4096, 4096)] * 12 + [(14336, 4096)] * 3 + [(4096,)] * 40
    norms = [(4096, 1024), (4096, 4096), (8192, 4096), (8192, 8192), (4096, 16384), (16384, 2048)]
    lengths = [(16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384)]
    table: list[tuple[str, Any, list[tuple[Any, ...]]]] = [
        ("rms_norm", row.rms_norm, [*norms, (32768, 4096), (32768, 65536)]),
        ("layer_norm", row.layer_norm, norms),
        ("add_rms_norm", row.add_rms_norm, [(2048, 4096), (8192, 4096), (8192, 8192)]),
        ("swiglu", row.swiglu, [(8192, 4096), (8192, 8192), (8192, 14336), (8192, 16384)]),
        ("gelu", row.gelu, [(8192, 16384, False), (8192, 16384, True)]),
        ("softmax", row.softmax, [(8192, 4096), (8192, 32768)]),
        ("rope", row.rope, [(8192, 32, 8, 128)]),
        ("cross_entropy", loss.cross_entropy, [(8192, v) for v in (4096, 16384, 32768, 65536, 131072)]),
        ("linear_cross_entropy", loss.linear_cross_entropy, [(8192, 4096, 128256), (4096, 4096, 32000)]),
        ("attention", loss.attention, [(b, s, 32, 8, 128, c, s == 2048) for c in (True, False) for b, s in lengths]),
        ("attention", loss.attention, [(b, s, 32, 8, 64, True, s == 2048) for b, s in lengths]),
        ("attention_merge", loss.attention_merge, [(16384, 32, 128)]),
        ("attention_delta", loss.attention_delta, [(16384, 32, 128)]),
        ("adamw", loss.adamw, [(model,)]),
        ("l2norm", loss.l2norm, [(model,)]),
    ]
    for name, make, shapes in table:
        if not only or name in only:
            for shape in shapes:
                yield make(device, *shape)


def run_case(case: Any, bandwidth: float, rate: float, check_only: bool) -> dict[str, Any]:
    from measure import measure

    found: dict[str, Any] = {"op": case.name, "shape": case.shape, "errors": {}, "wrong": [], "sides": {}}
    for what, error, allowed in case.check() if case.check else []:
        found["errors"][what] = error
        if not error <= allowed:
            found["wrong"].append(f"{what}: {error:.2e} > {allowed:.0e}")
    print(f"\n{case.name}  {case.shape}   " + "  ".join(f"{k} {v:.1e}" for k, v in found["errors"].items()), flush=True)
    for problem in found["wrong"]:
        print(f"  WRONG  {problem}")
    if check_only:
        return found
    for direction in ("forward", "backward"):
        floor = getattr(case, f"{direction}_bytes") / bandwidth + getattr(case, f"{direction}_flops") / rate
        found[f"{direction}_floor_ms"] = floor * 1e3
    for name, make in case.sides.items():
        gc.collect()
        torch.accelerator.empty_cache()
        try:
            side = make()
            numbers: dict[str, Any] = dict(measure(side))
            del side
        except Exception as problem:  # a rival that refuses a shape is reported, not hidden
            found["sides"][name] = {"failed": f"{type(problem).__name__}: {str(problem)[:200]}"}
            if name.startswith("ours"):
                found["wrong"].append(f"{name}: {found['sides'][name]['failed']}")
            print(f"  {name:28} {found['sides'][name]['failed']}", flush=True)
            continue
        for direction in ("forward", "backward"):
            if f"{direction}_ms" in numbers and found[f"{direction}_floor_ms"]:
                floor_ms = found[f"{direction}_floor_ms"]
                if name == "ours, at once":  # forward holds backward too
                    floor_ms += found["backward_floor_ms"]
                numbers[f"{direction}_share"] = floor_ms / numbers[f"{direction}_ms"]
                flops = getattr(case, f"{direction}_flops")
                numbers[f"{direction}_tflops"] = flops / numbers[f"{direction}_ms"] / 1e9
        found["sides"][name] = numbers
        print(line(name, numbers), flush=True)
    return found


def line(name: str, numbers: dict[str, Any]) -> str:
    text = f"  {name:28}"
    for direction in ("forward", "backward"):
        if f"{direction}_ms" not in numbers:
            continue
        text += f" {direction} {numbers[f'{direction}_ms']:9.4f} ms"
        if f"{direction}_share" in numbers:
            text += f" {numbers[f'{direction}_share']:6.1%}"
        if numbers.get(f"{direction}_tflops"):
            text += f" {numbers[f'{direction}_tflops']:5.0f} TFLOP/s"
        text += f" (host {numbers[f'{direction}_host_us']:4.0f} us)"
    return text + f"  peak {numbers['peak_bytes'] / 2**20:8.1f} MiB"


def targets(results: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The targets of the project on an H200, as far as this run measured what they need."""
    found: list[tuple[str, bool]] = []
    for result in results:
        name, sides = f"{result['op']} {result['shape']}", result["sides"]
        ours = sides.get("ours", {})
        bound_by_memory = not result["op"].startswith(("attention causal", "attention full", "linear"))
        if bound_by_memory and "forward_share" in ours:
            share = ours["forward_share"]
            found.append((f"{name}: forward {share:.0%} of copy bandwidth (>= 85 %)", share >= 0.85))
        if bound_by_memory and "backward_share" in ours:
            share = ours["backward_share"]
            found.append((f"{name}: backward {share:.0%} of copy bandwidth (>= 75 %)", share >= 0.75))
        if "both_ms" in ours and "both_ms" in sides.get("Liger", {}):
            ratio = sides["Liger"]["both_ms"] / ours["both_ms"]
            found.append((f"{name}: {ratio:.2f}x Liger's speed (> 1)", ratio > 1))
        if result["op"] == "cross_entropy" and result["shape"] == "8192x131072" and "both_ms" in ours:
            ratio = ours["both_ms"] / (result["forward_floor_ms"] + result["backward_floor_ms"])
            found.append((f"{name}: {ratio:.2f}x the floor (<= 1.3)", ratio <= 1.3))
        fused, plain = sides.get("ours, at once", {}), sides.get("torch eager", {})
        if "forward_ms" in fused and "both_ms" in plain:
            ratio = fused["forward_ms"] / plain["both_ms"]
            memory = fused["peak_bytes"] / plain["peak_bytes"]
            found.append((f"{name}: {ratio:.2f}x torch's time (<= 1.1)", ratio <= 1.1))
            found.append((f"{name}: {memory:.2f}x torch's memory (<= 0.25)", memory <= 0.25))
        if result["op"] == "attention causal 128" and "16384" in result["shape"] and "forward_tflops" in ours:
            for direction, wanted in (("forward", 400), ("backward", 280)):
                got = ours[f"{direction}_tflops"]
                found.append((f"{name}: {direction} {got:.0f} TFLOP/s (>= {wanted})", got >= wanted))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators, separated by commas")
    parser.add_argument("--check", action="store_true", help="only compare with fp64")
    parser.add_argument("--tests", action="store_true", help="run tests/test_kernels_*.py on the GPU first")
    parser.add_argument("--out", default=None, help="JSON file for the results")
    options = parser.parse_args()
    if not torch.accelerator.is_available():
        print("no GPU here: nothing was checked or timed")
        return 2
    from measure import copy_bandwidth, matmul_rate

    import hetero_kernels as hk

    if hk.INTERPRETED:
        print("TRITON_INTERPRET=1 is set: unset it, so that the kernels are compiled")
        return 2
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch._functorch.config.donated_buffer = False  # backward is run many times on one graph
    wrong = 0
    if options.tests:
        tests = sorted(str(p) for p in (ROOT / "tests").glob("test_kernels_*.py"))
        wrong += subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT).returncode != 0
    limits = hk.limits_of(device)
    bandwidth, rate = copy_bandwidth(device), matmul_rate(device)
    about = {"device": torch.get_device_module(device).get_device_name(), "torch": torch.__version__,
             "arch": limits.arch, "copy_bytes_per_second": bandwidth, "matmul_flops": rate}  # fmt: skip
    print(f"{about['device']}, torch {torch.__version__}, {limits}")
    print(f"measured floors: copy {bandwidth / 1e12:.2f} TB/s, bf16 matmul {rate / 1e12:.0f} TFLOP/s", flush=True)
    results = []
    for case in cases(device, [name for name in options.only.split(",") if name]):
        results.append(run_case(case, bandwidth, rate, options.check))
        if options.out:
            Path(options.out).write_text(json.dumps({**about, "results": results}, indent=1))
    print()
    for text, met in targets(results):
        print(f"{'met   ' if met else 'MISSED'}  {text}")
    wrong += sum(bool(result["wrong"]) for result in results)
    print(f"\n{len(results)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
