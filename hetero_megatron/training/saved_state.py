"""The part of a checkpoint's metadata that training goes on from: every type and range checked, and compared with the
run that goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hetero_megatron.checkpoint.manifest import METADATA, unusable
from hetero_megatron.checkpoint.native import LOAD, Checkpoint, damaged_error
from hetero_megatron.checkpoint.typed import stored_spec, typed
from hetero_megatron.errors import UserError
from hetero_megatron.training.config import RunConfig, ScheduleConfig
from hetero_megatron.training.lr_schedule import LearningRate, WeightDecay

DTYPES = ("fp64", "fp32", "bf16", "fp16")
MAX_SCALE = 2.0**127  # of fp32, in which it is applied
MAX_UPDATES = 1 << 53  # of an optimizer, as a float counts them
# What may differ between the checkpoint's model and the flags' without making it another model.
_NO_IDENTITY = (
    "name", "init_std", "max_position_embeddings", "notices", "hf_model_type", "mtp_loss_factor", "mtp_said",
)  # fmt: skip


@dataclass(frozen=True)
class _Scale:
    scale: float
    good_steps: int
    patience: int

    def __post_init__(self) -> None:
        _require("scale", self.scale, 0 < self.scale <= MAX_SCALE)
        _require("good_steps", self.good_steps, self.good_steps >= 0)
        _require("patience", self.patience, self.patience >= 0)


@dataclass(frozen=True)
class _Optimizer:
    name: str
    numbers: dict[str, float]
    momentum: float = 0.0
    rates: dict[str, float] | None = None

    def __post_init__(self) -> None:
        _require("name", self.name, self.name in ("adam", "sgd", "muon"))
        _require("momentum", self.momentum, 0 <= self.momentum < 1)
        for key, number in self.numbers.items():
            is_step_count = key == "step" and 0 <= number <= MAX_UPDATES and number.is_integer()
            _require(f"numbers.{key}", number, is_step_count)


@dataclass(frozen=True)
class _StreamState:
    sample: int
    cursor: list[int]
    skip: int
    corpus: list[int]

    def __post_init__(self) -> None:
        _require("sample or skip", [self.sample, self.skip], min(self.sample, self.skip) >= 0)
        _require("cursor", self.cursor, len(self.cursor) <= 3 and min(self.cursor, default=0) >= 0)


@dataclass(frozen=True)
class _Conversations:
    """Of one data set of conversations that is streamed: where its block begins."""

    sample: int
    epoch: int
    block: int
    records: int
    size: int
    name: str

    def __post_init__(self) -> None:
        lowest = min(self.sample, self.epoch, self.block, self.records, self.size - 1)
        _require("sample, epoch, block, records or size", lowest, lowest >= 0)


@dataclass(frozen=True)
class _Blend:
    sample: int
    parts: list[_Conversations]

    def __post_init__(self) -> None:
        _require("sample", self.sample, self.sample >= 0)


@dataclass(frozen=True)
class _Data:
    streams: tuple[_StreamState, ...] = ()
    conversations: tuple[_Blend, ...] = ()


@dataclass(frozen=True)
class _Plan:
    seq_length: int

    def __post_init__(self) -> None:
        _require("seq_length", self.seq_length, self.seq_length >= 1)


@dataclass(frozen=True)
class _Outer:
    """Of outer steps between islands."""

    islands: int
    every: int
    fragments: int
    delay: int
    updates: int
    tokens: list[list[float]]
    under_way: bool
    rates: dict[str, float]
    compress: str = "none"

    def __post_init__(self) -> None:
        from hetero_megatron.plans.outer import COMPRESS

        _require("compress", self.compress, self.compress in COMPRESS)
        lowest = min(self.islands - 1, self.every - self.fragments, self.fragments - 1, self.delay, self.updates)
        _require("islands, every, fragments, delay or updates", lowest, lowest >= 0 and self.updates <= MAX_UPDATES)
        counts = [count for row in self.tokens for count in row]
        has_all_counts = len(self.tokens) == self.fragments and all(len(row) == self.islands for row in self.tokens)
        _require("tokens", self.tokens, has_all_counts and all(0 <= count <= MAX_UPDATES for count in counts))
        _require("rates", self.rates, self.rates.keys() == {"mixing", "lr", "momentum", "nesterov"})


@dataclass(frozen=True)
class _State:
    """What ``Checkpointing`` reads; null where nothing was trained yet."""

    step: int
    consumed_train_samples: int
    model: dict[str, Any]
    plan: _Plan | None
    plan_fingerprint: str | None
    seed: int | None
    dtype: str
    loss_scale: _Scale | None
    learning_rate: LearningRate | None
    weight_decay: WeightDecay | None
    optimizer: _Optimizer | None
    data: _Data | None
    data_fingerprint: str = ""
    dropout: dict[str, float] | None = None
    reference: str = ""
    outer: _Outer | None = None

    def __post_init__(self) -> None:
        _require("step", self.step, self.step >= 0)
        _require("consumed_train_samples", self.consumed_train_samples, self.consumed_train_samples >= self.step)
        _require("dtype", self.dtype, self.dtype in DTYPES)
        for flag, rate in (self.dropout or {}).items():
            _require(f"dropout.{flag}", rate, 0 <= rate < 1)


def check_state(checkpoint: Checkpoint) -> None:
    """The state is one that a training run wrote, or ``convert``.

    Raises:
        UserError: a value is missing, has another type, or cannot be.
    """
    state, path = checkpoint.state, checkpoint.path / METADATA
    try:
        known_fields = {f.name: state[f.name] for f in dataclasses.fields(_State) if f.name in state}
        plan = typed(known_fields.get("plan"), dict[str, Any] | None, "state.plan")
        if plan is not None:
            known_fields["plan"] = {"seq_length": plan.get("seq_length")}
        typed(known_fields, _State, "state")
    except UserError as error:
        raise damaged_error(unusable(path, error), checkpoint.field) from None


def _require(field: str, value: object, good: bool) -> None:
    if not good:
        raise UserError("cannot be", field=field, value=value)


# Field -> flag; "{unit}" is "samples" or "iters", as the length of training was given.
_RATE_FLAGS = {
    "peak": "--lr", "minimum": "--min-lr", "initial": "--lr-warmup-init", "style": "--lr-decay-style",
    "warmup": "--lr-warmup-{unit} (or -fraction)", "decay": "--lr-decay-{unit}", "wsd_style": "--lr-wsd-decay-style",
    "wsd_decay": "--lr-wsd-decay-{unit}",
}  # fmt: skip
_DECAY_FLAGS = {
    "start": "--start-weight-decay", "end": "--end-weight-decay", "style": "--weight-decay-incr-style",
    "samples": "--train-{unit}",
}  # fmt: skip
_COUNTS = ("warmup", "decay", "wsd_decay", "samples")  # in samples, whatever the flag counts


def differences(rate: LearningRate, decay: WeightDecay, schedule: ScheduleConfig) -> list[str]:
    """The flags through which the schedule's curves differ from the checkpoint's ``rate`` and ``decay``; empty if they
    are the same, however long training is."""
    unit = "iters" if schedule.asked_samples is None else "samples"
    out = []
    new_rate, new_decay = schedule.learning_rate, schedule.weight_decay
    if rate.curve() != new_rate.curve():
        flags = dict(_RATE_FLAGS)
        if new_rate.decay == schedule.train_samples:
            flags["decay"] = "--train-{unit}, where --lr-decay-{unit} is not given"
        out += _differ(rate.curve(), new_rate.curve(), flags, unit)
    if decay.curve() != new_decay.curve():
        flags = _DECAY_FLAGS
        if decay.start == decay.end and new_decay.start == new_decay.end:
            flags = {"start": "--weight-decay"}
        out += _differ(decay.curve(), new_decay.curve(), flags, unit)
    return out


def _differ(
    old: LearningRate | WeightDecay, new: LearningRate | WeightDecay, flags: dict[str, str], unit: str
) -> list[str]:
    lines = []
    for field in fields(old):
        saved_value, new_value = getattr(old, field.name), getattr(new, field.name)
        if saved_value != new_value and field.name in flags:
            counted = " samples" if field.name in _COUNTS else ""
            flag = flags[field.name].format(unit=unit)
            lines.append(f"{flag}: {_number(saved_value)}{counted} there, {_number(new_value)}{counted} here")
    return lines


def _number(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def check_spec(checkpoint: Checkpoint, config: RunConfig, finetune: bool) -> None:
    """The checkpoint is of this model; with ``finetune`` only shapes must fit, which loading checks."""
    saved, spec = stored_spec(checkpoint.state["model"]), config.spec
    if saved.lora is not None and spec.lora is not None:  # a setting of the run
        saved = replace(saved, lora=replace(saved.lora, dropout=spec.lora.dropout))
    differ = [
        f"{f.name} {getattr(saved, f.name)!r} (here {getattr(spec, f.name)!r})"
        for f in fields(spec)
        if f.name not in _NO_IDENTITY and getattr(saved, f.name) != getattr(spec, f.name)
    ]
    if differ and not finetune:
        raise UserError(
            f"is a checkpoint of another model than {config.spec.name}: {'; '.join(differ)}", field=checkpoint.field,
            value=str(checkpoint.path), accepted=f"a checkpoint of {config.spec.name}, or --finetune",
        )  # fmt: skip


def same_schedule(config: RunConfig, state: Mapping[str, Any]) -> RunConfig:
    """As Megatron: a learning rate or weight decay other than the checkpoint's is refused unless a flag decides."""
    source, schedule = config.checkpoint.schedule_from, config.schedule
    if state["learning_rate"] is None or config.skip_train:  # converted: nothing was trained yet
        return config
    rate, decay = LearningRate(**state["learning_rate"]), WeightDecay(**state["weight_decay"])
    changes = differences(rate, decay, schedule)
    if source == "flags" or not changes:
        return config
    if source == "checkpoint":
        return replace(config, schedule=replace(schedule, learning_rate=rate, weight_decay=decay))
    raise UserError(
        f"the learning rate or weight decay is not the checkpoint's: {'; '.join(changes)}",
        field=LOAD, value=config.checkpoint.load,
        accepted="--override-opt_param-scheduler (the flags count) or --use-checkpoint-opt_param-scheduler (it counts)",
    )  # fmt: skip


def other_rollouts(state: Mapping[str, Any], config: RunConfig) -> list[str]:
    """What of --grpo is not as it was, and changes numbers: a line for each flag.

    Raises:
        UserError: the run would go on in the middle of steps on the same answers.
    """
    g, was = config.grpo, state.get("grpo")
    if g is not None and state["step"] % g.iterations:
        raise UserError(
            f"step {state['step']} of the checkpoint would be in the middle of steps on the same answers",
            field="--grpo-iterations", value=g.iterations, accepted="what it was before, or a divisor of the step",
        )  # fmt: skip
    if g is None or not isinstance(was, dict):
        return []
    from hetero_megatron.spec.grpo import FLAG_KEYS

    now = {name: getattr(g, name) for name in FLAG_KEYS if name not in ("rows", "seconds")}
    return [
        f"--{FLAG_KEYS[name].replace('_', '-')} is {value}; the checkpoint was made with {was[name]}"
        for name, value in now.items() if was.get(name, value) != value
    ]  # fmt: skip
