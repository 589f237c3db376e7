"""Muon of any plan is torch.optim.Muon of the logical matrices in one process."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.distributed.training.test_moe_parity import moe_case
from tests.support.parity import check_case, random_case
from tests.support.pool import shared_pool
from tests.support.selection import quick

SEED = int(os.environ.get("SEED", "2026"))
CASES = range(int(os.environ["N"])) if "N" in os.environ else [1, 3, 4, 5]
QUICK = [1, 3]  # in `make test`


@pytest.mark.parametrize("index", quick(CASES, QUICK))
def test_random_plans_update_the_logical_matrices(index: int) -> None:
    """TP degrees, replicas, owners of unlike shares, islands, chunks, context groups."""
    check_case(replace(random_case(SEED + index), optimizer="muon"), shared_pool())


@pytest.mark.parametrize("index", quick(CASES, QUICK[:1]))
def test_every_expert_is_a_matrix(index: int) -> None:
    check_case(replace(moe_case(SEED + index), optimizer="muon"), shared_pool())
