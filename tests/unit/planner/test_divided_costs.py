"""What gathers and sums of divided weights add to a predicted step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cluster import load_cluster
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.buckets import make_buckets
from hetero_megatron.predictor.cost.rates import LINK_BANDWIDTH
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec.presets import load_model
from tests.support.small_plans import pipe, plan, stage

SPEC = load_model("llama3-8b")
COUNT = 8
CLUSTER = """
version: 1
nodes: [{{name: a, count: 1, chip: H100-SXM, chips_per_node: 4}}]
links:
  intra_node: {{bandwidth: {bandwidth}, latency: 5 us}}
  inter_node: {{bandwidth: {bandwidth}, latency: 5 us}}
"""


def _seconds(directory: Path, bandwidth: str, **weights: Any) -> float:
    (directory / "cluster.yaml").write_text(CLUSTER.format(bandwidth=bandwidth))
    cluster = load_cluster(directory / "cluster.yaml")
    more = {"weights": weights} if weights else {}
    made = plan_from_dict(plan([pipe(4, COUNT, stage([0, 1, 2, 3], [0, 32], **more))], 2048), SPEC)
    return predict(made, SPEC, cluster, "bf16").step_seconds


def test_each_gather_is_paid_for(tmp_path: Path) -> None:
    """On links that hide nothing, what another gather of all weights takes is their bytes over the bandwidth; on fast
    ones most of it happens while layers compute."""
    slow, fast = "100 MB/s", "400 GB/s"
    step = _seconds(tmp_path, slow, gather="step")
    kept = _seconds(tmp_path, slow, gather="layer", reshard_after_forward=False)
    layer = _seconds(tmp_path, slow, gather="layer")
    assert _seconds(tmp_path, slow) < step < kept < layer <= _seconds(tmp_path, slow, gather="micro-batch")
    made = plan_from_dict(plan([pipe(4, COUNT, stage([0, 1, 2, 3], [0, 32], weights={}))], 2048), SPEC)
    held = sum(bucket.counts()[0][0] for bucket in make_buckets(made, SPEC))
    # Backward gathers everything but the embedding; every rank gives what it owns to three others.
    passes = 2 * (held - SPEC.vocab_size * SPEC.hidden_size) * 3 / 4
    assert layer - kept == pytest.approx(COUNT * passes / (LINK_BANDWIDTH * 100e6), rel=0.01)
    assert _seconds(tmp_path, fast, gather="layer") < 0.95 * _seconds(tmp_path, fast, gather="micro-batch")


def test_gathers_and_sums_share_the_links(tmp_path: Path) -> None:
    """On links that hide the sums of a layer's gradients behind its backward, but not the next gather beside them, what
    gathers add to backward is all of their bytes over the bandwidth."""
    bandwidth = "250 GB/s"
    kept = _seconds(tmp_path, bandwidth, gather="layer", reshard_after_forward=False)
    assert kept < 1.1 * _seconds(tmp_path, "400 GB/s", gather="layer", reshard_after_forward=False)
    made = plan_from_dict(plan([pipe(4, COUNT, stage([0, 1, 2, 3], [0, 32], weights={}))], 2048), SPEC)
    held = sum(bucket.counts()[0][0] for bucket in make_buckets(made, SPEC))
    passes = COUNT * 2 * (held - SPEC.vocab_size * SPEC.hidden_size) * 3 / 4 / (LINK_BANDWIDTH * 250e9)
    assert _seconds(tmp_path, bandwidth, gather="layer") - kept > 0.9 * passes
