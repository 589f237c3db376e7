"""Islands are lost, also in the middle of an exchange, and come back: what ranks hold in their memories, and go on
from, is what a reference of one process says, over random plans and moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.comm import Comm, CommError
from hetero_megatron.layout import Box
from hetero_megatron.parallel.optimizer import SGD
from hetero_megatron.parallel.outer_steps import Exchange, Fragment, OuterSteps
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.outer import plan_of_islands
from hetero_megatron.spec import ModelSpec, logical_tensors
from hetero_megatron.training.held_state import Held, Holding, Moment, newest, owned_state, restore
from hetero_megatron.training.runtime import Runtime
from tests.distributed.parallel.test_compressed_outer_steps import MODEL, random_options, random_pipelines
from tests.distributed.parallel.test_outer_steps import Boxed, gradient, tokens_of
from tests.support.hf_reference import make_hf
from tests.support.outer_reference import OuterReference
from tests.support.pool import RANKS, shared_pool
from tests.support.selection import quick
from tests.support.small_plans import plan

LR, MOMENTUM = 0.5, 0.5


@dataclass(frozen=True)
class Part:
    """Steps with the same islands, by their numbers in the whole plan, and which of them are lost in what follows the
    update of the last one."""

    islands: tuple[int, ...]
    steps: int
    gone: tuple[int, ...] = ()


def torn(outer: OuterSteps) -> None:
    """From now on no exchange comes to its end."""

    def settled(fragment: Fragment, exchange: Exchange) -> list[torch.Tensor]:
        if exchange.sums is not None:
            return exchange.sums
        assert exchange.work is not None
        exchange.work.wait()
        raise CommError("a peer is gone", 0)

    outer._settled = settled  # type: ignore[method-assign]


History = list[tuple[Boxed, Boxed]]


def drive(comm: Comm, whole: Plan, spec: ModelSpec, parts: Sequence[Part], seed: int) -> list[History]:
    """By part, own and global weights of what this rank owns after each of its steps; ranks of lost islands have
    nothing."""
    everyone = tuple(range(RANKS))
    comm.create_groups([everyone])
    held: list[Held] = []
    done, found = 0, list[History]()
    for part in parts:
        compiled = compiled_for(whole, part, spec)
        comm.create_groups(compiled.groups)
        runtime = built(comm, compiled)
        source = newest(comm.group(everyone).gather_objects([h.said() for h in held], list[Holding]), spec)
        assert (source is None) == (done == 0)
        if source is not None:
            optimizer, outer = (None, None) if runtime is None else (runtime.optimizer, runtime.outer)
            restore(source, held, optimizer, compiled, comm.group(everyone), outer)
        held, history = [], History()
        if runtime is not None:
            held, history = steps(runtime, whole, part, done, seed)
        done += part.steps
        found.append(history)
    return found


def compiled_for(whole: Plan, part: Part, spec: ModelSpec) -> CompiledPlan:
    left = plan_of_islands(whole, part.islands, {rank: rank for rank in whole.ranks})
    assert left is not None
    return CompiledPlan(left, spec)


def built(comm: Comm, compiled: CompiledPlan) -> Runtime | None:
    if comm.rank not in compiled.plan.ranks:
        return None
    return Runtime(
        compiled, comm, torch.float64, lambda _, box: torch.ones(box.shape, dtype=torch.float64),
        lambda groups: SGD(groups, MOMENTUM),
    )  # fmt: skip


def steps(runtime: Runtime, whole: Plan, part: Part, done: int, seed: int) -> tuple[list[Held], History]:
    """What this rank holds after them, and the history."""
    outer, optimizer, spec = runtime.outer, runtime.optimizer, runtime.here.spec
    assert outer is not None and optimizer is not None and whole.outer is not None
    shapes = {t.name: t.shape for t in logical_tensors(spec)}
    own_island = whole.outer.island(runtime.comm.rank)
    optimizer.set_rates(LR, 0.0)
    history: History = []
    for step in range(done, done + part.steps):
        is_last = step == done + part.steps - 1
        if part.gone and is_last:
            torn(outer)
        outer.count([tokens_of(i, step, seed) for i in part.islands])
        grads = [
            [torch.tensor(gradient(p.name, shapes[p.name], own_island, step, seed)[p.box.slices()])
             for p in exchange.pieces] for exchange in runtime.sync.exchanges
        ]  # fmt: skip
        try:
            optimizer.step(grads, 1.0)
        except CommError:
            assert part.gone and is_last
        pieces = [piece for fragment in outer.fragments for piece in fragment.pieces]
        history.append((values(pieces, "master"), values(pieces, "weights")))
    if not part.gone:
        outer.settle()
    tensors, numbers = owned_state(optimizer, spec, outer)
    end = done + part.steps
    held = [Held(Moment(end, end, {}, numbers, outer.moment()), tensors)]
    return [] if own_island in part.gone else held, history


def values(pieces: Sequence[Any], name: str) -> Boxed:
    return [(p.name, p.box, getattr(p, name).detach().numpy().copy()) for p in pieces]


def random_parts(rng: np.random.Generator, islands: int) -> list[Part]:
    """All, then without some of them, then perhaps without one more, then all again, twice."""
    everyone, parts = tuple(range(islands)), list[Part]()
    for _ in range(2):
        left = list(everyone)
        while len(left) > 1 and (len(left) == islands or rng.random() < 0.7):
            gone = tuple(sorted(rng.choice(left, int(rng.integers(1, len(left))), replace=False).tolist()))
            parts.append(Part(tuple(left), int(rng.integers(1, 6)), gone))
            left = [i for i in left if i not in gone]
        parts.append(Part(tuple(left), int(rng.integers(1, 6))))
    return [*parts, Part(everyone, 4)]


@pytest.mark.parametrize("compress", quick(["none", "bf16", "int8", "int4"], ["int8"]))
def test_islands_leave_and_come_back(compress: str) -> None:
    for seed in (1, 2, 3, 5):
        rng = np.random.default_rng([seed, *compress.encode()])
        islands, pipelines = random_pipelines(rng)
        for pipeline in pipelines:  # so that whatever islands are left can share the batch
            pipeline["num_micro_batches"] *= 3
        options = random_options(rng) | {"compress": compress}
        _, spec = make_hf(MODEL, 7, torch.float64)
        whole = plan_from_dict(plan(pipelines) | {"outer": {"islands": islands, **options}}, spec)
        parts = random_parts(rng, len(islands))
        ranks = shared_pool().run(drive, whole, spec, parts, seed)
        check(whole, spec, options, parts, ranks, seed)


def boxes_of(whole: Plan, ranks: Sequence[list[History]], index: int, part: Part) -> list[dict[str, set[Box]]]:
    assert whole.outer is not None
    found: list[dict[str, set[Box]]] = []
    for island in part.islands:
        boxes: dict[str, set[Box]] = {}
        for rank in whole.outer.islands[island]:
            for key, box, _ in ranks[rank][index][0][0]:
                boxes.setdefault(key, set()).add(box)
        found.append(boxes)
    return found


def check(
    whole: Plan, spec: ModelSpec, options: dict[str, Any], parts: Sequence[Part], ranks: Sequence[list[History]],
    seed: int,
) -> None:  # fmt: skip
    """After each step but the last one of an island that is lost, whose exchange was torn."""
    assert whole.outer is not None
    shapes = {t.name: t.shape for t in logical_tensors(spec)}
    known = OuterReference(options, len(parts[0].islands), shapes, spec.num_layers, LR,
                           boxes_of(whole, ranks, 0, parts[0]), MOMENTUM)  # fmt: skip
    there, done = parts[0].islands, 0
    for index, part in enumerate(parts):
        boxes = boxes_of(whole, ranks, index, part)
        if new := [place for place, island in enumerate(part.islands) if island not in there]:
            known.come(new, boxes)
        known.boxes = list(boxes)
        for n in range(part.steps):
            is_last = n == part.steps - 1
            gone = [part.islands.index(i) for i in part.gone] if is_last else []
            known.step(
                [{key: gradient(key, shape, i, done, seed) for key, shape in shapes.items()} for i in part.islands],
                [tokens_of(i, done, seed) for i in part.islands], gone,
            )  # fmt: skip
            done += 1
            if not gone:
                compare(whole, part, known, {rank: ranks[rank][index][n:] for rank in whole.ranks}, (seed, done))
        there = tuple(i for i in part.islands if i not in part.gone)


def compare(
    whole: Plan, part: Part, known: OuterReference, found: Mapping[int, History], where: object
) -> None:  # fmt: skip
    assert whole.outer is not None
    for index, island in enumerate(part.islands):
        for rank in whole.outer.islands[island]:
            for wanted, boxed in zip((known.weights[index], known.shared), found[rank][0], strict=True):
                for key, box, array in boxed:
                    np.testing.assert_allclose(
                        array, wanted[key][box.slices()], rtol=1e-11, atol=1e-11, err_msg=f"{where} {key}"
                    )
