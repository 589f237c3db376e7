"""The parts of the testbed that need neither root nor ranks: choices, refusals, pinning, cgroup files, load, output."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_calibration, bench_testbed_chips
from benchmarks.testbed_run import undisturbed
from hetero_megatron.cli import doctor
from hetero_megatron.cli.main import main
from hetero_megatron.cluster import Cluster, cluster_from_dict, load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.testbed import cgroups, load, machine, shaping, state
from hetero_megatron.testbed.launch import find_command
from hetero_megatron.testbed.machine import Machine
from hetero_megatron.testbed.output import Output
from hetero_megatron.testbed.settings import decide, describe_links, pin

ALL = Machine(root=True, tools=(), lacks=(), memory_groups=1, cores=(0, 1))
NOBODY = replace(ALL, root=False, lacks=None, memory_groups=0)


def cluster(fast: float | None = 0.6, slow: float | None = 0.2, **links: Any) -> Cluster:
    def chip(speed: float | None) -> dict[str, Any]:
        return {"memory": "1 GiB"} | ({} if speed is None else {"emulate": {"speed": speed}})

    nodes = [{"name": "fast", "count": 2, "chip": "big"}, {"name": "slow", "chip": "small", "chips_per_node": 2}]
    chips = {"big": chip(fast), "small": chip(slow)}
    return cluster_from_dict({"nodes": nodes, "chips": chips, "links": links})


INTER = {"inter_node": {"bandwidth": "50 MB/s", "latency": "1 ms"}}
SLOW = {"between": ["fast", "slow"], "bandwidth": "1 GB/s", "emulate": {"bandwidth": "25 MB/s"}}
LATE = {"inter_node": {"bandwidth": "50 MB/s", "emulate": {"latency": "1 ms"}}}


def test_defaults_are_the_best_that_the_machine_allows() -> None:
    best = decide(cluster(**INTER), ALL)
    assert (best.chips, best.links) == ("clock", "namespaces")
    poor = decide(cluster(**INTER), NOBODY)
    assert (poor.chips, poor.links) == ("clock", "paced") and "not root" in poor.reasons["links"]
    bare = decide(cluster(None, None), ALL)
    assert (bare.chips, bare.links) == ("none", "none") and "big, small" in bare.reasons["chips"]
    late = decide(cluster(**LATE), ALL)
    assert late.links == "paced" and "emulated latency" in late.reasons["links"]
    assert "iproute2" in decide(cluster(**INTER), replace(ALL, tools=("tc",))).reasons["links"]
    assert "lacks veth, htb" in decide(cluster(**INTER), replace(ALL, lacks=("veth", "htb"))).reasons["links"]


@pytest.mark.parametrize(
    ("clusters", "machine", "flags", "says"),
    [
        ((0.9, 0.2, INTER), ALL, {}, "2 x big at 0.9, 2 x small at 0.2. Accepted: a total of at most 1.6 on the 2"),
        ((0.6, 0.2, INTER), replace(ALL, cores=(3,)), {}, "at most 0.8 on the 1 cores"),
        ((0.6, 0.2, INTER), ALL, {"links": "namespaces", "machine": NOBODY}, "--links paced, which needs no root"),
        ((None, 0.2, INTER), ALL, {"chips": "soft"}, "chips.big.emulate.speed: the cluster file does not say how fast"),
        ((0.6, 0.2, LATE), ALL, {"links": "namespaces"}, "links.inter_node.emulate.latency: latency is not emulated"),
        ((0.6, 0.2, INTER), ALL, {"memory_limit": True, "machine": NOBODY}, "--memory-limit: memory cannot be limited"),
    ],
)
def test_refusals(clusters: tuple[Any, Any, Any], machine: Machine, flags: dict[str, Any], says: str) -> None:
    fast, slow, links = clusters
    with pytest.raises(UserError) as caught:
        decide(cluster(fast, slow, **links), flags.pop("machine", machine), **flags)
    assert says in str(caught.value), str(caught.value)


def test_what_does_not_fit_on_a_core_is_refused() -> None:
    chips = {"c": {"memory": "1 GiB", "emulate": {"speed": 1.2}}}
    lone = cluster_from_dict({"nodes": [{"name": "n", "chip": "c"}], "chips": chips})
    with pytest.raises(UserError, match="every core gets at most 1.0"):
        decide(lone, ALL)
    many = cluster_from_dict({"nodes": [{"name": "n", "count": 129, "chip": "T4"}]})
    with pytest.raises(UserError, match="too many ranks"):
        decide(many, ALL)
    assert decide(cluster(2.0, 2.0), ALL, chips="none").chips == "none"  # nobody is slowed: nothing to refuse


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=12), st.integers(1, 4))
def test_pinning_is_balanced(speeds: list[float], cores: int) -> None:
    """Greedy by size: no core is ahead of another by more than the fastest rank."""
    chosen = pin(speeds, range(cores))
    loads = [sum(s for s, c in zip(speeds, chosen) if c == core) for core in range(cores)]
    assert sum(loads) == pytest.approx(sum(speeds))
    assert max(loads) - min(loads) <= max(speeds) + 1e-9


def test_rates_and_pace() -> None:
    found = cluster(**INTER, intra_node={"bandwidth": "2 GB/s"}, pairs=[SLOW])
    settings = decide(found, NOBODY, links="paced")
    assert settings.node_names == ("fast-0", "fast-1", "slow") and settings.node_of == (0, 1, 2, 2)
    ends = [(a, b) for a in range(3) for b in range(3) if a != b]
    assert settings.node_rates == {pair: 50e6 if set(pair) == {0, 1} else 25e6 for pair in ends}
    pace = settings.pace()
    fast, slow, near = 50e6, 25e6, 2e9
    assert pace["bandwidth"] == [
        [None, fast, slow, slow], [fast, None, slow, slow], [slow, slow, None, near], [slow, slow, near, None]
    ]  # fmt: skip
    assert {x for row in pace["latency"] for x in row} == {None}  # 1 ms describes the cluster; nobody asked for it
    assert decide(cluster(**LATE), ALL).pace()["latency"][0][1] == pytest.approx(1e-3)
    assert describe_links(settings) == [("fast-fast", 0, 1, 50e6), ("fast-slow", 0, 2, 25e6)]


def test_shaping_commands() -> None:
    lines = shaping.shape_commands({1: 50e6, 2: 25e6}, {1: "10.77.0.2", 2: "10.77.0.3"})
    assert len(lines) == 2 + 2 * 2 and lines[1].split("classid ")[1].startswith("1:1 htb rate 402950380")
    assert [line for line in lines if line.endswith("flowid 1:12")][0].count("10.77.0.3/32") == 1
    assert shaping.shape_commands({}, {}) == []
    assert shaping.change_command(2, 1e6).startswith("class change dev eth0 parent 1:1 classid 1:12 htb rate 8059")


def test_cgroups_v2_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files that would be written; this machine's controllers are v1, so a directory plays the hierarchy."""
    own = tmp_path / "user" / "shell"
    own.mkdir(parents=True)
    (tmp_path / "mounts").write_text(f"1 2 0:1 / {tmp_path} rw - cgroup2 none rw\n")
    (tmp_path / "own").write_text("0::/user/shell\n")
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    (own / "cgroup.procs").write_text("1\n")
    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
    found = cgroups.memory_hierarchy()
    assert found is not None and (found.version, found.cgroup) == (2, own)
    group = cgroups.make_group(found, "p1s1", 3)
    assert group == tmp_path / "user" / "hetero-testbed-p1s1" / "rank-3"  # a group with processes has no children
    assert (tmp_path / "user" / "cgroup.subtree_control").read_text() == "+memory"
    for name in ("memory.max", "memory.swap.max"):
        (group / name).touch()
    cgroups.set_memory(group, 1 << 20)
    assert (group / "memory.max").read_text() == "1048576"
    assert cgroups.testbeds_with_groups() == {"p1s1"} and cgroups.find_groups("p1s1") == [group, group.parent]
    assert cgroups.oom_kills(group) == 0
    (group / "memory.events").write_text("oom 3\noom_kill 2\n")
    assert cgroups.oom_kills(group) == 2
    other = tmp_path / "v1"
    other.mkdir()
    (other / "memory.memsw.limit_in_bytes").touch()
    cgroups.set_memory(other, 1 << 20)
    for name in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"):
        assert (other / name).read_text() == "1048576"


