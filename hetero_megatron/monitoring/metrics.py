"""What a run writes down: ``metrics.jsonl``, and dashboards (``boards``). One rank writes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.boards import Mlflow, TensorBoard, Wandb
from hetero_megatron.monitoring.log_sinks import Board, LineFile
from hetero_megatron.monitoring.throughput import ExpertFigures
from hetero_megatron.utils.files import open_append

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One line of ``metrics.jsonl``; the seconds per rank are in the order of ranks.

    Attributes:
        consumed_samples: sequences trained on so far, this step included.
        tokens: that counted in the loss of this step.
        predicted_step_seconds: of the planner or predictor; None where there is no prediction.
        busy_seconds, bubble_seconds, communication_seconds: per rank: computing, waiting for a neighbour,
        moving data.
        experts: of a mixture of experts.
        pairs: of preference pairs, how many the loss is the mean of.
        facts: what a loss beside another model's says besides itself, as means by name (of preference pairs TRL's).
        predictions: losses of modules that predict further tokens, by Megatron's names.
    """

    step: int
    consumed_samples: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    step_seconds: float
    predicted_step_seconds: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    batch_size: int = 0
    busy_seconds: Sequence[float] = ()
    bubble_seconds: Sequence[float] = ()
    communication_seconds: Sequence[float] = ()
    tgs_per_chip: Mapping[str, float] | None = None
    experts: ExpertFigures | None = None
    loss_tokens: int | None = None
    pairs: int | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    predictions: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds if self.step_seconds > 0 else 0.0

    def record(self) -> dict[str, Any]:
        """As JSON data; a number that is not finite becomes null and is named under ``not_finite``."""
        out: dict[str, Any] = {
            "step": self.step,
            "consumed_samples": self.consumed_samples,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "tokens": self.tokens,
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "predicted_step_seconds": self.predicted_step_seconds,
            "global_batch_size": self.batch_size,
            "loss_scale": self.loss_scale,
            "skipped": self.skipped,
            "busy_seconds": list(self.busy_seconds),
            "bubble_seconds": list(self.bubble_seconds),
            "communication_seconds": list(self.communication_seconds),
        }
        if self.loss_tokens is not None:
            out["loss_tokens"] = self.loss_tokens
        if self.pairs is not None:
            out["pairs"] = self.pairs
        out |= self.facts
        out |= self.predictions
        if self.tgs_per_chip is not None:
            out["tgs_per_chip"] = dict(self.tgs_per_chip)
        if self.experts is not None:
            out |= self.experts.record()
        broken = [k for k, v in out.items() if isinstance(v, float) and not math.isfinite(v)]
        return out | dict.fromkeys(broken) | ({"not_finite": broken} if broken else {})


def perplexity_of(loss: float) -> float:
    """As Megatron: of at most 20 nats; NaN where the loss is."""
    return math.exp(min(loss, 20.0))  # in this order, so that NaN stays


@dataclass(frozen=True)
class Resumed:
    """A run that goes on in the logs of an earlier part of it.

    Attributes:
        step: the last one that counts; what the logs hold of later ones is run again, and replaced.
        trains: whether there are steps left; False: what is logged stays, but for an evaluation after ``step``
            that is made again.
        evaluates: whether it evaluates.
    """

    step: int
    trains: bool = True
    evaluates: bool = True


