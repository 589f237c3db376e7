"""The program stopped and started again, as users do it: other plan, other number of ranks, same curve."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.checkpoint.directory import CheckpointDirectory
from tests.distributed.training.test_end_to_end import ASYMMETRIC, LENGTH, MODEL_AND_DATA, PACKING, RATES
from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT, SINGLE, Program, command, inside, run_ranks
from tests.support.selection import quick
from tests.support.small_plans import LLAMA


def run(directory: Path, plan: str, ranks: int, *more: str, code: int = 0) -> tuple[str, str]:
    """(stdout, stderr) of a training run that saves to ``directory``/run."""
    directory.mkdir(exist_ok=True)
    (directory / "plan.yaml").write_text(plan)
    words = ["--plan", str(directory / "plan.yaml"), "--save", str(directory / "run")]
    words += ["--load", str(directory / "run"), *MODEL_AND_DATA, *LENGTH, *RATES, *more]
    if ranks == 1:  # in this process: starting torch anew takes longer than the run
        return inside(words, code)
    return run_ranks(ranks, words, code)


def metrics(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


KINDS = {
    "packed": PACKING,
    "dropout": [*PACKING, "--hidden-dropout", "0.1", "--attention-dropout", "0.2"],
    "streaming": ["--dataloader-type", "streaming", "--split", "1", "--eval-iters", "0"],
}


@pytest.mark.parametrize("kind", quick(KINDS, [], ["packed"]))
def test_four_ranks_stop_and_one_goes_on(kind: str, tmp_path: Path) -> None:
    """Ramp-up, cosine decay and evaluation in the middle; --exit-interval saves."""
    more = KINDS[kind]
    run(tmp_path / "whole", SINGLE, 1, *more)
    out, _ = run(tmp_path / "parts", ASYMMETRIC, 4, *more, "--exit-interval", "2")
    assert "stopped at step 2" in out and "saving checkpoint of step 2" in out
    out, _ = run(tmp_path / "parts", SINGLE, 1, *more, "--save-interval", "1", "--keep-checkpoints", "2")
    assert "step 2, 4 samples" in out and "another plan" in out
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [r["step"] for r in parts] == [1, 2, 3, 4]
    for a, b in zip(whole, parts, strict=True):
        assert (a["consumed_samples"], a["lr"], a["tokens"]) == (b["consumed_samples"], b["lr"], b["tokens"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-10)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-10)
    saved = sorted(p.name for p in (tmp_path / "parts" / "run").iterdir())
    assert saved == ["events.jsonl", "iter_0000003", "iter_0000004", "latest", "metrics.jsonl"]


@pytest.mark.slow
def test_dropout_is_for_training_only(tmp_path: Path) -> None:
    """Validation of the same weights, with the flags and without."""
    found = []
    for name, more in (("with", KINDS["dropout"]), ("without", PACKING)):
        fixed = ["--lr", "0", "--min-lr", "0", "--weight-decay", "0", "--exit-interval", "2"]
        run(tmp_path / name, SINGLE, 1, *more, *fixed)
        lines = [json.loads(line) for line in (tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines()]
        found.append(([x["loss"] for x in lines if "loss" in x], [x for x in lines if "loss" not in x]))
    (dropped, evaluated), (whole, wanted) = found
    assert evaluated == wanted and evaluated, evaluated
    assert all(a != b for a, b in zip(dropped, whole, strict=True))
    out, _ = run(tmp_path / "with", SINGLE, 1, *PACKING, *fixed[:-2], "--attention-dropout", "0.2")
    assert "notice: --hidden-dropout is 0; the checkpoint was made with 0.1" in out
    assert "notice: --attention-dropout is" not in out


@pytest.mark.slow
def test_flags_decide_what_is_read(tmp_path: Path) -> None:
    run(tmp_path, SINGLE, 1, "--exit-interval", "2")
    _, err = run(tmp_path, SINGLE, 1, "--lr", "5e-4", code=2)
    assert "--lr: 0.001 there, 0.0005 here" in err and "--override-opt_param-scheduler" in err
    _, err = run(tmp_path, SINGLE, 1, "--ckpt-step", "1", code=2)
    assert "--ckpt-step = 1" in err and "Accepted: 2" in err
    _, err = run(tmp_path, SINGLE, 1, "--optimizer", "sgd", code=2)
    assert "the checkpoint's optimizer is adam" in err
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 6, "vocab_size": 300}))
    _, err = run(tmp_path, SINGLE, 1, "--model", str(tmp_path / "config.json"), code=2)
    assert "checkpoint of another model" in err and "hidden_size 128 (here 24)" in err
    out, _ = run(tmp_path, SINGLE, 1, "--finetune", "--save-interval", "0")
    assert "training starts at step 0" in out
    assert [r["step"] for r in metrics(tmp_path)] == [1, 2, 3, 4]
    out, _ = run(tmp_path, SINGLE, 1, "--lr", "5e-4", "--override-opt_param-scheduler", "--no-load-optim")
    assert "without its optimizer state" in out


@pytest.mark.parametrize(("batch", "steps"), [(8, 3), (2, 6)])
def test_a_length_in_samples_stays_one(batch: int, steps: int, tmp_path: Path) -> None:
    """16 samples, of which 8 in steps of 4; other windows of the data are said to be that."""
    words = ["--model", "tiny", "--mock-data", "--micro-batch-size", "2", "--lr", "1e-3", "--train-samples", "16"]
    words += ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    out, _ = inside([*words, "--seq-length", "32", "--global-batch-size", "4", "--exit-interval", "2"])
    assert "notice: --seq-length" not in out
    out, _ = inside([*words, "--seq-length", "16", "--global-batch-size", str(batch)])
    assert f"done: {steps} steps" in out and metrics(tmp_path)[-1]["consumed_samples"] == 16
    assert "notice: --seq-length is 16; the checkpoint was made with 32" in out


def test_other_data_are_said_to_be_that(tmp_path: Path) -> None:
    words = ["--model", "tiny", "--seq-length", "32", "--micro-batch-size", "2", "--lr", "1e-3", "--train-iters", "4"]
    words += ["--split", "1", "--save", str(tmp_path / "run"), "--load", str(tmp_path / "run"), "--data-path"]
    inside([*words, "README.md", "--exit-interval", "2"])
    out, _ = inside([*words, "README.md", "--exit-interval", "3"])
    assert "notice: the training data" not in out
    out, _ = inside([*words, "docs/index.md"])
    assert "notice: the training data are not the checkpoint's: they are read from sample 6 on" in out


TINY = ["--model", "tiny", "--mock-data", "--seq-length", "32", "--micro-batch-size", "2", "--log-interval", "1"]
FOUR_STEPS = ["--train-iters", "4", "--lr", "1e-3"]


@pytest.mark.slow
def test_another_dtype_looks_for_its_own_loss_scale(tmp_path: Path) -> None:
    words = [*TINY, *FOUR_STEPS, "--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    inside([*words, "--bf16", "--exit-interval", "2"])
    out, _ = inside([*words, "--fp16"])
    assert "notice: --dtype is fp16; the checkpoint was made with bf16" in out
    assert metrics(tmp_path)[2]["loss_scale"] == 2.0**32


def test_other_rates_of_the_optimizer_are_said(tmp_path: Path) -> None:
    words = [*TINY, *FOUR_STEPS, "--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    inside([*words, "--exit-interval", "1"])
    out, _ = inside([*words, "--exit-interval", "2"])
    assert "the checkpoint was made with" not in out
    changed = {"--adam-beta1": (0.8, 0.9), "--adam-beta2": (0.99, 0.999), "--adam-eps": (1e-6, 1e-8)}
    changed["--clip-grad"] = (2.0, 1.0)
    out, _ = inside([*words, *(str(word) for flag, (now, _) in changed.items() for word in (flag, now))])
    for flag, (now, before) in changed.items():
        assert f"notice: {flag} is {now:g}; the checkpoint was made with {before:g}" in out


@pytest.mark.slow
def test_momentum_is_the_flags_where_no_step_was_taken(tmp_path: Path) -> None:
    words = [*TINY, *FOUR_STEPS, "--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    words += ["--fp16", "--optimizer", "sgd"]
    inside([*words, "--exit-interval", "2"])
    assert all(line["skipped"] for line in metrics(tmp_path))  # otherwise this proves nothing
    _, err = inside([*words, "--sgd-momentum", "0"], code=2)
    assert "made with another --sgd-momentum" in err
    inside(words)


def test_a_checkpoint_is_evaluated_without_the_training_flags(tmp_path: Path) -> None:
    save = ["--save", str(tmp_path / "run")]
    inside([*TINY, "--train-iters", "2", "--lr", "1e-3", "--optimizer", "sgd", *save])
    out, _ = inside([*TINY, "--skip-train", "--eval-iters", "2", "--load", str(tmp_path / "run")])
    assert "step 2, 4 samples" in out and "validation" in out


def test_weights_are_exported_by_the_run_that_ends_training(tmp_path: Path) -> None:
    words = [*TINY, *FOUR_STEPS, "--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    words += ["--save-hf", str(tmp_path / "hf"), "--eval-interval", "2", "--eval-iters", "1"]
    out, _ = inside([*words, "--exit-interval", "2"])
    assert "is written at the end of training, step 4" in out and not (tmp_path / "hf").exists()
    assert sum("validation_loss" in line for line in (tmp_path / "run" / "metrics.jsonl").open()) == 1
    inside(words)
    assert (tmp_path / "hf" / "model.safetensors").exists()


@pytest.mark.slow
def test_nothing_to_load(tmp_path: Path) -> None:
    _, err = run(tmp_path, SINGLE, 1, "--exit-on-missing-checkpoint", code=2)
    assert "holds no checkpoint" in err
    out, _ = run(tmp_path, SINGLE, 1, "--exit-interval", "1")
    assert "holds no checkpoint: training starts at step 0" in out


def test_sigterm_saves_and_the_next_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(SINGLE)
    words = ["--plan", str(tmp_path / "plan.yaml"), "--save", str(tmp_path / "run"), "--model", "tiny", "--mock-data"]
    words += ["--train-iters", "100000", "--log-interval", "1", "--lr", "1e-3", "--load", str(tmp_path / "run")]
    process = Program(words)
    process.until(" iteration ")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    found = re.search(r"saving checkpoint of step (\d+)", out)
    assert found and f"stopped at step {found[1]}: received SIGTERM" in out
    out, _ = inside([*words, "--exit-interval", "1"])
    assert f": step {found[1]}, " in out


@pytest.mark.parametrize("dtype", quick(["fp16", "bf16"], ["bf16"]))
def test_sixteen_bits_resume_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    """fp32 masters, and for fp16 the dynamic loss scale, in the middle of its search."""
    words = ["--model", "tiny", "--mock-data", "--seq-length", "32", "--micro-batch-size", "2", f"--{dtype}"]
    words += ["--train-iters", "6", "--lr", "1e-3"]
    words += ["--initial-loss-scale", "1e6", "--hysteresis", "1", "--loss-scale-window", "2"] if dtype == "fp16" else []
    inside([*words, "--save", str(tmp_path / "whole" / "run")])
    parts = ["--save", str(tmp_path / "parts" / "run"), "--load", str(tmp_path / "parts" / "run")]
    inside([*words, *parts, "--exit-interval", "3"])
    inside([*words, *parts])
    for a, b in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "parts"), strict=True):
        for key in ("step", "loss", "grad_norm", "loss_scale", "skipped", "lr"):
            assert a[key] == b[key]


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_older_checkpoints_stay(tmp_path: Path) -> None:
    """Files of more than 40 KB cannot be written (those of metrics and events are smaller)."""
    out, _ = run(tmp_path, SINGLE, 1, "--exit-interval", "1")
    assert "saving checkpoint of step 1" in out
    before = {p: p.read_bytes() for p in (tmp_path / "run" / "iter_0000001").iterdir()}
    words = [*command(1), "--plan", str(tmp_path / "plan.yaml"), "--save", str(tmp_path / "run")]
    words += ["--load", str(tmp_path / "run"), *MODEL_AND_DATA, *LENGTH, *RATES, "--save-interval", "1"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # noqa: E731
    done = subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, preexec_fn=limit)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the checkpoint cannot be written (File too large" in done.stderr, done.stderr
    assert "older ones are untouched" in done.stderr and "Traceback" not in done.stderr
    assert {p: p.read_bytes() for p in (tmp_path / "run" / "iter_0000001").iterdir()} == before
    assert not list((tmp_path / "run").glob("*.incomplete"))
    assert (tmp_path / "run" / "latest").read_text().startswith("iter_0000001 ")


def test_old_checkpoints_go_but_multiples_of_the_interval_stay(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path)
    for step in (2, 3, 4, 6, 7, 9):
        directory.at(step).mkdir()
    directory.prune(2, 3, 7)
    assert directory.steps() == [3, 6, 7, 9]  # 9 is newer than what was just written: of another run, left alone
    directory.prune(0, None, 9)
    assert directory.steps() == [3, 6, 7, 9]
    directory.prune(1, None, 9)
    assert directory.steps() == [9] and not list(tmp_path.glob("*.incomplete"))
