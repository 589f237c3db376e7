"""Bad habits of real devices, on an emulated device that has them: what would hang, crawl or be refused there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.parity import check_case, fixed_case
from tests.support.pool import Pool, shared_pool
from tests.support.small_plans import LLAMA, pipe, plan, stage

pytestmark = [pytest.mark.usefixtures("extension"), pytest.mark.timeout(1800)]  # building takes minutes

TWO_STAGES = plan([pipe(1, 4, stage([0], [0, 1]), stage([1], [1, 3]))])


def pool_of(habits: str, ranks: int = 2) -> Pool:
    return shared_pool((f"emulated:{habits}",) * ranks)


# Habits, the plan that meets them, and more of the case.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "kernels are loaded when they are first used": ("lazy-loading", TWO_STAGES, {}),
    "waiting receives occupy slots": ("slots=8", TWO_STAGES, {}),
    "the first collective blocks the host": ("blocking-groups", TWO_STAGES, {"tie_word_embeddings": True}),
    "no double precision": ("no-fp64", TWO_STAGES, {}),
    "one rank compiles longer than others wait to connect": ("blocking-groups,connect=3,compile=6", plan([pipe(1, 2, stage([0], [0, 3])), pipe(1, 2, stage([1], [0, 3]))]), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_equals_one_process(name: str) -> None:
    habits, made, model = CASES[name]
    dtype = "fp32" if "no-fp64" in habits else "fp64"
    check_case(fixed_case(LLAMA | model, made, dtype=dtype), pool_of(habits))
