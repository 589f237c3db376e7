"""Compile kernels for a GPU that need not be here, into a folder that Triton reads beside one.

    python benchmarks/gpu/kernel_cache.py --out DIR [--arch 90] [--only WORDS …]
    TRITON_CACHE_DIR=DIR python benchmarks/gpu/first_run.py …

Each call goes through Triton's own code up to the launch itself, with a driver that says which chip it is for, so that
an entry has the key that Triton looks for there. In a key are the kernel's source with all that it calls, types and
alignment of its arguments, constants and options, the chip's architecture, the assembler's version, some variables of
the environment, and Triton's own files with its compiled library. So a folder serves the same sources of these kernels
under the same wheel of Triton: the same version for the same version of Python. What has another key is compiled there.

Compiled are the training step of first_run.py (``first run``) and the calls of ``compile_cases.py``. Prints how many
kernels were launched, and how many of them were not in the folder yet. Exits with 1 if one does not compile.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # read when the kernels are imported
sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "kernels"), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
import triton  # noqa: E402
from compile_cases import CASES, FP32, Call, empty  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import hetero_kernels as hk  # noqa: E402

FIRST_RUN = (2048, 32, 8, 64, 8192, 128256, 8192)  # hidden, heads, KV heads, head, feed-forward, vocabulary, tokens


class AbsentChip:
    """What of a driver Triton asks before it launches."""

    def __init__(self, arch: int) -> None:
        self._target = GPUTarget("cuda", arch, 32)  # lint: allow vendor (the compiler's name of its back end)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def first_run() -> Iterator[Call]:
    """What a step of first_run.py's Llama launches in bf16, but for attention, which is cuDNN's there."""
    hidden, heads, kv_heads, head, ffn, vocabulary, tokens = FIRST_RUN
    x, weight, rstd = empty(1, tokens, hidden), empty(hidden), empty(1, tokens, dtype=FP32)
    yield "first run: rms_norm_fwd", partial(hk.rms_norm_fwd, x, weight, 1e-5)
    yield "first run: rms_norm_bwd", partial(hk.rms_norm_bwd, x, x, weight, rstd)
    yield "first run: add_rms_norm_fwd", partial(hk.add_rms_norm_fwd, x, x, weight, 1e-5)
    yield "first run: add_rms_norm_bwd", partial(hk.add_rms_norm_bwd, x, x, x, weight, rstd)
    both = empty(1, tokens, 2 * ffn)
    gate, up = both.chunk(2, -1)
    yield "first run: swiglu_fwd", partial(hk.swiglu_fwd, gate, up)
    yield "first run: swiglu_bwd", partial(hk.swiglu_bwd, empty(1, tokens, ffn), gate, up, packed=True)
    joint = empty(1, tokens, (heads + 2 * kv_heads) * head).unflatten(-1, (-1, head))
    q, k, angles = joint[:, :, :heads], joint[:, :, heads : heads + kv_heads], empty(tokens, 1, head // 2, dtype=FP32)
    yield "first run: rope_fwd", partial(hk.rope_fwd, q, k, angles[:, 0], angles[:, 0], inplace=True)
    yield "first run: rope_bwd", partial(hk.rope_bwd, q, k, angles[:, 0], angles[:, 0], inplace=True)
    logits, labels, lse = empty(512, vocabulary), empty(512, dtype=torch.int64), empty(512, dtype=FP32)
    yield "first run: cross_entropy_fwd", partial(hk.cross_entropy_fwd, logits, labels)
    yield "first run: cross_entropy_bwd", partial(hk.cross_entropy_bwd, lse, logits, labels, lse, inplace=True)
    state, copies = [empty(1 << 20, dtype=FP32)], [empty(1 << 20)]
    call: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 2}
    step = partial(hk.adamw_step, state, state, state, state, grad_scale=0.5, copies=copies, **call)
    yield "first run: adamw", step
    yield "first run: l2norm", partial(hk.l2norm, state)


def fill(arch: int, only: list[str]) -> tuple[int, list[str]]:
    """(kernels launched, problems)."""
    triton.runtime.driver.set_active(AbsentChip(arch))
    run, launched, problems = JITFunction.run, set[str](), []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        launched.add(run(kernel, *args, grid=grid, warmup=True, **options).hash)

    JITFunction.run = compile_only
    limits = hk.Limits(f"cuda-{arch}", 132, 2**31 - 1, 65536, 32, 232448)  # lint: allow vendor (a tuning table's name)
    for group in (first_run, *CASES):
        for name, call in group():
            if only and not any(word in name for word in only):
                continue
            try:
                call(limits=limits)
            except Exception as problem:  # the others are compiled, and the exit status says so
                problems.append(f"{name}: {type(problem).__name__}: {str(problem)[:600]}")
    return len(launched), problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="the folder; what is there is kept")
    parser.add_argument("--arch", type=int, default=90, help="compute capability, for example 90 for H100 and H200")
    parser.add_argument("--only", nargs="+", default=[], help="calls whose name contains one of these")
    options = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = str(options.out.resolve())

    def entries() -> int:
        return sum(1 for _ in options.out.glob("*/__grp__*.json"))

    before = entries()
    launched, problems = fill(options.arch, options.only)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"triton {triton.__version__}, sm_{options.arch}: {launched} kernels, {entries() - before} of them new")
    return 1 if problems or not launched else 0


if __name__ == "__main__":
    sys.exit(main())
