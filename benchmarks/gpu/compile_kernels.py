"""What the compiler makes of every Triton kernel, for a GPU that need not be here, against a recorded table.

    python benchmarks/gpu/compile_kernels.py [--only WORDS …] [--arch 90] [--check | --update] [--table FILE] [--json]

No GPU and no driver are used: the calls of ``compile_cases.py`` run on tensors without memory (device "meta"), and
each launch is compiled to machine code instead of run. ``--check`` compares with the table of this version of Triton,
``compiled/cuda-<arch>.json`` if that is recorded with it, else ``compiled/cuda-<arch>-triton-<version>.json``, and
exits with 1 if a number is worse than recorded there; ``--update`` records what is found. With ``--changed`` a kernel
is compiled only if its source, its arguments or its options are not those that it was recorded with. Exits with 1 if
a kernel does not compile, and with 3 if there is no table of this version. Another one is tried with

    pip install --no-deps --target DIR triton==3.6.0
    PYTHONPATH=DIR TRITON_CACHE_DIR=DIR/cache python benchmarks/gpu/compile_kernels.py --update --changed

Per kernel: registers; spill_bytes, and loop_spills, how often spilled registers are read or written in the worst of the
innermost loops, which is what makes a kernel slow; instructions, and those of the longest innermost loop; shared_bytes;
blocks_per_sm, which fit at a time; async_wait, how many copies to shared memory are still under way when the loop waits
for one (0: nothing is loaded ahead); loads_16B and narrow_loads, of 16 bytes a thread and of fewer; wgmma and mma,
products by warp groups and by warps.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when the kernels are imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import triton
from compile_cases import CASES
from triton.backends.compiler import GPUTarget

import hetero_kernels as hk

TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}
LESS = ("registers", "spill_bytes", "loop_spills", "instructions", "loop_instructions", "shared_bytes", "narrow_loads",
        "mma")  # fmt: skip
MORE = ("blocks_per_sm", "async_wait")
TABLES = Path(__file__).resolve().parent / "compiled"


def inner_loops(machine: str) -> list[list[str]]:
    """Lines of the innermost loops of a disassembled kernel."""
    lines = machine.splitlines()
    labels = {line.strip().rstrip(":"): number for number, line in enumerate(lines) if line.strip().endswith(":")}
    loops = []
    for number, line in enumerate(lines):
        branch = re.search(r"\bBRA\b.*`\((\S+)\)", line)
        if branch and labels.get(branch[1], number) < number:
            loops.append((labels[branch[1]], number + 1))
    inner = [(a, b) for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]
    return [lines[a:b] for a, b in inner]


def count(lines: list[str], pattern: str = r"/\*[0-9a-f]{4,}\*/\s+\S") -> int:
    return sum(bool(re.search(pattern, line)) for line in lines)


def loop_spills(machine: str) -> int:
    """Reads and writes of spilled registers in the worst of the innermost loops."""
    return max((count(loop, r"\b(LDL|STL)\b") for loop in inner_loops(machine)), default=0)


def blocks_per_sm(registers: int, warps: int, shared: int) -> int:
    """Programs that fit on one multiprocessor of a Hopper GPU: 64 K registers, 64 warps, 228 KiB, 1 KiB for each."""
    by_registers = 65536 // (-(-registers // 8) * 8 * 32 * warps)
    return min(by_registers, 64 // warps, 233472 // (shared + 1024), 32)


class Compiler:
    """Stands in for the launch of a kernel. ``recorded``: rows of kernels that need not be compiled again."""

    def __init__(self, arch: int, recorded: Mapping[str, dict[str, Any]] | None = None) -> None:
        self.arch, self.recorded = arch, recorded or {}
        self.target = GPUTarget("cuda", arch, 32)  # lint: allow vendor (the compiler's name of its back end)
        self.rows: dict[str, dict[str, Any]] = {}
        self.case = ""

    def __call__(self, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        divisible: dict[tuple[int, ...], Any] = {}
        for index, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
            kind = "constexpr"
            if not parameter.is_constexpr and value is not None:
                if isinstance(value, torch.Tensor):
                    kind = "*" + TYPES[value.dtype]
                    divisible[(index,)] = [["tt.divisibility", 16]]
                elif isinstance(value, float):
                    kind = "fp32"
                elif value != 1 or parameter.do_not_specialize:
                    kind = "i32" if -(2**31) <= value < 2**31 else "i64"
                    if value % 16 == 0 and not parameter.do_not_specialize:
                        divisible[(index,)] = [["tt.divisibility", 16]]
            if kind == "constexpr":
                constants[(index,)] = value
            signature[parameter.name] = kind
        source = triton.compiler.ASTSource(kernel, signature, constants, divisible)
        name = f"{self.case}: {kernel.fn.__name__.lstrip('_')}"
        assert name not in self.rows, f"{name} is launched twice: give the calls names of their own"
        what = {**options, "source": source.hash()[:16]}
        if what.items() <= self.recorded.get(name, {}).items():
            self.rows[name] = self.recorded[name]
            return
        compiled = triton.compile(source, target=self.target, options=options)
        self.rows[name] = {**what, **self.resources(compiled, options["num_warps"])}

    def resources(self, compiled: Any, warps: int) -> dict[str, Any]:
        """The assembler's own report, and what the machine code says."""
        from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder) / "kernel.ptx"
            text.write_text(compiled.asm["ptx"])
            command = [get_ptxas(self.arch).path, "-v", f"-arch={sm_arch_from_capability(self.arch)}", str(text)]
            report = subprocess.run(
                [*command, "-o", f"{folder}/out"], capture_output=True, text=True, check=True
            ).stderr
            listing = [str(Path(command[0]).with_name("nvdisasm")), "-c", f"{folder}/out"]
            machine = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
        spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
        registers = re.search(r"Used (\d+) registers", report)
        assert spills and registers, f"the assembler reports otherwise than it did: {report}"
        ptx, shared = compiled.asm["ptx"], compiled.metadata.shared
        waits = re.findall(r"async_wait %[^{]*\{num = (\d+)", compiled.asm["ttgir"])
        loads, wide = len(re.findall(r"ld\.global", ptx)), r"ld\.global\S*\.(?:v4\.b32|v2\.b64)"
        loops = inner_loops(machine)
        return {
            "registers": int(registers[1]),
            "spill_bytes": int(spills[1]) + int(spills[2]),
            "loop_spills": loop_spills(machine),
            "instructions": count(machine.splitlines()),
            "loop_instructions": max(map(count, loops), default=0),
            "shared_bytes": shared,
            "blocks_per_sm": blocks_per_sm(int(registers[1]), warps, shared),
            "async_wait": min(map(int, waits), default=0),
            "loads_16B": len(re.findall(wide, ptx)),
            "narrow_loads": loads - len(re.findall(wide, ptx)),
            "wgmma": len(re.findall(r"wgmma.mma_async", ptx)),
            "mma": len(re.findall(r"\bmma\.sync", ptx)),
        }


