"""Inputs of the schedule simulation for a concrete pipeline: seconds of its stages, boundaries and messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hetero_megatron.layout import Box, Layout, transfer
from hetero_megatron.plans import Pipeline, Plan, Stage, Unit, token_intervals, unit_sequences
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.experts import expert_groups
from hetero_megatron.plans.fp8_checks import stage_fits
from hetero_megatron.plans.program import pipeline_schedule
from hetero_megatron.plans.routing import LayerLoads, Popularity, layer_kinds, layer_loads, mean_loads
from hetero_megatron.plans.shares import Islands, has_context, split_by_island
from hetero_megatron.predictor.cost.expert_cost import token_bytes
from hetero_megatron.predictor.cost.layer_cost import CostModel, UnitSeconds
from hetero_megatron.predictor.cost.link_model import ExchangePrice, Flow
from hetero_megatron.predictor.cost.operator_cost import heads_and_columns
from hetero_megatron.predictor.simulate.grad_sync import SyncStructure
from hetero_megatron.predictor.simulate.memory_saving_cost import DividedCost, with_first_layers
from hetero_megatron.predictor.simulate.ring_attention import ContextSeconds
from hetero_megatron.predictor.simulate.ring_traffic import LayerTraffic
from hetero_megatron.schedule import Costs, Schedule
from hetero_megatron.schedule.simulate import ChunkSeconds
from hetero_megatron.spec.expert_load import INDEX, ExpertLoad
from hetero_megatron.spec.flops import (
    layer_attention_flops,
    layer_matmul_flops,
    layers_alone,
    mean_attention_pairs,
    mlp_columns,
)

Piece = tuple[int, int, int]  # local index upstream, local index downstream, elements


class PreparedPlan:
    """Rate-independent data of a plan on one cluster.

    Attributes:
        boundaries: caches of what moves at stage boundaries; context: and in context groups; filled on first use.
    """

    def __init__(self, compiled: CompiledPlan) -> None:
        self.compiled, self.plan = compiled, compiled.plan
        self.boundaries: dict[object, tuple[Piece, ...]] = {}
        self.context: dict[tuple[object, ...], list[LayerTraffic]] = {}
        self._schedules: dict[tuple[object, ...], Schedule] = {}
        self._structure: SyncStructure | None = None

    def schedule(self, pipeline: Pipeline) -> Schedule:
        """The lowered schedule of a pipeline."""
        shape = (len(pipeline.stages), pipeline.num_micro_batches, pipeline.chunks, pipeline.orders, pipeline.in_flight)
        if shape not in self._schedules:
            self._schedules[shape] = pipeline_schedule(self.plan, pipeline)
        return self._schedules[shape]

    def structure(self, costs: CostModel) -> SyncStructure:
        """Participants and element counts of every gradient exchange."""
        if self._structure is None or not self._structure.serves(costs):
            self._structure = SyncStructure(self.plan, costs, self.compiled.buckets)
        return self._structure


@dataclass(frozen=True)
class PipelineCosts:
    """Costs of one pipeline's schedule, and per stage the times of its slowest rank's parts."""

    costs: Costs
    parts: tuple[UnitSeconds, ...]


class StageCosts:
    """Costs of the pipelines of one plan; equal structures are computed once. ``prepared``: the plan, if compiled."""

    def __init__(self, plan: Plan, model: CostModel, prepared: PreparedPlan | None = None) -> None:
        self.plan, self.model = plan, model
        self.network = model.links
        self.prepared = prepared or PreparedPlan(CompiledPlan(plan, model.model, muon=model.options.muon))
        self.sharing = self._sharing()
        self._priced: dict[tuple[object, ...], PipelineCosts] = {}

    @cached_property
    def context(self) -> ContextSeconds:
        return ContextSeconds(self.model, self.prepared.context)

    @cached_property
    def divided(self) -> DividedCost:
        return DividedCost(self.model, self.prepared.compiled.divided, self.plan.offloading)

    def _sharing(self) -> Mapping[str, int]:
        """By node, how many pipelines send activations through its network cards; replicas run in step, so they send at
        the same time."""
        users: dict[str, set[int]] = defaultdict(set)
        ranks = self.network.ranks
        for p, pipeline in enumerate(self.plan.pipelines):
            for sender, receiver in boundaries(pipeline):
                sender_nodes, receiver_nodes = ({ranks[r].node for r in s.ranks} for s in (sender, receiver))
                if len(sender_nodes | receiver_nodes) > 1:
                    for node in sender_nodes | receiver_nodes:
                        users[node].add(p)
        return {node: len(pipelines) for node, pipelines in users.items()}

    def signature(self, pipeline: Pipeline) -> tuple[object, ...]:
        """Equal for pipelines that cost the same: chips, nodes up to renaming, sizes."""
        nodes: dict[str, int] = {}
        ranks = self.network.ranks
        rows: list[object] = [pipeline.micro_batch_size, pipeline.num_micro_batches]
        for stage in pipeline.stages:
            sizes = tuple(b - a for a, b in stage.chunks)
            rows.append((sizes, stage.embed, stage.head, stage.recompute, stage.optimizer, stage.kv, stage.dtype))
            rows.append((stage.weights, stage.activations))
            if self.model.model.moe is not None:
                rows.append((stage.layer_indices(), _local_groups(stage), _local_islands(stage, self.plan.islands)))
            for unit in stage.units:
                rows.append((unit.tp_split, unit.sequences, unit.tokens, unit.heads, unit.group))
                for rank in unit.ranks:
                    cluster_rank = ranks[rank]
                    node = nodes.setdefault(cluster_rank.node, len(nodes))
                    rows.append((cluster_rank.chip, cluster_rank.group, node, self.sharing.get(cluster_rank.node, 1)))
        return tuple(rows)

    def of(self, pipeline: Pipeline) -> PipelineCosts:
        key = self.signature(pipeline)
        if key not in self._priced:
            self._priced[key] = self._costs(pipeline)
        return self._priced[key]

    def _costs(self, pipeline: Pipeline) -> PipelineCosts:
        stage_seconds = [self._unit_seconds(stage) for stage in pipeline.stages]
        by_stage = list(zip(pipeline.stages, stage_seconds, strict=True))
        chunks = [_chunk_seconds(unit_seconds, stage) for stage, unit_seconds in by_stage]
        if self.plan.sharding_stages:
            chunks = [
                [self.divided.added(stage, c, seconds, unit_seconds, pipeline.num_micro_batches)
                 for c, seconds in enumerate(row)]
                for (stage, unit_seconds), row in zip(by_stage, chunks, strict=True)
            ]  # fmt: skip
        if any(stage.activations is not None for stage in pipeline.stages):
            from hetero_megatron.predictor.simulate.memory_saving_cost import OffloadCost

            offload = OffloadCost(self.model, self.plan.seq_length)
            chunks = [offload.added(s, x, row, self.divided.from_host(s)) for (s, row), x in zip(by_stage, chunks)]
        host: list[dict[str, float]] = [{} for _ in pipeline.stages]
        link, back, latency = [], [], []
        for s, (sender, receiver) in enumerate(boundaries(pipeline)):
            t = (s + 1) % len(pipeline.stages)
            flows = self.boundary(sender, receiver, pipeline.micro_batch_size)
            forward_price = self.network.exchange(flows, self.sharing)
            backward_price = self.network.exchange([(b, a, size) for a, b, size in flows], self.sharing)
            sent = self.network.busiest_host((a, b) for a, b, _ in flows)
            received = self.network.busiest_host((b, a) for a, b, _ in flows)
            for stage_id, kinds, host_seconds in ((s, ("SEND_F", "RECV_B"), sent), (t, ("RECV_F", "SEND_B"), received)):
                for kind, travel in zip(kinds, (forward_price, backward_price), strict=True):
                    host[stage_id][kind] = max(host[stage_id].get(kind, 0.0), host_seconds)
                    if self.model.options.blocking:
                        host[stage_id][kind] += travel.seconds + travel.latency
            if self.model.options.blocking:
                forward_price = backward_price = ExchangePrice({}, 0.0)
            link.append(forward_price.seconds)
            back.append(backward_price.seconds)
            latency.append(max(forward_price.latency, backward_price.latency))
        forward, backward, weight, extra = zip(*(map(sum, zip(*row)) for row in chunks))
        costs = Costs(forward, backward, link, link_back=back, latency=latency, host=host, weight=weight, split=extra)
        if pipeline.chunks > 1:
            costs = replace(costs, chunks=chunks)
        return PipelineCosts(costs, tuple(stage_seconds))

    def _unit_seconds(self, stage: Stage) -> UnitSeconds:
        some, (model, length) = 0 < stage.recomputed < stage.num_layers, (self.model.model, self.plan.seq_length)
        return with_first_layers(self._slowest, stage, model, length) if some else self._slowest(stage)

    def _slowest(self, stage: Stage) -> UnitSeconds:
        """Per part, the time of the slowest rank of the stage: collectives and boundaries make the others wait."""
        if self.model.model.moe is None or not stage.num_layers:
            return self._slowest_of(stage)
        spec = self.model.model
        kinds = layer_kinds(spec, stage.layer_indices(), self.model.options.routing)
        # The first one's head counts, with modules that predict further tokens, whose layers are like the model's last.
        kinds.sort(key=lambda kind: kind[0] != (spec.layer(spec.num_layers).mlp == "moe"))
        seconds_of_kinds = [(self._slowest_of(stage, moe, popular), count) for moe, popular, count in kinds]
        return _mean_layer(seconds_of_kinds)

    def _slowest_of(self, stage: Stage, moe: bool = False, popular: Popularity | None = None) -> UnitSeconds:
        """The same where all layers are of one kind. Ranks that exchange routed tokens wait for each other before and
        after their experts."""
        spec = self.model.model
        loads = None if spec.moe is None else layer_loads(spec, stage, moe, popular, self.plan.islands)
        routed = (0.0, 0.0) if loads is None else self._routed_seconds(stage, loads)
        by_rank = {
            unit.ranks[t]: self._rank_seconds(stage, unit, t, loads=loads, routed=routed, moe=moe)
            for unit in stage.units for t in range(unit.tp)
        }  # fmt: skip
        if not moe or spec.moe is None:
            return slowest(list(by_rank.values()))
        groups = expert_groups(stage, spec.moe.num_experts)
        return slowest([_group_layer([by_rank[r] for r in g.ranks]) for g in groups])

    def computing(self, stage: Stage, unit: Unit, t: int, again: int = 0) -> float:
        """Seconds per micro-batch that TP rank ``t`` computes, without exchanges of its TP group, but with those of
        context groups, which overlap with compute. ``again``: how many times forward runs besides."""
        seconds = self._rank_seconds(stage, unit, t, exchanges=False)
        forward, backward = seconds.total(stage.num_layers, stage.recomputed, stage.embed, stage.head)
        return (1 + again) * forward + backward

    def stage_seconds(self, stage: Stage) -> float:
        """Forward and backward of a micro-batch on the stage, with the exchanges of its ranks."""
        return sum(self._unit_seconds(stage).total(stage.num_layers, stage.recomputed, stage.embed, stage.head))

    def jitter(self, rank: int) -> float:
        """Standard deviation of one second of compute on the rank."""
        return self.model.chip_rates(self.network.ranks[rank].chip).jitter

    def _routed_seconds(self, stage: Stage, loads: LayerLoads) -> tuple[float, float]:
        """(forward, backward) seconds of exchanging routed tokens in one layer: hop after hop, after its counts."""
        spec = self.model.model
        forward = backward = 0.0
        relayed = {rank for hop in loads.hops[1:] for group in hop.groups for rank in group}
        for number, hop in enumerate(loads.hops):
            moves = hop.moves
            if not moves:
                continue
            out, back, d_out, d_back = (
                self.network.groups_exchange(
                    ((a, b, n * width) if way else (b, a, n * width) for (a, b), n in moves.items()), hop.groups
                )[0]
                for way, width in zip((True, False, True, False), token_bytes(spec, self.model.item), strict=True)
            )
            # How many tokens come, and how many rows for each expert of the receiver; one that passes them on has none.
            numbers = {b: 1 + (loads.of[b].experts if number or b not in relayed else 0) for _, b in moves}
            counts = self.network.groups_exchange(((a, b, INDEX * numbers[b]) for a, b in moves), hop.groups)[0]
            forward, backward = forward + counts + out + back, backward + d_out + d_back
        return forward, backward

    def _mean_load(self, stage: Stage, rank: int) -> ExpertLoad | None:
        if self.model.model.moe is None:
            return None
        routing = self.model.options.routing
        return mean_loads(self.model.model, stage, stage.layer_indices(), routing, self.plan.islands)[rank]

    def _rank_seconds(
        self, stage: Stage, unit: Unit, t: int, exchanges: bool = True, loads: LayerLoads | None = None,
        routed: tuple[float, float] = (0.0, 0.0), moe: bool = False,
    ) -> UnitSeconds:  # fmt: skip
        """``loads``: of the layers that are mixtures of experts (``moe``) or of those that are not; None: of the
        stage's average layer."""
        model, rank = self.model, unit.ranks[t]
        load = self._mean_load(stage, rank) if loads is None else loads.of[rank]
        if has_context(stage, self.plan.seq_length):
            return self.context.unit_seconds(stage, unit, t, load, routed)
        rows = unit.sequences[1] - unit.sequences[0]
        size = rows * self.plan.seq_length * model.model.hidden_size * model.item
        collective, host_seconds = self.network.tp_exchange(unit.ranks, size) if exchanges else (0.0, 0.0)
        chip = self.network.ranks[unit.ranks[t]].chip
        share = work_share(model, unit.tp_split, t)
        layers = [i for i in stage.layer_indices() if loads is None or (model.model.layer(i).mlp == "moe") == moe]
        stage_spec = layers_alone(model.model, layers)
        operators = model.operators(chip, model.computes_in_fp8(stage), stage_spec)
        kind, chunked = stage.recompute.kind, model.head_in_chunks(stage)
        return model.unit_seconds(operators, share, rows, collective, kind, host_seconds, load, routed, chunked)

    def boundary(self, up: Stage, down: Stage, size: int) -> list[Flow]:
        """(source, destination, bytes) of the activations of one micro-batch, from the runtime's own transfer."""
        ends = (tuple((u.tp, u.sequences, u.tokens) for u in stage.units) for stage in (up, down))
        key = (*ends, tuple(up.ranks.index(r) if r in up.ranks else -1 for r in down.ranks), size)
        transfers = self.prepared.boundaries
        if key not in transfers:
            seq = self.plan.seq_length
            moves = transfer(_layout(up, size, seq), _layout(down, size, seq))
            index = {r: i for i, r in enumerate(down.ranks)}
            local = {r: i for i, r in enumerate(up.ranks)}
            transfers[key] = tuple((local[m.src], index[m.dst], m.box.size) for m in moves.pieces)
        width = self.model.model.hidden_size * self.model.item
        if self.model.options.whole_transfers and [u.tp for u in up.units] == [u.tp for u in down.units]:
            rows = {r: u for u in up.units for r in u.ranks}
            return [(a, b, rows[a].micro_batch_tokens * width) for a, b in zip(up.ranks, down.ranks)]
        return [(up.ranks[i], down.ranks[j], n * width) for i, j, n in transfers[key]]


