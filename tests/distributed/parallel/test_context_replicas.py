"""Inner data parallelism of context groups: a stage's replicas have context groups of their own."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.plans import plan_from_dict, to_dict
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.parity import check_case, fixed_case
from tests.support.pool import shared_pool
from tests.support.small_plans import LLAMA, pipe, plan, stage

CASES: dict[str, list[dict[str, Any]]] = {
    "two_replicas_of_unlike_groups": [
        pipe(
            3, 2,
            stage(
                [0, 1, 2, 3, 4], [0, 2], dp_split=[2, 1], recompute="selective",
                context=[
                    [{"ranks": [0, 1], "tokens": [4, 1], "heads": [4, 2]}, {"ranks": [2], "tokens": [5], "heads": [6]}],
                    [{"ranks": [3, 4], "tokens": [3, 7], "heads": [1, 5]}],
                ],
            ),
            stage([5], [2, 3]),
        ),
        pipe(1, 1, stage([6], [0, 3])),
    ],
    "one_replica_without_context_beside_a_gather": [
        pipe(
            2, 3,
            stage(
                [0, 1, 2], [0, 3], dp_split=[1, 1], kv={"transport": "gather"},
                context=[
                    [{"ranks": [0], "tokens": [6], "heads": [6]}, {"ranks": [1], "tokens": [4], "heads": [6]}],
                    [{"ranks": [2], "tokens": [10], "heads": [6]}],
                ],
            ),
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "packed"), [(name, i == 0) for i, name in enumerate(CASES)])
def test_inner_replicas_of_context_groups_equal_one_process(name: str, packed: bool) -> None:
    check_case(fixed_case(LLAMA, plan(CASES[name]), packed=packed, masked=packed), shared_pool())


def test_they_survive_the_file_and_bad_spellings_are_refused() -> None:
    spec = from_hf_config(LLAMA)
    for pipelines in CASES.values():
        first = plan_from_dict(plan(pipelines), spec)
        again = plan_from_dict(to_dict(first), spec)
        assert again == first and again.fingerprint() == first.fingerprint()
    data = plan(CASES["one_replica_without_context_beside_a_gather"])
    one = data["pipelines"][0]["stages"][0]
    for split, context, problem in (
        ([2], one["context"], "one list of groups per inner replica, 1 of them"),
        ([1, 1], one["context"][0], "one list of groups per inner replica, 2 of them"),
        ([1, 2], one["context"], "the split sums to 3 sequences"),
    ):
        changed = {**one, "dp_split": split, "context": context}
        with pytest.raises(UserError, match=problem):
            plan_from_dict({**data, "pipelines": [{**data["pipelines"][0], "stages": [changed]}]}, spec)
