"""Compile every Triton kernel for a GPU that need not be here: registers, spills and shared memory of each.

    python benchmarks/gpu/compile_kernels.py [--arch 90] [--only attention] [--table FILE] [--json]

No GPU and no driver are used: the operators are called on tensors without memory (device "meta") at the shapes of the
benchmark, and each launch is compiled to machine code instead of run. Exits with 1 if a kernel does not compile.
Spilled registers make a kernel slow where they are read in its innermost loops ("loop_spills": how many times there);
this is what can be checked about speed on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when the kernels are imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

import torch
import triton
from triton.backends.compiler import GPUTarget

import hetero_kernels as hk

BF16, FP32 = torch.bfloat16, torch.float32
TYPES = {
    BF16: "bf16",
    FP32: "fp32",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}


def loop_spills(machine: str) -> int:
    """Reads and writes of spilled registers in the worst of the innermost loops of a disassembled kernel."""
    lines = machine.splitlines()
    labels = {line.strip().rstrip(":"): number for number, line in enumerate(lines) if line.strip().endswith(":")}
    loops = []
    for number, line in enumerate(lines):
        branch = re.search(r"\bBRA\b.*`\((\S+)\)", line)
        if branch and labels.get(branch[1], number) < number:
            loops.append((labels[branch[1]], number))
    inner = [(a, b) for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]
    return max((sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in lines[a:b]) for a, b in inner), default=0)


class Compiler:
    """Stands in for the launch of a kernel."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.target = GPUTarget("cuda", arch, 32)  # lint: allow vendor (the compiler's name of its back end)
        self.seen: set[str] = set()
        self.rows: list[dict[str, Any]] = []
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
        key = f"{kernel.fn.__name__} {signature} {constants} {sorted(divisible)} {options}"
        if key not in self.seen:
            self.seen.add(key)
            source = triton.compiler.ASTSource(kernel, signature, constants, divisible)
            compiled = triton.compile(source, target=self.target, options=options)
            self.rows.append({"case": self.case, "kernel": kernel.fn.__name__, **options, **self.resources(compiled)})

    def resources(self, compiled: Any) -> dict[str, Any]:
        """The assembler's own report."""
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
        found = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
        registers = re.search(r"Used (\d+) registers", report)
        ptx = compiled.asm["ptx"]
        return {
            "registers": int(registers[1]) if registers else None,
            "spill_bytes": int(found[1]) + int(found[2]) if found else None,
            "loop_spills": loop_spills(machine),
            "shared_bytes": compiled.metadata.shared,
            "wgmma": len(re.findall(r"wgmma.mma_async", ptx)),
            "mma": len(re.findall(r"\bmma\.sync", ptx)),
            "cp_async": len(re.findall(r"cp\.async\.(?:cg|ca)", ptx)),
            "loads_16B": len(re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", ptx)),
            "loads_other": len(re.findall(r"ld\.global", ptx))
            - len(re.findall(r"ld\.global\S*\.v4\.b32|ld\.global\S*\.v2\.b64", ptx)),
        }


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def norms(limits: hk.Limits, hidden: int) -> None:
    x, w, rstd = empty(8192, hidden), empty(hidden), empty(8192, dtype=FP32)
    hk.rms_norm_fwd(x, w, 1e-5, limits=limits)
    hk.rms_norm_bwd(x, x, w, rstd, limits=limits)
    hk.add_rms_norm_fwd(x, x, w, 1e-5, limits=limits)
    hk.add_rms_norm_bwd(x, x, x, w, rstd, limits=limits)
    hk.layer_norm_fwd(x, w, w, 1e-5, limits=limits)
    hk.layer_norm_bwd(x, x, w, rstd, rstd, limits=limits)


def elementwise(limits: hk.Limits) -> None:
    both = empty(8192, 2 * 14336)
    for gate, up in (both.chunk(2, -1), (empty(8192, 14336), empty(8192, 14336))):
        hk.swiglu_fwd(gate, up, limits=limits)
        hk.swiglu_bwd(gate, gate, up, limits=limits)
    hk.swiglu_fwd(gate, up, limit=7.0, limits=limits)
    hk.swiglu_bwd(gate, gate, up, limit=7.0, packed=True, limits=limits)
    for approximate in (False, True):
        hk.gelu_fwd(gate, approximate=approximate, limits=limits)
        hk.gelu_bwd(gate, gate, approximate=approximate, limits=limits)
    q, k, table = empty(1, 8192, 32, 128), empty(1, 8192, 8, 128), empty(8192, 64, dtype=FP32)
    for interleaved in (False, True):
        hk.rope_fwd(q, k, table, table, interleaved=interleaved, limits=limits)
    hk.rope_bwd(q, k, table[:, :32], table[:, :32], positions=empty(8192, dtype=torch.int64), limits=limits)


def softmaxes(limits: hk.Limits) -> None:
    for width in (1024, 8192, 131072):
        x = empty(8192, width)
        hk.softmax_fwd(x, causal=True, limits=limits)
        hk.softmax_fwd(x, mask=empty(8192, width, dtype=torch.bool), limits=limits)
        hk.softmax_bwd(x, x, limits=limits)


def losses(limits: hk.Limits) -> None:
    target, stats = empty(8192, dtype=torch.int64), empty(8192, dtype=FP32)
    for vocabulary in (4096, 50257, 131072):
        logits = empty(8192, vocabulary)
        hk.cross_entropy_fwd(logits, target, limits=limits)
        hk.cross_entropy_fwd(logits, target, label_smoothing=0.1, z_loss=1e-4, softcap=30.0, limits=limits)
        hk.cross_entropy_bwd(stats, logits, target, stats, limits=limits)
        hk.cross_entropy_bwd(
            stats, logits, target, stats, label_smoothing=0.1, z_loss=1e-4, softcap=30.0, limits=limits
        )
        hk.vocab_stats(logits, target, 1000, limits=limits)
    logits = empty(1024, 128256, dtype=FP32)
    hk.cross_entropy_fwd(logits, target[:1024], limits=limits)
    hk.cross_entropy_bwd(stats[:1024], logits, target[:1024], stats[:1024], limits=limits)


def attentions(limits: hk.Limits, dim: int, dtype: torch.dtype) -> None:
    q, k = empty(1, 16384, 32, dim, dtype=dtype), empty(1, 16384, 8, dim, dtype=dtype)
    lse = empty(1, 32, 16384, dtype=FP32)
    bounds = empty(1, 2, 16384, dtype=torch.int32)
    for options in ({}, {"causal": False}, {"window": 4096}, {"bounds": bounds}):
        hk.attention_fwd(q, k, k, limits=limits, **options)
        hk.attention_bwd(q, q, k, k, q, lse, limits=limits, **options)
    hk.attention_merge(q, lse, q, lse, limits=limits)


def grouped(limits: hk.Limits, dtype: torch.dtype) -> None:
    """Experts of Qwen3-30B-A3B (128, 768 wide) and of Mixtral-8x7B (8, 14336 wide)."""
    for groups, n, k in ((128, 768, 2048), (8, 14336, 4096)):
        x, dy, w = empty(8192, k, dtype=dtype), empty(8192, n, dtype=dtype), empty(groups, n, k, dtype=dtype)
        ends = empty(groups, dtype=torch.int64)
        hk.grouped_gemm_fwd(x, w, ends, limits=limits)
        hk.grouped_gemm_fwd(x, w, ends, empty(groups, n, dtype=dtype), limits=limits)
        hk.grouped_gemm_dx(dy, w, ends, limits=limits)
        hk.grouped_gemm_dw(dy, x, ends, limits=limits)
        hk.grouped_gemm_dw(dy, x, ends, into=empty(groups, n, k, dtype=FP32), limits=limits)


def optimizers(limits: hk.Limits) -> None:
    state = [empty(1 << 20, dtype=FP32)]
    call = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 2}
    hk.adamw_step(state, [empty(1 << 20)], state, state, copies=[empty(1 << 20)], limits=limits, **call)
    hk.adamw_step(state, state, state, state, found_inf=empty(1, dtype=FP32), grad_scale=empty(1, dtype=FP32),
                  limits=limits, **call)  # fmt: skip
    hk.l2norm([*state, empty(5000)], limits=limits)


