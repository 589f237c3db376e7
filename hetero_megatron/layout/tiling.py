"""Whether boxes tile a space: every element in exactly one of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from hetero_megatron.layout.box import Box


def tiles(whole: Box, boxes: Iterable[Box]) -> bool:
    """Whether the boxes are disjoint and together are ``whole``. Time is linear in their number; empty ones count not.

    A box's corners, taken modulo 2, tell how often (modulo 2) each point is covered. If all corners together are those
    of ``whole``, its points are covered an odd number of times, so at least once, and those outside an even number of
    times; if then the sizes add up to that of ``whole``, it is exactly once, and never.
    """
    corners, size = _corners(whole), whole.size
    for box in boxes:
        if box.size:
            corners ^= _corners(box)
            size -= box.size
    return not corners and not size


def _corners(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*zip(box.lo, box.hi, strict=True))) if box.size else set()
