"""Which step is complete in the ranks' memories, against NumPy masks; who holds copies."""

from __future__ import annotations

import random

import numpy as np

from hetero_megatron.layout import Box
from hetero_megatron.plans.memory.replicas import choose_holders
from hetero_megatron.spec import trained_tensors
from hetero_megatron.spec.presets import load_model
from hetero_megatron.training.held_state import Holding, Moment, newest

SPEC = load_model("tiny")


def _moment(step: int) -> Moment:
    return Moment(step, 4 * step, {}, {"step": float(step)} if step else {})


def test_the_newest_step_that_is_complete() -> None:
    """Random ranks hold random rows of every tensor at random steps, twice perhaps; some of the moments are missing."""
    chance = random.Random(7)
    tensors, decided = list(trained_tensors(SPEC))[:3] + list(trained_tensors(SPEC))[-2:], set()
    rest = [t for t in trained_tensors(SPEC) if t not in tensors]
    for _ in range(60):
        ranks, steps = chance.randrange(1, 5), [chance.randrange(1, 4) for _ in range(3)]
        said: list[list[Holding]] = [[] for _ in range(ranks)]
        covered: dict[int, dict[str, np.ndarray]] = {}
        for step in steps:
            masks = covered.setdefault(step, {})
            for holders in range(ranks):
                boxes: dict[str, list[Box]] = {}
                for name, shape in _names(tensors):
                    mask = masks.setdefault(name, np.zeros(shape, bool))
                    at = shape[0] * holders // ranks, shape[0] * (holders + 1) // ranks
                    if at[0] == at[1] or chance.random() < 0.02:
                        continue
                    box = Box.whole(shape).rows(*at)
                    boxes[name] = [box]
                    mask[box.slices()] = True
                if holders == 0:
                    boxes |= {name: [Box.whole(shape)] for name, shape in _names(rest)}
                said[chance.randrange(ranks)].append(Holding(_moment(step), boxes))
        whole = [step for step, masks in covered.items() if all(mask.all() for mask in masks.values())]
        found = newest(said, SPEC)
        assert (found.moment.step if found is not None else None) == max(whole, default=None)
        decided.add(found is None)
    assert decided == {True, False}


def _names(tensors: list) -> list[tuple[str, tuple[int, ...]]]:
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    return [(f"{kind}.{t.name}", t.shape) for kind in kinds for t in tensors]


def test_nothing_of_a_step_is_taken_from_another() -> None:
    whole = {name: [Box.whole(shape)] for name, shape in _names(list(trained_tensors(SPEC)))}
    first, *others = sorted(whole)
    said = [[Holding(_moment(5), {name: whole[name] for name in others})], [Holding(_moment(4), whole)]]
    found = newest(said, SPEC)
    assert found is not None and found.moment.step == 4 and first in found.layouts
    assert newest([said[0], [Holding(_moment(4), {first: whole[first]})]], SPEC) is None
    assert newest([[]], SPEC) is None


def test_copies_lie_on_another_node_and_are_spread() -> None:
    chance = random.Random(3)
    for _ in range(200):
        nodes = [f"node{chance.randrange(4)}" for _ in range(chance.randrange(2, 12))]
        sizes = [chance.randrange(1, 100) for _ in nodes]
        stays = [chance.random() < 0.8 for _ in nodes]
        holders = choose_holders(nodes, sizes, stays)
        for i, holder in enumerate(holders):
            others = [j for j in range(len(nodes)) if j != i and stays[j]]
            assert holder in (others or [i])
            assert nodes[holder] != nodes[i] or all(nodes[j] == nodes[i] for j in others)
    assert sorted(choose_holders(["a", "a", "b", "b"], [1, 1, 1, 1])) == [0, 1, 2, 3]
