"""Outer steps between islands of unlike plans, on real ranks."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.comm import Comm
from hetero_megatron.layout import Box
from hetero_megatron.parallel.optimizer import SGD
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import ModelSpec, logical_tensors
from hetero_megatron.training.runtime import Runtime
from tests.support.hf_reference import make_hf
from tests.support.outer_reference import OuterReference
from tests.support.parity import Case, fixed_case, run_case
from tests.support.paths import FIXTURES
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

MODEL = LLAMA | {"num_hidden_layers": 4}
# Unequal islands: layers 3:1 over two ranks and a replica beside it; a TP group of unequal shares beside a pipeline.
PIPELINES = {
    "layers 3:1 and a TP group": ([[0, 1, 2], [3, 4]], [
        pipe(1, 3, stage([0], [0, 3]), stage([1], [3, 4])), pipe(2, 1, stage([2], [0, 4])),
        pipe(2, 2, stage([3, 4], [0, 4], tp=2, tp_split=[1, 2])),
    ]),
    "three islands": ([[1, 2], [0], [3, 4, 5]], [
        pipe(1, 2, stage([0], [0, 4])), pipe(3, 1, stage([1, 2], [0, 4], tp=1, dp_split=[1, 2])),
        pipe(1, 3, stage([5, 3], [0, 1], tp=2), stage([4], [1, 4])),
    ]),
    "divided weights": ([[0, 1, 2], [3, 4]], [
        pipe(2, 1, stage([0, 1], [0, 4], weights={"shard": [1, 2]})), pipe(1, 2, stage([2], [0, 4])),
        pipe(2, 2, stage([3, 4], [0, 4], weights={"shard": [3, 1], "gather": "step"})),
    ]),
}  # fmt: skip


def case_of(name: str, outer: dict[str, Any] | None, **changes: Any) -> Case:
    islands, pipelines = PIPELINES[name]
    made = plan(pipelines) | ({"outer": {"islands": islands, **outer}} if outer is not None else {})
    return fixed_case(MODEL, made, **{"optimizer": "sgd", "momentum": 0.0, "clip_grad": 0.0, **changes})


@pytest.mark.parametrize("name", PIPELINES)
def test_every_step_with_plain_sgd_is_synchronous_training(name: str) -> None:
    """Against one process on the Hugging Face model, though documents' ends leave the islands unlike numbers of
    tokens."""
    case = case_of(name, {"every": 1, "optimizer": {"lr": 1, "momentum": 0}}, masked=True)
    want, ranks = run_case(case, shared_pool())
    for got in ranks:
        np.testing.assert_allclose(got["losses"], want.losses, rtol=1e-12, atol=0)
        for key, box, array in got["weights"]:
            part = want.weights[key].double().numpy()
            scale = max(float(np.abs(part).max()), 1e-3)
            assert np.abs(array - part[box.slices()]).max(initial=0.0) / scale <= 1e-9, (key, box)


LR = 1.0
Boxed = list[tuple[str, Box, np.ndarray]]


def gradient(name: str, shape: tuple[int, ...], island: int, step: int, seed: int | None) -> np.ndarray:
    """Of an island's whole tensor; without a seed, that of the published runs."""
    if seed is None:
        return np.full(shape, 2.0)
    rng = np.random.default_rng([seed, island, step, *name.encode()])
    return rng.standard_normal(shape)


def tokens_of(island: int, step: int, seed: int | None) -> float:
    return 100.0 if seed is None else float(np.random.default_rng([seed, island, step]).integers(1, 100))


def drive(
    comm: Comm, plan: Plan, spec: ModelSpec, steps: int, seed: int | None, dtype: torch.dtype = torch.float64
) -> list[tuple[Boxed, Boxed]]:
    """Weights and global weights of what this rank owns, before every step and after the last one, under gradients
    that are given."""
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return []
    runtime = Runtime(
        compiled, comm, dtype, lambda _, box: torch.ones(box.shape, dtype=dtype),
        lambda groups: SGD(groups, 0.0),
    )  # fmt: skip
    outer, optimizer = runtime.outer, runtime.optimizer
    assert outer is not None and optimizer is not None
    optimizer.set_rates(LR, 0.0)
    islands, shapes = range(len(outer.places)), {t.name: t.shape for t in logical_tensors(spec)}
    history = []
    for step in range(steps + 1):
        pieces = [piece for fragment in outer.fragments for piece in fragment.pieces]
        own, shared = (
            [(p.name, p.box, values.detach().numpy().copy()) for p, values in zip(pieces, kept, strict=True)]
            for kept in ([p.master for p in pieces], [p.weights for p in pieces])
        )
        history.append((own, shared))
        if step == steps:
            break
        outer.count([tokens_of(i, step, seed) for i in islands])
        grads = [
            [torch.tensor(gradient(p.name, shapes[p.name], outer.index, step, seed)[p.box.slices()], dtype=dtype)
             for p in exchange.pieces] for exchange in runtime.sync.exchanges
        ]  # fmt: skip
        optimizer.step(grads, 1.0)
    return history


