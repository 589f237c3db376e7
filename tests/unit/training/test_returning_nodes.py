"""A launcher whose lost nodes come back: they are taken back where a plan uses them, and only there. No processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.launch.supervise import Supervisor

CLUSTER = "nodes: [{name: a, count: 3, chip: H20}]\n"


@dataclass
class Job:
    """One rank per node; ``story``: by round, node lost, or "returns", or "done"."""

    setup: Setup
    word: str
    signals: list[int] = field(default_factory=list)
    polls: int = 0

    @property
    def ranks(self) -> list[int]:
        return list(range(len(self.setup.seats)))

    def poll(self) -> dict[int, int]:
        self.polls += 1
        if self.signals or self.word == "done" or (self.word == "returns" and self.polls > 5):
            return dict.fromkeys(self.ranks, 0)
        nodes = [seat.node for seat in self.setup.seats]
        return {r: -9 if n == self.word else 3 for r, n in enumerate(nodes)} if self.word in nodes else {}

    def hung(self) -> set[int]:
        return set()

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        pass


class Watch:
    def __init__(self) -> None:
        self.back: set[str] = set()
        self.closed = False

    def look(self, first: Path, lost: set[str], present: set[str]) -> set[str]:
        return lost & self.back

    def close(self) -> None:
        self.closed = True


def run(tmp_path: Path, story: Sequence[str], smallest: int = 1) -> tuple[list[Job], Watch, list[str], int]:
    """Jobs of each round; plans: of as many ranks as there are, but no plan between 3 and ``smallest``."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    jobs: list[Job] = []
    watch, said = Watch(), list[str]()

    def launch(setup: Setup, words: Sequence[str], number: int) -> Job:
        word = story[min(number, len(story) - 1)]
        watch.back = {"a-1", "a-2"} if word == "returns" else set()
        jobs.append(Job(setup, word))
        return jobs[-1]

    def choose(seats: Sequence[Seat], cluster: Path | None) -> Path:
        return Path(f"plan-{min(len(seats), smallest)}.yaml" if len(seats) < 3 else "plan-3.yaml")

    seats = tuple(Seat(f"a-{i}", 0) for i in range(3))
    setup = Setup(Path("plan-3.yaml"), seats, tmp_path / "cluster.yaml")
    supervisor = Supervisor(setup, [], "replan", choose, 9, 5, tmp_path, said.append, launch=launch, watch=watch)
    return jobs, watch, said, supervisor.run()


def test_a_node_that_returns_is_used_again(tmp_path: Path) -> None:
    jobs, watch, said, code = run(tmp_path, ["a-2", "returns", "done"])
    assert code == 0 and watch.closed
    assert [job.setup.plan.name for job in jobs] == ["plan-3.yaml", "plan-1.yaml", "plan-3.yaml"]
    assert jobs[1].signals == [signal.SIGTERM], "the ranks save first"
    assert [len(job.ranks) for job in jobs] == [3, 2, 3] and jobs[2].setup == jobs[0].setup
    assert any("with a-2, 3 ranks" in line for line in said)


def test_of_two_lost_nodes_what_returns_is_used(tmp_path: Path) -> None:
    jobs, _, _, code = run(tmp_path, ["a-2", "a-1", "returns", "done"])
    assert code == 0 and [len(job.ranks) for job in jobs] == [3, 2, 1, 3]


def test_a_node_that_no_other_plan_uses_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "look", lambda self, first, lost, present: lost & self.back & {"a-1"})
    jobs, _, said, code = run(tmp_path, ["a-2", "a-1", "returns", "done"])
    assert code == 0 and [len(job.ranks) for job in jobs] == [3, 2, 1]
    assert jobs[-1].signals == [] and sum("no other plan uses it" in line for line in said) == 1
