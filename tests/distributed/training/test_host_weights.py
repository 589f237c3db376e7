"""Weights in host memory: stages that divide theirs, alone or among replicas, with the optimizer in host memory."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.training.test_divided_weights import WAYS, random_divided_cases
from tests.support.parity import Case, check_case, fixed_case
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

HOST = {"optimizer": {"offload": True}}
COUNT, QUICK, SLOW = 12, (1,), (2, 4, 5)


def hosted(case: Case) -> Case:
    """With the optimizers of some stages, and so the weights that these divide, in host memory."""
    draw, changed = random.Random(f"host {case.seed}"), copy.deepcopy(case.plan)
    for each in (s for p in changed["pipelines"] for s in p["stages"] if draw.random() < 0.7):
        each["optimizer"] = {**each.get("optimizer", {}), "offload": True}
        if "activations" not in each and draw.random() < 0.7:
            each.setdefault("weights", {})
    return replace(case, plan=changed)


def _case(index: int) -> Case:
    """Of plans without stored schedules, which are made for their memory."""
    cases = (hosted(c) for c in random_divided_cases() if c.plan.get("schedule") != "adaptive")
    return next(c for i, c in enumerate(cases) if i == index)


@pytest.mark.parametrize("index", quick(range(COUNT), QUICK, SLOW))
def test_random_plan_equals_one_process(index: int) -> None:
    check_case(_case(index), shared_pool())


@pytest.mark.parametrize("index", quick(range(COUNT), (), SLOW))
def test_on_a_device(index: int) -> None:
    """Whose streams run late."""
    check_case(_case(index), shared_pool(("emulated:late=0.0003",) * 8))


def one(way: dict[str, Any]) -> dict[str, Any]:
    return plan([pipe(2, 3, stage([0], [0, 3], weights=way, **HOST))])


def test_one_rank_holds_a_layer_or_two() -> None:
    """And two pipelines that have the same layers, one of them whole."""
    check_case(fixed_case(LLAMA, one(WAYS[0])), shared_pool())
    beside = pipe(1, 2, stage([1], [0, 3]))
    check_case(fixed_case(LLAMA, plan([pipe(2, 2, stage([0], [0, 3], weights={}, **HOST)), beside])), shared_pool())
