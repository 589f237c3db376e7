"""Which step is complete in the ranks' memories, against NumPy masks; who holds copies."""

from __future__ import annotations

import random

import numpy as np

from hetero_megatron.layout import Box, Layout
from hetero_megatron.plans.memory.replicas import choose_holders
from hetero_megatron.spec import trained_tensors
from hetero_megatron.spec.presets import load_model
from hetero_megatron.training.held_state import Holding, Moment, moves, newest

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


def _cut(box: Box, chance: random.Random, parts: int) -> list[Box]:
    """Boxes that tile this one."""
    boxes = [box]
    while len(boxes) < parts and any(max(one.shape) > 1 for one in boxes):
        one = boxes.pop(chance.randrange(len(boxes)))
        axis = max(range(len(one.shape)), key=one.shape.__getitem__)
        if one.shape[axis] > 1:
            at = one.lo[axis] + chance.randrange(1, one.shape[axis])
            ends = [list(one.lo), list(one.hi)]
            ends[0][axis] = ends[1][axis] = at
            boxes += [Box(one.lo, tuple(ends[1])), Box(tuple(ends[0]), one.hi)]
        else:
            boxes.append(one)
    return boxes


def test_no_more_moves_than_must() -> None:
    """Random holders, some on one rank, copies among them, and random owners: every element comes to its owner once,
    from somebody who has it, and only what no holder on the owner's rank has leaves its rank."""
    chance = random.Random(11)
    for _ in range(150):
        shape = (chance.randrange(1, 9), chance.randrange(1, 9))
        ranks, whole = chance.randrange(1, 5), Box.whole(shape)
        holders = tuple(chance.randrange(ranks) for _ in range(chance.randrange(1, 6)))
        holds: dict[int, list[Box]] = {i: [] for i in range(len(holders))}
        for box in _cut(whole, chance, 6):  # once at least, and copies
            for i in {chance.randrange(len(holders)) for _ in range(chance.randrange(1, 3))}:
                holds[i].append(box)
        owns: dict[int, list[Box]] = {rank: [] for rank in range(ranks)}
        for box in _cut(whole, chance, 5):
            owns[chance.randrange(ranks)].append(box)
        found = moves(_layout(shape, holds), holders, _layout(shape, owns))
        has = {i: _mask(shape, boxes) for i, boxes in holds.items()}
        came = {rank: np.zeros(shape, int) for rank in owns}
        crossed = 0
        for piece in found:
            assert has[piece.src][piece.box.slices()].all()
            came[-1 - piece.dst][piece.box.slices()] += 1
            crossed += piece.box.size * (holders[piece.src] != -1 - piece.dst)
        least = 0
        for rank, boxes in owns.items():
            here = np.logical_or.reduce([np.zeros(shape, bool), *(has[i] for i, r in enumerate(holders) if r == rank)])
            wanted = _mask(shape, boxes)
            assert (came[rank] == wanted).all()
            least += int((wanted & ~here).sum())
        assert crossed == least


def _layout(shape: tuple[int, ...], boxes: dict[int, list[Box]]) -> Layout:
    return Layout(shape, {holder: tuple(parts) for holder, parts in boxes.items() if parts})


def _mask(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    mask = np.zeros(shape, bool)
    for box in boxes:
        mask[box.slices()] = True
    return mask


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
    assert choose_holders(["a", "b", "c"], [5, 1, 1]) == [1, 2, 0]
    # Two moments of the large state have no room beside what b has; without room anywhere, all is as without limits.
    assert choose_holders(["a", "b", "c"], [5, 1, 1], room={"b": 11}) == [2, 0, 1]
    assert choose_holders(["a", "b", "c"], [5, 1, 1], room=dict.fromkeys("abc", 0)) == [1, 2, 0]