def _local_groups(stage: Stage) -> tuple[object, ...]:
    """How its ranks divide the experts, with their places in the stage instead of their numbers."""
    places = {rank: i for i, rank in enumerate(stage.ranks)}
    return tuple(
        tuple((tuple(places[r] for r in m.ranks), m.experts, m.split) for m in group.members) for group in stage.experts
    )


def _local_islands(stage: Stage, islands: Islands) -> Islands:
    """Of a stage that divides the experts, by which its tokens travel; ranks as in :func:`_local_groups`."""
    places = {rank: i for i, rank in enumerate(stage.ranks)}
    stage_islands = split_by_island(islands, stage.ranks) if islands and stage.experts else ()
    return tuple(tuple(places[r] for r in ranks) for ranks in stage_islands)


def boundaries(pipeline: Pipeline) -> list[tuple[Stage, Stage]]:
    """Stages between which activations move; with several chunks also from the last one to the first."""
    stages = pipeline.stages
    wrapped = [(stages[-1], stages[0])] if pipeline.chunks > 1 and len(stages) > 1 else []
    return [*zip(stages, stages[1:]), *wrapped]


def _chunk_seconds(part: UnitSeconds, stage: Stage) -> list[ChunkSeconds]:
    """Of each of the stage's runs of layers; the first ones are recomputed where only some are."""
    chunks, recomputed, last = [], stage.recomputed, len(stage.chunks) - 1
    for c, (a, b) in enumerate(stage.chunks):
        full = min(recomputed, b - a)
        recomputed -= full
        head = stage.head and c == last
        seconds = part.total(b - a, full, stage.embed and c == 0, head)
        chunks.append(ChunkSeconds(*seconds, *part.split(b - a, head)))
    return chunks


