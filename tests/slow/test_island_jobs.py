"""A job over islands of unlike vendors on the testbed: what is lost in one of them is named, and the others go on; and
``comm check`` names the pair that is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hetero_megatron.testbed import state
from hetero_megatron.testbed.machine import examine
from tests.distributed.training.test_supervise import assert_same_losses, run_alone
from tests.slow.test_cut_links import SMALL
from tests.support.paths import ROOT
from tests.support.programs import ENVIRONMENT
from tests.support.testbed_jobs import CLUSTER, LINKS, STEPS, TRAIN, TestbedRun
from tests.support.vendors import PLUGINS, build_emulated
from tests.testbed.test_launch import hetero, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.testbed]
DEVICES = {"HETERO_PLUGINS": "hetero_emulated_vendor.plugin", "PYTHONPATH": str(PLUGINS / "emulated_vendor")}


def unlike_vendors() -> str:
    """The cluster of the testbed's tests, whose large chip is a device of an emulated vendor."""
    data = yaml.safe_load(CLUSTER)
    for chip, vendor in (("big", "emulated"), ("small", "any")):
        data["chips"][chip] |= {"vendor": vendor, "host_bandwidth": "1 GB/s"}
    return yaml.safe_dump(data)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return run_alone(tmp_path_factory.mktemp("undisturbed"), [*TRAIN, "--train-iters", str(STEPS)])


@pytest.mark.parametrize(
    ("what", "words", "dropped", "plan"),
    [
        ("kill", ["0"], "fast", "small"),
        pytest.param("kill", ["1"], "slow-0", "two", marks=pytest.mark.exhaustive),
        pytest.param("freeze", ["2"], "slow-1", "two", marks=pytest.mark.exhaustive),
        pytest.param("cut", ["fast", "slow-0", "fast", "slow-1"], "fast", "small", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_a_fault_in_an_island(
    what: str, words: list[str], dropped: str, plan: str, undisturbed: dict[int, float], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    build_emulated()
    (tmp_path / "small.yaml").write_text(SMALL)
    monkeypatch.setattr("tests.support.testbed_jobs.CLUSTER", unlike_vendors())
    monkeypatch.setattr("tests.support.testbed_jobs.ENVIRONMENT", {**ENVIRONMENT, **DEVICES})
    options = ["--chips", "none", "--links", LINKS, "--on-failure", "replan", "--grace", "60"]
    options += ["--fallback-plan", str(tmp_path / "two.yaml"), str(tmp_path / "small.yaml")]
    flags = ["--train-iters", str(STEPS), "--save-interval", "2", "--distributed-timeout-minutes", "0.3"]
    run = TestbedRun(tmp_path, options, flags)
    try:
        run.until((tmp_path / "run" / "latest").exists)
        for first in range(0, len(words), 2):
            run.fault(what, *words[first : first + 2])
    finally:
        output = run.finish()
    assert "island 0 with 1: bridge" in output, output
    assert f"done: {STEPS} steps" in output and "loaded" in output and "Traceback" not in output, output
    assert f"without {dropped}, 2 ranks left, plan {tmp_path / plan}.yaml" in output, output
    assert_same_losses(tmp_path, undisturbed)
    assert not run.left()


def check(tmp_path: Path, cluster: str, *words: str, before: str = "") -> subprocess.Popen[str]:
    (tmp_path / "testbed.yaml").write_text(cluster)
    command = f"{before} exec {sys.executable} -m hetero_megatron.cli.main comm check {' '.join(words)}"
    started = hetero("run", "--chips", "none", "--links", LINKS, "--output", "all", "--cluster",
                     str(tmp_path / "testbed.yaml"), "--", "sh", "-c", command)  # fmt: skip
    pipe = subprocess.PIPE
    environment = {**ENVIRONMENT, **DEVICES}
    return subprocess.Popen(started, cwd=ROOT, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


@pytest.mark.quiet
def test_comm_check_finds_a_link_that_is_slower_than_the_cluster_file_says(tmp_path: Path) -> None:
    build_emulated()
    promised = tmp_path / "promised.yaml"
    promised.write_text(unlike_vendors().replace("25 MB/s", "200 MB/s"))
    job = check(tmp_path, unlike_vendors(), "--cluster", str(promised), "--bytes", "2000000")
    output = job.communicate(timeout=300)[0]
    assert job.returncode == 1, output
    faults = [line for line in output.splitlines() if "FAULT" in line]
    assert len(faults) == 2, output
    for line, pair in zip(sorted(faults), ("rank 0 to rank 1", "rank 1 to rank 0"), strict=True):
        assert pair in line and f"where {promised} says 200 MB/s" in line, line


@pytest.mark.skipif(bool(examine().no_namespaces()), reason=f"testbed: {examine().no_namespaces()}")
def test_comm_check_names_a_pair_that_cannot_connect(tmp_path: Path) -> None:
    build_emulated()
    waits = f"while [ ! -e {tmp_path / 'go'} ]; do touch {tmp_path}/ready-$RANK; sleep 0.1; done;"
    job = check(tmp_path, unlike_vendors(), "--timeout", "8", before=waits)
    until(lambda: len(list(tmp_path.glob("ready-*"))) == 3, "the ranks")
    (bed,) = (bed for bed in state.all_testbeds() if bed.launcher == job.pid)
    words = hetero("fault", "--testbed", bed.id, "cut", "slow-0", "slow-1")
    cut = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    (tmp_path / "go").touch()
    output = job.communicate(timeout=300)[0]
    assert cut.returncode == 0 and job.returncode == 3, cut.stderr + output
    assert "rank 2 cannot be reached" in output or "rank 1 cannot be reached" in output, output
    assert "Traceback" not in output
