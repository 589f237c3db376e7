"""Elastic runs over namespaces as hosts, whose agents the launcher starts: they lose their power, and parts of the
network are cut, one after the other. No step is lost twice, and what cannot go on ends with one line."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slow.test_lost_hosts import Run, alone, losses
from tests.support.namespace_hosts import NamespaceHosts, missing
from tests.support.selection import quick

pytestmark = [pytest.mark.slow, pytest.mark.testbed("hosts")]
BATCH = 16


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[NamespaceHosts]:
    if reason := missing():
        pytest.skip(reason)
    with NamespaceHosts(tmp_path, 3) as found:
        yield found


@pytest.mark.exhaustive  # CI has the cuts
def test_hosts_that_the_launcher_starts_lose_their_power(hosts: NamespaceHosts, tmp_path: Path) -> None:
    """The first epoch has all three."""
    run = Run(hosts, tmp_path, "--elastic", steps=40)
    run.until(10)
    assert "3 ranks, 1 pipeline" in run.said and "epoch" not in run.said
    hosts.power_off(2)
    run.until_said("2 ranks went on after step")
    run.wait()
    assert losses(run.directory) == pytest.approx(alone(tmp_path / "alone", 40), rel=1e-9)
    assert hosts.no_orphans() == []


@dataclass(frozen=True)
class Cut:
    """``ends``: the host whose processes end by themselves, saying one of ``lines`` alone; ``event``: what the others
    say when they go on; ``mend``: what happens then."""

    happens: Callable[[NamespaceHosts], None]
    ends: int
    lines: tuple[str, ...]
    event: str
    mend: Callable[[NamespaceHosts], None] = lambda hosts: None


OWN_END = "error: rank {} ends: the job goes on without it"
GONE = "host{}: the launcher is gone"
CUTS = {
    "between two hosts": Cut(
        lambda hosts: hosts.cut(1, 2), 2, (OWN_END.format(2),),
        r"rank 2 \(host2, chip 0\) and host1 cannot reach each other",
    ),
    "from the launcher": Cut(
        lambda hosts: hosts.cut_from_launcher(2), 2, (GONE.format(2),), r"lost rank 2 \(host2, chip 0\)"
    ),
    "of the first host": Cut(
        lambda hosts: hosts.unplug(0), 0, (GONE.format(0),), r"lost rank 0 \(host0, chip 0\)"
    ),
    "of the first host, and back": Cut(  # where the others take long to go on, its agent gives the launcher up before
        lambda hosts: hosts.unplug(0), 0, (OWN_END.format(0), GONE.format(0)), r"lost rank 0 \(host0, chip 0\)",
        lambda hosts: hosts.plug(0),
    ),
}  # fmt: skip
IN_TURN = ("between two hosts", "of the first host, and back")
SEQUENCES = [IN_TURN, *((name,) for name in CUTS)]


@pytest.mark.parametrize("names", quick(SEQUENCES, [], [IN_TURN]), ids=", ".join)
def test_parts_of_the_network_are_cut(names: tuple[str, ...], hosts: NamespaceHosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, "--elastic", "--grace", "3", steps=5000, batch=BATCH)
    run.until(5)
    for left, cut in zip((2, 1), map(CUTS.__getitem__, names), strict=False):
        cut.happens(hosts)
        run.until_said(f"{left} rank{'s' if left > 1 else ''} went on after step")
        cut.mend(hosts)
        end = time.monotonic() + 100
        while hosts.processes(cut.ends):
            assert time.monotonic() < end, (hosts.processes(cut.ends), run.said)
            time.sleep(0.1)
        run.until(len(losses(run.directory)) + 5)
        lines = [line for line in run.said.splitlines() if line.startswith(f"[host{cut.ends}]")]
        ends = [line for line in lines if "error: " in line or "is gone" in line and "elastic: " not in line]
        assert len(ends) == 1 and any(line in ends[0] for line in cut.lines), (ends, run.said)
        assert "terminate called" not in run.said
    run.stop()
    epochs = re.findall("elastic: epoch [0-9]+: (.*) went on after", run.said)
    assert len(epochs) == len(names), run.said
    assert all(re.match(CUTS[name].event, text) for name, text in zip(names, epochs, strict=True)), epochs
    check(run, tmp_path)
    assert hosts.no_orphans() == []


@pytest.mark.exhaustive
def test_a_cut_that_is_shorter_than_any_time_out_changes_nothing(hosts: NamespaceHosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, "--elastic", steps=5000, batch=BATCH)
    run.until(5)
    for index in range(3):
        hosts.unplug(index)
        time.sleep(1.0)
        hosts.plug(index)
        run.until(len(losses(run.directory)) + 5)
    run.stop()
    assert "epoch" not in run.said
    check(run, tmp_path)


def check(run: Run, folder: Path) -> None:
    """Each step is there once, with the loss of one process."""
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == list(range(1, len(steps) + 1)), run.said
    expected = alone(folder / "alone", len(steps), batch=BATCH)
    assert losses(run.directory) == pytest.approx(expected, rel=1e-9)
