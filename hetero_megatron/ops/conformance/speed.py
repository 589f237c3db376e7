"""How fast a kernel is beside what it must at least compute and move, and the rates that the planner reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hetero_megatron.ops.conformance.compare import cast, copy_args
from hetero_megatron.ops.conformance.run import seeds
from hetero_megatron.ops.kernel import Kernel
from hetero_megatron.ops.spec import Case, OpSpec, normal


@dataclass(frozen=True)
class Speed:
    """Seconds of one call; floor: what the measured bandwidth and product rate of the device allow at best."""

    kernel: str
    dtype: str
    case: str
    direction: str
    seconds: float
    floor: float

    @property
    def share(self) -> float:
        """Of the floor; 1 is as fast as can be."""
        return self.floor / self.seconds


def best_seconds(call: Callable[[], Any], synchronize: Callable[[], None], budget: float = 0.1) -> float:
    """Shortest of the calls that fit into ``budget`` seconds (at least 3, after one untimed)."""
    call()
    synchronize()
    best, end, count = float("inf"), time.perf_counter() + budget, 0
    while count < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        synchronize()
        best, count = min(best, time.perf_counter() - start), count + 1
    return best


def device_rates(device: torch.device, dtype: torch.dtype, synchronize: Callable[[], None]) -> tuple[float, float]:
    """(bytes/s of a copy, read and written; FLOP/s of a large product)."""

    def copy(elements: int) -> Callable[[], Any]:
        x = torch.randn(elements, device=device).to(dtype)
        y = torch.empty_like(x)
        return lambda: y.copy_(x)

    def product(n: int) -> Callable[[], Any]:
        a = torch.randn(n, n, device=device).to(dtype)
        return lambda: a @ a

    elements, seconds = _large_enough(copy, 1 << 22, 1 << 28, synchronize)
    n, product_seconds = _large_enough(product, 512, 8192, synchronize)
    return 2 * elements * dtype.itemsize / seconds, 2 * n**3 / product_seconds


def _large_enough(
    make: Callable[[int], Callable[[], Any]], size: int, largest: int, synchronize: Callable[[], None]
) -> tuple[int, float]:
    """(size, seconds) of a call of a millisecond: what takes a fast chip less tells of the launch, or of its cache."""
    while True:
        seconds = best_seconds(make(size), synchronize)
        if seconds >= 1e-3 or size >= largest:
            return size, seconds
        size *= 2


def measure(
    spec: OpSpec, kernel: Kernel, device: torch.device, dtype: torch.dtype, rates: tuple[float, float],
    synchronize: Callable[[], None],
) -> Iterable[Speed]:  # fmt: skip
    """Forward and backward of the spec's large case."""
    if spec.speed is None:
        return
    case, name = spec.speed(), str(dtype).removeprefix("torch.")
    args = cast(spec, case, dtype, device)
    fresh = bool(kernel.overwrites or spec.in_place)

    def floor(cost: Any) -> float:
        return max(cost.bytes / rates[0], cost.flops / rates[1])

    def forward() -> Any:
        return kernel.forward(*(copy_args(args, torch.clone) if fresh else args))

    with torch.no_grad():
        seconds = best_seconds(forward, synchronize)
        if fresh:
            seconds = max(seconds - best_seconds(lambda: copy_args(args, torch.clone), synchronize), 1e-9)
        yield Speed(str(kernel), name, case.name, "forward", seconds, floor(spec.forward_cost(*args)))
        if kernel.backward is None or spec.split or kernel.private:
            return
        made, grads, run = forward(), seeds(spec, args), kernel.backward
        saved = [(*args, *made)[spec.index(n)] for n in spec.saves]
        seconds = best_seconds(lambda: run(*grads, *saved, *args[len(spec.tensors) :]), synchronize)
        yield Speed(str(kernel), name, case.name, "backward", seconds, floor(spec.backward_cost(*args)))


GEMM_SHAPES = ((512, 512, 512), (1024, 512, 2048), (1024, 2048, 512))


def gemm_rows(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, synchronize: Callable[[], None]
) -> list[list[float]]:
    """[m, n, k, seconds] of some products, for the planner."""
    rows = []
    for m, n, k in GEMM_SHAPES:
        x, w = (normal(*s, seed=1).to(dtype).to(device) for s in ((m, k), (n, k)))
        with torch.no_grad():
            rows.append([m, n, k, best_seconds(lambda: kernel.forward(x, w, None), synchronize)])  # noqa: B023
    return rows


def attention_rows(
    spec: OpSpec, kernel: Kernel, device: torch.device, dtype: torch.dtype, synchronize: Callable[[], None]
) -> list[list[float]]:
    """[length, heads, head_dim, forward seconds, backward seconds] of one causal sequence, for the planner."""
    rows, run = [], kernel.backward
    assert run is not None
    for length in (256, 512, 1024):
        q, k, v = (normal(1, length, 4, 64, seed=i) for i in (1, 2, 3))
        args = cast(spec, Case("", (q, k, v, None, None, 0, 0)), dtype, device)
        with torch.no_grad():
            forward = best_seconds(lambda: kernel.forward(*args), synchronize)  # noqa: B023
            made = kernel.forward(*args)
            kept = made[2:] if kernel.private else [(*args, *made)[spec.index(n)] for n in spec.saves]
            grads = seeds(spec, args)
            backward = best_seconds(lambda: run(*grads, *kept, *args[3:]), synchronize)  # noqa: B023
        rows.append([length, 4, 64, forward, backward])
    return rows
