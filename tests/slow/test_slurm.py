"""SLURM from Debian's packages, all on this machine: a heterogeneous job, and ranks that srun started."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.programs import inside
from tests.support.slurm import Slurm, missing

pytestmark = [pytest.mark.slow, pytest.mark.testbed("hosts")]
PLAN = """
version: 1
seq_length: 48
global_batch_size: 4
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 4
    stages: [{ranks: 0, layers: [0, 3]}, {ranks: 1, layers: [3, 5]}, {ranks: 2, layers: [5, 6]}]
"""
CLUSTER = """
version: 1
nodes:
  - {name: big, count: 2, chip: large, partition: big, hosts: [127.0.0.2, 127.0.0.3], interface: lo}
  - {name: small, chip: little, partition: small, hosts: [127.0.0.4], interface: lo}
chips: {large: {memory: 2 GiB}, little: {memory: 1 GiB}}
"""
WORDS = ["--model", "tiny", "--mock-data", "--fp64", "--lr", "1e-3", "--lr-decay-style", "constant"]
WORDS += ["--log-interval", "1"]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if reason := missing():
        pytest.skip(reason)
    with Slurm(tmp_path_factory.mktemp("slurm"), {"big": ["big-0", "big-1"], "small": ["small"]}) as found:
        yield found


def losses(directory: Path) -> list[float]:
    path = directory / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row["loss"] for row in rows if "loss" in row]


def words(folder: Path, steps: int, *more: str) -> list[str]:
    (folder / "plan.yaml").write_text(PLAN)
    (folder / "cluster.yaml").write_text(CLUSTER)
    files = ["--plan", str(folder / "plan.yaml"), "--train-iters", str(steps), "--save", str(folder / "run")]
    return [*WORDS, *files, "--load", str(folder / "run"), "--cluster", str(folder / "cluster.yaml"), *more]


def expected(folder: Path, steps: int) -> list[float]:
    more = ["--seq-length", "48", "--global-batch-size", "4", "--micro-batch-size", "1"]
    inside([*WORDS, *more, "--train-iters", str(steps), "--save", str(folder / "alone"), "--save-interval", "0"])
    return losses(folder / "alone")


def test_a_het_job_trains_is_stopped_and_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    steps = 400
    every = ("--save-interval", "100")
    command = [sys.executable, "-m", "hetero_megatron.cli.main", "launch", "--cluster", str(tmp_path / "cluster.yaml")]
    submit = [*command, "--via", "slurm", "--submit", "--out", str(tmp_path / "job.sh"), "--", "pretrain_gpt.py"]
    (tmp_path / "cluster.yaml").write_text(CLUSTER)

    def sbatch(count: int) -> str:
        """The number of a job that trains up to step ``count``."""
        line = [*submit, *words(tmp_path, count, *every)]
        done = subprocess.run(line, env=slurm.environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[-1]

    job = sbatch(steps)
    assert "#SBATCH hetjob" in (tmp_path / "job.sh").read_text()
    log, end = ROOT / f"slurm-{job}.out", time.monotonic() + 120
    try:
        while len(losses(tmp_path / "run")) < 5:
            assert time.monotonic() < end and slurm.call("squeue", "--noheader").stdout.strip(), log.read_text()
            time.sleep(0.1)
        slurm.call("scancel", "--signal=TERM", job)
        slurm.until_no_job()
        stopped = len(losses(tmp_path / "run"))
        assert 5 <= stopped < steps and "received SIGTERM" in log.read_text(), log.read_text()
    finally:
        log.unlink(missing_ok=True)
    log = ROOT / f"slurm-{sbatch(stopped + 3)}.out"
    try:
        slurm.until_no_job()
        said = log.read_text()
    finally:
        log.unlink(missing_ok=True)
    found = losses(tmp_path / "run")
    assert len(found) == stopped + 3, said
    reference = expected(tmp_path, stopped + 3)
    assert found == pytest.approx(reference, rel=1e-9)


def test_tasks_of_srun_are_ranks_matched_by_host_name(slurm: Slurm, tmp_path: Path) -> None:
    training = words(tmp_path, 2, "--save-interval", "0")
    # The nodes in another order than the file has them: ranks are found by name.
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --partition=small --nodes=1 --ntasks-per-node=1 --output={tmp_path}/out\n"
        "#SBATCH hetjob\n#SBATCH --partition=big --nodes=2 --ntasks-per-node=1\n"
        "export MASTER_ADDR=127.0.0.1 MASTER_PORT=29731\n"
        f"exec srun --het-group=0,1 {sys.executable} pretrain_gpt.py {' '.join(training)}\n"
    )
    done = subprocess.run(
        ["sbatch", "--wait", str(script)], env=slurm.environment, cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    said = (tmp_path / "out").read_text()
    assert done.returncode == 0, said + done.stderr
    assert losses(tmp_path / "run") == pytest.approx(expected(tmp_path, 2), rel=1e-9), said


def test_a_partition_that_lacks_the_nodes_is_said(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(CLUSTER.replace("partition: small", "partition: tiny"))
    command = [sys.executable, "-m", "hetero_megatron.cli.main", "launch", "--cluster", str(tmp_path / "cluster.yaml")]
    done = subprocess.run(
        [*command, "--via", "slurm", "--submit", "--", "x.py"], env=slurm.environment, capture_output=True, text=True
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "partition" in done.stderr
