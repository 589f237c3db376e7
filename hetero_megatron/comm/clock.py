"""Slower chips than the one at hand: compute between two communication calls lasts as long as the emulated chip
would take.

A *segment* is what a rank computes between two communication calls. ``Comm`` tells its clock when a segment ends and
when the next one begins, so time blocked in communication is never credited, and a collective inside a layer is never
hidden in a sleep. Without a testbed the clock is :class:`RealClock`, which only reads the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

BLOCKED = 1e-4  # seconds: a wait that took longer really blocked, so the rank's own lateness did not matter
OVERRUN_LIMIT = 0.01  # share of emulated seconds by which real CPU time may exceed them before a run is invalid


class RealClock:
    """The chip at hand, at its own speed.

    Attributes:
        computed: seconds of all segments so far, by the chip's own clock: wall seconds of a real chip, emulated ones of
            an emulated chip (how late this machine woke it is not the chip's doing).
    """

    def __init__(self) -> None:
        self.computed = 0.0
        self._running = False
        self._mark = 0.0

    def pause(self) -> None:
        """A segment ends: communication begins. Does nothing between two segments."""
        if self._running:
            self._running = False
            self.computed += self._end()

    def resume(self, blocked: float = 0.0) -> None:
        """The next segment begins; ``blocked``: seconds that the call waited for a peer."""
        self._running = True
        self._mark = time.perf_counter()
        self._begin(blocked)

    def settle(self) -> None:
        """Bring the wall clock up to the emulated one in mid-segment."""
        if self._running:
            self.pause()
            self.resume()

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """While this is open, compute is counted."""
        with self._inside():
            self.resume()
            try:
                yield
            finally:
                self.pause()

    def _begin(self, blocked: float) -> None:
        pass

    def _end(self) -> float:
        return time.perf_counter() - self._mark

    def _inside(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def report(self) -> dict[str, float]:
        """Figures about the emulation; empty for real chips."""
        return {}


class EmulatedClock(RealClock):
    """Sleeps at the end of a segment until the emulated chip would be done.

    ``soft``: a segment lasts its CPU seconds / speed. With ``nominal`` (mode ``clock``): the nominal seconds of its
    operators / speed, which must exceed the CPU seconds; ``report()["overrun"]`` says by which share they did not.

    Args:
        speed: called at every segment; 1.0 = this machine's core (``soft``) or the nominal chip (``clock``).
        nominal: seconds per operator of the chip of speed 1; None for ``soft``.
    """

    def __init__(self, speed: Callable[[], float], nominal: OperatorSeconds | None = None) -> None:
        super().__init__()
        self.speed, self.nominal = speed, nominal
        self.overrun = self.late = 0.0
        self._cpu = self._lateness = self._due = 0.0
        _sleep_precisely()

    def _end(self) -> float:
        cpu = time.thread_time() - self._cpu
        seconds = (cpu if self.nominal is None else self.nominal.take()) / self.speed()
        self.overrun += max(0.0, cpu - seconds)
        target = self._due + seconds
        while (left := target - time.perf_counter()) > 0:
            time.sleep(left)
        self._lateness = time.perf_counter() - target
        return seconds

    def _begin(self, blocked: float) -> None:
        # A little lateness (the sleep's own, another process on this core) is made up in the next segment, unless
        # the rank blocked for a peer meanwhile: then it is lost, and counted.
        if blocked > BLOCKED:
            self.late += self._lateness
            self._lateness = 0.0
        self._due = self._mark - self._lateness
        self._cpu = time.thread_time()

    def _inside(self) -> AbstractContextManager[object]:
        self._lateness = 0.0
        return self.nominal if self.nominal is not None else contextlib.nullcontext()

    def report(self) -> dict[str, float]:
        """``emulated`` seconds of compute, and the shares of it by which the CPU was too slow (``overrun``: the run is
        invalid above 1 %) and by which the machine woke the rank too late (``late``)."""
        total = max(self.computed, 1e-9)
        return {"emulated": self.computed, "overrun": self.overrun / total, "late": self.late / total}


@dataclass(frozen=True)
class NominalChip:
    """The chip of speed 1.0 in mode ``clock``: about half as fast as one core of a 2024 server in fp32, so that the
    core can always keep up with it."""

    gemm_flops: float = 40e9
    attention_flops: float = 12e9
    bytes_per_second: float = 3e9
    operator_seconds: float = 50e-6


class OperatorSeconds(TorchDispatchMode):
    """Adds up what the nominal chip would take for the operators that run while it is open.

    A function of shapes and dtypes only, so a segment's seconds are the same on every machine and in every run.
    """

    def __init__(self, chip: NominalChip = NominalChip()) -> None:
        super().__init__()
        self.chip, self.seconds = chip, 0.0

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.namespace != "c10d":
            self.seconds += self._cost(func, args, kwargs or {}, out)
        return out

    def _cost(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        chip = self.chip
        packet = func.overloadpacket
        name = packet.__name__
        if "scaled_dot_product" in name:
            return chip.operator_seconds + _attention_flops(name, args) / chip.attention_flops
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
            wide = max(1.0, args[0].element_size() / 4)
            return chip.operator_seconds + flops * wide / chip.gemm_flops
        return chip.operator_seconds + (_bytes(args) + _bytes(out)) / chip.bytes_per_second


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
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    return 0


def _sleep_precisely() -> None:
    """Timers of this thread fire when due instead of up to 50 us later (Linux; PR_SET_TIMERSLACK)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1000, 0, 0, 0)
