"""In which order micro-batches pass several chunks of layers: in groups."""

from __future__ import annotations

from typing import NamedTuple


class ChunkPasses(NamedTuple):
    """Forwards and backwards of every stage in order, each a (micro-batch, chunk); sizes of the smallest and the
    largest group."""

    forwards: list[tuple[int, int]]
    backwards: list[tuple[int, int]]
    smallest: int
    largest: int


def chunk_passes(micro_batches: int, chunks: int, groups: int) -> ChunkPasses:
    """Micro-batches divided evenly over ``groups``, of which each passes all chunks before the next one does."""
    bounds = [micro_batches * g // groups for g in range(groups + 1)]
    forwards, backwards, sizes = [], [], []
    for start, stop in zip(bounds, bounds[1:]):
        forwards += [(m, c) for c in range(chunks) for m in range(start, stop)]
        backwards += [(m, c) for c in reversed(range(chunks)) for m in range(start, stop)]
        sizes.append(stop - start)
    return ChunkPasses(forwards, backwards, min(sizes), max(sizes))
