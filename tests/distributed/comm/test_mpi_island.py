"""The plugin mpi_island under real mpiexecs: its operations, islands that cannot reach each other, absent peers,
training, and its launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hetero_megatron.environment.launcher import read_launcher
from hetero_megatron.errors import UserError
from hetero_megatron.platform.plugins import PluginSource, load
from tests.support.paths import ROOT
from tests.support.ports import free_port
from tests.support.programs import inside
from tests.support.selection import quick

PLUGIN = ROOT / "plugins" / "mpi_island"
MPIEXEC = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
NO_MPI = "mpi4py is not installed" if find_spec("mpi4py") is None else "there is no mpiexec" if MPIEXEC is None else ""
needs_mpi = pytest.mark.skipif(bool(NO_MPI), reason=f"{NO_MPI}: pip install mpich mpi4py")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": f"{ROOT}:{PLUGIN}",
    "HETERO_PLUGINS": "hetero_mpi_island.plugin",
}
TRAINING = ["--model", "tiny", "--mock-data", "--fp64", "--train-iters", "2", "--lr", "1e-3", "--seed", "7"]
PLAN = """
version: 1
seq_length: 32
global_batch_size: 4
pipelines:
"""
ONE = "  - {micro_batch_size: 4, num_micro_batches: 1, stages: [{ranks: 0, layers: [0, 6]}]}\n"
# Messages between stages, and gradients of unlike pipelines.
THREE = """
  - micro_batch_size: 1
    num_micro_batches: 3
    stages: [{ranks: 0, layers: [0, 4]}, {ranks: 1, layers: [4, 6]}]
  - {micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 2, layers: [0, 6]}]}