def driven(name: str, outer: dict[str, Any], layers: int, steps: int, seed: int | None) -> tuple[Plan, ModelSpec, Any]:
    islands, pipelines = PIPELINES[name] if layers == 4 else TWO_LAYERS
    _, spec = make_hf(LLAMA | {"num_hidden_layers": layers}, 7, torch.float64)
    made = plan_from_dict(plan(pipelines) | {"outer": {"islands": islands, **outer}}, spec)
    return made, spec, shared_pool().run(drive, made, spec, steps, seed)


TWO_LAYERS = ([[0, 1, 2], [3, 4]], [
    pipe(1, 3, stage([0], [0, 1]), stage([1], [1, 2])), pipe(2, 1, stage([2], [0, 2])),
    pipe(2, 2, stage([3, 4], [0, 2], tp=2, tp_split=[1, 2])),
])  # fmt: skip


@pytest.mark.parametrize(("file", "mixing"), [("updates_0", 0.0), ("updates_1", 0.5), ("updates_2", 1.0)])
def test_weights_are_those_of_a_public_implementation(file: str, mixing: float) -> None:
    """torchft's records of every step (tests/fixtures/diloco/LICENSE): every weight of layer i moves as the one of its
    fragment i does."""
    records = json.loads((FIXTURES / "diloco" / f"{file}.json").read_text())
    outer = {"every": 6, "fragments": 2, "mixing": mixing, "optimizer": {"lr": 2.0, "momentum": 0}}
    steps = max(map(int, records[0][0]["history"]))
    plan, _, ranks = driven("", outer, 2, steps, None)
    assert plan.outer is not None
    for rank in plan.ranks:
        want = records[plan.outer.island(rank)][0]
        for step, sides in enumerate(ranks[rank]):
            for key, boxed in zip(("history", "global_parameter_history"), sides, strict=True):
                for name, _, values in boxed:
                    if ".layers." in name and str(step) in want[key]:
                        layer = name.split(".")[2]
                        assert (values == want[key][str(step)][f"layers.{layer}.weight"]).all(), (rank, step, name)


CASES = {
    "all at once": {"every": 3, "optimizer": {"lr": 0.7, "momentum": 0.9}},
    "fragments": {"every": 4, "fragments": 4, "optimizer": {"lr": 0.5, "momentum": 0.8, "nesterov": False}},
    "delay and mixing": {"every": 6, "fragments": 2, "delay": 2, "mixing": 0.25},
    "plain": {"every": 8, "fragments": 2, "delay": 1, "mixing": 1, "optimizer": {"lr": 1.5, "momentum": 0}},
}


@pytest.mark.parametrize("name", quick(PIPELINES, set(PIPELINES) - {"three islands"}))
def test_fragments_delay_and_mixing_are_the_reference(name: str) -> None:
    """And all islands have the same global weights, bit for bit, whatever their plans are."""
    kinds = CASES if name == "three islands" else {"delay and mixing": CASES["delay and mixing"]}
    for index, (kind, options) in enumerate(kinds.items()):
        plan, spec, ranks = driven(name, options, 4, 13, index)
        check(plan, spec, ranks, options, index, kind)


def check(plan: Plan, spec: ModelSpec, ranks: list[Any], options: dict[str, Any], seed: int, kind: str) -> None:
    """Own and global weights before every step and after the last one are the reference's."""
    assert plan.outer is not None
    shapes = {t.name: t.shape for t in logical_tensors(spec)}
    islands, steps = range(len(plan.outer.islands)), len(ranks[0]) - 1
    boxes: list[dict[str, set[Box]]] = [defaultdict(set) for _ in islands]
    for rank in plan.ranks:
        for key, box, _ in ranks[rank][0][0]:
            boxes[plan.outer.island(rank)][key].add(box)
    known = OuterReference(options, len(islands), shapes, spec.num_layers, LR, boxes)
    for step in range(steps + 1):
        for rank in plan.ranks:
            island = plan.outer.island(rank)
            for wanted, boxed in zip((known.weights[island], known.shared), ranks[rank][step], strict=True):
                for key, box, values in boxed:
                    expected = wanted[key][box.slices()]
                    np.testing.assert_allclose(values, expected, rtol=1e-12, atol=1e-12, err_msg=f"{kind} {key}")
        known.step(
            [{n: gradient(n, s, i, step, seed) for n, s in shapes.items()} for i in islands],
            [tokens_of(i, step, seed) for i in islands],
        )
    check_bits(plan, spec, ranks)


def check_bits(plan: Plan, spec: ModelSpec, ranks: list[Any]) -> None:
    """Global weights are the same on all islands."""
    shapes = {t.name: t.shape for t in logical_tensors(spec)}
    bits: dict[tuple[int, str], np.ndarray] = {}
    for rank in plan.ranks:
        for step, (_, boxed) in enumerate(ranks[rank]):
            for key, box, values in boxed:
                whole = bits.setdefault((step, key), np.full(shapes[key], np.nan))[box.slices()]
                assert (np.isnan(whole) | (whole == values)).all(), (rank, step, key, box)
                whole[...] = values
