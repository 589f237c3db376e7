"""Logs of a run that was started again hold each step once: metrics.jsonl, TensorBoard, Weights & Biases."""

from __future__ import annotations

import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.metrics import MetricsWriter, Resumed, StepMetrics
from hetero_megatron.monitoring.record import add_event
from tests.support.programs import Program, inside

WORDS = ["--mock-data", "--seq-length", "16", "--micro-batch-size", "1", "--global-batch-size", "2", "--lr", "1e-3"]
WORDS += ["--model", "tiny", "--log-interval", "1", "--save-interval", "3", "--eval-interval", "4", "--eval-iters", "1"]


def step(number: int, loss: float = 1.0) -> StepMetrics:
    return StepMetrics(number, 2 * number, loss, 1.0, 1e-3, 32, 0.1)


def lines(directory: Path, key: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [line for line in map(json.loads, (directory / name).read_text().splitlines()) if key in line]


def curve(directory: Path, tag: str) -> list[tuple[int, float]]:
    """As TensorBoard shows it."""
    events = EventAccumulator(str(directory))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(tag)]


@pytest.mark.slow
def test_each_step_stands_once_whatever_checkpoint_a_run_goes_on_from(tmp_path: Path) -> None:
    run, board = tmp_path / "run", tmp_path / "board"
    words = [*WORDS, "--train-iters", "8", "--save", str(run), "--load", str(run), "--tensorboard-dir", str(board)]
    inside([*words, "--exit-interval", "5"])
    inside([*words, "--exit-interval", "7", "--ckpt-step", "3"])  # an older checkpoint
    for _ in range(2):  # the second has nothing left to do, and evaluates again
        inside(words)
    steps = lines(run, "loss")
    assert [s["step"] for s in steps] == list(range(1, 9))
    assert curve(board, "lm loss") == [(s["step"], pytest.approx(s["loss"])) for s in steps]
    for found in (curve(board, "lm loss validation"), [(v["step"], 0) for v in lines(run, "validation_loss")]):
        assert [at for at, _ in found] == [4, 7, 8]
    assert [s["step"] for s in lines(run, "loss", "metrics.replaced.jsonl")] == [4, 5]
    inside([*words, "--eval-iters", "0"])  # nothing at all to do: nothing is taken out
    assert [v["step"] for v in lines(run, "validation_loss")] == [4, 7, 8]
    inside([*words, "--skip-train", "--ckpt-step", "3"])  # trains nothing, so nothing later is taken out
    assert [s["step"] for s in lines(run, "loss")] == list(range(1, 9)) and len(curve(board, "lm loss")) == 8
    elsewhere = [*WORDS, "--train-iters", "8", "--load", str(run), "--ckpt-step", "6", "--save", str(tmp_path / "b")]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')  # of some other run
    inside(elsewhere)
    assert [s["step"] for s in lines(tmp_path / "b", "loss")] == [7, 8]
    assert [s["loss"] for s in lines(tmp_path / "b", "loss", "metrics.1.jsonl")] == [1.0]


def test_a_run_that_is_killed_loses_no_step_up_to_its_checkpoint(tmp_path: Path) -> None:
    run, board = tmp_path / "run", tmp_path / "board"
    words = [*WORDS, "--save", str(run), "--load", str(run), "--tensorboard-dir", str(board), "--sync-save"]
    process = Program([*words, "--train-iters", "100000"])
    deadline = time.monotonic() + 240
    while not (run / "iter_0000006").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    inside([*words, "--train-iters", "100000", "--exit-interval", "9"])
    steps = [s["step"] for s in lines(run, "loss")]
    assert steps == list(range(1, steps[-1] + 1)) and steps[-1] >= 9
    assert [at for at, _ in curve(board, "lm loss")] == steps


def test_torn_foreign_and_repeated_lines_are_kept_apart(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path))
    writer.emulation(0, {"chips": "clock"})
    for number in (1, 2, 3, 4):
        writer.step(step(number))
        writer.validation(number, 2.0)
    writer.emulation(4, {"invalid": True})
    writer.close()
    file = tmp_path / "metrics.jsonl"
    with file.open("ab") as more:  # by an older version that repeated steps; by hand; by a process that died in a write
        more.write(b'{"step": 2, "loss": 7.0}\nnonsense\n[1]\n\xff\n{"step": "3"}\n{"step": 3, "lo')
    os.chmod(file, 0o600)
    MetricsWriter(str(tmp_path), resumed=Resumed(3)).step(step(4, 9.0))
    assert [(s["step"], s["loss"]) for s in lines(tmp_path, "loss")] == [(1, 1.0), (3, 1.0), (2, 7.0), (4, 9.0)]
    assert [v["step"] for v in lines(tmp_path, "validation_loss")] == [1, 2, 3]
    assert len(lines(tmp_path, "emulation")) == 2, "they say what the part of the run was that made the steps"
    removed = (tmp_path / "metrics.replaced.jsonl").read_bytes()
    assert removed.count(b"\n") == 8 and removed.endswith(b'{"step": 3, "lo\n') and b"nonsense" in removed
    assert not list(tmp_path.glob(".*"))


def test_an_event_follows_a_torn_one_on_a_line_of_its_own(tmp_path: Path) -> None:
    add_event(tmp_path, "start", "one")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "ki')
    add_event(tmp_path, "end", "two")
    assert [e["text"] for e in lines(tmp_path, "text", "events.jsonl")] == ["one", "two"]


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda p: p.symlink_to("elsewhere")])
def test_what_is_no_file_is_no_log(make: Any, tmp_path: Path) -> None:
    for name, write in (
        ("metrics.jsonl", lambda: MetricsWriter(str(tmp_path), resumed=Resumed(1))),
        ("events.jsonl", lambda: add_event(tmp_path, "end", "")),
    ):
        make(tmp_path / name)
        with pytest.raises(UserError, match="a FIFO|a directory|a link|No such file"):
            write()
    assert not (tmp_path / "elsewhere").exists()


class Service:
    """W&B's rules, as its documentation has them: an id names a run, whose steps only grow."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[int, dict[str, float]]] = {}

    def init(self, **options: Any) -> Any:
        known = options.get("id", f"new-{len(self.runs)}")
        assert known not in self.runs or options.get("resume") == "allow"
        history = self.runs.setdefault(known, {})
        run = types.SimpleNamespace(step=max(history) + 1 if history else 0, finish=lambda: None)

        def log(values: dict[str, float], step: int) -> None:
            assert step >= run.step, "W&B drops it, with a warning"
            run.step = step
            history.setdefault(step, {}).update(values)

        run.log = log
        return run


def test_a_run_goes_on_in_its_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=service.init))
    for first, end, resumed in ((1, 5, None), (4, 8, Resumed(3)), (9, 8, Resumed(8, trains=False))):
        writer = MetricsWriter(str(tmp_path), wandb={"project": "p"}, resumed=resumed)
        for number in range(first, end + 1):
            writer.step(step(number))
        writer.validation(8, 2.0) if end == 8 else None
        writer.close()
    ((_, history),) = service.runs.items()
    assert list(history) == list(range(1, 9)) and set(history[8]) > {"lm loss validation"}
    MetricsWriter(str(tmp_path), wandb={"project": "p"}).step(step(1))  # another run
    assert len(service.runs) == 2
    (tmp_path / "wandb.json").write_text('{"id": "../x"}')
    with pytest.raises(UserError, match="wandb.json: id = ../x: is not the name of a run of W&B"):
        MetricsWriter(str(tmp_path), wandb={"project": "p"}, resumed=Resumed(1))