def table_path(arch: int) -> Path:
    """Of this version of Triton."""
    path = TABLES / f"cuda-{arch}.json"  # lint: allow vendor (the compiler's name of its back end)
    if not path.exists() or json.loads(path.read_text())["triton"] == triton.__version__:
        return path
    return path.with_name(f"{path.stem}-triton-{triton.__version__}.json")


def worse(found: Mapping[str, Mapping[str, Any]], recorded: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What ``found`` has that is worse than recorded, or not recorded at all."""
    out = []
    for name, row in found.items():
        if name not in recorded:
            out.append(f"{name}: not recorded")
            continue
        before = recorded[name]
        out += [f"{name}: {key} {before[key]} -> {row[key]}" for key in LESS if row[key] > before[key]]
        out += [f"{name}: {key} {before[key]} -> {row[key]}" for key in MORE if row[key] < before[key]]
    return out


def compile_all(compiler: Compiler, limits: hk.Limits, only: list[str], show: bool) -> list[str]:
    """Compile the cases whose names contain one of ``only`` (none: all); returns the failures."""
    triton.runtime.jit.JITFunction.run = lambda self, *args, **kwargs: compiler(self, *args, **kwargs)
    failed = []
    for group in CASES:
        for name, call in group():
            if only and not any(word in name for word in only):
                continue
            compiler.case, start = name, len(compiler.rows)
            try:
                call(limits=limits)
            except Exception as problem:  # reported, and the exit status says so
                failed.append(f"{name}: {type(problem).__name__}: {str(problem)[:600]}")
                print(failed[-1], file=sys.stderr)
            for key in list(compiler.rows)[start:] if show else ():
                print(f"{key}  " + "  ".join(f"{k} {v}" for k, v in compiler.rows[key].items()), flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, help="compute capability, for example 90 for H100 and H200")
    parser.add_argument("--only", nargs="+", default=[], help="calls whose name contains one of these")
    parser.add_argument("--table", default=None, help="tuning table instead of the built-in one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--changed", action="store_true", help="only what changed since it was recorded")
    act = parser.add_mutually_exclusive_group()
    act.add_argument("--check", action="store_true", help="exit with 1 if anything is worse than recorded")
    act.add_argument("--update", action="store_true", help="record what is found (all, or --only)")
    options = parser.parse_args()
    path = table_path(options.arch)
    table: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if options.check and not table:
        print(f"no table was recorded with triton {triton.__version__}: nothing to compare with")
        return 3
    arch = f"cuda-{options.arch}"  # lint: allow vendor (the name of a tuning table)
    limits = hk.Limits(arch, 132, 2**31 - 1, 65536, 32, 232448, options.table)
    recorded = table.get("kernels", {})
    compiler = Compiler(options.arch, recorded if options.changed else None)
    failed = compile_all(compiler, limits, options.only, not options.json)
    if options.json:
        print(json.dumps({"arch": options.arch, "kernels": compiler.rows, "failed": failed}))
    found = worse(compiler.rows, recorded) if options.check or options.update else []
    for line in found:
        print(f"worse: {line}", file=sys.stderr)
    if options.update:
        kept = {name: row for name, row in recorded.items() if options.only and name not in compiler.rows}
        rows = dict(sorted({**kept, **compiler.rows}.items()))
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'{{"triton": {json.dumps(triton.__version__)}, "kernels": {{\n{lines}\n}}}}\n')
    return 1 if failed or (options.check and found) else 0


if __name__ == "__main__":
    sys.exit(main())
