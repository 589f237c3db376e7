"""What a run tells its user while it runs: the console line, metrics.jsonl, and a summary at the end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hetero_megatron.emulation import Emulation
from hetero_megatron.errors import UserError, printable
from hetero_megatron.monitoring.console import ConsoleLine, format_line, format_short, format_validation
from hetero_megatron.monitoring.log_sinks import tell
from hetero_megatron.monitoring.metrics import MetricsWriter, Resumed, StepMetrics, perplexity_of, set_aside
from hetero_megatron.monitoring.record import (
    FILE,
    EventKind,
    add_event,
    expectation,
    expected_busy,
    measured_rows,
    start_event,
)
from hetero_megatron.monitoring.throughput import (
    ExpertFigures,
    ExpertTotals,
    figures_of,
    measured_peak_flops,
    tokens_per_chip_second,
    work_shares,
)
from hetero_megatron.platform import Platform
from hetero_megatron.spec.flops import sequence_flops
from hetero_megatron.spec.preference import shown_means
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.step_numbers import StepStats
from hetero_megatron.utils.text import notice_line, plural

if TYPE_CHECKING:
    from hetero_megatron.testbed.clocks import Kept


SPREAD_STEPS = 1000  # the last ones, whose compute may have varied
TIMELINE_AFTER = 2  # steps before the one whose timeline is written down: the first ones are slower


class Reporter:
    """The first rank of the plan prints and writes; the others only take part in gathering.

    Args:
        first_step: number of the first optimizer step of this run, from 1.
        own_peak: FLOP/s of this rank's device, where that was measured before.

    Attributes:
        is_first: this is the first rank of the plan.
        chips: type of chip by rank.
        expected_busy: predicted seconds of compute per step by rank, from calibrated rates only; empty on ranks that do
            not speak.
    """

    def __init__(
        self, config: RunConfig, runtime: Runtime, platform: Platform, first_step: int, emulation: Emulation,
        own_peak: float | None = None,
    ) -> None:  # fmt: skip
        self.first_step, self.emulation, self._events_failed = first_step, emulation, False
        self.config, self.runtime, self.platform = config, runtime, platform
        self.is_first = runtime.comm.rank == config.plan.ranks[0]
        self.own_peak = measured_peak_flops(platform, runtime.stage_model.dtype) if own_peak is None else own_peak
        self.peak = float(runtime.world.gather_vectors(torch.tensor([self.own_peak], dtype=torch.float64)).sum())
        self.flops = sequence_flops(config.spec, config.plan.seq_length)
        cluster = config.cluster
        kind = platform.device.type
        self.chips = {r: cluster.chip_of(r).name if cluster is not None else kind for r in config.plan.ranks}
        self.shares = work_shares(config.plan, config.spec)
        self.expected_busy: dict[int, float] = {}
        self.predicted: float | None = None
        self.writer = self._writer() if self.is_first else None
        if self.is_first:
            self._begin()
        if self.writer is not None and (facts := emulation.facts()):
            self.writer.emulation(first_step - 1, facts)
        self.first_loss: float | None = None
        self.last_loss = 0.0
        self._since: list[tuple[float, float, int, int]] = []  # loss, seconds, tokens, those in the loss
        self._averaged: list[Mapping[str, float]] = []  # of the same steps: facts, losses of further tokens
        self._busy: deque[Sequence[float]] = deque(maxlen=SPREAD_STEPS)  # of full steps, by rank
        self._skipped = self._nan = 0
        self._experts = ExpertTotals()

    def _writer(self) -> MetricsWriter:
        logging = self.config.logging
        trains = not self.config.skip_train and self.first_step <= self.config.steps
        evaluates = self.config.evaluation.iterations > 0
        begins = 0 if self.first_step == 1 else self.first_step  # a run may evaluate before its first step
        return MetricsWriter(
            logging.save,
            logging.tensorboard_dir,
            logging.wandb,
            logging.mlflow,
            Resumed(self.first_step - 1, trains, evaluates) if self._goes_on() else None,
            tensorboard_queue_size=logging.tensorboard_queue_size,
            interval=logging.tensorboard_interval,
            purge_step=begins if trains else None,
            allowed=self.runtime.comm.fence,
        )

    def _goes_on(self) -> bool:
        """Whether what --save holds is of an earlier part of this run."""
        return self.first_step > 1 and self.config.checkpoint.goes_on

    def _begin(self) -> None:
        """Predict a step, and write down what starts here."""
        prediction, notice = expectation(self.config) if self.config.cluster is not None else (None, "")
        if notice:
            print(notice_line(notice), flush=True)
        busy: dict[int, float] = {}
        if prediction is not None:
            from hetero_megatron.predictor.report.prediction import format_step_seconds

            busy = expected_busy(self.config)
            self.predicted = prediction.step_seconds
            print(f"predicted step: {format_step_seconds(prediction)}", flush=True)
            self.expected_busy = {} if prediction.assumed else busy
        directory = self.config.logging.save
        is_restart = self.runtime.comm.launcher.restarts > 0
        if directory is not None:
            if not self._goes_on() and not is_restart:
                set_aside(directory, FILE)
            text = f"start at step {self.first_step}" + (" after a restart" if is_restart else "")
            self.event("start", text, **start_event(self.config, prediction, busy, self.chips, self.first_step))

    def say(self, text: str) -> None:
        """Print a line, on the first rank of the plan."""
        if self.is_first:
            print(printable(text), flush=True)

    def event(self, kind: EventKind, text: str, **more: Any) -> None:
        """Add to ``events.jsonl`` in the --save directory, if there is one; from the first rank of the plan."""
        if self.is_first and self.config.logging.save is not None:
            self.runtime.comm.fence()
            try:
                add_event(self.config.logging.save, kind, text, **more)
            except UserError as error:
                if not self._events_failed:
                    tell(f"{error}: events are missing in it, and training goes on")
                self._events_failed = True

    def _timeline(self, step: int, stats: StepStats, seconds: float) -> None:
        """What every rank did in one of the first steps. Called on all ranks."""
        if self.config.logging.save is None or step != min(self.first_step + TIMELINE_AFTER, self.config.steps):
            return
        gathered = self.runtime.world.gather_objects(measured_rows(stats.actions), list[tuple[str, float, float, int]])
        rows = {str(r): row for r, row in zip(self.config.plan.ranks, gathered, strict=True)}
        self.event("timeline", f"timeline of step {step}", step=step, seconds=seconds, ranks=rows)

    def step(
        self, step: int, consumed: int, size: int, lr: float, scale: float, stats: StepStats, seconds: float
    ) -> None:
        """Record one step; print a line at the logging interval and at the last step."""
        self.first_loss = stats.loss if self.first_loss is None else self.first_loss
        self.last_loss = stats.loss
        self._skipped += stats.skipped
        self._nan += not math.isfinite(stats.loss)
        tokens = size * self.config.plan.seq_length
        answers = self.config.preference is not None  # which the loss counts, not tokens
        self._since.append((stats.loss, seconds, tokens, tokens if answers else stats.tokens))
        self._averaged.append({**stats.facts, **_of_modules(stats)})
        self._timeline(step, stats, seconds)
        if size == self.config.plan.global_batch_size:
            self._busy.append(stats.busy)
        if self.writer is None:
            return
        if stats.routing is not None:
            self._experts.add(stats.routing)
        metrics = self.metrics_of(step, consumed, size, lr, scale, stats, seconds)
        self.writer.step(metrics)
        if step % self.config.logging.interval == 0 or step == self.config.steps or stats.stop:
            self._line(step, consumed, size, lr, scale, stats, metrics.experts)

    def metrics_of(
        self, step: int, consumed: int, size: int, lr: float, scale: float, stats: StepStats, seconds: float
    ) -> StepMetrics:
        """What is recorded of a step."""
        tokens, answers = size * self.config.plan.seq_length, self.config.preference is not None
        return StepMetrics(
            step,
            consumed,
            stats.loss,
            stats.grad_norm,
            lr,
            tokens,
            seconds,
            predicted_step_seconds=self.predicted if size == self.config.plan.global_batch_size else None,
            loss_scale=scale,
            skipped=stats.skipped,
            batch_size=size,
            busy_seconds=stats.busy,
            bubble_seconds=stats.bubble,
            communication_seconds=stats.communication,
            tgs_per_chip=tokens_per_chip_second(self.shares, self.chips, tokens / seconds),
            experts=figures_of(stats.routing) if stats.routing is not None else None,
            loss_tokens=None if answers else stats.tokens,
            pairs=stats.tokens if answers else None,
            facts=shown_means(stats.facts),
            predictions=_of_modules(stats),
        )  # fmt: skip

    def complete(self, steps: Sequence[StepMetrics]) -> None:
        """Record those of these steps of an earlier part of this run that its log has not got."""
        if self.writer is not None and steps:
            last = self.writer.last_step()
            for metrics in steps:
                if last is not None and metrics.step > last:
                    self.writer.step(metrics)

    def _line(
        self, step: int, consumed: int, size: int, lr: float, scale: float, stats: StepStats,
        experts: ExpertFigures | None,
    ) -> None:  # fmt: skip
        losses, seconds, tokens, counting = map(sum, zip(*self._since, strict=True))
        count = len(self._since)
        means = {name: sum(step_means[name] for step_means in self._averaged) / count for name in self._averaged[-1]}
        facts = {name: mean for name, mean in means.items() if name in stats.facts}
        further = {name: mean for name, mean in means.items() if name not in stats.facts}
        rate = self.flops * size * count / seconds
        progress = ConsoleLine(
            step, self.config.steps, consumed, seconds / count, lr, size, losses / count, stats.grad_norm, scale,
            tokens_per_second=tokens / seconds, tflops=rate / len(self.config.plan.ranks) / 1e12, mfu=rate / self.peak,
            skipped=self._skipped, nan=self._nan, busiest=experts.worst if experts is not None else None,
            balance=(dict(experts.losses) if experts is not None else {}) | further,
            loss_tokens_per_second=counting / seconds if counting != tokens else None,
            facts=shown_means(facts),
        )  # fmt: skip
        print((format_line if self.config.logging.log_format == "megatron" else format_short)(progress), flush=True)
        self._since.clear()
        self._averaged.clear()
        self._skipped = self._nan = 0

    def evaluated(self, step: int, loss: float, split: str, facts: Mapping[str, float]) -> None:
        """Of ``validation`` or ``test``; ``facts``: as :attr:`StepStats.facts`, over all of it."""
        facts = shown_means(facts)
        if self.writer is not None:
            self.writer.validation(step, loss, split, self.config.logging.validation_perplexity, facts)
            print(format_validation(step, loss, perplexity_of(loss), f"{split} set", facts), flush=True)

    def flush(self) -> None:
        """Whatever ends the run: what was reported is on disk."""
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Close the files of a run that another one goes on with."""
        if self.writer is not None:
            self.writer.close()

    def finish(self, step: int, reason: str) -> None:
        """Say how it ended, and close the files. Called on all ranks."""
        rank_state = torch.tensor([self.platform.peak_memory() / 2**20, bool(reason)], dtype=torch.float64)
        peaks, stopped = self.runtime.world.gather_vectors(rank_state).T
        if not reason and stopped.any():
            reason = f"rank {self.runtime.here.plan.ranks[int(stopped.argmax())]} was told to"
        facts, clock = self.emulation.facts(), self._worst_clock()
        if self.writer is None:
            return
        if clock is not None:
            facts |= clock.facts()
            print(clock, flush=True)
        if facts:
            self.writer.emulation(step, facts)
        self._expert_load(step)
        self.event("end", f"stopped at step {step}: {reason}" if reason else f"done: {plural(step, 'step')}", step=step)
        print(f"peak memory per rank: {peaks.min():.0f} to {peaks.max():.0f} MiB", flush=True)
        self.writer.close()
        if self.first_loss is not None:
            print(
                f"loss: {self.first_loss:.4f} at step {self.first_step}, {self.last_loss:.4f} at step {step}",
                flush=True,
            )
        print(f"stopped at step {step}: {reason}" if reason else f"done: {plural(step, 'step')}", flush=True)

    def _expert_load(self, step: int) -> None:
        """Write down how often each expert was chosen in this run."""
        from hetero_megatron.plans.routing import write_routing_stats

        moe, path = self.config.spec.moe, self.config.logging.routing_stats
        if moe is None or not self._experts.load:
            return
        stats = self._experts.stats(moe.top_k)
        layers = {str(layer): list(counts) for layer, counts in stats.layers.items()}
        self.event("experts", f"{plural(stats.tokens, 'token')} routed", step=step, tokens=stats.tokens, layers=layers)
        if path is None:
            return
        try:
            write_routing_stats(path, stats, self.config.spec)
        except UserError as error:  # what the run trained is worth more
            tell(f"{error}: the counts are in events.jsonl of --save, if there is one")
        else:
            print(f"routing of {plural(stats.tokens, 'token')} written to {path}", flush=True)

    def _worst_clock(self) -> Kept | None:
        """How far emulated clocks could be kept; None on real chips. Called on all ranks."""
        from hetero_megatron.testbed.clocks import spread, worst_clock

        report = self.runtime.comm.clock.report()
        if not report:
            return None
        names = ("overrun", "late")
        reports = self.runtime.world.gather_vectors(
            torch.tensor([report[n] for n in names], dtype=torch.float64)
        ).tolist()
        worst = worst_clock({r: dict(zip(names, row)) for r, row in zip(self.config.plan.ranks, reports, strict=True)})
        if worst is not None and self.emulation.chips == "soft":
            worst = replace(worst, spread=spread(list(self._busy)))
        return worst


def _of_modules(stats: StepStats) -> dict[str, float]:
    """Losses of modules that predict further tokens, by Megatron's names."""
    return {f"mtp_{k} loss": loss for k, loss in enumerate(stats.predictions, start=1)}
