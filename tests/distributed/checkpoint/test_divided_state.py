"""Runs whose stages divide their weights: saved, loaded under other plans, exported; the same curve and weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.distributed.checkpoint.test_resume import metrics, run
from tests.distributed.training.test_end_to_end import PACKING
from tests.support.programs import SINGLE
from tests.support.small_plans import LLAMA

HEAD = """
version: 1
seq_length: 48
global_batch_size: 6
pipelines:
  - micro_batch_size: 3
    num_micro_batches: 2
    stages:"""
BY_LAYER = HEAD + """
      - {ranks: [0, 1], layers: [0, 4], dp_split: [2, 1], weights: {shard: [1, 3]}, recompute: {first: 2}}
      - {ranks: [2, 3], layers: [4, 6], tp: 2}
"""
TWO_PIPELINES = """
version: 1
seq_length: 48
global_batch_size: 6
pipelines:
  - micro_batch_size: 2
    num_micro_batches: 2
    stages:
      - {ranks: [0, 1], layers: [0, 5], weights: {shard: [2, 1], gather: micro-batch}}
      - {ranks: [2], layers: [5, 6]}
  - {micro_batch_size: 2, num_micro_batches: 1, stages: [{ranks: [3, 4], layers: [0, 6], weights: {shard: [0, 1]}}]}
"""


LORA = pytest.param(["--lora-rank", "2"], marks=pytest.mark.exhaustive)
QLORA = ["--lora-rank", "2", "--lora-base-dtype", "nf4"]
SIZES = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 257}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lora", [[], LORA, QLORA])
def test_stop_under_one_division_and_go_on_under_another(lora: list[str], tmp_path: Path) -> None:
    """Ramp-up, so that in some steps a replica has no rows; evaluation in the middle; packed documents; fp64. Copies of
    weights are compared, and values that are not finite looked for. First and last there are two pipelines, which cut
    the model unlike. Of adapters the frozen base is divided, which checkpoints do not hold, and the export has both."""
    if "nf4" in lora:  # rows of whole blocks
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | SIZES))
        lora = [*lora, "--model", str(tmp_path / "config.json")]
    watched = ["--check-weight-hash-across-dp-replicas-interval", "1", *lora]
    merged = ["--merge-lora"] if lora else []
    hf = [tmp_path / name for name in ("one", "three")]
    run(tmp_path / "whole", SINGLE, 1, *PACKING, *lora, *merged, "--save-hf", str(hf[0]))
    run(tmp_path / "parts", TWO_PIPELINES, 5, *PACKING, *watched, "--exit-interval", "2")
    out, _ = run(tmp_path / "parts", BY_LAYER, 4, *PACKING, *lora, "--exit-interval", "3")
    assert "step 2, 4 samples" in out and "another plan" in out
    run(tmp_path / "parts", TWO_PIPELINES, 5, *PACKING, *lora, *merged, "--save-hf", str(hf[1]))
    whole, parts = metrics(tmp_path / "whole"), metrics(tmp_path / "parts")
    assert [r["step"] for r in parts] == [1, 2, 3, 4]
    for a, b in zip(whole, parts, strict=True):
        assert (a["loss"], a["grad_norm"]) == pytest.approx((b["loss"], b["grad_norm"]), rel=1e-10)
    one, three = (load_file(directory / "model.safetensors") for directory in hf)
    assert one.keys() == three.keys()
    for name, tensor in one.items():
        assert np.abs(tensor - three[name]).max() <= 1e-9 * max(np.abs(tensor).max(), 1e-3), name
