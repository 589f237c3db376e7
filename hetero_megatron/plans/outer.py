"""Outer steps between islands: how a plan spells them, what they cannot be combined with, and what is exchanged when.
No torch.

An island trains by itself: gradients are summed, and the optimizer's state is divided, among its own ranks. Every
tensor has one owner of each of its elements in every island; these exchange how far they went from the weights that all
islands last agreed on. The islands may divide the model as unlike as they please: what passes between two of them is
where the boxes of their owners overlap.

With ``compress`` differences travel in few bits. ``int8`` and ``int4`` have an fp32 scale for each block, which is
``BLOCK`` elements of a row of the tensor; of a block that a box cuts through, each part has its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import permutations
from math import prod
from typing import TYPE_CHECKING, Any

from hetero_megatron.layout import Layout, cut
from hetero_megatron.layout.layout import reduction_blocks
from hetero_megatron.plans.buckets import Bucket
from hetero_megatron.plans.canonical import Outer, Pipeline, Plan
from hetero_megatron.plans.fields import Source, parse_ranks
from hetero_megatron.spec import trained_tensors
from hetero_megatron.utils.text import format_bytes, notice_line, plural, rank_ranges
from hetero_megatron.utils.yaml_document import Entry

if TYPE_CHECKING:
    from hetero_megatron.spec import ModelSpec

KEYS = ("islands", "every", "fragments", "delay", "mixing", "optimizer", "compress")
PHASE = ("every", "fragments", "delay")
OPTIMIZER_KEYS = ("name", "lr", "momentum", "nesterov")
MOST_STEPS, MOST_RATE = 1 << 20, 1e3
COMPRESS = {"none": 0, "bf16": 16, "int8": 8, "int4": 4}  # bits of an element; 0: as it is
BLOCK, SCALE_BYTES = 64, 4


def read_outer(entry: Entry) -> Outer:
    """The key ``outer`` of a plan."""
    keys = entry.mapping(KEYS, required=("islands", "every"))
    islands = tuple(sorted(tuple(sorted(parse_ranks(item))) for item in keys["islands"].items()))
    optimizer = keys["optimizer"].mapping(OPTIMIZER_KEYS) if "optimizer" in keys else {}
    if "name" in optimizer:
        optimizer["name"].choice(("sgd",))
    momentum = optimizer["momentum"].number(0, 1) if "momentum" in optimizer else Outer.momentum
    if momentum == 1:
        optimizer["momentum"].fail("nothing would ever be forgotten", accepted="a number from 0 to below 1")
    nesterov = optimizer["nesterov"].flag() if "nesterov" in optimizer else momentum > 0
    if nesterov and not momentum:
        optimizer["nesterov"].fail("there is no momentum to look ahead with", accepted="false, or momentum above 0")
    lr = optimizer["lr"].number(0, MOST_RATE) if "lr" in optimizer else Outer.lr
    if not lr:
        optimizer["lr"].fail("the global weights would never move", accepted=f"a number above 0, to {MOST_RATE:g}")
    return Outer(
        islands,
        keys["every"].integer(1, MOST_STEPS),
        keys["fragments"].integer(1, MOST_STEPS) if "fragments" in keys else Outer.fragments,
        keys["delay"].integer(0, MOST_STEPS) if "delay" in keys else Outer.delay,
        keys["mixing"].number(0, 1) if "mixing" in keys else Outer.mixing,
        lr, momentum, nesterov,
        keys["compress"].choice(COMPRESS) if "compress" in keys else Outer.compress,
    )  # fmt: skip


def other_phase(was: Mapping[str, Any], outer: Outer) -> list[str]:
    """What of a running plan's keys, by which it is told what is due when, and of its momentum, is another one here."""
    changes = [f"{key} {was[key]} (here {getattr(outer, key)})" for key in PHASE if was[key] != getattr(outer, key)]
    if (was["momentum"] > 0) != (outer.momentum > 0):
        changes.append(f"momentum {was['momentum']:g} (here {outer.momentum:g})")
    return changes


