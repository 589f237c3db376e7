"""Adapters of linear attention and of several projections in one matrix go to peft and come from it; runs go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hetero_megatron.checkpoint.adapter_config import WEIGHTS
from tests.distributed.checkpoint.test_adapter import close, losses, run
from tests.support.families import DENSE
from tests.support.hf_reference import make_hf
from tests.support.moe_models import HYBRIDS, MAMBAS
from tests.support.peft_reference import targets_outside_experts
from tests.support.programs import start_ranks
from tests.support.selection import quick

MODELS: dict[str, dict[str, Any]] = {"phi3": DENSE["phi3"]} | HYBRIDS | MAMBAS
SIZES = "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --mock-data --log-interval 1 --seed 5"
PLAN = """
version: 1
seq_length: 16
global_batch_size: 4
pipelines:
  - micro_batch_size: 1
    num_micro_batches: 4
    stages: [{{ranks: [0, 1], layers: [0, {0}], tp: 2, tp_split: [2, 1]}}, {{ranks: 2, layers: [{0}, {1}]}}]
"""
TOKENS = torch.arange(12)[None] % 36


def logits(model: Any) -> np.ndarray:
    model.config._experts_implementation = "eager"  # another one wants rows of whole 16 bytes
    return model.float().eval()(TOKENS).logits.detach().numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", quick(MODELS, [], ["granite_hybrid"]))
def test_exports_load_in_peft_and_runs_go_on_under_another_plan(family: str, tmp_path: Path) -> None:
    """Two steps alone, and three more of unequal ranks of two stages; what is written at the end loads in peft, and
    merges as there; what peft writes of it is read, and written again, bit for bit."""
    base, config = tmp_path / "base", MODELS[family]
    model, spec = make_hf(config, 3, torch.float32)
    model.save_pretrained(base)
    targets = targets_outside_experts(spec)
    words = f"--load-hf {base} --lr 1e-2 --mock-data --log-interval 1 --seed 5 --train-iters 5"
    words += f" --lr-decay-style constant --lora-rank 3 --lora-alpha 6 --lora-targets {' '.join(targets)}"
    words += f" --save {tmp_path}/run --load {tmp_path}/run"
    run(words, "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --exit-interval 2")
    (tmp_path / "plan.yaml").write_text(PLAN.format(spec.num_layers - 1, spec.num_layers))
    ends = f" --save-adapter {tmp_path}/ours --save-hf {tmp_path}/merged --merge-lora"
    ranks = start_ranks(3, f"{words} --plan {tmp_path}/plan.yaml {ends}".split())
    assert [p.communicate(240)[1] for p in ranks if p.wait(240)] == []
    assert len(losses(tmp_path / "run")) == 5

    wrapped = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "ours")
    found = logits(wrapped)
    assert not close(found, logits(AutoModelForCausalLM.from_pretrained(base)))
    assert close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), found)
    wrapped.save_pretrained(tmp_path / "theirs")
    run(f"--load-hf {base} {SIZES} --load-adapter {tmp_path}/theirs --train-iters 1 --lr 0 --min-lr 0",
        f"--save-adapter {tmp_path}/again")  # fmt: skip
    ours, theirs, again = (load_file(tmp_path / name / WEIGHTS) for name in ("ours", "theirs", "again"))
    assert ours.keys() == theirs.keys() == again.keys()
    assert all(torch.equal(ours[name], values) and torch.equal(again[name], values) for name, values in theirs.items())
