"""The testbed's launcher: links as fast as asked, faults, and nothing left behind after any way of ending."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.testbed import cgroups, machine, namespaces, process, state
from tests.support.paths import ROOT
from tests.support.selection import quick

JOB = [sys.executable, str(ROOT / "tests" / "support" / "testbed_job.py")]
MACHINE = machine.examine()
pytestmark = pytest.mark.testbed
ATTEMPTS = 3  # at what must not be disturbed by others
needs_namespaces = pytest.mark.skipif(bool(MACHINE.no_namespaces()), reason=f"testbed: {MACHINE.no_namespaces()}")
needs_memory = pytest.mark.skipif(bool(MACHINE.no_memory_limit()), reason=f"testbed: {MACHINE.no_memory_limit()}")

CLUSTER = """
version: 1
nodes:
  - {name: fast, count: 2, chip: big}
  - {name: slow, count: 2, chip: small}
chips:
  big:   {memory: 2 GiB, emulate: {speed: 0.5}}
  small: {memory: 1 GiB, emulate: {speed: 0.2, memory: 512 MiB}}
links:
  inter_node: {bandwidth: 40 MB/s, latency: 100 us}
  pairs:
    - {between: [fast, slow], bandwidth: 1 GB/s, emulate: {bandwidth: 20 MB/s}}
