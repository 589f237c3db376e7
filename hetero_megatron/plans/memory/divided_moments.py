"""The moments of a step of a rank whose stage divides its weights, and the bytes alive in each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hetero_megatron.plans.buckets import IN_FLIGHT
from hetero_megatron.plans.canonical import Stage
from hetero_megatron.plans.memory.activations import ChunkMoments

Step = int | str  # of a micro-batch through a chunk: "embed", the number of a layer, "head"


class BucketBytes(NamedTuple):
    """Of a bucket's gradients on a rank: all of them; beside them what travels, and what there is while they are
    summed up; the sums that the rank owns."""

    held: int
    travels: int
    summing: int
    owned: int


class PartBytes(NamedTuple):
    """Of weights that are gathered at once: whole, and messages while they are gathered; ``buckets``: of their
    gradients, in the order in which they are sent."""

    whole: int = 0
    message: int = 0
    buckets: tuple[BucketBytes, ...] = ()


class ChunkSteps(NamedTuple):
    """A chunk of a rank: the steps of a forward, and bytes of activations.

    Attributes:
        used: by step, in the order of a forward, the parts whose weights it uses.
        activations: of a backward; None: no more is known of them than their most at any time; forward: in forward of
            each layer, more than it keeps.
        embedding: bytes of the gradient of the embedding beside its sum, before it is added up.
        brought: of what the head's backward brings of it, where they are one matrix.
    """

    used: Mapping[Step, tuple[Step, ...]]
    activations: ChunkMoments | None
    forward: tuple[int, ...] = ()
    embedding: int = 0
    brought: int = 0

    @property
    def passing(self) -> int:
        return 0 if self.activations is None else self.activations.passing

    def kept(self, left: int) -> int:
        """Bytes that are gone of what a micro-batch keeps, negative, when the first ``left`` layers are left."""
        if self.activations is None:
            return 0
        head, layers = self.activations.kept
        return self.activations.passing + self.activations.boundary - head - sum(layers[left:])

    def at(self, step: Step, forward: bool = False) -> int:
        """Bytes beside what a micro-batch keeps, at the worst moment of a step's backward or forward; with what the
        border between two layers holds."""
        if self.activations is None:
            return 0
        logits, head, layers, kept, passing, boundary = self.activations[:6]
        if step == "head":
            return passing + (logits + 2 * boundary if forward else head)
        if step == "embed":
            return self.kept(0) + (4 * boundary if forward else self.embedding)
        first = next(s for s in self.used if isinstance(s, int))
        assert isinstance(step, int) and isinstance(first, int)
        if forward:
            return self.kept(step - first + 1) + self.forward[step - first]
        return layers[step - first] - kept[0] + passing + boundary


class DividedMoments:
    """All that is alive beside what lasts, moment by moment.

    - Forward of a step: its weights, those of the next one with their messages, and gradients that the backward before
      has left under way.
    - Backward of a step: the same with the step before it, its own gradients, and buckets of the steps behind
      (:func:`under_way`).
    - Between two steps of a backward: a bucket is sent, or summed up, to make room for another one.

    Activations in each: what all micro-batches in flight keep, less what this one has given back or has not made yet.
    Sums of gradients are there from the first backward on, which in a step of one backward is bucket by bucket.

    Args:
        parts: of the rank. chunks: of the rank.
        held: bytes of activations that all micro-batches in flight keep at most.
        backwards: how many a step has.
    """

    def __init__(
        self, stage: Stage, parts: Mapping[Step, PartBytes], chunks: Sequence[ChunkSteps], held: int, backwards: int
    ) -> None:
        assert stage.weights is not None
        self._gather, self._reshard = stage.weights.gather, stage.weights.reshard_after_forward
        self._under_way, self._to_host = under_way(stage), stage.optimizer.offload
        self._parts, self._chunks, self._held, self._repeats = parts, chunks, held, backwards > 1
        self._owned = sum(bucket.owned for part in parts.values() for bucket in part.buckets)

    def most(self) -> int:
        """Most bytes at once, beside what lasts (the sums of gradients among it)."""
        before = self._left_under_way()
        peaks = [0]
        if self._gather == "step":  # before anything else
            peaks.append(self._whole(self._parts) + self._together([(part,) for part in self._parts]))
        for chunk in self._chunks:
            peaks += self._forward(chunk, before)
            peaks += self._backward(chunk, before)
        return max(peaks)

    def weights(self) -> int:
        """Most bytes of whole weights at once."""
        if not self._reshard or self._gather == "step":
            return self._whole(self._parts)
        if self._gather == "micro-batch":
            return max(self._whole(_all(chunk.used.values())) for chunk in self._chunks)
        return max(self._whole({*a, *b}) for chunk in self._chunks for a, b in pairwise(((), *chunk.used.values(), ())))

    @property
    def _by_layer(self) -> bool:
        """Whether weights go when their step is over."""
        return self._gather == "layer" and self._reshard

    def _whole(self, parts: Iterable[Step]) -> int:
        return sum(self._parts[p].whole for p in parts if p in self._parts)

    def _message(self, parts: Iterable[Step]) -> int:
        return sum(self._parts[p].message for p in parts if p in self._parts)

    def _together(self, rows: Sequence[Sequence[Step]]) -> int:
        """Bytes of messages of which one is under way while another one arrives."""
        return max((self._message({*a, *b}) for a, b in pairwise(((), *rows))), default=0)

    def _gathered(self, chunk: ChunkSteps, steps: Sequence[Step], now: int, backward: bool) -> tuple[int, int]:
        """(bytes of whole weights and of messages while the ``now``-th of some steps computes, while it and the one
        before it change)."""
        used, following = (chunk.used[steps[i]] if i < len(steps) else () for i in (now, now + 1))
        if self._gather == "step":
            return (self._whole(self._parts),) * 2
        if self._gather == "micro-batch":
            rows = [chunk.used[s] for s in steps]
            whole = self._whole(_all(rows))
            return whole, whole + (self._together(rows) if now == 0 else 0)
        if not self._reshard:
            everything = set(self._parts) - (set() if _tied(chunk) else {"embed"} if backward or now else set())
            coming = 0 if backward else self._message(following)
            return self._whole(everything) + coming, self._whole(everything)
        first = self._whole(used) + self._message(used) if now == 0 else 0
        return self._whole({*used, *following}) + self._message(following), first

    def _forward(self, chunk: ChunkSteps, before: Sequence[BucketBytes]) -> Iterator[int]:
        steps = list(chunk.used)
        layers = sum(isinstance(step, int) for step in steps)
        for now, step in enumerate(steps):
            computing, changing = self._gathered(chunk, steps, now, backward=False)
            lasting = self._held + _size(before) - (0 if self._repeats else self._owned)  # no sums before a backward
            yield lasting + computing + chunk.at(step, forward=True)
            done = min(now - ("embed" in chunk.used), layers)
            yield lasting + changing + chunk.kept(max(done, 0))

    def _backward(self, chunk: ChunkSteps, before: Sequence[BucketBytes]) -> Iterator[int]:
        steps = [step for step in reversed([*chunk.used]) if step != "embed"] or ["embed"]
        layers = sum(isinstance(step, int) for step in steps)
        base, under_way = self._held - (0 if self._repeats else self._owned), list(before)
        for now, step in enumerate(steps):
            last, left = now + 1 == len(steps), max(layers - now - ("head" not in chunk.used), 0)  # layers before it
            computing, changing = self._gathered(chunk, steps, now, backward=True)
            row, here = self._buckets(step), _held(self._buckets(step)) + chunk.brought
            if now == 0:
                yield base + _size(under_way) + changing + chunk.passing
            if step == "head":  # its weight has no gradient yet
                yield base + _size(under_way) + computing + chunk.at(step, forward=True)
            yield base + _size(under_way) + here + computing + chunk.at(step)
            if last and step != "embed" and ("embed" in chunk.used or _tied(chunk)):
                row, here = (*row, *self._buckets("embed")), here - chunk.brought + _held(self._buckets("embed"))
                yield base + _size(under_way) + here + computing + chunk.at("embed")
            between = chunk.kept(left) + (0 if last and self._by_layer else computing)
            for bucket in row:
                if len(under_way) == self._under_way:
                    oldest, ending = self._end_oldest(under_way)
                    yield base + ending + here + between
                    base += 0 if self._repeats else oldest.owned
                under_way.append(bucket)
                here -= bucket.held
                yield base + _size(under_way) + here + between
        while under_way:  # at the end of the step, when there are no activations
            oldest, ending = self._end_oldest(under_way)
            yield base - self._held + chunk.passing + ending
            base += 0 if self._repeats else oldest.owned

    def _end_oldest(self, row: list[BucketBytes]) -> tuple[BucketBytes, int]:
        """(the one that leaves a row of buckets under way, bytes of the row while the oldest that travels is summed up,
        with which the one before is in host memory)."""
        left = row.pop(0)
        ends, others = (row[0], row[1:]) if self._to_host and row else (left, row)
        return left, ends.held + max(ends.travels, ends.summing) + _size(others)

    def _buckets(self, step: Step) -> tuple[BucketBytes, ...]:
        return self._parts.get(step, PartBytes()).buckets

    def _left_under_way(self) -> list[BucketBytes]:
        """Of the backward before."""
        return self._last_sent() if self._repeats else []

    def _last_sent(self) -> list[BucketBytes]:
        """By a backward; of several chunks, any one's, and what ends first is the least of it."""
        ends: dict[tuple[Step, int], BucketBytes] = {}
        for chunk in self._chunks:
            order = [s for s in reversed([*chunk.used]) if s != "embed"]
            order += ["embed"] if "embed" in _all(chunk.used.values()) else []
            row = [((step, i), bucket) for step in order for i, bucket in enumerate(self._buckets(step))]
            ends |= dict(row[-self._under_way :])
        if len(self._chunks) == 1:
            return [*ends.values()]
        return sorted(ends.values(), key=lambda bucket: bucket.held + bucket.travels)[-self._under_way :]


def under_way(stage: Stage) -> int:
    """How many buckets are at once on their way to their owners, and from there to host memory."""
    return IN_FLIGHT + stage.optimizer.offload


def _all(rows: Iterable[Iterable[Step]]) -> set[Step]:
    return {step for row in rows for step in row}


def _tied(chunk: ChunkSteps) -> bool:
    return "embed" in chunk.used.get("head", ())


def _held(buckets: Iterable[BucketBytes]) -> int:
    return sum(bucket.held for bucket in buckets)


def _size(buckets: Iterable[BucketBytes]) -> int:
    return sum(bucket.held + bucket.travels for bucket in buckets)
