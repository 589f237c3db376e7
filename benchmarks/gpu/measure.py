"""Timing and memory on one accelerator, and the two floors that everything is compared with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

Run = Callable[[], Any]


@dataclass
class Side:
    """One implementation of an operator. ``backward`` runs after ``forward``, on what that returned."""

    forward: Run
    backward: Callable[[Any], Any] | None = None


@dataclass
class Case:
    """An operator at one shape: the sides to time, and what the hardware needs at least."""

    name: str
    shape: str
    sides: dict[str, Callable[[], Side]]  # made only when it is their turn: memory is freed between them
    forward_bytes: float = 0
    backward_bytes: float = 0
    forward_flops: float = 0
    backward_flops: float = 0
    check: Callable[[], list[tuple[str, float, float]]] | None = None  # (what, error, allowed)


def milliseconds(run: Run, repeat: int = 200) -> tuple[float, float, float]:
    """Median, 20th and 80th percentile of device time per call; the L2 cache is emptied before each.

    Warms up for 200 ms: the first measurements on an idle chip look too good or too bad.
    """
    median, low, high = triton.testing.do_bench(run, warmup=200, rep=repeat, quantiles=[0.5, 0.2, 0.8])
    return float(median), float(low), float(high)


def host_microseconds(run: Run, each_ms: float) -> float:
    """Host time per call while the device is kept busy: what Python and the launch cost.

    ``each_ms``: milliseconds of a call on the device; of slow ones a few calls will do.
    """
    count = max(5, min(50, int(200 / each_ms)))
    torch.accelerator.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        run()
    seconds = time.perf_counter() - start
    torch.accelerator.synchronize()
    return seconds / count * 1e6


def peak_bytes(run: Run) -> int:
    """Most memory in use during ``run`` beyond what was in use before."""
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    result = run()
    torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated() - before
    del result
    return int(peak)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second read plus written of a large copy: the floor of memory-bound operators."""
    source = torch.randn(1 << 30, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    median, _, _ = milliseconds(lambda: target.copy_(source))
    return 2 * source.nbytes / median * 1e3


def matmul_rate(device: torch.device) -> float:
    """FLOP per second of an 8192^3 bf16 product on random data (zeros run 13 % faster)."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    median, _, _ = milliseconds(lambda: a @ b)
    return 2 * 8192**3 / median * 1e3


def autograd_side(function: Callable[..., Any], inputs: list[torch.Tensor], grads: tuple[torch.Tensor, ...]) -> Side:
    """A differentiable function; backward alone, by keeping the graph. ``grads``: of the outputs; (): a scalar's 1."""
    leaves = [x.detach().requires_grad_() for x in inputs]

    def forward() -> Any:
        return function(*leaves)

    def backward(result: Any) -> Any:
        results = result if isinstance(result, tuple) else (result,)
        seeds = grads or (torch.ones_like(results[0]),)
        matched = [seed.to(r.dtype) for seed, r in zip(seeds, results)]
        return torch.autograd.grad(results[: len(matched)], leaves, matched, retain_graph=True)

    return Side(forward, backward)


def measure(side: Side, memory: bool = True) -> dict[str, float]:
    """Milliseconds of forward, of backward and of both; host microseconds; peak bytes of both."""
    found: dict[str, float] = {}
    found["forward_ms"], found["forward_p20"], found["forward_p80"] = milliseconds(side.forward)
    found["forward_host_us"] = host_microseconds(side.forward, found["forward_ms"])

    def both() -> Any:
        result = side.forward()
        return result, side.backward(result) if side.backward else None

    if side.backward:
        result, backward = side.forward(), side.backward
        found["backward_ms"], found["backward_p20"], found["backward_p80"] = milliseconds(lambda: backward(result))
        found["backward_host_us"] = host_microseconds(lambda: backward(result), found["backward_ms"])
        del result
        found["both_ms"] = milliseconds(both)[0]
    if memory:
        found["peak_bytes"] = peak_bytes(both)
    return found


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Frobenius norm of the error over that of the exact result; infinite where NaN or infinity stand unasked."""
    assert got.shape == exact.shape, (got.shape, exact.shape)
    error = size = 0.0
    for g, e in zip(got.reshape(-1).split(1 << 27), exact.reshape(-1).split(1 << 27), strict=True):  # 1 GiB in fp64
        g, e = g.double(), e.double()
        live = e.isfinite()
        if not torch.equal(g.isfinite(), live):
            return float("inf")
        error += float((g - e).where(live, 0.0).square().sum())
        size += float(e.where(live, 0.0).square().sum())
    return math.sqrt(error / max(size, 1e-60))
