"""SIGKILL to a random rank at a random moment, during saves included: the same final loss, and no process left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.support.faults import PLANS, STEPS, ForkedJob, kill_run, losses
from tests.support.selection import quick

SEED = int(os.environ.get("SEED", "1"))
COUNT = int(os.environ.get("N", "1"))

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=quick(PLANS, [], ["divided"]))
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[int, float]]:
    """(name of a plan, its losses by step)."""
    path = tmp_path_factory.mktemp("undisturbed")
    job = ForkedJob(path, 0, request.param)
    try:
        deadline = time.monotonic() + 900
        while job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert job.returncode == 0, job.output()
    finally:
        job.kill()
    return request.param, losses(path)


@pytest.mark.parametrize("index", range(COUNT))
def test_a_killed_rank_changes_nothing(
    index: int, undisturbed: tuple[str, dict[int, float]], tmp_path: Path
) -> None:
    """Every tenth under torchrun's elastic agent, the others under one of the tests' own that starts ranks faster."""
    plan, without_loss = undisturbed
    killed = kill_run(tmp_path, SEED + index, plan, under_torchrun=index % 10 == 0 and plan == "offloaded")
    print(f"{plan}, seed {SEED + index}: killed rank {killed.rank} at {killed.moment}")
    assert sorted(killed.final) == sorted(without_loss) == list(range(1, STEPS + 1))
    assert killed.final == without_loss  # the same plan: bit for bit
