"""Time and memory of a stage for every number of layers and micro-batches in flight, as arrays.

Seconds and bytes of a stage are affine in its layers, and activations in the micro-batches in flight, so a few calls of
the cost model per kind of stage give every entry. The table also chooses recomputation: for every entry the fastest of
none, selective, elementwise, first n layers and full that fits; or activations of all or the first n layers in host
memory, where that is faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.pipeline_time import Link as Transfers
from hetero_megatron.planner.estimate.stage_communicators import StageCommunicators, most_peers
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import StageTemplate
from hetero_megatron.plans import supports
from hetero_megatron.predictor.cost.cost_options import StageChoice
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.link_model import LinkPrice
from hetero_megatron.utils.cached_method import cached_by, cached_method

Floats = NDArray[np.float64]
RECOMPUTES = ("none", "selective", "elementwise", "full")
AWAY = ("none", "elementwise")  # recompute beside which the activations of all layers may be in host memory
SOME = 3  # layers from which on bytes and waits of layers in host memory are affine
MANY_REPLICAS = 1e6  # so many that a rank's share of the optimizer states is negligible


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
    def states(self) -> StageKind:
        """The kind without what states and buckets do not depend on: micro-batch size and recompute."""
        return replace(self, micro_batch_size=0, recompute=None)


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
    """Stages with activations in host memory.

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

    def least(self, alive: NDArray[np.int64]) -> Floats:
        """[in flight - 1, layers] seconds of the fastest that fits; inf where none does."""
        fastest = self.with_some
        for most_alive, seconds in zip(self.most, self.backward, strict=True):
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


@dataclass(frozen=True)
class _StageSeconds:
    """Seconds of a kind of stage, regardless of memory.

    Attributes:
        forward: [layers]; backward: [levels of recompute, layers].
        layer_again: of recomputing one layer.
    """

    forward: Floats
    backward: Floats
    layer_again: float