def spelled_outer(outer: Outer) -> dict[str, Any]:
    """As a plan file has it."""
    entry = asdict(outer)
    optimizer = {"name": "sgd", **{key: entry.pop(key) for key in ("lr", "momentum", "nesterov")}}
    return {**entry, "islands": [rank_ranges(ranks) for ranks in outer.islands], "optimizer": optimizer}


def outer_steps_fit(plan: Plan, spec: ModelSpec, source: Source) -> None:
    """Refuse outer steps between what are no islands, at steps that are none, or beside what they cannot be."""
    outer = plan.outer
    assert outer is not None
    _islands_hold_pipelines(plan, outer, source)
    if outer.fragments > spec.num_layers:
        accepted = f"1 to {spec.num_layers}"
        raise source.error(
            f"the model has {plural(spec.num_layers, 'layer')}", "outer.fragments", outer.fragments, accepted
        )
    if outer.every % outer.fragments:
        problem = f"{plural(outer.fragments, 'fragment')} cannot be exchanged at equal distances in {outer.every} steps"
        raise source.error(problem, "outer.every", outer.every, f"a multiple of {outer.fragments}")
    if outer.delay >= outer.period:
        problem = f"the next exchange begins {plural(outer.period, 'step')} after this one"
        raise source.error(problem, "outer.delay", outer.delay, f"0 to {outer.period - 1}")
    for present, feature in (
        (spec.moe is not None, "a mixture of experts"),
        (spec.lora is not None, "adapters (LoRA)"),
    ):
        if present:
            islands = plural(len(outer.islands), "island")
            raise source.error(f"there are no outer steps for {feature}", "outer", islands, "a plan without outer")


def _islands_hold_pipelines(plan: Plan, outer: Outer, source: Source) -> None:
    island: dict[int, int] = {}
    for i, ranks in enumerate(outer.islands):
        for rank in ranks:
            if rank in island or rank not in plan.ranks:
                problem = "is in two islands" if rank in island else "is in no stage"
                raise source.error(f"rank {rank} {problem}", "outer.islands", rank, "each rank of the plan once")
            island[rank] = i
    for p, pipeline in enumerate(plan.pipelines):
        for rank in pipeline.ranks:
            if rank not in island:
                raise source.error(f"rank {rank} is in none", "outer.islands", rank, "each rank of the plan once")
        islands = {island[rank] for rank in pipeline.ranks}
        if len(islands) > 1:
            raise source.error(
                f"pipeline {p} (ranks {rank_ranges(pipeline.ranks)}) lies in several", "outer.islands",
                [rank_ranges(outer.islands[i]) for i in sorted(islands)], "islands of whole pipelines",
            )  # fmt: skip


def fragment_tensors(spec: ModelSpec, outer: Outer) -> list[list[str]]:
    """Names of the tensors of each fragment: a run of layers, as equal as can be; the embedding is in the first one,
    final norm and head are in the last one. Equal on all ranks."""
    runs = cut(spec.num_layers, [1] * outer.fragments)
    names: list[list[str]] = [[] for _ in runs]
    for tensor in trained_tensors(spec):
        fragment = {"embed": 0, "head": -1}.get(str(tensor.layer))
        if isinstance(tensor.layer, int):
            fragment = next(i for i, (a, b) in enumerate(runs) if a <= tensor.layer < b)
        assert fragment is not None
        names[fragment].append(tensor.name)
    return names


def owners_by_island(outer: Outer | None, buckets: Sequence[Bucket]) -> list[dict[str, Layout]]:
    """By island, the layout of each tensor's owners there; without outer steps there is one island."""
    owners: list[dict[str, Layout]] = [{} for _ in (outer.islands if outer is not None else "1")]
    for bucket in (b for b in buckets if b.onward is None):
        owners[outer.island(bucket.ranks[0]) if outer is not None else 0].update(bucket.owners)
    return owners


