"""What a stage costs for every number of layers and micro-batches in flight, as arrays.

All seconds and bytes of a stage are affine in its layers (and activations in micro-batches in flight), so a handful of
calls of the cost model per kind of stage gives every entry. Which layers are recomputed is chosen here, exactly: for
every entry the fastest of none, selective, first n and full that fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.cluster import Link
from hetero_megatron.plan import supports
from hetero_megatron.planner.costs import CostModel, StageChoice
from hetero_megatron.planner.pool import Pool
from hetero_megatron.planner.shape import StageShape

Floats = NDArray[np.float64]
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True)
class Kind:
    """What a table depends on. ``recompute``: None leaves the choice to the table; ``buckets``: whether they take
    memory."""

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


@dataclass(frozen=True)
class StageTable:
    """Arrays [in flight - 1, layers]: ``seconds`` of forward and backward together (inf: does not fit), ``full``:
    layers recomputed whole, ``selective``: whether attention is recomputed; ``forward`` [layers]."""

    seconds: Floats
    full: NDArray[np.int32]
    selective: NDArray[np.bool_]
    forward: Floats

    def row(self, in_flight: int) -> int:
        return min(in_flight, self.seconds.shape[0]) - 1

    def choice(self, in_flight: int, layers: int) -> tuple[str, int]:
        """(recompute, first) of an entry."""
        k = self.row(in_flight)
        if self.selective[k, layers]:
            return "selective", 0
        n = int(self.full[k, layers])
        if n and n == layers:
            return "full", 0
        return ("first", n) if n else ("none", 0)


@dataclass(frozen=True)
class _Unit:
    """Affine costs of a kind without ends: [constant, per layer] of forward, of backward by recompute."""

    forward: tuple[float, float]
    backward: Mapping[str, tuple[float, float]]


class Tables:
    """Tables of one cost model over one pool, for up to ``layers`` layers and ``depth`` micro-batches in flight."""

    def __init__(self, costs: CostModel, pool: Pool, layers: int, depth: int) -> None:
        self.costs, self.pool, self.layers, self.depth = costs, pool, layers, max(1, depth)
        self._tables: dict[Kind, StageTable] = {}
        self._seconds: dict[tuple[int, int, int, int, bool, bool], _Unit] = {}
        self._links: dict[tuple[object, ...], float] = {}
        self._kept: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self.first = supports("recompute.first")

    def choice(self, stage: StageShape, embed: bool, head: bool) -> StageChoice:
        return StageChoice(
            self.pool.groups[stage.group].chip, stage.tp, stage.dp, stage.layers, embed, head, stage.recompute,
            stage.first, stage.offload,
        )  # fmt: skip

    def table(self, kind: Kind) -> StageTable:
        if kind not in self._tables:
            self._tables[kind] = self._make(kind)
        return self._tables[kind]

    def _unit(self, kind: Kind) -> _Unit:
        key = (kind.group, kind.tp, kind.dp, kind.micro_batch_size, kind.embed, kind.head)
        if key not in self._seconds:
            chip, b = self.pool.groups[kind.group].chip, kind.micro_batch_size

            def line(method: str, recompute: str) -> tuple[float, float]:
                one, two = (
                    float(getattr(self.costs, method)(
                        StageChoice(chip, kind.tp, kind.dp, n, kind.embed, kind.head, recompute), b
                    ))
                    for n in (1, 2)
                )  # fmt: skip
                return 2 * one - two, two - one

            # A send or receive costs the rank itself: one of each per neighbour and direction.
            message = self.costs.message_seconds(chip) * ((not kind.embed) + (not kind.head))
            f = line("forward_seconds", "none")
            back = {r: line("backward_seconds", r) for r in RECOMPUTES}
            self._seconds[key] = _Unit(
                (f[0] + message, f[1]), {r: (constant + message, per) for r, (constant, per) in back.items()}
            )
        return self._seconds[key]

    def _bytes(self, kind: Kind, recompute: str, layers: int, in_flight: int) -> tuple[float, float, float]:
        """(state and overhead, activations, buffers)."""
        chip = self.pool.groups[kind.group].chip
        stage = StageChoice(chip, kind.tp, kind.dp, layers, kind.embed, kind.head, recompute, 0, kind.offload)
        m = self.costs.memory_bytes(stage, kind.micro_batch_size, in_flight, kind.replicas)
        buffers = m.buffers if kind.buckets else 0
        return m.overhead + m.weights + m.gradients + m.optimizer, m.activations, buffers

    def _make(self, kind: Kind) -> StageTable:
        unit = self._unit(kind)
        n = np.arange(self.layers + 1)
        k = np.arange(1, self.depth + 1)[:, None]
        limit = self.costs.memory_limit(self.pool.groups[kind.group].chip)
        one, two = self._bytes(kind, "none", 1, 1), self._bytes(kind, "none", 2, 1)
        state = 2 * one[0] - two[0] + (two[0] - one[0]) * n
        buffers = 2 * one[2] - two[2] + (two[2] - one[2]) * n
        free = limit - state
        room = np.where(buffers <= free, free, -1.0)[None, :]  # for activations
        forward = unit.forward[0] + unit.forward[1] * n
        best = np.full((self.depth, self.layers + 1), np.inf)
        full = np.zeros(best.shape, np.int32)
        selective = np.zeros(best.shape, bool)
        kept = {r: self._activations(kind, r) for r in RECOMPUTES}
        constant = kept["none"][0]
        for r in RECOMPUTES if kind.recompute is None else (kind.recompute,):
            head, per, work = kept[r]
            fits = k * (head + per * n) + work * (n > 0) <= room
            seconds = np.where(fits, unit.backward[r][0] + unit.backward[r][1] * n, np.inf)
            better = seconds < best
            best = np.where(better, seconds, best)
            selective = np.where(better, r == "selective", selective)
            full = np.where(better, n if r == "full" else 0, full)
        if self.first and kind.recompute is None:
            save = k * (kept["none"][1] - kept["full"][1])
            over = k * (constant + kept["none"][1] * n) + kept["full"][2] - room
            need = np.ceil(np.maximum(over, 0.0) / save - 1e-9)
            need = np.where((need >= 1) & (need <= n) & (room >= 0), need, np.inf)
            back = unit.backward["none"]
            extra = unit.backward["full"][1] - back[1]
            seconds = back[0] + back[1] * n + need * extra
            better = seconds < best - 1e-15
            best = np.where(better, seconds, best)
            selective = np.where(better, False, selective)
            full = np.where(better, np.where(np.isfinite(need), need, 0), full).astype(np.int32)
        return StageTable(np.asarray(best + forward, np.float64), full, selective, np.asarray(forward, np.float64))

    def _activations(self, kind: Kind, recompute: str) -> tuple[float, float, float]:
        """(bytes of the ends, bytes per layer, bytes while a layer runs again): activations are
        in_flight x (ends + layers x per layer) + working."""
        key = (kind.group, kind.tp, kind.dp, kind.micro_batch_size, kind.head, recompute)
        if key not in self._kept:
            a, b, c = (self._bytes(kind, recompute, n, k)[1] for n, k in ((1, 1), (2, 1), (1, 2)))
            per, both = b - a, c - a
            self._kept[key] = both - per, per, a - both
        return self._kept[key]

    def boundary(self, a: StageShape, b: StageShape, size: int, same_node: bool, sharing: int = 1) -> float:
        """Seconds of one transfer from stage ``a`` to stage ``b``; ``sharing``: such transfers at a time over a node's
        cards."""
        key = (a.group, a.tp, a.dp, b.group, b.tp, b.dp, size, same_node, sharing)
        if key not in self._links:
            link = self.pool.link(a.group, b.group, same_node) or self.pool.link(a.group, a.group, True)
            assert link is not None, "two stages with no link between them"
            first, second = (self.choice(StageShape(s.group, s.tp, s.dp), False, False) for s in (a, b))
            link = Link(link.bandwidth / sharing, link.latency)
            self._links[key] = self.costs.boundary_seconds(first, second, size, link, same_node)
        return self._links[key]

    def likely_same_node(self, a: StageShape, b: StageShape) -> bool:
        """Whether neighbouring stages can lie in one node."""
        return a.group == b.group and a.chips + b.chips <= self.pool.groups[a.group].per_node
