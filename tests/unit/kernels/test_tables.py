"""Limits, tuning tables and the tuner of the Triton kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hetero_kernels as hk
from hetero_kernels import limits as chip_limits
from hetero_kernels import multi_tensor, tune
from hetero_kernels.limits import TABLES, config, flat_tile, load_table, row_tile
from tests.support.kernel_cases import DEVICE, FP32


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda p: p.stem)
def test_tables_are_complete_and_sane(path: Path) -> None:
    table = json.loads(path.read_text())
    assert table["arch"] == path.stem and set(table["ops"]) >= set(tune.CANDIDATES) | {"linear_cross_entropy"}
    for op, rules in table["ops"].items():
        assert any(rule["max_size"] is None and "dtypes" not in rule for rule in rules), op
        for rule in rules:
            numbers = rule["config"]
            assert all(n > 0 and n & (n - 1) == 0 for key, n in numbers.items() if key != "num_stages"), (op, numbers)


def test_a_chip_without_a_table_gets_the_generic_one_and_says_so() -> None:
    load_table.cache_clear()
    with pytest.warns(UserWarning, match="no tuning table for some-chip"):
        chosen = config("rope", 128, FP32, hk.Limits(arch="some-chip"))
    assert chosen == config("rope", 128, FP32, hk.Limits(arch="generic"))
    with pytest.raises(FileNotFoundError, match="nowhere.json"):
        config("rope", 128, FP32, hk.Limits(table="/nowhere.json"))


def test_a_grid_is_wide_only_where_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"multiprocessor_count": 40, "max_shared_mem": 1 << 17}
    for backend, grid in (("cuda", 2**31 - 1), ("npu", 65_535)):
        target = SimpleNamespace(backend=backend, arch=9, warp_size=32)
        driver = SimpleNamespace(
            utils=SimpleNamespace(get_device_properties=lambda _: properties), get_current_device=int,
            get_current_target=lambda target=target: target,
        )  # fmt: skip
        monkeypatch.setattr(chip_limits.triton.runtime, "driver", SimpleNamespace(active=driver))
        assert chip_limits._detect.__wrapped__("any", None).max_grid == grid


def test_tiles_respect_the_limits() -> None:
    for rows in (1, 7, 65_536, 1_000_000):
        for width in (1, 100, 4096, 200_000):
            for limits in (hk.Limits(), hk.Limits(max_grid=7, max_block=64, max_warps=2)):
                for op in ("norm_fwd", "norm_bwd", "softmax", "cross_entropy_fwd"):
                    tile = row_tile(op, rows, width, FP32, limits)
                    assert tile.grid[0] <= limits.max_grid and tile.block_cols <= limits.max_block
                    assert tile.num_warps <= limits.max_warps and tile.whole == (tile.block_cols >= width)
                tile = flat_tile("elementwise", rows, width, FP32, limits)
                assert tile.grid[0] <= limits.max_grid and tile.block_cols <= limits.max_block


def test_the_tuner_writes_a_table_that_is_used(tmp_path: Path) -> None:
    """Real kernels, timed on what there is; the timer makes the second candidate win."""
    calls: list[float] = []

    def timer(run: Callable[[], Any]) -> float:
        run()
        calls.append(1.0 if len(calls) % 2 else 2.0)
        return calls[-1]

    limits = hk.limits_of(DEVICE)
    candidates = {
        "norm_fwd": [{"tile": 64, "max_cols": 32, "num_warps": 4}, {"tile": 128, "max_cols": 64, "num_warps": 2}],
        "attention_fwd": [{"block_q": 16, "block_k": 16, "num_warps": 4, "num_stages": 1} for _ in range(2)],
    }
    sizes = {"norm_fwd": [32, 100], "attention_fwd": [16]}
    table = tune.tune(list(sizes), FP32, DEVICE, limits, timer, tokens=8, candidates=candidates, sizes=sizes)
    assert len(calls) == 6
    before = load_table(limits.arch, limits.table)
    mine, former = table["ops"]["norm_fwd"][:2], table["ops"]["norm_fwd"][2:]
    assert [rule["max_size"] for rule in mine] == [32, None] and former == before["norm_fwd"]
    assert all(rule["config"] == candidates["norm_fwd"][1] and rule["dtypes"] == ["fp32"] for rule in mine)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    tuned = hk.Limits(arch=limits.arch, table=str(path))
    assert row_tile("norm_fwd", 8, 100, FP32, tuned).block_cols == 64
    for op, dtype in (("rope", FP32), ("norm_fwd", torch.bfloat16)):  # the rest is as it was
        assert config(op, 64, dtype, tuned) == config(op, 64, dtype, limits)
    again = tune.tune(["norm_fwd"], FP32, DEVICE, tuned, timer, 8, candidates, sizes)
    assert [rule["max_size"] for rule in again["ops"]["norm_fwd"]] == [32, None, *(r["max_size"] for r in former)]


def test_a_table_tuned_with_16_bits_leaves_other_dtypes_as_they_were(tmp_path: Path) -> None:
    option = {"tile": 32, "num_warps": 2}
    limits, ops = hk.limits_of(DEVICE), ["elementwise", "l2norm"]
    table = tune.tune(ops, torch.bfloat16, DEVICE, limits, lambda _: 1.0, 1, {op: [option] for op in ops})
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    tuned = hk.Limits(arch=limits.arch, table=str(path))
    for dtype in (torch.float16, torch.bfloat16):
        assert config("elementwise", 64, dtype, tuned) == option
    assert config("elementwise", 64, FP32, tuned) == config("elementwise", 64, FP32, limits)
    assert config("l2norm", 64, FP32, tuned) == option  # its table is asked in fp32 always


def test_the_tuner_leaves_out_what_does_not_run(tmp_path: Path) -> None:
    def run(limits: hk.Limits) -> None:
        if config("rope", 64, FP32, limits)["tile"] == 1:
            raise RuntimeError("too small")

    options = [{"tile": 1, "num_warps": 4}, {"tile": 2, "num_warps": 4}]
    best, _ = tune.tune_op("rope", 64, FP32, options, run, hk.INTERPRETER, lambda f: f() or 1.0, tmp_path)
    assert best["tile"] == 2
    with pytest.raises(RuntimeError, match="no tile size of rope"):
        tune.tune_op("rope", 64, FP32, options[:1], run, hk.INTERPRETER, lambda f: f() or 1.0, tmp_path)


def test_the_tuner_times_attention_only_as_it_is_asked_for(tmp_path: Path) -> None:
    """What does not fit on the chip would be cut, and be timed again under another name."""
    limits, tried = hk.Limits("cuda-90", shared_bytes=232_448, max_warps=32), []

    def run(trial: hk.Limits) -> None:
        tried.append(config("attention_fwd", 128, torch.bfloat16, trial))

    def timer(call: Callable[[], Any]) -> float:
        call()
        return 1.0

    case = ("attention_fwd", 128, torch.bfloat16)
    tune.tune_op(*case, tune.CANDIDATES["attention_fwd"], run, limits, timer, tmp_path)
    bytes_of = [(c["block_q"] + 2 * c["num_stages"] * c["block_k"]) * 128 * 2 for c in tried]
    assert max(bytes_of) <= 232_448 and len(tried) < len(tune.CANDIDATES["attention_fwd"])
    assert {"block_q": 128, "block_k": 128, "num_warps": 8, "num_stages": 3} in tried
    few = hk.Limits("generic", shared_bytes=1024)
    assert tune.tune_op(*case, [tried[0]], run, few, timer, tmp_path)


def test_one_misaligned_tensor_does_not_slow_the_others_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_tensor, "INTERPRETED", False)
    memory = torch.zeros(4 * multi_tensor.CHUNK + 64)
    sizes = (multi_tensor.CHUNK + 8, 40, 12)
    odd = [memory[4:][: sizes[0]], memory[1:][: sizes[1]], memory[8:][: sizes[2]]]
    table = multi_tensor.tensor_table([odd, [torch.zeros(n) for n in sizes]], torch.device("cpu"))
    assert table.addresses[0].tolist() == [odd[i].data_ptr() for i in (0, 2, 1)]
    assert table.sizes.tolist() == [sizes[i] for i in (0, 2, 1)] and table.owner.tolist() == [0, 0, 1, 2]
    assert list(table.launches(100)) == [(0, 3, True), (3, 1, False)]
    assert list(table.launches(2)) == [(0, 2, True), (2, 1, True), (3, 1, False)]
    even = multi_tensor.tensor_table([odd[:1]], torch.device("cpu"))
    assert list(even.launches(100)) == [(0, 2, True)]


def test_the_tuner_without_an_accelerator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert tune.main(["--out", "-"]) == 2
    assert "no accelerator here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tune.main(["--out", "-", "--ops", "frobnicate"])


@pytest.mark.parametrize("op", sorted(tune.CANDIDATES))
def test_every_workload_of_the_tuner_runs(op: str) -> None:
    size = {"attention_fwd": 16, "attention_bwd_kv": 16, "attention_bwd_q": 16, "attention_rows": 16, "rope": 16}
    few = op in ("adamw", "l2norm") or op.startswith("delta_")
    run = tune.workload(op, size.get(op, 40), FP32, DEVICE, 1 if few else 4)
    run(hk.limits_of(DEVICE))
