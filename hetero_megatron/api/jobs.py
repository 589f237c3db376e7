"""Training and generation from a program: one rank of a job, as its launcher's environment says, or a job of its own.

Keywords are the flags of ``pretrain_gpt.py`` and ``hetero-megatron generate`` by their names (``train_iters=10`` is
``--train-iters 10``); True is a flag without a value. torch is imported by the first call. A rank of a launcher's job
makes one such call; a process on its own any number.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_megatron.api.inputs import Cluster, Model
from hetero_megatron.api.plans import Plan
from hetero_megatron.environment.launcher import read_launcher
from hetero_megatron.errors import UserError

if TYPE_CHECKING:
    from hetero_megatron.training.step_numbers import StepStats


@dataclass(frozen=True)
class Trained:
    """What became of a run, on this rank.

    Attributes:
        losses: mean per token, in nats, by number of the step; of this run's steps. Empty on ranks that the plan does
            not use.
        interrupted: Ctrl-C or another signal ended it before its last step; what it had is saved.
    """

    losses: Mapping[int, float]
    interrupted: bool


@dataclass(frozen=True)
class Answer:
    """One prompt, continued. ``prompt``, ``tokens``: ids."""

    prompt: list[int]
    tokens: list[int]
    text: str


def train(
    *, plan: Plan | str | os.PathLike[str] | None = None, cluster: Cluster | str | os.PathLike[str] | None = None,
    model: Model | str | os.PathLike[str] | None = None, on_step: Callable[[int, StepStats], None] | None = None,
    **flags: Any,
) -> Trained:  # fmt: skip
    """Train under a plan, on this rank.

    Args:
        plan, cluster, model: objects, or what their flags take; None: what other flags say.
        on_step: told of every step, with its number and statistics.
        flags: of ``pretrain_gpt.py``.

    Raises:
        UserError: as the command line prints it; all ranks raise it.
        RuntimeError: CommError, where a peer died or does not answer.
    """
    from hetero_megatron.cli.configure import configure
    from hetero_megatron.cli.pretrain import over_memory

    spec = model.spec if isinstance(model, Model) and not model.source else None
    model_name = model.source or None if isinstance(model, Model) else model
    losses: dict[int, float] = {}

    def told(step: int, stats: StepStats) -> None:
        losses[step] = stats.loss
        if on_step is not None:
            on_step(step, stats)

    launcher = read_launcher(os.environ)
    with _files(plan=plan, cluster=cluster) as files, _signals():
        config = configure(words({"model": model_name, **files, **flags}), os.environ, spec, early=launcher.rank == 0)
        if config.dry_run:
            raise UserError("nothing is trained then", field="dry_run", accepted="hm.predict(plan, cluster)")
        over_memory(config, launcher.rank == 0)
        from hetero_megatron.training.train import train as run

        code = run(config, launcher, on_step=told)
    return Trained(losses, code != 0)


def generate(
    prompts: list[str], *, load_hf: str | os.PathLike[str] | None = None, load: str | os.PathLike[str] | None = None,
    plan: Plan | str | os.PathLike[str] | None = None, **flags: Any,
) -> list[Answer]:  # fmt: skip
    """Continue prompts with a model, on this rank; alone, or on all ranks of a job.

    Args:
        load_hf: directory in Hugging Face's form; load: of checkpoints that :func:`train` saved. One of the two.
        flags: of ``hetero-megatron generate`` (``max_new_tokens=64``, ``temperature=0.7``, ``chat=True``), and those of
            the model and the plan.

    Returns:
        answers in the order of the prompts on the first rank; empty on others.

    Raises:
        UserError: as the command line prints it.
    """
    from hetero_megatron.cli.generate import generate as run
    from hetero_megatron.cli.generate import parse

    launcher = read_launcher(os.environ)
    with _files(plan=plan) as files, _signals():
        texts = [argument for prompt in prompts for argument in ("--prompt", prompt)]
        args, unknown_flags = parse([*texts, *words({"load_hf": load_hf, "load": load, **files, **flags})])
        generation = run(args, unknown_flags, launcher, os.environ)
    if launcher.rank:
        return []
    return [Answer(*row) for row in zip(generation.prompts, generation.answers, generation.texts, strict=True)]


def words(flags: Mapping[str, Any]) -> list[str]:
    """The command line that says the same. UserError: a value of a kind that no flag takes."""
    arguments: list[str] = []
    for key, value in flags.items():
        if value is None or value is False:
            continue
        arguments.append("--" + key.replace("_", "-"))
        if value is True:
            continue
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, bool) or not isinstance(item, (str, int, float, os.PathLike)):
                accepted = "a word, a number, a path, or a list of these; True for a flag without a value"
                raise UserError("is no value of a flag", field=key, value=item, accepted=accepted)
            arguments.append(os.fspath(item) if isinstance(item, os.PathLike) else str(item))
    return arguments


@contextmanager
def _files(**given: Any) -> Iterator[dict[str, Any]]:
    """What was given, objects as files that are there until the end."""
    with tempfile.TemporaryDirectory(prefix="hetero-megatron-") as folder:
        paths = {}
        for name, value in given.items():
            paths[name] = value
            if isinstance(value, (Plan, Cluster)):
                paths[name] = Path(folder) / f"{name}.yaml"
                value.write(paths[name])
        yield paths


@contextmanager
def _signals() -> Iterator[None]:
    """The program's handlers of signals are there again afterwards; a thread other than the main one has none."""
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in names}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
