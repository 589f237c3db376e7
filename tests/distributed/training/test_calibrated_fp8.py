"""Calibration of products in fp8: what is measured where, and that prices are what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hetero_megatron.calibration import Job
from hetero_megatron.calibration.fp8_products import Fp8Tables, measure_fp8
from hetero_megatron.cli.calibrate import main as calibrate_main
from hetero_megatron.cluster import cluster_from_dict, load_cluster
from hetero_megatron.comm import Comm, start_comm
from hetero_megatron.emulation.clock import EmulatedClock, OperatorSeconds
from hetero_megatron.errors import UserError
from hetero_megatron.ops import SPECS, Registry
from hetero_megatron.ops.registry import reference_kernel
from hetero_megatron.ops.spec import Capability
from hetero_megatron.plans.fp8 import RECIPES, Fp8
from hetero_megatron.platform import Platform
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.predictor.cost.rates import load_rates
from hetero_megatron.spec import ModelSpec
from hetero_megatron.training.config import OptimizerConfig
from hetero_megatron.training.kernels import fp8_kernels
from hetero_megatron.training.train import optimizer_factory
from tests.support.pool import shared_pool

SMALL = ModelSpec("small", "llama", 2, 32, 64, 2, 2, 16, 64, 64)
FAST: dict[str, Any] = {
    "nodes": [{"name": "fast", "count": 2, "chip": "big"}],
    "chips": {"big": {"memory": "2 GiB", "dtypes": ["bf16", "fp8"], "emulate": {"speed": 0.4}}},
    "links": {"inter_node": {"bandwidth": "50 MB/s"}},
}


def refused(*_: Any) -> Any:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nmore")


def measured(comm: Comm, speeds: list[float], broken: str = "") -> Fp8Tables:
    """Products in fp8 by their definitions, on chips that are emulated by the clock; a library refuses ``broken``."""
    kernels = {recipe: reference_kernel(SPECS[f"gemm_fp8_{recipe}"]) for recipe in RECIPES}
    kernels = {r: replace(k, forward=refused) if r == broken else k for r, k in kernels.items()}
    comm.clock = EmulatedClock(lambda: speeds[comm.rank], OperatorSeconds())
    try:
        job = Job(comm, torch.bfloat16, optimizer_factory(OptimizerConfig()), fp8=kernels)
        return measure_fp8(job, SMALL, (1, 2), (1, 2), 16, 1)
    finally:
        comm.clock = comm.hooks.clock


@pytest.mark.slow
def test_products_in_fp8_are_measured_and_priced_as_they_were() -> None:
    fast, slow, *_ = shared_pool().run(measured, [2.0] + [1.0] * 7)
    assert set(fast) == {"fp8_tensorwise", "fp8_blockwise"}
    h, f = 32, 64
    shapes = {(h, h), (h // 2, h), (h, h // 2), (f, h), (h, f), (f // 2, h), (h, f // 2)}  # whole, and cut in two
    for section, tables in fast.items():
        for table, seconds in (("gemm", 1), ("gemm_backward", 2)):
            assert {tuple(row[:3]) for row in tables[table]} == {(m, *shape) for m in (16, 32) for shape in shapes}
            for row, other in zip(tables[table], slow[section][table], strict=True):
                assert len(row) == 3 + seconds and min(row[3:]) > 0
                assert other[3:] == pytest.approx([2 * s for s in row[3:]], rel=1e-6)
        known = cluster_from_dict({**FAST, "rates": {"chips": {"big": {section: tables}}}})
        options = CostOptions(fp8=Fp8("e4m3", section.removeprefix("fp8_")))
        products = CostModel(SMALL, known, 16, "bf16", options).operators("big", True).fp8
        assert products is not None
        for (*size, forward), (*_, dx, dw) in zip(tables["gemm"], tables["gemm_backward"], strict=True):
            assert products.seconds(*size) == pytest.approx((forward, dx, dw))


def test_a_library_that_refuses_a_product_leaves_the_other_rates(capfd: pytest.CaptureFixture[str]) -> None:
    comm = start_comm(Platform(torch.device("cpu"), "gloo"), 60)
    assert set(measured(comm, [1.0], "tensorwise")) == {"fp8_blockwise"}
    said = capfd.readouterr().err
    assert "gemm_fp8_tensorwise:reference fails" in said and "CUBLAS_STATUS_NOT_SUPPORTED\n" in said


def test_it_is_measured_where_runs_would_have_it_unasked() -> None:
    platform, given = Platform(torch.device("cpu"), "gloo"), reference_kernel(SPECS["gemm_fp8_blockwise"])
    for devices, recipes in (("cpu", "other"), ["blockwise"]), (("other",), []):
        registry = Registry(SPECS, [replace(given, provider="acme", capability=Capability(automatic=devices))])
        assert list(fp8_kernels(registry, platform, torch.bfloat16)) == recipes


@pytest.mark.slow
def test_chips_with_fp8_get_its_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETERO_TESTBED", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("HETERO_NODE", "slow")
    file = tmp_path / "cluster.yaml"
    rates = {"tflops": {"bf16": 0.1}, "memory_bandwidth": "10 GB/s"}
    chips = {"small": {"memory": "1 GiB", "dtypes": ["fp32", "bf16", "fp8"], **rates}}
    file.write_text(yaml.safe_dump({"nodes": [{"name": "slow", "count": 1, "chip": "small"}], "chips": chips}))
    sizes = ["--micro-batch-sizes", "1", "--steps", "1", "--seq-length", "16"]
    assert calibrate_main(["--cluster", str(file), "--model", "tiny", "--dtype", "bf16", *sizes]) == 0
    cluster = load_cluster(str(file))
    assert set(cluster.rates["chips"]["small"]) == {"bf16", "fp8_tensorwise", "fp8_blockwise"}
    for recipe in RECIPES:
        rates = load_rates(cluster, "bf16", recipe).fp8["small"]
        assert rates.calibrated and {row[0] for row in rates.gemm} == {row[0] for row in rates.gemm_backward} == {16}
    with pytest.raises(UserError, match="gemm_backward"):
        load_rates(replace(cluster, rates={"chips": {"small": {"bf16": {"gemm_backward": []}}}}), "bf16")
