"""A loss that is not finite ends a run in every dtype, with nothing saved or exported; gradients may overflow."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.programs import inside
from tests.support.selection import quick

WORDS = ["--mock-data", "--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "1e-3"]
WORDS += ["--model", "tiny", "--log-interval", "1"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Finite weights of one step, exported."""
    directory = tmp_path_factory.mktemp("good")
    inside([*WORDS, "--train-iters", "1", "--save-hf", str(directory / "hf")])
    return directory / "hf"


def spoilt(good: Path, to: Path, name: str, value: float) -> list[str]:
    """Flags that load the same weights with one number that is not finite."""
    shutil.copytree(good, to)
    tensors = load_file(to / "model.safetensors")
    tensors[name].view(-1)[5] = value
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return ["--load-hf", str(to)]


@pytest.mark.parametrize("dtype", quick(["--fp16", "--fp16 --loss-scale 8", "--bf16", "", "--fp64"], ["--fp16", ""]))
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.1.mlp.up_proj.weight", math.nan),
        ("model.norm.weight", math.inf),
        ("model.layers.0.self_attn.v_proj.weight", -math.inf),
    ],
)
def test_weights_that_are_not_finite_end_the_run(
    dtype: str, name: str, value: float, good: Path, tmp_path: Path
) -> None:
    words = [*WORDS, *spoilt(good, tmp_path / "hf", name, value), *dtype.split(), "--train-iters", "3"]
    words += ["--save", str(tmp_path / "run"), "--save-interval", "1", "--save-hf", str(tmp_path / "out")]
    _, err = inside(words, code=2)
    assert "at step 1" in err and f"first not finite: weight {name} on rank 0" in err and "Accepted: weights" in err
    assert "--no-check" not in err, "no advice to switch a check off"
    assert not (tmp_path / "out").exists() and not list((tmp_path / "run").glob("iter_*"))


def test_without_the_check_steps_are_skipped_and_that_is_said(good: Path, tmp_path: Path) -> None:
    spoil = spoilt(good, tmp_path / "hf", "model.norm.weight", math.nan)
    out, _ = inside([*WORDS, *spoil, "--train-iters", "2", "--no-check-for-nan-in-loss-and-grad"])
    assert "every step of this run was skipped" in out and out.count("| skipped 1 |") == 2


def test_an_evaluation_that_is_not_finite_ends_the_run(good: Path, tmp_path: Path) -> None:
    spoil = spoilt(good, tmp_path / "hf", "model.norm.weight", math.nan)
    evaluate = ["--skip-train", "--eval-interval", "1", "--eval-iters", "1", "--train-iters", "1"]
    _, err = inside([*WORDS, *spoil, *evaluate, "--save-hf", str(tmp_path / "out")], code=2)
    assert "the validation loss is nan after step 0" in err and not (tmp_path / "out").exists()
    out, _ = inside([*WORDS, *spoil, *evaluate, "--no-check-for-nan-in-loss-and-grad"])
    assert "lm loss value: NAN" in out and "lm loss PPL: NAN" in out


def test_a_constant_scale_under_which_all_gradients_overflow_is_no_success(tmp_path: Path) -> None:
    words = [*WORDS, "--fp16", "--loss-scale", "1e30", "--train-iters", "2", "--save", str(tmp_path / "run")]
    _, err = inside([*words, "--save-hf", str(tmp_path / "out")], code=2)
    assert "--loss-scale = 1e+30: the last 2 steps were skipped" in err
    assert not (tmp_path / "out").exists() and not list((tmp_path / "run").glob("iter_*"))
