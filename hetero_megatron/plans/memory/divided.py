"""Bytes of weights that a stage divides, and of their gradients: what of them is there at once, by formula."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from hetero_megatron.plans.buckets import IN_FLIGHT, Bucket, buffer_bytes, sharding_stages
from hetero_megatron.plans.canonical import Plan, Stage
from hetero_megatron.plans.program import splits_backward

Step = int | str


def divided_bytes(plan: Plan, tied: bool, buckets: Iterable[Bucket], item: int) -> dict[int, tuple[int, int]]:
    """By rank, bytes of (weights that are whole at once, gradients that have not reached their owners and what travels)
    of stages that divide their weights.

    Weights are exact, but where forward keeps them for backward: then it is all of them. Gradients are those of one
    layer, and of the buckets before it that are under way; with a split backward they are all there from B_INPUT to W,
    while the last ones of the W before may be under way.

    Args:
        tied: the head's matrix is the embedding's.
        item: bytes of a weight.
    """
    stages, wide = sharding_stages(plan), max(item, 4)
    held: dict[int, dict[Step, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    for bucket in (b for b in buckets if b.weights is not None):
        assert bucket.segment is not None
        whole, owned = bucket.counts()
        moving = buffer_bytes(whole, owned, whole.sum() / owned.sum(), item, bucket.dense)[0]
        for rank, has, travels in zip(bucket.ranks, whole.tolist(), moving.tolist(), strict=True):
            held[rank][bucket.segment].append((has, int(travels)))
    split = splits_backward(plan)
    return {
        rank: (item * _gathered(stages[rank], tied, parts), _gradients(parts, wide, split))
        for rank, parts in held.items()
    }


def _gathered(stage: Stage, tied: bool, parts: dict[Step, list[tuple[int, int]]]) -> int:
    """Elements that are whole at once."""
    assert stage.weights is not None
    sizes = {step: sum(has for has, _ in rows) for step, rows in parts.items()}
    if not stage.weights.reshard_after_forward:
        return sum(sizes.values())
    most, last = 0, len(stage.chunks) - 1
    for number, (a, b) in enumerate(stage.chunks):
        steps: list[set[Step]] = [{layer} for layer in range(a, b)]
        steps = [{"embed"}, *steps] if stage.embed and number == 0 else steps
        if stage.head and number == last:
            steps.append({"head", "embed"} if tied else {"head"})
        together: Iterable[set[Step]]
        if stage.weights.gather == "micro-batch":
            together = [set().union(*steps)]
        else:
            together = [*steps, *(x | y for x, y in pairwise(steps))]
        most = max([most, *(sum(sizes.get(step, 0) for step in used) for used in together)])
    return most


def _gradients(parts: dict[Step, list[tuple[int, int]]], wide: int, split: bool) -> int:
    """Bytes of gradients on a rank, its parts in the order of backward."""
    rows = list(parts.values())
    every = [pair for row in rows for pair in row]
    under_way = [every[i : i + IN_FLIGHT] for i in range(len(every))]
    travels = max((sum(x for _, x in some) for some in under_way), default=0)
    most = 0
    if split:
        last = max((sum(has for has, _ in some) for some in under_way), default=0)
        return wide * (sum(has for has, _ in every) + last) + travels
    before: Sequence[tuple[int, int]] = ()
    for row in rows:
        most = max(most, sum(has for has, _ in (*before, *row)))
        before = (*before, *row)[-IN_FLIGHT:]
    return wide * most + travels
