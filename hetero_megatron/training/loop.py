"""The training loop of one rank: steps, evaluation, checkpoints, the end.

What it works with is built by :mod:`~hetero_megatron.training.train`; one step on the device is
:meth:`~hetero_megatron.training.runtime.Runtime.train_step`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from hetero_megatron.data.batch import BatchLoader
from hetero_megatron.emulation import Emulation
from hetero_megatron.errors import INTERRUPTED, UserError
from hetero_megatron.monitoring.metrics import StepMetrics
from hetero_megatron.monitoring.reporter import Reporter
from hetero_megatron.monitoring.stragglers import DRIFT, StragglerReport
from hetero_megatron.training.checkpointing import Checkpointing, ConsumedSamples
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.exit import ExitConditions
from hetero_megatron.training.failure import ReplicaCheck, StepGuard
from hetero_megatron.training.initial_weights import InitialWeights
from hetero_megatron.training.lr_schedule import LossScale
from hetero_megatron.training.node_data import NodeData
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.step_numbers import StepStats
from hetero_megatron.utils.text import notice_line

if TYPE_CHECKING:
    from hetero_megatron.training.alignment.session import Alignment
    from hetero_megatron.training.profile import Profiler

OnStep = Callable[[int, StepStats], None]  # number of the step, and how it went


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come, said as one value: whoever interrupts the loop finds the number of a step, its samples
    and its loss scale together.

    Attributes:
        step, consumed: optimizer steps, and sequences of them, that are done; those of runs before are counted.
        loss_scale: of the next step.
        updates: of the optimizer by then (:attr:`~hetero_megatron.parallel.optimizer.ShardedOptimizer.updates`): where
            it has made more, its memory holds the state after the next step.
    """

    step: int
    consumed: int
    loss_scale: LossScale
    updates: int

    def after(self, size: int, skipped: bool, updates: int) -> RunProgress:
        """After one more step, of ``size`` sequences; ``skipped``: its gradients overflowed."""
        return RunProgress(self.step + 1, self.consumed + size, self.loss_scale.update(skipped), updates)


class Elastic(Protocol):
    """What an elastic run does beside its steps."""

    @property
    def asks(self) -> bool:
        """Whether the launcher wants the run to stop, or ranks to come or go, after a step."""

    def after_step(self, training: Training, stop: bool, final: bool) -> bool:
        """Called on all ranks when a step is complete (``stop``: some rank wants to stop; ``final``: it is the last).

        Returns:
            whether the run ends here.
        """


