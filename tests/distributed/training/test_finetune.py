"""Fine-tuning under any plan: loss and update are transformers' over the assistants' tokens; the program runs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoTokenizer

from hetero_megatron.comm import Comm
from hetero_megatron.data import DataConfig, build_datasets
from hetero_megatron.data.batch import BatchOptions, make_batch
from hetero_megatron.layout import Box
from hetero_megatron.plans import Plan, plan_from_dict
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import LogicalTensor, ModelSpec
from hetero_megatron.training.rank_platform import plan_for
from hetero_megatron.training.runtime import Runtime
from tests.support.chat import TEMPLATES, chat_tokenizer, turns
from tests.support.hf_reference import hf_to_logical, make_hf
from tests.support.pool import shared_pool
from tests.support.programs import Program
from tests.support.random_plans import random_model, random_plan
from tests.support.selection import quick

SEQ = 48
VOCAB = 400


def run(*words: str) -> str:
    """Standard output of one rank that ends well."""
    program = Program([word for text in words for word in text.split()])
    out, err = program.communicate(240)
    assert program.returncode == 0, err
    return out


def losses(folder: Path) -> dict[int, float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: r["loss"] for r in records if "loss" in r}


def chats(count: int = 30) -> list[Any]:
    rng = np.random.RandomState(3)
    sizes = rng.randint(1, 9, (count, 2))
    return [turns("q " * a, f"{i} " + "fox " * b) for i, (a, b) in enumerate(sizes)]


def write(folder: Path) -> tuple[str, str]:
    """(conversations, tokenizer)."""
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": c}) + "\n" for c in chats()))
    return str(path), str(chat_tokenizer(folder / "tokenizer", TEMPLATES["chatml"]))


def dataset(path: str, tokenizer: str) -> Any:
    config = DataConfig(data_path=(path,), split="1", tokenizer_model=tokenizer, sft=True)
    return build_datasets(config, SEQ, 7, (1, 0, 0), VOCAB, lambda _: None).train


def one_step(
    comm: Comm, plan: Plan, spec: ModelSpec, initial: dict[str, np.ndarray], path: str, tokenizer: str
) -> tuple[list[float], list[tuple[str, Box, np.ndarray]]]:
    plan = plan_for(plan, comm.islands)
    compiled = CompiledPlan(plan, spec)
    comm.create_groups(compiled.groups)
    if comm.rank not in plan.ranks:
        return [], []

    def initialize(tensor: LogicalTensor, box: Box) -> torch.Tensor:
        return torch.from_numpy(initial[tensor.name][box.slices()])

    runtime = Runtime(compiled, comm, torch.float64, initialize, lambda groups: torch.optim.SGD(groups, lr=1.0))
    data, options = dataset(path, tokenizer), BatchOptions(True, True)
    size = plan.global_batch_size
    stats = runtime.train_step(lambda indices: make_batch(data, indices, options), 0, size, lr=1.0)
    weights = [(n, runtime.stage_model.boxes[n], p.detach().numpy().copy()) for n, p in runtime.sync.params.items()]
    return [stats.loss, float(stats.tokens)], weights


def reference(model: torch.nn.Module, path: str, tokenizer: str, samples: int) -> tuple[torch.Tensor, int]:
    """(mean loss, tokens that count) over the conversations of the first samples, one at a time, by transformers."""
    theirs, data = AutoTokenizer.from_pretrained(tokenizer), dataset(path, tokenizer)
    texts = "".join(theirs.decode(data[i].tokens) for i in range(samples))
    total, count = torch.zeros((), dtype=torch.float64), 0
    for chat in chats():
        for _ in range(texts.count(f"assistant\n{chat[1]['content']}<|im_end|>")):
            out = theirs.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
            ids, mask = torch.tensor([out["input_ids"]]), torch.tensor(out["assistant_masks"][1:], dtype=torch.bool)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
            total = total + F.cross_entropy(logits[mask], ids[0, 1:][mask], reduction="sum")
            count += int(mask.sum())
    return total / count, count


@pytest.mark.parametrize("seed", quick(range(12), range(3), range(3, 6)))
def test_loss_and_update_are_those_of_transformers(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed + 400)
    config = random_model(rng) | {"vocab_size": VOCAB}
    config["n_positions" if config["model_type"] == "gpt2" else "max_position_embeddings"] = SEQ
    layers = config.get("num_hidden_layers") or config["n_layer"]
    heads = config.get("num_attention_heads") or config["n_head"]
    made = random_plan(rng, layers, heads, seq_length=SEQ, ranks=rng.choice([1, 2, 3, 4]))
    path, tokenizer = write(tmp_path)
    model, spec = make_hf(config, seed)
    plan = plan_from_dict(made, spec)
    initial = {n: t.detach().clone().numpy() for n, t in hf_to_logical(model, spec).items()}
    loss, count = reference(model, path, tokenizer, plan.global_batch_size)
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    wanted = hf_to_logical(model, spec)
    ranks = [r for r in shared_pool().run(one_step, plan, spec, initial, path, tokenizer) if r[0]]
    assert len(ranks) == len(plan.ranks)
    for (found, tokens), weights in ranks:
        assert tokens == count and abs(found - loss.item()) <= 1e-12 * loss.item(), made
        for name, box, values in weights:
            error = np.abs(values - wanted[name].detach().numpy()[box.slices()]).max(initial=0.0)
            assert error <= 1e-9, (name, error, made)


def test_the_command_trains_and_exports(tmp_path: Path) -> None:
    """From a Hugging Face directory with its tokenizer; streams go on after a stop with the same losses."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    path, tokenizer = write(tmp_path)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    for file in Path(tokenizer).iterdir():
        (tmp_path / "base" / file.name).write_bytes(file.read_bytes())
    words = f"--sft --load-hf {tmp_path}/base --data-path {path} --split 1 --seq-length {SEQ} --micro-batch-size 2 "
    words += f"--lr 1e-3 --log-interval 1 --dataloader-type streaming --shuffle-buffer 8 --save {tmp_path}/run "
    words += f"--load {tmp_path}/run --lr-decay-style constant"
    first = run(words, f"--train-iters 9 --save-hf {tmp_path}/tuned --exit-interval 4")
    assert "⟦" in first and "text is read with the tokenizer of --load-hf" in first
    run(words, f"--train-iters 9 --save-hf {tmp_path}/tuned")
    run(words.replace(f"{tmp_path}/run", f"{tmp_path}/whole"), "--train-iters 9")
    stopped, straight = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert stopped.keys() == straight.keys() == set(range(1, 10))
    assert all(abs(stopped[s] - straight[s]) < 1e-5 for s in straight) and straight[9] < straight[1]
    tuned = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    assert AutoTokenizer.from_pretrained(tmp_path / "tuned").chat_template == TEMPLATES["chatml"]
    assert tuned.config.vocab_size == VOCAB
