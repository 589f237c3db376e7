"""Offline tuner: times the tile sizes of each kernel on the chip at hand and writes a table.

    python -m hetero_kernels.tune --out my_chip.json [--ops norm_fwd,attention_fwd] [--dtype bf16]

The table is used by passing its path (``Limits(table=...)``), or for all users by adding it to
``hetero_kernels/tables/<arch>.json``. Ranks that are to give the same bits must use the same table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

import hetero_kernels as hk
from hetero_kernels.attention import shared_bytes
from hetero_kernels.limits import DTYPE_NAMES, Limits, limits_of, load_table, power_of_two

Config = dict[str, int]
Timer = Callable[[Callable[[], Any]], float]  # of one call, in milliseconds


def _product(**choices: Iterable[int]) -> list[Config]:
    return [dict(zip(choices, values)) for values in itertools.product(*choices.values())]


_WARPS = (4, 8, 16)
_TILES = (1024, 2048, 4096, 8192, 16384)
CANDIDATES: dict[str, list[Config]] = {
    "norm_fwd": _product(tile=_TILES, max_cols=(16384,), num_warps=_WARPS),
    "norm_bwd": _product(tile=_TILES[1:], max_cols=(4096, 8192), programs=(1, 2, 4), num_warps=_WARPS),
    "column_sum": _product(tile=(1024, 2048, 4096), max_cols=(16, 32, 64), num_warps=(4, 8)),
    "rope": _product(tile=(1024, 2048, 4096, 8192), num_warps=(2, 4, 8)),
    "elementwise": _product(tile=(1024, 2048, 4096, 8192), num_warps=(4, 8)),
    "softmax": _product(tile=(4096, 16384), max_cols=(4096, 16384), num_warps=_WARPS),
    "cross_entropy_fwd": _product(tile=(4096, 8192, 16384), max_cols=(4096, 8192, 16384), num_warps=_WARPS),
    "cross_entropy_bwd": _product(tile=(2048, 4096, 8192, 16384), num_warps=_WARPS),
    "attention_fwd": _product(block_q=(64, 128), block_k=(32, 64, 128), num_warps=(4, 8), num_stages=(1, 2, 3, 4)),
    "attention_bwd_kv": _product(block_q=(32, 64), block_k=(64, 128), num_warps=(4, 8), num_stages=(1, 2, 3, 4)),
    "attention_bwd_q": _product(block_q=(64, 128), block_k=(32, 64), num_warps=(4, 8), num_stages=(1, 2, 3, 4)),
    "attention_rows": _product(tile=(1024, 2048, 4096, 8192), num_warps=(2, 4, 8)),
    "delta_states": _product(block_v=(16, 32, 64), num_warps=(4, 8), num_stages=(1, 2, 3)),
    "delta_state_gradients": _product(block_v=(16, 32, 64), num_warps=(4, 8), num_stages=(1, 2, 3)),
    "delta_query_gradients": _product(block_v=(16, 32, 64, 128), num_warps=(4, 8), num_stages=(1, 2)),
    "delta_key_gradients": _product(block_v=(16, 32, 64, 128), num_warps=(4, 8), num_stages=(1, 2)),
    "adamw": _product(tile=(1024, 2048, 4096), num_warps=(4, 8)),
    "l2norm": _product(tile=(2048, 4096, 8192, 16384), num_warps=(4, 8)),
}
IN_FP32 = ("column_sum", "adamw", "l2norm")  # whatever the dtype of the model
_WIDTHS = [512, 1024, 2048, 4096, 8192, 16384]
SIZES: dict[str, list[int]] = {
    "norm_fwd": _WIDTHS,
    "norm_bwd": _WIDTHS,
    "column_sum": [4096],
    "rope": [64, 128],
    "elementwise": [8192],
    "softmax": _WIDTHS,
    "cross_entropy_fwd": [4096, 32768, 131072],
    "cross_entropy_bwd": [131072],
    "attention_fwd": [64, 128, 256],
    "attention_bwd_kv": [64, 128, 256],
    "attention_bwd_q": [64, 128, 256],
    "attention_rows": [64, 128],
    "delta_states": [64, 128],
    "delta_state_gradients": [64, 128],
    "delta_query_gradients": [64, 128],
    "delta_key_gradients": [64, 128],
    "adamw": [65536],
    "l2norm": [65536],
}


def workload(op: str, size: int, dtype: torch.dtype, device: torch.device, tokens: int) -> Callable[[Limits], Any]:
    """A call that runs the kernel ``op`` on rows (or heads) of ``size`` elements."""

    def randn(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32, device=device).to(kind)

    if op in ("norm_fwd", "norm_bwd", "softmax", "elementwise", "column_sum"):
        x, w = randn(tokens, size), randn(size)
        rstd = randn(tokens, kind=torch.float32)
        partial = randn(512, size, kind=torch.float32) if op == "column_sum" else w
        return {
            "norm_fwd": lambda limits: hk.rms_norm_fwd(x, w, 1e-5, limits=limits),
            "norm_bwd": lambda limits: hk.rms_norm_bwd(x, x, w, rstd, limits=limits),
            "softmax": lambda limits: hk.softmax_fwd(x, limits=limits),
            "elementwise": lambda limits: hk.swiglu_fwd(x, x, limits=limits),
            "column_sum": lambda limits: hk.norm.column_sum(partial, dtype, limits),
        }[op]
    if op == "rope":
        q, k, table = randn(tokens, 32, size), randn(tokens, 8, size), randn(tokens, size // 2, kind=torch.float32)
        return lambda limits: hk.rope_fwd(q, k, table, table, inplace=True, limits=limits)
    if op in ("cross_entropy_fwd", "cross_entropy_bwd"):
        logits, target = randn(tokens, size), torch.zeros(tokens, dtype=torch.int64, device=device)
        lse = randn(tokens, kind=torch.float32)
        if op == "cross_entropy_fwd":
            return lambda limits: hk.cross_entropy_fwd(logits, target, limits=limits)
        return lambda limits: hk.cross_entropy_bwd(lse, logits, target, lse, limits=limits)
    if op in ("adamw", "l2norm"):
        state = [randn(tokens * 4096, kind=torch.float32) for _ in range(4)]
        if op == "l2norm":
            return lambda limits: hk.l2norm(state, limits=limits)
        lists = [[x] for x in state]
        call: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 2}
        state[3].abs_()
        return lambda limits: hk.adamw_step(*lists, limits=limits, **call)
    if op.startswith("delta_"):  # of which each is one of several kernels: the others' time is the same
        heads = min(32, 2 * tokens)
        q, v, beta = randn(1, tokens, heads // 2, size), randn(1, tokens, heads, size), randn(1, tokens, heads)
        last = randn(1, heads, size, size, kind=torch.float32)
        beta, g = beta.sigmoid(), -randn(1, tokens, heads, kind=torch.float32).square()
        if op == "delta_states":
            return lambda limits: hk.gated_delta_fwd(q, q, v, g, beta, limits=limits)
        return lambda limits: hk.gated_delta_bwd(v, last, q, q, v, g, beta, limits=limits)
    q, k, v = randn(1, tokens, 16, size), randn(1, tokens, 4, size), randn(1, tokens, 4, size)
    lse = randn(1, 16, tokens, kind=torch.float32).abs() + 10
    if op == "attention_fwd":
        return lambda limits: hk.attention_fwd(q, k, v, limits=limits)
    if op == "attention_rows":
        return lambda limits: hk.attention_merge(q, lse, q, lse, limits=limits)
    delta = randn(1, 16, tokens, kind=torch.float32)
    # dQ and dK, dV are separate kernels; the other one's time is the same for all candidates
    return lambda limits: hk.attention_bwd(q, q, k, v, None, lse, delta=delta, limits=limits)


def _fits(op: str, size: int, dtype: torch.dtype, candidate: Config, limits: Limits) -> bool:
    """Whether a candidate runs as it is; attention would cut one that needs too much on-chip memory."""
    if not op.startswith("attention_") or "num_stages" not in candidate:
        return True
    blocks = candidate["block_q"], candidate["block_k"], candidate["num_stages"]
    dims = (power_of_two(size),) * 2
    return shared_bytes(op, *blocks, *dims, dtype.itemsize) <= limits.shared_bytes


def tune_op(
    op: str, size: int, dtype: torch.dtype, candidates: list[Config], run: Callable[[Limits], Any], limits: Limits,
    timer: Timer, folder: Path,
) -> tuple[Config, float]:  # fmt: skip
    """The fastest of ``candidates``, and its milliseconds. Those that the chip or compiler refuses are left out.

    Raises:
        RuntimeError: none of them runs.
    """
    table = dict(load_table(limits.arch, limits.table))
    best: tuple[Config, float] | None = None
    fitting = [c for c in candidates if _fits(op, size, dtype, c, limits)] or candidates
    for number, candidate in enumerate(fitting):
        if candidate["num_warps"] > limits.max_warps:
            continue
        path = folder / f"{op}-{size}-{DTYPE_NAMES[dtype]}-{number}.json"
        path.write_text(json.dumps({"ops": {**table, op: [{"max_size": None, "config": candidate}]}}))
        trial = replace(limits, table=str(path))
        try:
            milliseconds = timer(lambda: run(trial))  # noqa: B023 (called at once)
        except Exception as problem:
            print(f"  {op} {size} {candidate}: {type(problem).__name__}", file=sys.stderr)
            continue
        if best is None or milliseconds < best[1]:
            best = candidate, milliseconds
    if best is None:
        raise RuntimeError(f"no tile size of {op} runs for size {size}, {dtype}")
    return best


def tune(
    ops: Iterable[str], dtype: torch.dtype, device: torch.device, limits: Limits, timer: Timer, tokens: int = 8192,
    candidates: dict[str, list[Config]] | None = None, sizes: dict[str, list[int]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """A whole table: new rules of ``ops`` before those that were used so far, which go on for all other dtypes.

    Each new rule holds up to its size, the last one of an op for all above.
    """
    rules: dict[str, list[dict[str, Any]]] = dict(load_table(limits.arch, limits.table))
    with tempfile.TemporaryDirectory() as folder:
        for op in ops:
            kind = torch.float32 if op in IN_FP32 else dtype
            names, found = [DTYPE_NAMES[like] for like in DTYPE_NAMES if like.itemsize == kind.itemsize], []
            chosen_sizes = (sizes or SIZES)[op]
            for size in chosen_sizes:
                run = workload(op, size, dtype, device, tokens)
                options = (candidates or CANDIDATES)[op]
                best, milliseconds = tune_op(op, size, dtype, options, run, limits, timer, Path(folder))
                print(f"{op} {size}: {milliseconds:.4f} ms {best}", file=sys.stderr, flush=True)
                bound = None if size == chosen_sizes[-1] else size
                took = round(milliseconds, 5)
                found.append({"dtypes": names, "max_size": bound, "config": best, "milliseconds": took})
            rules[op] = [*found, *(rule for rule in rules[op] if rule.get("dtypes") != names)]
    note = f"tuned with {DTYPE_NAMES[dtype]}, torch {torch.__version__}, triton {triton.__version__}"
    return {"arch": limits.arch, "note": note, "ops": rules}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hetero_kernels.tune", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--out", required=True, help="JSON file to write; '-': standard output")
    parser.add_argument("--ops", default=",".join(CANDIDATES), help="default: all")
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPE_NAMES.values()))
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args(arguments)
    unknown = set(options.ops.split(",")) - set(CANDIDATES)
    if unknown:
        parser.error(f"unknown ops {sorted(unknown)}; known: {', '.join(CANDIDATES)}")
    if not torch.accelerator.is_available():
        print("no accelerator here: the tuner times kernels, which needs one", file=sys.stderr)
        return 2
    device = torch.accelerator.current_accelerator()
    assert device is not None
    dtype = next(d for d, name in DTYPE_NAMES.items() if name == options.dtype)
    limits, table = limits_of(device), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for i, op in enumerate(options.ops.split(",")):  # written after each: all of them may take an hour
            table = tune([op], dtype, device, limits, _time_on_device, options.tokens)
            so_far = Path(folder) / f"{i}.json"  # tables are cached by their path
            so_far.write_text(json.dumps(table))
            limits = replace(limits, table=str(so_far))
            if options.out != "-":
                Path(options.out).write_text(json.dumps(table, indent=1) + "\n")
    if options.out == "-":
        print(json.dumps(table, indent=1))
    return 0


def _time_on_device(run: Callable[[], Any]) -> float:
    return float(triton.testing.do_bench(run, warmup=25, rep=100, return_mode="median"))


if __name__ == "__main__":
    sys.exit(main())
