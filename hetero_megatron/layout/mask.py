"""Which parts of a causal mask a set of queries and a set of keys have in common: tiles without waste.

Queries and keys are sets of token intervals. A mask is causal, inside documents, and may be limited to a window.
It is cut into rectangles that a kernel computes as they are (``FULL``) or under a plain causal mask
(``CAUSAL``: a square on the diagonal), and rectangles across the edge of a window (``BAND``). What is masked
altogether has no tile.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

Interval = tuple[int, int]

FULL, CAUSAL, BAND = "full", "causal", "band"
BAND_LEAF = 512  # tiles across a window's edge are halved down to this size: their mask is materialised


class Tile(NamedTuple):
    """Queries ``[q0, q1)`` against keys ``[k0, k1)``, counted inside their sets.

    ``distance`` is the position of the first query minus that of the first key.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: str
    distance: int

    @property
    def area(self) -> int:
        """Query-key pairs that a kernel computes (a causal square counts its lower half)."""
        rows, columns = self.q1 - self.q0, self.k1 - self.k0
        return rows * (rows + 1) // 2 if self.kind == CAUSAL else rows * columns


class _Part(NamedTuple):
    """Tokens ``[a, b)``; ``at`` is the place of the first one inside its set."""

    a: int
    b: int
    at: int


def chunk_starts(starts: Sequence[int], length: int, chunk: int | None) -> tuple[int, ...]:
    """Starts of documents in a row of ``length`` tokens, cut into chunks of ``chunk`` tokens (None: not at all) that
    are counted from each document's own start: tokens that see their chunk alone see such a document alone."""
    if chunk is None:
        return tuple(starts)
    ends = [*starts[1:], length]
    return tuple(start for a, b in zip(starts, ends, strict=True) for start in range(a, b, chunk))


def tiles(
    queries: Sequence[Interval], keys: Sequence[Interval], starts: Sequence[int] = (0,), window: int | None = None,
    join: bool = True,
) -> list[Tile]:  # fmt: skip
    """Tiles of queries x keys, ordered by query, that cover every visible pair once and little else.

    Args:
        queries, keys: ascending disjoint token intervals.
        starts: ascending starts of documents; tokens before the first one belong to it.
        window: a token sees itself and ``window - 1`` tokens before it; None: all.
        join: full tiles side by side become one, whose tokens need not follow each other; else those of each tile do.
    """
    by_document = dict(_by_document(keys, starts))
    out: list[Tile] = []
    for document, intervals in _by_document(queries, starts):
        for q in intervals:
            for k in by_document.get(document, ()):
                out += _pair(q, k, window)
    return _joined(out) if join else sorted(out)


def _joined(all_tiles: list[Tile]) -> list[Tile]:
    """Full tiles that lie side by side as one: first along the keys, then along the queries."""
    for along, across in (((2, 3), (0, 1)), ((0, 1), (2, 3))):
        first, last = along
        out: list[Tile] = []
        # (other axis, end) -> place in out of a full tile that ends there
        ending_at: dict[tuple[int, int, int], int] = {}
        for tile in sorted(all_tiles, key=lambda t: (t[first], t[across[0]])):
            if tile.kind != FULL:
                out.append(tile)
                continue
            sides = list(tile[:4])
            across_span = (sides[across[0]], sides[across[1]])
            place = ending_at.pop((*across_span, sides[first]), None)
            if place is None:
                place = len(out)
                out.append(tile)
            else:
                sides[first] = list(out[place][:4])[first]
                q0, q1, k0, k1 = sides
                out[place] = Tile(q0, q1, k0, k1, FULL, k1 - k0)  # any distance at which all keys are visible
            ending_at[(*across_span, sides[last])] = place
        all_tiles = out
    return sorted(all_tiles)


def visible(
    queries: Sequence[Interval], keys: Sequence[Interval], starts: Sequence[int] = (0,), window: int | None = None
) -> bool:
    """Whether some query sees some key."""
    return bool(tiles(queries, keys, starts, window))


def _by_document(intervals: Sequence[Interval], starts: Sequence[int]) -> Iterator[tuple[int, list[_Part]]]:
    """(document, its parts of the intervals), ascending."""
    parts: dict[int, list[_Part]] = defaultdict(list)
    offset = 0
    for a, b in intervals:
        while a < b:
            document = max(bisect_right(starts, a) - 1, 0)
            end = min(b, starts[document + 1]) if document + 1 < len(starts) else b
            parts[document].append(_Part(a, end, offset))
            offset += end - a
            a = end
    yield from parts.items()


def _pair(q: _Part, k: _Part, window: int | None) -> Iterator[Tile]:
    """Tiles of two runs of consecutive tokens of one document."""
    if k.a >= q.b:
        return
    lo, hi = max(q.a, k.a), min(q.b, k.b)
    if lo >= hi:  # all keys come before all queries
        yield from _rectangle(q, k, window)
        return
    same_q, same_k = _Part(lo, hi, q.at + lo - q.a), _Part(lo, hi, k.at + lo - k.a)
    if k.a < lo:
        yield from _rectangle(same_q, _Part(k.a, lo, k.at), window)
    if window is None or hi - lo <= window:
        yield Tile(same_q.at, same_q.at + hi - lo, same_k.at, same_k.at + hi - lo, CAUSAL, 0)
    else:
        yield from _banded(same_q, same_k, window)
    if hi < q.b:
        yield from _rectangle(_Part(hi, q.b, q.at + hi - q.a), k, window)


def _rectangle(q: _Part, k: _Part, window: int | None) -> Iterator[Tile]:
    """Queries that all come after all keys."""
    if window is None or q.b - 1 - k.a < window:
        yield _tile(q, k, FULL)
    elif q.a - (k.b - 1) < window:  # else everything is too far back
        yield from _banded(q, k, window)


def _banded(q: _Part, k: _Part, window: int) -> Iterator[Tile]:
    """Halve the longer side until a tile is full, empty, causal or small."""
    rows, columns = q.b - q.a, k.b - k.a
    if q.b - 1 < k.a or q.a - (k.b - 1) >= window:
        return
    if q.a >= k.b - 1 and q.b - 1 - k.a < window:
        yield _tile(q, k, FULL)
    elif q.a == k.a and rows == columns <= window:
        yield _tile(q, k, CAUSAL)
    elif max(rows, columns) <= BAND_LEAF:
        yield _tile(q, k, BAND)
    elif rows >= columns:
        middle = q.a + rows // 2
        yield from _banded(_Part(q.a, middle, q.at), k, window)
        yield from _banded(_Part(middle, q.b, q.at + middle - q.a), k, window)
    else:
        middle = k.a + columns // 2
        yield from _banded(q, _Part(k.a, middle, k.at), window)
        yield from _banded(q, _Part(middle, k.b, k.at + middle - k.a), window)


def _tile(q: _Part, k: _Part, kind: str) -> Tile:
    return Tile(q.at, q.at + q.b - q.a, k.at, k.at + k.b - k.a, kind, q.a - k.a)
