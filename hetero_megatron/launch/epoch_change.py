"""Between two epochs of an elastic job: who would go on under which plan, and since when the launcher prepares it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetero_megatron.comm.epochs import EpochStore
from hetero_megatron.launch.jobs import Seat
from hetero_megatron.monitoring.stragglers import Diagnosis, cut_pairs, to_drop


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


def cut_off(
    store: EpochStore, number: int, seats: Sequence[Seat], present: Iterable[int], members: Sequence[int]
) -> dict[int, str]:
    """Members of epoch ``number`` that are to go, because links between nodes carry nothing: as few as will do, with
    their whole nodes; and a node that each does not reach.

    A node of which nothing is heard any more is lost, and no partner of it goes in its place.

    Args:
        seats: of its ranks.
        present: its ranks that are left.
        members: of its ranks.
    """
    nodes, left = [seat.node for seat in seats], list(present)
    lost = set(nodes) - {nodes[rank] for rank in left}
    seen = [Diagnosis(rank, (), 0.0, "", tuple(store.unreachable(number, members[rank]))) for rank in left]
    pairs = cut_pairs(seen, nodes, lost)
    dropped = to_drop(pairs, nodes)
    between = {node: sorted({*pair} - {node})[0] for pair in pairs for node in pair & dropped}
    return {members[rank]: between[nodes[rank]] for rank in left if nodes[rank] in dropped}
