"""Weights that the ranks of a stage divide, on devices whose streams run behind the host, and late."""

from __future__ import annotations

import os

import pytest

from tests.distributed.training.test_divided_weights import WAYS, _case
from tests.support.parity import check_case, fixed_case
from tests.support.pool import Pool, shared_pool
from tests.support.selection import quick
from tests.support.small_plans import LLAMA, pipe, plan, stage

EMULATED_RANKS = 4
COUNT = int(os.environ.get("N", "6"))
pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.timeout(1800)]  # building takes minutes


@pytest.mark.parametrize("schedule", quick(["1f1b", "zero-bubble"], ["zero-bubble"], ["1f1b"]))
def test_weights_come_and_go_on_devices(schedule: str, pool: Pool) -> None:
    for way in WAYS:
        first = stage([0, 1], [0, 1], dp_split=[3, 1], weights={"shard": [1, 3], **way})
        second = stage([2, 3], [1, 3], dp_split=[3, 1], weights={"shard": [0, 1], **way})
        check_case(fixed_case(LLAMA, plan([pipe(4, 3, first, second)], schedule=schedule)), pool)


@pytest.mark.parametrize("index", quick(range(COUNT), [], [1]))
def test_random_divided_plan_on_late_devices(index: int) -> None:
    check_case(_case(index), shared_pool(("emulated:late=0.0003",) * 8))
