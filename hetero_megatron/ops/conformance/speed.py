"""How fast a kernel is beside what it must at least compute and move, and the rates that the planner reads."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hetero_megatron.ops.attention_op import AttentionOptions
from hetero_megatron.ops.conformance.compare import cast, copy_args
from hetero_megatron.ops.conformance.run import seeds
from hetero_megatron.ops.gemm_fp8 import NAMES as FP8_PRODUCTS
from hetero_megatron.ops.spec import Kernel, OpSpec, count_bytes

LONG = 1e-3  # seconds: what takes a fast chip less tells of the launch, or of its cache
CACHE = 256 << 20  # bytes: no chip's cache holds so much


@dataclass(frozen=True)
class KernelSpeed:
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
    """Seconds of a call: of the fastest batch of those that fit into ``budget`` seconds (at least 3, after two calls
    that do not count). A batch takes about ``LONG``: the host waits for the device once in so long, not in every call.
    """

    def timed(number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            call()
        synchronize()
        return (time.perf_counter() - start) / number

    timed(1)
    number = max(1, min(1000, int(LONG / timed(1))))
    best, end, count = float("inf"), time.perf_counter() + budget, 0
    while count < 3 or time.perf_counter() < end:
        best, count = min(best, timed(number)), count + 1
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
    """(size, seconds) of a call that takes ``LONG``; ``size`` is doubled until it does."""
    while True:
        seconds = best_seconds(make(size), synchronize)
        if seconds >= LONG or size >= largest:
            return size, seconds
        size *= 2


def _copies(args: Sequence[Any]) -> list[tuple[Any, ...]]:
    """The arguments and copies of them, ``CACHE`` bytes together."""
    count = min(64, -(-CACHE // max(count_bytes(tuple(args)), 1)))
    return [tuple(args), *(copy_args(args, torch.clone) for _ in range(count - 1))]


def measure(
    spec: OpSpec, kernel: Kernel, device: torch.device, dtype: torch.dtype, rates: tuple[float, float],
    synchronize: Callable[[], None],
) -> Iterable[KernelSpeed]:  # fmt: skip
    """Forward and backward of the spec's large case, on copies in turn, so that no cache holds them."""
    if spec.speed is None:
        return
    case, name = spec.speed(), str(dtype).removeprefix("torch.")
    args = cast(spec, case, dtype, device)
    copies = _copies(args)
    needs_copies = bool(kernel.overwrites or spec.in_place)

    def floor(cost: Any) -> float:
        return max(cost.bytes / rates[0], cost.flops / rates[1])

    def forward(values: tuple[Any, ...]) -> Any:
        return kernel.forward(*(copy_args(values, torch.clone) if needs_copies else values))

    turns = itertools.cycle(copies)
    with torch.no_grad():
        seconds = best_seconds(lambda: forward(next(turns)), synchronize)
        if needs_copies:
            seconds = max(seconds - best_seconds(lambda: copy_args(next(turns), torch.clone), synchronize), 1e-9)
        yield KernelSpeed(str(kernel), name, case.name, "forward", seconds, floor(spec.forward_cost(*args)))
        if kernel.backward is None or spec.split or kernel.private:
            return
        grads, run, options = seeds(spec, args), kernel.backward, args[len(spec.tensors) :]
        operands = [(*values, *forward(values)) for values in copies]
        saved_tensors = itertools.cycle([[values[spec.index(n)] for n in spec.saves] for values in operands])
        seconds = best_seconds(lambda: run(*grads, *next(saved_tensors), *options), synchronize)
        yield KernelSpeed(str(kernel), name, case.name, "backward", seconds, floor(spec.backward_cost(*args)))


GEMM_SHAPES = ((512, 512, 512), (1024, 512, 2048), (1024, 2048, 512))
LENGTHS = (256, 512, 1024)
LARGEST = 16  # times as large in every dimension, at most


def gemm_rows(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, synchronize: Callable[[], None]
) -> list[list[float]]:
    """[m, n, k, seconds] of products that take this device a millisecond or more, for the planner; in fp8 of one
    sequence, with quantising both operands."""
    options = (False,) if kernel.op in FP8_PRODUCTS else ()

    def product(m: int, n: int, k: int, scale: int) -> Callable[[], Any]:
        x, w = (torch.randn(s[0] * scale, s[1] * scale, device=device).to(dtype) for s in ((m, k), (n, k)))
        return lambda: kernel.forward(x[None], w, None, *options)

    rows = []
    for shape in GEMM_SHAPES:
        with torch.no_grad():
            scale, seconds = _large_enough(functools.partial(product, *shape), 1, LARGEST, synchronize)
        rows.append([*(n * scale for n in shape), seconds])
    return rows


def attention_rows(
    spec: OpSpec, kernel: Kernel, device: torch.device, dtype: torch.dtype, synchronize: Callable[[], None]
) -> list[list[float]]:
    """[length, heads, head_dim, forward seconds, backward seconds] of one causal sequence whose forward takes this
    device a millisecond or more, for the planner."""
    rows, run = [], kernel.backward
    assert run is not None

    def arguments(length: int, scale: int) -> tuple[Any, ...]:
        q, k, v = (torch.randn(1, length * scale, 4 * scale, 64, device=device).to(dtype) for _ in range(3))
        return q, k, v, None, *AttentionOptions()

    def attend(length: int, scale: int) -> Callable[[], Any]:
        args = arguments(length, scale)
        return lambda: kernel.forward(*args)

    for length in LENGTHS:
        with torch.no_grad():
            scale, forward = _large_enough(functools.partial(attend, length), 1, LARGEST, synchronize)
            args = arguments(length, scale)
            outputs = kernel.forward(*args)
            saved_tensors = outputs[2:] if kernel.private else [(*args, *outputs)[spec.index(n)] for n in spec.saves]
            grads = seeds(spec, args)
            backward = best_seconds(lambda: run(*grads, *saved_tensors, *args[4:]), synchronize)  # noqa: B023
        rows.append([length * scale, 4 * scale, 64, forward, backward])
    return rows
