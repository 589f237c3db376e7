"""Seconds of a concrete context stage, from its own exchanges and ring rounds.

A group is as fast as its slowest member. The ring is timed round by round as the runtime runs it: own blocks first,
then wait for the round's blocks while the next ones are already posted. Messages that share a link or a node's network
cards are serialised. The scheduler's closed form (``context.cost``) agrees for nested zigzag layouts; this also prices
explicit intervals, contiguous order, causal blocks that nobody needs, and TP members with unequal shares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial

from hetero_megatron.plans import Stage, Unit
from hetero_megatron.plans.context_plan import StageContext, stage_contexts
from hetero_megatron.predictor.cost.layer_cost import CostModel, UnitSeconds
from hetero_megatron.predictor.cost.link_model import ExchangePrice, Port
from hetero_megatron.predictor.cost.operator_cost import heads_and_columns
from hetero_megatron.predictor.simulate.member_cost import MemberCost
from hetero_megatron.predictor.simulate.ring_traffic import LayerTraffic, Passage, Volumes
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.expert_load import ExpertLoad
from hetero_megatron.spec.flops import exchanges_of_head, layers_alone, mean_attention_pairs
from hetero_megatron.utils.cached_method import cached_method

Pair = tuple[float, float]  # forward, backward
ByGroup = dict[int, float]


class ContextSeconds:
    """Prices of context stages; ``traffic``: cache by stage, window and chunk, added to."""

    def __init__(self, model: CostModel, traffic: dict[tuple[object, ...], list[LayerTraffic]] | None = None) -> None:
        self.model, self.network = model, model.links
        self._traffic = {} if traffic is None else traffic

    @cached_property
    def members(self) -> MemberCost:
        return MemberCost(self.model)

    def traffic(self, stage: Stage, window: int | None = None, chunk: int | None = None) -> list[LayerTraffic]:
        """One per inner replica, of a layer with this window and these chunks."""
        key = (stage, window, chunk)
        if key not in self._traffic:
            contexts = stage_contexts(self.model.model, stage, self.model.seq_length)
            self._traffic[key] = [LayerTraffic(context, window, chunk) for context in contexts]
        return self._traffic[key]

    def unit_seconds(
        self, stage: Stage, unit: Unit, t: int, load: ExpertLoad | None = None, routed: Pair = (0.0, 0.0)
    ) -> UnitSeconds:
        """Times of one rank's parts; the layer's time is the stage's, because groups wait for each other's keys and
        values. ``load``, ``routed``: of its routed experts, as for :meth:`CostModel.unit_seconds`."""
        model, rows = self.model, unit.sequences[1] - unit.sequences[0]
        spec = layers_alone(model.model, tuple(stage.layer_indices()))
        operators = model.operators(self.network.ranks[unit.ranks[t]].chip, model.computes_in_fp8(stage), spec)
        columns = heads_and_columns(model.model, unit.tp_split, t)[1]
        collective = operators.exchange(columns, rows, unit.num_tokens, self.members.tp_collective(unit)[0])
        embed, head = (
            f(columns, rows, unit.num_tokens) if unit.num_tokens else (0.0, 0.0)
            for f in (operators.embed, partial(operators.head, chunked=model.head_in_chunks(stage)))
        )
        layer, experts, with_head = self.layer(stage), (0.0, 0.0), exchanges_of_head(model.model)
        if load is not None:
            beyond_plain = operators.beyond_plain(columns, rows, unit.num_tokens, load)
            moe, experts_alone = load.layers, operators.experts(load)
            layer = layer[0] + beyond_plain[0] + moe * routed[0], layer[1] + beyond_plain[1] + moe * routed[1]
            experts = moe * experts_alone[0], moe * experts_alone[1]
        return UnitSeconds(
            layer=layer,
            experts=experts,
            embed=(embed[0] + collective[0], embed[1] + collective[1]),
            head=(head[0] + with_head * collective[0], head[1] + with_head * collective[1]),
            action=operators.rates.action_seconds,
        )

    @cached_method
    def layer(self, stage: Stage) -> Pair:
        """(forward, backward) seconds of an average layer, 0 without any; backward includes recompute of a part of
        it."""
        spec, kinds = self.model.model, dict[tuple[object, ...], list[int]]()
        for i in stage.layer_indices():
            kind = spec.layer(i)
            limits = (kind.window, kind.chunk) if kind.mixer == "attention" else ()
            kinds.setdefault((kind.mixer, *limits), []).append(i)
        seconds = [(len(layers), self._layer_of(stage, layers)) for layers in kinds.values()]
        total = max(1, stage.num_layers)
        forward, backward = (sum(count * pair[way] for count, pair in seconds) / total for way in (0, 1))
        return forward, backward

    def _layer_of(self, stage: Stage, layers: Sequence[int]) -> Pair:
        """The same of some layers that are alike: with linear attention, with attention to as many tokens, or of an MLP
        alone."""
        kind, spec, layer_seconds = self.model.model.layer(layers[0]), layers_alone(self.model.model, layers), []
        for traffic, rows in zip(self.traffic(stage, kind.window, kind.chunk), stage.replicas, strict=True):
            units = [u for u in stage.units if u.sequences == rows]
            if kind.mixer != "attention":
                from hetero_megatron.predictor.simulate.member_cost import linear_layer_seconds

                layer_seconds.append(linear_layer_seconds(self.members, stage, traffic.context, units, spec))
            else:
                layer_seconds.append(_Layer(self, traffic, units, stage, spec).seconds(stage.recompute.kind))
        return max(f for f, _ in layer_seconds), max(b for _, b in layer_seconds)


class _Layer:
    def __init__(
        self, prices: ContextSeconds, traffic: LayerTraffic, units: list[Unit], stage: Stage, spec: ModelSpec
    ) -> None:
        self.prices, self.traffic, rows = prices, traffic, units[0].sequences[1] - units[0].sequences[0]
        self.context: StageContext = traffic.context
        self.unit_bytes = spec.head_dim * rows
        self.linear: dict[int, Pair] = {}  # by rank: without attention, TP collectives included
        self.per_pair: dict[int, Pair] = {}  # by group: of the slowest member's heads
        self.floor: Pair = (0.0, 0.0)
        for unit in units:
            for t, rank in enumerate(unit.ranks):
                operators, self.linear[rank], ratio = prices.members.outside_core(stage, unit, t, spec)
                floor = prices.members.floor(operators, unit)
                self.floor = (max(self.floor[0], floor[0]), max(self.floor[1], floor[1]))
                # Of the layers that the rates are of: an average one's, where kinds were not measured apart.
                mean_pairs = mean_attention_pairs(operators.model, self.context.seq_length)
                heads = self.context.member(rank).computed.q_heads
                share = (heads[1] - heads[0]) / spec.num_heads
                core = operators.attention(share, rows, self.context.seq_length) if share else (0.0, 0.0)
                slowest = self.per_pair.get(unit.group, (0.0, 0.0))
                pair_seconds = (core[0] * ratio[0] / mean_pairs, core[1] * ratio[1] / mean_pairs)
                self.per_pair[unit.group] = (max(slowest[0], pair_seconds[0]), max(slowest[1], pair_seconds[1]))

    def seconds(self, recompute: str) -> Pair:
        item = self.prices.model.item
        groups = self.traffic.groups
        enter = self._exchanges(self.traffic.enter, item, False)
        leave = self._exchanges(self.traffic.leave, item, False)
        enter_back = self._exchanges(self.traffic.enter, item, True)
        leave_back = self._exchanges(self.traffic.leave, item, True)
        forward = self._attention({g: self._slowest(g, 0) + enter[g] for g in groups}, False)
        backward = self._attention({g: self._slowest(g, 1) + leave_back[g] for g in groups}, True)
        total = max(max(forward[g] + leave[g] for g in groups), self.floor[0])
        total_back = max(max(backward[g] + enter_back[g] for g in groups), self.floor[1])
        if recompute == "selective":
            total_back += max(self._attention({g: enter[g] for g in groups}, False).values())
        return total, total_back

    def _slowest(self, group: int, way: int) -> float:
        return max(self.linear[m.rank][way] for m in self.traffic.groups[group].members)

    def _exchanges(self, flows: Sequence[Volumes], item: int, back: bool) -> ByGroup:
        """Seconds of the head exchange of each group; exchanges of different groups share network cards."""
        prices: list[tuple[ExchangePrice, float]] = []
        ports: dict[Port, float] = defaultdict(float)
        for volumes in flows:
            price = self._price(volumes, item, "all_to_all", back)
            for port, seconds in price.ports.items():
                ports[port] += seconds
            prices.append((price, price.latency + self._host_seconds(volumes)))
        out = {}
        for group, place in self.traffic.exchange_of.items():
            price, latency = prices[place]
            out[group] = max([price.link, *(ports[p] for p in price.ports), 0.0]) + latency
        return out

    def _price(self, volumes: Volumes, item: int, collective: str | None, back: bool = False) -> ExchangePrice:
        size = item * self.unit_bytes
        rows = [(b, a, float(n * size)) if back else (a, b, float(n * size)) for (a, b), n in volumes.items()]
        return self.prices.network.exchange(rows, collective=collective)

    def _host_seconds(self, volumes: Volumes) -> float:
        """Host seconds of the rank with the most messages at either end."""
        return self.prices.network.busiest_host(ends for a, b in volumes for ends in ((a, b), (b, a)))

    def _attention(self, start: ByGroup, backward: bool) -> ByGroup:
        """Seconds at which each group has its output (or gradients), given when it starts."""
        work = {g: [p * self.per_pair[g][backward] for p in row] for g, row in self.traffic.pairs.items()}
        if not self.traffic.ring:
            return {g: start[g] + sum(work[g]) for g in start}
        return _Ring(self.traffic, work, start, self._passage, self._post).run(backward)

    @cached_method
    def _passage(self, passage: Passage) -> ExchangePrice:
        item = self.prices.model.wide if passage.gradients else self.prices.model.item
        return self._price(self.traffic.volumes(passage), item, None)

    @cached_method
    def _post(self, passage: Passage) -> float:
        return self._host_seconds(self.traffic.volumes(passage))


class _Ring:
    """The rounds of one pass; ``now``: clock of each group in seconds."""

    def __init__(
        self,
        traffic: LayerTraffic,
        work: Mapping[int, list[float]],
        start: ByGroup,
        price: Callable[[Passage], ExchangePrice],
        post: Callable[[Passage], float],
    ) -> None:
        self.traffic, self.work, self.now = traffic, work, dict(start)
        self.price, self.post = price, post
        self.free: dict[Port, float] = defaultdict(float)

    def run(self, backward: bool) -> ByGroup:
        schedule = self.traffic.schedule
        assert schedule is not None
        now, rounds = self.now, len(schedule.rounds)
        ready = self._send(self.traffic.keys_of(0))
        summed: ByGroup = {}
        for t in range(-1, rounds):
            for g in now:
                now[g] += sum(self.work[g][b] for b in schedule.local_blocks[g][t + 1])
            if t < 0:
                continue
            self._wait(ready)
            ready = self._send(self.traffic.keys_of(t + 1))
            for hop in schedule.rounds[t]:
                now[hop.to] += self.work[hop.to][hop.block]
            if backward:
                self._wait(summed)
                summed = self._send(self.traffic.gradients_of(t))
        self._wait(ready)
        self._wait(summed)
        return now

    def _wait(self, ready: ByGroup) -> None:
        for g, ready_at in ready.items():
            self.now[g] = max(self.now[g], ready_at)

    def _send(self, passages: Iterable[Passage]) -> ByGroup:
        """Post messages; returns, by group, the seconds at which both sides have completed them."""
        posted = list(passages)
        for passage in posted:
            for g in (passage.source, passage.to):
                self.now[g] += self.post(passage)
        ready: ByGroup = {}
        for passage in posted:
            price = self.price(passage)
            ends = (self.now[passage.source], self.now[passage.to])
            begin = max([*ends, *(self.free[port] for port in price.ports)])
            for port, seconds in price.ports.items():
                self.free[port] = begin + seconds
            arrival = begin + price.seconds + price.latency
            for g in (passage.source, passage.to):
                ready[g] = max(ready.get(g, 0.0), arrival)
        return ready