class StageTables:
    """Stage tables of one cost model over one pool, for up to ``layers`` layers and ``depth`` micro-batches in flight.
    ``offload``: chip types whose stages all keep their optimizer in host memory; ``lent``: of several pipelines, others
    may own all optimizer states of a stage, which then take no memory; ``away``: chip types whose stages may have
    activations in host memory."""

    def __init__(
        self, costs: CostModel, pool: DevicePool, layers: int, depth: int, offload: frozenset[str] = frozenset(),
        lent: bool = False, away: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.costs, self.pool, self.layers, self.depth = costs, pool, layers, max(1, depth)
        self.offload, self.lent, self.away = offload, lent, away
        self.links = costs.links
        self.communicators = StageCommunicators(costs, pool)
        self._layers = np.arange(layers + 1)
        self.first = supports("recompute.first")

    def for_pool(
        self, pool: DevicePool, costs: CostModel | None = None, offload: frozenset[str] | None = None
    ) -> StageTables:
        """Tables for other chips, other costs or other offloaded chip types."""
        offloaded = self.offload if offload is None else offload
        return StageTables(costs or self.costs, pool, self.layers, self.depth, offloaded, self.lent, self.away)

    def lending(self) -> StageTables:
        """Tables where other pipelines may own all optimizer states of a stage."""
        return StageTables(self.costs, self.pool, self.layers, self.depth, self.offload, True, self.away)

    def on_chips(self) -> StageTables:
        """Tables where no activations go to host memory."""
        return StageTables(self.costs, self.pool, self.layers, self.depth, self.offload, self.lent)

    def owners(self, replicas: float) -> float:
        """Pipelines by which the optimizer states of a stage are divided."""
        return MANY_REPLICAS if self.lent and replicas > 1 else replicas

    def offloads(self, group: int) -> bool:
        return self.pool.groups[group].chip in self.offload

    def choice(self, stage: StageTemplate, embed: bool, head: bool) -> StageChoice:
        group = self.pool.groups[stage.group]
        return StageChoice(
            group.chip, stage.tp, stage.dp, stage.layers, embed, head, stage.recompute, stage.first, stage.offload,
            group.home, min(stage.away, stage.layers),
        )  # fmt: skip

    def table(self, kind: StageKind, depth: int | None = None) -> StageTable:
        """The table of a kind; ``depth``: number of rows needed (None: all)."""
        return self._make(kind, self.depth if depth is None else min(depth, self.depth))

    @cached_method
    def fastest(
        self, stage: StageTemplate, size: int, embed: bool, head: bool, in_flight: int, replicas: float,
        beside: int = 0,
    ) -> StageTemplate | None:  # fmt: skip
        """The stage with the fastest recompute that fits; None when it does not fit."""
        kind = StageKind(
            stage.group, stage.tp, stage.dp, size, embed, head, replicas, offload=stage.offload, beside=beside
        )
        table = self.table(kind)
        if not table.seconds[table.row(in_flight), stage.layers] < float("inf"):
            return None
        recompute, first, away = table.choice(in_flight, stage.layers)
        return replace(stage, recompute=recompute, first=first, away=away)

    @cached_by(lambda kind: kind.compute)
    def _affine_seconds(self, kind: StageKind) -> _StageSeconds:
        b = kind.micro_batch_size

        def line(method: str, recompute: str) -> tuple[float, float]:
            stages = (self._stage(kind, recompute, n) for n in (1, 2))
            one_layer, two_layers = (float(getattr(self.costs, method)(stage, b)) for stage in stages)
            return 2 * one_layer - two_layers, two_layers - one_layer

        # Host time of sends and receives: one of each per neighbour, which is not known, and direction.
        home = self.pool.groups[kind.group].home
        message = self.links.least_message(home) * ((not kind.embed) + (not kind.head))
        lines = [line("forward_seconds", "none"), *(line("backward_seconds", r) for r in RECOMPUTES)]
        seconds = np.array([a + message + b * self._layers for a, b in lines], np.float64)
        layer_again = lines[1 + RECOMPUTES.index("full")][1] - lines[1 + RECOMPUTES.index("none")][1]
        return _StageSeconds(seconds[0], seconds[1:], layer_again)

    def _stage(self, kind: StageKind, recompute: str, layers: int, away: int = 0) -> StageChoice:
        group, offload = self.pool.groups[kind.group], kind.offload or self.offloads(kind.group)
        return StageChoice(
            group.chip, kind.tp, kind.dp, layers, kind.embed, kind.head, recompute, 0, offload, group.home, away
        )

    def _states(self, kind: StageKind) -> Floats:
        """[layers] bytes of weights, gradients, optimizer states and overhead."""
        stages = (self._stage(kind, "none", n) for n in (1, 2))
        one, two = (self.costs.overhead(s.chip) + sum(self.costs.states(s, self.owners(kind.replicas))) for s in stages)
        return np.asarray(2 * one - two + (two - one) * self._layers, np.float64)

    @cached_by(lambda kind: kind.states)
    def update_seconds(self, kind: StageKind) -> Floats:
        """[layers] seconds of the optimizer's step."""
        stages = (self._stage(kind, "none", n) for n in range(self.layers + 1))
        return np.array([self.costs.optimizer_seconds(stage, kind.replicas) for stage in stages], np.float64)

    @cached_method
    def _make(self, kind: StageKind, depth: int) -> StageTable:
        unit, room = self._affine_seconds(kind), self._room(kind)
        levels: tuple[str, ...] = RECOMPUTES
        backward, (ends, per, work) = unit.backward, self._activations(kind)
        if kind.recompute is not None:
            level = [RECOMPUTES.index(kind.recompute)]
            levels, backward, ends, per, work = (kind.recompute,), backward[level], ends[level], per[level], work[level]
        bytes_each, alive = ends + per * self._layers, np.arange(1, depth + 1)[:, None]
        # Whole numbers far below 2^53, so the division is exact enough to be rounded down.
        most_alive = np.where(room >= 0, np.floor((room - work) / np.maximum(bytes_each, 1.0)), 0.0)
        best = np.where(alive <= most_alive[0], backward[0], np.inf)  # [in flight, layers]
        for level_alive, seconds in zip(most_alive[1:], backward[1:], strict=True):
            np.minimum(best, seconds, out=best, where=alive <= level_alive)
        first = away = None
        tight = kind.recompute is None and bool(((room >= 0) & (most_alive[0] < depth)).any())
        if self.first and tight:
            need = np.ceil((alive * bytes_each[0] + (work[0] - room)) / (alive * (per[0] - per[-1])) - 1e-9)
            need[(alive <= most_alive[0]) | (room < 0) | (need < 1) | (need >= self._layers)] = np.inf
            np.minimum(best, backward[0] + need * unit.layer_again, out=best)
            first = need, unit.layer_again
        if tight and self.pool.groups[kind.group].chip in self.away and self.layers:
            away = self._away(kind, room, alive, alive * bytes_each[0], most_alive[0])
            np.minimum(best, away.least(alive), out=best)
        best += unit.forward
        return StageTable(best, unit.forward, levels, most_alive, backward, first, away)

    def _away(
        self, kind: StageKind, room: Floats, alive: NDArray[np.int64], kept: Floats, fitting: Floats
    ) -> AwayTable:
        """``kept``: [in flight - 1, layers] bytes of all activations; ``fitting``: [layers] micro-batches in flight of
        which all fit."""
        (plain_ends, *_), (plain_per, *_), _ = self._activations(kind)
        seconds, (ends, per, work) = self._away_seconds(kind), self._away_bytes(kind)
        most_alive = np.where(room >= 0, np.floor((room - work) / np.maximum(ends + per * self._layers, 1.0)), 0.0)
        layer_bytes, input_bytes = plain_per - per[0], ends[0] - plain_ends  # the input of the first layer stays
        some = np.ceil((kept + alive * input_bytes + (work[0] - room)) / (alive * np.maximum(layer_bytes, 1.0)) - 1e-9)
        some[(alive <= fitting) | (room < 0) | (some < 1) | (some >= self._layers)] = np.inf
        host_room = self._host_room(kind)
        elementwise = RECOMPUTES.index("elementwise")  # of whose layers less is there
        host_bytes = np.array([plain_per[0], self._activations(kind)[1][elementwise, 0]])[:, None] - per
        most_alive = np.minimum(most_alive, np.floor(host_room / np.maximum(host_bytes * self._layers, 1.0)))
        some[alive * np.where(some < np.inf, some, 0.0) * layer_bytes > host_room] = np.inf
        waits = seconds[0] - self._affine_seconds(kind).backward[0]  # where all layers are there
        last = min(self.layers, SOME)
        lag = max(0.0, float(waits[-1] - waits[last]) / max(self.layers - last, 1))
        # Copies that are hidden take no time, and inf x 0 is no number.
        with_some = self._affine_seconds(kind).backward[0] + (some * lag if lag else np.where(some < np.inf, 0.0, some))
        most_alive[:, 0] = 0.0  # nothing to be there
        return AwayTable(most_alive, seconds, some, with_some)

    @cached_by(lambda kind: kind.states)
    def _host_room(self, kind: StageKind) -> Floats:
        """[layers] bytes of host memory for activations, beside offloaded optimizers."""
        stages = (self._stage(kind, "none", n) for n in (1, 2))
        one_layer, two_layers = (self.costs.host_states(stage, self.owners(kind.replicas)) for stage in stages)
        host_memory = self.costs.cluster.groups[self.pool.groups[kind.group].home].host_memory_per_chip
        return np.maximum(host_memory - (2 * one_layer - two_layers + (two_layers - one_layer) * self._layers), 0.0)

    @cached_by(lambda kind: kind.compute)
    def _away_seconds(self, kind: StageKind) -> Floats:
        """[levels, layers] seconds of backward with all layers in host memory, beside each recompute of ``AWAY``, and
        those for which forward waits."""
        unit, backward = self._affine_seconds(kind), []
        for recompute in AWAY:
            stages = [self._stage(kind, recompute, n, n) for n in (1, 2, SOME, SOME + 1)]
            waits = [sum(self.costs.copy_waits(stage, kind.micro_batch_size)) for stage in stages]
            wait_seconds = waits[2] + (waits[3] - waits[2]) * (self._layers - SOME)
            few_layers = np.array([0.0, *waits[:2]])[: self.layers + 1]
            wait_seconds[: len(few_layers)] = few_layers
            backward.append(unit.backward[RECOMPUTES.index(recompute)] + wait_seconds)
        return np.array(backward)

    @cached_by(lambda kind: kind.compute)
    def _away_bytes(self, kind: StageKind) -> tuple[Floats, Floats, Floats]:
        """As :meth:`_activations` with all layers in host memory, beside each recompute of ``AWAY``."""
        rows = []
        for recompute in AWAY:
            a, b = (self._stage(kind, recompute, n, n) for n in (SOME, SOME + 1))
            (at_some, working), (at_next, _) = (self.costs.activation_bytes(s, kind.micro_batch_size) for s in (a, b))
            rows.append((at_some - SOME * (at_next - at_some), at_next - at_some, working))
        ends, layer_bytes, work = np.array(rows, np.float64).T[:, :, None]
        return ends, layer_bytes, work

    @cached_by(lambda kind: kind.states)
    def _room(self, kind: StageKind) -> Floats:
        """[layers] bytes that states and buckets leave for activations; -1 where these do not fit."""
        limit = self.costs.memory_limit(self.pool.groups[kind.group].chip)
        free = limit - kind.beside - self._states(kind)
        buffers = self._buffers(kind) if kind.buckets else 0
        return np.where(buffers <= free, free, -1.0).astype(np.float64)

    def _buffers(self, kind: StageKind) -> Floats:
        without_layers, one_layer = (self.costs.memory.trained(kind.tp, n, kind.embed, kind.head) for n in (0, 1))
        trained = without_layers + (one_layer - without_layers) * self._layers
        copies = kind.dp * kind.replicas
        return np.asarray(self.costs.memory.buffers(kind.tp, kind.embed, kind.head, copies, trained), np.float64)

    @cached_by(lambda kind: kind.compute)
    def _activations(self, kind: StageKind) -> tuple[Floats, Floats, Floats]:
        """(bytes of embedding and head, bytes per layer, working bytes of backward), each [levels of recompute, 1].
        Activations take ``in_flight x (ends + layers x per layer) + working`` bytes, whatever the number of replicas.
        """
        rows = []
        for recompute in RECOMPUTES:
            stages = (self._stage(kind, recompute, n) for n in (1, 2))
            (one_layer, working), two_layers = (self.costs.activation_bytes(s, kind.micro_batch_size) for s in stages)
            per = sum(two_layers) - one_layer - working
            rows.append((one_layer - per, per, working))
        ends, layer_bytes, work = np.array(rows, np.float64).T[:, :, None]
        return ends, layer_bytes, work

    @cached_by(lambda a, b, *more: (a.group, a.tp, a.dp, b.group, b.tp, b.dp, *more))
    def boundary(self, a: StageTemplate, b: StageTemplate, size: int, same_node: bool, sharing: int = 1) -> Transfers:
        """Seconds of one transfer from stage ``a`` to stage ``b``, and back; ``sharing``: concurrent transfers over a
        node's network cards."""
        return self._one_way(a, b, size, same_node, sharing), self._one_way(b, a, size, same_node, sharing)

    def _one_way(self, a: StageTemplate, b: StageTemplate, size: int, same_node: bool, sharing: int) -> float:
        first, second = (self.choice(StageTemplate(s.group, s.tp, s.dp), False, False) for s in (a, b))
        return self.costs.boundary_seconds(first, second, size, self._link(a, b, same_node), sharing, same_node)

    def _link(self, a: StageTemplate, b: StageTemplate, same_node: bool) -> LinkPrice:
        inside = same_node or self.pool.link(a.group, b.group) is None
        groups = self.pool.groups
        return self.links.link(groups[a.group].home, groups[b.group].home, inside)

    @cached_by(lambda a, b, same_node: (a.group, a.chips, b.group, b.chips, same_node))
    def message_seconds(self, a: StageTemplate, b: StageTemplate, same_node: bool) -> tuple[float, float]:
        """Seconds that the busiest host of each of two neighbours spends on a micro-batch's messages in one direction:
        both divide its tokens evenly, and a chip has one message with each chip that has some of its own."""
        return (
            most_peers(a.chips, b.chips) * self._link(a, b, same_node).message,
            most_peers(b.chips, a.chips) * self._link(b, a, same_node).message,
        )

    def likely_same_node(self, a: StageTemplate, b: StageTemplate) -> bool:
        """Whether neighbouring stages fit into one node together."""
        return a.group == b.group and a.chips + b.chips <= self.pool.groups[a.group].per_node
