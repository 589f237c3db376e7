"""Check every Triton kernel against fp64 on one NVIDIA GPU, and time it beside what else there is.

    python benchmarks/gpu/bench_kernels.py [--only rms_norm,attention] [--check] [--tests] [--out results.json]
        [--seconds 540] [--resume]

Beside torch eager, torch.compile, F.rms_norm, F.linear_cross_entropy (where torch has it), cuDNN's attention (forced),
Liger-Kernel (where installed) and, of the gated delta rule, the project's own chunks in torch. Per side: device
milliseconds of forward and backward (median, L2 emptied), the share of the floor that is reached (measured copy
bandwidth, or measured matmul rate), host microseconds per call, and peak memory of forward and backward. At the end,
which targets are met. Exits with 1 if a result is wrong, with 2 if
there is no GPU, and with 3 if ``--seconds`` were over before the last case: the same command with ``--resume`` then
goes on after the cases in ``--out`` (also after one that killed the process, which counts as wrong). ``--tests`` runs
the repository's kernel tests on the GPU first (odd shapes, masks, fences), for ``--seconds`` at most.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT / "kernels"), str(ROOT)]

import torch  # noqa: E402
import torch._functorch.config  # noqa: E402  (torch itself does not import it)


def cases(device: torch.device, only: list[str]) -> dict[str, Callable[[], Any]]:
    """Makers by name, to be called one after another, so that only one case's tensors exist."""
    import delta_cases as delta
    import loss_cases as loss
    import row_cases as row

    model = [(4096, 4096)] * 12 + [(14336, 4096)] * 3 + [(4096,)] * 40
    norms = [(4096, 8192), (8192, 4096), (4096, 4096), (4096, 16384), (16384, 2048), (4096, 1024), (8192, 8192)]
    lengths = [(1, 16384), (8, 2048), (4, 4096), (2, 8192), (16, 1024)]
    packed = tuple(range(0, 2048, 300))  # documents of 300 tokens and a shorter one
    long = tuple(n for start in range(0, 16384, 4096) for n in (start, start + 1000, start + 1500))
    # The most telling shape of every operator comes first; rows: of the research's tables, and what a model has.
    table: list[tuple[str, Any, list[tuple[Any, ...]]]] = [
        ("attention", loss.attention, [(b, s, 32, 8, 128, True, s == 2048) for b, s in lengths]),
        ("linear_cross_entropy", loss.linear_cross_entropy,
         [(8192, 4096, 128256), *((n, 4096, 128256) for n in (4096, 16384, 32768)), (4096, 4096, 32000)]),
        ("gated_delta", delta.gated_delta,
         [(1, 16384, 16, 32, 128, 128), (4, 4096, 16, 32, 128, 128), (1, 4096, 16, 32, 128, 256),
          (1, 16384, 16, 32, 128, 128, long)]),
        ("cross_entropy", loss.cross_entropy, [(8192, v) for v in (131072, 32768, 65536, 16384, 4096)]),
        ("rms_norm", row.rms_norm, [*norms, (32768, 4096), (32768, 65536)]),
        ("add_rms_norm", row.add_rms_norm, [(8192, 4096), (2048, 16384), (2048, 8192), (2048, 4096), (8192, 8192)]),
        ("layer_norm", row.layer_norm, [*norms, (2048, 16384), (32768, 1024)]),
        ("swiglu", row.swiglu, [(8192, 14336), (8192, 4096), (8192, 8192), (8192, 16384)]),
        ("rope", row.rope, [(8192, 32, 8, 128), *((n, 64, 8, 128) for n in (16384, 2048, 4096, 8192))]),
        ("adamw", loss.adamw, [(model,)]),
        ("l2norm", loss.l2norm, [(model,)]),
        ("softmax", row.softmax, [(8192, 4096), (8192, 32768)]),
        ("gelu", row.gelu, [(8192, 16384, True), (8192, 16384, False)]),
        ("attention_merge", loss.attention_merge, [(16384, 32, 128)]),
        ("attention_delta", loss.attention_delta, [(16384, 32, 128)]),
        ("attention", loss.attention, [(1, 16384, 16, 4, 256, True, False), (2, 2048, 16, 4, 256, True, True)]),
        ("attention", loss.attention, [(1, 16384, 32, 8, 128, True, False, 4096),
                                       (2, 2048, 32, 8, 128, True, True, 500)]),
        ("attention", loss.attention, [(1, 16384, 32, 8, 128, True, False, None, long),
                                       (2, 2048, 32, 8, 128, True, True, None, packed)]),
        ("attention", loss.attention, [(b, s, 32, 8, 64, True, s == 2048) for b, s in lengths]),
        ("attention", loss.attention, [(b, s, 32, 8, 128, False, s == 2048) for b, s in lengths]),
    ]  # fmt: skip
    every = [(turn, name, make, shape) for name, make, shapes in table for turn, shape in enumerate(shapes)]
    every.sort(key=lambda case: case[0])  # first shapes first: the machine's time may end
    return {
        f"{number:02} {name}": functools.partial(make, device, *shape)
        for number, (_, name, make, shape) in enumerate(every)
        if not only or name in only
    }


