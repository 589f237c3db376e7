"""Outer steps between two islands of the testbed, of which one is frozen for a while, cut off for a while, and lost:
waiting changes no number, and the other island goes on by itself, from memory, or from the global weights of the last
checkpoint."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from tests.support.programs import run_ranks
from tests.support.testbed_jobs import CLUSTER, LINKS, TRAIN, TestbedRun, metrics

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(900), pytest.mark.testbed]
STEPS, WAIT = 60, 1.5  # seconds, in which some outer steps would have been taken
ISLANDS = """
version: 1
seq_length: 48
global_batch_size: 4
outer: {islands: [0, 1], every: 4, fragments: 2, delay: 1, compress: int8, optimizer: {lr: 1, momentum: 0.4}}
pipelines:
  - {micro_batch_size: 1, num_micro_batches: 3, stages: [{ranks: 0, layers: [0, 6]}]}
  - {micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 1, layers: [0, 6]}]}
"""
ONE = """
version: 1
seq_length: 48
global_batch_size: 4
pipelines: [{micro_batch_size: 4, num_micro_batches: 1, stages: [{ranks: 0, layers: [0, 6]}]}]
"""


HOW = {  # flags; what is said
    "elastic": (["--elastic"], "island 1 is left out, with up to"),
    "replan": (["--on-failure", "replan"], "here are 1: what the others went since the last exchange is left out"),
    "without outer steps": (["--on-failure", "replan", "--fallback-plan", "{}/two.yaml"],
                            "and the plan has none: it goes on from the global weights"),
}  # fmt: skip


@pytest.mark.parametrize("how", HOW)
def test_an_island_is_late_and_then_lost(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("THREE", ISLANDS), ("TWO", ONE), ("CLUSTER", CLUSTER.replace("count: 2, ", ""))):
        monkeypatch.setattr(f"tests.support.testbed_jobs.{name}", text)
    more, said = HOW[how]
    options = ["--chips", "none", "--links", LINKS, "--grace", "60", *(word.format(tmp_path) for word in more)]
    flags = ["--train-iters", str(STEPS), "--save-interval", "6", "--distributed-timeout-minutes", "0.3"]
    run = TestbedRun(tmp_path, options, flags)
    written = tmp_path / "run" / "metrics.jsonl"

    def taken() -> int:
        return written.read_text().count("\n") if written.exists() else 0

    try:
        run.until((tmp_path / "run" / "latest").exists)
        for fault, mended in ((["freeze", "1"], ["thaw", "1"]), (["cut", "fast", "slow"], ["mend", "fast", "slow"])):
            run.fault(*fault)
            time.sleep(WAIT)
            run.fault(*mended)
            before = taken()
            run.until(lambda before=before: taken() >= before + 3)  # type: ignore[misc]
        run.fault("kill", "1")
    finally:
        output = run.finish()
    assert f"done: {STEPS} steps" in output and said in output, output
    rows = metrics(tmp_path)
    assert [row["consumed_samples"] for row in rows] == [4 * step for step in range(1, STEPS + 1)]
    assert not run.left()

    (tmp_path / "alone").mkdir()
    words = ["--plan", str(tmp_path / "three.yaml"), "--save", str(tmp_path / "alone" / "run"), "--save-interval", "0"]
    run_ranks(2, [*words, *TRAIN, "--train-iters", str(STEPS)])
    undisturbed = [row["loss"] for row in metrics(tmp_path / "alone")]
    found = [row["loss"] for row in rows]
    same = [math.isclose(a, b, rel_tol=1e-10) for a, b in zip(found, undisturbed, strict=True)]
    lost = same.index(False)
    print(f"lost after step {lost}; mean of the last 10 losses: {sum(found[-10:]) / 10:.4f}, "
          f"undisturbed {sum(undisturbed[-10:]) / 10:.4f}")  # fmt: skip
    assert lost >= 6 and (lost % 6 == 0 or how == "elastic") and all(map(math.isfinite, found))
    assert (sum(found[-10:]) - sum(undisturbed[-10:])) / 10 < 0.05  # it may learn faster: nothing is averaged any more
