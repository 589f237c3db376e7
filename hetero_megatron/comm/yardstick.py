"""How fast the core at hand is just now, by a fixed piece of work.

The cores of a shared machine change their speed by a tenth and more, from one second to the next and apart from each
other; two that are threads of one core slow each other while both compute. A chip that is a share of such a core would
change with it, so that the same plan took other times tomorrow, and neither its prediction nor the ratio to another
chip could be checked. So CPU time is counted in units of a fixed piece of work: products of matrices, and small
operators, in about the proportion that makes it as sensitive as the layers of a model (how much less they vary in these
units: ``benchmarks/bench_yardstick.py``).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

from hetero_megatron.testbed.usual import WORK

EVERY = 0.01  # CPU seconds of work between two readings
WEIGHT = EVERY / 0.4  # of the newest reading, and more of the first ones; older ones fade within 0.4 s of work
MOST = 2.0  # times the mean, which a reading counts as at most: some are interrupted for 10 ms
PAUSE = 0.01  # seconds from one reading of the unit to the next
WARM_UP = 5


class Yardstick:
    """Turns CPU seconds of this core as it is now into those of the core as it usually is.

    It is read in the midst of the work that is counted, as a profiler looks: a chip's pauses would show other
    neighbours (ranks that compute at the same time also pause at the same time). In the main thread only, by SIGPROF.

    Args:
        usual: CPU seconds that a reading usually takes; whatever it is, it only has to be the same for everything that
            is to be compared.
    """

    def __init__(self, usual: float) -> None:
        self._usual, self._working = usual, False
        self._worked = self._mark = self._spent = 0.0
        self._matrix = torch.full((WORK.size, WORK.size), 1 / WORK.size, dtype=torch.float32, device="cpu")
        self._product = torch.empty_like(self._matrix)
        self._rows, self._squares = self._matrix[: WORK.rows], self._product[: WORK.rows]
        for _ in range(WARM_UP):
            self._now = self.read()
        self._readings = 1
        signal.signal(signal.SIGPROF, self._look)

    def start(self) -> None:
        """Work begins that is to be counted."""
        self._working, self._spent, self._mark = True, 0.0, time.thread_time()
        if self._worked >= EVERY:  # where work comes in pieces that are too short for a timer
            self._look()
        signal.setitimer(signal.ITIMER_PROF, EVERY - self._worked, EVERY)

    def stop(self) -> float:
        """It ends; the CPU seconds since :meth:`start` that were readings."""
        self._working = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        self._worked += time.thread_time() - self._mark
        return self._spent

    def usual_seconds(self, cpu: float) -> float:
        """What ``cpu`` seconds of work that has just been done would usually have been."""
        return cpu * self._usual / self._now

    def _look(self, *_: Any) -> None:
        if not self._working:  # the signal came late
            return
        start = time.thread_time()
        self._readings += 1
        reading = min(self.read(), MOST * self._now)
        self._now += max(WEIGHT, 1 / self._readings) * (reading - self._now)
        self._worked, self._mark = 0.0, time.thread_time()
        self._spent += self._mark - start

    def read(self) -> float:
        """CPU seconds of the fixed work, now; of work that finds its data in the caches, whatever was done before."""
        self._work(WORK.warm_products, WORK.warm_operators)
        start = time.thread_time()
        self._work(WORK.products, WORK.small_operators)
        return time.thread_time() - start

    def _work(self, products: int, small_operators: int) -> None:
        for _ in range(products):
            torch.mm(self._matrix, self._matrix, out=self._product)
        for _ in range(small_operators):
            torch.mul(self._rows, self._rows, out=self._squares)


def usual_reading(seconds: float, cores: Sequence[int]) -> float:
    """The mean reading of so many seconds, spent on one core after the other: what may count as usual."""
    torch.set_num_threads(1)
    yardstick, readings = Yardstick(1.0), list[float]()
    for core in cores:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})
        yardstick.read()  # the caches of this core
        end = time.monotonic() + seconds / len(cores)
        while (started := time.monotonic()) < end:
            readings.append(yardstick.read())
            while time.monotonic() - started < PAUSE:  # awake, as cores are kept under ``soft``
                pass
    return sum(readings) / len(readings)