"""


def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Wait for something that other processes do."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)
    return value


def hetero(*words: str) -> list[str]:
    return [sys.executable, "-m", "hetero_megatron.cli.main", "testbed", *words]


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(hetero(*words), cwd=ROOT, capture_output=True, text=True, timeout=120)


def netns_of(path: str) -> str:
    try:
        link = os.readlink(path)
    except OSError:
        return ""
    return link if link.startswith("net:") else ""


def namespaces_in_use() -> set[str]:
    """Every network namespace that a process is in or holds open, but for those of tests in other workers, which may
    have the number of one that is gone."""
    parents = {entry.pid: entry.parent for entry in process.all_status()}
    main = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else None
    others = {pid for pid, parent in parents.items() if parent == main and pid != os.getpid()}
    found = set()
    for pid in parents:
        if others.isdisjoint(_ancestry(pid, parents)):
            found.add(netns_of(f"/proc/{pid}/ns/net"))
            try:
                found |= {netns_of(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            except OSError:
                continue
    return found - {""}


def _ancestry(pid: int, parents: dict[int, int]) -> list[int]:
    """A process, its parent, and so on."""
    found = []
    while pid in parents:
        found.append(pid)
        pid = parents[pid]
    return found


def host_links() -> str:
    """The links and namespaces with names that the host has."""
    run = {"capture_output": True, "text": True, "check": True}
    links = subprocess.run(["ip", "-o", "link"], **run).stdout  # type: ignore[call-overload]
    return str(links + subprocess.run(["ip", "netns", "list"], **run).stdout)  # type: ignore[call-overload]


@dataclass
class Running:
    """A testbed started by a test, with what is known of it."""

    launcher: subprocess.Popen[str]
    testbed: state.Testbed
    namespaces: set[str] = field(default_factory=set)
    groups: list[Path] = field(default_factory=list)

    def note(self) -> Running:
        """Write down what it has made, to be looked for when it has ended."""
        pid = self.launcher.pid
        home = netns_of("/proc/self/ns/net")
        self.namespaces = {netns_of(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")} - {"", home}
        self.groups = cgroups.find_groups(self.testbed.id)
        return self

    def left(self) -> dict[str, Any]:
        """What is still there."""
        found = {
            "processes": [p for p, where in process.marked().items() if where == str(self.testbed.directory)],
            "namespaces": sorted(self.namespaces & namespaces_in_use()),
            "cgroups": [str(path) for path in cgroups.find_groups(self.testbed.id)],
            "directory": self.testbed.directory.exists() and str(self.testbed.directory),
        }
        return {kind: value for kind, value in found.items() if value}

    def assert_clean(self) -> None:
        until(lambda: not self.left(), f"clean-up, left: {self.left()}", 30)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """start(job words, flags=…, cluster=…): a testbed that is up; killed and cleaned at the end of the test."""
    running: list[Running] = []

    def begin(*job: str, flags: tuple[str, ...] = (), cluster: str = CLUSTER, up: int = 4) -> Running:
        folder = tmp_path / str(len(running))
        folder.mkdir()
        (folder / "cluster.yaml").write_text(cluster)
        command = hetero("run", "--cluster", str(folder / "cluster.yaml"), *flags, "--", *JOB, *job)
        pipe = subprocess.PIPE
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        found = process.status(launcher.pid)
        assert found is not None
        one = Running(launcher, state.Testbed(state.home() / f"p{launcher.pid}s{found.start}"))
        running.append(one)

        def is_up() -> bool:
            if launcher.poll() is not None:
                raise AssertionError(launcher.communicate())
            ranks = one.testbed.record().get("ranks", [])
            return len(list(tmp_path.glob("up-*"))) >= up and all(rank["pid"] for rank in ranks)

        if up:
            until(is_up, "the ranks")
        return one.note() if up else one

    yield begin
    for one in running:
        if one.launcher.poll() is None:
            one.launcher.kill()
        one.launcher.communicate()
        one.assert_clean()


ENDS = ["exit", "crash", "interrupt", "terminate", "kill", "rank killed"]
ALL = ("--chips", "soft", "--links", "namespaces", "--memory-limit", "--grace", "1")


@needs_namespaces
@needs_memory
@pytest.mark.parametrize("how", quick(ENDS, ["crash", "kill"]))
def test_nothing_is_left(how: str, start: Callable[..., Running], tmp_path: Path) -> None:
    before = host_links()
    extra = {"exit": ("-1", "0"), "crash": ("2", "7")}.get(how, ())
    one = start("wait", str(tmp_path), *extra, flags=ALL)
    assert len(one.namespaces) == 5  # four nodes and the bridge
    assert len(one.groups) == 4 + 1  # the ranks' and the testbed's
    assert len(one.left()["processes"]) == 8  # the ranks and their children
    assert set(one.left()["namespaces"]) == one.namespaces
    assert host_links() == before  # all links are in namespaces of the testbed
    (tmp_path / "go").touch()
    signals = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}
    if how in signals:
        os.killpg(one.launcher.pid, signals[how])
    elif how == "rank killed":
        assert call("fault", "--testbed", one.testbed.id, "kill", "1").returncode == 0
    out, err = one.launcher.communicate(timeout=60)
    codes = {"exit": 0, "crash": 7, "interrupt": 130, "terminate": 143, "kill": -signal.SIGKILL, "rank killed": 137}
    assert one.launcher.returncode == codes[how], out + err
    if how == "rank killed":
        assert "rank 1 (fast-1, big) was killed by SIGKILL" in err
    one.assert_clean()
    assert host_links() == before


@needs_namespaces
@needs_memory
def test_two_at_once_and_clean_after_the_worst(start: Callable[..., Running], tmp_path: Path) -> None:
    first = start("wait", str(tmp_path), flags=ALL)
    for file in tmp_path.glob("up-*"):
        file.unlink()
    second = start("wait", str(tmp_path), flags=ALL)
    assert not first.namespaces & second.namespaces and not set(first.groups) & set(second.groups)
    listed = {entry["id"]: entry["alive"] for entry in json.loads(call("status", "--json").stdout)["testbeds"]}
    assert listed[first.testbed.id] and listed[second.testbed.id]
    several = call("fault", "kill", "0")
    assert several.returncode == 2 and "several testbeds are running" in several.stderr

    reaper = first.testbed.record()["reaper"][0]  # the worst: the launcher and its reaper die at one blow
    process.signal_all([reaper, first.launcher.pid], signal.SIGSTOP)
    process.signal_all([reaper, first.launcher.pid], signal.SIGKILL)
    first.launcher.wait()
    assert until(lambda: first.left().get("cgroups"), "the groups that nobody removes")
    done = json.loads(call("clean", "--json").stdout)
    assert first.testbed.id in [entry["testbed"] for entry in done["removed"]]
    assert second.testbed.id not in [entry["testbed"] for entry in done["removed"]]
    first.assert_clean()
    assert len(second.left()["processes"]) == 8 and second.launcher.poll() is None


@needs_namespaces
def test_congestion_control_of_links_is_not_the_machines() -> None:
    """A link that is busy both ways has its rate whatever the host's default is (BBR takes less)."""
    network = namespaces.VirtualNetwork(2, {(0, 1): 1e6, (1, 0): 1e6})
    network.open()
    try:
        with process.inside(network.nodes[0]):
            route = subprocess.run(["ip", "route", "get", namespaces.address(1)], capture_output=True, text=True).stdout
    finally:
        network.close()
    assert f"congctl {namespaces.CONGESTION_CONTROL}" in route and namespaces.address(0) in route


