"""What changes from step to step: the learning rate, the weight decay, the ramp of the batch size, and the loss scale
of fp16."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hetero_megatron.errors import UserError

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")

# Share of the way from minimum to maximum that is left after a fraction r of the decay.
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: 0.5 * (math.cos(math.pi * r) + 1.0),
    "exponential": lambda r: 2.0 * math.pow(0.5, r) - 1.0,
    "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
}


@dataclass(frozen=True)
class LearningRate:
    """The learning rate at a number of samples.

    Args:
        peak, minimum, initial: the rate after warm-up, at the end, and before the first step of a warm-up.
        style: one of ``DECAY_STYLES``.
        warmup, decay: samples of linear warm-up, and samples (warm-up included) until the minimum is reached.
        wsd_style, wsd_decay: shape and samples of the last part of ``WSD`` (warm-up, stable, decay).
    """

    peak: float
    minimum: float = 0.0
    initial: float = 0.0
    style: str = "linear"
    warmup: float = 0.0
    decay: float = 0.0
    wsd_style: str = "exponential"
    wsd_decay: float = 0.0

    def __post_init__(self) -> None:
        _choice("--lr-decay-style", self.style, DECAY_STYLES)
        _choice("--lr-wsd-decay-style", self.wsd_style, WSD_DECAY_STYLES)
        _range("--lr", self.peak, self.peak >= 0, "0 or more")
        _range("--min-lr", self.minimum, 0 <= self.minimum <= self.peak, f"0 to --lr = {self.peak}")
        accepted = f"0 to --lr = {self.peak}"
        _range("--lr-warmup-init", self.initial, 0 <= self.initial <= self.peak, accepted)
        if self.style == "constant":
            return
        _range("--lr-decay-iters or --lr-decay-samples", self.decay, self.decay > 0, "more than 0 samples")
        accepted = f"less than the {self.decay:g} samples of the decay"
        _range("warm-up", self.warmup, self.warmup < self.decay, accepted)
        if self.style == "WSD":
            accepted = f"more than 0 and at most the {self.decay:g} samples of the decay"
            _range("--lr-wsd-decay-iters", self.wsd_decay, 0 < self.wsd_decay <= self.decay, accepted)

    def curve(self) -> LearningRate:
        """The same rates, without what they do not depend on: equal curves are equal."""
        unused: dict[str, Any] = {} if self.warmup else {"initial": 0.0}
        if self.style != "WSD":
            unused |= {"wsd_style": "exponential", "wsd_decay": 0.0}
        if self.style == "constant":
            unused |= {"minimum": 0.0, "decay": 0.0}
        return replace(self, **unused)

    def at(self, samples: int) -> float:
        """The rate of the step that begins after ``samples`` samples (0 for the first step, so that a
        warm-up from 0 makes the first step a step of length 0, as in Megatron)."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.initial + (self.peak - self.initial) * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples > self.decay:
            return self.minimum
        if self.style == "inverse-square-root":
            rate = self.peak * max(self.warmup, 1.0) ** 0.5 / max(samples, 1) ** 0.5
            return max(self.minimum, rate)
        return self.minimum + self._coefficient(samples) * (self.peak - self.minimum)

    def _coefficient(self, samples: int) -> float:
        if self.style != "WSD":
            return _SHAPES[self.style]((samples - self.warmup) / (self.decay - self.warmup))
        start = self.decay - self.wsd_decay
        return 1.0 if samples <= start else _SHAPES[self.wsd_style]((samples - start) / self.wsd_decay)


