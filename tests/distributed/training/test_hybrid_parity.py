"""Models with linear attention in some layers, under any plan, give transformers' numbers of one process in fp64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.moe_models import HYBRIDS
from tests.support.parity import check_case, fixed_case
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage

PLANS = {
    # Two pipelines of unlike TP degrees; one TP rank has no key head of linear attention.
    "uneven_tp": plan([
        pipe(2, 2, stage([0, 1, 2], [0, 3], tp=3, tp_split=[2, 1, 1], recompute="full")),
        pipe(1, 1, stage([3], [0, 3])),
    ]),
    # Uneven stages, that of two layers with both kinds of them; each recomputes otherwise.
    "pipeline": plan([
        pipe(2, 3, stage([0, 1], [0, 2], tp=2, tp_split=[2, 1], recompute="elementwise"),
             stage([2], [2, 3], recompute="selective")),
        pipe(1, 2, stage([3], [0, 1], recompute="selective"), stage([4], [1, 3], recompute="elementwise")),
    ]),
    "deferred_weights_and_divided_experts": plan([
        pipe(2, 4, stage([0, 1], [0, 1], tp=2), stage([2, 3], [1, 3], tp=1, dp_split=[1, 1], experts=[
            {"ranks": [2, 3], "experts": [[0, 2], [2, 5]]}])),
    ], schedule="zero-bubble"),
}  # fmt: skip
CONTEXT = {
    # Members have several runs of tokens, some shorter than the convolution, and one has a single token.
    "runs_in_zigzag": plan([pipe(2, 2, stage([0, 1, 2, 3], [0, 3], recompute="selective", kv={"block": 2}, context=[
        {"ranks": [0, 3], "tokens": [4, 2], "heads": [3, 1]}, {"ranks": [1, 2], "tokens": [1, 3], "heads": [0, 4]}]))]),
    "runs_of_three_heads": plan([pipe(2, 2, stage([0, 1, 2], [0, 3], recompute="selective", kv={"block": 2}, context=[
        {"ranks": [0, 2], "tokens": [4, 2], "heads": [2, 1]}, {"ranks": [1], "tokens": [4], "heads": [3]}]))]),
    # Members of unlike TP degrees hand heads on; another pipeline has no context groups.
    "members_of_ranks": plan([
        pipe(2, 2, stage([0, 1, 2], [0, 2], tp_split=[[2, 1], [1]], recompute="full", order="contiguous", context=[
                 {"ranks": [[0, 1], [2]], "tokens": [3, 7], "heads": [1, 2]}]),
             stage([3, 4], [2, 3], dp_split=[1, 1])),
        pipe(1, 1, stage([5], [0, 3])),
    ], schedule="zero-bubble"),
    # One has no tokens, some come in turns; replicas have groups of their own.
    "any_intervals": plan([pipe(3, 2, stage(
        [0, 1, 2, 3, 4], [0, 3], dp_split=[2, 1], kv={"transport": "gather"}, recompute="elementwise", context=[
            [{"ranks": [0, 1], "intervals": [[[0, 1], [2, 3], [5, 7]], []], "heads": [1, 3]},
             {"ranks": [2], "intervals": [[[1, 2], [3, 5], [7, 10]]], "heads": [4]}],
            [{"ranks": [3, 4], "intervals": [[[6, 10]], [[0, 6]]], "heads": [2, 2]}],
        ]))]),
}  # fmt: skip
_QWEN3_NEXT = ("qwen3_next", "qwen3_next_odd")
CASES = [(model, name) for model in _QWEN3_NEXT for name in PLANS]
CASES += [("qwen3_5", "uneven_tp"), ("qwen3_5_moe", "pipeline")]
CASES += [("kimi_linear", "uneven_tp"), ("kimi_linear", "pipeline")]
IN_MAKE_TEST = [("qwen3_next_odd", "pipeline")]


@pytest.mark.parametrize("case", quick(CASES, IN_MAKE_TEST, CASES[::2]), ids=lambda case: "-".join(case))
def test_hybrids_under_plans(case: tuple[str, str]) -> None:
    """Documents are packed into rows: each state begins anew (transformers sees one document per row)."""
    model, name = case
    config = HYBRIDS[model] | {"num_hidden_layers": 3, "layer_types": ORDER[model]}
    check_case(fixed_case(config, PLANS[name], packed=True, masked=True), shared_pool())


FULL, LINEAR = "full_attention", "linear_attention"
ORDER = {
    "qwen3_next": [LINEAR, LINEAR, FULL], "qwen3_next_odd": [LINEAR, FULL, LINEAR], "qwen3_5": [FULL, LINEAR, LINEAR],
    "qwen3_5_moe": [LINEAR, FULL, LINEAR], "kimi_linear": [LINEAR, FULL, LINEAR],
}  # fmt: skip

CONTEXT_CASES = [  # (model, plan, whether documents are packed)
    ("qwen3_next", "runs_in_zigzag", True), ("qwen3_next_odd", "members_of_ranks", True),
    ("qwen3_next", "any_intervals", False), ("qwen3_5", "members_of_ranks", True),
    ("kimi_linear", "members_of_ranks", True), ("kimi_linear", "runs_of_three_heads", True),
]  # fmt: skip


@pytest.mark.parametrize("case", quick(CONTEXT_CASES, CONTEXT_CASES[:1]), ids=lambda case: "-".join(case[:2]))
def test_states_pass_through_context_groups(case: tuple[str, str, bool]) -> None:
    model, name, packed = case
    config = HYBRIDS[model] | {"num_hidden_layers": 3, "layer_types": ORDER[model]}
    check_case(fixed_case(config, CONTEXT[name], packed=packed, masked=packed), shared_pool())


DIVIDED: dict[str, Any] = {
    "tp_split": [[2, 1], [1]], "context": [{"ranks": [[0, 1], [2]], "tokens": [3, 7], "heads": [1, 3]}],
}  # fmt: skip
BESIDE: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {  # kinds of layers, plan, what else
    # The module is like the last layer, and the stage with context groups has nothing but it.
    "modules": ([FULL, LINEAR], plan([pipe(2, 2, stage([3], [0, 2]), stage([0, 1, 2], [], **DIVIDED))]),
                {"predictions": 1}),
    "muon": ([LINEAR, FULL], plan([pipe(2, 2, stage([0, 1, 2], [0, 2], **DIVIDED))]), {"optimizer": "muon"}),
    "activations_in_host_memory": (
        [LINEAR, FULL, LINEAR],
        plan([pipe(2, 3, stage([0, 1, 2], [0, 2], activations={"offload": "all"}, **DIVIDED), stage([3], [2, 3]))]),
        {"packed": True},
    ),
    "chunks": (
        [LINEAR, FULL, LINEAR, LINEAR],
        plan([pipe(2, 3, stage([0, 1, 2], [[0, 1], [2, 3]], recompute="selective", **DIVIDED),
                   stage([3, 4], [[1, 2], [3, 4]], context=[{"ranks": [3, 4], "tokens": [6, 4], "heads": [2, 2]}]))],
             schedule="interleaved"),
        {},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_states_pass_beside(name: str) -> None:
    kinds, divided, more = BESIDE[name]
    config = HYBRIDS["qwen3_next"] | {"num_hidden_layers": len(kinds), "layer_types": kinds}
    check_case(fixed_case(config, divided, **more), shared_pool())
