"""The launcher: a lost node, a frozen rank, a refusal; the loss curve goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.cli.main import main
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.launch.jobs import Setup
from hetero_megatron.launch.supervise import Round, Seat, Supervisor, without_nodes
from hetero_megatron.monitoring.stragglers import diagnoses_at, say_joined
from tests.support.faults import children
from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT, inside

CLUSTER = """
version: 1
nodes:
  - {name: fast, chip: big}
  - {name: slow, count: 2, chip: small}
chips:
  big:   {memory: 2 GiB, tflops: {fp64: 0.02}, memory_bandwidth: 10 GB/s}
  small: {memory: 1 GiB, tflops: {fp64: 0.01}, memory_bandwidth: 10 GB/s}
links:
  inter_node: {bandwidth: 50 MB/s, latency: 100 us}
  pairs: [{between: [fast, slow], bandwidth: 25 MB/s}]
"""
THREE = """
version: 1
seq_length: 48
global_batch_size: 4
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 4
    stages: [{ranks: 0, layers: [0, 4], chip: big}, {ranks: [1, 2], layers: [4, 6], tp: 2, chip: small}]
"""
TWO = """
version: 1
seq_length: 48
global_batch_size: 4
pipelines:
  - {micro_batch_size: 1, num_micro_batches: 3, stages: [{ranks: 0, layers: [0, 6], chip: big}]}
  - {micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 1, layers: [0, 6], chip: small}]}
"""
SINGLE = """
version: 1
seq_length: 48
global_batch_size: 4
pipelines: [{micro_batch_size: 4, num_micro_batches: 1, stages: [{ranks: 0, layers: [0, 6]}]}]
"""
STEPS = 16
TRAIN = ["--model", "tiny", "--mock-data", "--fp64", "--train-iters", str(STEPS), "--lr", "1e-3"]
TRAIN += ["--distributed-timeout-minutes", "0.1"]


def test_nodes_are_dropped_and_the_others_keep_their_names() -> None:
    import yaml

    left = cluster_from_dict(without_nodes(yaml.safe_load(CLUSTER), {"slow-0"}))
    assert [r.node for r in left.ranks] == ["fast", "slow-1"]
    link = left.link(0, 1)
    assert link is not None and link.bandwidth == 25e6
    left = cluster_from_dict(without_nodes(yaml.safe_load(CLUSTER), {"fast"}))
    assert [r.node for r in left.ranks] == ["slow-0", "slow-1"]


def test_what_counts_as_lost() -> None:
    seats = [Seat("a", 0), Seat("a", 1), Seat("b", 0), Seat("c", 0)]
    assert Round({0: 3, 1: 3, 2: -9, 3: 3}).lost(seats) == {"b"}
    assert Round({0: 3, 1: 3, 2: 3}, {3}).lost(seats) == {"c"}
    assert Round({0: 3, 1: 1, 2: 3, 3: 3}).lost(seats) == set()  # a crash: the node is still there


class Pretended:
    """A round of which rank 1 dies at once and the others go on waiting, for ever."""

    ranks = [0, 1, 2]

    def __init__(self, diagnoses: Path, joined: Sequence[int], code: int, gave_up: Sequence[int] = ()) -> None:
        self._codes = {1: code, **dict.fromkeys(gave_up, 3)}
        for rank in joined:
            say_joined(rank, str(diagnoses))

    def poll(self) -> dict[int, int]:
        return self._codes

    def hung(self) -> set[int]:
        return set()

    def signal(self, number: int) -> None:
        pass

    def kill(self) -> None:
        pass


@pytest.mark.parametrize(
    ("joined", "code", "gave_up", "lost"),
    [
        ([], -9, [], {"b"}),  # rank 0 and 2 wait in the rendezvous, where nobody notices anything
        ([0, 2], 1, [], set()),
        ([0, 1, 2], -9, [], {"a", "b", "c"}),  # they met, so they should have noticed
        ([0, 1, 2], 1, [2], {"a"}),
        ([], 1, [2], {"a"}),  # 2 waited for 0 until its time was up
    ],
)
def test_who_waits_for_others_to_start_does_not_hang(
    joined: list[int], code: int, gave_up: list[int], lost: set[str], tmp_path: Path
) -> None:
    seats = (Seat("a", 0), Seat("b", 0), Seat("c", 0))
    said: list[str] = []
    supervisor = Supervisor(
        Setup(tmp_path / "plan.yaml", seats), [], "replan", lambda *_: None, 1, 0.1, tmp_path, said.append
    )
    diagnoses = diagnoses_at(tmp_path, 0)
    ended = supervisor._round(Pretended(diagnoses, joined, code, gave_up), diagnoses)
    assert ended.lost(seats) == lost and not diagnoses.exists()
    assert ("still waited for all to start" in " ".join(said)) == (set(joined) != {0, 1, 2} and not gave_up)


class Frozen:
    """A round whose only rank does nothing, not even end."""

    ranks = [0]

    def __init__(self, number: int) -> None:
        self.passed: list[int] = []
        self.killed = False
        self._number, self._again = number, 0.0

    def poll(self) -> dict[int, int]:
        if not self._again:
            for _ in range(2):  # `timeout` sends its signal to the group as well
                os.kill(os.getpid(), self._number)
            self._again = time.monotonic() + 1.5
        elif self.passed and time.monotonic() >= self._again:
            os.kill(os.getpid(), self._number)
        return {}

    def hung(self) -> set[int]:
        return set()

    def signal(self, number: int) -> None:
        self.passed.append(number)

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_second_signal_kills_ranks_that_do_not_end(number: int, tmp_path: Path) -> None:
    begin = time.monotonic()
    job = Frozen(number)
    said: list[str] = []
    setup = Setup(tmp_path / "plan.yaml", (Seat("a", 0),))
    supervisor = Supervisor(
        setup, [], "restart", lambda *_: None, 3, 600.0, tmp_path, said.append, launch=lambda *_: job
    )
    before = signal.signal(number, signal.SIG_DFL)  # `nohup make test` ignores SIGHUP, and so would the launcher
    try:
        assert supervisor.run() == 128 + number
    finally:
        signal.signal(number, before)
    assert job.passed == [number] and job.killed and time.monotonic() - begin >= 1.5
    assert "a second signal kills them" in said[0] and "all ranks are killed" in said[1]


def launch_words(path: Path, policy: str, grace: int) -> list[str]:
    """The launcher's command for three nodes, with a fallback plan for two."""
    for name, text in (("cluster", CLUSTER), ("three", THREE), ("two", TWO)):
        (path / f"{name}.yaml").write_text(text)
    words = [sys.executable, "-m", "hetero_megatron.cli.main", "run", "--plan", str(path / "three.yaml")]
    words += ["--cluster", str(path / "cluster.yaml"), "--on-failure", policy, "--grace", str(grace)]
    words += ["--fallback-plan", str(path / "two.yaml"), "--"]
    return [*words, "--save", str(path / "run"), "--load", str(path / "run"), "--save-interval", "2", *TRAIN]


