"""What a run says about its experts: figures, the file for the planner, the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_megatron.cli.main import main
from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.console import COLUMNS, ConsoleLine, format_line, format_short
from hetero_megatron.monitoring.metrics import MetricsWriter, StepMetrics
from hetero_megatron.monitoring.throughput import ExpertTotals, figures_of
from hetero_megatron.parallel.balance import StepRouting
from hetero_megatron.plans.routing import RoutingStats, read_routing_stats, write_routing_stats
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.hf_config import from_hf_config
from tests.support.moe_models import MOE_FAMILIES

ROUTING = StepRouting(
    {0: torch.tensor([4, 2, 0, 2]), 1: torch.tensor([2, 2, 2, 2])}, torch.tensor([12, 4]),
    {"sequence loss": 1.25, "z-loss": 3.5},
)  # fmt: skip


def spec_of(**changes: Any) -> ModelSpec:
    return from_hf_config(MOE_FAMILIES["mixtral"] | changes)


def test_figures() -> None:
    found = figures_of(ROUTING)
    assert found.busiest == {0: 2.0, 1: 1.0} and found.worst == 2.0
    assert found.losses == {"load_balancing_loss": 1.25, "z_loss": 3.5}
    assert found.scalars()["moe/busiest rank"] == 1.5
    assert figures_of(StepRouting({0: torch.zeros(4, dtype=torch.int64)}, torch.zeros(1), {})).worst == 1.0


def test_the_console_line_shows_them_and_stays_short() -> None:
    found = figures_of(ROUTING)
    line = ConsoleLine(
        99, 100, 1, 0.5, 1e-4, 8, 2.5, 1.0, tokens_per_second=123_456.0, tflops=1.0, mfu=0.5,
        busiest=found.worst, balance=found.losses,
    )  # fmt: skip
    short = format_short(line)
    assert "experts 2.00x" in short and "balance 1.250" in short and len(short) <= COLUMNS
    assert "| lm loss: 2.500000E+00 | load_balancing_loss: 1.250000E+00 | z_loss: 3.500000E+00 |" in format_line(line)


def test_what_is_written_for_the_planner_is_read(tmp_path: Path) -> None:
    totals, path, spec = ExpertTotals(), str(tmp_path / "stats.json"), spec_of()
    for _ in range(3):
        totals.add(ROUTING)
    stats = totals.stats(top_k=2)
    assert stats == RoutingStats(12, {0: (12, 6, 0, 6), 1: (6, 6, 6, 6)})
    write_routing_stats(path, stats, spec)
    assert read_routing_stats(path, spec) == stats
    known = json.loads(Path(path).read_text())
    assert known["version"] == 1 and known["tokens"] == 12 and known["layers"]["0"] == [12, 6, 0, 6]
    with pytest.raises(UserError, match="another model"):
        read_routing_stats(path, spec_of(num_local_experts=8))
    with pytest.raises(UserError, match="--routing-stats"):
        write_routing_stats(str(tmp_path / "no" / "stats.json"), stats, spec)


COUNTS = [12, 6, 0, 6]


@pytest.mark.parametrize(("change", "said"), [
    ({"version": 2}, "version = 2"), ({"tokens": -1}, "tokens = -1"), ({"tokens": 1.5}, "tokens = 1.5"),
    ({"tokens": 0}, "tokens = 0"), ({"tokens": 13}, "sum to 24"), ({"layers": []}, "layers"),
    ({"layers": {"0": COUNTS}}, "Accepted: 0, 1"), ({"layers": {"0": COUNTS, "1": [6, 6, 6]}}, "layers.1 = 3 counts"),
    ({"layers": {"0": COUNTS, "1": [6, 6, 6, True]}}, r"layers.1\[3\]"),
    ({"layers": {"0": COUNTS, "1": [6, 6, 12, -6]}}, r"layers.1\[3\] = -6"),
    ({"layers": {"0": COUNTS, "1": [6, 6, 6, float("nan")]}}, r"layers.1\[3\] = nan"),
    ({"layers": {"0": COUNTS, "1": [24, 0, 0, 0]}}, r"layers.1\[0\] = 24"), ({"model_hash": None}, "another model"),
])  # fmt: skip
def test_what_a_run_did_not_write_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path, spec = tmp_path / "stats.json", spec_of()
    write_routing_stats(str(path), RoutingStats(12, {0: (12, 6, 0, 6), 1: (6, 6, 6, 6)}), spec)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=said) as found:
        read_routing_stats(str(path), spec)
    assert str(path) in str(found.value)


def test_the_page_shows_who_had_how_much_to_do(tmp_path: Path) -> None:
    writer = MetricsWriter(str(tmp_path))
    step = StepMetrics(1, 8, 2.5, 1.0, 1e-3, 512, 0.5, experts=figures_of(ROUTING))
    for number in (1, 2, 3):
        writer.step(replace(step, step=number))
    writer.close()
    event = {"time": 1.0, "kind": "experts", "text": "", "step": 3, "layers": {"0": [12, 6, 0, 6], "1": [6, 6, 6, 6]}}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    for words in ("Balance of experts", "expert 0: 2.00 x mean", "expert 2: 0.00 x mean", "layer 1", "rank 0", ">12<"):
        assert words in text, words


def test_the_page_refuses_other_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"step": 1, "loss": 1.0, "step_seconds": 1.0, "tokens": 1, "expert_load": {"max_over_mean": {"0": "x"}}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["report", str(tmp_path)]) == 2
    assert "expert_load.max_over_mean.0" in capsys.readouterr().err
