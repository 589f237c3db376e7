"""Whatever balances the experts is of the model, the data and the seed, never of the plan: random plans give what one
process gets that follows the definitions."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from hetero_megatron.spec.moe import Balancing
from tests.distributed.training.test_moe_parity import moe_case
from tests.support.moe_models import MOE_FAMILIES
from tests.support.parity import Case, check_case, fixed_case, run_case
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

SEED = int(os.environ.get("SEED", "3026"))
COUNT = int(os.environ.get("N", "12"))
QUICK = range(2)
SLOW = (3,)
OLMOE = MOE_FAMILIES["olmoe"]
SIGMOID = {"score": "sigmoid", "score_bias": True, "normalize": True, "scale": 2.5}
GROUPS = SIGMOID | {"groups": 3, "top_groups": 2, "group_size": 2}
ALL = Balancing(sequence_loss=0.3, z_loss=0.02, bias_rate=0.05)  # large ones: what is wrong shows


KINDS = {
    "sequence": (Balancing(sequence_loss=0.3), {}), "z": (Balancing(z_loss=0.02), {}),
    "bias": (Balancing(bias_rate=0.05), SIGMOID), "all": (ALL, SIGMOID),
}  # fmt: skip


def balanced_case(seed: int) -> Case:
    rng = random.Random(seed)
    balancing, router = KINDS[rng.choice(sorted(KINDS))]
    groups = rng.random() < 0.4
    case = moe_case(seed, "olmoe" if groups else None)
    router = GROUPS if groups and router else router
    return replace(case, balancing=balancing, router=router, packed=rng.random() < 0.5, masked=rng.random() < 0.5)


def check(case: Case) -> None:
    """Also the counts, which are exact, and the losses that are reported, on every rank."""
    want, ranks = check_case(case, shared_pool())
    assert case.balancing is not None
    for got in ranks:
        for step, routing in enumerate(got["routing"]):
            assert [load.tolist() for load in routing.load.values()] == want.loads[step], case.describe()
            assert sum(routing.rank_rows) >= sum(map(sum, want.loads[step]))
            named = dict(zip(("sequence loss", "z-loss"), want.balance[step], strict=True))
            for name, loss in routing.losses.items():
                np.testing.assert_allclose(loss, named[name], rtol=1e-10, err_msg=f"{name}, {case.describe()}")


@pytest.mark.parametrize("index", quick(range(COUNT), QUICK, SLOW))
def test_random_plans_balance_as_one_process(index: int) -> None:
    check(balanced_case(SEED + index))


HAND_WRITTEN = {
    # What peers got wrong: a sequence's counts over a TP group, a context group, and both; each token counted once.
    "tensor_parallel": plan([pipe(2, 2, stage([0, 1], [0, 2], tp=2, tp_split=[1, 2]))]),
    "context": plan([pipe(2, 2, stage([0, 1, 2], [0, 2], order="zigzag", context=[
        {"ranks": [0, 1], "tokens": [5, 2], "heads": [1, 3]}, {"ranks": [2], "tokens": [3], "heads": [4]}]))]),
    "context_of_tp_groups": plan([pipe(2, 2, stage([0, 1, 2, 3], [0, 2], context=[
        {"ranks": [[0, 1]], "tokens": [6], "heads": [4]}, {"ranks": [[2, 3]], "tokens": [4], "heads": [4]}]))]),
    "replicas_and_recompute": plan([
        pipe(3, 2, stage([0, 1], [0, 2], tp=1, dp_split=[2, 1], recompute="full")), pipe(1, 1, stage([2], [0, 2])),
    ]),
    "replicated_experts_in_a_pipeline": plan([
        pipe(2, 3, stage([0], [0, 1]), stage([1, 2], [1, 2], tp=1, recompute="full", experts=[
            {"ranks": [1, 2], "experts": [[0, 4], [2, 6]]}])),
    ], schedule="zero-bubble"),
}  # fmt: skip


@pytest.mark.parametrize("name", quick(HAND_WRITTEN, ["tensor_parallel", "context", "replicas_and_recompute"]))
def test_hand_written(name: str) -> None:
    check(fixed_case(OLMOE, HAND_WRITTEN[name], packed=True, masked=True, balancing=ALL, router=GROUPS))


def test_in_bf16_a_plan_sends_tokens_where_one_process_in_fp64_does() -> None:
    """The fraction of equal choices, by how much the loads of experts differ."""
    spelled = HAND_WRITTEN["replicated_experts_in_a_pipeline"]
    case = fixed_case(OLMOE, {**spelled, "seq_length": 64}, dtype="bf16", balancing=Balancing(), optimizer="sgd")
    want, ranks = run_case(case, shared_pool())
    for got in ranks:
        load = torch.stack(list(got["routing"][0].load.values()))
        first = torch.tensor(want.loads[0])
        assert load.sum() == first.sum() and (load - first).abs().sum() / 2 < 0.03 * first.sum()


def test_random_plans_have_all_kinds_of_groups() -> None:
    """Unequal counts, replicated (hot) experts, ranks without experts, ranks that share columns: among the cases of
    this file and of test_moe_parity.py."""
    kinds: set[str] = set()
    for case in (*map(moe_case, range(2026, 2056)), *map(balanced_case, range(3026, 3050))):
        for group in (g for p in case.plan["pipelines"] for s in p["stages"] for g in s.get("experts", ())):
            held = [tuple(e) for e in group["experts"]]
            sizes = [b - a for a, b in (e for e in held if e)]
            kinds |= {"none"} if () in held else set()
            kinds |= {"unequal"} if len(set(sizes)) > 1 else set()
            kinds |= {"shared columns"} if any(isinstance(r, list) and len(r) > 1 for r in group["ranks"]) else set()
            kinds |= {"replicated"} if sum(sizes) > max(b for _, b in (e for e in held if e)) else set()
    assert kinds == {"none", "unequal", "shared columns", "replicated"}