def slowest(ranks: Sequence[UnitSeconds]) -> UnitSeconds:
    """Of each part the most that one of the ranks takes."""
    largest: dict[str, Any] = {}
    for name in vars(ranks[0]):
        rank_values = [getattr(rank, name) for rank in ranks]
        largest[name] = tuple(map(max, zip(*rank_values))) if isinstance(rank_values[0], tuple) else max(rank_values)
    return UnitSeconds(**largest)


def _group_layer(ranks: Sequence[UnitSeconds]) -> UnitSeconds:
    """The slowest of each part: of experts, and of what comes before and after their exchanges."""
    worst, outside = slowest(ranks), [(u.layer[0] - u.experts[0], u.layer[1] - u.experts[1]) for u in ranks]
    forward, backward = (max(seconds) + experts for seconds, experts in zip(zip(*outside), worst.experts))
    return replace(worst, layer=(forward, backward))


def _mean_layer(kinds: Sequence[tuple[UnitSeconds, int]]) -> UnitSeconds:
    """Of (seconds with layers of one kind, how many of these): an average layer, and the rest of the first kind."""
    total = sum(count for _, count in kinds)

    def mean(part: Callable[[UnitSeconds], tuple[float, float]]) -> tuple[float, float]:
        pairs = [(part(unit), count) for unit, count in kinds]
        return sum(a * n for (a, _), n in pairs) / total, sum(b * n for (_, b), n in pairs) / total

    return replace(
        kinds[0][0], layer=mean(lambda u: u.layer), layer_split=mean(lambda u: u.layer_split),
        experts=mean(lambda u: u.experts),
    )  # fmt: skip