DEAD_AT_START = """
import os, signal
if os.environ.get("HETERO_NODE") == "slow-0" and "RANK" in os.environ:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_node_that_dies_before_the_ranks_meet(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(DEAD_AT_START)
    words = launch_words(tmp_path, "replan", 10)
    path = os.pathsep.join([str(tmp_path), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
    environment = {**ENVIRONMENT, "PYTHONPATH": path}
    job = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "without slow-0, 2 ranks left" in job.stderr and f"done: {STEPS} steps" in job.stdout
    assert not list((tmp_path / "run").glob("diagnoses-*"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return run_alone(tmp_path_factory.mktemp("undisturbed"), TRAIN)


def run_alone(path: Path, flags: list[str]) -> dict[int, float]:
    """Losses by step of one rank that nothing disturbs."""
    (path / "plan.yaml").write_text(SINGLE)
    inside(["--plan", str(path / "plan.yaml"), "--save", str(path / "run"), *flags])
    return losses(path)


def losses(path: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def assert_same_losses(path: Path, undisturbed: dict[int, float]) -> None:
    """The run's loss curve is that of ``run_alone``, up to rounding."""
    seen = losses(path)
    assert sorted(seen) == sorted(undisturbed)
    for step, loss in undisturbed.items():
        assert seen[step] == pytest.approx(loss, rel=1e-10)


