"""Seconds and memory of one kind of stage for every number of layers and micro-batches in flight, as arrays.

``StageTables`` makes them. A table also chooses recomputation: for every entry the fastest of none, selective,
elementwise, first n layers and full that fits; or activations of all or the first n layers in host memory, where that
is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RECOMPUTES = ("none", "selective", "elementwise", "full")
AWAY = ("none", "elementwise")  # recompute beside which the activations of all layers may be in host memory


@dataclass(frozen=True)
class StageKind:
    """The key of a table.

    Args:
        replicas: ranks that share the optimizer states of this stage (with ``dp`` of them in one pipeline).
        recompute: one level for all entries; None: the fastest that fits.
        buckets: whether gradient buckets under way take memory.
        beside: further bytes, such as those of communicators beyond what is set aside for them.
    """

    group: int
    tp: int
    dp: int
    micro_batch_size: int
    embed: bool
    head: bool
    replicas: float
    recompute: str | None = None
    offload: bool = False
    buckets: bool = True
    beside: int = 0

    @property
    def compute(self) -> tuple[int, int, int, bool, bool]:
        """What seconds and activations depend on: the third is the sequences of a micro-batch on a TP group."""
        return self.group, self.tp, -(-self.micro_batch_size // self.dp), self.embed, self.head

    @property
    def states(self) -> tuple[int, int, int, bool, bool, float, bool, bool, int]:
        """What states and buckets depend on: all but micro-batch size and recompute."""
        return (
            self.group, self.tp, self.dp, self.embed, self.head, self.replicas, self.offload, self.buckets, self.beside,
        )  # fmt: skip


@dataclass(frozen=True)
class StageTable:
    """Attributes:
        seconds: [in flight - 1, layers]: forward and backward with the fastest recompute that fits; inf: does not fit.
        forward: [layers] seconds.
        levels: of recompute: the first axis of ``most`` and ``backward``.
        most: [levels, layers] micro-batches in flight that fit.
        backward: [levels, layers] seconds.
        first: ([in flight - 1, layers] layers that must be recomputed where not all can be kept, else inf; seconds of
            recomputing one); None: first n layers not allowed.
        away: of activations in host memory; None: not allowed, or not needed.
    """

    seconds: Floats
    forward: Floats
    levels: tuple[str, ...]
    most: Floats
    backward: Floats
    first: tuple[Floats, float] | None
    away: AwayTable | None = None

    def row(self, in_flight: int) -> int:
        """Index of the first axis for so many micro-batches in flight."""
        return min(in_flight, self.seconds.shape[0]) - 1

    def choice(self, in_flight: int, layers: int) -> tuple[str, int, int]:
        """(recompute, number of first layers recomputed whole, number of first layers in host memory) of an entry."""
        k = self.row(in_flight)
        best, chosen = np.inf, ("none", 0, 0)
        for i, level in enumerate(self.levels):
            if k < self.most[i, layers] and self.backward[i, layers] < best:
                best, chosen = self.backward[i, layers], (level if layers or level == "selective" else "none", 0, 0)
        if self.first is not None:
            need, extra = self.first
            if self.backward[0, layers] + need[k, layers] * extra < best - 1e-15:
                best, chosen = self.backward[0, layers] + need[k, layers] * extra, ("first", int(need[k, layers]), 0)
        if self.away is not None:
            chosen = self.away.better(k, layers, best - 1e-15) or chosen
        return chosen


@dataclass(frozen=True)
class AwayTable:
    """Stages with activations in host memory. Where the table is one of many kinds, [kinds] comes
    after [levels], and before [in flight - 1].

    Attributes:
        most: [levels, layers] micro-batches in flight that fit with those of all layers there, beside each recompute of
            ``AWAY``.
        backward: [levels, layers] seconds, with what forward and backward wait for copies.
        some: [in flight - 1, layers] first layers that must be there for the rest to be kept, else inf.
        with_some: the same shape, seconds.
    """

    most: Floats
    backward: Floats
    some: Floats
    with_some: Floats

    def of_kind(self, i: int) -> AwayTable:
        """The table of one of many kinds."""
        return AwayTable(self.most[:, i], self.backward[:, i], self.some[i], self.with_some[i])

    def least(self, alive: NDArray[np.int64]) -> Floats:
        """[in flight - 1, layers] seconds of the fastest that fits; inf where none does."""
        fastest = self.with_some
        for most_alive, seconds in zip(self.most[..., None, :], self.backward[..., None, :], strict=True):
            fastest = np.minimum(fastest, np.where(alive <= most_alive, seconds, np.inf))
        return fastest

    def better(self, k: int, layers: int, best: float) -> tuple[str, int, int] | None:
        """As :meth:`StageTable.choice`, where it takes less than ``best`` seconds."""
        chosen = None
        if self.with_some[k, layers] < best:
            best, chosen = self.with_some[k, layers], ("none", 0, int(self.some[k, layers]))
        for recompute, most_alive, seconds in zip(AWAY, self.most, self.backward, strict=True):
            if k < most_alive[layers] and seconds[layers] < best:
                best, chosen = seconds[layers], (recompute, 0, layers)
        return chosen


def per_layer(seconds: Floats) -> float:
    """Seconds of one more layer, from seconds [layers + 1]; inf where none fits."""
    return float(seconds[2] - seconds[1] if len(seconds) > 2 and np.isfinite(seconds[2]) else seconds[1])
