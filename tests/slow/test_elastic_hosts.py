"""Elastic runs over namespaces as hosts, whose agents the launcher starts: they lose their power, and parts of the
network are cut, one after the other. No step is lost twice, and what cannot go on ends with one line."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.slow.test_lost_hosts import Run, alone, losses
from tests.support.namespace_hosts import NamespaceHosts, missing
from tests.support.selection import quick

pytestmark = [pytest.mark.slow, pytest.mark.testbed("hosts")]


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
    """``ends``: the host whose processes end by themselves, the last of them saying ``line``; ``event``: what the
    others say when they go on; ``mend``: what happens then."""

    happens: Callable[[NamespaceHosts], None]
    ends: int
    line: str
    event: str
    mend: Callable[[NamespaceHosts], None] = lambda hosts: None


OWN_END = r"error: rank {} ends: the job goes on without it"
CUTS = {
    "between two hosts": Cut(
        lambda hosts: hosts.cut(1, 2), 2, OWN_END.format(2),
        r"rank 2 \(host2, chip 0\) and host1 cannot reach each other; 2 ranks went on",
    ),
    "from the launcher": Cut(
        lambda hosts: hosts.cut_from_launcher(2), 2, "host2: the launcher is gone", "lost rank 2 .*; 2 ranks went on"
    ),
    "of the first host": Cut(
        lambda hosts: hosts.unplug(0), 0, "host0: the launcher is gone", "lost rank 0 .*; 2 ranks went on"
    ),
    "of the first host, and back": Cut(
        lambda hosts: hosts.unplug(0), 0, OWN_END.format(0), "lost rank 0 .*; 2 ranks went on",
        lambda hosts: hosts.plug(0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", quick(CUTS, [], ["between two hosts", "of the first host, and back"]))
def test_a_part_of_the_network_is_cut(name: str, hosts: NamespaceHosts, tmp_path: Path) -> None:
    cut, batch = CUTS[name], 16
    run = Run(hosts, tmp_path, "--elastic", "--grace", "3", steps=5000, batch=batch)
    run.until(5)
    cut.happens(hosts)
    run.until_said("2 ranks went on after step")
    cut.mend(hosts)
    end = time.monotonic() + 100
    while hosts.processes(cut.ends):
        assert time.monotonic() < end, (hosts.processes(cut.ends), run.said)
        time.sleep(0.1)
    run.until(len(losses(run.directory)) + 5)
    run.job.send_signal(signal.SIGTERM)
    run.wait()
    assert re.search(cut.event, run.said) and len(re.findall("elastic: epoch", run.said)) == 1, run.said
    ended = [line for line in run.said.splitlines() if line.startswith(f"[host{cut.ends}]") and (
        "error: " in line or "gone" in line)]  # fmt: skip
    assert re.search(cut.line, "".join(ended[:1])) and len(ended) == 1, (ended, run.said)
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "loss" in row]
    assert steps == list(range(1, len(steps) + 1)), run.said
    expected = alone(tmp_path / "alone", len(steps), batch=batch)
    assert losses(run.directory) == pytest.approx(expected, rel=1e-9)
    assert hosts.no_orphans() == []
