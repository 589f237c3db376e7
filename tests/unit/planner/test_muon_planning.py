"""Plans for Muon: matrices go to owners by speed, and each rank's update costs what its own matrices do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.search.driver import search
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.buckets import make_buckets
from hetero_megatron.plans.matrices import STEPS, is_matrix, matrix_boxes, newton_schulz_flops
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.simulate.step import StepSimulator, predict
from hetero_megatron.spec import ModelSpec, load_model, logical_tensors
from tests.support.small_plans import pipe, plan, stage

MUON = CostOptions(muon=True)
WIDE = ModelSpec("wide", "llama", num_layers=4, hidden_size=512, ffn_hidden_size=1408, num_heads=8, num_kv_heads=4,
                 head_dim=64, vocab_size=257, max_position_embeddings=512)  # fmt: skip


def cluster_of(fast: float, slow: float, rates: dict[str, Any] | None = None) -> Any:
    return cluster_from_dict({
        "version": 1,
        "nodes": [{"name": n, "chips_per_node": 2, "chip": n} for n in ("fast", "slow")],
        "chips": {n: {"memory": "8 GiB", "dtypes": ["fp32"], "emulate": {"speed": s}}
                  for n, s in (("fast", fast), ("slow", slow))},
        "links": {"intra_node": {"bandwidth": "1 GB/s"}, "inter_node": {"bandwidth": "100 MB/s"}},
        **({"rates": {"chips": rates}} if rates else {}),
    })  # fmt: skip


def shares_of(found: Plan) -> dict[int, int]:
    return {rank: stage.optimizer.share for stage in found.stages for rank in stage.ranks}


@pytest.mark.parametrize(("fast", "slow"), [(0.45, 0.15), (0.4, 0.3), (0.9, 0.1)])
def test_the_search_finds_owners_as_good_as_any(fast: float, slow: float) -> None:
    """No other shares of its plan's stages are more than 3 % faster."""
    cluster = cluster_of(fast, slow)
    best = search(PlanningProblem(WIDE, cluster, 128, 16, SearchOptions(dtype="fp32", costs=MUON))).best

    def seconds(share: int, other: int) -> float:
        by_chip = {0: share, 1: share, 2: other, 3: other}
        changed = best.plan.with_stages(
            lambda s: replace(s, optimizer=replace(s.optimizer, share=by_chip[s.ranks[0]]))
        )
        return predict(changed, WIDE, cluster, "fp32", options=MUON).step_seconds

    assert best.step_seconds <= 1.03 * min(seconds(n, d) for n in range(1, 10) for d in (1, 2, 3))


def test_pipelines_that_hold_the_same_layers_share_by_speed() -> None:
    cluster = cluster_of(0.4, 0.3)
    best = search(PlanningProblem(WIDE, cluster, 128, 16, SearchOptions(dtype="fp32", costs=MUON))).best
    equal = best.plan.with_stages(lambda s: replace(s, optimizer=replace(s.optimizer, share=1)))
    shares = shares_of(best.plan)
    assert len(best.plan.pipelines) > 1 and shares[0] / shares[2] == pytest.approx(4 / 3, rel=0.1)
    assert best.step_seconds < 0.98 * predict(equal, WIDE, cluster, "fp32", options=MUON).step_seconds


@pytest.mark.parametrize(("slow", "space"), [
    (0.4, SearchSpace()), (0.3, SearchSpace(shares=False)), (0.3, SearchSpace(equal_pipelines="layers")),
])  # fmt: skip
def test_alike_chips_have_equal_shares_and_others_where_that_is_asked_for(slow: float, space: SearchSpace) -> None:
    options = SearchOptions(dtype="fp32", costs=MUON, space=space)
    best = search(PlanningProblem(WIDE, cluster_of(0.4, slow), 128, 16, options)).best
    assert set(shares_of(best.plan).values()) == {1}


def test_a_rank_takes_as_long_as_its_own_matrices_do() -> None:
    """Not as many elements of an average kind: embeddings and head are Adam's."""
    spec = load_model("tiny")
    uneven = plan_from_dict(plan([
        pipe(2, 3, stage([0, 1], [0, 4], tp=2, tp_split=[3, 1]), stage([2], [4, 6])),
        pipe(2, 1, stage([3], [0, 6], optimizer={"share": 3})),
    ], seq_length=128), spec)  # fmt: skip
    cluster = cluster_from_dict({
        "version": 1, "nodes": [{"name": "a", "chips_per_node": 4, "chip": "c"}],
        "chips": {"c": {"memory": "8 GiB", "dtypes": ["fp32"], "emulate": {"speed": 0.5}}},
    })  # fmt: skip
    flops = StepSimulator(uneven, CostModel(spec, cluster, 128, "fp32", MUON)).sync.matrix_flops
    expected = dict.fromkeys(uneven.ranks, 0)
    tensors = {t.name: t for t in logical_tensors(spec)}
    for bucket in make_buckets(uneven, spec, muon=True):
        for name in bucket.names if bucket.matrices else ():
            for matrix in matrix_boxes(tensors[name]):
                (owner,) = [rank for rank, box in bucket.owners[name].items() if box == matrix]
                expected[owner] += STEPS * newton_schulz_flops(*tensors[name].shape[-2:])
    assert flops == pytest.approx({r: n for r, n in expected.items() if n})
    assert sum(flops.values()) == STEPS * sum(
        newton_schulz_flops(*t.shape[-2:]) * len(matrix_boxes(t)) for t in tensors.values() if is_matrix(t)
    )


def test_measured_updates_count_before_the_data_sheet() -> None:
    row = [512, 512, 0.25]
    rates = {n: {"fp32": {"newton_schulz": [row]}} for n in ("fast", "slow")}
    costs = CostModel(WIDE, cluster_of(0.4, 0.2, rates), 128, "fp32", MUON)
    assert costs.products_per_second("fast") == pytest.approx(STEPS * newton_schulz_flops(512, 512) / 0.25)
    assert costs.products_per_second("fast") == costs.products_per_second("slow")