@needs_namespaces
def test_nobody_reads(start: Callable[..., Running], tmp_path: Path) -> None:
    """As after ``| head -1``: it ends as other programs do, and cleans up."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    words = hetero("run", "--cluster", str(tmp_path / "cluster.yaml"), "--output", "all", "--", "yes")
    launcher = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout is not None and launcher.stderr is not None
    assert launcher.stdout.readline().endswith("y\n")
    launcher.stdout.close()
    err = launcher.stderr.read()
    launcher.stderr.close()
    assert launcher.wait(60) == 128 + signal.SIGPIPE and "Traceback" not in err, err
    assert not [where for where in process.marked().values() if f"p{launcher.pid}s" in where]


@needs_namespaces
def test_the_reaper_is_replaced(start: Callable[..., Running], tmp_path: Path) -> None:
    one = start("wait", str(tmp_path), flags=("--links", "namespaces"))
    reaper = one.testbed.record()["reaper"][0]
    process.signal_all([reaper], signal.SIGKILL)
    until(lambda: one.testbed.record()["reaper"][0] != reaper, "another reaper")
    one.launcher.kill()
    one.launcher.wait()
    one.assert_clean()


@needs_namespaces
@pytest.mark.slow
@pytest.mark.quiet
def test_links_are_as_fast_as_asked(start: Callable[..., Running], tmp_path: Path) -> None:
    """Also both ways: what goes to one node does not count for another, up to the node's fastest link."""
    wanted = {"0-1": 40e6, "1-2": 20e6, "3-0": 20e6, "3-2": 40e6}
    ends = [[int(rank) for rank in pair.split("-")] for pair in wanted]
    pairs = json.dumps([[source, destination, destination] for source, destination in ends])  # one rank per node
    flags = ("--links", "namespaces", "--log-dir", str(tmp_path / "log"))
    for _ in range(ATTEMPTS):
        one = start("transfer", pairs, str(4_000_000), "5", str(tmp_path), flags=flags, up=0)
        out, err = one.launcher.communicate(timeout=120)
        assert one.launcher.returncode == 0, out + err
        found = {p: json.loads((tmp_path / f"rates-{p[-1]}.json").read_text())[p] for p in wanted}
        right = {p: statistics.median(rates) == pytest.approx(wanted[p], rel=0.05) for p, rates in found.items()}
        if all(right.values()) or "DISTURBED" not in err:
            break
    else:
        pytest.skip(f"others load this machine: all of {ATTEMPTS} runs were disturbed, and say nothing of links")
    assert all(right.values()), (found, err)
    result = json.loads((tmp_path / "log" / "testbed.json").read_text())
    assert 0 < result["latency_seconds"]["fast-slow"] < 1 and "us one way (measured)" in err
    assert result["chips"] == "clock" and result["links"] == "namespaces"


@pytest.mark.slow
@needs_namespaces
def test_faults_of_links(start: Callable[..., Running], tmp_path: Path) -> None:
    path = tmp_path / "count"
    one = start("ping", str(path), flags=("--links", "namespaces"), up=0)
    until(lambda: path.exists() and path.read_text() not in ("", "0"), "the first byte")
    one.note()
    me = ("fault", "--testbed", one.testbed.id)

    def stands_still() -> bool:
        before = path.read_text()
        time.sleep(0.5)
        return before != "" and path.read_text() == before

    for begin, end in ((("cut", "fast-0", "fast-1"), ("mend", "fast-0", "fast-1")), (("freeze", "0"), ("thaw", "0"))):
        assert call(*me, *begin).returncode == 0
        until(stands_still, "silence")
        assert call(*me, *end).returncode == 0
        until(lambda: not stands_still(), "the next byte")
    node = one.testbed.record()["nodes"][0]["namespace"]

    def rates() -> str:
        shown = subprocess.run(
            ["nsenter", f"--net={node}", "tc", "class", "show", "dev", "eth0"], capture_output=True, text=True
        )
        return next(line for line in shown.stdout.splitlines() if " 1:12 " in line)

    before = rates()
    assert call(*me, "slow-link", "fast-0", "slow-0", "1 MB/s").returncode == 0
    assert "rate 8058Kbit" in rates().replace("8059", "8058")
    assert call(*me, "mend", "slow-0", "fast-0").returncode == 0
    assert rates() == before
    for words, problem in (
        (("slow-link", "fast-0", "slow-0", "90 MB/s"), "faster than the node's fastest link"),
        (("slow-link", "fast-0", "slow-0", "90"), "unit"),
        (("cut", "fast-0", "fast-0"), "between two nodes"),
        (("cut", "fast-0", "fast-7"), "no such node"),
        (("kill", "9"), "no such rank"),
        (("kill", "1.7"), "rank = 1.7: not a rank"),
        (("kill",), "wrong number of arguments"),
        (("slow-chip", "0", "2"), "out of range"),
        (("melt", "0"), "no such fault"),
    ):
        done = call(*me, *words)
        assert done.returncode == 2 and problem in done.stderr, done.stderr
    assert call(*me, "slow-chip", "3", "0.1").returncode == 0
    assert json.loads((one.testbed.directory / "control.json").read_text()) == {"speed": {"3": 0.1}, "rate": []}


