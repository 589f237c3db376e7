"""What a prediction says of a second model that only runs forward, and of answers that are sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hetero_megatron.plans.roles import GENERATOR


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


@dataclass(frozen=True)
class RolloutPrediction:
    """Of answers that are sampled for a step.

    Attributes:
        ranks: that sample.
        seconds: of the answers of a step; token: of one token of all rows of the slowest pipeline.
        step_seconds: of the step without them.
        apart: a generator has ranks of its own.
        sent: seconds in which it gets the weights, of each rollout on average.
        ahead: it samples during the steps before.
        iterations: steps on the same answers.
    """

    ranks: tuple[int, ...]
    seconds: float
    step_seconds: float
    apart: bool
    sent: float
    ahead: bool
    iterations: int
    token: float

    @property
    def name(self) -> str:
        """As reports call it."""
        return GENERATOR if self.apart else "rollout"

    @property
    def waits(self) -> float:
        """Seconds of each rollout for which a generator that is ahead waits; less than 0: the policy does."""
        return self.step_seconds * self.iterations - self.seconds if self.ahead else 0.0

    def __str__(self) -> str:
        steps = "a step" if self.iterations == 1 else f"{self.iterations} steps"
        rollout = f"{self.seconds:.3g} s for the answers of {steps}, {self.token:.3g} s a token, if none ends early"
        if not self.apart:
            return f"the ranks that train take {rollout}, before a step of {self.step_seconds:.3g} s"
        weights = f"{self.sent:.3g} s for the weights"
        if not self.ahead:
            return f"the generator takes {rollout}, and {weights}, before a step of {self.step_seconds:.3g} s"
        slow, quick = (GENERATOR, "policy") if self.waits < 0 else ("policy", GENERATOR)
        return (
            f"the generator takes {rollout}, and at the same time the policy {self.step_seconds:.3g} s for a step, so "
            f"the {quick} waits for the {slow} {abs(self.waits):.3g} s of each; {weights} come between"
        )

    def as_json(self) -> Mapping[str, Any]:
        """Seconds."""
        return {
            "name": self.name, "ranks": list(self.ranks), "own_ranks": self.apart, "rollout_seconds": self.seconds,
            "token_seconds": self.token, "step_seconds_alone": self.step_seconds, "weights_seconds": self.sent,
            "ahead": self.ahead, "iterations": self.iterations, "waits_seconds": max(0.0, self.waits),
            "waited_for_seconds": max(0.0, -self.waits),
        }  # fmt: skip
