"""Any plan over ranks of unlike vendors gives the single-process result: nothing but the bridge joins them."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.parity import check_case, random_case
from tests.pool import shared_pool

SEED = int(os.environ.get("SEED", "34"))
COUNT = int(os.environ.get("N", "20"))
VENDORS = ("cpu", "walled", "walled", "cpu", "walled", "cpu", "cpu", "walled")  # so that most groups cross


@pytest.mark.parametrize("index", range(COUNT))
def test_random_plan_over_islands_equals_one_process(index: int) -> None:
    case = random_case(SEED + index)
    check_case(replace(case, plan=case.plan | {"allow_bridge": True}), shared_pool(VENDORS))
