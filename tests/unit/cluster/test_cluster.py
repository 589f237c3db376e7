"""Cluster files: ranks, chips, links."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hetero_megatron.cli.main import main
from hetero_megatron.cluster import CHIPS, Chip, cluster_from_dict, load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plans import idle_ranks, plan_from_dict
from tests.support.paths import ROOT
from tests.unit.plan.test_bad_input import small_spec
from tests.unit.plan.test_plan import spelled

CLUSTER = """
version: 1
nodes:
  - {name: fast, count: 2, chip: big,   chips_per_node: 2}
  - {name: slow, chip: small}
chips:
  big:   {memory: 2 GiB, emulate: {speed: 0.6, memory: 1 GiB}, dtypes: [fp32, bf16], tflops: {bf16: 1.5}}
  small: {memory: 512 MB, emulate: {speed: 0.2}}
links:
  intra_node: {bandwidth: 2 GB/s,  latency: 20 us}
  inter_node: {bandwidth: 400 Mbit/s, latency: 0.1 ms}
  pairs:
    - {between: [slow, fast], bandwidth: 25 MB/s, emulate: {bandwidth: 20 MB/s}}
"""


def test_cluster_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    cluster = load_cluster(path)
    assert [(r.node, r.chip, r.local) for r in cluster.ranks] == [
        ("fast-0", "big", 0),
        ("fast-0", "big", 1),
        ("fast-1", "big", 0),
        ("fast-1", "big", 1),
        ("slow", "small", 0),
    ]
    assert cluster.chips["big"].memory == 2 << 30 and cluster.chips["small"].memory == 512_000_000
    assert cluster.chips["big"].flops == {"bf16": 1.5e12} and cluster.chips["big"].speed == 0.6
    within, between, pair = cluster.link(0, 1), cluster.link(1, 2), cluster.link(4, 0)
    assert within is not None and within.latency == pytest.approx(20e-6)
    assert between is not None and between.bandwidth == pytest.approx(50e6)
    assert pair is not None and (pair.bandwidth, pair.emulated) == (25e6, 20e6)
    assert cluster.find("fast-1", 1).rank == 3
    with pytest.raises(UserError, match="no such chip"):
        cluster.find("fast-2", 0)


def test_the_documented_chips_are_those_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--chips"]) == 0
    table = capsys.readouterr().out
    written = (ROOT / "docs" / "chips.md").read_text(encoding="utf-8")
    assert written.endswith(f"\n\n{table}"), "the table is what hetero-megatron doctor --chips prints"
    assert main(["doctor", "--chips", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["H100-SXM"]["flops"]["fp32"] == 67e12
    for chip in CHIPS.values():
        assert chip.source and set(chip.flops) <= set(chip.dtypes), chip.name
        slower = [chip.flops[dtype] for dtype in ("fp64", "fp32", "fp16") if dtype in chip.flops]
        assert slower == sorted(slower), f"{chip.name}: fp64, fp32 (not TF32), 16 bit"


def test_what_a_file_says_of_a_known_chip_replaces_the_catalogue() -> None:
    def chip(**entry: object) -> Chip:
        nodes = [{"name": "n", "chip": "H100-SXM"}]
        return cluster_from_dict({"nodes": nodes, "chips": {"H100-SXM": entry}}).chips["H100-SXM"]

    known = CHIPS["H100-SXM"]
    assert chip(memory="64 GiB") == replace(known, memory=64 << 30)
    one = chip(dtypes=["bf16"])
    assert (one.flops, one.source) == ({"bf16": known.flops["bf16"]}, known.source)
    assert chip(tflops={"bf16": 900}).source == chip(memory_bandwidth="3 TB/s").source == "cluster file"
    assert chip(tflops={"bf16": 900}, source="our own").source == "our own"


def test_emulated_links() -> None:
    nodes = [{"name": "n", "chip": "T4", "count": 2}, {"name": "n-2", "chip": "L4"}]  # n-2 is no node of the group n
    links = {"inter_node": {"bandwidth": "1 GB/s", "latency": "5 us", "emulate": {"latency": "2 ms"}}}
    link = cluster_from_dict({"nodes": nodes, "links": links}).link(0, 1)
    assert link is not None and link.emulated is None
    assert (link.latency, link.emulated_latency) == (pytest.approx(5e-6), pytest.approx(2e-3))


def test_plan_on_a_cluster_leaves_ranks_idle() -> None:
    cluster = cluster_from_dict(yaml.safe_load(CLUSTER))
    spec = small_spec()
    plan = plan_from_dict(
        spelled([{"ranks": "0-1", "layers": [0, 6], "tp": 2, "chip": "big"}]), spec, cluster, "bf16"
    )
    assert idle_ranks(plan, cluster) == (2, 3, 4)
    assert cluster_from_dict({"nodes": [{"name": "n", "chip": "T4"}]}).link(0, 0) is not None
