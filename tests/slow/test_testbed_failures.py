"""A node of the testbed is lost, a chip slows down in mid-run: the launcher goes on, and the loss curve is that of an
undisturbed run. (Nodes that stay away and ranks that freeze: ``tests/slow/test_island_jobs.py``; links that are cut:
``tests/slow/test_cut_links.py``.)"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from hetero_megatron.monitoring.metrics import FILE as METRICS
from tests.distributed.training.test_supervise import assert_same_losses, run_alone
from tests.support.testbed_jobs import LINKS, STEPS, TRAIN, TestbedRun, metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.testbed]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return run_alone(tmp_path_factory.mktemp("undisturbed"), [*TRAIN, "--train-iters", str(STEPS)])


@pytest.mark.exhaustive
def test_a_lost_node_of_the_testbed_comes_back(undisturbed: dict[int, float], tmp_path: Path) -> None:
    options = ["--chips", "none", "--links", LINKS, "--on-failure", "restart", "--grace", "40"]
    options += ["--fallback-plan", str(tmp_path / "two.yaml")]
    run = TestbedRun(
        tmp_path, options,
        ["--train-iters", str(STEPS), "--save-interval", "2", "--distributed-timeout-minutes", "0.3"],
    )  # fmt: skip
    try:
        run.until((tmp_path / "run" / "latest").exists)
        run.fault("kill", "0")
    finally:
        output = run.finish()
    assert f"done: {STEPS} steps" in output and "loaded" in output, output
    assert_same_losses(tmp_path, undisturbed)
    assert not run.left()


@pytest.mark.skipif(LINKS == "paced", reason="ranks cannot pace links whose ends change")
def test_a_rank_is_lost_and_the_others_stay(undisturbed: dict[int, float], tmp_path: Path) -> None:
    """What is left of the testbed goes on in its processes; the store is beyond the nodes."""
    options = ["--elastic", "--chips", "none", "--links", LINKS, "--fallback-plan", str(tmp_path / "two.yaml")]
    run = TestbedRun(tmp_path, options, ["--train-iters", str(STEPS)])
    written = tmp_path / "run" / METRICS
    try:
        run.until(lambda: written.exists() and written.read_text().count("\n") >= 3)
        run.fault("kill", "2")
    finally:
        output = run.finish()
    assert "elastic: epoch 1: lost rank 2 (slow-1, chip 0): SIGKILL; 2 ranks went on" in output, output
    assert "from memory" in output
    assert_same_losses(tmp_path, undisturbed)
    assert not run.left()


@pytest.mark.skipif(LINKS == "paced", reason="ranks cannot pace links whose ends change")
def test_a_chip_that_slows_down_is_planned_around_in_place(tmp_path: Path) -> None:
    """The ranks stay: nothing is read, and no step is done twice."""
    options = ["--elastic", "--chips", "clock", "--links", LINKS, "--max-replans", "1"]
    steps = 48
    run = TestbedRun(tmp_path, options, ["--train-iters", str(steps), "--replan-on-drift", "1.6"])
    written = tmp_path / "run" / METRICS
    try:
        run.until(lambda: written.exists() and written.read_text().count("\n") >= 24)  # its own baseline is known
        run.fault("slow-chip", "1", "0.05")
    finally:
        output = run.finish()
    assert f"done: {steps} steps" in output and "rank 1 (small) falls behind" in output, output
    assert "elastic: epoch 1: slow-0 takes" in output and "loaded" not in output, output
    cluster = yaml.safe_load((tmp_path / "run" / "cluster-drift-0.yaml").read_text())
    factor = 0.3 / cluster["chips"]["small on slow-0"]["emulate"]["speed"]
    assert factor == pytest.approx(6.0, rel=0.1)
    assert [r["step"] for r in metrics(tmp_path)] == list(range(1, steps + 1))


@pytest.mark.exhaustive  # CI has it in place
def test_a_chip_that_slows_down_is_planned_around(tmp_path: Path) -> None:
    """By the emulated clock, so that a busy machine slows nothing but the test."""
    options = ["--chips", "clock", "--links", "paced", "--on-failure", "restart", "--max-replans", "1"]
    steps = 48
    run = TestbedRun(tmp_path, options, ["--train-iters", str(steps), "--replan-on-drift", "1.6", "--log-straggler"])
    written = tmp_path / "run" / METRICS
    try:
        run.until(lambda: written.exists() and written.read_text().count("\n") >= 24)  # its own baseline is known
        run.fault("slow-chip", "1", "0.05")
    finally:
        output = run.finish()
    assert f"done: {steps} steps" in output, output
    assert "rank 1 (small) falls behind" in output and "slow-0 takes" in output, output
    cluster = yaml.safe_load((tmp_path / "run" / "cluster-round-1.yaml").read_text())
    factor = 0.3 / cluster["chips"]["small on slow-0"]["emulate"]["speed"]
    assert factor == pytest.approx(6.0, rel=0.1)  # 0.3 -> 0.05: the emulated seconds are exact
    assert [r["step"] for r in metrics(tmp_path)] == list(range(1, steps + 1))  # an orderly stop: no step twice
    assert output.count("launcher: round 1:") == 1 and "not looked for any more" in output
    assert os.path.exists(tmp_path / "run" / "plan-round-1.yaml")
