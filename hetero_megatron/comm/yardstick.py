"""How fast the core at hand is just now, by a fixed piece of work.

The cores of a shared machine change their speed by a tenth and more, from one second to the next and apart from each
other. A chip that is a share of such a core would change with it, so that the same plan took other times tomorrow, and
neither its prediction nor the ratio to another chip could be checked. So CPU time is counted in units of a fixed piece
of work: half of it products of matrices, half small operators, as in the layers of a model (how much less they vary in
these units: ``benchmarks/bench_yardstick.py``).
"""

from __future__ import annotations

import time

import torch

SIZE, PRODUCTS = 128, 6  # half a millisecond
ROWS, SMALL_OPERATORS = 64, 250  # another half
EVERY = 0.02  # CPU seconds of work between two readings
MOST_DUE = 10  # readings that are made up for
OVERDUE = 10  # times EVERY: then it is read although it takes time that somebody may be waiting for
PAUSE = 0.02  # seconds: cores were slower by a quarter for 16 ms at a time, and readings in one such time see the same
WEIGHT = 0.1  # of the newest reading, and more of the first ones; older ones fade within 0.2 s of work
WARM_UP = 5


class Yardstick:
    """Turns CPU seconds of this core as it is now into those of the core as it usually is.

    Args:
        usual: CPU seconds that a reading usually takes; whatever it is, it only has to be the same for everything that
            is to be compared.
    """

    def __init__(self, usual: float) -> None:
        self._usual, self._worked = usual, 0.0
        self._matrix = torch.full((SIZE, SIZE), 1 / SIZE, dtype=torch.float32, device="cpu")
        self._product = torch.empty_like(self._matrix)
        self._rows, self._squares = self._matrix[:ROWS], self._product[:ROWS]
        for _ in range(WARM_UP):
            self._now = self.read()
        self._readings = 1

    def usual_seconds(self, cpu: float) -> float:
        """What ``cpu`` seconds of work that has just been done would usually have been."""
        self._worked += cpu
        return cpu * self._usual / self._now

    def look(self, spare: float) -> None:
        """Read it again where that is due, and done within ``spare`` seconds."""
        waited_for = spare <= 2 * self._now
        if self._worked >= (OVERDUE * EVERY if waited_for else EVERY):
            self._worked = 0.0 if waited_for else min(self._worked, MOST_DUE * EVERY) - EVERY
            self._readings += 1
            self._now += max(WEIGHT, 1 / self._readings) * (self.read() - self._now)

    def read(self) -> float:
        """CPU seconds of the fixed work, now; of work that finds its data in the caches, whatever the rank and others
        on the core did before."""
        self._work(PRODUCTS // 3, SMALL_OPERATORS // 5)
        start = time.thread_time()
        self._work(PRODUCTS, SMALL_OPERATORS)
        return time.thread_time() - start

    def _work(self, products: int, small_operators: int) -> None:
        for _ in range(products):
            torch.mm(self._matrix, self._matrix, out=self._product)
        for _ in range(small_operators):
            torch.mul(self._rows, self._rows, out=self._squares)


def usual_reading(seconds: float) -> float:
    """The mean reading of so many seconds: what may count as usual."""
    torch.set_num_threads(1)
    yardstick, readings = Yardstick(1.0), list[float]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        readings.append(yardstick.read())
        time.sleep(0.01)
    return sum(readings) / len(readings)