def test_what_the_kernel_refuses_is_said_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "memory.max").mkdir()  # cannot be written, by root either
    (tmp_path / "hetero-testbed-p1s1").touch()
    refused: list[Callable[[], object]] = [
        lambda: cgroups.set_memory(tmp_path, 1),
        lambda: cgroups.make_group(cgroups.Hierarchy(1, tmp_path, tmp_path), "p1s1", 0),
    ]  # fmt: skip
    for call in refused:
        with pytest.raises(UserError, match="the kernel refuses the cgroup .*a run without --memory-limit"):
            call()


def test_doctor_says_how_to_mend_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "examine", lambda: replace(ALL, lacks=("htb", "u32")))
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["testbed kernel"].found == "lacks htb, u32"
    assert found["testbed kernel"].remedy.startswith("modprobe sch_htb cls_u32")
    assert "lacks htb, u32" in found["testbed namespaces"].found
    assert "--links paced" in found["testbed namespaces"].remedy


def test_the_demo_has_a_cluster_for_one_core() -> None:
    """With the same ratio of speeds; it is refused where the other one would do on one core."""
    two, one = (load_cluster(f"examples/clusters/{name}.yaml") for name in ("demo", "demo_one_core"))
    with pytest.raises(UserError, match="at most 0.8 on the 1 cores"):
        decide(two, replace(ALL, cores=(0,)), "soft")
    assert decide(one, replace(ALL, cores=(0,)), "soft").chips == decide(two, ALL, "soft").chips == "soft"
    assert [one.chip_of(r).speed for r in range(4)] == [(two.chip_of(r).speed or 0) / 2 for r in range(4)]
    assert [rank.node for rank in one.ranks] == [rank.node for rank in two.ranks]


