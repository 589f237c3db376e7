"""``hetero-megatron launch`` over hosts that are network namespaces, by sshd and by a stand-in for ssh."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.namespace_hosts import NamespaceHosts, missing

pytestmark = [pytest.mark.testbed("hosts")]
PROGRAM = "import os; print({k: os.environ[k] for k in ('RANK', 'HETERO_NODE', 'WORLD_SIZE')}, flush=True)"


@pytest.fixture(params=["stand-in", pytest.param("sshd", marks=pytest.mark.slow)])
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NamespaceHosts]:
    if reason := missing(request.param == "sshd"):
        pytest.skip(reason)
    with NamespaceHosts(tmp_path, 2, request.param == "sshd") as found:
        yield found


def launch(hosts: NamespaceHosts, cluster: Path, *more: str) -> list[str]:
    program = [sys.executable, "-m", "hetero_megatron.cli.main", "launch"]
    return [*program, "--cluster", str(cluster), "--ssh-command", hosts.ssh, "--grace", "5", *more]


def test_every_chip_is_a_rank_and_its_lines_say_which(hosts: NamespaceHosts, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    cluster = hosts.cluster([2, 1])
    job = hosts.start(launch(hosts, cluster, "--log-dir", str(tmp_path / "logs"), "--", str(script)))
    out, err = job.communicate(timeout=120)
    assert job.returncode == 0, out + err
    said = [line for line in out.splitlines() if "HETERO_NODE" in line]
    for rank, node in enumerate(("host0", "host0", "host1")):
        mine = [line for line in said if f"[{node}] [rank {rank}]" in line]
        assert len(mine) == 1 and f"'HETERO_NODE': '{node}'" in mine[0] and "'WORLD_SIZE': '3'" in mine[0], said
    assert "'RANK': '2'" in (tmp_path / "logs" / "host1.log").read_text()
    assert hosts.no_orphans() == []


def test_a_failure_on_one_host_ends_all(hosts: NamespaceHosts, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)\n")
    job = hosts.start(launch(hosts, hosts.cluster([1, 1]), "--", str(script)))
    _, err = job.communicate(timeout=120)
    assert job.returncode == 1, err  # torchrun's
    assert "host1 ended with exit code 1" in err
    assert hosts.no_orphans() == []


def test_signals_reach_all_ranks(hosts: NamespaceHosts, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "def stop(*_):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'saved-' + os.environ['RANK']).touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\nprint('ready', flush=True)\ntime.sleep(600)\n"
    )
    job = hosts.start(launch(hosts, hosts.cluster([1, 1]), "--log-dir", str(tmp_path), "--", str(script)))
    logs, end = [tmp_path / f"host{i}.log" for i in (0, 1)], time.monotonic() + 90
    while not all(log.exists() and "ready" in log.read_text() for log in logs):
        assert job.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    job.send_signal(signal.SIGTERM)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-0", "saved-1"}
    assert hosts.no_orphans() == []


def test_a_launcher_that_is_killed_leaves_nothing(hosts: NamespaceHosts, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import time; print('ready', flush=True); time.sleep(600)")
    job = hosts.start(launch(hosts, hosts.cluster([1, 1]), "--", str(script)))
    assert job.stdout is not None
    while "ready" not in (line := job.stdout.readline()):
        assert line
    job.kill()
    job.wait()
    assert hosts.no_orphans() == []


def test_a_host_that_does_not_answer_is_named_before_anything_starts(hosts: NamespaceHosts, tmp_path: Path) -> None:
    hosts.power_off(1)
    job = hosts.start(launch(hosts, hosts.cluster([1, 1]), "--connect-timeout", "10", "--", "x.py"))
    out, err = job.communicate(timeout=60)
    assert job.returncode == 2 and out == ""
    assert err.startswith("error: ") and "host1" in err and len(err.splitlines()) == 1
    assert hosts.no_orphans() == []


