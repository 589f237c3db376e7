"""A rank that dies, hangs or meets bad data ends the job within the time-out; every survivor says whom it waited for,
and in what."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.programs import Program, start_ranks

TIMEOUT = 5.0  # seconds that a rank waits for another
PLAN = """
version: 1
seq_length: 32
global_batch_size: 6
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 4
    stages:
      - {ranks: [0, 1], layers: [0, 4], tp: 2}
      - {ranks: 2, layers: [4, 6]}
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 3, layers: [0, 6]}]}
"""
TWO_REPLICAS = """
version: 1
seq_length: 32
global_batch_size: 4
pipelines:
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 0, layers: [0, 6]}]}
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 1, layers: [0, 6]}]}
"""
MESSAGE = re.compile(r"^error: rank (\d), in (.+), waited ([\d.]+) s for rank ([\d, ]+) and got no answer", re.M)


def start(
    directory: Path, plan: str, ranks: int, *data: str, own: Mapping[int, Sequence[str]] | None = None
) -> list[Program]:
    """A run without a launcher; ``own``: further flags of some ranks."""
    (directory / "plan.yaml").write_text(plan)
    words = ["--plan", str(directory / "plan.yaml"), "--model", "tiny", *data, "--train-iters", "100000"]
    words += ["--lr", "1e-3", "--save", str(directory / "run"), "--distributed-timeout-minutes", str(TIMEOUT / 60)]
    return start_ranks(ranks, words, own)


FROZEN = pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.slow)


@pytest.mark.parametrize(("how", "victim"), [(signal.SIGKILL, 2), FROZEN])
def test_survivors_end_and_say_why(how: signal.Signals, victim: int, tmp_path: Path) -> None:
    ranks = start(tmp_path, PLAN, 4, "--mock-data")
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 240
        while not (metrics.exists() and metrics.read_text().count("\n") >= 2) and time.monotonic() < deadline:
            assert all(p.poll() is None for p in ranks), [p.communicate()[1] for p in ranks if p.poll() is not None]
            time.sleep(0.1)
        assert metrics.exists(), "no step within the deadline"
        ranks[victim].send_signal(how)
        named, said = set(), []
        for rank, process in enumerate(ranks):
            if rank == victim:
                continue
            _, err = process.communicate(timeout=240)
            assert process.returncode == 3, err
            assert "Traceback" not in err
            found = MESSAGE.search(err)
            assert found and int(found[1]) == rank, err
            assert re.search(r"pipeline \d stage \d, |gradient synchronisation|the optimizer step", found[2])
            named |= set(map(int, found[4].split(", ")))
            said.append(err)
        assert victim in named  # some survivor waited for the victim itself, and knows what became of it
        what = {signal.SIGKILL: "is gone", signal.SIGSTOP: "hangs"}[how]
        assert any(re.search(rf"rank (\d, )*{victim}(, \d)* {what}", err) for err in said), said
    finally:
        for process in ranks:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_bad_data_that_one_rank_meets_ends_the_others_too(tmp_path: Path) -> None:
    """A sample is a line and one token of the next. In step 21 rank 0 reads lines 81 to 83, rank 1 lines 83 to 85."""
    lines = [json.dumps({"text": f"{i:031d}"}) for i in range(128)]
    lines[84] = "{broken"
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    flags = ("--data-path", str(tmp_path / "data.jsonl"), "--dataloader-type", "streaming")
    ranks = start(tmp_path, TWO_REPLICAS, 2, *flags, "--split", "1", "--eval-iters", "0", "--num-workers", "0")
    try:
        (_, survivor), (_, met) = (process.communicate(timeout=240) for process in ranks)
        assert [process.returncode for process in ranks] == [3, 2], survivor + met
        assert "data.jsonl:85" in met and "not JSON" in met and "Traceback" not in met + survivor
        found = MESSAGE.search(survivor)
        assert found and (found[1], found[4]) == ("0", "1"), survivor
        steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in steps if "loss" in row] == list(range(1, 21))
    finally:
        for process in ranks:
            process.kill()
            process.wait()
