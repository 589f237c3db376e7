"""What TensorBoard and Weights & Biases hold after a run is what metrics.jsonl holds."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.monitoring.metrics import MetricsWriter, StepMetrics

TAGS = {
    "lm loss": "loss", "grad-norm": "grad_norm", "learning-rate": "lr", "batch-size": "global_batch_size",
    "iteration-time": "step_seconds", "tokens-per-second": "tokens_per_second", "loss-scale": "loss_scale",
}  # fmt: skip


def test_every_scalar_is_that_of_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logged: dict[int, dict[str, float]] = {}
    asked: dict[str, Any] = {}

    def init(**options: Any) -> Any:
        asked.update(options)
        log = lambda values, step: logged.setdefault(step, {}).update(values)  # noqa: E731
        return types.SimpleNamespace(step=0, log=log, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    wandb = {"project": "p", "entity": "e", "name": "n"}
    writer = MetricsWriter(str(tmp_path / "run"), str(tmp_path / "board"), wandb, tensorboard_interval=2)
    for number in range(1, 7):
        scale = 2.0**number
        writer.step(
            StepMetrics(number, 4 * number, 5 - 0.1 * number, 1.5 * number, 1e-3 / number, 100, 0.25 * number,
                        loss_scale=scale, batch_size=4 + number)
        )  # fmt: skip
    writer.validation(6, 2.0, perplexity=True)
    writer.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = {row["step"]: row for row in rows if "loss" in row}
    board = accumulators.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == {*TAGS, "lm loss validation", "lm loss validation ppl"}
    for tag, key in TAGS.items():
        found = {event.step: event.value for event in board.Scalars(tag)}
        assert found == pytest.approx({n: steps[n][key] for n in (2, 4, 6)}, rel=1e-6), tag
        assert {n: values[tag] for n, values in logged.items()} == pytest.approx({n: steps[n][key] for n in (2, 4, 6)})
    validation = next(row for row in rows if "validation_loss" in row)
    (loss,), (ppl,) = board.Scalars("lm loss validation"), board.Scalars("lm loss validation ppl")
    assert (loss.step, loss.value) == (6, pytest.approx(validation["validation_loss"]))
    assert ppl.value == pytest.approx(validation["validation_perplexity"], rel=1e-6)
    assert logged[6]["lm loss validation"] == validation["validation_loss"]
    assert {key: asked[key] for key in wandb} == wandb
