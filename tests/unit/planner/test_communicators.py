"""Memory of communication libraries in the estimates: counted by hand, overridable, none on CPUs."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_megatron.cluster import Cluster, cluster_from_dict
from hetero_megatron.cluster.catalogue import COMMUNICATORS
from hetero_megatron.cluster.dump import document
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.buckets import make_buckets
from hetero_megatron.plans.memory.memory_report import format_memory
from hetero_megatron.plans.memory.of_plan import communicators
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import load_model
from tests.support.small_plans import pipe, plan, stage

MIB = 1 << 20
SPEC = load_model("tiny")
PLAN = plan([pipe(1, 2, stage([0, 1], [0, 3], tp=2), stage([2], [3, 6]))], seq_length=64)


def cluster(*chips: str, **more: Any) -> Cluster:
    nodes = [{"name": f"n{i}", "chip": chip} for i, chip in enumerate(chips)]
    link = {"bandwidth": "1 GB/s", "latency": "10 us"}
    return cluster_from_dict({"version": 1, "nodes": nodes, "links": {"intra_node": link, "inter_node": link}, **more})


def test_groups_and_peers_are_counted() -> None:
    """A TP group of two (one communicator; no gradients travel in it but those of what both hold whole), and pairs of
    pipeline neighbours, one per direction."""
    found = plan_from_dict(PLAN, SPEC)
    buckets = make_buckets(found, SPEC)
    shared = any(len(ranks) > 1 for b in buckets for hop in b.hops for ranks in hop.groups)
    tp = 1 + shared
    assert communicators(found, SPEC, buckets, dict.fromkeys(range(3), "NVIDIA")) == {
        0: (tp + 2, tp + 2), 1: (tp + 2, tp + 2), 2: (4, 4)
    }  # fmt: skip
    assert communicators(found, SPEC, buckets, {0: "NVIDIA", 1: "NVIDIA", 2: "AMD"}) == {
        0: (tp, tp), 1: (tp, tp), 2: (0, 0)
    }  # fmt: skip
    assert set(communicators(found, SPEC, buckets, dict.fromkeys(range(3), "")).values()) == {(0, 0)}


@pytest.mark.parametrize(("chip", "vendor"), [("A100-80-SXM", "NVIDIA"), ("MI300X", "AMD"), ("Ascend-910B", "Huawei")])
def test_predictions_have_them_by_vendor(chip: str, vendor: str) -> None:
    found = predict(plan_from_dict(PLAN, SPEC), SPEC, cluster(chip, chip, chip), "bf16")
    one = COMMUNICATORS[vendor]
    assert found.memory[2].communicators == max(one.bytes(4, 4), one.least) > 0
    assert found.memory[2].total - found.memory[2].overhead >= one.least
    assert "communicators" in format_memory(found.memory) and one.source in found.communicators[0]


def test_the_cluster_file_overrides_them_and_emulated_chips_have_none() -> None:
    chips = {"A100-80-SXM": {"communicators": {"each": "3 MiB", "peer": "1 MiB"}}}
    own = cluster(*["A100-80-SXM"] * 3, chips=chips)
    assert cluster_from_dict(document(own)).chips == own.chips or own.chip_of(0).communicators is not None
    found = predict(plan_from_dict(PLAN, SPEC), SPEC, own, "bf16")
    assert found.memory[2].communicators == (4 * 3 + 16 * 1) * MIB and "cluster file" in found.communicators[0]
    emulated = cluster("slow", "slow", "slow", chips={"slow": {"memory": "2 GiB", "emulate": {"speed": 0.5}}})
    found = predict(plan_from_dict(PLAN, SPEC), SPEC, emulated, "bf16")
    assert not any(needs.communicators for needs in found.memory.values()) and not found.communicators
    assert "communicators" not in format_memory(found.memory)


@pytest.mark.parametrize(
    ("chips", "waiting"),
    [
        (("A100-80-SXM", "A100-80-SXM", "H100-SXM"), (0, 0, 0)),
        (("A100-80-SXM", "A100-80-SXM", "MI300X"), (1, 1, 2)),  # the bridge
        (("A100-80-SXM", "MI300X", "A100-80-SXM"), (0, 1, 0)),  # the first rank shares a library with the last
    ],
)
def test_receives_through_host_memory_are_posted_further_ahead(
    chips: tuple[str, ...], waiting: tuple[int, ...]
) -> None:
    """Three more of a micro-batch's activations (64 tokens), of which a rank of TP 2 gets half."""
    through = predict(plan_from_dict(PLAN, SPEC), SPEC, cluster(*chips), "bf16").memory
    alike = predict(plan_from_dict(PLAN, SPEC), SPEC, cluster(*["A100-80-SXM"] * 3), "bf16").memory
    half = 3 * 64 * SPEC.hidden_size * 2 // 2
    assert [through[r].activations - alike[r].activations for r in range(3)] == [n * half for n in waiting]
