"""The GPU benchmark's cases, at small shapes on whatever is here: it must not be first run on a machine that costs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hetero_kernels as hk
from tests.support.kernel_cases import DEVICE, FP64, randn
from tests.support.paths import ROOT

FOLDER = ROOT / "benchmarks" / "gpu"
CASES: list[tuple[str, str, tuple[Any, ...]]] = [
    ("row_cases", "rms_norm", (5, 40)),
    ("row_cases", "layer_norm", (5, 40)),
    ("row_cases", "add_rms_norm", (5, 40)),
    ("row_cases", "swiglu", (5, 40)),
    ("row_cases", "gelu", (5, 40, True)),
    ("row_cases", "softmax", (5, 40)),
    ("row_cases", "rope", (6, 4, 2, 16)),
    ("loss_cases", "cross_entropy", (6, 50)),
    ("loss_cases", "linear_cross_entropy", (6, 32, 50)),
    ("loss_cases", "attention", (1, 20, 2, 1, 16, True, True)),
    ("loss_cases", "attention", (2, 20, 2, 1, 16, True, True, 7)),
    ("loss_cases", "attention", (2, 20, 2, 1, 16, True, True, None, (0, 3, 11))),
    ("loss_cases", "attention_merge", (20, 2, 16)),
    ("loss_cases", "attention_delta", (20, 2, 16)),
    ("delta_cases", "gated_delta", (1, 5, 1, 2, 4, 6, (0, 3))),
    ("loss_cases", "adamw", ([(20, 5), (7,)],)),
    ("loss_cases", "l2norm", ([(20, 5), (7,)],)),
]


@pytest.mark.parametrize(("module", "name", "shape"), CASES, ids=[f"{case[1]}{i}" for i, case in enumerate(CASES)])
def test_case(module: str, name: str, shape: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    torch.manual_seed(0)
    case = getattr(__import__(module), name)(DEVICE, *shape)
    assert case.check is not None and case.name.split()[0] == name
    for what, error, allowed in case.check():
        assert error <= allowed, (what, error)
    assert case.forward_bytes + case.forward_flops > 0
    for side_name, make in case.sides.items():
        if "compile" in side_name or (DEVICE.type == "cpu" and "cuDNN" in side_name):
            continue
        side = make()
        result = side.forward()
        if side.backward:
            side.backward(result)


def test_exact_gradients_by_rows_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    from measure import relative
    from row_cases import exact_gradients

    x, w, dy = randn(7, 8), randn(8, seed=1), randn(7, 8, seed=2)
    once, by_two = (
        exact_gradients(lambda x, w: hk.rms_norm_reference(x, w, 1e-5), [x, w], (dy,), 1, rows) for rows in (None, 2)
    )
    for a, b in zip(once, by_two, strict=True):
        assert a.dtype == FP64 and relative(a.float(), b) < 1e-6
    assert relative(2 * once[0], once[0]) == pytest.approx(1)
    assert relative(torch.where(once[0] > 0, torch.nan, once[0]), once[0]) == float("inf")


@pytest.mark.slow
def test_a_kernel_that_fails_and_a_time_that_ends_do_not_end_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import bench_kernels
    import measure
    import row_cases

    def good() -> Any:
        case = row_cases.rms_norm(DEVICE, 4, 40)
        return dataclasses.replace(case, sides={"ours": case.sides["ours"]})

    def broken() -> Any:
        return dataclasses.replace(good(), check=lambda: 1 / 0)

    numbers = {"forward_ms": 1.0, "forward_host_us": 1.0, "peak_bytes": 1}
    module = SimpleNamespace(get_device_name=lambda: "stub", memory_allocated=int)
    for target, name, value in (
        (torch.accelerator, "is_available", lambda: True), (torch.accelerator, "empty_cache", lambda: None),
        (torch.accelerator, "synchronize", lambda: None),
        (torch.accelerator, "current_accelerator", lambda: DEVICE), (torch, "get_device_module", lambda _: module),
        (hk, "INTERPRETED", False), (hk, "limits_of", lambda _: hk.Limits()), (measure, "measure", lambda _: numbers),
        (measure, "copy_bandwidth", lambda _: 4e12), (measure, "matmul_rate", lambda _: 8e14),
        (bench_kernels, "cases", lambda *_: {"00 rms_norm": broken, "01 rms_norm": good}),
    ):  # fmt: skip
        monkeypatch.setattr(target, name, value)
    path = tmp_path / "results.json"

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["bench", "--out", str(path), *arguments])
        return bench_kernels.main()

    assert run("--seconds", "1e-9") == 3 and not path.exists()
    assert run() == 1 and "ZeroDivisionError" in path.read_text()
    results = json.loads(path.read_text())
    assert list(results["cases"]) == ["00 rms_norm", "01 rms_norm"] and results["matmul_flops"] == 8e14
    results["cases"].pop("00 rms_norm")
    path.write_text(json.dumps(results))
    monkeypatch.setattr(bench_kernels, "cases", lambda *_: {"01 rms_norm": broken, "02 rms_norm": good})
    assert run("--resume") == 0  # 01 is not run again
    assert list(json.loads(path.read_text())["cases"]) == ["01 rms_norm", "02 rms_norm"]
    assert "2 of 2 cases, 0 wrong" in capsys.readouterr().out


def test_what_is_too_small_is_said_and_the_operators_own_path_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    import bench_kernels

    def result(op: str, floor: float, **sides: dict[str, float]) -> dict[str, Any]:
        named = {name.replace("_", " ").replace("at once", ", at once"): side for name, side in sides.items()}
        return {"op": op, "shape": "8x8", "forward_floor_ms": floor, "sides": named}

    plain = {"both_ms": 10.0, "peak_bytes": 100}
    found = bench_kernels.targets([
        result("rms_norm", 0.01, ours={"forward_share": 0.3}), result("rms_norm", 0.1, ours={"forward_share": 0.9}),
        result("linear_cross_entropy", 1.0, ours={"both_ms": 12.0, "forward_share": 0.1, "peak_bytes": 20},
               torch_eager=plain, Liger={"both_ms": 24.0}),
        result("attention window 128", 1.0, ours={"forward_share": 0.1}),
    ])  # fmt: skip
    texts = [(text.partition(": ")[2].split(" (")[0], met) for text, met in found]
    assert texts == [
        ("forward 30% of copy bandwidth", None), ("forward 90% of copy bandwidth", True),
        ("2.00x Liger's speed", True), ("1.20x torch's time", False), ("0.20x torch's memory", True),
    ]  # fmt: skip


def test_the_most_telling_shape_of_every_operator_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's time may end. Every shape of the research's tables is there."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import bench_kernels

    calls = [(name[3:], made.args[1:]) for name, made in bench_kernels.cases(DEVICE, []).items()]
    first = [name for name, _ in calls[:15]]
    assert set(first) == {name for name, _ in calls} and first[0] == "attention" and len(calls) < 100
    assert calls[0][1][:2] == (1, 16384)
    for name, shapes in {
        "rms_norm": [(4096, 8192)], "layer_norm": [(32768, 1024), (16384, 2048), (8192, 4096), (2048, 16384)],
        "add_rms_norm": [(2048, 8192), (2048, 16384)], "rope": [(n, 64, 8, 128) for n in (2048, 4096, 8192, 16384)],
        "linear_cross_entropy": [(n, 4096, 128256) for n in (4096, 8192, 16384, 32768)],
    }.items():  # fmt: skip
        assert all((name, shape) in calls for shape in shapes), name


def test_spills_are_counted_in_innermost_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the module takes away
    from compile_kernels import loop_spills

    listing = """
        /*0000*/ STL [R1], R2 ;
.L_x_1:
        /*0010*/ LDL.64 R2, [R1] ;
.L_x_2:
        /*0020*/ STL [R1+0x4], R3 ;
        /*0030*/ LDL R3, [R1+0x4] ;
        /*0040*/ @P0 BRA `(.L_x_2) ;
        /*0050*/ @!P1 BRA `(.L_x_1) ;
        /*0060*/ @P2 BRA `(.L_x_3) ;
        /*0070*/ LDL R4, [R1] ;
.L_x_3:
        /*0080*/ EXIT ;
"""
    assert loop_spills(listing) == 2
    assert loop_spills(listing.replace("R3, [R1+0x4]", "R3").replace("LDL R3", "MOV R3")) == 1
    assert loop_spills("") == 0


def test_it_says_so_without_a_gpu() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    done = subprocess.run([sys.executable, str(FOLDER / "bench_kernels.py")], capture_output=True, text=True)
    assert done.returncode == 2 and "no GPU here" in done.stdout
