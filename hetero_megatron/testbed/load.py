"""Foreign load: CPU time used by other processes during a measurement, from /proc.

    with watch_load(sessions) as load:
        ...
    load.disturbed, load.foreign, load.summary()

Foreign load is the cores' busy time minus this testbed's own processes and the kernel's threads (which handle its
network traffic), plus time stolen by a hypervisor.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hetero_megatron.testbed.process import all_status, status

THRESHOLD = 0.1  # cores, on average: above it a measurement is marked as disturbed
_HZ = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class _Sample:
    at: float  # seconds
    busy: float  # all that follow: seconds of CPU time since boot
    stolen: float
    own_processes: float
    kernel: float


def _sample(sessions: Collection[int], extra: Collection[int]) -> _Sample | None:
    """None without /proc/stat. Own processes: those of ``sessions``, and ``extra``."""
    try:
        with open("/proc/stat", "rb") as file:
            ticks = [int(word) for word in file.readline().split()[1:]]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, stolen = ticks[:8]
    own_ticks = kernel = 0
    for entry in all_status():
        if entry.kernel:
            kernel += entry.ticks
        elif entry.session in sessions or entry.pid in extra:
            own_ticks += entry.ticks
    busy_ticks = user + nice + system + irq + softirq
    return _Sample(time.monotonic(), busy_ticks / _HZ, stolen / _HZ, own_ticks / _HZ, kernel / _HZ)


@dataclass
class LoadMonitor:
    """Call :meth:`sample` every second or two while measuring.

    Args:
        sessions: session ids (``setsid``) of own processes; may grow.
        processes: further own processes, including children that were waited for.

    Attributes:
        foreign: mean foreign load in cores; peak: the largest between two samples at least 1 s apart.
    """

    sessions: Collection[int] = ()
    processes: Collection[int] = field(default_factory=lambda: (os.getpid(),))
    foreign: float = 0.0
    peak: float = 0.0
    measurable: bool = True
    _first: _Sample | None = None
    _last: _Sample | None = None

    def sample(self) -> None:
        sample = _sample(self.sessions, self.processes)
        if sample is None:
            self.measurable = False
            return
        if self._first is None or self._last is None:
            self._first = self._last = sample
            return
        self.foreign = _foreign(self._first, sample)
        if sample.at - self._last.at >= 1.0:
            self.peak = max(self.peak, _foreign(self._last, sample))
            self._last = sample

    @property
    def disturbed(self) -> bool:
        return self.foreign > THRESHOLD

    def facts(self) -> dict[str, Any]:
        """As JSON data."""
        return {"foreign_cores": self.foreign, "disturbed": self.disturbed}

    def summary(self) -> str:
        if not self.measurable:
            return "foreign load unknown (no /proc/stat): measurements are unchecked"
        verdict = "DISTURBED: do not report what was measured" if self.disturbed else "undisturbed"
        return f"foreign load {self.foreign:.2f} cores (peak {self.peak:.2f}): {verdict}"


def _foreign(a: _Sample, b: _Sample) -> float:
    foreign_busy = (b.busy - a.busy) - (b.own_processes - a.own_processes) - (b.kernel - a.kernel)
    return max(0.0, foreign_busy + (b.stolen - a.stolen)) / max(b.at - a.at, 1e-9)


@contextmanager
def watch_load(sessions: Collection[int] | None = None) -> Iterator[LoadMonitor]:
    """Measure foreign load during a block; without ``sessions``, this process' session counts as own."""
    if sessions is None:
        own_status = status(os.getpid())
        sessions = () if own_status is None else (own_status.session,)
    monitor = LoadMonitor(sessions)
    monitor.sample()
    try:
        yield monitor
    finally:
        monitor.sample()
