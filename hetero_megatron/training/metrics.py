"""What a run writes down: ``metrics.jsonl``, TensorBoard, Weights & Biases. One rank writes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hetero_megatron.errors import UserError

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
        if self.tgs_per_chip is not None:
            out["tgs_per_chip"] = dict(self.tgs_per_chip)
        broken = [k for k, v in out.items() if isinstance(v, float) and not math.isfinite(v)]
        return out | dict.fromkeys(broken) | ({"not_finite": broken} if broken else {})


def perplexity_of(loss: float) -> float:
    """As Megatron: of at most 20 nats; NaN where the loss is."""
    return math.exp(min(loss, 20.0))  # in this order, so that NaN stays


class MetricsWriter:
    """Writes to every place that was asked for; each line is on disk when ``step`` returns.

    Args:
        directory: where ``metrics.jsonl`` goes; None: nowhere. A fresh run moves an older file aside
            (``metrics.1.jsonl``, …), a resumed one appends: for a step that stands there twice the later
            line counts.
        tensorboard_dir: writes TensorBoard events there.
        wandb: keyword arguments of ``wandb.init`` (project, …); None: off.

    Raises:
        UserError: TensorBoard or W&B was asked for and is not installed, or the directory cannot be written.
    """

    def __init__(
        self,
        directory: str | None,
        tensorboard_dir: str | None = None,
        wandb: Mapping[str, Any] | None = None,
        resume: bool = False,
        tensorboard_queue_size: int = 1000,
        tensorboard_interval: int = 1,
    ) -> None:
        self._file = _open(Path(directory), resume) if directory is not None else None
        self._interval = tensorboard_interval
        self._tensorboard = _tensorboard(tensorboard_dir, tensorboard_queue_size) if tensorboard_dir else None
        self._wandb = _wandb(wandb) if wandb is not None else None

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
        self._scalars(scalars, metrics.step)

    def validation(self, step: int, loss: float, name: str = "validation", perplexity: bool = False) -> None:
        """Record an evaluation after ``step``; ``perplexity`` adds it to TensorBoard and W&B."""
        ppl = perplexity_of(loss)
        known = math.isfinite(loss)
        self._line({"step": step, f"{name}_loss": loss if known else None, f"{name}_perplexity": ppl if known else None})
        scalars = {f"lm loss {name}": loss}
        self._scalars(scalars | ({f"lm loss {name} ppl": ppl} if perplexity else {}), step)

    def emulation(self, step: int, facts: Mapping[str, Any]) -> None:
        """Record after ``step`` what a testbed emulates, and how far that can be believed."""
        self._line({"step": step, "emulation": dict(facts)})

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Further numbers for TensorBoard and W&B only (timers, memory)."""
        self._scalars(values, step)

    def _line(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            try:
                self._file.write(json.dumps(record, allow_nan=False) + "\n")
                self._file.flush()
            except OSError as error:
                raise UserError(f"{FILE} cannot be written: {error.strerror}", field="--save") from error

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def flush(self) -> None:
        """TensorBoard writes every two minutes only; metrics.jsonl needs no flush."""
        if self._tensorboard is not None:
            with suppress(OSError):
                self._tensorboard.flush()

    def close(self) -> None:
        for writer in (self._file, self._tensorboard):
            if writer is not None:
                writer.close()
        if self._wandb is not None:
            self._wandb.finish()


def _open(directory: Path, resume: bool) -> IO[str]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not resume:
            set_aside(directory, FILE)
        return (directory / FILE).open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", field="--save", value=str(directory)) from error


def set_aside(directory: str | Path, name: str) -> None:
    """Give a file of an earlier run the next free number: ``metrics.jsonl`` -> ``metrics.1.jsonl``."""
    path, number = Path(directory) / name, 1
    if path.exists():
        while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(aside)


def _tensorboard(directory: str, queue_size: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            "TensorBoard is not installed",
            field="--tensorboard-dir",
            value=directory,
            accepted="pip install tensorboard, or leave the flag out",
        ) from error
    return SummaryWriter(log_dir=directory, max_queue=queue_size)  # type: ignore[no-untyped-call]


def _wandb(options: Mapping[str, Any]) -> Any:
    try:
        import wandb
    except ImportError as error:
        raise UserError(
            "Weights & Biases is not installed",
            field="--wandb-project",
            value=options.get("project"),
            accepted="pip install wandb, or leave the flag out",
        ) from error
    return wandb.init(**options)