def free_memory() -> None:
    gc.collect()
    torch.accelerator.empty_cache()


def check_case(case: Any, found: dict[str, Any]) -> None:
    """Compare with fp64. A kernel that does not run is wrong, and no reason to leave the other cases out."""
    try:
        for what, error, allowed in case.check() if case.check else []:
            found["errors"][what] = error
            if not error <= allowed:
                found["wrong"].append(f"{what}: {error:.2e} > {allowed:.0e}")
    except Exception as problem:
        found["wrong"].append(f"check: {type(problem).__name__}: {str(problem)[:500]}")
    print(f"\n{case.name}  {case.shape}   " + "  ".join(f"{k} {v:.1e}" for k, v in found["errors"].items()), flush=True)


def run_case(case: Any, bandwidth: float, rate: float, check_only: bool) -> dict[str, Any]:
    from measure import measure

    found: dict[str, Any] = {"op": case.name, "shape": case.shape, "errors": {}, "wrong": [], "sides": {}}
    check_case(case, found)
    for problem in found["wrong"]:
        print(f"  WRONG  {problem}")
    if check_only:
        return found
    for direction in ("forward", "backward"):
        floor = getattr(case, f"{direction}_bytes") / bandwidth + getattr(case, f"{direction}_flops") / rate
        found[f"{direction}_floor_ms"] = floor * 1e3
    for name, make in case.sides.items():
        free_memory()
        try:
            numbers: dict[str, Any] = dict(measure(make()))
        except Exception as problem:  # a rival that refuses a shape is reported, not hidden
            found["sides"][name] = {"failed": f"{type(problem).__name__}: {str(problem)[:200]}"}
            if name.startswith("ours"):
                found["wrong"].append(f"{name}: {found['sides'][name]['failed']}")
            print(f"  {name:28} {found['sides'][name]['failed']}", flush=True)
            continue
        for direction in ("forward", "backward"):
            if f"{direction}_ms" in numbers and found[f"{direction}_floor_ms"]:
                floor_ms, flops = found[f"{direction}_floor_ms"], getattr(case, f"{direction}_flops")
                if name == "ours, at once":  # forward holds backward too
                    floor_ms, flops = floor_ms + found["backward_floor_ms"], flops + case.backward_flops
                numbers[f"{direction}_share"] = floor_ms / numbers[f"{direction}_ms"]
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


LEAST_FLOOR_MS = 0.03  # below it a kernel's launch is a part of what is timed, and no share of a bandwidth says much


def targets(results: list[dict[str, Any]]) -> list[tuple[str, bool | None]]:
    """The targets of the project on an H200, as far as this run measured what they need; None: not judged."""
    found: list[tuple[str, bool | None]] = []
    for result in results:
        name, sides = f"{result['op']} {result['shape']}", result["sides"]
        ours = sides.get("ours", {})
        if not result["op"].startswith(("attention ", "linear", "gated_delta")):  # bound by memory
            for direction, goal in (("forward", 0.85), ("backward", 0.75)):
                share, floor = ours.get(f"{direction}_share"), result.get(f"{direction}_floor_ms", 0.0)
                if share is not None:
                    text = f"{name}: {direction} {share:.0%} of copy bandwidth (>= {goal:.0%})"
                    small = f", its floor of {floor * 1e3:.0f} us is too near a launch"
                    found.append((text, share >= goal) if floor >= LEAST_FLOOR_MS else (text + small, None))
        if "both_ms" in ours and "both_ms" in sides.get("Liger", {}):
            ratio = sides["Liger"]["both_ms"] / ours["both_ms"]
            found.append((f"{name}: {ratio:.2f}x Liger's speed (> 1)", ratio > 1))
        if result["op"] == "cross_entropy" and result["shape"] == "8192x131072" and "both_ms" in ours:
            ratio = ours["both_ms"] / (result["forward_floor_ms"] + result["backward_floor_ms"])
            found.append((f"{name}: {ratio:.2f}x the floor (<= 1.3)", ratio <= 1.3))
        if result["op"] == "linear_cross_entropy":
            found += unfused_targets(name, sides)
        if result["op"] == "attention causal 128" and "16384" in result["shape"] and "forward_tflops" in ours:
            for direction, wanted in (("forward", 400), ("backward", 280)):
                got = ours[f"{direction}_tflops"]
                found.append((f"{name}: {direction} {got:.0f} TFLOP/s (>= {wanted})", got >= wanted))
    return found


