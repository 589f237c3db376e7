"""What the command says of cards is what predictions take."""

from __future__ import annotations

import json

import pytest

from hetero_megatron.cli.main import main
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.cluster.catalogue import CHIPS
from hetero_megatron.predictor.cost.rates import load_rates


def test_they_are_the_rates_of_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cards", "list", "--json"]) == 0
    cards = json.loads(capsys.readouterr().out)
    assert cards.keys() == CHIPS.keys()
    for name in ("A100-80-SXM", "L4", "T4", "RTX4090", "P100-16-PCIe", "W6800"):
        cluster = cluster_from_dict({"version": 1, "nodes": [{"name": "a", "chip": name, "chips_per_node": 1}]})
        for dtype, said in cards[name]["products"].items():
            if dtype != "fp8":
                rates = load_rates(cluster, dtype).chips[name]
                assert said["reached"] == pytest.approx(rates.gemm_flops)
                assert cards[name]["bytes_per_second"] == rates.bytes_per_second
                assert said["half_at"] == round(rates.gemm_half)
    assert "Zorse" in cards["T4"]["products"]["fp16"]["measured_by"]
    assert cards["RTX4090"]["products"]["bf16"]["measured_by"] is None
    assert cards["A100-80-SXM"]["products"]["fp64"]["measured_by"] is None  # taken from 16 bit


def test_tables_and_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cards", "list"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in CHIPS) and "assumed" in told
    assert main(["cards", "compare", "RTX3090", "RTX4090"]) == 0
    assert "165.2" not in (told := capsys.readouterr().out) and "(2.33x)" in told  # 0.75 of both peaks
    assert main(["cards", "show", "L4"]) == 0
    for words, said in (
        (["show", "RTX409"], "did you mean RTX4090?"), (["compare", "L4"], "1 card for compare"),
        (["list", "L4"], "Accepted: no card"), (["sho"], "invalid choice"),
    ):  # fmt: skip
        assert main(["cards", *words]) == 2
        assert said in capsys.readouterr().err
