"""What a prediction says of a second model that only runs forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RolePrediction:
    """Beside a step.

    Attributes:
        name: of the role; ranks: on which it is.
        seconds: of its forward over a batch; step_seconds: of the step without it.
        apart: its ranks have no other role, and it works on the next batch during the step; False: its forward comes
            before the step.
        sent: seconds from a step's beginning until what the role said of its batch has arrived from ranks of its own.
    """

    name: str
    ranks: tuple[int, ...]
    seconds: float
    step_seconds: float
    apart: bool
    sent: float = 0.0

    @property
    def waits(self) -> float:
        """Seconds of each step for which the role waits; less than 0: the model that is trained does."""
        return self.step_seconds + self.sent - self.seconds if self.apart else 0.0

    def __str__(self) -> str:
        trained = "student" if self.name == "teacher" else "policy"
        if not self.apart:
            return (
                f"the {self.name} takes {self.seconds:.3g} s for a batch on the ranks of the {trained}, before each of "
                f"its steps of {self.step_seconds:.3g} s"
            )
        ahead, waits = (self.name, trained) if self.waits < 0 else (trained, self.name)
        return (
            f"the {self.name} takes {self.seconds:.3g} s for a batch, and at the same time the {trained} "
            f"{self.sent:.3g} s to receive what was said of its batch and {self.step_seconds:.3g} s for a step, so "
            f"the {waits} waits for the {ahead} {abs(self.waits):.3g} s of each step"
        )

    def as_json(self) -> Mapping[str, Any]:
        """Seconds."""
        return {
            "name": self.name, "ranks": list(self.ranks), "own_ranks": self.apart, "forward_seconds": self.seconds,
            "step_seconds_alone": self.step_seconds, "transfer_seconds": self.sent,
            "waits_seconds": max(0.0, self.waits), "waited_for_seconds": max(0.0, -self.waits),
        }  # fmt: skip
