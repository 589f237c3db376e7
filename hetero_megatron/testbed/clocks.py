"""Quality of emulated clocks, used by the launcher, training and calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from hetero_megatron.testbed.state import CLOCK, CLOCKS

OVERRUN_LIMIT = 0.01  # share of emulated seconds by which real CPU time may exceed them before a run is invalid


@dataclass(frozen=True)
class Kept:
    """Deviation of emulated clocks: the largest of all ranks, as shares of their emulated seconds.

    Args:
        overrun: CPU time beyond the emulated chip's; worst_rank: the lowest rank with that overrun.
        late: delay that was not made up; possibly of another rank.
        spread: see :func:`spread`; None if unknown, or 0 by construction (chips: clock).
    """

    overrun: float
    late: float
    worst_rank: int
    spread: float | None = None

    @property
    def invalid(self) -> bool:
        """Whether the overrun makes measurements worthless."""
        return self.overrun > OVERRUN_LIMIT

    def facts(self) -> dict[str, Any]:
        """As JSON data."""
        known_facts = {name: value for name, value in asdict(self).items() if value is not None}
        return {**known_facts, "invalid": self.invalid}

    def complaint(self) -> str:
        """Why it is invalid and what to do; empty if valid."""
        if not self.invalid:
            return ""
        overrun_text = f"rank {self.worst_rank} took {self.overrun:.1%} more CPU time than its emulated chip"
        return f"INVALID: {overrun_text}: lower its emulate.speed"

    def __str__(self) -> str:
        text = f"testbed: ranks were behind their emulated clock by up to {self.late:.2%} of their compute"
        varied = "" if self.spread is None else f"compute of a step varied by {self.spread:.1%} (standard deviation)"
        return "; ".join(filter(None, [text, varied, self.complaint()]))


def spread(steps: Sequence[Sequence[float]]) -> float | None:
    """The largest standard deviation of a rank's compute seconds per step, relative to their mean.

    Args:
        steps: seconds by rank, per step; the first step (allocations) is ignored.

    Returns:
        None for fewer than two further steps.
    """
    ranks = [seconds for seconds in zip(*steps[1:], strict=True) if any(seconds)]
    if len(steps) < 3 or not ranks:
        return None
    return max(pstdev(seconds) / fmean(seconds) for seconds in ranks)


def worst_clock(reports: Mapping[int, Mapping[str, float]]) -> Kept | None:
    """Summary of all ranks' ``Clock.report``; None if no chip is emulated."""
    clocks = {rank: reports[rank] for rank in sorted(reports) if reports[rank]}
    if not clocks:
        return None
    worst = max(clocks, key=lambda rank: clocks[rank]["overrun"])
    return Kept(clocks[worst]["overrun"], max(clock["late"] for clock in clocks.values()), worst)


def read_clocks(directory: Path) -> Kept | None:
    """Summary of the clocks that a testbed's ranks have written so far; None if none has."""
    try:
        data = (directory / CLOCKS).read_bytes()
    except OSError:
        return None
    rows = CLOCK.iter_unpack(data[: len(data) // CLOCK.size * CLOCK.size])
    return worst_clock({
        rank: {"overrun": over / max(seconds, 1e-9), "late": late / max(seconds, 1e-9)}
        for rank, (seconds, over, late) in enumerate(rows)
    })  # fmt: skip
