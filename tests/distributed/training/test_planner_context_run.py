"""From the command to the trained model: a planned stage of context groups, dry and real, against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_megatron.cli import main
from hetero_megatron.cli.configure import configure
from tests.support.programs import ENVIRONMENT, SINGLE, Program, run_ranks

CLUSTER = {
    "nodes": [{"name": "fast", "count": 1, "chip": "big"}, {"name": "slow", "count": 2, "chip": "small"}],
    "chips": {
        "big": {"memory": "2 GiB", "emulate": {"speed": 0.02}},
        "small": {"memory": "1 GiB", "emulate": {"speed": 0.014}},
    },
    "links": {"inter_node": {"bandwidth": "10 GB/s", "latency": "1 us"}},
}


def train(directory: Path, plan: Path, ranks: int) -> list[dict[str, Any]]:
    words = ["--plan", str(plan), "--save", str(directory), "--model", "tiny", "--mock-data", "--fp64"]
    words += ["--train-iters", "2", "--lr", "1e-3", "--seed", "5"]
    run_ranks(ranks, words, timeout=800)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_planned_stage_of_context_groups_trains_as_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where, out, one = (tmp_path / name for name in ("cluster.yaml", "plan.yaml", "one.yaml"))
    where.write_text(yaml.safe_dump(CLUSTER))
    words = ["plan", "--model", "tiny", "--cluster", str(where), "--seq-length", "192", "--global-batch-size", "1"]
    words += ["--dtype", "fp64", "--context", "always", "--no-baselines", "--quiet", "--json", "--out", str(out)]
    assert main.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    stages = [s for p in yaml.safe_load(out.read_text())["pipelines"] for s in p["stages"]]
    assert any("context" in s for s in stages) and "chosen" in found["context"], found["context"]
    ranks = 1 + max(int(r) for r in found["memory"])
    words = ["--plan", str(out), "--model", "tiny", "--fp64", "--dry-run", "--as-rank", "0"]
    dry = Program(words, {**ENVIRONMENT, "WORLD_SIZE": str(ranks)})
    said, err = dry.communicate(timeout=800)
    assert dry.returncode == 0 and "sent: context parallel" in said, said + err
    one.write_text(
        SINGLE.replace("48", "192").replace("global_batch_size: 6", "global_batch_size: 1")
        .replace("micro_batch_size: 6", "micro_batch_size: 1")
    )  # fmt: skip
    rows = [[r for r in train(tmp_path / n, plan, k) if "loss" in r] for n, plan, k in
            (("a", one, 1), ("b", out, ranks))]  # fmt: skip
    assert len(rows[0]) == len(rows[1]) == 2
    for a, b in zip(*rows, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-11)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-9)


def test_auto_plan_of_a_long_sequence_has_context_groups(tmp_path: Path) -> None:
    where = tmp_path / "cluster.yaml"
    where.write_text(yaml.safe_dump(CLUSTER))
    words = ["--auto-plan", "--cluster", str(where), "--model", "tiny", "--max-position-embeddings", "32768"]
    words += ["--seq-length", "32768", "--global-batch-size", "1", "--dry-run"]
    ready = configure(words, {"WORLD_SIZE": "3"})
    assert any(unit.num_tokens < 32768 for p in ready.plan.pipelines for s in p.stages for unit in s.units)
