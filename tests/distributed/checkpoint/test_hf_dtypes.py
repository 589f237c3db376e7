"""Every tensor keeps its own dtype, bit for bit, on every way there is; NaN and Inf are told or refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero_megatron.checkpoint.native import open_checkpoint
from hetero_megatron.checkpoint.state import weight_dtypes
from hetero_megatron.cli.main import main
from hetero_megatron.errors import UserError
from hetero_megatron.spec import load_model
from tests.distributed.checkpoint.test_hf_load import save
from tests.support.programs import inside, run_ranks

NORM = "model.norm.weight"
DATA = ["--mock-data", "--seq-length", "16", "--micro-batch-size", "2", "--seed", "3"]
ONE_STEP = ["--train-iters", "1", "--optimizer", "sgd", "--lr-decay-style", "constant"]
TURN = (torch.bfloat16, torch.float32, torch.float16)


def mixed(directory: Path, name: str = "llama") -> dict[str, torch.Tensor]:
    """A model whose tensors have three dtypes, also within one layer, and values that no other of them has."""
    save(directory, name, torch.float32)
    weights = load_file(directory / "model.safetensors")
    weights = {n: t.to(TURN[i % 3]) for i, (n, t) in enumerate(sorted(weights.items()))}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return weights


def written(directory: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert found.keys() == want.keys()
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in want.items()}
    assert all(torch.equal(found[n], t) for n, t in want.items())


def convert(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> Any:
    capsys.readouterr()  # what libraries printed while the test made the model
    assert main(["convert", *map(str, words)]) == code
    out, err = capsys.readouterr()
    return json.loads(out) if "--json" in words and not code else out + err


@pytest.mark.parametrize("name", ["llama", "llama tied", "gpt2"])
def test_convert_there_and_back(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = mixed(tmp_path / "in", name)
    done = convert(capsys, tmp_path / "in", tmp_path / "native", "--json")
    assert set(done["dtype"].split(" and ")) == {"bf16", "fp32", "fp16"} and done["nonfinite"] == []
    convert(capsys, tmp_path / "native", tmp_path / "out")
    assert_same(written(tmp_path / "out"), want)
    convert(capsys, tmp_path / "native", tmp_path / "bf16", "--dtype", "bf16")
    assert_same(written(tmp_path / "bf16"), {n: t.bfloat16() for n, t in want.items()})


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--bf16", "--fp16", "--fp32"])
def test_a_run_that_does_not_train(precision: str, tmp_path: Path) -> None:
    """Also where its own dtype is narrower than some tensors'."""
    want = mixed(tmp_path / "in")
    words = ["--load-hf", str(tmp_path / "in"), "--skip-train", *([] if precision == "--fp32" else [precision])]
    inside([*DATA, *words, "--save-hf", str(tmp_path / "out")])
    assert_same(written(tmp_path / "out"), want)