def cases(limits: hk.Limits) -> dict[str, Callable[[], None]]:
    table: dict[str, Callable[[], None]] = {
        f"norm {hidden}": lambda h=hidden: norms(limits, h)  # type: ignore[misc]
        for hidden in (64, 1024, 4096, 8192, 16384, 65536)
    }
    table |= {
        "elementwise": lambda: elementwise(limits),
        "softmax": lambda: softmaxes(limits),
        "loss": lambda: losses(limits),
        "grouped gemm bf16": lambda: grouped(limits, BF16),
        "grouped gemm fp32": lambda: grouped(limits, FP32),
        "optimizer": lambda: optimizers(limits),
    }
    for dim, dtype in ((128, BF16), (64, BF16), (80, BF16), (256, BF16), (128, FP32)):
        table[f"attention {TYPES[dtype]} {dim}"] = lambda d=dim, t=dtype: attentions(limits, d, t)  # type: ignore[misc]
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, help="compute capability, for example 90 for H100 and H200")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--table", default=None, help="tuning table instead of the built-in one")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    limits = hk.Limits(f"cuda-{options.arch}", 132, 2**31 - 1, 65536, 32, 232448, options.table)
    compiler = Compiler(options.arch)
    triton.runtime.jit.JITFunction.run = lambda self, *args, **kwargs: compiler(self, *args, **kwargs)
    failed = 0
    for name, run in cases(limits).items():
        if options.only not in name:
            continue
        compiler.case = name
        start = len(compiler.rows)
        try:
            run()
        except Exception as problem:  # reported, and the exit status says so
            failed += 1
            print(f"{name}: {type(problem).__name__}: {str(problem)[:600]}", file=sys.stderr)
        if not options.json:
            for row in compiler.rows[start:]:
                print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if options.json:
        print(json.dumps({"arch": options.arch, "kernels": compiler.rows, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