@dataclass(frozen=True)
class WeightDecay:
    """Weight decay at a number of samples: from ``start`` to ``end`` over ``samples``; constant when they
    are equal.
    """

    start: float
    end: float
    style: str = "constant"
    samples: float = 0.0

    def __post_init__(self) -> None:
        _choice("--weight-decay-incr-style", self.style, WEIGHT_DECAY_STYLES)
        flag = "--weight-decay" if self.style == "constant" else "--start-weight-decay"
        _range(flag, self.start, self.start >= 0, "0 or more")
        _range(
            "--end-weight-decay",
            self.end,
            self.end >= self.start,
            f"{self.start} or more (--start-weight-decay)",
        )
        if self.style == "constant" and self.start != self.end:
            raise UserError(
                "a constant weight decay cannot grow",
                field="--weight-decay-incr-style",
                value=self.style,
                accepted="linear or cosine, or equal --start-weight-decay and --end-weight-decay",
            )
        if self.style != "constant":
            _range("length of training", self.samples, self.samples > 0, "more than 0 samples")

    def curve(self) -> WeightDecay:
        """The same weight decay, without what it does not depend on: equal curves are equal."""
        return replace(self, style="constant", samples=0.0) if self.start == self.end else self

    def at(self, samples: int) -> float:
        """Weight decay of the step that begins after ``samples`` samples."""
        if self.style == "constant" or samples > self.samples:
            return self.end
        ratio = samples / self.samples
        grown = ratio if self.style == "linear" else 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
        return self.start + grown * (self.end - self.start)


def _choice(field: str, value: str, styles: tuple[str, ...]) -> None:
    if value not in styles:
        raise UserError("unknown style", field=field, value=value, accepted=", ".join(styles))


def _range(field: str, value: float, good: bool, accepted: str) -> None:
    if not good:
        raise UserError("out of range", field=field, value=value, accepted=accepted)


FLAG = "--rampup-batch-size"