def unfused_targets(name: str, sides: dict[str, Any]) -> list[tuple[str, bool | None]]:
    """Time and memory of linear cross-entropy beside torch's: what the operator runs, and all in one call."""
    found: list[tuple[str, bool | None]] = []
    plain = sides.get("torch eager", {})
    for side, key in (("ours", "both_ms"), ("ours, at once", "forward_ms")):
        if key in sides.get(side, {}) and "both_ms" in plain:
            ratio, memory = sides[side][key] / plain["both_ms"], sides[side]["peak_bytes"] / plain["peak_bytes"]
            found.append((f"{name}, {side}: {ratio:.2f}x torch's time (<= 1.1)", ratio <= 1.1))
            found.append((f"{name}, {side}: {memory:.2f}x torch's memory (<= 0.25)", memory <= 0.25))
    return found


def kernel_tests_pass(seconds: float) -> bool:
    """tests/unit/kernels/ in a process of their own, or several where pytest can: most of it is compiling."""
    tests = sorted(str(path) for path in (ROOT / "tests" / "unit" / "kernels").glob("test_*.py"))
    parallel = ["-n", "8"] if importlib.util.find_spec("xdist") else []
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "pytest", "-q", *parallel, *tests]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=seconds or None).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"the tests did not end in {seconds:g} s", flush=True)
        return False


def write(out: str | None, document: dict[str, Any]) -> None:
    if out:
        Path(out).write_text(json.dumps(document, indent=1))


def run_cases(options: argparse.Namespace, device: torch.device, about: dict[str, Any], began: float) -> list[Any]:
    """Results by case, those of an earlier run first; they are written after each case."""
    from measure import copy_bandwidth, matmul_rate

    results: dict[str, Any] = {}
    if options.resume and Path(options.out).exists():
        earlier = json.loads(Path(options.out).read_text())
        if any(earlier[key] != value for key, value in about.items()):
            raise SystemExit(f"{options.out} is of another device or torch: {earlier['device']}, {earlier['torch']}")
        results, about = earlier.pop("cases"), earlier  # its floors too
    else:
        about |= {"copy_bytes_per_second": copy_bandwidth(device), "matmul_flops": matmul_rate(device)}
    bandwidth, rate = about["copy_bytes_per_second"], about["matmul_flops"]
    print(f"measured floors: copy {bandwidth / 1e12:.2f} TB/s, bf16 matmul {rate / 1e12:.0f} TFLOP/s", flush=True)
    wanted = cases(device, [name for name in options.only.split(",") if name])
    for name, make in wanted.items():
        if name in results or (options.seconds and time.monotonic() - began > options.seconds):
            continue
        # Written before: after an illegal access nothing runs in this process any more, and --resume goes on behind it.
        results[name] = {"op": name[3:], "shape": "", "errors": {}, "wrong": ["did not end"], "sides": {}}
        write(options.out, {**about, "cases": results})
        free_memory()
        results[name] = run_case(make(), bandwidth, rate, options.check)
        torch.accelerator.synchronize()
        write(options.out, {**about, "cases": results})
    left = [name for name in wanted if name not in results]
    if left:
        print(f"\nno time left for {len(left)} cases: {', '.join(left)}")
    return [results.get(name) for name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operators, separated by commas")
    parser.add_argument("--check", action="store_true", help="only compare with fp64")
    parser.add_argument("--tests", action="store_true", help="run tests/unit/kernels/ first, unless --resume")
    parser.add_argument("--out", default=None, help="JSON file for the results")
    parser.add_argument("--seconds", type=float, default=0, help="begin no case after these")
    parser.add_argument("--resume", action="store_true", help="leave out the cases that --out holds")
    options = parser.parse_args()
    if options.resume and not options.out:
        parser.error("--resume needs --out")
    began = time.monotonic()
    if not torch.accelerator.is_available():
        print("no GPU here: nothing was checked or timed")
        return 2
    import hetero_kernels as hk

    if hk.INTERPRETED:
        print("TRITON_INTERPRET=1 is set: unset it, so that the kernels are compiled")
        return 2
    device = torch.accelerator.current_accelerator()
    assert device is not None
    torch._functorch.config.donated_buffer = False  # backward is run many times on one graph
    wrong = int(options.tests and not options.resume and not kernel_tests_pass(options.seconds))
    limits = hk.limits_of(device)
    name = torch.get_device_module(device).get_device_name()
    print(f"{name}, torch {torch.__version__}, {limits}")
    about = {"device": name, "torch": torch.__version__, "arch": limits.arch}
    results = run_cases(options, device, about, began)
    done = [result for result in results if result]
    print()
    for text, met in targets(done):
        print(f"{'not judged' if met is None else 'met' if met else 'MISSED':<10}  {text}")
    wrong += sum(bool(result["wrong"]) for result in done)
    print(f"\n{len(done)} of {len(results)} cases, {wrong} wrong")
    return 1 if wrong else 0 if len(done) == len(results) else 3


if __name__ == "__main__":
    sys.exit(main())
