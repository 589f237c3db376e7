"""What a run writes down: ``metrics.jsonl``, TensorBoard, Weights & Biases. One rank writes."""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.log_sinks import Board, LineFile, QuietThreads
from hetero_megatron.monitoring.throughput import ExpertFigures
from hetero_megatron.utils.files import is_regular, open_append, read_json_object

FILE, WANDB_FILE = "metrics.jsonl", "wandb.json"


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
        wandb: keyword arguments of ``wandb.init`` (project, …); None: off. A run that goes on in ``directory`` goes on
            in its W&B run, which takes no step twice: of steps that are run again the first values stay.
        resumed: None: what ``directory`` holds is of another run.
        purge_step: what the TensorBoard directory holds of this step and later ones is hidden; None: nothing is.

    Raises:
        UserError: TensorBoard or W&B was asked for and is not installed, or the directory cannot be written.
    """

    def __init__(
        self,
        directory: str | None,
        tensorboard_dir: str | None = None,
        wandb: Mapping[str, Any] | None = None,
        resumed: Resumed | None = None,
        tensorboard_queue_size: int = 1000,
        tensorboard_interval: int = 1,
        purge_step: int | None = None,
    ) -> None:
        self._file: LineFile | None = None
        self._evaluated: int | None = None  # the step whose evaluation is logged already
        if directory is not None:
            file, logged = _open(Path(directory), resumed)
            self._file = LineFile(Path(directory) / FILE, file)
            self._evaluated = resumed.step if resumed is not None and logged else None
        self._interval = tensorboard_interval
        self._tensorboard: Board | None = None
        self._wandb: Board | None = None
        if tensorboard_dir is not None:
            self._tensorboard = Board(
                "--tensorboard-dir", tensorboard_dir,
                lambda: _tensorboard(tensorboard_dir, tensorboard_queue_size, purge_step),
            )  # fmt: skip
        if wandb is not None:
            known = _run_id(Path(directory), resumed is not None) if directory is not None else {}
            self._wandb = Board("--wandb-project", str(wandb.get("project")), lambda: _wandb({**wandb, **known}))

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
        self._scalars(scalars, metrics.step)

    def validation(self, step: int, loss: float, name: str = "validation", perplexity: bool = False) -> None:
        """Record an evaluation (``name``: validation or test) after ``step``; ``perplexity`` adds it to TensorBoard and
        W&B."""
        ppl = perplexity_of(loss)
        values = {f"{name}_loss": loss, f"{name}_perplexity": ppl}
        self._line({"step": step, **(values if math.isfinite(loss) else dict.fromkeys(values))})
        if step != self._evaluated:
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
            self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def _scalars(self, values: Mapping[str, float], step: int) -> None:
        def add(writer: Any) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        def log(run: Any) -> None:
            if step >= run.step:
                run.log(dict(values), step=step)

        if self._tensorboard is not None:
            self._tensorboard.do(add)
        if self._wandb is not None:
            self._wandb.do(log)

    def flush(self) -> None:
        """TensorBoard writes every two minutes only; metrics.jsonl needs no flush."""
        if self._tensorboard is not None:
            self._tensorboard.do(lambda writer: writer.flush())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.do(lambda writer: writer.close())
        if self._wandb is not None:
            self._wandb.do(lambda run: run.finish())


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
        again = resumed.step if resumed.evaluates else None
        logged = rewind(path, resumed.step) if resumed.trains else rewind(path, evaluated=again)
    return open_append(path, "--save"), logged


def _run_id(directory: Path, resumed: bool) -> dict[str, str]:
    """Arguments of ``wandb.init`` by which a run that goes on is the same W&B run; none where the environment says."""
    path = directory / WANDB_FILE
    if "WANDB_RUN_ID" in os.environ:
        return {}
    if resumed and is_regular(path):
        known = read_json_object(path, "--save").get("id")
        if not isinstance(known, str) or not re.fullmatch("[A-Za-z0-9_-]{1,64}", known):
            raise UserError("is not the name of a W&B run", field="id", value=known, where=str(path))
    else:
        known = secrets.token_hex(4)
        path.unlink(missing_ok=True)
        with open_append(path, "--save") as file:
            file.write(json.dumps({"id": known}).encode() + b"\n")
    return {"id": known, "resume": "allow"}


def set_aside(directory: str | Path, name: str) -> None:
    """Give a file of an earlier run the next free number: ``metrics.jsonl`` -> ``metrics.1.jsonl``."""
    path, number = Path(directory) / name, 1
    if os.path.lexists(path):
        while os.path.lexists(aside := path.with_name(f"{path.stem}.{number}{path.suffix}")):
            number += 1
        path.rename(aside)


def _tensorboard(directory: str, queue_size: int, purge_step: int | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            "TensorBoard is not installed",
            field="--tensorboard-dir",
            value=directory,
            accepted="pip install tensorboard, or leave the flag out",
        ) from error
    _wait_for_a_later_second(directory)
    QuietThreads.install("_AsyncWriterThread")
    return SummaryWriter(directory, max_queue=queue_size, purge_step=purge_step)  # type: ignore[no-untyped-call]


def _wait_for_a_later_second(directory: str) -> None:
    """TensorBoard reads event files in the order of their names, which begin with the second: of two in one second the
    later one might be read first, and what it says to purge would purge itself."""
    names = (path.name.split(".") for path in Path(directory).glob("events.out.tfevents.*"))
    newest = max((int(name[3]) for name in names if name[3].isdecimal()), default=0)
    if 0 <= newest + 1 - time.time() <= 1:  # else it is old, or another machine's clock is ahead
        time.sleep(newest + 1 - time.time())


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
    try:
        return wandb.init(**options)
    except Exception as error:
        if not {"UsageError", "AuthenticationError"} & {kind.__name__ for kind in type(error).__mro__}:
            raise  # no network, perhaps
        raise UserError(
            f"refuses: {' '.join(str(error).split())}", field="--wandb-project", value=options.get("project"),
            accepted="what `wandb login` asks for, WANDB_MODE=offline, or no such flag",
        ) from None  # fmt: skip