class MetricsWriter:
    """Writes to every place that was asked for; each line is on disk when ``step`` returns. Each step stands in each of
    them once, however often a run starts again.

    Args:
        directory: where ``metrics.jsonl`` goes; None: nowhere. A run that does not go on moves an older file aside
            (``metrics.1.jsonl``, …).
        tensorboard_dir: writes TensorBoard events there.
        wandb, mlflow: arguments of :class:`Wandb` and :class:`Mlflow`; None: off. A run that goes on in ``directory``
            goes on in its W&B or MLflow run.
        resumed: None: what ``directory`` holds is of another run.
        interval: of dashboards: steps that are no multiple of it are left out.
        purge_step: what the TensorBoard directory holds of this step and later ones is hidden; None: nothing is.
        allowed: asked before anything is written; raises an error where the run goes on without this process.

    Raises:
        UserError: a dashboard was asked for and is not installed, or the directory cannot be written.
    """

    def __init__(
        self,
        directory: str | None,
        tensorboard_dir: str | None = None,
        wandb: Mapping[str, Any] | None = None,
        mlflow: Mapping[str, Any] | None = None,
        resumed: Resumed | None = None,
        tensorboard_queue_size: int = 1000,
        interval: int = 1,
        purge_step: int | None = None,
        allowed: Callable[[], None] = lambda: None,
    ) -> None:
        self._allowed = allowed
        allowed()
        self._file: LineFile | None = None
        self._evaluated: int | None = None  # the step whose evaluation is logged already
        folder, is_resumed = None if directory is None else Path(directory), resumed is not None
        if folder is not None:
            file, logged = _open(folder, resumed)
            self._file = LineFile(folder / FILE, file)
            self._evaluated = resumed.step if resumed is not None and logged else None
        self._interval = interval
        self._boards: list[Board] = []
        if tensorboard_dir is not None:
            make = partial(TensorBoard, tensorboard_dir, tensorboard_queue_size, purge_step)
            self._boards.append(Board("--tensorboard-dir", tensorboard_dir, make))
        if wandb is not None:
            project = str(wandb.get("project"))
            self._boards.append(Board("--wandb-project", project, partial(Wandb, wandb, folder, is_resumed)))
        if mlflow is not None:
            experiment = str(mlflow["experiment"])
            self._boards.append(Board("--mlflow-experiment", experiment, partial(Mlflow, mlflow, folder, is_resumed)))

    def last_step(self) -> int | None:
        """The last one in ``metrics.jsonl``; 0: it holds none; None: it is not written."""
        from hetero_megatron.monitoring.rewind import last_step

        return None if self._file is None else last_step(self._file.path)

    def step(self, metrics: StepMetrics) -> None:
        """Record one optimizer step."""
        record = metrics.record()
        self._line(record)
        if metrics.step % self._interval:
            return
        scalars = {
            "lm loss": metrics.loss,
            "grad-norm": metrics.grad_norm,
            "learning-rate": metrics.lr,
            "batch-size": metrics.batch_size,
            "iteration-time": metrics.step_seconds,
            "tokens-per-second": metrics.tokens_per_second,
        }
        if metrics.loss_scale is not None:
            scalars["loss-scale"] = metrics.loss_scale
        if metrics.experts is not None:
            scalars |= metrics.experts.scalars()
        scalars |= {**metrics.facts, **metrics.predictions}
        self._scalars(scalars, metrics.step)

    def validation(
        self, step: int, loss: float, name: str = "validation", perplexity: bool = False,
        facts: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """Record an evaluation (``name``: validation or test) after ``step``; ``perplexity`` adds it to
        dashboards. ``facts``: of preference pairs, which have no perplexity."""
        ppl = perplexity_of(loss)
        measures = {f"{name}_perplexity": ppl} if not facts else {f"{name}_{key}": x for key, x in facts.items()}
        values = {f"{name}_loss": loss, **measures}
        self._line({"step": step, **(values if math.isfinite(loss) else dict.fromkeys(values))})
        if step != self._evaluated:
            scalars = {f"lm loss {name}": loss} | ({} if not facts else measures)
            self._scalars(scalars | ({f"lm loss {name} ppl": ppl} if perplexity and not facts else {}), step)

    def emulation(self, step: int, facts: Mapping[str, Any]) -> None:
        """Record after ``step`` what a testbed emulates, and how far that can be believed."""
        self._line({"step": step, "emulation": dict(facts)})

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Further numbers for dashboards only (timers, memory)."""
        self._scalars(values, step)

    def _line(self, record: Mapping[str, Any]) -> None:
        self._allowed()
        if self._file is not None:
            self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        for board in self._boards:
            board.do(lambda writer: writer.log(values, step))

    def flush(self) -> None:
        """TensorBoard writes every two minutes only; metrics.jsonl needs no flush."""
        for board in self._boards:
            board.do(lambda writer: writer.flush())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        for board in self._boards:
            board.do(lambda writer: writer.close())


def _open(directory: Path, resumed: Resumed | None) -> tuple[BinaryIO, bool]:
    """(metrics.jsonl for appending, whether it held an evaluation after the step from which the run goes on)."""
    from hetero_megatron.monitoring.rewind import rewind

    path, logged = directory / FILE, False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if resumed is None:
            set_aside(directory, FILE)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", field="--save", value=str(directory)) from error
    if os.path.lexists(path):
        assert resumed is not None
        evaluated = resumed.step if resumed.evaluates else None
        logged = rewind(path, resumed.step) if resumed.trains else rewind(path, evaluated=evaluated)
    return open_append(path, "--save"), logged


def set_aside(directory: str | Path, name: str) -> None:
    """Give a file of an earlier run the next free number: ``metrics.jsonl`` -> ``metrics.1.jsonl``."""
    path, number = Path(directory) / name, 1
    if os.path.lexists(path):
        while os.path.lexists(aside := path.with_name(f"{path.stem}.{number}{path.suffix}")):
            number += 1
        path.rename(aside)
