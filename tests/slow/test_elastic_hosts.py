"""Elastic runs over namespaces as hosts: they begin with all of them, lose some, and are cut off from each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slow.test_lost_hosts import Run, alone, losses
from tests.support.namespace_hosts import NamespaceHosts, missing

pytestmark = [pytest.mark.slow, pytest.mark.testbed("hosts")]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[NamespaceHosts]:
    if reason := missing():
        pytest.skip(reason)
    with NamespaceHosts(tmp_path, 3) as found:
        yield found


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
