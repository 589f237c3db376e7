"""A run that learns from scores in a file and goes on from a checkpoint: with those of the same teacher, as far as they
reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hetero_megatron.cli.main import main
from tests.support.chat import TEMPLATES, chat_tokenizer, turns


@pytest.mark.slow
def test_a_resumed_run_has_the_same_teacher_for_all_that_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = LlamaConfig(
        vocab_size=330, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    for name in ("base", "other"):
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
        chat_tokenizer(tmp_path / name, TEMPLATES["chatml"])
    chats = [json.dumps({"messages": turns(f"how is fox {i}", "quick and brown")}) for i in range(8)]
    (tmp_path / "chats.jsonl").write_text("\n".join(chats))
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
