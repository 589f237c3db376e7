"""What the kernel plan costs per call: provider alone, inside an autograd.Function by hand, and through the plan.

    python benchmarks/bench_dispatch.py [--calls 200] [--rounds 200]

Goal: the plan adds at most 1 us to a hand-written autograd.Function over the same provider.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch

from benchmarks.common import machine
from hetero_megatron.ops import Signature, resolve, torch_registry
from hetero_megatron.ops.library import define


def seconds_per_call(call: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    registry = torch_registry()
    plan = resolve(registry, [Signature("swiglu", "cpu", torch.float32)])
    kernel = registry.kernel("swiglu", "aten")
    assert kernel.backward is not None
    forward, backward = kernel.forward, kernel.backward

    class ByHand(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(gate, up)
            return forward(gate, up)[0]  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return backward(grad, *ctx.saved_tensors)

    gate, up = (torch.randn(8, requires_grad=True) for _ in range(2))
    operator = define(registry.spec("swiglu"), kernel)
    sides: dict[str, Callable[[], Any]] = {
        "provider alone, no autograd": lambda: forward(gate.detach(), up.detach()),
        "autograd.Function by hand": lambda: ByHand.apply(gate, up),
        "kernel plan": lambda: plan.swiglu(gate, up),
        "torch operator (only under --compile)": lambda: operator(gate, up),
    }
    best = dict.fromkeys(sides, float("inf"))
    for _ in range(args.rounds):  # alternate, so that noise is shared out; the minimum is what the code costs
        for name, call in sides.items():
            best[name] = min(best[name], seconds_per_call(call, args.calls))
    print(f"{machine()}, torch {torch.__version__}: swiglu of 8 elements, best of {args.rounds} x {args.calls} calls")
    for name, value in best.items():
        print(f"  {name:<40}{value * 1e6:8.2f} us")
    added = best["kernel plan"] - best["autograd.Function by hand"]
    print(f"  the plan adds {added * 1e6:.2f} us to the Function by hand (goal: at most 1 us)")


if __name__ == "__main__":
    main()
