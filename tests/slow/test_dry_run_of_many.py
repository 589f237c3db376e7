"""One rank of 2,048, alone: any of them takes at most a minute of CPU time and 4 GiB (docs/results/core.md)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.selection import quick

Shape = list[tuple[int, int]]  # (TP size, layers) of every stage
EQUAL: Shape = [(2, 20)] * 4
UNLIKE: tuple[Shape, Shape] = ([(4, 44), (2, 20), (2, 16)], [(2, 22), (4, 38), (1, 10), (1, 10)])


def spelled(shapes: list[Shape], counts: list[int], islands: int = 0) -> dict[str, Any]:
    """256 pipelines of eight ranks: the shapes in blocks, the numbers of micro-batches in turn."""
    pipelines, rank = [], 0
    for p in range(256):
        stages, layer = [], 0
        for tp, layers in shapes[p * len(shapes) // 256]:
            stages.append({"ranks": list(range(rank, rank + tp)), "layers": [layer, layer + layers], "tp": tp})
            rank, layer = rank + tp, layer + layers
        pipelines.append(
            {"micro_batch_size": 1, "num_micro_batches": counts[p % len(counts)], "stages": stages}
        )
    batch = sum(p["num_micro_batches"] for p in pipelines)
    plan: dict[str, Any] = {"version": 1, "seq_length": 4096, "global_batch_size": batch, "pipelines": pipelines}
    size = 2048 // islands if islands else 0
    return plan | ({"islands": [f"{i * size}-{(i + 1) * size - 1}" for i in range(islands)]} if islands else {})


PLANS = {
    "equal": (spelled([EQUAL], [8]), 3),
    "unlike pipelines, uneven micro-batches": (spelled([*UNLIKE], [8, 9, 5, 13]), 2047),
    "four islands": (spelled([*UNLIKE], [8], islands=4), 1024),
}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", quick(PLANS, [], ["four islands"]))
def test_a_rank_of_2048_takes_a_minute_of_cpu_and_4_gib(name: str, tmp_path: Path) -> None:
    plan, rank = PLANS[name]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan))
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--dry-run", "--as-rank", str(rank)]
    command += ["--model", "llama2-70b", "--bf16", "--plan", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pid = os.posix_spawn(sys.executable, command, environment)
    _, status, used = os.wait4(pid, 0)
    assert status == 0
    assert used.ru_utime + used.ru_stime <= 60  # CPU seconds, so that others' load counts little
    assert used.ru_maxrss <= 4 << 20  # KiB
