"""How long a stage waits for copies of its activations to host memory, and back.

They run beside the compute, which waits for them in two places: in forward, when more layers than may be under way have
not arrived, and in backward, when a layer has not come back. A chip has one way out and one in, each as fast as its
link to the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


def waits(
    copies: Sequence[float], forward: float, backward: Sequence[float], ahead: int, head: float
) -> tuple[float, float]:
    """Seconds of (:func:`leaving`, :func:`coming`)."""
    return leaving(copies, forward, ahead), coming(copies, backward, ahead, head)


def leaving(copies: Sequence[float], forward: float, ahead: int) -> float:
    """Seconds for which forward waits; a layer computes for ``forward`` and is copied for ``copies`` when it has."""
    now = free = waited = 0.0
    under_way: deque[float] = deque()
    for seconds in copies:
        now += forward
        if seconds:
            free = max(now, free) + seconds
            under_way.append(free)
            while len(under_way) > ahead:
                wait = max(under_way.popleft() - now, 0.0)
                now, waited = now + wait, waited + wait
    return waited


def coming(copies: Sequence[float], backward: Sequence[float], ahead: int, head: float) -> float:
    """Seconds for which backward waits; it begins with ``head``, and the last layers come first."""
    now = free = waited = 0.0
    count, arrived = len(copies), dict[int, float]()

    def begin(layers: Sequence[int]) -> None:
        nonlocal free
        for i in layers:
            if i not in arrived and copies[i]:
                arrived[i] = free = max(now, free) + copies[i]

    begin(range(count - 1, max(count - 1 - ahead, -1), -1))
    now = head
    for i in reversed(range(count)):
        begin([i])
        wait = max(arrived.get(i, 0.0) - now, 0.0)
        now, waited = now + wait, waited + wait
        begin(range(i - 1, max(i - 1 - ahead, -1), -1))
        now += backward[i]
    return waited
