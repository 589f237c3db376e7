"""What saving memory adds to the forwards and backwards of a stage: gathering divided weights and summing up their
gradients, copies of activations to host memory and back, and recomputing first layers that are not like the others.

A step of a chunk (embedding, layer, head) gathers while the step before it computes, and its gradients travel while the
next one does; packing and adding up take the host, or the compute stream, in any case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero_megatron.plans import Stage
from hetero_megatron.plans.buckets import Bucket
from hetero_megatron.plans.canonical import Recompute
from hetero_megatron.plans.islands import hop_elements
from hetero_megatron.plans.memory.micro_batches import host_layers
from hetero_megatron.predictor.cost.layer_cost import CostModel, UnitSeconds
from hetero_megatron.predictor.cost.link_model import waits_coming, waits_leaving
from hetero_megatron.predictor.cost.rates import ChipRates
from hetero_megatron.schedule.simulate import ChunkSeconds
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import layers_cost_unlike, layers_differ

Step = int | str


@dataclass(frozen=True)
class PartSeconds:
    """Of the weights of a step: (on links, on the slowest rank's host) to gather them, and to sum up gradients; what of
    a gather is on a chip's link to its host."""

    gather: tuple[float, float] = (0.0, 0.0)
    reduce: tuple[float, float] = (0.0, 0.0)
    from_host: float = 0.0

    def __add__(self, other: PartSeconds) -> PartSeconds:
        (a, b), (c, d) = self.gather, self.reduce
        gather, reduce = (a + other.gather[0], b + other.gather[1]), (c + other.reduce[0], d + other.reduce[1])
        return PartSeconds(gather, reduce, self.from_host + other.from_host)


class DividedCost:
    """Of one plan. ``buckets``: of its divided weights; ``offloading``: ranks that keep theirs in host memory."""

    def __init__(self, model: CostModel, buckets: Sequence[Bucket], offloading: Collection[int]) -> None:
        self.model, self._offloading = model, offloading
        priced: dict[object, PartSeconds] = {}
        self._parts: dict[int, dict[Step, PartSeconds]] = defaultdict(lambda: defaultdict(PartSeconds))
        for bucket in buckets:
            assert bucket.segment is not None
            key = (bucket.layout_key, bucket.in_bytes, bucket.trained)
            if key not in priced:
                priced[key] = self._price(bucket)
            parts = self._parts[bucket.ranks[0]]
            parts[bucket.segment] += priced[key]

    def _price(self, bucket: Bucket) -> PartSeconds:
        model, chips, item = self.model, self.model.cluster.ranks, 1 if bucket.in_bytes else self.model.item
        moves = {pair: n for pair, n in hop_elements(bucket.hops[0]).items() if pair[0] != pair[1]}
        owned_elements = dict(zip(bucket.ranks, bucket.counts()[1].tolist(), strict=True))
        gives, takes = defaultdict[int, int](int), defaultdict[int, int](int)
        for (src, dst), count in moves.items():
            gives[src] += count
            takes[dst] += count
        rates = {rank: model.chip_rates(chips[rank].chip) for rank in bucket.ranks}
        packed = max(
            (owned_elements[r] * (1 if bucket.dense else len(bucket.ranks)) + (0 if bucket.dense else gives[r])) * item
            * x.pack + x.exchange_seconds for r, x in rates.items()
        )  # fmt: skip
        added = max(
            _added(x, takes[r], gives[r], owned_elements[r], bucket) * model.wide + x.exchange_seconds
            for r, x in rates.items()
        )
        back = model.links.exchange((b, a, n * item) for (a, b), n in moves.items())
        messages = model.links.busiest_host(moves)
        host = {r: n / model.host_rate(chips[r].chip) for r, n in owned_elements.items() if r in self._offloading}
        # Rows come from host memory before they go to others; sums go there while the next ones travel.
        from_host = item * max(host.values(), default=0.0)
        gather = back.seconds + back.latency + from_host, packed + messages
        if not bucket.trained:
            return PartSeconds(gather, from_host=from_host)
        reduced = model.links.exchange((a, b, n * model.wide) for (a, b), n in moves.items())
        links = max(reduced.seconds + reduced.latency, model.wide * max(host.values(), default=0.0))
        return PartSeconds(gather, (links, added + messages + self._added_in_host(owned_elements)), from_host)

    def _added_in_host(self, owned_elements: Mapping[int, int]) -> float:
        """Seconds in which the slowest host adds up gradients, beside its other chips: two are read, one is written."""
        group_of, item = self.model.cluster.group_of, 3 * self.model.wide / self.model.options.host_memory_bandwidth
        hosts = (n * group_of(r).chips_per_node for r, n in owned_elements.items() if r in self._offloading)
        return item * max(hosts, default=0)

    def _parts_of(self, stage: Stage) -> Mapping[Step, PartSeconds]:
        return next((self._parts[rank] for rank in stage.ranks if rank in self._parts), {})

    def from_host(self, stage: Stage) -> Mapping[Step, float]:
        """By step, seconds in which a backward brings weights from host memory."""
        return {step: part.from_host for step, part in self._parts_of(stage).items()}

    def added(
        self, stage: Stage, number: int, chunk_seconds: ChunkSeconds, part: UnitSeconds, micro_batches: int
    ) -> ChunkSeconds:
        """Seconds of a chunk with what it gathers and sums up; ``part``: of the stage."""
        if stage.weights is None:
            return chunk_seconds
        seconds_of_step = self._parts_of(stage)
        a, b = stage.chunks[number]
        steps: list[tuple[Step, tuple[float, float]]] = [(i, part.layer) for i in range(a, b)]
        steps = [("embed", part.embed), *steps] if stage.embed and number == 0 else steps
        if stage.head and number + 1 == len(stage.chunks):
            steps.append(("head", part.head))
        prices = [seconds_of_step.get(step, PartSeconds()) for step, _ in steps]
        gather, overlaps = stage.weights.gather, stage.weights.gather == "layer"
        forward = _exposed([p.gather for p in prices], [s[0] if overlaps else 0.0 for _, s in steps])
        none = (0.0, 0.0)
        again = [p.gather if step != "embed" else none for p, (step, _) in zip(prices, steps, strict=True)]
        if gather == "step" or not stage.weights.reshard_after_forward:
            again = [none] * len(steps)
        computing = [seconds[1] for _, seconds in steps]
        gathers = _exposed(again[::-1], computing[::-1] if overlaps else [0.0] * len(steps))
        # Gradients of a step travel while the one before it in the model has its backward, beside the gather for the
        # one before that.
        links = [0.0, *(seconds for seconds, _ in again)] if overlaps else [0.0] * len(steps)
        room = [max(0.0, compute - busy) for compute, busy in zip(computing, links, strict=False)]
        sums = _exposed([p.reduce for p in prices], room)
        return chunk_seconds._replace(
            forward=chunk_seconds.forward + (forward / micro_batches if gather == "step" else forward),
            backward=chunk_seconds.backward + gathers + sums, weight=chunk_seconds.weight + sums,
        )  # fmt: skip


def _exposed(prices: Sequence[tuple[float, float]], computing: Sequence[float]) -> float:
    """Seconds that a row of (links, host) adds to steps that compute so long, each under way during the one before."""
    hidden = [0.0, *computing][: len(prices)]
    return sum(max(0.0, links - compute) + host for (links, host), compute in zip(prices, hidden, strict=True))


def _added(rates: ChipRates, taken: int, given: int, owned: int, bucket: Bucket) -> float:
    """Seconds per byte of an element in which a rank adds up what came of a bucket's gradients, and that to the sums of
    the micro-batches before. Of more than two ranks that hold the same, all that came is read once."""
    if bucket.dense:
        summed = taken * rates.add if len(bucket.ranks) == 2 else (taken + 2 * owned) / 2 * rates.pack
        return summed + owned * rates.add
    return (taken + owned) * rates.add + given * rates.pack


class OffloadCost:
    """Of the activations in host memory of one plan."""

    def __init__(self, model: CostModel, seq_length: int) -> None:
        self.model, self.seq_length = model, seq_length

    def _copies(self, stage: Stage) -> Sequence[Mapping[int, Sequence[float]]]:
        """By chunk and rank, seconds of the copies of each layer."""
        model = self.model
        rates = {rank: model.host_rate(model.cluster.ranks[rank].chip) for rank in stage.ranks}
        options = model.options
        bytes_of = host_layers(stage, model.model, self.seq_length, model.item, options.routing, options.fp8)
        return [
            {rank: [size / rates[rank] for size in chunks[c]] for rank, chunks in bytes_of.items()}
            for c in range(len(stage.chunks))
        ]

    def added(
        self, stage: Stage, chunk_seconds: Sequence[ChunkSeconds], part: UnitSeconds, weights: Mapping[Step, float]
    ) -> list[ChunkSeconds]:
        """Seconds of the stage's chunks with the copies of its slowest rank; ``part``: of the stage; ``weights``: by
        layer, seconds in which backward brings its weights on the same link."""
        offload, out, recomputed = stage.activations, list(chunk_seconds), stage.recomputed
        if offload is None:
            return out

        def beside(row: Sequence[float], first: int) -> list[float]:
            return [x and x + weights.get(first + i, 0.0) for i, x in enumerate(row)]

        for c, (copies, (a, b)) in enumerate(zip(self._copies(stage), stage.chunks, strict=True)):
            head = part.head[1] if stage.head and c + 1 == len(stage.chunks) else 0.0
            backward = [part.layer[1] + (part.layer[0] + part.again if i < recomputed else 0.0) for i in range(b - a)]
            recomputed = max(recomputed - (b - a), 0)
            ahead, rows = offload.ahead, copies.values()
            leaving = max((waits_leaving(row, part.layer[0], ahead) for row in rows), default=0.0)
            coming = max((waits_coming(beside(row, a), backward, ahead, head) for row in rows), default=0.0)
            out[c] = out[c]._replace(forward=out[c].forward + leaving, backward=out[c].backward + coming)
        return out


def with_first_layers(
    seconds_of: Callable[[Stage], UnitSeconds], stage: Stage, spec: ModelSpec, length: int
) -> UnitSeconds:
    """``seconds_of(stage)``, with ``again`` of the first layers, where these alone are recomputed."""
    seconds, count = seconds_of(stage), stage.recomputed
    if not layers_differ(spec) and not layers_cost_unlike(spec, length):
        return seconds
    runs, missing = [], count
    for a, b in stage.layers:
        runs.append((a, min(b, a + missing)))
        missing -= runs[-1][1] - a
    first = replace(stage, layers=tuple(runs), recompute=Recompute())
    return replace(seconds, again=seconds_of(first).layer[0] - seconds.layer[0])