@dataclass
class Training:
    """A run on one rank of the plan: its parts, and how far it has come.

    Attributes:
        config: with the schedule that counts, which may be a checkpoint's.
        progress: what the loop has done, and reported or is about to.
        stragglers, profiler, alignment: None where nobody asked for them.
        trained: some step of this run changed the weights, or there was none to do.
        on_step: told of every step.
        elastic: what survives lost ranks; None: nothing does.
    """

    config: RunConfig
    runtime: Runtime
    node_data: NodeData
    weights: InitialWeights
    checkpoints: Checkpointing
    reporter: Reporter
    guard: StepGuard
    exit: ExitConditions
    replicas: ReplicaCheck
    stragglers: StragglerReport | None
    profiler: Profiler | None
    alignment: Alignment | None
    emulation: Emulation
    progress: RunProgress
    on_step: OnStep | None = None
    elastic: Elastic | None = None
    done: Callable[[], StepMetrics] | None = None  # what is recorded of the last step

    def __post_init__(self) -> None:
        self.trained = self.step >= self.config.steps

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def consumed(self) -> int:
        return self.progress.consumed

    @property
    def in_memory(self) -> RunProgress:
        """Of which moment the optimizer's memory is, whatever this rank was interrupted in."""
        done, updates = self.progress, updates_of(self.runtime)
        return done if updates == done.updates else done.after(self.config.batch_size.at(done.consumed), False, updates)

    def last_metrics(self) -> list[StepMetrics]:
        """Of the last step that this rank has done, and of one that it was interrupted in after the update: the rank
        that writes the log may not have come so far."""
        done, now = self.progress, self.in_memory
        found = [self.done()] if self.done is not None else []
        if now.step > done.step:
            rates = now.consumed - done.consumed, self.config.learning_rate.at(done.consumed), done.loss_scale.scale
            seconds = time.perf_counter() - self.begin
            stats = self.runtime.numbers.stats
            found.append(self.reporter.metrics_of(now.step, now.consumed, *rates, stats, seconds))
        return found

    def run(self) -> int:
        """Train, evaluate, save and export.

        Returns:
            the exit code of this rank: 0, ``DRIFT`` or ``INTERRUPTED``.

        Raises:
            UserError: of all ranks alike.
            CommError: a peer is gone.
        """
        config, data = self.config, self.node_data.datasets
        if not config.skip_train:
            assert data.train is not None
            if self.reporter.is_first and not self.step:  # a stream would have to go back to its beginning
                self.reporter.say(self.node_data.describe(data.train))
            self.emulation.started()
            with self.node_data.loader(data.train) as loader:
                self._train(loader)
            if not self.trained:
                self.reporter.say(
                    notice_line("every step of this run was skipped: the weights are those that it began with")
                )
            self._save()
        if config.evaluation.iterations:
            self._evaluate("validation")
            if data.test is not None and (config.skip_train or self.step == config.steps):
                self._evaluate("test")
        from hetero_megatron.training.export import export

        export(config, self.step, self.runtime, self.weights, self.checkpoints, self.reporter)
        self.checkpoints.wait()
        self.reporter.finish(self.step, self.exit.reason)
        if self.stragglers is not None and self.stragglers.wants_plan(self.step):
            return DRIFT
        return INTERRUPTED if self.exit.interrupted and not self.checkpoints.active else 0

    def _train(self, loader: BatchLoader) -> None:
        """Steps until the last one, or until some rank wants to stop."""
        config, evaluation = self.config, self.config.evaluation
        last = self.step >= config.steps
        while not last:
            begin = self.begin = time.perf_counter()
            step, size = self.step + 1, config.batch_size.at(self.consumed)
            lr, decay = config.learning_rate.at(self.consumed), config.weight_decay.at(self.consumed)
            with self.profiler.step(step) if self.profiler is not None else nullcontext():
                stats = self.guard.step(
                    self.runtime, loader, step, self.consumed, size, lr, decay, config.optimizer.clip_grad,
                    self.progress.loss_scale.scale, self._wants_to_stop(step), self._only_trains_after(step),
                )  # fmt: skip
            last = stats.stop or step == config.steps
            if not last:
                loader.advance(size)
            if self.alignment is not None:
                self.alignment.after_step(step, self.runtime)
            scale = self.progress.loss_scale.scale
            self.progress = self.progress.after(size, stats.skipped, updates_of(self.runtime))
            self._report(stats, size, lr, scale, begin, last)
            if self.on_step is not None:
                self.on_step(step, stats)
            self.replicas.after_step(step)
            if self.checkpoints.due(step):
                self.reporter.flush()  # a run that is killed goes on from here, and its logs with it
                self._save()
            if evaluation.iterations and step % evaluation.interval == 0 and not last:
                self._evaluate("validation")
            if self.elastic is not None:
                last = self.elastic.after_step(self, stats.stop, step == config.steps)

    def _wants_to_stop(self, step: int) -> bool:
        if self.config.grpo is not None and step % self.config.grpo.iterations:  # its answers are in no checkpoint
            return False
        elastic_asks = self.elastic is not None and self.elastic.asks
        return self.exit.check(step) or self.checkpoints.failed or elastic_asks

    def _only_trains_after(self, step: int) -> bool:
        """Whether nothing reads weights between this step and the next one, so that they may still be on their way."""
        config, evaluation = self.config, self.config.evaluation
        reads = (
            step == config.steps, self.checkpoints.due(step), self.replicas.due(step), self.alignment is not None,
            evaluation.iterations and step % evaluation.interval == 0, self.on_step is not None,
            config.grpo is not None,
        )  # fmt: skip
        return config.distributed.overlap_param_gather and not any(reads)

    def _report(self, stats: StepStats, size: int, lr: float, scale: float, begin: float, last: bool) -> None:
        """Log a step of ``size`` sequences.

        Raises:
            UserError: the loss scale cannot fall, and gradients overflow again and again.
        """
        if self.stragglers is not None:
            self.stragglers.step(self.step, stats.busy, size)
        seconds = time.perf_counter() - begin
        what = self.step, self.consumed, size, lr, scale, stats, seconds
        self.done = partial(self.reporter.metrics_of, *what)
        self.reporter.step(*what)
        if self.profiler is not None and (summary := self.profiler.after(self.step, stats.actions, seconds, last)):
            self.reporter.say(summary)
        self.trained |= not stats.skipped
        if self.config.dtype == "fp16":
            self.progress.loss_scale.check(self.step, last and not self.trained)

    def _save(self) -> None:
        self.checkpoints.save(ConsumedSamples(self.step, self.consumed), self.progress.loss_scale)

    def _evaluate(self, split: str) -> None:
        """Mean loss per token, or per preference pair, over the batches of ``validation`` or ``test``; the same
        batches every time. With outer steps it is that of the global weights.

        Raises:
            UserError: it is not finite, and that is to end the run.
        """
        data = self.node_data.datasets.valid if split == "validation" else self.node_data.datasets.test
        assert data is not None
        iterations, size = self.config.evaluation.iterations, self.config.plan.global_batch_size
        total, tokens, sums = 0.0, 0, dict[str, float]()
        with self.runtime.global_weights(), self.node_data.loader(data) as loader:
            for i in range(iterations):
                loss_sum, count, rewards = self.runtime.evaluate_pairs(loader, i * size, size)
                if i + 1 < iterations:
                    loader.advance(size)
                total, tokens = total + loss_sum, tokens + count
                sums = {name: sums.get(name, 0.0) + count * mean for name, mean in rewards.items()}
        loss = total / max(tokens, 1)
        if self.config.check_nan and not math.isfinite(loss):
            raise UserError(
                f"the {split} loss is {loss} after step {self.step}: nothing is saved or exported after it",
                accepted="weights without NaN or Inf (an earlier checkpoint), other data, or more range than fp16 has",
            )
        means = {name: total / max(tokens, 1) for name, total in sums.items()}
        self.reporter.evaluated(self.step, loss, split, means)


def updates_of(runtime: Runtime) -> int:
    """How often its optimizer has changed the weights; 0 without one."""
    return runtime.optimizer.updates if runtime.optimizer is not None else 0
