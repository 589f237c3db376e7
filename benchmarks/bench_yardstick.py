"""How well CPU time in units of the testbed's yardstick repeats, beside CPU time as it comes and other units.

    python benchmarks/bench_yardstick.py [--seconds 60] [--bin 6]

On every core at once: forward and backward of transformer layers of two sizes, the yardstick (both readings, after a
pause), products of matrices alone and small operators alone, in turn. Printed per core: the standard deviation over
bins, relative to the mean, of the CPU time of each size, divided by that of each unit in the same bin; ``other size``
is the best one could hope for, ``exponent`` the power of the yardstick that fits best, where anything varies. And on
the first core: how many times slower each is beside the other cores' work than alone (where the machine's cores are
threads of one core; a unit should slow down as layers do).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from hetero_megatron.comm.yardstick import Yardstick
from hetero_megatron.testbed.usual import Unit

PAUSE = 0.004  # seconds, before each round and each reading
UNITS = ("CPU time", "yardstick", "products", "small operators", "other size")
OBSERVED = ("small layers", "large layers", *UNITS[1:4])


def layers(width: int, count: int) -> Callable[[], None]:
    """Forward and backward of ``count`` layers on ``width`` tokens."""
    shapes = [(width, width)] * 4 + [(width, 11 * width // 4)] * 2 + [(11 * width // 4, width)]
    # As small as a model's, and always the same: exponentials of large products are denormal, which takes 10 % longer.
    torch.manual_seed(0)
    weights = [torch.randn(s) / s[0] ** 0.5 for s in shapes]
    q, k, v, o, gate, up, down = (w.requires_grad_() for w in weights)
    x = torch.randn(width, width, requires_grad=True)

    def layer(y: torch.Tensor) -> torch.Tensor:
        h = F.rms_norm(y, (width,))
        heads = [(h @ w).view(1, width, 4, width // 4).transpose(1, 2) for w in (q, k, v)]
        y = y + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(width, width) @ o
        h = F.rms_norm(y, (width,))
        return y + (F.silu(h @ gate) * (h @ up)) @ down

    def work() -> None:
        y = x * 0.01
        for _ in range(count):
            y = layer(y)
        y.sum().backward()  # type: ignore[no-untyped-call]

    return work


def observe(core: int, seconds: float) -> np.ndarray:
    """[rounds, 5] CPU seconds: small layers, large layers, yardstick, products, small operators."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    yardstick = Yardstick(Unit(1.0, 1.0))
    a, b = torch.full((192, 192), 1 / 192), torch.full((64, 192), 0.5)
    out, small = torch.empty_like(a), torch.empty_like(b)
    work: list[Callable[[], object]] = [
        layers(128, 4), layers(256, 2), lambda: (time.sleep(PAUSE), yardstick.read_cold(), yardstick.read_warm()),
        lambda: [torch.mm(a, a, out=out) for _ in range(8)], lambda: [torch.mul(b, b, out=small) for _ in range(500)],
    ]  # fmt: skip
    rows, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        row = []
        for each in work:
            start = time.thread_time()
            each()
            row.append(time.thread_time() - start)
        rows.append(row)
        time.sleep(PAUSE)
    return np.array(rows[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--bin", type=float, default=6.0, help="seconds")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.core is not None:
        print(json.dumps(observe(args.core, args.seconds).tolist()))
        return
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    command = [sys.executable, __file__, "--seconds", str(args.seconds), "--core"]
    alone = json.loads(subprocess.run([*command, str(cores[0])], check=True, stdout=subprocess.PIPE).stdout)
    running = [subprocess.Popen([*command, str(core)], stdout=subprocess.PIPE) for core in cores]
    print(f"{machine()}; {args.seconds:g} s in bins of {args.bin:g} s\n")
    print(f"| core | layers | {' | '.join(UNITS)} | exponent |\n|---|---|{'---|' * (len(UNITS) + 1)}")
    observed = [np.array(json.loads(process.communicate()[0])) for process in running]
    for core, rows in zip(cores, observed):
        bins = np.array([part.mean(0) for part in np.array_split(rows, max(2, round(args.seconds / args.bin)))])
        for size, name in enumerate(("small", "large")):
            units = [np.ones(len(bins)), *bins.T[2:], bins.T[1 - size]]
            ratios = [bins.T[size] / unit for unit in units]
            x, y = (np.log(column) - np.log(column).mean() for column in (bins.T[2], bins.T[size]))
            fits = (x @ y) / (x @ x)
            print(f"| {core} | {name} | {' | '.join(f'{r.std() / r.mean():.1%}' for r in ratios)} | {fits:.2f} |")
    slower = np.median(observed[0], axis=0) / np.median(np.array(alone), axis=0)
    print(f"\n| core {cores[0]} | {' | '.join(OBSERVED)} |\n|---|{'---|' * len(OBSERVED)}")
    print(f"| beside others / alone | {' | '.join(f'{ratio:.2f}x' for ratio in slower)} |")


if __name__ == "__main__":
    main()
