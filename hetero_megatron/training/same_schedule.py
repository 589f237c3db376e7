"""Whether a run goes on with the checkpoint's learning rate and weight decay, and if not, which flag is the reason."""

from __future__ import annotations

from dataclasses import fields

from hetero_megatron.training.config import ScheduleConfig
from hetero_megatron.training.lr_schedule import LearningRate, WeightDecay

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
    found = []
    for field in fields(old):
        was, here = getattr(old, field.name), getattr(new, field.name)
        if was != here and field.name in flags:
            counted = " samples" if field.name in _COUNTS else ""
            flag = flags[field.name].format(unit=unit)
            found.append(f"{flag}: {_number(was)}{counted} there, {_number(here)}{counted} here")
    return found


def _number(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, float) else str(value)
