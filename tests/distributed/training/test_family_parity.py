"""Every dense family under uneven plans gives transformers' numbers of one process, in fp64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.families import DENSE
from tests.support.parity import check_case, fixed_case
from tests.support.pool import shared_pool
from tests.support.selection import quick
from tests.support.small_plans import pipe, plan, stage


def uneven_tp(layers: int, heads: int) -> dict[str, Any]:
    """Two pipelines of unlike TP degrees and batch shares; one TP rank has no key-value head of its own."""
    return plan(
        [
            pipe(2, 2, stage([0, 1, 2], [0, layers], tp=3, tp_split=[2, 1, 1], recompute="full")),
            pipe(1, 1, stage([3], [0, layers])),
        ]
    )


def pipeline(layers: int, heads: int) -> dict[str, Any]:
    """Three stages, TP beside none; they recompute elementwise results, attention, and elementwise results."""
    return plan(
        [
            pipe(
                2, 3, stage([0, 1], [0, 1], tp=2, tp_split=[3, 1], recompute="elementwise"),
                stage([2], [1, 2], recompute="selective"), stage([3], [2, layers], recompute="elementwise"),
            )
        ]
    )  # fmt: skip


def context_stage(ranks: list[int], layers: list[int], heads: int) -> dict[str, Any]:
    """A context group of unlike members, each a TP group, keys passing by in small blocks."""
    a, b, c, d = ranks
    groups = [
        {"ranks": [d, a], "tokens": [4, 3], "heads": [1, heads - 1]},
        {"ranks": [b, c], "tokens": [2, 1], "heads": [heads, 0]},
    ]
    return stage(ranks, layers, kv={"block": 2}, recompute="elementwise", context=groups)


def context(layers: int, heads: int) -> dict[str, Any]:
    return plan([pipe(1, 2, context_stage([0, 1, 2, 3], [0, layers], heads))])


def together(layers: int, heads: int) -> dict[str, Any]:
    """Uneven TP, then a context group, beside a pipeline of one rank; each has a layer of either kind where a model
    has two kinds in turn."""
    cut = layers // 2
    tp = stage([0, 1, 2], [0, cut], tp=3, tp_split=[2, 1, 1], recompute="elementwise")
    alone = stage([7], [0, layers], recompute="selective")
    return plan([pipe(1, 2, tp, context_stage([3, 4, 5, 6], [cut, layers], heads)), pipe(1, 1, alone)])


PLANS = {"uneven_tp": uneven_tp, "pipeline": pipeline, "context": context, "together": together}
QUICK = [
    ("gemma2", "uneven_tp"), ("gemma2", "context"), ("gemma3", "pipeline"), ("phi4_mini", "uneven_tp"),
    ("olmo2_one_kv_head", "uneven_tp"), ("olmo3", "context"), ("smollm3", "pipeline"), ("glm4", "uneven_tp"),
    ("granite", "pipeline"), ("gpt_neox_three_heads", "pipeline"), ("phi_qk_norm", "uneven_tp"),
    ("falcon_three_heads", "uneven_tp"), ("stablelm_parallel", "uneven_tp"), ("cohere2_mixed", "context"),
]  # fmt: skip
CASES = [*QUICK, *((family, "together") for family in DENSE)]


@pytest.mark.parametrize("case", quick(CASES, QUICK[::2], CASES[::4]), ids=lambda case: "-".join(case))
def test_families_under_plans(case: tuple[str, str]) -> None:
    family, name = case
    model = DENSE[family]
    found = PLANS[name](model["num_hidden_layers"], model["num_attention_heads"])
    # Long or short factors go by the run's sequence length here, by the longest document of a batch in transformers.
    packed = name != "uneven_tp" and "longrope" not in str(model)
    check_case(fixed_case(model, found, packed=packed, chunked_loss=name in ("pipeline", "together")), shared_pool())
