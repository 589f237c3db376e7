"""A node of the testbed is lost, a rank freezes, a chip slows down in mid-run: the launcher goes on, and the loss curve
is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hetero_megatron.testbed.machine import examine
from hetero_megatron.training.metrics import FILE as METRICS
from tests.faults import children
from tests.test_end_to_end import ENVIRONMENT, ROOT
from tests.test_resume import inside
from tests.test_supervise import SINGLE, THREE, TWO, losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
LINKS = "paced" if examine().no_namespaces() else "namespaces"
CLUSTER = """
version: 1
nodes:
  - {name: fast, chip: big}
  - {name: slow, count: 2, chip: small}
chips:
  big:   {memory: 2 GiB, emulate: {speed: 0.6}}
  small: {memory: 1 GiB, emulate: {speed: 0.3}}
links:
  inter_node: {bandwidth: 50 MB/s}
  pairs: [{between: [fast, slow], bandwidth: 25 MB/s}]
"""
HETERO = [sys.executable, "-m", "hetero_megatron.cli.main"]
STEPS = 14
TRAIN = ["--model", "tiny", "--mock-data", "--fp64", "--lr", "1e-3", "--lr-decay-style", "constant"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    path = tmp_path_factory.mktemp("undisturbed")
    (path / "plan.yaml").write_text(SINGLE)
    inside(["--plan", str(path / "plan.yaml"), "--save", str(path / "run"), *TRAIN, "--train-iters", str(STEPS)])
    return losses(path)


def launch(path: Path, options: list[str], flags: list[str]) -> subprocess.Popen[str]:
    for name, text in (("cluster", CLUSTER), ("three", THREE), ("two", TWO)):
        (path / f"{name}.yaml").write_text(text)
    words = [*HETERO, "run", "--testbed", "--cluster", str(path / "cluster.yaml"), "--plan", str(path / "three.yaml")]
    words += [*options, "--", "--save", str(path / "run"), "--load", str(path / "run"), *TRAIN, *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def until(condition: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while not condition() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def fault(job: subprocess.Popen[str], *words: str) -> None:
    """With the id of the testbed that this job's launcher has started."""
    status = subprocess.run([*HETERO, "testbed", "status", "--json"], cwd=ROOT, capture_output=True, text=True)
    mine, beds = children(job.pid), json.loads(status.stdout)["testbeds"]
    found = [bed["id"] for bed in beds if int(bed["id"][1:].split("s")[0]) in mine]  # pPIDsSTART
    assert len(found) == 1, (status.stdout, mine)
    command = [*HETERO, "testbed", "fault", "--testbed", found[0], *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def finish(job: subprocess.Popen[str]) -> str:
    try:
        output = job.communicate(timeout=900)[0]
        assert job.returncode == 0, output
        return output
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.wait()


@pytest.mark.parametrize(
    ("what", "victim", "policy"), [("kill", 1, "replan"), ("freeze", 2, "replan"), ("kill", 0, "restart")]
)
def test_a_lost_node_of_the_testbed(
    what: str, victim: int, policy: str, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    options = ["--chips", "none", "--links", LINKS, "--on-failure", policy, "--grace", "40"]
    options += ["--fallback-plan", str(tmp_path / "two.yaml")]
    job = launch(
        tmp_path, options,
        ["--train-iters", str(STEPS), "--save-interval", "2", "--distributed-timeout-minutes", "0.3"],
    )  # fmt: skip
    try:
        until((tmp_path / "run" / "latest").exists, job)
        fault(job, what, str(victim))
    finally:
        output = finish(job)
    assert f"done: {STEPS} steps" in output and "loaded" in output, output
    if policy == "replan":
        assert f"without slow-{victim - 1}, 2 ranks left, plan {tmp_path / 'two.yaml'}" in output, output
    seen = losses(tmp_path)
    assert sorted(seen) == sorted(undisturbed)
    for step, loss in undisturbed.items():
        assert seen[step] == pytest.approx(loss, rel=1e-10)


def test_a_chip_that_slows_down_is_planned_around(tmp_path: Path) -> None:
    """By the emulated clock, so that a busy machine slows nothing but the test."""
    options = ["--chips", "clock", "--links", "paced", "--on-failure", "restart", "--max-replans", "1"]
    steps = 48
    job = launch(tmp_path, options, ["--train-iters", str(steps), "--replan-on-drift", "1.6", "--log-straggler"])
    metrics = tmp_path / "run" / METRICS
    try:
        until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 24, job)  # its own baseline is known
        fault(job, "slow-chip", "1", "0.05")
    finally:
        output = finish(job)
    assert f"done: {steps} steps" in output, output
    assert "rank 1 (small) falls behind" in output and "slow-0 takes" in output, output
    cluster = yaml.safe_load((tmp_path / "run" / "cluster-round-1.yaml").read_text())
    factor = 0.3 / cluster["chips"]["small on slow-0"]["emulate"]["speed"]
    assert factor == pytest.approx(6.0, rel=0.1)  # 0.3 -> 0.05: the emulated seconds are exact
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, steps + 1))  # an orderly stop: no step was run twice
    assert output.count("launcher: round 1:") == 1 and "not looked for any more" in output
    assert os.path.exists(tmp_path / "run" / "plan-round-1.yaml")
