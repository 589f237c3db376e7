"""Batch-size ramp-up, loss scale, metrics and the console line."""

from __future__ import annotations

import datetime
import json
import math
import sys
from pathlib import Path

import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.console import (
    ConsoleLine,
    format_duration,
    format_line,
    format_short,
    format_validation,
)
from hetero_megatron.monitoring.metrics import MetricsWriter, Resumed, StepMetrics
from hetero_megatron.training.lr_schedule import BatchSize, LossScale
from tests.support.refusals import refused


def test_constant_batch() -> None:
    batch = BatchSize(16)
    assert batch.at(0) == batch.at(10**12) == 16
    assert batch.steps_for(160) == batch.steps_for(175) == (10, 160)
    assert batch.sizes() == (16,)


def test_ramp_up() -> None:
    # 32 to 128 by 32 over 960 samples: three increments of 320 samples each.
    batch = BatchSize(128, 32, 32, 960)
    assert [batch.at(n) for n in (0, 319, 320, 639, 640, 959, 960, 961)] == [32, 32, 64, 64, 96, 96, 128, 128]
    assert batch.sizes() == (32, 64, 96, 128)


@pytest.mark.parametrize("samples", [0, 31, 32, 500, 960, 1000, 5000])
def test_steps_are_those_that_one_would_count(samples: int) -> None:
    batch = BatchSize(128, 32, 32, 960)
    consumed = steps = 0
    while consumed + batch.at(consumed) <= samples:
        consumed += batch.at(consumed)
        steps += 1
    assert batch.steps_for(samples) == (steps, consumed)


@pytest.mark.parametrize(
    "numbers", [(0,), (8, 9, 1, 5), (8, 8, 1, 5), (8, 2, 4, 5), (8, 2, 0, 5), (8, 2, 2, 0), (8, -1, 1, 5)]
)
def test_bad_batches(numbers: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="batch-size"):
        BatchSize(*numbers)


def test_steps_from_the_middle_are_those_that_are_left() -> None:
    for batch in (BatchSize(6), BatchSize(8, 2, 2, 30)):
        whole, consumed, steps = batch.steps_for(100), 0, 0
        while steps < whole[0]:
            left, end = batch.steps_for(100, consumed)
            assert (steps + left, end) == whole
            steps, consumed = steps + 1, consumed + batch.at(consumed)
        assert batch.steps_for(10, 40) == (0, 40)


def test_loss_scale_is_constant_without_dynamics() -> None:
    scale = LossScale(1024.0)
    assert scale.update(True).update(False) == scale
    assert scale.with_state({"scale": 2.0, "good_steps": 0, "patience": 0}).scale == 1024.0


def test_dynamic_loss_scale() -> None:
    scale = LossScale(64.0, True, minimum=16.0, window=3, hysteresis=2)
    scale = scale.update(True)
    assert scale.scale == 64.0  # the first overflow is survived
    scale = scale.update(True)
    assert scale.scale == 32.0
    assert scale.update(True).scale == 16.0  # patience comes back only with a doubling
    for _ in range(3):
        scale = scale.update(False)
    assert scale.scale == 64.0 and scale.patience == 2
    for _ in range(20):
        scale = scale.update(True)
    assert scale.scale == 16.0


@pytest.mark.parametrize(("scale", "most"), [
    (LossScale(64.0, True, minimum=16.0, window=3, hysteresis=2), 2 + 1 + 2),  # falls at the 2nd and 3rd, then 2 more
    (LossScale(16.0, True, minimum=16.0, hysteresis=3), 3),
    (LossScale(1e30), 20),
])  # fmt: skip
def test_a_scale_that_cannot_fall_and_overflows_again_and_again_is_refused(scale: LossScale, most: int) -> None:
    lucky = scale
    for step in range(1, most):
        scale, lucky = scale.update(True), lucky.update(True)
        scale.check(step)
    lucky.update(False).update(True).check(most)  # not in a row
    field = "--min-loss-scale" if scale.dynamic else "--loss-scale"
    with pytest.raises(UserError, match=f"{field} = .* step {most} and those after it"):
        scale.update(True).check(most)


def test_a_run_that_took_no_step_is_refused_only_where_the_scale_cannot_fall() -> None:
    with pytest.raises(UserError, match="the last step was skipped"):
        LossScale(1e30).update(True).check(1, finished=True)
    LossScale(2.0**32, True).update(True).check(1, finished=True)  # it looks for its scale
    LossScale(1e30).update(False).check(1, finished=True)


def test_loss_scale_grows_after_a_smaller_window() -> None:
    scale = LossScale(8.0, True, window=3).with_state({"scale": 8.0, "good_steps": 500, "patience": 2})
    assert scale.update(False).scale == 16.0


def test_loss_scale_goes_on_from_its_state() -> None:
    fresh = LossScale(2.0**32, True)
    used = fresh
    for overflow in (True, True, False, True, False, False):
        used = used.update(overflow)
    again = fresh.with_state(json.loads(json.dumps(used.state_dict())))
    assert again == used and used.scale == 2.0**30
    assert again.update(False) == used.update(False)


