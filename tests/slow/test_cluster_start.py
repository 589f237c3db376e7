"""Ranks find their place by the cluster file, whatever number torchrun gave them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

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


def launch(python: Path, directory: Path, nodes: tuple[str, str]) -> subprocess.CompletedProcess[str]:
    """Two processes under torchrun; the one it calls rank i says that it is on node ``nodes[i]``."""
    (directory / "cluster.yaml").write_text(CLUSTER)
    (directory / "plan.yaml").write_text(PLAN)
    flags = (
        f"--plan {directory}/plan.yaml --cluster {directory}/cluster.yaml --model tiny --mock-data --train-iters 2 "
        f"--lr 1e-3 --log-interval 1 --save {directory}/run"
    )
    script = f"names=({nodes[0]} {nodes[1]}); export HETERO_NODE=${{names[$RANK]}} LOCAL_RANK=0; "
    script += f"exec {python} pretrain_gpt.py {flags}"
    command = [str(python.parent / "torchrun"), "--nproc-per-node", "2", "--no-python", "bash", "-c", script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_swapped_nodes_train_the_same(forked_programs: Path, tmp_path: Path) -> None:
    losses = []
    for nodes in (("fast", "slow"), ("slow", "fast")):
        directory = tmp_path / nodes[0]
        directory.mkdir()
        done = launch(forked_programs / "python", directory, nodes)
        assert done.returncode == 0, done.stderr
        lines = (directory / "run" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 2 and losses[0] == losses[1]


@pytest.mark.parametrize(
    ("nodes", "message"),
    [(("fast", "fast"), "are both rank 0 of the cluster file"), (("fast", "huge"), "the cluster has no such chip")],
)
def test_wrong_nodes_are_refused(
    forked_programs: Path, tmp_path: Path, nodes: tuple[str, str], message: str
) -> None:
    done = launch(forked_programs / "python", tmp_path, nodes)
    assert done.returncode != 0
    assert f"{message}" in done.stderr and "pretrain_gpt.py" not in done.stderr.split("error:")[0]