def plan_of_islands(
    plan: Plan, kept: Collection[int], number: Mapping[int, int], speed: Callable[[Pipeline], float] | None = None
) -> Plan | None:
    """The plan of some of its islands, which share the whole batch in proportion to what they had, with rank
    ``number[r]`` where it has r; None: whole micro-batches of theirs do not make up the batch.

    Args:
        speed: of a pipeline, in place of what it had.
    """
    outer = plan.outer
    assert outer is not None
    pipelines = [p for p in plan.pipelines if outer.island(p.ranks[0]) in kept]
    speeds = [float(p.batch_size) if speed is None else speed(p) for p in pipelines]
    counts = _micro_batches(plan.global_batch_size, [p.micro_batch_size for p in pipelines], speeds)
    if counts is None:
        return None
    if same := counts == [pipeline.num_micro_batches for pipeline in pipelines]:
        schedule = plan.schedule
    else:  # a stored order is one of so many micro-batches
        stored = "interleaved" if any(pipeline.chunks > 1 for pipeline in pipelines) else "1f1b"
        schedule = stored if plan.schedule == "adaptive" else plan.schedule
    renumber = number.__getitem__
    moved = tuple(
        replace(pipeline, num_micro_batches=count, stages=tuple(stage.on_ranks(renumber) for stage in pipeline.stages),
                orders=pipeline.orders if same else ())
        for pipeline, count in zip(pipelines, counts, strict=True)
    )  # fmt: skip
    islands = tuple(sorted(tuple(sorted(map(renumber, outer.islands[i]))) for i in kept))
    near = (tuple(sorted(number[r] for r in ranks if outer.island(r) in kept)) for ranks in plan.islands)
    return replace(
        plan, pipelines=moved, schedule=schedule, outer=replace(outer, islands=islands),
        islands=tuple(sorted(ranks for ranks in near if len(ranks) > 1)),
    )  # fmt: skip


