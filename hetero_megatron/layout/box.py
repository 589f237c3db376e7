"""A box: a half-open n-dimensional interval of a logical index space."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """The index set ``lo[0] <= i0 < hi[0], lo[1] <= i1 < hi[1], …``; empty where some ``hi <= lo``."""

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(max(b - a, 0) for a, b in zip(self.lo, self.hi, strict=True))

    @property
    def size(self) -> int:
        count = 1
        for a, b in zip(self.lo, self.hi):  # asked for very often: no tuple in between
            if b <= a:
                return 0
            count *= b - a
        return count

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None when there is none."""
        lo = tuple(map(max, self.lo, other.lo))
        hi = tuple(map(min, self.hi, other.hi))
        return Box(lo, hi) if all(a < b for a, b in zip(lo, hi, strict=True)) else None

    def contains(self, other: Box) -> bool:
        return all(a <= b and c <= d for a, b, c, d in zip(self.lo, other.lo, other.hi, self.hi, strict=True))

    def slices(self, origin: Box | None = None) -> tuple[slice, ...]:
        """Index expression of this box in an array that stores ``origin`` (default: the whole space)."""
        base = origin.lo if origin is not None else (0,) * len(self.lo)
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.lo, self.hi, base, strict=True))

    def rows(self, start: int, stop: int) -> Box:
        """The part with ``start <= i0 < stop`` (absolute indices of the first axis)."""
        return Box((start, *self.lo[1:]), (stop, *self.hi[1:]))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.lo, self.hi, strict=True)) + "]"
