"""Outer steps between islands of unlike plans, on real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hetero_megatron.plans import plan_from_dict
from tests.support.parity import Case, fixed_case, reference, run_case, run_rank
from tests.support.pool import shared_pool
from tests.support.small_plans import LLAMA, pipe, plan, stage

MODEL = LLAMA | {"num_hidden_layers": 4}
# Unequal islands: layers 3:1 over two ranks and a replica beside it; a TP group of unequal shares beside a pipeline.
PIPELINES = {
    "layers 3:1 and a TP group": ([[0, 1, 2], [3, 4]], [
        pipe(1, 3, stage([0], [0, 3]), stage([1], [3, 4])), pipe(2, 1, stage([2], [0, 4])),
        pipe(2, 2, stage([3, 4], [0, 4], tp=2, tp_split=[1, 2])),
    ]),
    "three islands": ([[1, 2], [0], [3, 4, 5]], [
        pipe(1, 2, stage([0], [0, 4])), pipe(3, 1, stage([1, 2], [0, 4], tp=1, dp_split=[1, 2])),
        pipe(1, 3, stage([5, 3], [0, 1], tp=2), stage([4], [1, 4])),
    ]),
}  # fmt: skip


def case_of(name: str, outer: dict[str, Any] | None, **changes: Any) -> Case:
    islands, pipelines = PIPELINES[name]
    made = plan(pipelines) | ({"outer": {"islands": islands, **outer}} if outer is not None else {})
    return fixed_case(MODEL, made, **{"optimizer": "sgd", "momentum": 0.0, "clip_grad": 0.0, **changes})


@pytest.mark.parametrize("name", PIPELINES)
def test_every_step_with_plain_sgd_is_synchronous_training(name: str) -> None:
    """Against one process on the Hugging Face model, though documents' ends leave the islands unlike numbers of
    tokens."""
    case = case_of(name, {"every": 1, "optimizer": {"lr": 1, "momentum": 0}}, masked=True)
    want, ranks = run_case(case, shared_pool())
    for got in ranks:
        np.testing.assert_allclose(got["losses"], want.losses, rtol=1e-12, atol=0)
        for key, box, array in got["weights"]:
            part = want.weights[key].double().numpy()
            scale = max(float(np.abs(part).max()), 1e-3)
            assert np.abs(array - part[box.slices()]).max(initial=0.0) / scale <= 1e-9, (key, box)
