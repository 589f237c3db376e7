"""``hetero-megatron top``: what is shown of a run, against its files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from hetero_megatron.cli.main import main
from hetero_megatron.monitoring.live_view import live_view, render, sparkline
from hetero_megatron.monitoring.run_files import read_run
from tests.unit.training.test_report import run_dir  # noqa: F401


def shown(directory: Path, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render(live_view(read_run(str(directory))), "run"))
    return out.getvalue()


def test_figures_are_those_of_the_files(run_dir: Path) -> None:  # noqa: F811
    (run_dir / "events.jsonl").write_text(
        "".join(line + "\n" for line in (run_dir / "events.jsonl").read_text().splitlines() if '"end"' not in line)
    )
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "loss" in row][-1]
    view = live_view(read_run(str(run_dir)), now=1000.0, written=900.0)
    assert (view.step, view.steps, view.loss) == (last["step"], 12, pytest.approx(last["loss"]))
    assert view.eta == 0.0 and not view.ended and view.silent == 100.0
    assert view.tokens_per_second == pytest.approx(last["tokens"] / last["step_seconds"])
    assert [load.rank for load in view.ranks] == [0, 1, 2, 3]
    assert [load.busy for load in view.ranks] == pytest.approx([v / 2.0 for v in last["busy_seconds"]])
    assert [load.bubble for load in view.ranks] == pytest.approx([0.25] * 4)
    text = shown(run_dir)
    for words in ("step 12/12", "loss 3.8000", "ETA 0s", "big", "small", "falls behind", "busy", "bubble", "waiting"):
        assert words in text, text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_the_terminal(run_dir: Path, width: int) -> None:  # noqa: F811
    assert all(len(line) <= width for line in shown(run_dir, width).splitlines())


def test_an_ended_run_says_how(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(["top", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "done: 12 steps" in out and "ETA" not in out


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(tmp_path / "none")]) == 2 and main(["top", str(tmp_path), "--interval", "0"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2


def test_sparklines() -> None:
    assert sparkline([]) == "" and sparkline([1.0, 1.0]) == "▁▁" and sparkline([0.0, 7.0, 3.0]) == "▁█▄"
