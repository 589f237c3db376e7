"""How fast the core at hand is just now, by a fixed piece of work.

The cores of a shared machine change their speed by a tenth and more, from one second to the next and apart from each
other. A chip that is a share of such a core would change with it, so that the same plan took other times tomorrow, and
neither its prediction nor the ratio to another chip could be checked. So CPU time is counted in units of a fixed piece
of work: half of it products of matrices, half small operators, as in the layers of a model. By
``benchmarks/bench_yardstick.py`` the CPU time of layers varied by 4 to 7 % over bins of some seconds, in these units by
1 to 3 %, in units of products alone by 1 to 4 %, of small operators alone by 2 to 6 %.
"""

from __future__ import annotations

import time

import torch

SIZE, PRODUCTS = 192, 6  # a millisecond
ROWS, SMALL_OPERATORS = 64, 500  # another one
EVERY = 0.04  # CPU seconds of work between two readings
OVERDUE = 10  # times that: then it is read although it takes time that somebody may be waiting for
WEIGHT = 0.3  # of the newest reading; the older ones fade within about ten, half a second of work
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

    def usual_seconds(self, cpu: float) -> float:
        """What ``cpu`` seconds of work that has just been done would usually have been."""
        self._worked += cpu
        return cpu * self._usual / self._now

    def look(self, spare: float) -> None:
        """Read it again where that is due, and done within ``spare`` seconds."""
        if self._worked >= (EVERY if spare > 1.5 * self._now else OVERDUE * EVERY):
            self._worked = 0.0
            self._now += WEIGHT * (self.read() - self._now)

    def read(self) -> float:
        """CPU seconds of the fixed work, now."""
        start = time.thread_time()
        for _ in range(PRODUCTS):
            torch.mm(self._matrix, self._matrix, out=self._product)
        for _ in range(SMALL_OPERATORS):
            torch.mul(self._rows, self._rows, out=self._squares)
        return time.thread_time() - start


def usual_reading(seconds: float) -> float:
    """The mean reading of so many seconds: what may count as usual."""
    torch.set_num_threads(1)
    yardstick, readings = Yardstick(1.0), list[float]()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        readings.append(yardstick.read())
        time.sleep(0.01)
    return sum(readings) / len(readings)