TOO_SLOW = """
import os, sys, time, torch
from hetero_megatron.emulation import Emulation
from hetero_megatron.environment.launcher import read_launcher
launcher = read_launcher()
emulation, end = Emulation.of(launcher), time.monotonic() + 20
emulation.started()
start = time.thread_time()
with emulation.clock.counting():
    torch.ones(2) + 1
    while emulation.rank == 2 and time.thread_time() - start < 0.5:
        pass
while "disturbed" not in emulation.facts() and time.monotonic() < end:
    time.sleep(0.1)
print(sorted(emulation.facts()))
"""


@pytest.mark.slow
def test_a_clock_that_could_not_be_kept_is_written_down(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    log = tmp_path / "log"
    flags = ("--cluster", str(tmp_path / "cluster.yaml"), "--links", "none", "--log-dir", str(log))
    done = call("run", *flags, "--", sys.executable, "-c", TOO_SLOW)
    assert done.returncode == 0, done.stderr
    found = json.loads((log / "testbed.json").read_text())
    assert found["invalid"] and found["worst_rank"] == 2 and found["overrun"] > 1 and found["late"] > 0
    assert "INVALID: rank 2 took" in done.stderr and "schedule + communication errors" in done.stderr
    assert done.stdout.strip() == "['chips', 'disturbed', 'foreign_cores', 'links']"


@needs_memory
def test_memory_limit_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    eat = "import os; x = bytes(700 << 20) if os.environ['RANK'] == '3' else 0"
    flags = ("--cluster", str(tmp_path / "cluster.yaml"), "--links", "none", "--memory-limit", "--grace", "0")
    done = call("run", *flags, "--", sys.executable, "-c", f"{eat}; x and bytearray(x)")
    assert done.returncode == 137, done.stderr
    assert "rank 3 (slow-1, small) was killed by SIGKILL at its memory limit of 512 MiB" in done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="testbed: not Linux")
@pytest.mark.parametrize(
    "links",
    ["none", pytest.param("paced", marks=pytest.mark.slow), pytest.param("namespaces", marks=needs_namespaces)],
)
def test_environment_of_the_ranks(links: str, start: Callable[..., Running], tmp_path: Path) -> None:
    cluster = CLUSTER.replace("count: 2, chip: small}", "chip: small, chips_per_node: 2}")
    one = start("environment", str(tmp_path), flags=("--links", links), cluster=cluster, up=0)
    out, err = one.launcher.communicate(timeout=60)
    assert one.launcher.returncode == 0, out + err
    ranks = [json.loads((tmp_path / f"environment-{rank}.json").read_text()) for rank in range(4)]
    assert [(r["RANK"], r["LOCAL_RANK"], r["LOCAL_WORLD_SIZE"], r["GROUP_RANK"], r["HETERO_NODE"]) for r in ranks] == [
        ("0", "0", "1", "0", "fast-0"), ("1", "0", "1", "1", "fast-1"), ("2", "0", "2", "2", "slow"),
        ("3", "1", "2", "2", "slow"),
    ]  # fmt: skip
    assert {(r["WORLD_SIZE"], r["OMP_NUM_THREADS"], r["MALLOC_ARENA_MAX"]) for r in ranks} == {("4", "1", "1")}
    assert len({(r["MASTER_ADDR"], r["MASTER_PORT"], r["HETERO_TESTBED"]) for r in ranks}) == 1
    where = ("10.77.0.1", "eth0") if links == "namespaces" else ("127.0.0.1", "lo")
    assert {(r["MASTER_ADDR"], r["GLOO_SOCKET_IFNAME"]) for r in ranks} == {where}
    assert "ranks 0, 1, 2, 3 never said that their start-up was over: nothing was emulated" in err
    assert all(len(r["cores"]) == 1 for r in ranks) and f"links: {links} (as asked)" in err
