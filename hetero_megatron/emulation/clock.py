"""Slower chips than the one at hand: compute between two communication calls lasts as long as the emulated chip
would take.

``Comm`` tells its clock when a segment ends and when the next one begins, so time blocked in communication is never
credited, and a collective inside a layer is never hidden in a sleep.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hetero_megatron.comm.hooks import Clock
from hetero_megatron.emulation.core_lock import CoreLock

SLICE_NS = 100_000  # the least there is
BLOCKED = 1e-4  # seconds: a wait that took longer really blocked, so the rank's own lateness did not matter
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class EmulatedClock(Clock):
    """Sleeps at the end of a segment until the emulated chip would be done.

    ``soft``: a segment lasts the CPU seconds of this thread in it / speed. With ``nominal`` (mode ``clock``): the
    nominal seconds of its operators / speed, which must exceed the CPU seconds; ``report()["overrun"]`` says by which
    share they did not. There, a segment without an operator is the host's work (Python between two communication
    calls): a slow chip does not slow it, so it takes the time that it takes, counts as communication, and cannot
    overrun anything.

    Args:
        speed: called at every segment; 1.0 = this machine's core (``soft``) or the nominal chip (``clock``).
        nominal: seconds per operator of the chip of speed 1; None for ``soft``.
        core: held during :meth:`work`, where ranks that share a core must not interrupt each other's work. A message
            does not wait for it.
        tell: called at the end of every step with emulated seconds so far, and of these overrun and late.
    """

    def __init__(
        self,
        speed: Callable[[], float],
        nominal: OperatorSeconds | None = None,
        core: CoreLock | None = None,
        tell: Callable[[float, float, float], object] = lambda *_: None,
    ) -> None:
        super().__init__()
        self.speed, self.nominal, self.core, self.tell = speed, nominal, core, tell
        self.overrun = self.late = self.host = 0.0
        self._cpu = self._lateness = self._due = 0.0
        self._held: CoreLock | None = None
        _wake_precisely()

    def _end(self) -> float:
        cpu = time.thread_time() - self._cpu
        if self._held is not None:
            self._held.release()
        # 0.0: no operator ran, so it was no chip's work
        seconds = (cpu if self.nominal is None else self.nominal.take()) / self.speed()
        target = self._due + (seconds or cpu)
        if seconds == 0.0:
            self.host += cpu
        else:
            self.overrun += max(0.0, cpu - seconds)
            while (seconds_left := target - time.perf_counter()) > 0:
                time.sleep(seconds_left)
        self._lateness = time.perf_counter() - target
        return seconds

    def _begin(self, waited: float) -> None:
        # A little lateness (the sleep's own, another process on this core) is made up in the next segment, unless
        # the rank blocked for a peer meanwhile: then it is lost, and counted.
        if waited > BLOCKED:
            self.late += self._lateness
            self._lateness = 0.0
        self._due = self._mark - self._lateness
        self._held = self.core if self._working else None
        if self._held is not None:
            self._held.acquire()
        self._cpu = time.thread_time()

    def _forget(self, seconds: float) -> None:
        self._lateness += seconds  # to be made up in the next segment
        if self.nominal is not None:
            self.nominal.seconds = 0.0

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        with self.nominal or contextlib.nullcontext():
            try:
                yield
            finally:  # by what the last segment was late, nobody makes it up
                self.late += self._lateness
                self._lateness = 0.0
                self.tell(self.computed, self.overrun, self.late)

    def report(self) -> dict[str, float]:
        """``emulated`` seconds of compute, and shares of it: by how much the CPU time of segments exceeded what the
        emulated chip takes for them (``overrun``), how far the rank was behind that chip when it next waited for a
        peer or a step ended, for whatever reason (``late``), and CPU time between communication calls without compute
        (``host``)."""
        total = max(self.computed, 1e-9)
        shares = {"overrun": self.overrun, "late": self.late, "host": self.host}
        return {"emulated": self.computed, **{name: seconds / total for name, seconds in shares.items()}}


@dataclass(frozen=True)
class NominalChip:
    """The chip of speed 1.0 in mode ``clock``: about two thirds as fast as one core of a 2024 server in fp32, and with
    costs per operator and per segment that exceed Python's, so that the core can always keep up with it."""

    gemm_flops: float = 40e9
    attention_flops: float = 12e9
    bytes_per_second: float = 3e9
    operator_seconds: float = 50e-6
    segment_seconds: float = 100e-6


