"""A slow rank in an elastic job is one more event: a plan for the same members with the rates that they have now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_megatron.cluster import load_cluster
from hetero_megatron.comm.epochs import Drifted, EpochStore
from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.launch.plan_search import Search
from hetero_megatron.launch.supervise import Planner, left_without
from hetero_megatron.planner.whatif.drift import slow_nodes_text, worst_by_node
from hetero_megatron.utils.text import plural


@dataclass(frozen=True)
class DriftPlanner:
    """
    Args:
        slow: writes (file, of a cluster file, in which nodes take so many times as long, of a dtype).
        better: (what runs, number of the drift) -> a planner, which gives the plan that runs where no other gains.
        most: how often to plan again.
    """

    slow: Callable[[Path, Path, Mapping[str, float], str], None]
    better: Callable[[Setup, int], Planner]
    most: int


@dataclass(frozen=True)
class Around:
    """A plan around slow nodes; ``cluster``: of those there, ``whole``: with all nodes; ``text``: what drifted."""

    plan: Path
    cluster: Path
    whole: Path
    text: str


@dataclass
class DriftWatch:
    """Looks whether ranks say that they drifted, and then for a better plan."""

    store: EpochStore
    planner: DriftPlanner
    scratch: Path
    search: Callable[[Planner, Sequence[Seat], Path | None], Search]
    log: Callable[[str], None]
    _times: int = 0
    _seen: Drifted | None = None
    _under_way: tuple[int, Around, Search] | None = None

    def look(self, number: int, present: Setup, whole: Path | None) -> Around | None:
        """Called often; a better plan for epoch ``number``, once it is there.

        Args:
            present: what runs; whole: the cluster file that also has the nodes which are not there.
        """
        if self._under_way is not None and self._under_way[0] != number:
            self.forget()
        if self._under_way is None and whole is not None and self._times < self.planner.most:
            drift = self.store.drifted(number)
            if drift is not None and drift != self._seen:
                self._seen = drift
                self._begin(number, drift, present, whole)
        if self._under_way is None or not self._under_way[2].done():
            return None
        _, around, search = self._under_way
        self._under_way = None
        if search.problem:
            self.log(f"the search for a plan {search.problem}")
        if search.plan is None or search.plan == present.plan:
            self.log(f"{around.text}; the plan stays: no other is predicted to gain")
            return None
        self._times += 1
        if self._times == self.planner.most:
            self.log(f"drift is not looked for any more: planned again {plural(self._times, 'time')}")
        return Around(search.plan, around.cluster, around.whole, around.text)

    def forget(self) -> None:
        """The search, if there is one; what was told may be told, and looked for, again."""
        if self._under_way is not None:
            self._under_way[2].abandon()
            self._under_way, self._seen = None, None

    def _begin(self, number: int, drift: Drifted, present: Setup, whole: Path) -> None:
        factors = worst_by_node(present.seats, {int(rank): ratio for rank, ratio in drift.ratios.items()})
        slow = self.scratch / f"cluster-drift-{number}.yaml"
        self.planner.slow(whole, slow, factors, drift.dtype)
        absent = {rank.node for rank in load_cluster(slow).ranks} - {seat.node for seat in present.seats}
        _, cluster = left_without(Setup(present.plan, present.seats, slow), absent, self.scratch, f"drifted-{number}")
        assert cluster is not None
        search = self.search(self.planner.better(present, number), present.seats, cluster)
        self._under_way = number, Around(present.plan, cluster, slow, slow_nodes_text(factors)), search
