"""What calibration says about routed experts, against the emulated clock at other sizes."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_megatron.calibration.expert_rates import _exchanges, _experts, measure_experts
from hetero_megatron.calibration.layers import Job
from hetero_megatron.calibration.pipelines import one_rank
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.emulation.clock import EmulatedClock, OperatorSeconds
from hetero_megatron.errors import UserError
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.rates import load_rates
from hetero_megatron.predictor.cost.rates_document import as_document
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import whole_share
from hetero_megatron.spec.expert_load import ExpertLoad
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.moe_models import MOE_FAMILIES
from tests.support.small_plans import LLAMA, pipe, plan, stage

MODEL = MOE_FAMILIES["mixtral"] | {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 8, "head_dim": 16}
CLUSTER = {
    "nodes": [{"name": "n", "chip": "c", "count": 2, "chips_per_node": 1}],
    "chips": {"c": {"memory": "8 GiB", "emulate": {"speed": 50.0}}},
    "links": {"inter_node": {"bandwidth": "10 GB/s", "latency": "1 us"}},
}


def job(speed: float = 50.0) -> Any:
    clock = EmulatedClock(lambda: speed, OperatorSeconds())
    return Job(SimpleNamespace(clock=clock, rank=0, device=torch.device("cpu")), torch.float32, None)  # type: ignore[arg-type]


def test_experts_are_priced_as_the_clock_has_them() -> None:
    spec, here = from_hf_config(MODEL), job()
    rows, _ = measure_experts(here, spec, (1,), 256, 1)
    given = CLUSTER | {"rates": {"chips": {"c": {"fp32": {"experts": rows}}}}}
    operators = CostModel(spec, cluster_from_dict(given), 64, "fp32").operators("c")
    kernels = here.kernels_of(one_rank(0, spec), spec, False)
    for experts, tokens in ((6, 200), (3, 120)):
        load = ExpertLoad(1.0, tokens, tokens, tokens, 2.0 * tokens, experts, 96.0, 1)
        measured = _experts(here, spec, replace(whole_share(spec), experts=(0, experts)), tokens, kernels)
        constant = _experts(here, spec, replace(whole_share(spec), experts=(0, 2)), 2, kernels)
        for way in (0, 1):  # without what a call takes in any case
            assert 0.8 * (measured[way] - constant[way]) < operators.experts(load)[way] < 1.1 * measured[way]


def test_exchanges_are_priced_as_the_clock_has_them() -> None:
    """All of one: a plain layer has none, so nothing of it cancels out."""
    spec, here = from_hf_config(MODEL), job()
    rows, _ = measure_experts(here, spec, (1,), 256, 1)
    given = CLUSTER | {"rates": {"chips": {"c": {"fp32": {"experts": rows}}}}}
    operators = CostModel(spec, cluster_from_dict(given), 64, "fp32").operators("c")
    for members, call, sent in _exchanges(here, spec, 400):
        load = ExpertLoad(1.0, 400.0, sent, sent, 800.0, 4, 96.0, members)
        there, here_alone = operators.experts(load), operators.experts(replace(load, members=1))
        for way, measured in enumerate(call()):
            assert there[way] - here_alone[way] == pytest.approx(measured, rel=0.03)


def test_rows_of_an_earlier_version_are_refused() -> None:
    rows = [["0" * 12, 96.0, *[1e-6] * 8]]
    with pytest.raises(UserError, match="lists of 12 values"):
        load_rates(cluster_from_dict(CLUSTER | {"rates": {"chips": {"c": {"fp32": {"experts": rows}}}}}), "fp32")


def test_measured_experts_move_what_is_predicted() -> None:
    """The rows of a cluster file are read, written back alike, and scale a plan's experts."""
    spec = from_hf_config(MODEL)
    rows, _ = measure_experts(job(), spec, (1,), 256, 1)
    made = plan_from_dict(plan([
        pipe(4, 2, stage([0, 1], [0, 2], tp=1, experts=[{"ranks": [0, 1], "experts": [[0, 6], [6, 8]]}]))
    ], seq_length=64), spec)  # fmt: skip
    seconds = []
    for factor in (1, 2, 4):
        slower = [[*row[:2], *(s * factor for s in row[2:])] for row in rows]
        cluster = cluster_from_dict(CLUSTER | {"rates": {"chips": {"c": {"fp32": {"experts": slower}}}}})
        rates = load_rates(cluster, "fp32")
        assert as_document(rates.chips["c"])["experts"] == slower
        seconds.append(predict(made, spec, cluster, "fp32").step_seconds)
    assert seconds[2] - seconds[1] == pytest.approx(2 * (seconds[1] - seconds[0]), rel=0.02) and seconds[1] > seconds[0]


def test_a_dense_model_has_no_experts_to_time() -> None:
    assert measure_experts(job(), from_hf_config(LLAMA), (1,), 64, 1) == ([], 0.0)