class OperatorSeconds(TorchDispatchMode):
    """Adds up what the nominal chip would take for the operators that run while it is open.

    A function of shapes and dtypes only, so a segment's seconds are the same on every machine and in every run. Views
    and allocations are no operators: they move no data.
    """

    def __init__(self, chip: NominalChip = NominalChip()) -> None:
        # Slow to import, and for emulated clocks only. The first operator under a dispatch mode imports _dynamo, half a
        # second of CPU time that would be its segment's.
        import torch._dynamo  # noqa: F401
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self.chip, self.seconds, self._flops = chip, 0.0, flop_registry
        self._costs: dict[Any, Callable[[Any, Any, Any], float] | None] = {}

    def take(self) -> float:
        """Seconds of the segment that ends here; 0.0 when no operator ran in it."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds + self.chip.segment_seconds if seconds else 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func not in self._costs:
            self._costs[func] = self._cost_of(func)
        cost = self._costs[func]
        if cost is not None:
            self.seconds += self.chip.operator_seconds + cost(args, kwargs, out)
        return out

    def _cost_of(self, func: Any) -> Callable[[Any, Any, Any], float] | None:
        """(arguments, keyword arguments, result) -> seconds beside the operator's fixed ones; None: no operator."""
        chip, name = self.chip, func.overloadpacket.__name__
        if func.is_view or func.namespace == "c10d" or name in _ALLOCATIONS:
            return None
        if "scaled_dot_product" in name:
            return lambda args, kwargs, out: _attention_flops(name, args) / chip.attention_flops
        plain = getattr(torch.ops.aten, name.removesuffix("_"), func.overloadpacket)  # addmm_ costs what addmm does
        flops = self._flops.get(func.overloadpacket) or self._flops.get(plain) or _UNCOUNTED.get(name)
        if flops is None:
            return lambda args, kwargs, out: (_bytes(args) + _bytes(out)) / chip.bytes_per_second
        return lambda args, kwargs, out: (
            flops(*args, **kwargs, out_val=out) * max(1.0, args[0].element_size() / 4) / chip.gemm_flops
        )


def _linear_flops(x: torch.Tensor, weight: torch.Tensor, *_: Any, out_val: torch.Tensor) -> float:
    return 2.0 * x.numel() * out_val.shape[-1]


_UNCOUNTED = {"_linear_pointwise": _linear_flops}  # by operator, FLOPs that torch does not count: oneDNN's x W^T


def _attention_flops(name: str, args: Any) -> float:
    """4 d per head and visible pair forward, 2.5 times that backward (five products instead of two)."""
    backward = name.endswith("backward")
    q, k = (args[1], args[2]) if backward else (args[0], args[1])  # [batch, heads, tokens, head_dim]
    causal = args[7] if backward and len(args) > 7 else (len(args) > 4 and args[4])
    pairs = q.shape[2] * k.shape[2] / (2 if causal else 1)
    flops = 4.0 * q.shape[0] * q.shape[1] * q.shape[3] * pairs * max(1.0, q.element_size() / 4)
    return flops * (2.5 if backward else 1.0)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return 0


def _wake_precisely() -> None:
    """Timers of this thread fire when due instead of up to 50 us later (Linux; PR_SET_TIMERSLACK), and who wakes beside
    it on its core need not wait for the end of a time slice of 1 to 3 ms (from Linux 6.12 on; sched_setattr)."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(29, 1000, 0, 0, 0)
    number = {"x86_64": 314, "aarch64": 274}.get(platform.machine())
    if number is not None:  # size, policy (0: as usual), flags, nice, priority, time slice in ns, deadline, period
        nice = os.getpriority(os.PRIO_PROCESS, 0)  # would be set, too: kept
        libc.syscall(number, 0, struct.pack("IIQiIQQQ", 48, 0, 0, nice, 0, SLICE_NS, 0, 0), 0)
