"""Links of the testbed are cut in mid-run: ranks live that nobody reaches. The round ends with a diagnosis that says
who waited for whom, the launcher drops what is cut off, the loss curve goes on, and nothing is left behind."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.distributed.training.test_supervise import assert_same_losses, run_alone
from tests.support.testbed_jobs import LINKS, STEPS, TRAIN, TestbedRun

TIMEOUT = float(os.environ.get("CUT_TIMEOUT", "12"))  # seconds that a rank waits for another
SMALL = """
version: 1
seq_length: 48
global_batch_size: 4
pipelines: [{micro_batch_size: 1, num_micro_batches: 4, stages: [{ranks: [0, 1], layers: [0, 6], tp: 2, chip: small}]}]
"""
MESSAGE = re.compile(
    r"error: rank (\d), in ([^:]+), waited ([\d.]+) s for rank ([\d, ]+) and got no answer \(time-out ([\d.]+) s\): "
    r"rank ([\d, ]+) (cannot be reached|is gone|answers|hangs)"
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return run_alone(tmp_path_factory.mktemp("undisturbed"), [*TRAIN, "--train-iters", str(STEPS)])


MORE = pytest.mark.exhaustive
CASES = [
    # links that are cut, how they are made, what the launcher does, the node that goes, the plan that goes on
    pytest.param("slow-1 fast, slow-1 slow-0", LINKS, "replan", "slow-1", "two", id="a node is cut off", marks=MORE),
    pytest.param("fast slow-0, fast slow-1", LINKS, "replan", "fast", "small", id="the store's node"),
    pytest.param("slow-0 slow-1", LINKS, "replan", "slow-1", "two", id="one link", marks=MORE),
    pytest.param("slow-0 slow-1", LINKS, "restart", "", "three", id="restart", marks=MORE),
    pytest.param("slow-1 fast, slow-1 slow-0", "paced", "replan", "slow-1", "two", id="paced", marks=MORE),
]


@pytest.mark.slow
@pytest.mark.testbed
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("cuts", "links", "policy", "dropped", "plan"), CASES)
def test_a_cut_link(
    cuts: str, links: str, policy: str, dropped: str, plan: str, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    options = ["--chips", "none", "--links", links, "--on-failure", policy, "--grace", "60"]
    options += ["--fallback-plan", str(tmp_path / "two.yaml"), str(tmp_path / "small.yaml")]
    flags = ["--train-iters", str(STEPS), "--save-interval", "2"]
    run = TestbedRun(tmp_path, options, [*flags, "--distributed-timeout-minutes", str(TIMEOUT / 60)])
    pairs = [pair.split() for pair in cuts.split(", ")]
    try:
        run.until((tmp_path / "run" / "latest").exists)
        for a, b in pairs:
            run.fault("cut", a, b)
    finally:
        output = run.finish()
    assert f"done: {STEPS} steps" in output and "loaded" in output, output
    _check_diagnosis(output, pairs)
    if policy == "replan":
        assert f"without {dropped}, 2 ranks left, plan {tmp_path / plan}.yaml" in output, output
    else:
        assert "round 1: the same plan again" in output, output
    assert_same_losses(tmp_path, undisturbed)
    assert not run.left()


def _check_diagnosis(output: str, pairs: list[list[str]]) -> None:
    """Every rank ends by itself when the time-out is over and says whom it waited for; the launcher, what is cut."""
    assert "killed" not in output and "Traceback" not in output, output
    found = {int(m[1]): m for m in MESSAGE.finditer(output)}
    assert sorted(found) == [0, 1, 2], output
    for message in found.values():
        assert float(message[5]) == TIMEOUT and float(message[3]) < 5 * TIMEOUT, message[0]
    names = ["fast", "slow-0", "slow-1"]
    for a, b in pairs:
        first, second = sorted((a, b), key=names.index)
        assert f"launcher: {first} and {second} cannot reach each other" in output, output
        for rank, other in ((names.index(a), names.index(b)), (names.index(b), names.index(a))):
            assert found[rank][7] == "cannot be reached" and str(other) in found[rank][6], found[rank][0]
    for rank in found:
        assert re.search(rf"launcher: rank {rank}, in .+, waited [\d.]+ s for rank ", output), output
    assert re.search(r"launcher: rank \d \(\S+, chip 0\) ended with exit code 3", output), output