@dataclass(frozen=True)
class BatchSize:
    """Global batch size in sequences.

    With a ramp-up it starts at ``start`` and grows by ``increment`` in equal parts of the first
    ``ramp_samples`` samples until it is ``final`` (start 0: no ramp-up).
    """

    final: int
    start: int = 0
    increment: int = 0
    ramp_samples: int = 0

    def __post_init__(self) -> None:
        _check("--global-batch-size", self.final, self.final >= 1, "1 or more")
        if self.start == 0 and self.increment == 0 and self.ramp_samples == 0:
            return
        _check(FLAG, self.start, 1 <= self.start < self.final, f"a start of 1 to {self.final - 1}")
        _check(FLAG, self.increment, self.increment >= 1, "an increment of 1 or more")
        _check(FLAG, self.ramp_samples, self.ramp_samples >= 1, "1 or more samples")
        growth = self.final - self.start
        accepted = f"a divisor of {growth} (global batch size {self.final} - start {self.start})"
        _check(FLAG, self.increment, growth % self.increment == 0, accepted)

    def at(self, consumed: int) -> int:
        """Sequences of the step that begins after ``consumed`` samples."""
        if self.start == 0 or consumed > self.ramp_samples:
            return self.final
        increments = (self.final - self.start) // self.increment
        return self.start + consumed * increments // self.ramp_samples * self.increment

    def steps_for(self, samples: int, consumed: int = 0) -> tuple[int, int]:
        """(whole steps that fit between ``consumed`` and ``samples`` samples, samples consumed then). As in Megatron,
        nothing is trained on what is left over."""
        steps = 0
        while self.start and consumed <= self.ramp_samples and consumed + self.at(consumed) <= samples:
            size = self.at(consumed)
            # At once: all steps of this size, up to the first that begins where the size is another one.
            same_size_steps = min(self._last_of_size(consumed) - consumed, samples - consumed - size) // size + 1
            consumed += same_size_steps * size
            steps += same_size_steps
        if self.start and consumed <= self.ramp_samples:
            return steps, consumed
        final_steps = max(0, samples - consumed) // self.final
        return steps + final_steps, consumed + final_steps * self.final

    def samples_after(self, steps: int, consumed: int = 0) -> int:
        """Samples that are consumed so many steps after ``consumed`` samples; of none, from the beginning."""
        while self.start and steps and consumed <= self.ramp_samples:
            size = self.at(consumed)
            same_size_steps = min(steps, (self._last_of_size(consumed) - consumed) // size + 1)
            consumed += same_size_steps * size
            steps -= same_size_steps
        return consumed + steps * self.final

    def _last_of_size(self, consumed: int) -> int:
        """The most consumed samples at which the size is still that at ``consumed``, which is within the ramp."""
        increments = (self.final - self.start) // self.increment
        level = consumed * increments // self.ramp_samples
        return min(self.ramp_samples, ((level + 1) * self.ramp_samples - 1) // increments)

    def sizes(self) -> tuple[int, ...]:
        """Every size that occurs, ascending."""
        return tuple(range(self.start, self.final, self.increment)) + (self.final,) if self.start else (self.final,)


def _check(field: str, value: int, good: bool, accepted: str) -> None:
    if not good:
        raise UserError("out of range", field=field, value=value, accepted=accepted)


GROWTH, BACKOFF = 2.0, 0.5
MOST_SKIPPED = 20  # steps in a row that may overflow at a constant scale


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step and what it takes to find the one after it.

    Args:
        scale: factor on the loss.
        dynamic: whether the scale changes.
        minimum: it never falls below this.
        window: steps in a row without overflow after which it doubles.
        hysteresis: overflows that it survives before it halves.
        good_steps, patience: the state: steps since the last overflow or doubling, overflows left (-1: all).
        stuck: overflows in a row at a scale that cannot fall, in this run.
    """

    scale: float = 1.0
    dynamic: bool = False
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    good_steps: int = 0
    patience: int = -1
    stuck: int = 0

    def __post_init__(self) -> None:
        field = "--initial-loss-scale" if self.dynamic else "--loss-scale"
        _check_scale(field, self.scale, self.scale > 0, "more than 0")
        if self.dynamic:
            is_in_range = 0 < self.minimum <= self.scale
            _check_scale("--min-loss-scale", self.minimum, is_in_range, f"more than 0 and at most {self.scale:g}")
            _check_scale("--loss-scale-window", self.window, self.window >= 1, "1 or more")
            _check_scale("--hysteresis", self.hysteresis, self.hysteresis >= 1, "1 or more")
        if self.patience == -1:
            object.__setattr__(self, "patience", self.hysteresis)

    def update(self, overflow: bool) -> LossScale:
        """The scale after a step whose gradient was not finite (``overflow``) or was."""
        stuck = self.stuck + 1 if overflow and self.lowest else 0
        if not self.dynamic:
            return replace(self, stuck=stuck)
        if overflow:
            patience = max(0, self.patience - 1)
            scale = self.scale if patience else max(self.scale * BACKOFF, self.minimum)
            return replace(self, scale=scale, good_steps=0, patience=patience, stuck=stuck)
        if self.good_steps + 1 >= self.window:  # more: resumed with a smaller window
            return replace(self, scale=self.scale * GROWTH, good_steps=0, patience=self.hysteresis, stuck=0)
        return replace(self, good_steps=self.good_steps + 1, stuck=0)

    @property
    def lowest(self) -> bool:
        """Whether an overflow cannot make it fall."""
        return not self.dynamic or self.scale <= self.minimum

    def check(self, step: int, finished: bool = False) -> None:
        """Called after ``step``; ``finished``: the run ends with it, and took no step at all.

        Raises:
            UserError: a scale that cannot fall has overflowed too often in a row: more steps would be skipped for ever.
        """
        most_skipped = self.hysteresis if self.dynamic else MOST_SKIPPED
        if not self.stuck or (self.stuck < most_skipped and not finished):
            return
        scale_limit = "at its minimum" if self.dynamic else "constant"
        field, value = ("--min-loss-scale", self.minimum) if self.dynamic else ("--loss-scale", self.scale)
        steps = f"the last {self.stuck} steps were" if self.stuck > 1 else "the last step was"
        raise UserError(
            f"{steps} skipped because gradients overflow with the loss scale, which is {scale_limit}: step {step} "
            "and those after it would train nothing", field=field, value=value,
            accepted="a smaller one, a smaller --lr, other data, or --bf16; from an earlier checkpoint if there is one",
        )  # fmt: skip

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "patience": self.patience}

    def with_state(self, state: Mapping[str, float]) -> LossScale:
        """The same settings in a state that ``state_dict`` returned. A constant scale keeps the value it
        was given.
        """
        if not self.dynamic:
            return self
        return replace(
            self,
            scale=float(state["scale"]),
            good_steps=int(state["good_steps"]),
            patience=int(state["patience"]),
        )


def _check_scale(field: str, value: float, good: bool, accepted: str) -> None:
    if not good:
        raise UserError("out of range", field=field, value=value, accepted=accepted)
