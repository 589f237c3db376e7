"""What TensorBoard and Weights & Biases hold after a run is what metrics.jsonl holds."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.metrics import MetricsWriter, Resumed, StepMetrics

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
    writer = MetricsWriter(str(tmp_path / "run"), str(tmp_path / "board"), wandb, interval=2)
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


def test_mlflow_takes_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back by MLflow's own client: a run that goes on is the same run, without the steps that are run again."""
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = f"file:{tmp_path / 'mlruns'}"
    options = {"experiment": "unlike cards", "run_name": "first", "tracking_uri": where}

    def train(first: int, last: int, resumed: Resumed | None) -> None:
        writer = MetricsWriter(str(tmp_path / "run"), mlflow=options, resumed=resumed)
        for number in range(first, last + 1):
            writer.step(StepMetrics(number, number, 10.0 * first + number, 1.0, 1e-3, 8, 0.5))
        writer.close()

    train(1, 6, None)
    train(4, 8, Resumed(3))
    client = mlflow.MlflowClient(tracking_uri=where)
    (run,) = client.search_runs([client.get_experiment_by_name("unlike cards").experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    found = [(row.step, row.value) for row in client.get_metric_history(run.info.run_id, "lm loss")]
    assert found == [*((n, 10.0 + n) for n in range(1, 7)), (7, 47.0), (8, 48.0)]
    assert json.loads((tmp_path / "run" / "mlflow.json").read_text())["id"] == run.info.run_id
    train(1, 2, None)  # another run in the same folder
    assert len(client.search_runs([run.info.experiment_id])) == 2


def test_a_board_that_fails_or_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"experiment": "x", "tracking_uri": "nowhere://x"}
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(UserError, match="MLflow is not installed"):
        MetricsWriter(str(tmp_path), mlflow=options)

    def fail(tracking_uri: str | None) -> None:
        raise RuntimeError(f"no store for {tracking_uri}")

    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=fail))
    monkeypatch.setitem(sys.modules, "mlflow.entities", types.SimpleNamespace(Metric=None))
    writer = MetricsWriter(str(tmp_path), mlflow=options)
    writer.step(StepMetrics(1, 1, 2.0, 1.0, 1e-3, 8, 0.5))
    writer.close()
    said = "".join(capsys.readouterr())
    assert "--mlflow-experiment x fails (RuntimeError: no store for nowhere://x)" in said
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 2.0
    (tmp_path / "mlflow.json").write_text('{"id": "../x"}')
    with pytest.raises(UserError, match="is not the name of a run of MLflow"):
        monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(MlflowClient=lambda tracking_uri: None))
        MetricsWriter(str(tmp_path), mlflow=options, resumed=Resumed(1))
