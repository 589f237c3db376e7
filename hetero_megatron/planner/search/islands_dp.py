"""Disjoint islands of node groups that together compute a batch fastest: a dynamic program over sets of groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetero_megatron.planner.search.layers_program import PipelineFamily

HALVINGS, NEAR = 30, 2e-3  # most steps and relative precision of the bisection


def divide_into_islands(
    families: Sequence[PipelineFamily], groups: int, batch: int, sync: bool
) -> list[PipelineFamily] | None:
    """Families on disjoint sets of groups that compute ``batch`` sequences fastest, by bisection on the time; None
    without families. ``sync``: with gradient reduction."""
    if not families:
        return None
    islands = IslandCover(families, groups, sync)
    low, high = 0.0, max(f.seconds(batch) + f.sync for f in families)
    best = islands.cover(high, batch)
    for _ in range(HALVINGS if best is not None else 0):
        middle = (low + high) / 2
        found = islands.cover(middle, batch)
        if found is None:
            low = middle
        else:
            best, high = found, middle
        if high - low < NEAR * high:
            break
    return best


class IslandCover:
    """Families grouped by the set of groups (``mask``) that they use."""

    def __init__(self, families: Sequence[PipelineFamily], groups: int, sync: bool) -> None:
        self.families, self.groups = sorted(families, key=lambda f: f.mask), groups
        rows = [(f.tau, f.stages, f.sync * sync, f.size * f.replicas, f.mask) for f in self.families]
        self.tau, self.stages, self.sync, self.together, masks = np.array(rows).T
        self.masks = sorted({int(mask) for mask in masks})
        self.starts = np.searchsorted(masks, self.masks)

    def cover(self, limit: float, batch: int) -> list[PipelineFamily] | None:
        """Families on disjoint sets of groups that compute ``batch`` sequences within ``limit`` seconds; None if there
        are none."""
        totals = np.maximum(0, np.floor((limit - self.sync) / self.tau - self.stages + 1 + 1e-9)) * self.together
        best = dict(zip(self.masks, np.maximum.reduceat(totals, self.starts).tolist(), strict=True))
        top: list[tuple[float, int]] = [(0.0, 0)]  # by mask: (most sequences, island of the lowest group, 0: idle)
        for mask in range(1, 1 << self.groups):
            low = mask & -mask
            value = (top[mask & ~low][0], 0)
            sub = mask
            while sub:
                if sub & low and sub in best:
                    total = best[sub] + top[mask & ~sub][0]
                    if total > value[0]:
                        value = (total, sub)
                sub = (sub - 1) & mask
            top.append(value)
        mask = (1 << self.groups) - 1
        if top[mask][0] < batch:
            return None
        chosen = []
        while mask:
            sub = top[mask][1]
            if sub:
                i = self.masks.index(sub)
                part = totals[self.starts[i] : self.starts[i + 1] if i + 1 < len(self.masks) else None]
                chosen.append(self.families[self.starts[i] + int(np.argmax(part))])
            mask &= ~(sub or mask & -mask)
        return chosen