@pytest.mark.parametrize(
    ("how", "victim", "policy"),
    [
        pytest.param(signal.SIGKILL, 1, "replan", marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGSTOP, 2, "replan", marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 0, "restart", marks=pytest.mark.slow),
    ],
)
def test_a_lost_node(
    how: signal.Signals, victim: int, policy: str, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    words = launch_words(tmp_path, policy, 15)
    pipe = subprocess.PIPE
    job = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "latest").exists() and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        ranks = children(job.pid)
        assert len(ranks) == 3, job.communicate(timeout=5)
        os.kill(ranks[victim], how)
        output = job.communicate(timeout=180)[0]
        assert job.returncode == 0, output
        assert "loaded" in output and f"done: {STEPS} steps" in output
        if policy == "replan":
            name = {1: "slow-0", 2: "slow-1"}[victim]
            assert f"without {name}, 2 ranks left, plan {tmp_path / 'two.yaml'}" in output, output
        assert_same_losses(tmp_path, undisturbed)
        assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    finally:
        for pid in [*children(job.pid), job.pid]:
            if job.poll() is None:
                os.kill(pid, signal.SIGKILL)
        job.wait()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--plan", "p"], "-- and then the flags"),
        (["--plan", "three.yaml", "--on-failure", "pray", "--"], "stop, restart, replan"),
        (["--plan", "three.yaml", "--on-failure", "replan", "--", *TRAIN], "--fallback-plan: missing"),
        (["--plan", "three.yaml", "--fallback-plan", "other.yaml", "--", *TRAIN], "loss curve would change"),
        (["--plan", "three.yaml", "--", *TRAIN], "needs checkpoints to go on from"),
        (["--plan", "three.yaml", "--", "--save", "r", "--load", "s", *TRAIN], "--save DIR and --load DIR, the same"),
        (["--plan", "three.yaml", "--grace", "x", "--", "--save", "r", "--load", "r", *TRAIN], "--grace = x"),
    ],
)
def test_refusals(words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "three.yaml").write_text(THREE.replace(", chip: big", "").replace(", chip: small", ""))
    (tmp_path / "other.yaml").write_text(SINGLE.replace("batch_size: 4", "batch_size: 2"))
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words]) == 2
    assert says in capsys.readouterr().err


def test_the_planner_is_asked_where_there_are_no_fallback_plans(tmp_path: Path) -> None:
    from hetero_megatron.cli.run_plans import configured, searched
    from hetero_megatron.plans import dump_yaml

    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "three.yaml").write_text(THREE)
    config = configured(TRAIN, tmp_path / "three.yaml", tmp_path / "cluster.yaml", None)
    left = tmp_path / "left.yaml"
    import yaml

    left.write_text(yaml.safe_dump(without_nodes(yaml.safe_load(CLUSTER), {"slow-0"})))
    path = searched(TRAIN, config, tmp_path)([Seat("fast", 0), Seat("slow-1", 0)], left)
    assert path is not None
    plan = configured(TRAIN, path, left, 2).plan
    assert (plan.global_batch_size, plan.seq_length) == (4, 48) and max(plan.ranks) <= 1
    assert dump_yaml(plan) == path.read_text()


DEVICE_OF_RANK = """
import os, pathlib
if "RANK" in os.environ:
    pathlib.Path(os.environ["FOUND"], "rank" + os.environ["RANK"]).write_text(os.environ["LOCAL_RANK"])
"""


@pytest.mark.slow
def test_ranks_of_one_host_have_a_device_each(tmp_path: Path) -> None:
    """Without a cluster file, which would name their chips."""
    (tmp_path / "sitecustomize.py").write_text(DEVICE_OF_RANK)
    (tmp_path / "plan.yaml").write_text(TWO.replace(", chip: big", "").replace(", chip: small", ""))
    words = [sys.executable, "-m", "hetero_megatron.cli.main", "run", "--plan", str(tmp_path / "plan.yaml"), "--"]
    words[4:4] = ["--on-failure", "stop"]
    words += ["--model", "tiny", "--mock-data", "--train-iters", "1", "--lr", "1e-3"]
    path = os.pathsep.join([str(tmp_path), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
    environment = {**ENVIRONMENT, "PYTHONPATH": path, "FOUND": str(tmp_path)}
    job = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
    assert job.returncode == 0, job.stdout + job.stderr
    assert [(tmp_path / f"rank{r}").read_text() for r in (0, 1)] == ["0", "1"]
