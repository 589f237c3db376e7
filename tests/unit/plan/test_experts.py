"""Experts in plans: what is refused, what is spelled alike, which replica gets whose tokens."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.dump import to_dict
from hetero_megatron.plans.experts import destinations, require_rows
from hetero_megatron.plans.shares import rank_shares
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.moe_models import MOE_FAMILIES
from tests.support.small_plans import LLAMA, pipe, plan, stage

MIXTRAL = from_hf_config(MOE_FAMILIES["mixtral"])  # 4 experts of 20 columns


def spelled(experts: Any, **more: Any) -> dict[str, Any]:
    return plan([pipe(2, 2, stage([0, 1], [0, 2], **({"tp": 1} | more), experts=experts))])


@pytest.mark.parametrize(("experts", "field"), [
    ([{"ranks": [0, 1], "experts": [[0, 2], [3, 4]]}], "no rank of the group holds expert 2"),
    ([{"ranks": [0, 1], "experts": [[0, 2], [2, 5]]}], "the model has 4 experts"),
    ([{"ranks": [0], "experts": [[0, 4]]}], "each rank of the stage once"),
    ([{"ranks": [0, 1], "experts": [[0, 4]]}], "1 interval for 2 entries"),
    ([{"ranks": [0, 1], "experts": [[4, 0], []]}], "not an interval"),
    ([{"ranks": [[0, 1]], "experts": [[0, 4]], "split": [[1]]}], "does not match ranks"),
])  # fmt: skip
def test_what_no_group_can_be_is_refused(experts: Any, field: str) -> None:
    with pytest.raises(UserError, match=field):
        plan_from_dict(spelled(experts), MIXTRAL)


def test_a_dense_model_has_no_experts_to_divide() -> None:
    with pytest.raises(UserError, match="no mixture-of-experts"):
        plan_from_dict(plan([pipe(2, 2, stage([0], [0, 3], experts=[{"ranks": [0], "experts": [[0, 4]]}]))]),
                       from_hf_config(LLAMA))  # fmt: skip


def test_spelling_out_what_holds_anyway_is_the_same_plan() -> None:
    plain = plan_from_dict(plan([pipe(2, 2, stage([0, 1], [0, 2], tp=2))]), MIXTRAL)
    same = plan_from_dict(spelled([{"ranks": [[0, 1]], "experts": [[0, 4]]}], tp=2), MIXTRAL)
    other = plan_from_dict(spelled([{"ranks": [0, 1], "experts": [[0, 3], [3, 4]]}], tp=2), MIXTRAL)
    assert plain.fingerprint() == same.fingerprint() != other.fingerprint()
    assert plan_from_dict(to_dict(other), MIXTRAL) == other


def test_shares_and_destinations_of_replicated_experts() -> None:
    made = plan_from_dict(spelled([{"ranks": [1, 0], "experts": [[0, 3], [2, 4]]}]), MIXTRAL)
    (one,) = made.pipelines[0].stages
    assert {rank: share.experts for rank, share in rank_shares(MIXTRAL, one).items()} == {1: (0, 3), 0: (2, 4)}
    assert destinations(one.experts[0], 0, 4) == ((1,), (1,), (0,), (0,))  # the own replica first
    assert destinations(one.experts[0], 1, 4) == ((1,), (1,), (1,), (0,))


def test_a_batch_that_leaves_a_replica_of_an_expert_group_without_rows_is_refused() -> None:
    made = plan_from_dict(spelled([{"ranks": [0, 1], "experts": [[0, 3], [3, 4]]}]), MIXTRAL)
    require_rows(made, 4)
    with pytest.raises(UserError, match="without any"):
        require_rows(made, 3)
