"""Loss scaling for fp16: constant, or Megatron's dynamic scale with hysteresis. A value, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetero_megatron.errors import UserError

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
        _check(field, self.scale, self.scale > 0, "more than 0")
        if self.dynamic:
            good = 0 < self.minimum <= self.scale
            _check("--min-loss-scale", self.minimum, good, f"more than 0 and at most {self.scale:g}")
            _check("--loss-scale-window", self.window, self.window >= 1, "1 or more")
            _check("--hysteresis", self.hysteresis, self.hysteresis >= 1, "1 or more")
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
        most = self.hysteresis if self.dynamic else MOST_SKIPPED
        if not self.stuck or (self.stuck < most and not finished):
            return
        held = "at its minimum" if self.dynamic else "constant"
        field, value = ("--min-loss-scale", self.minimum) if self.dynamic else ("--loss-scale", self.scale)
        steps = f"the last {self.stuck} steps were" if self.stuck > 1 else "the last step was"
        raise UserError(
            f"{steps} skipped because gradients overflow with the loss scale, which is {held}: step {step} and those "
            "after it would train nothing", field=field, value=value,
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


def _check(field: str, value: float, good: bool, accepted: str) -> None:
    if not good:
        raise UserError("out of range", field=field, value=value, accepted=accepted)