def test_foreign_load_is_what_is_left_over() -> None:
    first = load._Sample(at=10.0, busy=100.0, stolen=1.0, own_processes=50.0, kernel=5.0)
    later = load._Sample(at=20.0, busy=115.0, stolen=1.5, own_processes=63.0, kernel=6.0)
    assert load._foreign(first, later) == pytest.approx((15 - 13 - 1 + 0.5) / 10)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="testbed: no /proc")
def test_foreign_load_is_noticed() -> None:
    loop = [sys.executable, "-c", "while True: pass"]
    burner = subprocess.Popen(loop, start_new_session=True)
    try:
        with load.watch_load() as seen:
            # Long beside a clock tick of 10 ms: the mean that the last sample gives is then no tick's luck.
            least, end = (os.times().elapsed + seconds for seconds in (2.0, 120.0))
            while os.times().elapsed < least or (not seen.disturbed and os.times().elapsed < end):
                seen.sample()
                time.sleep(0.1)
    finally:
        burner.kill()
        burner.wait()
    assert seen.disturbed and "DISTURBED" in seen.summary()


def test_output_is_prefixed_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self) -> None:
            self.buffer = io.BytesIO()

    for which, out in (("rank0", b"a\nb"), ("all", b"[0] a\n[0] b\n[1] hidden\n")):
        streams = Stream(), Stream()
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        output = Output(which, tmp_path / which)
        for rank, name, text in ((0, "out", "a\\nb"), (1, "out", "hidden"), (1, "err", "oh")):
            child = subprocess.Popen(["printf", text], stdout=subprocess.PIPE)
            child.wait()
            output.add(rank, name, child.stdout)  # type: ignore[arg-type]
            while output.pump(0.1):
                pass
        output.close()
        assert streams[0].buffer.getvalue() == out and streams[1].buffer.getvalue() == b"[1] oh\n"
        assert (tmp_path / which / "rank-1.out").read_text() == "hidden"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "usage"),
        ("walk", "no such command. Accepted: run, status, clean, fault"),
        ("run -- true", "--cluster: a cluster file is needed"),
        ("run --cluster", "--cluster: a value is missing"),
        ("run --cluster none.yaml -- true", "cannot read the file"),
        ("run --cluster C", "no command to run"),
        ("run --cluster C -- no-such-program", "command = no-such-program: no such command"),
        ("run --cluster C -- none.py", "command = none.py: no such file"),
        ("run --cluster C --chips quota -- true", "--chips = quota: unknown choice. Accepted: clock, soft, none"),
        ("run --cluster C --chips fast -- true", "--chips = fast: unknown choice. Accepted: clock, soft, none"),
        ("run --cluster C --links wifi -- true", "--links = wifi: unknown choice. Accepted: namespaces, paced, none"),
        ("run --cluster C --grace soon -- true", "--grace = soon: is not a number"),
        ("run --cluster C --output loud -- true", "--output = loud: unknown choice. Accepted: rank0, all"),
        ("run --cluster C --chip soft -- true", "testbed run = --chip: unknown flag"),
        ("status --yaml", "--yaml: unknown flag. Accepted: --json"),
        ("fault --testbed", "--testbed: a value is missing"),
        ("fault melt", "fault = melt: no such fault"),
        ("fault --testbed p1s1 kill 0", "testbed is running"),
    ],
)
def test_bad_commands(words: str, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    text = [str(Path("examples/clusters/two_nodes.yaml")) if word == "C" else word for word in words.split()]
    assert main(["testbed", *text]) == 2
    out, err = capfd.readouterr()
    assert says in out + err
    assert err.count("\n") <= 1


def test_command() -> None:
    assert find_command(["sh", "-c", "true"]) == ("sh", "-c", "true")
    assert find_command([__file__, "x"]) == (sys.executable, __file__, "x")


def test_benchmarks_find_the_errors_that_are_there() -> None:
    """Speed ratios and action durations from made-up actions; spreads from made-up rates."""
    speeds = [0.6, 0.6, 0.2, 0.2]  # of the cluster "3:1, 2+2"

    def rank(index: int, slower: float) -> dict[str, Any]:
        lasts = [(kind, seconds / speeds[index]) for kind, seconds in (("F", 1), ("B", 2))]
        rows = [[kind, seconds * slower, seconds] for kind, seconds in lasts]
        return {"rows": [rows * (3 if index < 2 else 1) for _ in range(3)]}

    ranks = [rank(i, 1.05 if i == 3 else 1.0) for i in range(4)]
    assert bench_testbed_chips.action_error(ranks) == pytest.approx(0.05)
    assert bench_testbed_chips.ratios("3:1, 2+2", ranks) == (pytest.approx(0.025), 0.0)  # mean of two ranks

    assert bench_testbed_chips.verdict("clock", [0.001, 0.02], 2).endswith("goal 1%: missed")
    assert bench_testbed_chips.verdict("clock", [0.001], 2).endswith("goal 1%: met; left out: 1 disturbed rows of 2")
    assert "no verdict" in bench_testbed_chips.verdict("soft", [], 2)
    tries = iter([(1, True), (2, True), (3, False), (4, False)])
    assert undisturbed(lambda: next(tries)) == (3, False) and next(tries) == (4, False)
    assert undisturbed(lambda: (5, True)) == (5, True)

    def rates(seconds: float) -> dict[str, Any]:
        rows = {"layers": [["m", 1, 2, 64, 1.0, seconds]], "embed": [["m", 1, 2, 64, 0.0, seconds / 100]]}
        rows["waiting"] = [["m", 1, 2, 64, 0.0, seconds / 100]]  # of one of a layer's four exchanges
        return {"chips": {"c": {"fp32": {**rows, "optimizer": [[8, 1.0]], "step_seconds": 0.5}}}, "links": []}

    found = bench_calibration.spreads([rates(1.9), rates(2.0), rates(2.1)])
    assert found["layers, TP 1"] == (2, pytest.approx(0.05), pytest.approx(0.1), "c m 1 2 64 1")
    assert found["embed, TP 1"][2] == pytest.approx(0.001) and found["optimizer"][:3] == (1, 0.0, 0.0)
    assert found["waiting, TP 1"][2] == pytest.approx(0.004)


@pytest.mark.parametrize("home", ["file", "missing/home", "file/home"])
def test_a_home_of_testbeds_that_cannot_be_is_refused(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("HETERO_TESTBED_HOME", str(tmp_path / home))
    words = ["run", "--cluster", "examples/clusters/testbed.yaml", "--links", "none", "--", "true"]
    assert main(["testbed", *words]) == 2
    found = capsys.readouterr().err
    assert found.startswith(f"error: HETERO_TESTBED_HOME = {tmp_path / home}: the directory of testbeds "), found
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_the_home_of_testbeds_goes_with_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_TESTBED_HOME", str(tmp_path / "home"))
    one = state.new_testbed()
    with pytest.raises(UserError, match="already runs a testbed"):
        state.new_testbed()
    assert [testbed.id for testbed in state.all_testbeds()] == [one.id] and one.alive
    state.clean(one)
    assert not (tmp_path / "home").exists() and state.all_testbeds() == []
