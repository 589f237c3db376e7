"""How fast the core at hand is just now, by fixed pieces of work.

The cores of a shared machine change their speed by a tenth and more, from one second to the next and apart from each
other; two that are threads of one core slow each other while both compute. A chip that is a share of such a core would
change with it, so that the same plan took other times tomorrow, and neither its prediction nor the ratio to another
chip could be checked. So CPU time is counted in units of a fixed piece of work: products of matrices, and small
operators, in about the proportion that makes it as sensitive as the layers of a model.

What a rank computes first after a pause finds cold caches, as cold as others have made them meanwhile, on a rented
machine also people whom nobody here sees. That changes by much more than the rest, and ranks of a TP group pause every
few milliseconds. So it is counted in units of its own: of a short piece of work right after a pause.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch

from hetero_megatron.comm.small_layers import SmallLayers
from hetero_megatron.testbed.usual import AFTER, WITHIN, Unit, Work

EVERY = 0.01  # CPU seconds of work between two readings in its midst
REST = 2e-4  # seconds without work after which caches may be cold
COLD = 0.003  # CPU seconds of work after that which count in units of their own, and between two readings of these
FADE_WITHIN, FADE_AFTER = 40, 20  # readings that count, about: of 0.4 s of work, and of 0.06 s or more
MOST = 2.0  # times the mean, which a reading counts as at most: some are interrupted for 10 ms
WARM_UP = 5
OTHERS, PAUSE = 1 << 22, 0.005  # elements read, and seconds, between two stretches of work where the unit is measured


class _Mean:
    """Of readings, of which older ones fade.

    Args:
        first: the first one.
        fade: about how many count.
    """

    def __init__(self, first: float, fade: int) -> None:
        self.now, self._total, self._seen, self._fade = first, first, 1, fade

    def add(self, reading: float) -> None:
        self._total, self._seen = self._total + reading, self._seen + 1
        self.now += (min(reading, MOST * self.now) - self.now) / min(self._fade, self._seen)

    def of_all(self) -> float:
        return self._total / self._seen


class Yardstick:
    """Turns CPU seconds of this core as it is now into those of the core as it usually is.

    It is read in the midst of the work that is counted, as a profiler looks (a chip's pauses would show other
    neighbours: ranks that compute at the same time also pause at the same time), and right after pauses. In the main
    thread only, by SIGPROF.

    Args:
        usual: CPU seconds that readings usually take; whatever it is, it only has to be the same for everything that is
            to be compared.
    """

    def __init__(self, usual: Unit) -> None:
        self._usual, self._counting = usual, False
        self._worked = self._since = self._mark = self._spent = self._cold = self._stopped = 0.0
        self._matrix = torch.full((WITHIN.size, WITHIN.size), 1 / WITHIN.size, dtype=torch.float32, device="cpu")
        self._product = torch.empty_like(self._matrix)
        self._rows, self._squares = self._matrix[: WITHIN.rows], self._product[: WITHIN.rows]
        for _ in range(WARM_UP):
            after, within = self.read(AFTER), self.read(WITHIN)
        self.within, self.after = _Mean(within, FADE_WITHIN), _Mean(after, FADE_AFTER)
        signal.signal(signal.SIGPROF, self._look)

    def start(self) -> None:
        """Work begins that is to be counted."""
        self._counting, self._spent, self._mark = True, 0.0, time.thread_time()
        if time.perf_counter() - self._stopped > REST:
            self._cold = COLD
            if self._since >= COLD:
                self._since = 0.0
                self.after.add(self.read(AFTER))
                self._skip(self._mark)
        if self._worked >= EVERY:  # where work comes in pieces that are too short for a timer
            self._look()
        signal.setitimer(signal.ITIMER_PROF, EVERY - self._worked, EVERY)

    def stop(self) -> float:
        """It ends; the CPU seconds since :meth:`start` that were readings."""
        self._counting = False
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        self._stopped = time.perf_counter()
        worked = time.thread_time() - self._mark
        self._worked, self._since = self._worked + worked, self._since + worked
        return self._spent

    def usual_seconds(self, cpu: float) -> float:
        """What ``cpu`` seconds of work that has just been done would usually have been."""
        cold = min(cpu, self._cold)
        self._cold -= cold
        return cold * self._usual.after / self.after.now + (cpu - cold) * self._usual.within / self.within.now

    def _look(self, *_: Any) -> None:
        if not self._counting:  # the signal came late
            return
        start = time.thread_time()
        self.read(AFTER)  # finds caches as that moment's work has left them; how cold is not what this is about
        self.within.add(self.read(WITHIN))
        self._worked, self._since = 0.0, self._since + start - self._mark
        self._skip(start)

    def _skip(self, start: float) -> None:
        """What was done since ``start`` is no work."""
        self._mark = time.thread_time()
        self._spent += self._mark - start

    def read(self, work: Work) -> float:
        """CPU seconds of a piece of work, now."""
        start = time.thread_time()
        for _ in range(work.products):
            torch.mm(self._matrix, self._matrix, out=self._product)
        for _ in range(work.small_operators):
            torch.mul(self._rows, self._rows, out=self._squares)
        return time.thread_time() - start


def usual_readings(seconds: float, cores: Sequence[int]) -> Unit:
    """Mean readings of so many seconds, spent on one core after the other: what may count as usual."""
    torch.set_num_threads(1)
    yardstick, layers, others = Yardstick(Unit(1.0, 1.0)), SmallLayers(), torch.zeros(OTHERS, device="cpu")
    layers()
    for core in cores:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})
        end = time.monotonic() + seconds / len(cores)
        while time.monotonic() < end:
            yardstick.start()
            layers()
            yardstick.stop()
            paused = time.monotonic()
            while time.monotonic() - paused < PAUSE:  # as other ranks would compute meanwhile
                others.sum()
    return Unit(yardstick.within.of_all(), yardstick.after.of_all())
