"""Megatron's virtual pipeline stages are layer ranges of the stages of an interleaved plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetero_megatron.plans import plan_from_dict, to_dict
from hetero_megatron.plans.importers.megatron import from_megatron
from hetero_megatron.plans.importers.megatron_stages import MegatronParallel
from tests.unit.plan.test_bad_input import small_spec


@pytest.mark.parametrize(
    ("num_layers", "pp", "more", "expected"),
    [
        (8, 2, {"num_layers_per_virtual_pipeline_stage": 2}, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
        (8, 2, {"num_virtual_stages_per_pipeline_rank": 2}, [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]),
        (6, 2, {"num_virtual_stages_per_pipeline_rank": 2, "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True}, [[(0, 1), (3, 5)], [(1, 3), (5, 6)]]),
        (6, 2, {"num_virtual_stages_per_pipeline_rank": 2, "decoder_first_pipeline_num_layers": 2},
         [[(0, 1), (3, 4)], [(1, 3), (4, 6)]]),
        (6, 2, {"pipeline_model_parallel_layout": "Et|(tt|)*2tL"}, [[(0, 1), (3, 5)], [(1, 3), (5, 6)]]),
        (3, 2, {"pipeline_model_parallel_layout": "E|tt|t|L"}, [[(0, 0), (2, 3)], [(0, 2), (3, 3)]]),
    ],
)  # fmt: skip
def test_megatron_virtual_stages(
    num_layers: int, pp: int, more: dict[str, Any], expected: list[list[tuple[int, int]]]
) -> None:
    flags = MegatronParallel(world_size=pp, seq_length=32, pipeline_model_parallel_size=pp, **more)
    spec = small_spec(num_layers)
    plan = from_megatron(flags, spec)
    assert [list(stage.layers) for stage in plan.pipelines[0].stages] == expected
    assert plan.schedule == "interleaved" and plan.pipelines[0].chunks == 2
    assert plan.pipelines[0].stages[0].embed and plan.pipelines[0].stages[-1].head
    assert plan_from_dict(to_dict(plan), spec).fingerprint() == plan.fingerprint()
    assert from_megatron(replace(flags, schedule="zero-bubble"), spec) == replace(plan, schedule="zero-bubble")
