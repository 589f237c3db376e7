"""``--profile``: the trace of all ranks on one clock keeps cause before effect, and is found where it is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hetero_megatron.training.profile import offsets
from tests.support.programs import inside, run_ranks

PLAN = """
version: 1
seq_length: 48
global_batch_size: 4
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 4
    stages:
      - {ranks: 0, layers: [0, 2]}
      - {ranks: 1, layers: [2, 4]}
      - {ranks: 2, layers: [4, 5]}
      - {ranks: 3, layers: [5, 6]}
"""
WORDS = ["--model", "tiny", "--mock-data", "--lr", "1e-3", "--save-interval", "0"]


@pytest.mark.slow
def test_sends_end_after_they_begin_on_the_other_side(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    words = [*WORDS, "--plan", str(tmp_path / "plan.yaml"), "--train-iters", "6", "--save", str(tmp_path / "run")]
    profile = ["--profile", "--profile-step-start", "3", "--profile-step-end", "5", "--use-pytorch-profiler"]
    out, _ = run_ranks(4, [*words, *profile, "--profile-ranks", "1"])
    folder = tmp_path / "run" / "profile"
    assert str(folder / "trace.json") in out and "clocks of ranks agree within" in out and "profiled steps took" in out
    found = json.loads((folder / "trace.json").read_text())
    errors = {int(rank): error for rank, error in found["otherData"]["clock_error_us"].items()}
    assert set(errors) == {0, 1, 2, 3} and errors[0] == 0.0
    assert all(0 <= error < 1e5 for error in errors.values())
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    ends = {(e["pid"], e["args"]["step"], e["name"]): (e["ts"], e["ts"] + e["dur"]) for e in events}
    assert {e["args"]["step"] for e in events} == {4, 5}
    compared = 0
    for (rank, step, name), (_, end) in ends.items():
        if not name.startswith("RECV"):
            continue
        sender = rank - 1 if name.startswith("RECV_F") else rank + 1
        sent = ends[sender, step, name.replace("RECV", "SEND")]
        # What is received was sent before, and computed before that, within what the trace says of its clocks.
        compute = ends[sender, step, name.replace("RECV_F", "F").replace("RECV_B", "B")]
        assert end >= sent[0] - errors[rank] - errors[sender], (rank, step, name)
        assert end >= compute[1] - errors[rank] - errors[sender], (rank, step, name)
        compared += 1
    assert compared == 2 * 2 * 3 * 4  # steps, directions, boundaries, micro-batches
    assert [path.name for path in folder.glob("torch-*")] == ["torch-rank-1.json"]
    assert "step 4" in (folder / "torch-rank-1.json").read_text()


def test_offsets_of_clocks_are_inside_their_interval() -> None:
    torch.manual_seed(0)
    true = torch.tensor([0.0, 17.25, -3.5])
    for _ in range(50):
        begin = torch.arange(16, dtype=torch.float64)[None] + torch.rand(3, 16, dtype=torch.float64) * 1e-3
        end = begin.max(0).values + torch.rand(3, 16, dtype=torch.float64) * 1e-3
        readings = [torch.stack([begin[r] + true[r], end[r] + true[r]], 1) for r in range(3)]
        for offset, known in zip(offsets(readings), true.tolist(), strict=True):
            assert abs(offset.seconds - known) <= offset.error + 1e-12 and offset.error < 2e-3


def test_a_run_that_ends_earlier_writes_what_it_has(tmp_path: Path) -> None:
    words = [*WORDS, "--seq-length", "48", "--micro-batch-size", "1", "--train-iters", "2", "--save", str(tmp_path)]
    out, _ = inside([*words, "--profile", "--profile-step-start", "1", "--profile-step-end", "9"])
    assert "trace.json" in out
    names = {e["name"] for e in json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]}
    assert "step 2" in names and "step 1" not in names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--profile"], "--save"),
        (["--profile", "--profile-step-start", "5", "--profile-step-end", "5", "--save", "x"], "no step is profiled"),
    ],
)
def test_refusals(words: list[str], said: str) -> None:
    _, err = inside([*WORDS[:-2], "--seq-length", "48", "--micro-batch-size", "1", "--train-iters", "2", *words], 2)
    assert said in err and len(err.strip().splitlines()) == 1
