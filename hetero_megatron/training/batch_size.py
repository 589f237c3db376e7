"""How many sequences a step takes: constant, or Megatron's ramp-up. A function of consumed samples only."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_megatron.errors import UserError

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
            same = min(self._last_of_size(consumed) - consumed, samples - consumed - size) // size + 1
            consumed += same * size
            steps += same
        if self.start and consumed <= self.ramp_samples:
            return steps, consumed
        more = max(0, samples - consumed) // self.final
        return steps + more, consumed + more * self.final

    def samples_after(self, steps: int) -> int:
        """Samples that so many steps consume from the beginning."""
        consumed = 0
        while self.start and steps and consumed <= self.ramp_samples:
            size = self.at(consumed)
            same = min(steps, (self._last_of_size(consumed) - consumed) // size + 1)
            consumed += same * size
            steps -= same
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
