"""Ranks find their place by the cluster file, whatever number torchrun gave them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.programs import Program, start_ranks
from tests.testbed.test_launch import until

pytestmark = pytest.mark.slow

CLUSTER = """
version: 1
nodes:
  - {name: fast, count: 1, chip: big, chips_per_node: 1}
  - {name: slow, count: 1, chip: small, chips_per_node: 1}
chips:
  big: {memory: 2 GiB, dtypes: [fp32]}
  small: {memory: 1 GiB, dtypes: [fp32]}
"""
PLAN = """
version: 1
seq_length: 64
global_batch_size: 4
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 4
    stages:
      - {ranks: 0, layers: [0, 4], chip: big}
      - {ranks: 1, layers: [4, 6], chip: small}
"""


def _first_of_its_node() -> None:
    os.environ["LOCAL_RANK"] = "0"


def launch(directory: Path, nodes: tuple[str, str]) -> list[Program]:
    """Two processes that their launcher calls rank 0 and 1; the one it calls rank i is on node ``nodes[i]``."""
    directory.mkdir()
    (directory / "cluster.yaml").write_text(CLUSTER)
    (directory / "plan.yaml").write_text(PLAN)
    words = ["--plan", str(directory / "plan.yaml"), "--cluster", str(directory / "cluster.yaml"), "--model", "tiny"]
    words += ["--mock-data", "--train-iters", "2", "--lr", "1e-3", "--log-interval", "1", "--save"]
    return start_ranks(2, [*words, str(directory / "run")], nodes=nodes, before=_first_of_its_node)


def test_swapped_nodes_train_the_same(tmp_path: Path) -> None:
    losses = []
    for nodes in (("fast", "slow"), ("slow", "fast")):
        ranks = launch(tmp_path / nodes[0], nodes)
        assert [rank.wait(240) for rank in ranks] == [0, 0], [rank.output() for rank in ranks]
        lines = (tmp_path / nodes[0] / "run" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 2 and losses[0] == losses[1]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [(("fast", "fast"), "are both rank 0 of the cluster file"), (("fast", "huge"), "the cluster has no such chip")],
)
def test_wrong_nodes_are_refused(nodes: tuple[str, str], message: str, tmp_path: Path) -> None:
    """By the rank that finds it; the launcher would end the other."""
    ranks = launch(tmp_path / "job", nodes)
    try:
        until(lambda: any(rank.poll() is not None for rank in ranks), "a refusal", 240)
        errors = [rank.output()[1] for rank in ranks if rank.poll() == 2]
        assert errors and all(message in error and "Traceback" not in error for error in errors)
    finally:
        for rank in ranks:
            rank.kill()
