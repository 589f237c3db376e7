"""The training run's side of checkpoints: what is saved and restored, and what must fit before it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from hetero_megatron import __version__
from hetero_megatron.comm.group import together
from hetero_megatron.data import Datasets
from hetero_megatron.errors import UserError, printable
from hetero_megatron.plans.dump import to_dict
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.lr_schedule import LossScale
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.save_directory import writes_checkpoints
from hetero_megatron.utils.text import notice_line, plural

if TYPE_CHECKING:
    from hetero_megatron.checkpoint.boxes import BoxedTensor
    from hetero_megatron.checkpoint.lock import DirectoryLock
    from hetero_megatron.checkpoint.native import Checkpoint, CheckpointSaver

# A rank may write for long while the others wait; a dead peer is noticed by the training thread anyway.
WRITE_TIMEOUT = timedelta(hours=2)
@dataclass(frozen=True)
class ConsumedSamples:
    """How far a run has come."""

    step: int = 0
    consumed: int = 0


class Checkpointing:
    """Built alike on every rank of the plan.

    Args:
        lock: of --save, by ``claim_directory``; held until everything is written.
        scored_by: fingerprint of the model whose scores the run learns from; empty: of none.

    Attributes:
        active: checkpoints are written.
        last_saved: the step of the newest one that this run wrote or began with.
        model_files: what travels along with the weights; on the first rank, which writes it, once ``load`` is done.
        source_dtypes: of every tensor where the weights came from; None: they were drawn at random.
    """

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        data: Datasets,
        synchronize: Any,
        lock: DirectoryLock | None,
        source_dtypes: dict[str, torch.dtype] | None,
        scored_by: str = "",
    ) -> None:
        from hetero_megatron.checkpoint.model_files import ModelFiles

        self.config, self.runtime, self.data, self.source_dtypes = config, runtime, data, source_dtypes
        options = config.checkpoint
        self.active, self._lock, self._scored_by = writes_checkpoints(config), lock, scored_by
        self.last_saved = -1
        self.model_files = ModelFiles()
        group = runtime.comm.background_group(config.plan.ranks, WRITE_TIMEOUT)
        self.saver: CheckpointSaver | None = None
        if self.active:
            assert options.save is not None and group is not None
            from hetero_megatron.checkpoint.native import CheckpointSaver

            self.saver = CheckpointSaver(
                options.save, group, options.keep, options.retain_interval, options.asynchronous, synchronize,
                check=self._check, dtype=runtime.stage_model.dtype,
            )  # fmt: skip
            runtime.hooks.before_update = self.saver.staged

    def _check(self) -> None:
        """Whether this process still writes there; raises UserError or CommError where it does not."""
        self.runtime.comm.fence()
        if self._lock is not None:
            self._lock.check()

    @property
    def failed(self) -> bool:
        """No save can succeed: one has failed, or the directory is gone (perhaps seen by one rank before the others);
        the next one, or ``wait``, raises it."""
        lost = self._lock is not None and bool(self._lock.lost())
        return self.saver is not None and (self.saver.failed or lost)

    def _log(self, text: str) -> None:
        if self.runtime.world.index == 0:
            print(printable(text), flush=True)

    # Saving

    def due(self, step: int) -> bool:
        interval = self.config.checkpoint.save_interval
        return self.active and bool(interval) and step % (interval or 1) == 0

    def save(self, progress: ConsumedSamples, loss_scale: LossScale) -> None:
        """Copy and write in the background, unless this step is saved already."""
        if self.saver is None or self.last_saved == progress.step:
            return
        self.runtime.comm.activity = "saving a checkpoint"
        tensors, numbers = self._tensors()
        place = self.runtime.here.place
        kernels = (f"pipeline {place.pipeline} stage {place.stage}", self.runtime.stage_model.kernels.digest())
        local = {"numbers": numbers, "data": self.data.state_dict(progress.consumed), "kernels": kernels}
        self.saver.save(progress.step, tensors, self._state(progress, loss_scale), local, self._merge)
        self.last_saved = progress.step
        self._log(f"saving checkpoint of step {progress.step} to {self.saver.directory.at(progress.step)}")

    def _tensors(self) -> tuple[dict[str, BoxedTensor], dict[str, float]]:
        """Of this rank, and the optimizer's numbers."""
        with_optimizer = self.config.checkpoint.save_optim
        if self.runtime.outer is not None:
            from hetero_megatron.checkpoint.outer_state import outer_tensors

            self.runtime.outer.settle()
            return outer_tensors(self.runtime.outer, self.config.spec, with_optimizer)
        from hetero_megatron.checkpoint.state import owned_tensors

        assert self.runtime.optimizer is not None
        return owned_tensors(self.runtime.optimizer, self.config.spec, with_optimizer)

    def _outer_state(self) -> dict[str, Any]:
        if self.runtime.outer is None or not self.config.checkpoint.save_optim:
            return {}
        from hetero_megatron.checkpoint.outer_state import OUTER, outer_state

        return {OUTER: outer_state(self.runtime.outer)}

    def _state(self, progress: ConsumedSamples, loss_scale: LossScale) -> dict[str, Any]:
        from hetero_megatron.checkpoint.state import WEIGHT_DTYPES, encode_dtypes

        config = self.config
        return {
            "step": progress.step,
            "consumed_train_samples": progress.consumed,
            "model": asdict(config.spec),
            "plan": to_dict(config.plan),
            "plan_fingerprint": config.plan.fingerprint(),
            "seed": config.seed,
            "data_fingerprint": self.data.fingerprints["train"],
            "reference": self._reference,
            "dtype": config.dtype,
            WEIGHT_DTYPES: encode_dtypes(self.source_dtypes),
            "loss_scale": loss_scale.state_dict() if loss_scale.dynamic else None,
            "learning_rate": asdict(config.learning_rate),
            "weight_decay": asdict(config.weight_decay),
            "dropout": _dropout_rates(config),
            "grpo": asdict(config.grpo) if config.grpo is not None else None,
            **self._outer_state(),
            "versions": {"hetero_megatron": __version__, "torch": torch.__version__},
        }

    def _merge(self, ranks: Sequence[Any]) -> Mapping[str, Any]:
        from hetero_megatron.checkpoint.state import merge_numbers

        saved = self.config.checkpoint.save_optim
        mine, numbers = self.config.optimizer, merge_numbers([r["numbers"] for r in ranks])
        optimizer = {"name": mine.name, "momentum": mine.momentum, "numbers": numbers, "rates": mine.rates()}
        kernels = dict(sorted({tuple(r["kernels"]) for r in ranks}))
        return {
            "optimizer": optimizer if saved else None,
            "data": furthest([r["data"] for r in ranks]),
            "kernels": kernels,  # digest of each stage's kernel plan (of one of its ranks where sizes differ)
        }

    def wait(self) -> None:
        """Until everything is written; then :meth:`release`."""
        if self.saver is not None:
            self.saver.wait()
        self.release()

    def release(self) -> None:
        """The directory is free for the next run."""
        if self._lock is not None:
            self._lock.release()

    # Loading

    def load(self) -> tuple[RunConfig, ConsumedSamples, LossScale]:
        """Restore weights and optimizer; returns the configuration (with the schedule that counts) and the progress."""

        config, options = self.config, self.config.checkpoint
        fresh = (config, ConsumedSamples(), config.loss_scale)
        checkpoint, finetune = self._find(), options.finetune
        if checkpoint is None and options.pretrained is not None:
            from hetero_megatron.checkpoint.native import PRETRAINED

            checkpoint, finetune = self._open(options.pretrained, PRETRAINED), True
            if checkpoint is None:
                raise _none_in(PRETRAINED, options.pretrained)
        together(self.runtime.world, lambda: self._take_along(checkpoint))
        if checkpoint is None:
            self._begin_outer()
            return fresh
        from hetero_megatron.checkpoint.state import left_out, weight_dtypes
        from hetero_megatron.training.saved_state import check_spec, check_state, same_schedule

        check_state(checkpoint)
        state = checkpoint.state
        check_spec(checkpoint, config, finetune)
        if further := left_out(checkpoint, config.spec):
            self._log(notice_line(f"{plural(len(further), 'module')} that predict further tokens are left out"))
        with_optimizer = not (finetune or config.skip_train) and options.load_optim
        if with_optimizer:
            self._check_optimizer(checkpoint)
        if not finetune:
            self._check_reference(checkpoint)
        self.runtime.comm.activity = "loading a checkpoint"
        self._load_tensors(checkpoint, with_optimizer)
        self.source_dtypes = weight_dtypes(checkpoint, config.spec)
        if finetune:
            self._log(f"loaded the weights of {checkpoint.path}; training starts at step 0")
            return fresh
        self.config = config = same_schedule(config, state)
        self._say_differences(checkpoint)
        together(self.runtime.world, lambda: self.data.load_state_dict(state.get("data") or {}))
        progress = ConsumedSamples(int(state["step"]), int(state["consumed_train_samples"]))
        if options.goes_on:
            self.last_saved = progress.step
            self._say_newer(progress.step)
        schedule = config.schedule.resumed(progress.step, progress.consumed)
        self.config = config = replace(config, schedule=schedule)
        what = "" if with_optimizer else ", without its optimizer state"
        self._log(f"loaded {checkpoint.path}{what}: step {progress.step}, {plural(progress.consumed, 'sample')}")
        scaler_state = state["loss_scale"] if state["dtype"] == "fp16" else None  # older ones wrote 1 for other dtypes
        scale = config.loss_scale if scaler_state is None else config.loss_scale.with_state(scaler_state)
        return config, progress, scale

    def _load_tensors(self, checkpoint: Checkpoint, with_optimizer: bool) -> None:
        outer, spec, world = self.runtime.outer, self.config.spec, self.runtime.world
        assert self.runtime.optimizer is not None
        if with_optimizer and (was := checkpoint.state.get("outer")) is not None:
            from hetero_megatron.checkpoint import outer_state

            outer_state.check_outer(checkpoint, self.config.plan)
            told = outer_state.other_islands(was, None if outer is None else outer.outer)
            if outer is None:
                outer_state.load_one_island(checkpoint, self.runtime.optimizer, spec, world)
            else:
                outer_state.load_outer(checkpoint, outer, spec, world)
                told += outer_state.other_rates(was, outer.outer)
            for text in told:
                self._log(notice_line(text))
            return
        from hetero_megatron.checkpoint.state import load_tensors

        load_tensors(checkpoint, self.runtime.optimizer, spec, world, with_optimizer)
        self._begin_outer()

    def _begin_outer(self) -> None:
        """Weights are there, and the same on all islands."""
        if self.runtime.outer is not None:
            self.runtime.outer.take_weights()

    def go_on(self) -> None:
        """Weights and optimizer came from elsewhere: only what travels along is still to be found."""
        together(self.runtime.world, lambda: self._take_along(None))

    def _say_other_rates(self, saved: Mapping[str, Any]) -> None:
        """Of the same optimizer: with them its moments mean something else, or weights move otherwise."""
        mine = self.config.optimizer.rates() if saved.get("name") == self.config.optimizer.name else {}
        for flag, was in (saved.get("rates") or {}).items():
            if was != mine.get(flag, was):
                self._log(notice_line(f"{flag} is {mine[flag]:g}; the checkpoint was made with {was:g}"))

    def _take_along(self, checkpoint: Checkpoint | None) -> None:
        if self.runtime.world.index == 0 and (self.saver is not None or self.config.save_hf is not None):
            from hetero_megatron.training.run_model_files import run_model_files

            self.model_files = run_model_files(self.config, self.data, checkpoint, self._log)
            if self.saver is not None:
                self.saver.extra.update(self.model_files.native())

    def _say_newer(self, step: int) -> None:
        """--ckpt-step, or a damaged checkpoint, took the run back: what it replaces from here on."""
        if self.saver is not None and (steps := self.saver.directory.held()) and steps[-1] > step:
            newer = f"holds newer checkpoints, up to step {steps[-1]}: those of the steps that it saves are replaced"
            self._log(notice_line(f"--save {self.saver.directory.path} {newer}"))

    def _find(self) -> Checkpoint | None:
        options = self.config.checkpoint
        if options.load is None:
            return None
        from hetero_megatron.checkpoint.native import LOAD

        checkpoint = self._open(options.load, LOAD, options.step)
        if checkpoint is None:
            if options.required:
                raise _none_in(LOAD, options.load)
            if options.pretrained is None:
                self._log(notice_line(f"--load {options.load} holds no checkpoint: training starts at step 0"))
        return checkpoint

    def _open(self, path: str, field: str, step: int | None = None) -> Checkpoint | None:
        from hetero_megatron.checkpoint.native import open_checkpoint

        previous = self.config.checkpoint.previous_on_corruption
        return open_checkpoint(path, self.runtime.world, step, previous, self._log, field)

    def _check_optimizer(self, checkpoint: Checkpoint) -> None:
        mine, saved = self.config.optimizer.name, checkpoint.state["optimizer"]
        if saved is None and checkpoint.step == 0:  # converted: nothing was trained yet
            return
        if saved is None:
            problem, accepted = "the checkpoint holds no optimizer state", "--no-load-optim, or --finetune"
        elif saved["name"] != mine:
            problem = f"the checkpoint's optimizer is {saved['name']}"
            accepted = f"--optimizer {saved['name']}, or --no-load-optim"
        elif mine == "sgd" and checkpoint.step and _had_momentum(checkpoint) != bool(self.config.optimizer.momentum):
            problem, accepted = "the checkpoint was made with another --sgd-momentum", "--no-load-optim"
        else:
            return
        raise UserError(problem, field="--optimizer", value=mine, accepted=accepted)

    @cached_property
    def _reference(self) -> str:
        from hetero_megatron.training.reference import reference_fingerprint

        return self._scored_by or reference_fingerprint(self.config)

    def _check_reference(self, checkpoint: Checkpoint) -> None:
        """Of a run that goes on with preference pairs: what they are compared with is what they were."""
        was = checkpoint.state.get("reference", "")
        if was and self._reference and was != self._reference:
            if self.config.distillation is not None:
                flag = "--teacher-hf" if self.config.teacher_scores is None else "--teacher-scores"
                place = self.config.teacher_scores or self.config.teacher_hf
                raise UserError("the checkpoint was trained beside another teacher", field=flag, value=place,
                                accepted="the teacher of the first run, or its scores")  # fmt: skip
            raise UserError(
                "the checkpoint was trained beside another reference: the weights there are not those that it began "
                "with", field="--load-hf", value=self.config.load_hf, accepted="the directory of the first run",
            )  # fmt: skip

    def _say_differences(self, checkpoint: Checkpoint) -> None:
        """What may differ, and changes numbers."""
        from hetero_megatron.training.saved_state import other_rollouts

        for key, flag, mine in (("seed", "--seed", self.config.seed), ("dtype", "--dtype", self.config.dtype)):
            if checkpoint.state[key] not in (mine, None):
                self._log(notice_line(f"{flag} is {mine}; the checkpoint was made with {checkpoint.state[key]}"))
        rates = _dropout_rates(self.config)
        for flag, was in (checkpoint.state.get("dropout") or rates).items():
            if was != rates.get(flag, was):
                self._log(notice_line(f"{flag} is {rates[flag]:g}; the checkpoint was made with {was:g}"))
        for text in other_rollouts(checkpoint.state, self.config):
            self._log(notice_line(text))
        self._say_other_rates(checkpoint.state["optimizer"] or {})
        length, data = self.config.plan.seq_length, self.data.fingerprints["train"]
        was = (checkpoint.state["plan"] or {}).get("seq_length", length)
        if was != length:
            again = "samples are other windows of the data, so what was read already may come again"
            self._log(notice_line(f"--seq-length is {length}; the checkpoint was made with {was}: {again}"))
        elif data and checkpoint.state.get("data_fingerprint", data) not in (data, ""):
            at = checkpoint.state["consumed_train_samples"]
            self._log(notice_line(f"the training data are not the checkpoint's: they are read from sample {at} on"))
        if checkpoint.state["plan_fingerprint"] not in (None, self.config.plan.fingerprint()):
            self._log("the checkpoint was made under another plan; each rank reads what it now owns")


def _dropout_rates(config: RunConfig) -> dict[str, float]:
    """By flag."""
    rates = {"--hidden-dropout": config.dropout.hidden, "--attention-dropout": config.dropout.attention}
    return rates if config.spec.lora is None else rates | {"--lora-dropout": config.spec.lora.dropout}


def _none_in(flag: str, path: str) -> UserError:
    return UserError("holds no checkpoint", field=flag, value=path, accepted="a directory that --save wrote")


def _had_momentum(checkpoint: Checkpoint) -> bool:
    """As the flag was: where no step was taken yet (fp16 looks for its scale) there are no moments in either case."""
    from hetero_megatron.checkpoint.state import moments

    saved = checkpoint.state["optimizer"]
    return bool(saved["momentum"] if "momentum" in saved else moments(checkpoint))


def furthest(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Of every stream the state of the rank that has read furthest (all are valid, later ones are cheaper)."""
    kinds = {kind for state in states for kind in state}  # none of a rank that another one reads for
    return {
        kind: [max(column, key=lambda s: s["sample"]) for column in zip(*(s[kind] for s in states if kind in s))]
        for kind in sorted(kinds)
    }
