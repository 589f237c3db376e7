"""The GPU benchmark's cases, at small shapes on whatever is here: it must not be first run on a machine that costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernel_cases import DEVICE

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"
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
    ("loss_cases", "attention_merge", (20, 2, 16)),
    ("loss_cases", "attention_delta", (20, 2, 16)),
    ("loss_cases", "adamw", ([(20, 5), (7,)],)),
    ("loss_cases", "l2norm", ([(20, 5), (7,)],)),
]


@pytest.mark.parametrize(("module", "name", "shape"), CASES, ids=[case[1] for case in CASES])
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


def test_it_says_so_without_a_gpu() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    done = subprocess.run([sys.executable, str(FOLDER / "bench_kernels.py")], capture_output=True, text=True)
    assert done.returncode == 2 and "no GPU here" in done.stdout
