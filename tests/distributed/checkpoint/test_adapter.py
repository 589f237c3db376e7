"""Adapters in files: peft loads what a run writes and the other way round; merging is peft's; runs go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hetero_megatron.checkpoint.adapter_config import WEIGHTS
from tests.support.programs import Program, start_ranks

SIZES = "--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --mock-data --log-interval 1 --seed 5"
TWO = """
version: 1
seq_length: 16
global_batch_size: 4
pipelines:
  - {micro_batch_size: 1, num_micro_batches: 3, stages: [{ranks: [0, 1], layers: [0, 3], tp: 2, tp_split: [2, 1]}]}
  - {micro_batch_size: 1, num_micro_batches: 1, stages: [{ranks: 2, layers: [0, 2]}, {ranks: 3, layers: [2, 3]}]}
"""
TOKENS = torch.arange(12)[None] % 60


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def run(*words: str) -> str:
    program = Program([word for text in words for word in text.split()])
    out, err = program.communicate(240)
    assert program.returncode == 0, err
    return out


def losses(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r["loss"] for r in records if "loss" in r]


def logits(model: Any) -> np.ndarray:
    return model.double().eval()(TOKENS).logits.detach().numpy()  # type: ignore[no-any-return]


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() <= 1e-5 * np.abs(b).max())


@pytest.mark.slow
def test_exports_load_in_peft_and_merge_as_there(base: Path, tmp_path: Path) -> None:
    lora = "--lora-rank 3 --lora-alpha 6 --lora-targets q_proj v_proj down_proj"
    words = f"--load-hf {base} {SIZES} {lora} --train-iters 4 --save {tmp_path}/run"
    out = run(words, f"--save-adapter {tmp_path}/adapter --save-hf {tmp_path}/merged --merge-lora")
    assert "saved an adapter" in out
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]
    plain = AutoModelForCausalLM.from_pretrained(base)
    before = logits(plain)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    assert model.peft_config["default"].r == 3
    with_adapter = logits(model)
    assert not close(with_adapter, before)
    assert close(logits(model.merge_and_unload()), with_adapter)
    assert close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), with_adapter)


@pytest.mark.slow
def test_dora_loads_in_peft_and_merges_as_there(base: Path, tmp_path: Path) -> None:
    """From a plan of unequal ranks; and peft's own is where training begins. Lengths of rows begin as the base's."""
    (tmp_path / "plan.yaml").write_text(TWO)
    words = f"--load-hf {base} --plan {tmp_path}/plan.yaml --lr 1e-1 --min-lr 1e-1 --mock-data --train-iters 2"
    ends = f"--save-adapter {tmp_path}/ours --save-hf {tmp_path}/merged --merge-lora"
    ranks = start_ranks(4, [*words.split(), "--lora-rank", "4", "--use-dora", *ends.split()])
    assert [p.communicate(240)[1] for p in ranks if p.wait(240)] == []
    plain = AutoModelForCausalLM.from_pretrained(base)
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "ours")
    assert model.peft_config["default"].use_dora
    found = logits(model)
    assert not close(found, logits(plain))
    assert close(logits(model.merge_and_unload()), found)
    assert close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), found)

    fresh = AutoModelForCausalLM.from_pretrained(base)
    fresh = peft.get_peft_model(fresh, peft.LoraConfig(r=2, target_modules=["o_proj", "up_proj"], use_dora=True))
    fresh.save_pretrained(tmp_path / "theirs")
    words = f"--load-hf {base} {SIZES} --train-iters 1 --lr 0 --min-lr 0"
    run(words, f"--load-adapter {tmp_path}/theirs --save-adapter {tmp_path}/read")
    run(words, f"--lora-rank 2 --lora-targets o_proj up_proj --use-dora --save-adapter {tmp_path}/made")
    theirs, read, made = (load_file(tmp_path / name / WEIGHTS) for name in ("theirs", "read", "made"))
    assert theirs.keys() == read.keys() == made.keys()
    for name, values in theirs.items():
        assert torch.equal(read[name], values), name
        if name.endswith("lora_magnitude_vector"):
            torch.testing.assert_close(made[name], values)


@pytest.mark.slow
def test_a_plan_of_unequal_ranks_writes_the_same_and_runs_go_on_under_it(base: Path, tmp_path: Path) -> None:
    """Uneven TP beside a pipeline; stopped after 2 of 5 steps under one plan, resumed under another."""
    (tmp_path / "plan.yaml").write_text(TWO)
    words = f"--load-hf {base} {SIZES} --lora-rank 4 --train-iters 5 --lr-decay-style constant"
    alone = f"--save {tmp_path}/one --save-adapter {tmp_path}/one-adapter --save-hf {tmp_path}/one-hf --merge-lora"
    run(words, alone)
    plan = words.replace("--seq-length 16 --micro-batch-size 1 --global-batch-size 4 ", "")
    plan += f" --plan {tmp_path}/plan.yaml --save {tmp_path}/two --load {tmp_path}/two"
    ends = f" --save-adapter {tmp_path}/two-adapter --save-hf {tmp_path}/two-hf --merge-lora"
    run(words, f"--exit-interval 2 --save {tmp_path}/two --load {tmp_path}/two")
    assert len(losses(tmp_path / "two")) == 2
    ranks = start_ranks(4, [*plan.split(), *ends.split()])
    assert [p.communicate(240)[1] for p in ranks if p.wait(240)] == []
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    np.testing.assert_allclose(two, one, rtol=1e-4)
    models = [
        peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / f"{name}-adapter")
        for name in ("one", "two")
    ]
    first, second = (logits(m) for m in models)
    assert np.abs(first - second).max() <= 2e-3 * np.abs(first).max()
    assert close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "two-hf")), second)
    held = json.loads((tmp_path / "two" / "iter_0000005" / "metadata.json").read_text())
    assert "lora_A" in json.dumps(held) and "embed_tokens" not in json.dumps(held.get("tensors", held))


def written_by_peft(base: Path, config: peft.LoraConfig, folder: Path) -> np.ndarray:
    """Save adapters of random values; their logits."""
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, param in wrapped.named_parameters():
            if "lora_" in name:
                param.normal_(0, 0.2)
    wrapped.save_pretrained(folder)
    return logits(wrapped)


@pytest.mark.slow
def test_what_peft_wrote_is_where_training_begins(base: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["k_proj", "o_proj", "up_proj"], use_rslora=True)
    expected = written_by_peft(base, config, tmp_path / "theirs")
    words = f"--load-hf {base} {SIZES} --load-adapter {tmp_path}/theirs --train-iters 1 --lr 0 --min-lr 0"
    run(words, f"--save-adapter {tmp_path}/ours --save-hf {tmp_path}/merged --merge-lora")
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "ours")
    assert close(logits(again), expected)
    assert close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected)


@pytest.mark.slow
def test_adapters_of_some_layers_go_to_peft_and_come_from_it(base: Path, tmp_path: Path) -> None:
    """peft's, of layers, patterns and ranks that differ, is where training begins; what a plan of unequal ranks writes,
    stopped and gone on, loads in peft and merges as there."""
    config = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=r".*layers\.([12]\.self_attn\.(q|v)|2\.mlp\.down)_proj",
        rank_pattern={r"layers\.2\.self_attn\.q_proj": 3}, alpha_pattern={"v_proj": 5},
    )  # fmt: skip
    expected = written_by_peft(base, config, tmp_path / "theirs")
    words = f"--load-hf {base} {SIZES} --load-adapter {tmp_path}/theirs"
    ends = f"--save-adapter {tmp_path}/ours --save-hf {tmp_path}/merged --merge-lora"
    run(words, f"--train-iters 1 --lr 0 --min-lr 0 {ends}")
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "ours")
    assert close(logits(again), expected)
    assert close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected)

    (tmp_path / "plan.yaml").write_text(TWO)
    run(words, f"--train-iters 3 --lr-decay-style constant --exit-interval 1 --save {tmp_path}/run")
    plan = f"--load-hf {base} --lr 1e-2 --mock-data --log-interval 1 --seed 5 --plan {tmp_path}/plan.yaml"
    plan += f" --train-iters 3 --lr-decay-style constant --load-adapter {tmp_path}/theirs"
    plan += f" --load {tmp_path}/run --save {tmp_path}/run"
    ends = f" --save-adapter {tmp_path}/two --save-hf {tmp_path}/two-hf --merge-lora"
    ranks = start_ranks(4, (plan + ends).split())
    assert [p.communicate(240)[1] for p in ranks if p.wait(240)] == []
    trained = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "two")
    found = logits(trained)
    assert not close(found, expected)
    assert close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "two-hf")), found)
