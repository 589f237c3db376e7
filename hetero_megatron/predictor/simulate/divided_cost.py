"""What gathering divided weights and summing up their gradients adds to the forwards and backwards of a stage.

A step of a chunk (embedding, layer, head) gathers while the step before it computes, and its gradients travel while the
next one does; packing and adding up take the host, or the compute stream, in any case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from hetero_megatron.plans import Stage
from hetero_megatron.plans.buckets import Bucket
from hetero_megatron.plans.islands import hop_elements
from hetero_megatron.predictor.cost.layer_cost import CostModel, UnitSeconds
from hetero_megatron.schedule.simulate import ChunkSeconds

Step = int | str


@dataclass(frozen=True)
class PartSeconds:
    """Of the weights of a step: (on links, on the slowest rank's host) to gather them, and to sum up gradients."""

    gather: tuple[float, float] = (0.0, 0.0)
    reduce: tuple[float, float] = (0.0, 0.0)

    def __add__(self, other: PartSeconds) -> PartSeconds:
        (a, b), (c, d) = self.gather, self.reduce
        return PartSeconds((a + other.gather[0], b + other.gather[1]), (c + other.reduce[0], d + other.reduce[1]))


class DividedCost:
    """Of one plan. ``buckets``: of its divided weights."""

    def __init__(self, model: CostModel, buckets: Sequence[Bucket]) -> None:
        self.model = model
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
            (takes[r] * x.add + (0 if bucket.dense else gives[r]) * x.pack) * model.wide
            + x.exchange_seconds for r, x in rates.items()
        )  # fmt: skip
        back = model.links.exchange((b, a, n * item) for (a, b), n in moves.items())
        gather = back.seconds + back.latency, packed
        if not bucket.trained:
            return PartSeconds(gather)
        reduced = model.links.exchange((a, b, n * model.wide) for (a, b), n in moves.items())
        return PartSeconds(gather, (reduced.seconds + reduced.latency, added))

    def added(
        self, stage: Stage, number: int, chunk_seconds: ChunkSeconds, part: UnitSeconds, micro_batches: int
    ) -> ChunkSeconds:
        """Seconds of a chunk with what it gathers and sums up; ``part``: of the stage."""
        if stage.weights is None:
            return chunk_seconds
        seconds_of_step = next((self._parts[rank] for rank in stage.ranks if rank in self._parts), {})
        a, b = stage.chunks[number]
        steps: list[tuple[Step, tuple[float, float]]] = [(i, part.layer) for i in range(a, b)]
        steps = [("embed", part.embed), *steps] if stage.embed and number == 0 else steps
        if stage.head and number + 1 == len(stage.chunks):
            steps.append(("head", part.head))
        prices = [seconds_of_step.get(step, PartSeconds()) for step, _ in steps]
        gather, overlaps = stage.weights.gather, stage.weights.gather == "layer"
        computing = [seconds[0] for _, seconds in steps]
        forward = _exposed([p.gather for p in prices], computing if overlaps else [0.0] * len(steps))
        back = [(p, seconds[1]) for p, (step, seconds) in zip(prices, steps, strict=True) if step != "embed"][::-1]
        backward = _exposed([p.gather for p, _ in back], [s if overlaps else 0.0 for _, s in back])
        if gather == "step":
            forward, backward = forward / micro_batches, 0.0
        elif not stage.weights.reshard_after_forward:
            backward = 0.0
        # Of a step's gradients, while the step before it in the model has its backward.
        sums = _exposed([p.reduce for p in prices], [seconds[1] for _, seconds in steps])
        return chunk_seconds._replace(
            forward=chunk_seconds.forward + forward,
            backward=chunk_seconds.backward + backward + sums,
            weight=chunk_seconds.weight + sums,
        )


def _exposed(prices: Sequence[tuple[float, float]], computing: Sequence[float]) -> float:
    """Seconds that a row of (links, host) adds to steps that compute so long, each under way during the one before."""
    hidden = [0.0, *computing][: len(prices)]
    return sum(max(0.0, links - compute) + host for (links, host), compute in zip(prices, hidden, strict=True))
