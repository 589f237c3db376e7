"""Products in fp8 round alike whatever the plan: fp64 weights, against a Hugging Face model in one process."""

from __future__ import annotations

import pytest

from hetero_megatron.plans.fp8 import Fp8
from tests.support.parity import check_case, fixed_case
from tests.support.pool import shared_pool
from tests.support.small_plans import LLAMA, pipe, plan, stage

# Cut in two, each axis is cut at 128.
WIDE = LLAMA | {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "head_dim": 32,
                "num_key_value_heads": 8, "intermediate_size": 256, "max_position_embeddings": 512}  # fmt: skip
TP = plan([pipe(2, 1, stage([0, 1], [0, 2], tp=2)), pipe(1, 2, stage([2], [0, 1]), stage([3], [1, 2]))])
UNEVEN = plan([pipe(2, 2, stage([2, 0, 1], [0, 3], tp=3, tp_split=[1, 1, 2], recompute="elementwise"))])
SPLIT = plan(
    [pipe(2, 3, stage([0, 1], [0, 1], tp=2, recompute="full"), stage([2], [1, 2], recompute="elementwise"))],
    schedule="zero-bubble",
)
CONTEXT = plan([pipe(2, 1, stage([0, 1, 2, 3], [0, 2], tp=2, tp_split=[1, 1], order="contiguous", context=[
    {"ranks": [[0, 1]], "tokens": [128], "heads": [8]}, {"ranks": [[2, 3]], "tokens": [140], "heads": [8]}
]))], seq_length=268)  # fmt: skip
del CONTEXT["pipelines"][0]["stages"][0]["tp"]
MIXED = plan([pipe(1, 2, stage([0], [0, 2], dtype="fp8"))])


@pytest.mark.parametrize(
    ("model", "divided", "fp8"),
    [
        pytest.param(WIDE, TP, Fp8("hybrid", "blockwise"), id="blockwise-tp-beside-a-pipeline"),
        pytest.param(WIDE, TP, Fp8("e4m3", "tensorwise"), id="tensorwise-tp-beside-a-pipeline"),
        pytest.param(WIDE, SPLIT, Fp8("hybrid", "tensorwise"), id="tensorwise-weight-gradients-put-off"),
        pytest.param(WIDE, SPLIT, Fp8("e4m3", "blockwise"), id="blockwise-weight-gradients-put-off"),
        pytest.param(WIDE, CONTEXT, Fp8("hybrid", "blockwise"), id="blockwise-context"),
        pytest.param(
            LLAMA, UNEVEN, Fp8("hybrid", "tensorwise"), id="tensorwise-uneven-tp", marks=pytest.mark.slow
        ),
        pytest.param(WIDE, MIXED, Fp8("hybrid", "blockwise"), id="one-process"),
    ],
)
def test_fp8_does_not_depend_on_the_plan(model: dict[str, object], divided: dict[str, object], fp8: Fp8) -> None:
    check_case(fixed_case(model, divided, fp8=fp8, optimizer="sgd"), shared_pool())
