"""Outer steps whose differences travel in few bits, on real ranks of random plans."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.plans.outer import exchanged, fragment_tensors, owners_by_island
from hetero_megatron.spec import ModelSpec
from tests.distributed.parallel import test_outer_steps as module
from tests.distributed.parallel.test_outer_steps import check, check_bits, drive
from tests.support.hf_reference import make_hf
from tests.support.pool import RANKS, shared_pool
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

LAYERS = 4
MODEL = LLAMA | {"num_hidden_layers": LAYERS, "intermediate_size": 150}  # rows of three blocks, cut by TP groups


def random_pipelines(rng: np.random.Generator) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Two or three islands: a rank alone, unequal stages, a TP group, replicas, or two pipelines."""
    islands: list[list[int]] = []
    pipelines = []
    while len(islands) < 2 or (len(islands) < 3 and rng.random() < 0.5):
        at = sum(map(len, islands))
        cut = int(rng.integers(1, LAYERS))
        kinds = [
            (1, [pipe(1, 2, stage([at], [0, LAYERS]))]),
            (2, [pipe(1, 2, stage([at], [0, cut]), stage([at + 1], [cut, LAYERS]))]),
            (2, [pipe(1, 2, stage([at, at + 1], [0, LAYERS], tp=2, tp_split=[1, 2]))]),
            (2, [pipe(3, 1, stage([at, at + 1], [0, LAYERS], tp=1, dp_split=[1, 2]))]),
            (2, [pipe(1, 1, stage([at], [0, LAYERS])), pipe(1, 2, stage([at + 1], [0, LAYERS]))]),
        ]
        count, found = kinds[int(rng.integers(len(kinds)))]
        islands.append(list(range(at, at + count)))
        pipelines += found
    assert at + count <= RANKS
    return islands, pipelines


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    fragments, period = int(rng.choice([1, 2, 4])), int(rng.integers(1, 4))
    momentum = float(rng.choice([0, 0.5, 0.9]))
    rates = {"lr": float(rng.uniform(0.3, 1)), "momentum": momentum, "nesterov": bool(momentum and rng.random() < 0.5)}
    return {
        "every": fragments * period, "fragments": fragments, "delay": int(rng.integers(period)),
        "mixing": float(rng.choice([0, 0.25])), "optimizer": rates,
    }  # fmt: skip


def drive_and_count(
    comm: Comm, plan: Plan, spec: ModelSpec, steps: int, seed: int, dtype: torch.dtype
) -> tuple[Any, dict[int, int]]:
    """What :func:`drive` returns, and bytes handed to the group for each other rank."""
    before = dict(comm.sent_bytes)
    history = drive(comm, plan, spec, steps, seed, dtype)
    return history, {rank: count - before.get(rank, 0) for rank, count in comm.sent_bytes.items()}


def driven(seed: int, compress: str, dtype: torch.dtype) -> tuple[Plan, ModelSpec, Any, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    islands, pipelines = random_pipelines(rng)
    options = random_options(rng) | {"compress": compress}
    _, spec = make_hf(MODEL, 7, torch.float64)
    made = plan_from_dict(plan(pipelines) | {"outer": {"islands": islands, **options}}, spec)
    ranks = shared_pool().run(drive_and_count, made, spec, 7, seed, dtype)
    check_bytes(made, spec, [sent for _, sent in ranks], 7, dtype)
    return made, spec, [history for history, _ in ranks], options


def check_bytes(plan: Plan, spec: ModelSpec, sent: list[dict[int, int]], steps: int, dtype: torch.dtype) -> None:
    """What was sent between islands is the formula's, for every exchange that has begun."""
    outer = plan.outer
    assert outer is not None
    owners, begun = owners_by_island(outer, CompiledPlan(plan, spec).buckets), (steps + outer.delay) // outer.period
    fragments = fragment_tensors(spec, outer)
    want: dict[tuple[int, int], int] = {}
    for i in range(begun):
        for pair, size in exchanged(outer, owners, fragments[i % len(fragments)], dtype.itemsize).items():
            want[pair] = want.get(pair, 0) + size
    for src in plan.ranks:
        for dst in plan.ranks:
            if outer.island(src) != outer.island(dst):
                assert sent[src].get(dst, 0) == want.get((src, dst), 0), (src, dst)


@pytest.mark.parametrize("compress", quick(["none", "bf16", "int8", "int4"], ["int8"]))
def test_random_plans_are_the_reference_with_error_feedback(compress: str) -> None:
    """Weights of every step to 1e-12, global weights bit for bit, bytes to the byte; in fp32 bits and bytes."""
    for seed in (4, 6):
        plan, spec, ranks, options = driven(seed, compress, torch.float64)
        check(plan, spec, ranks, options, seed, f"{compress} {seed}")
    check_bits(*driven(0, compress, torch.float32)[:3])


BAD = "model.layers.1.mlp.down_proj.weight"


def drive_bad(comm: Comm, plan: Plan, spec: ModelSpec) -> Any:
    """Two steps, in which one element of the first island's gradient is not a number."""
    good = module.gradient

    def gradient(name: str, shape: tuple[int, ...], island: int, step: int, seed: int | None) -> np.ndarray:
        values = good(name, shape, island, step, seed)
        if (name, island) == (BAD, 0):
            values[3, 5] = np.nan
        return values

    module.gradient = gradient
    try:
        return drive(comm, plan, spec, 2, 1)
    finally:
        module.gradient = good


def test_what_is_no_number_is_seen_on_all_islands_and_nowhere_else() -> None:
    """As without compression; integers have it in all of its block."""
    islands, pipelines = random_pipelines(np.random.default_rng(6))
    _, spec = make_hf(MODEL, 7, torch.float64)
    for compress in ("none", "int4"):
        made = plan_from_dict(plan(pipelines) | {"outer": {"islands": islands, "every": 2, "compress": compress}}, spec)
        seen: dict[int, set[tuple[int, int]]] = {island: set() for island in range(len(islands))}
        ranks = shared_pool().run(drive_bad, made, spec)
        for rank in made.ranks:
            assert made.outer is not None
            for name, box, values in ranks[rank][-1][1]:
                bad = np.argwhere(~np.isfinite(values))
                assert not len(bad) or name == BAD
                seen[made.outer.island(rank)] |= {tuple((row + box.lo).tolist()) for row in bad}
        first = seen[0]
        assert (3, 5) in first and all(places == first for places in seen.values())
        assert first <= ({(3, 5)} if compress == "none" else {(3, column) for column in range(64)})