@pytest.mark.parametrize(
    "arguments, flag",
    [
        ((0.0,), "--loss-scale"),
        ((8.0, True, 16.0), "--min-loss-scale"),
        ((8.0, True, 1.0, 0), "--loss-scale-window"),
        ((8.0, True, 1.0, 10, 0), "--hysteresis"),
        ((-8.0, True), "--initial-loss-scale"),
    ],
)
def test_bad_loss_scales(arguments: tuple, flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        LossScale(*arguments)


def _metrics(step: int, loss: float = 2.0) -> StepMetrics:
    return StepMetrics(step, 8 * step, loss, 1.0, 1e-3, 1000, 0.5, 0.4, busy_seconds=[0.1, 0.2])


def test_metrics_file(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path / "run"))
    writer.step(_metrics(1))
    writer.step(_metrics(2, math.nan))
    writer.validation(2, 1.5)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["tokens_per_second"] == 2000.0 and lines[0]["busy_seconds"] == [0.1, 0.2]
    named = ["step", "loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second", "predicted_step_seconds"]
    assert set(named) <= lines[0].keys()
    assert lines[1]["loss"] is None and lines[1]["not_finite"] == ["loss"]
    assert lines[2] == {"step": 2, "validation_loss": 1.5, "validation_perplexity": math.exp(1.5)}
    writer.close()


def test_tensorboard_is_on_disk_after_a_flush(tmp_path: Path) -> None:
    writer = MetricsWriter(None, str(tmp_path))
    for step in range(1, 200):
        writer.step(_metrics(step))
    writer.flush()  # as a run does that fails, and is not closed
    (file,) = tmp_path.iterdir()
    on_disk = file.stat().st_size
    writer.close()
    assert file.stat().st_size == on_disk > 10_000
    writer.flush()


def test_a_fresh_run_keeps_older_metrics_and_a_resumed_one_appends(tmp_path: Path) -> None:
    for step, resumed in ((1, None), (2, Resumed(1)), (1, None)):
        writer = MetricsWriter(str(tmp_path), resumed=resumed)
        writer.step(_metrics(step))
        writer.close()
    assert len((tmp_path / "metrics.1.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--save"):
        MetricsWriter(str(tmp_path / "file"))


def test_what_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with refused("--wandb-project", "not installed", "pip install wandb"):
        MetricsWriter(None, wandb={"project": "p"})
    with refused("--tensorboard-dir", "not installed"):
        MetricsWriter(None, tensorboard_dir="d")


def test_console_line_has_megatrons_fields() -> None:
    progress = ConsoleLine(
        3, 10, 48, 0.25, 1e-4, 16, 5.5, 1.25, tokens_per_second=65536, tflops=0.5, mfu=0.125, skipped=1
    )
    line = format_line(progress, datetime.datetime(2026, 1, 2, 3, 4, 5))
    assert line.split(" | ") == [
        " [2026-01-02 03:04:05.000000] iteration        3/      10",
        "consumed samples:           48",
        "elapsed time per iteration (ms): 250.0",
        "throughput per GPU (TFLOP/s/GPU): 0.5000",
        "tokens/s: 65536",
        "MFU: 12.5%",
        "ETA: 2s",
        "learning rate: 1.000000E-04",
        "global batch size:    16",
        "lm loss: 5.500000E+00",
        "loss scale: 1.0",
        "grad norm: 1.250",
        "number of skipped iterations:   1",
        "number of nan iterations:   0 |",
    ]
    assert "lm loss PPL: 2.000000E+00" in format_validation(5, 0.7, 2.0)


def test_the_short_line_fits_and_keeps_what_matters() -> None:
    for digits in range(1, 12):
        big = 10**digits
        line = format_short(
            ConsoleLine(
                big, big, big, 1e3, 1e-4, 16, 12.3456, 1e5, 65536.0, big, big, 1.0, skipped=big, nan=big,
                eta_seconds=1e8,
            )
        )  # fmt: skip
        assert len(line) <= 120 and " iteration " in line and "loss 12.3456" in line
        assert f"skipped {big}" in line and f"not finite {big}" in line
    progress = ConsoleLine(3, 10, 48, 0.25, 1e-4, 16, 5.5, 1.25, tokens_per_second=65536, tflops=0.5, mfu=0.125)
    calm = format_short(progress)
    for words in ("3/10", "loss 5.5", "250 ms", "65,536 tokens/s", "MFU 12.5%", "ETA 2s", "norm 1.25", "lr 1.00e-04"):
        assert words in calm, calm
    assert "skipped" not in calm and "not finite" not in calm and "loss scale" not in calm


def test_durations() -> None:
    assert [format_duration(s) for s in (0, 42.4, 185, 7385, 266600)] == [
        "0s",
        "42s",
        "3:05",
        "2:03:05",
        "3d 02:03",
    ]