def test_checkpoints_of_runs_remember_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Imported, saved by two ranks, resharded to one, exported: both ways of exporting."""
    want = mixed(tmp_path / "in", "llama tied")
    still = [*DATA, *ONE_STEP, "--lr", "0", "--bf16", "--model", str(tmp_path / "in")]
    two = ["--tensor-model-parallel-size", "2", "--save", str(tmp_path / "two"), "--load-hf", str(tmp_path / "in")]
    run_ranks(2, [*still, *two])
    one = ["--finetune", "--save", str(tmp_path / "one"), "--save-hf", str(tmp_path / "hf")]
    inside([*still, "--load", str(tmp_path / "two"), *one])
    assert_same(written(tmp_path / "hf"), want)
    for name in ("two", "one"):
        convert(capsys, tmp_path / name, tmp_path / f"{name}_out")
        assert_same(written(tmp_path / f"{name}_out"), want)


def test_trained_weights_have_the_dtypes_of_their_source(tmp_path: Path) -> None:
    want = mixed(tmp_path / "in")
    run = [*DATA, *ONE_STEP, "--lr", "1e-2", "--load-hf", str(tmp_path / "in")]
    inside([*run, "--save-hf", str(tmp_path / "out")])
    found = written(tmp_path / "out")
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in want.items()}
    assert not torch.equal(found[NORM], want[NORM])
    inside([*run, "--save-hf", str(tmp_path / "fp32"), "--save-hf-dtype", "fp32"])
    assert {t.dtype for t in written(tmp_path / "fp32").values()} == {torch.float32}


def test_weights_drawn_at_random_have_the_dtype_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*DATA, *ONE_STEP, "--model", "tiny", "--lr", "1e-2", "--bf16", "--save", str(tmp_path / "run")]
    inside([*words, "--save-hf", str(tmp_path / "out")])
    convert(capsys, tmp_path / "run", tmp_path / "again")
    for name in ("out", "again"):
        assert {t.dtype for t in written(tmp_path / name).values()} == {torch.bfloat16}
    assert_same(written(tmp_path / "again"), written(tmp_path / "out"))


@pytest.mark.parametrize("said", [{}, {"model.norm.weight": "int8"}, ["float32"], "float32", {NORM: ["float32"]}])
def test_a_checkpoint_that_says_other_dtypes_is_refused(
    said: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed(tmp_path / "in")
    convert(capsys, tmp_path / "in", tmp_path / "native")
    checkpoint = open_checkpoint(str(tmp_path / "native"), None)
    assert checkpoint is not None
    hostile = dataclasses.replace(checkpoint, state={**checkpoint.state, "weight_dtypes": said})
    with pytest.raises(UserError, match="does not say in which dtypes"):
        weight_dtypes(hostile, load_model(str(tmp_path / "in")))


# NaN and Inf


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_told_or_refused(
    value: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = mixed(tmp_path / "in")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    says = "NaN or Inf in model.layers.1.mlp.up_proj.weight"
    assert says in convert(capsys, tmp_path / "in", tmp_path / "no", "--check-finite", code=2)
    assert not list((tmp_path / "no").glob("*"))
    assert f"notice: {says}" in convert(capsys, tmp_path / "in", tmp_path / "native")
    assert says in convert(capsys, tmp_path / "native", tmp_path / "no2", "--check-finite", code=2)
    assert not list(tmp_path.glob("no2*"))
    done = convert(capsys, tmp_path / "native", tmp_path / "out", "--json")
    assert done["nonfinite"] == ["model.layers.1.mlp.up_proj.weight"]
    target = tmp_path / "target"
    words = [*DATA, "--load-hf", str(tmp_path / "in"), "--skip-train", "--save-hf", str(target)]
    assert "the validation loss is nan after step 0: nothing is saved" in inside(words, code=2)[1]
    out, err = inside([*words, "--no-check-for-nan-in-loss-and-grad"], code=2)
    assert f"notice: --load-hf {tmp_path / 'in'}: {says}" in out
    assert f"--save-hf = {target}: is not written: {says}" in err and not list(tmp_path.glob("target*"))


def test_values_beyond_the_range_of_the_files_are_told_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "in", "llama", torch.float32)
    weights = load_file(tmp_path / "in" / "model.safetensors")
    save_file(weights | {NORM: weights[NORM] * 1e6}, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    assert "notice" not in convert(capsys, tmp_path / "in", tmp_path / "native", "--check-finite")
    for source in ("in", "native"):
        half = [tmp_path / source, tmp_path / f"{source}16", "--dtype", "fp16"]
        assert f"NaN or Inf in {NORM}" in convert(capsys, *half, "--check-finite", code=2)
        assert not list(tmp_path.glob(f"{source}16*"))
        assert f"notice: NaN or Inf in {NORM}" in convert(capsys, *half)
    words = [*DATA, "--load-hf", str(tmp_path / "in"), "--skip-train", "--save-hf", str(tmp_path / "hf")]
    _, err = inside([*words, "--save-hf-dtype", "fp16"], code=2)
    assert f"NaN or Inf in {NORM} on rank 0. Accepted: weights that are finite in the dtype of the files" in err


# What an export that was killed left behind


def test_an_export_removes_only_what_an_export_left(tmp_path: Path) -> None:
    mixed(tmp_path / "in")
    words = [*DATA, "--load-hf", str(tmp_path / "in"), "--skip-train", "--save-hf", str(tmp_path / "out")]
    work = tmp_path / "out.incomplete"
    work.mkdir()
    (work / "model.safetensors").write_text("mine")
    _, err = inside(words, code=2)
    assert "out.incomplete first, which exists and was not made by an export" in err
    assert (work / "model.safetensors").read_text() == "mine"
    (work / ".hetero-megatron-export").touch()
    inside(words)
    assert not work.exists() and not (tmp_path / "out" / ".hetero-megatron-export").exists()
    (tmp_path / "in").rename(work)
    (tmp_path / "out").rename(tmp_path / "in")
    work.rename(tmp_path / "elsewhere")
    work.symlink_to("elsewhere")
    inside(words, code=2)
    assert work.is_symlink() and (tmp_path / "elsewhere" / "config.json").exists()
