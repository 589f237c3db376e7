"""Loss scaling for fp16: constant, or Megatron's dynamic scale with hysteresis. A value, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetero_megatron.errors import UserError

GROWTH, BACKOFF = 2.0, 0.5


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
    """

    scale: float = 1.0
    dynamic: bool = False
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    good_steps: int = 0
    patience: int = -1

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
        if not self.dynamic:
            return self
        if overflow:
            patience = max(0, self.patience - 1)
            scale = self.scale if patience else max(self.scale * BACKOFF, self.minimum)
            return replace(self, scale=scale, good_steps=0, patience=patience)
        if self.good_steps + 1 >= self.window:  # more: resumed with a smaller window
            return replace(self, scale=self.scale * GROWTH, good_steps=0, patience=self.hysteresis)
        return replace(self, good_steps=self.good_steps + 1)

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
