"""Models with Mamba-2 in some layers, under any plan, give transformers' numbers of one process in fp64."""

from __future__ import annotations

import pytest

from tests.distributed.training.test_hybrid_parity import CONTEXT, DIVIDED, PLANS
from tests.support.moe_models import MAMBAS
from tests.support.parity import check_case, fixed_case
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

# Of two groups of three heads, the second rank has one head of the first and two of the other.
ASTRIDE = plan([pipe(2, 3, stage([0, 1, 2], [0, 3], tp=3, tp_split=[1, 2, 1], recompute="elementwise"))])
PLANS = PLANS | {"astride": ASTRIDE}
# Three groups on two ranks, and one, two or three on three ranks, which have copies of it or whole ones.
CASES = [
    ("granite_hybrid", "uneven_tp"), ("granite_hybrid_odd", "uneven_tp"), ("bamba", "astride"),
    ("granite_hybrid", "pipeline"), ("granite_hybrid_odd", "pipeline"), ("bamba", "pipeline"),
    ("granite_hybrid_experts", "deferred_weights_and_divided_experts"),
    ("nemotron_h", "uneven_tp"), ("nemotron_h", "pipeline"), ("nemotron_h_odd", "uneven_tp"),
    ("nemotron_h_odd", "pipeline"), ("nemotron_h_experts", "uneven_tp"), ("nemotron_h_experts", "pipeline"),
    ("nemotron_h_experts", "deferred_weights_and_divided_experts"), ("nemotron_h_experts_groups", "uneven_tp"),
]  # fmt: skip
QUICK = [("granite_hybrid_odd", "uneven_tp"), ("nemotron_h_experts", "deferred_weights_and_divided_experts")]


@pytest.mark.parametrize("case", quick(CASES, QUICK, CASES[::2]), ids="-".join)
def test_hybrids_under_plans(case: tuple[str, str]) -> None:
    """Documents are packed into rows: each state begins anew (transformers sees one document per row)."""
    model, name = case
    check_case(fixed_case(MAMBAS[model], PLANS[name], packed=True, masked=True), shared_pool())


CONTEXT_CASES = [("granite_hybrid", "runs_in_zigzag", True), ("bamba", "any_intervals", False)]
CONTEXT_CASES += [("nemotron_h", "any_intervals", True), ("nemotron_h_experts", "runs_in_zigzag", True)]


@pytest.mark.parametrize("case", quick(CONTEXT_CASES, CONTEXT_CASES[:1]), ids=lambda case: "-".join(case[:2]))
def test_states_pass_through_context_groups(case: tuple[str, str, bool]) -> None:
    model, name, packed = case
    four_heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 48, "mamba_d_head": 16}
    config = MAMBAS[model] | (four_heads if model == "bamba" else {})  # as the plan says
    check_case(fixed_case(config, CONTEXT[name], packed=packed, masked=packed), shared_pool())


@pytest.mark.slow
def test_members_have_copies_of_groups() -> None:
    """One group of three heads on two ranks of a member, whose norm adds up over both; with Muon's update."""
    config = MAMBAS["granite_hybrid_odd"] | {"num_attention_heads": 4, "num_key_value_heads": 4}
    divided = plan([pipe(2, 2, stage([0, 1, 2], [0, 3], **DIVIDED))])
    check_case(fixed_case(config, divided, packed=True), shared_pool())
    check_case(fixed_case(config, divided, optimizer="muon"), shared_pool())


ISLANDS = plan([pipe(3, 2, stage([0, 1, 2], [0, 3], dp_split=[1] * 3, recompute="elementwise", experts=[
    {"ranks": [2, [0, 1]], "experts": [[0, 3], [2, 5]], "split": [[1], [2, 1]]}]))]) | {"islands": [[0], [1, 2]]}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_replicated_experts_without_gates(optimizer: str) -> None:
    """Expert 2 is on two members, one of which has two ranks with some columns each; tokens go in two hops."""
    check_case(fixed_case(MAMBAS["nemotron_h_experts"], ISLANDS, packed=True, optimizer=optimizer), shared_pool())