def _layout(stage: Stage, size: int, seq_length: int) -> Layout:
    """The stage's activations over (sequence, token); the hidden dimension is never split."""
    boxes: dict[int, tuple[Box, ...]] = {}
    for unit, (row, end) in zip(stage.units, unit_sequences(stage, size), strict=True):
        for t, rank in enumerate(unit.ranks):
            boxes[rank] = tuple(Box((row, a), (end, b)) for a, b in token_intervals(unit, t))
    return Layout((size, seq_length), boxes)


def work_share(model: CostModel, tp_split: tuple[int, ...], t: int) -> float:
    """Share of a layer's FLOPs that TP rank ``t`` computes; exactly 1/tp where the axes divide evenly."""
    spec = model.model
    heads, columns = heads_and_columns(spec, tp_split, t)
    if heads == columns:
        return heads
    matrices = layer_matmul_flops(spec) * model.seq_length
    core = layer_attention_flops(spec, mean_attention_pairs(spec, model.seq_length))
    ffn = len(spec.mlp_projections) * 2 * spec.hidden_size * mlp_columns(spec) * model.seq_length
    return (columns * ffn + heads * (matrices - ffn + core)) / (matrices + core)


def with_dtypes(plan: Plan, costs: CostModel) -> Plan:
    """The plan with ``dtype`` on every stage that has layers: ``fp8`` where its chips and cuts allow it and it makes no
    rank slower (as :meth:`CostModel.in_fp8` has it for templates), else that of the run. Without fp8 the plan itself.
    """
    if costs.options.fp8 is None:
        return plan

    def with_dtype(stage: Stage) -> Stage:
        if not stage.num_layers:
            return stage
        return replace(stage, dtype="fp8" if _pays(stage, plan.seq_length, costs) else costs.dtype)

    return plan.with_stages(with_dtype)


def without_fp8(plan: Plan, dtype: str) -> Plan:
    """The plan whose stages all say that they compute in the ``dtype`` of the run."""
    return plan.with_stages(lambda stage: replace(stage, dtype=dtype) if stage.num_layers else stage)


def _pays(stage: Stage, seq_length: int, costs: CostModel) -> bool:
    fp8 = costs.options.fp8
    assert fp8 is not None
    chips = {rank: costs.cluster.ranks[rank].chip for rank in stage.ranks}
    if any(chip not in costs.rates.fp8 for chip in chips.values()):
        return False
    return stage_fits(stage, seq_length, costs.model, fp8) and all(
        costs.fp8_pays(chips[rank], work_share(costs, unit.tp_split, t), unit.sequences[1] - unit.sequences[0], length)
        for unit in stage.units
        if (length := unit.num_tokens)
        for t, rank in enumerate(unit.ranks)
    )
