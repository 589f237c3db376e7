"""Dashboards: each takes the scalars of steps, and none takes a step twice, however often the run starts again."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.log_sinks import QuietThreads
from hetero_megatron.utils.files import is_regular, open_append, read_json_object

WANDB_FILE, MLFLOW_FILE = "wandb.json", "mlflow.json"
_LOSS = "lm loss"


class Dashboard(Protocol):
    """What a run writes its scalars to."""

    def log(self, values: Mapping[str, float], step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files.

    Args:
        purge_step: what the directory holds of this step and later ones is hidden; None: nothing is.
    """

    def __init__(self, directory: str, queue_size: int, purge_step: int | None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing("TensorBoard", "tensorboard", "--tensorboard-dir", directory) from error
        _wait_for_a_later_second(directory)
        QuietThreads.install("_AsyncWriterThread")
        self._writer: Any = SummaryWriter(directory, max_queue=queue_size, purge_step=purge_step)  # type: ignore[no-untyped-call]

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _wait_for_a_later_second(directory: str) -> None:
    """TensorBoard reads event files in the order of their names, which begin with the second: of two in one second the
    later one might be read first, and what it says to purge would purge itself."""
    names = (path.name.split(".") for path in Path(directory).glob("events.out.tfevents.*"))
    newest = max((int(name[3]) for name in names if name[3].isdecimal()), default=0)
    if 0 <= newest + 1 - time.time() <= 1:  # else it is old, or another machine's clock is ahead
        time.sleep(newest + 1 - time.time())


class Wandb:
    """A run of Weights & Biases; of steps that are run again the first values stay.

    Args:
        options: of ``wandb.init``.
        directory: keeps the run's id, by which a run that goes on is the same one; None: every run is a new one.
    """

    def __init__(self, options: Mapping[str, Any], directory: Path | None, resumed: bool) -> None:
        project = options.get("project")
        try:
            import wandb
        except ImportError as error:
            raise missing("Weights & Biases", "wandb", "--wandb-project", project) from error
        run_id: dict[str, Any] = {}
        if directory is not None and "WANDB_RUN_ID" not in os.environ:
            file = directory / WANDB_FILE
            name = known_id(file, "[A-Za-z0-9_-]{1,64}", "W&B") if resumed else None
            run_id = {"id": name or remember_id(file, secrets.token_hex(4)), "resume": "allow"}
        try:
            self._run = wandb.init(**options, **run_id)
        except Exception as error:
            if not {"UsageError", "AuthenticationError"} & {kind.__name__ for kind in type(error).__mro__}:
                raise  # no network, perhaps
            raise UserError(
                f"refuses: {' '.join(str(error).split())}", field="--wandb-project", value=project,
                accepted="what `wandb login` asks for, WANDB_MODE=offline, or no such flag",
            ) from None  # fmt: skip

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step >= self._run.step:
            self._run.log(dict(values), step=step)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow; of steps that are run again the first values stay.

    Args:
        options: ``experiment``, and ``run_name`` and ``tracking_uri`` where they are not MLflow's own.
        directory: as of :class:`Wandb`.
    """

    def __init__(self, options: Mapping[str, Any], directory: Path | None, resumed: bool) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        except ImportError as error:
            raise missing("MLflow", "mlflow", "--mlflow-experiment", options["experiment"]) from error
        self._metric, self._client = Metric, MlflowClient(tracking_uri=options.get("tracking_uri"))
        file = None if directory is None else directory / MLFLOW_FILE
        run_id = known_id(file, "[0-9a-f]{32}", "MLflow") if resumed and file is not None else None
        self._last = -1
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            self._last = max((row.step for row in self._client.get_metric_history(run_id, _LOSS)), default=-1)
            self._run = run_id
            return
        entry = self._client.get_experiment_by_name(options["experiment"])
        experiment = self._client.create_experiment(options["experiment"]) if entry is None else entry.experiment_id
        self._run = str(self._client.create_run(experiment, run_name=options.get("run_name")).info.run_id)
        if file is not None:
            remember_id(file, self._run)

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step > self._last:
            time_ms = int(1000 * time.time())
            rows = [self._metric(name, float(value), time_ms, step) for name, value in values.items()]
            self._client.log_batch(self._run, metrics=rows)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._client.set_terminated(self._run)


def known_id(file: Path, pattern: str, program: str) -> str | None:
    """The id of the run that goes on; None: there is none.

    Raises:
        UserError: what the file says is no such id.
    """
    if not is_regular(file):
        return None
    run_id = read_json_object(file, "--save").get("id")
    if not isinstance(run_id, str) or not re.fullmatch(pattern, run_id):
        raise UserError(f"is not the name of a run of {program}", field="id", value=run_id, where=str(file))
    return run_id


def remember_id(file: Path, run: str) -> str:
    """Write the id of a new run; returns it."""
    file.unlink(missing_ok=True)
    with open_append(file, "--save") as stream:
        stream.write(json.dumps({"id": run}).encode() + b"\n")
    return run


def missing(name: str, package: str, flag: str, value: object) -> UserError:
    """A package that a flag needs is not installed."""
    accepted = f"pip install {package}, or leave the flag out"
    return UserError(f"{name} is not installed", field=flag, value=value, accepted=accepted)