"""


FIVE = """
  - micro_batch_size: 1
    num_micro_batches: 2
    stages: [{ranks: "0,1", layers: [0, 2], tp: 2}, {ranks: 2, layers: [2, 6]}]
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 3, layers: [0, 4]}, {ranks: 4, layers: [4, 6]}]}
"""
ACROSS = "  - {micro_batch_size: 4, num_micro_batches: 1, stages: [{ranks: '0,1', layers: [0, 6], tp: 2}]}\n"


def island(base: int, size: int, world: int, port: int, command: list[str]) -> subprocess.Popen[str]:
    """One mpiexec."""
    assert MPIEXEC is not None
    words = [MPIEXEC, "-disable-auto-cleanup", "-n", str(size), sys.executable, "-m", "hetero_mpi_island.launch"]
    words += ["--base-rank", str(base), "--world-size", str(world), "--master-addr", "127.0.0.1"]
    return subprocess.Popen(
        [*words, "--master-port", str(port), "--", *command], cwd=ROOT, env=ENVIRONMENT, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def alone(rank: int, world: int, port: int, command: list[str]) -> subprocess.Popen[str]:
    """A rank of no MPI world."""
    told = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env={**ENVIRONMENT, **told}, text=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def run(sizes: list[int], *command: str, code: int = 0, others: Sequence[str] = ()) -> str:
    """A job of islands of these sizes; what they print, errors too where there should be some. ``code``: how mpiexec
    ends; ``others``: the command of one more rank, outside all of them."""
    port = free_port()
    world = sum(sizes) + bool(others)
    started = [island(sum(sizes[:i]), n, world, port, list(command)) for i, n in enumerate(sizes)]
    started += [alone(world - 1, world, port, list(others))] if others else []
    try:
        printed = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    for process, (out, err) in zip(started, printed):
        assert process.returncode == code, out + err
        assert "Warning" not in err and "Traceback" not in err, err
    return "".join(out + err * bool(code) for out, err in printed)


def case(sizes: list[int], *words: str, code: int = 0) -> list[dict[str, Any]]:
    """What each rank of a case of mpi_job.py found, in the order of the ranks."""
    text, found, decoder = run(sizes, "tests/support/mpi_job.py", *words, code=code), [], json.JSONDecoder()
    while (begin := text.find("{")) >= 0:  # mpiexec mixes the lines of its processes
        value, end = decoder.raw_decode(text[begin:])
        found.append(value)
        text = text[begin + end :]
    assert sorted(value["rank"] for value in found) == list(range(sum(sizes)))
    return sorted(found, key=lambda value: int(value["rank"]))


@pytest.mark.slow
@needs_mpi
def test_every_operation_equals_gloos() -> None:
    """Ragged sizes with zeros, several dtypes, tags out of order, and refusals of what cannot be served."""
    seed = int.from_bytes(os.urandom(2), "little") if "CI" not in os.environ else 1
    for found in case([3], "operations", str(seed)):
        assert found["wrong"] == [], f"seed {seed}"
        assert found["backend"] == "mpi_island" and found["local"] == str(found["rank"])
        assert "this tensor is on meta" in found["device"]
        assert "contiguous" in found["strides"]
        assert "not torch.bool" in found["reduced"]
        assert "tag 1099511627776 is out of range" in found["tag"]
        assert "2 rows cannot be split into [2] for 3 members" in found["rows"]
        assert found["unserved"] == "mpi_island does not serve gather"


@needs_mpi
@pytest.mark.slow
def test_islands_reach_each_other_over_gloo_only() -> None:
    zero, one, two, three = every = case([2, 2], "islands")
    for found, others, mine in ((zero, "2, 3", [0, 1]), (one, "2, 3", [0, 1]), (two, "0, 1", [2, 3])):
        says = f"ranks {others} not in the MPI world of rank {found['rank']}, which has ranks {mine}"
        assert says in found["refused"][1]
    assert "rank 2 not in the MPI world" in one["refused"][0] and "rank 1 not in" in two["refused"][0]
    assert zero["refused"][0] == three["refused"][0] == "", "no members"
    assert all(found["difference"] < 1e-15 for found in every)
    assert [found["answer"] for found in every] == [1.0, 1.0, 3.0, 3.0]


@needs_mpi
@pytest.mark.slow
def test_a_peer_that_does_not_come_or_was_killed_is_named_in_time() -> None:
    zero, one, two = case([3], "absent", code=128 + signal.SIGKILL)
    for found in (zero, one):
        for name in ("receive", "exchange", "sum", "given", "group", "killed"):
            (text, seconds), limit = found["said"][name], 0.5 if name == "given" else 5.0
            assert "rank 2 did not" in text or (name == "sum" and "2 did not answer" in text), text
            assert seconds >= limit, (name, seconds)
    assert "rank 0 sent 16 bytes, 20 were expected" in two["said"]["short"][0]


def losses(directory: Path, pipelines: str, islands: list[int], alone: bool = False) -> tuple[list[float], str]:
    """Of a run in these islands, perhaps with one rank outside them, and what it printed."""
    directory.mkdir()
    (directory / "plan.yaml").write_text(PLAN + pipelines)
    words = [*TRAINING, "--plan", str(directory / "plan.yaml"), "--save", str(directory / "run")]
    program = ["pretrain_gpt.py", *words]
    if islands:
        printed = run(islands, *program, "--platform", "mpi_host", others=[*program, "--platform", "cpu"] * alone)
        assert "done: 2 steps" in printed
    else:
        printed, _ = inside(words)
    lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines], printed


# In one island; in two, between which stages and gradients cross, and a rank that speaks gloo only.
TRAINED: dict[str, tuple[str, list[int], bool, list[str]]] = {
    "one": (THREE, [3], False, ["communication: 1 island\n  island 0: ranks 0-2, mpi_host (mpi; "]),
    "two and gloo": (FIVE, [2, 2], True, ["communication: 3 islands", "island 0 with 1: bridge"]),
}


@needs_mpi
@pytest.mark.parametrize("name", quick(TRAINED, [], ["two and gloo"]))
def test_training_over_mpi_islands_equals_one_process(name: str, tmp_path: Path) -> None:
    pipelines, islands, alone, says = TRAINED[name]
    one, _ = losses(tmp_path / "one", ONE, [])
    found, printed = losses(tmp_path / "islands", pipelines, islands, alone)
    assert all(words in printed for words in says), printed
    assert len(one) == 2 and found == pytest.approx(one, rel=1e-12)


@needs_mpi
@pytest.mark.slow
def test_a_layer_s_group_across_islands_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN + ACROSS)
    words = [*TRAINING, "--plan", str(tmp_path / "plan.yaml"), "--platform", "mpi_host"]
    printed = run([1, 1], "pretrain_gpt.py", *words, code=2)
    assert "ranks 0-1 are one tensor-parallel or context group" in printed
    assert "allow_bridge: true" in printed


def test_without_mpi4py_the_platform_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGIN))
    plugin = load(PluginSource("mpi_island", "hetero_mpi_island.plugin", "environment"))
    (platform,) = plugin.platforms
    assert plugin.ok and (platform.name, platform.device_type) == ("mpi_host", "cpu")
    assert platform.backends == ("mpi_island",)
    monkeypatch.setattr(platform, "installed", lambda: False)
    assert platform.absence() == "mpi4py is not installed"


HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
MEETING = ["--master-addr", "127.0.0.1", "--master-port", "29500"]


def launched(monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], *words: str) -> dict[str, str]:
    monkeypatch.syspath_prepend(str(PLUGIN))
    launch = import_module("hetero_mpi_island.launch")
    return launch.variables(launch.parse([*words, "--", "x.py", "--flag"]), environment)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("mpi", "local"), [(HYDRA, 1), (OPEN_MPI, 0)], ids=["hydra", "open mpi"])
def test_ranks_are_numbered_over_islands(monkeypatch: pytest.MonkeyPatch, mpi: dict[str, str], local: int) -> None:
    made = launched(monkeypatch, mpi, "--base-rank", "2", "--world-size", "5", *MEETING)
    read = read_launcher(made)  # which refuses tasks of mpiexec without RANK
    assert (read.rank, read.world_size, read.local_rank, read.rendezvous_address) == (3, 5, local, ("127.0.0.1", 29500))
    alone = launched(monkeypatch, {}, "--base-rank", "4", "--world-size", "5", *MEETING)
    assert (alone["RANK"], alone["LOCAL_RANK"]) == ("4", "0")


@pytest.mark.parametrize(
    ("more", "words", "says"),
    [
        ({}, ["--base-rank", "4", "--world-size", "5", *MEETING], "do not fit into --world-size 5"),
        ({}, ["--base-rank", "-1", "--world-size", "5", *MEETING], "Accepted: 0 to --world-size - 2"),
        ({"RANK": "0"}, ["--base-rank", "0", "--world-size", "5", *MEETING], "RANK = 0: is set already"),
        ({}, ["--base-rank", "0", "--world-size", "2"], "MASTER_ADDR and MASTER_PORT: not set"),
        ({"PMI_SIZE": "x"}, ["--base-rank", "0", "--world-size", "2", *MEETING], "does not say rank and size"),
    ],
    ids=["above", "below", "twice", "no address", "no size"],
)  # fmt: skip
def test_launches_that_cannot_be_are_refused(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, str], words: list[str], says: str
) -> None:
    with pytest.raises(UserError, match=says.replace("(", r"\(")):
        launched(monkeypatch, {**HYDRA, **more}, *words)