def _micro_batches(batch: int, sizes: Sequence[int], speeds: Sequence[float]) -> list[int] | None:
    """Numbers of micro-batches of these sizes that make up ``batch`` sequences, so that the pipeline that takes longest
    takes as little as can be; None: none do."""
    most = max(sizes)
    # Near what each has in proportion: of others' micro-batches no more can be made up for.
    least = [max(1, int(batch * v / (sum(speeds) * n)) - most) for n, v in zip(sizes, speeds, strict=True)]
    rest = batch - sum(count * size for count, size in zip(least, sizes, strict=True))
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by sequences given so far: (longest, counts)
    for count, size, speed in zip(least, sizes, speeds, strict=True):
        found: dict[int, tuple[float, list[int]]] = {}
        for given, (longest, counts) in best.items():
            for more in range(min((rest - given) // size, 2 * most) + 1):
                seconds, now = (count + more) * size / speed, given + more * size
                candidate = max(longest, seconds), [*counts, count + more]
                if now not in found or candidate < found[now]:
                    found[now] = candidate
        best = found
    return best[rest][1] if rest in best else None


def message_bytes(compress: str, itemsize: int, elements: int, blocks: int) -> int:
    """Of one message of differences, ``itemsize`` bytes each where they are not compressed: scales of the blocks in
    which they lie, then the elements, of 4 bits two in a byte."""
    bits = COMPRESS[compress] or 8 * itemsize
    return (SCALE_BYTES * blocks if bits < 16 else 0) + -(-elements * bits // 8)


def exchanged(
    outer: Outer, owners: Sequence[Mapping[str, Layout]], names: Sequence[str], itemsize: int
) -> dict[tuple[int, int], int]:
    """Bytes by (source, destination) of all that passes between islands when these tensors are exchanged.

    Args:
        owners: of :func:`owners_by_island`.
        itemsize: bytes of a difference that is not compressed.
    """
    sizes: dict[tuple[int, int], tuple[int, int]] = {}
    for giving, taking in permutations(owners, 2):
        for name in names:
            exchanged_blocks = reduction_blocks(giving[name], taking[name], BLOCK)
            for src, dst, elements, blocks in zip(*(array.tolist() for array in exchanged_blocks), strict=True):
                size_before = sizes.get((src, dst), (0, 0))
                sizes[src, dst] = size_before[0] + elements, size_before[1] + blocks
    return {pair: message_bytes(outer.compress, itemsize, *size) for pair, size in sizes.items()}


def copies_of_owned(outer: Outer) -> int:
    """Of each element that a rank owns: global weights, their momentum, and what compression has lost."""
    return 1 + (outer.momentum > 0) + outer.compressed


def outer_memory(
    plan: Plan, spec: ModelSpec, buckets: Sequence[Bucket], itemsize: int
) -> dict[int, tuple[int, int]]:
    """By rank, (bytes of global weights, their momentum and what compression has lost so far; most bytes of an
    exchange: differences, what is sent and comes, and sums)."""
    outer = plan.outer
    assert outer is not None
    fragments = fragment_tensors(spec, outer)
    owned_elements = {rank: [0] * len(fragments) for rank in plan.ranks}
    fragment_of = {name: i for i, names in enumerate(fragments) for name in names}
    for bucket in (b for b in buckets if b.onward is None):
        for name, layout in bucket.owners.items():
            for rank in layout.ranks:
                owned_elements[rank][fragment_of[name]] += layout.elements(rank)
    copies = copies_of_owned(outer)
    passing = {rank: [2 * itemsize * size for size in sizes] for rank, sizes in owned_elements.items()}
    owners = owners_by_island(outer, buckets)
    for i, names in enumerate(fragments):
        for pair, size in exchanged(outer, owners, names, itemsize).items():
            for rank in pair:
                passing[rank][i] += size
    return {rank: (itemsize * copies * sum(sizes), max(passing[rank])) for rank, sizes in owned_elements.items()}


def bytes_per_exchange(plan: Plan, spec: ModelSpec, itemsize: int) -> list[int]:
    """Bytes of differences that leave an island for each other one, of every fragment, where one rank owns all. Where
    boxes cut through blocks there are more scales (:func:`exchanged`)."""
    assert plan.outer is not None
    shapes = {tensor.name: tensor.shape for tensor in trained_tensors(spec)}
    sizes = []
    for names in fragment_tensors(spec, plan.outer):
        elements = [prod(shapes[name]) for name in names]
        blocks = [prod(shapes[name][:-1]) * -(-shapes[name][-1] // BLOCK) for name in names]
        sizes.append(message_bytes(plan.outer.compress, itemsize, sum(elements), sum(blocks)))
    return sizes


def format_outer(plan: Plan, spec: ModelSpec, dtype: str) -> list[str]:
    """What is said at the start: that the loss depends on the plan, what is exchanged, and how."""
    outer = plan.outer
    assert outer is not None
    names = " | ".join(rank_ranges(ranks) for ranks in outer.islands)
    sizes = bytes_per_exchange(plan, spec, 8 if dtype == "fp64" else 4)
    part = "all weights" if outer.fragments == 1 else f"one of {outer.fragments} fragments"
    late = f", for {plural(outer.delay, 'step')} beside the computing" if outer.delay else ""
    mixed = f"; {outer.mixing:g} of an island's own weights stays" if outer.mixing else ""
    form = f", in {outer.compress} with error feedback" if outer.compressed else ""
    kind = "Nesterov momentum" if outer.nesterov else "momentum"
    alone = len(outer.islands) == 1
    who = f"island {names}, the only one, moves" if alone else f"islands {names} train apart and exchange"
    exchange = "nothing travels" if alone else f"{format_bytes(max(sizes))} at most to each other island{form}{late}"
    global_weights = "global weights" if alone else "weights"
    return [
        notice_line(
            f"outer steps: {who} {global_weights}, so the loss depends on the plan and is not that of one process"
        ),
        f"outer steps: {part} every {plural(outer.period, 'step')} ({exchange}); SGD lr {outer.lr:g}, {kind} "
        f"{outer.momentum:g}{mixed}",
    ]

