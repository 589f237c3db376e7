"""The tables of stages of one search, and the memory of stages' communicators.

Seconds and bytes of a stage are affine in its layers, and activations in the micro-batches in flight, so a few calls of
the cost model per kind of stage give every entry. Tables of many kinds are made at once: most of what one takes is
what NumPy takes to be called. Communicators count beyond what is set aside for them on every chip.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hetero_megatron.planner.estimate.pipeline_time import Link as Transfers
from hetero_megatron.planner.estimate.stage_table import AWAY, RECOMPUTES, AwayTable, Floats, StageKind, StageTable
from hetero_megatron.planner.template.device_pool import DevicePool
from hetero_megatron.planner.template.plan_template import StageId, StageTemplate
from hetero_megatron.plans import supports
from hetero_megatron.plans.memory.of_plan import library
from hetero_megatron.predictor.cost.cost_options import StageChoice
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.link_model import LinkPrice
from hetero_megatron.utils.cached_method import cached_by, cached_method, share_results


class StageCommunicators:
    """Of the stages on one pool."""

    def __init__(self, costs: CostModel, pool: DevicePool) -> None:
        chips = [costs.cluster.chips[group.chip] for group in pool.groups]
        self.vendors = [library(chip) for chip in chips]
        self.memory = [chip.communicator for chip in chips]

    def counted(self, stages: Sequence[StageTemplate], s: int, reducing: Iterable[int]) -> int:
        """Bytes on a rank of stage ``s`` of a pipeline beyond what is set aside.

        Args:
            reducing: ranks of each group in which gradients of the stage are reduced (:meth:`reducing`).
        """
        stage = stages[s]
        vendor, memory = self.vendors[stage.group], self.memory[stage.group]
        if not vendor:
            return 0
        neighbours = [stages[i] for i in (s - 1, s + 1) if 0 <= i < len(stages)]
        pairs = sum(2 * other.tp * other.dp for other in neighbours if self.vendors[other.group] == vendor)
        groups = [size for size in (stage.tp, *reducing) if size > 1]
        allocated = memory.bytes(len(groups) + pairs, sum(groups) - len(groups) + pairs)
        return max(0, allocated - memory.least)

    def of_equal_pipelines(self, stages: Sequence[StageTemplate], s: int, replicas: float) -> int:
        """:meth:`counted` of ``replicas`` equal pipelines."""
        return self.counted(stages, s, [int(replicas * stages[s].chips)] if len(stages) > 1 else [])

    def reducing(
        self, holders: Iterable[Collection[StageId]], stages: Mapping[StageId, StageTemplate],
        ranks: Mapping[StageId, int],
    ) -> dict[StageId, list[int]]:  # fmt: skip
        """By stage, ranks of the groups of one vendor in which its gradients are reduced.

        Args:
            holders: of every range of layers, the stages that hold it.
            ranks: of each stage.
        """
        sizes: dict[StageId, list[int]] = {stage_id: [] for stage_id in stages}
        all_ranks = sum(ranks.values())
        for sharers in {frozenset(row) for row in holders}:
            count = sum(ranks[stage_id] for stage_id in sharers)
            # The group of all ranks is the world's, which is gloo's.
            if count < all_ranks and len({self.vendors[stages[stage_id].group] for stage_id in sharers}) == 1:
                for stage_id in sharers:
                    sizes[stage_id].append(count)
        return sizes


def most_peers(mine: int, theirs: int) -> int:
    """Of a line that is cut evenly into ``mine`` parts, and into ``theirs``: most of the latter that touch one of the
    former."""
    return max(-(-(i + 1) * theirs // mine) - i * theirs // mine for i in range(mine))


SOME = 3  # layers from which on bytes and waits of layers in host memory are affine
MANY_REPLICAS = 1e6  # so many that a rank's share of the optimizer states is negligible


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
        self._tables: dict[tuple[StageKind, int], StageTable] = {}
        self.first = supports("recompute.first")

    def for_pool(
        self, pool: DevicePool, costs: CostModel | None = None, offload: frozenset[str] | None = None
    ) -> StageTables:
        """Tables for other chips, other costs or other offloaded chip types."""
        return self._changed(pool, costs, offload=self.offload if offload is None else offload)

    def lending(self) -> StageTables:
        """Tables where other pipelines may own all optimizer states of a stage."""
        return self._changed(lent=True)

    def on_chips(self) -> StageTables:
        """Tables where no activations go to host memory."""
        return self._changed(away=frozenset())

    def _changed(
        self, pool: DevicePool | None = None, costs: CostModel | None = None, **options: Any
    ) -> StageTables:
        """With other ``options`` (those of :meth:`__init__`), which change bytes of states at most: of the same chips
        and costs, all else that is known of kinds of stages is shared."""
        chosen: dict[str, Any] = {"offload": self.offload, "lent": self.lent, "away": self.away} | options
        tables = StageTables(costs or self.costs, pool or self.pool, self.layers, self.depth, **chosen)
        if tables.pool is self.pool and tables.costs is self.costs:
            computing = ("_affine_seconds", "_activations", "_away_seconds", "_away_bytes")
            share_results(self, tables, *computing, "boundary", "message_seconds")
        return tables

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
        return self.tables([kind], depth)[0]

    def tables(self, kinds: Sequence[StageKind], depth: int | None = None) -> list[StageTable]:
        """Those of many kinds with the same ``recompute``."""
        rows = self.depth if depth is None else min(depth, self.depth)
        missing = [kind for kind in dict.fromkeys(kinds) if (kind, rows) not in self._tables]
        if missing:
            self._tables.update(zip(((kind, rows) for kind in missing), self._make(missing, rows), strict=True))
        return [self._tables[kind, rows] for kind in kinds]

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

    def _make(self, kinds: Sequence[StageKind], depth: int) -> list[StageTable]:
        """Arrays are [kinds, levels of recompute or in flight - 1, layers]."""
        units, (ends, per, work) = [self._affine_seconds(kind) for kind in kinds], _stacked(self._activations, kinds)
        backward, room = np.stack([unit.backward for unit in units]), np.stack([self._room(x) for x in kinds])[:, None]
        levels: tuple[str, ...] = RECOMPUTES
        if (recompute := kinds[0].recompute) is not None:
            levels, level = (recompute,), [RECOMPUTES.index(recompute)]
            backward, ends, per, work = (x[:, level] for x in (backward, ends, per, work))
        bytes_each, alive = ends + per * self._layers, np.arange(1, depth + 1)[:, None]
        # Whole numbers far below 2^53, so the division is exact enough to be rounded down.
        most_alive = np.where(room >= 0, np.floor((room - work) / np.maximum(bytes_each, 1.0)), 0.0)
        best = np.where(alive <= most_alive[:, :1], backward[:, :1], np.inf)
        for i in range(1, len(levels)):
            np.minimum(best, backward[:, i : i + 1], out=best, where=alive <= most_alive[:, i : i + 1])
        first, away = dict[int, tuple[Floats, float]](), dict[int, AwayTable]()
        tight = np.flatnonzero(((room >= 0) & (most_alive[:, :1] < depth)).any(axis=(1, 2)) & (recompute is None))
        kept, fitting = alive * bytes_each[:, :1], most_alive[:, :1]
        if self.first and len(tight):
            saved = alive * (per[tight, :1] - per[tight, -1:])
            need = np.ceil((kept[tight] + (work[tight, :1] - room[tight])) / np.maximum(saved, 1.0) - 1e-9)
            # Where computing a layer again frees nothing (saved <= 0), no number of layers is enough.
            impossible = (saved <= 0) | (room[tight] < 0) | (need < 1) | (need >= self._layers)
            need[impossible | (alive <= fitting[tight])] = np.inf
            again = np.array([units[k].layer_again for k in tight])[:, None, None]
            best[tight] = np.minimum(best[tight], backward[tight, :1] + need * again)
            first = {k: (rows, units[k].layer_again) for k, rows in zip(tight.tolist(), need, strict=True)}
        has_away = [k for k in tight.tolist() if self.layers and self.pool.groups[kinds[k].group].chip in self.away]
        if has_away:
            away_tables = self._away(
                [kinds[k] for k in has_away], room[has_away], alive, kept[has_away], fitting[has_away]
            )
            best[has_away] = np.minimum(best[has_away], away_tables.least(alive))
            away = {k: away_tables.of_kind(i) for i, k in enumerate(has_away)}
        best += np.stack([unit.forward for unit in units])[:, None]
        return [
            StageTable(best[k], unit.forward, levels, most_alive[k], backward[k], first.get(k), away.get(k))
            for k, unit in enumerate(units)
        ]

    def _away(
        self, kinds: Sequence[StageKind], room: Floats, alive: NDArray[np.int64], kept: Floats, fitting: Floats
    ) -> AwayTable:
        """``kept``: [kinds, in flight - 1, layers] bytes of all activations; ``fitting``: [kinds, 1, layers]
        micro-batches in flight of which all fit."""
        plain_ends, plain_per, _ = _stacked(self._activations, kinds)
        seconds, (ends, per, work) = np.stack([self._away_seconds(x) for x in kinds]), _stacked(self._away_bytes, kinds)
        most_alive = np.where(room >= 0, np.floor((room - work) / np.maximum(ends + per * self._layers, 1.0)), 0.0)
        layer_bytes, input_bytes = plain_per[:, :1] - per[:, :1], ends[:, :1] - plain_ends[:, :1]  # the first's stays
        missing = kept + alive * input_bytes + (work[:, :1] - room)
        some = np.ceil(missing / (alive * np.maximum(layer_bytes, 1.0)) - 1e-9)
        some[(alive <= fitting) | (room < 0) | (some < 1) | (some >= self._layers)] = np.inf
        host_room = np.stack([self._host_room(kind) for kind in kinds])[:, None]
        elementwise = RECOMPUTES.index("elementwise")  # of whose layers less is there
        host_bytes = plain_per[:, [0, elementwise]] - per
        most_alive = np.minimum(most_alive, np.floor(host_room / np.maximum(host_bytes * self._layers, 1.0)))
        some[alive * np.where(some < np.inf, some, 0.0) * layer_bytes > host_room] = np.inf
        plain_seconds = np.stack([self._affine_seconds(kind).backward[:1] for kind in kinds])
        waits = seconds[:, :1] - plain_seconds  # where all layers are there
        last = min(self.layers, SOME)
        lag = np.maximum(0.0, (waits[:, :, -1:] - waits[:, :, last : last + 1]) / max(self.layers - last, 1))
        # inf x 0 is no number, so inf is put back afterwards.
        with_some = plain_seconds + np.where(some < np.inf, np.where(some < np.inf, some, 0.0) * lag, np.inf)
        most_alive[:, :, 0] = 0.0  # nothing to be there
        return AwayTable(most_alive.swapaxes(0, 1), seconds.swapaxes(0, 1), some, with_some)

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


def _stacked(of_kind: Callable[[StageKind], tuple[Floats, ...]], kinds: Sequence[StageKind]) -> tuple[Floats, ...]:
    """Each of the arrays that there are for a kind, of all kinds: [kinds, ...]."""
    return tuple(np.stack(rows) for rows in zip(*map(of_kind, kinds), strict=True))
