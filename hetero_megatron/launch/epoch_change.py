"""Between two epochs of an elastic job: who would go on under which plan, and since when the launcher prepares it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class NextEpoch:
    """Who would go on under which plan; ``plan``: None: there is none for them; ``whole``: the cluster file that also
    has the nodes which are not there."""

    members: list[int]
    plan: Path | None
    cluster: Path | None
    whole: Path | None


@dataclass
class Change:
    """An epoch is over, and the next one is being prepared.

    Attributes:
        notice: seconds until all members that are left had stopped.
        begin: when they had, by the monotonic clock.
        spare: those that are ready to join, and for whom there is no plan.
        failed: some member was lost, or saw a failure.
    """

    notice: float
    begin: float
    spare: set[int] = field(default_factory=set)
    failed: bool = False
