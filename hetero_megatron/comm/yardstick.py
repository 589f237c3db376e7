"""How fast the core at hand is just now, by two fixed pieces of work.

The cores of a shared machine change their speed by a tenth and more, from one second to the next and apart from each
other, and so do their caches, which others on the host use too. A chip that is a share of such a core would change with
it, so that the same plan took other times tomorrow, and neither its prediction nor the ratio to another chip could be
checked. So CPU time is counted in units of fixed pieces of work: products of matrices, and small operators.

One piece is done in the midst of a rank's work. What is in a core's caches hardly changes, though; most of what changes
is how long data and code take that are not, above all after a pause, which has driven them out. So another piece comes
first after pauses, and the first milliseconds of work there count in units of it. It finds nothing in the near caches,
whatever the pause has left there: where a chip has its core alone more is left of so small a piece, but not of layers.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hetero_megatron.comm.small_layers import SmallLayers
from hetero_megatron.testbed.usual import WORK, Unit

EVERY = 0.01  # CPU seconds of work between two readings in its midst
REST, BETWEEN = 2e-4, 2e-3  # seconds of a pause that a reading follows; CPU seconds of work between two such readings
COLD = 3e-3  # CPU seconds of work after a pause that count in units of the reading there
FADE = 5  # readings that count, about: what a core does is another in the next action
MOST = 2.0  # times the mean, which a reading counts as at most: some are interrupted for 10 ms
WARM_UP = 5
SLOTS = 4 * 8  # bytes: a mean and a count of each kind of reading
OTHERS = 1 << 22  # elements read before each reading where the unit is measured


class _Mean:
    """Of readings, of which older ones fade.

    Args:
        kept: its value, and how many readings it has seen, 0 at first.
    """

    def __init__(self, kept: memoryview[float]) -> None:
        self._kept = kept

    @property
    def now(self) -> float:
        """Seconds."""
        return float(self._kept[0])

    def add(self, reading: float) -> None:
        """``reading``: seconds."""
        mean, seen = self._kept
        self._kept[1] = seen + 1
        self._kept[0] = mean + (min(reading, MOST * mean) - mean) / min(FADE, seen + 1) if seen else reading


class Yardstick:
    """Turns CPU seconds of this core as it is now into those of the core as it usually is.

    It is read in the midst of the work that is counted, as a profiler looks, because a chip's pauses would show other
    neighbours (ranks that compute at the same time also pause at the same time), and when work begins after a pause. In
    the main thread only, by SIGPROF.

    Args:
        usual: CPU seconds that its readings usually take; whatever it is, it only has to be the same for everything
            that is to be compared.
        shared: a file that is the same for all ranks of the core, whose readings then count for all of them. They read
            one after the other, where they compute in turns.
    """

    def __init__(self, usual: Unit, shared: Path | None = None) -> None:
        self._usual, self._working = usual, False
        self._worked = self._since = self._mark = self._spent = self._stopped = self._cold = 0.0
        self._matrix = torch.full((WORK.size, WORK.size), 1 / WORK.size, dtype=torch.float32, device="cpu")
        self._product = torch.empty_like(self._matrix)
        self._rows, self._squares = self._matrix[: WORK.rows], self._product[: WORK.rows]
        self._far = torch.zeros(WORK.far, device="cpu")
        kept = memoryview(bytearray(SLOTS) if shared is None else _mapped(shared)).cast("d")
        self.cold, self.warm = _Mean(kept[:2]), _Mean(kept[2:])
        for _ in range(WARM_UP):
            cold, warm = self.read_cold(), self.read_warm()
        self.cold.add(cold)
        self.warm.add(warm)
        signal.signal(signal.SIGPROF, self._look)

    def start(self) -> None:
        """Work begins that is to be counted."""
        self._working, self._spent, self._mark = True, 0.0, time.thread_time()
        if time.perf_counter() - self._stopped >= REST:
            self._cold = COLD
            if self._since >= BETWEEN:
                self.cold.add(self.read_cold())
                self._since = 0.0
                self._skip(self._mark)
        if self._worked >= EVERY:  # where work comes in pieces that are too short for a timer
            self._look()
        signal.setitimer(signal.ITIMER_PROF, EVERY - self._worked, EVERY)

    def stop(self) -> float:
        """It ends; the CPU seconds since :meth:`start` that were readings."""
        self._working = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        self._count(time.thread_time())
        self._stopped = time.perf_counter()
        return self._spent

    def usual_seconds(self, cpu: float) -> float:
        """What ``cpu`` seconds of work that has just been done would usually have been."""
        cold = min(cpu, self._cold)
        self._cold -= cold
        return cold * self._usual.cold / self.cold.now + (cpu - cold) * self._usual.warm / self.warm.now

    def _look(self, *_: Any) -> None:
        if not self._working:  # the signal came late
            return
        start = time.thread_time()
        self._count(start)
        self.warm.add(self.read_warm())
        self._worked = 0.0
        self._skip(start)

    def _count(self, now: float) -> None:
        """Work until ``now``."""
        self._worked, self._since = self._worked + now - self._mark, self._since + now - self._mark

    def _skip(self, start: float) -> None:
        """What was done since ``start`` is no work."""
        self._mark = time.thread_time()
        self._spent += self._mark - start

    def read_cold(self) -> float:
        """CPU seconds of a fixed piece of work, now; it finds nothing in the near caches, whatever was done before."""
        self._far.sum()  # takes them
        return self._short()

    def read_warm(self) -> float:
        """CPU seconds of another one; it finds all that it needs in the caches, whatever was done before."""
        self._short()  # warms them
        return self._timed(WORK.warm_products, WORK.warm_operators)

    def _short(self) -> float:
        return self._timed(WORK.cold_products, WORK.cold_operators)

    def _timed(self, products: int, small_operators: int) -> float:
        start = time.thread_time()
        for _ in range(products):
            torch.mm(self._matrix, self._matrix, out=self._product)
        for _ in range(small_operators):
            torch.mul(self._rows, self._rows, out=self._squares)
        return time.thread_time() - start


def _mapped(file: Path) -> mmap.mmap:
    """``SLOTS`` bytes of a file, zero where it is new."""
    opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(opened, SLOTS)
        return mmap.mmap(opened, SLOTS)
    finally:
        os.close(opened)


def usual_readings(seconds: float, cores: Sequence[int]) -> Unit:
    """The mean readings of so many seconds, spent on one core after the other between work like that of ranks and what
    takes their caches: what may count as usual."""
    torch.set_num_threads(1)
    yardstick, layers, others = Yardstick(Unit(1.0, 1.0)), SmallLayers(), torch.zeros(OTHERS, device="cpu")
    readings = list[Unit]()
    for core in cores:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})
        layers()
        end = time.monotonic() + seconds / len(cores)
        while time.monotonic() < end:
            layers()
            others.sum()
            readings.append(Unit(yardstick.read_cold(), yardstick.read_warm()))
    return Unit(*(sum(kind) / len(readings) for kind in zip(*readings, strict=True)))
