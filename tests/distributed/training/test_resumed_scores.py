"""A run that learns from scores in a file and goes on from a checkpoint: with those of the same teacher, as far as they
reach."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hetero_megatron.cli.main import main
from hetero_megatron.data.scored import KIND
from hetero_megatron.data.scores_file import open_scores
from tests.support.chat import TEMPLATES, chat_tokenizer, turns
from tests.support.programs import run_ranks


@pytest.mark.slow
def test_a_damaged_sample_ends_the_run_in_one_line_on_all_ranks(tmp_path: Path) -> None:
    """Also on those that read nothing of the file, for they have no head."""
    make(tmp_path, "base", layers=2)
    (tmp_path / "plan.yaml").write_text("""
version: 1
seq_length: 32
global_batch_size: 2
pipelines:
  - {micro_batch_size: 1, num_micro_batches: 2, stages: [{ranks: 0, layers: [0, 1]}, {ranks: 1, layers: [1, 2]}]}
""")
    data = f"--sft --data-path {tmp_path}/chats.jsonl --split 1 --eval-iters 0 --no-kernel-check --train-iters 4 "
    data += f"--load-hf {tmp_path}/base --plan {tmp_path}/plan.yaml"
    run_ranks(2, f"{data} --score-top-k 4 --save-scores {tmp_path}/scores".split())
    stored = open_scores(f"{tmp_path}/scores", "", KIND).arrays["train.rest"]
    assert isinstance(stored, np.memmap)
    np.memmap(tmp_path / "scores", stored.dtype, "r+", stored.offset, stored.shape)[5, 3] = 0.5
    _, err = run_ranks(2, f"{data} --teacher-scores {tmp_path}/scores --lr 1e-3".split(), code=2)
    lines = err.splitlines()
    assert len(lines) == 2 and all("of sample 5 of train do not add up to 1" in line for line in lines), err


def make(folder: Path, name: str, layers: int = 1) -> None:
    """A model with a tokenizer, and chats."""
    config = LlamaConfig(
        vocab_size=330, hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / name)
    chat_tokenizer(folder / name, TEMPLATES["chatml"])
    chats = [json.dumps({"messages": turns(f"how is fox {i}", "quick and brown")}) for i in range(8)]
    (folder / "chats.jsonl").write_text("\n".join(chats))


@pytest.mark.slow
def test_a_resumed_run_has_the_same_teacher_for_all_that_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    for name in ("base", "other"):
        make(tmp_path, name)
    data = f"--data-path {tmp_path}/chats.jsonl --split 1 --eval-iters 0 --seq-length 32 --micro-batch-size 1 "
    data += "--no-kernel-check "
    for name in ("base", "other"):
        words = f"--sft {data} --load-hf {tmp_path}/{name} --global-batch-size 4 --train-iters 3 --score-top-k 4"
        assert main(["score", *words.split(), f"--save-scores={tmp_path}/{name}.scores"]) == 0
    run = f"{data} --load-hf {tmp_path}/base --lr 1e-3 --lr-decay-style constant "
    run += f"--save {tmp_path}/run --load {tmp_path}/run"
    for teacher, size, steps, says in (
        ("other", 4, 2, ""), ("base", 4, 3, "trained beside another teacher"), ("other", 2, 6, "training sample 16"),
        ("other", 4, 3, ""),
    ):  # fmt: skip
        capsys.readouterr()
        words = f"{run} --teacher-scores {tmp_path}/{teacher}.scores --global-batch-size {size} --train-iters {steps}"
        code, err = main(["finetune", *words.split()]), capsys.readouterr().err
        assert code == (2 if says else 0) and says in err, err
