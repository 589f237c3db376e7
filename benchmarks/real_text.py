"""Small Llamas trained on real text, run after run: what benchmarks of losses share.

The text is the standard library's sources, cut into tokens by a byte-level BPE that was trained on them. Every run is
one of ``pretrain_gpt.py``, on the CPU in fp32, without emulation; one that is complete in its folder is read, not
repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import rank_env, ranks
from hetero_megatron.data.sources.text import stdlib_files
from hetero_megatron.spec.flops import parameter_count
from hetero_megatron.spec.hf_config import from_hf_config

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, LENGTH = 2048, 128
SEED = 1234
# Hidden size, layers, heads, MLP.
SIZES = {"1M": (128, 4, 4, 352), "10M": (320, 8, 5, 896)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of every benchmark of losses."""
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="runs, tokenizer and tokens")
    parser.add_argument("--size", choices=SIZES, default="10M", help="of the model; of each a DIR of its own")
    parser.add_argument("--seed", type=int, default=SEED, help="of weights and order of samples; a DIR for each")


def model_of(size: str) -> dict[str, Any]:
    """config.json of a size."""
    hidden, layers, heads, mlp = SIZES[size]
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": mlp, "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    }  # fmt: skip


def millions(size: str) -> float:
    """Parameters of a size."""
    return parameter_count(from_hf_config(model_of(size))) / 1e6


def pipelines_of(size: str, shares: tuple[int, ...], rows: int) -> dict[str, Any]:
    """A plan with a rank for each share, which computes ``rows`` micro-batches of so many sequences."""
    layers = [0, model_of(size)["num_hidden_layers"]]
    pipelines = [
        {"micro_batch_size": share, "num_micro_batches": rows, "stages": [{"ranks": [rank], "layers": layers}]}
        for rank, share in enumerate(shares)
    ]
    return {"version": 1, "seq_length": LENGTH, "global_batch_size": rows * sum(shares), "pipelines": pipelines}


def prepare(work: Path, size: str) -> None:
    """Tokenizer and model, for all runs in ``work``."""
    (work / "model").mkdir(parents=True, exist_ok=True)
    (work / "model" / "config.json").write_text(json.dumps(model_of(size)))
    make_tokenizer(work / "tokenizer")


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE of the corpus."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if (folder / "tokenizer.json").exists():
        return
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<eos>"], show_progress=False)
    bpe.train_from_iterator((Path(file).read_text(errors="replace") for file in stdlib_files()), trainer)
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>").save_pretrained(folder)


def train(
    folder: Path, work: Path, plan: Mapping[str, Any], steps: int, lr: float, evaluate: int, batches: int, *more: str
) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl`` of one run, in ``folder``, with a tenth of the steps as warm-up and a cosine to a
    tenth of the learning rate; ``evaluate``: steps between evaluations, of ``batches`` each."""
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "plan.json").write_text(json.dumps(plan))
        words = (
            f"--split 90,10,0 --train-iters {steps} --lr {lr} --min-lr {lr / 10} "
            f"--lr-decay-style cosine --lr-warmup-iters {steps // 10} --weight-decay 0.1 --adam-beta2 0.95 "
            f"--dtype fp32 --save-interval 0 --eval-interval {evaluate} --eval-iters {batches}"
        )
        job = [str(ROOT / "pretrain_gpt.py"), "--model", str(work / "model"), "--plan", str(folder / "plan.json")]
        job += ["--data-path", "stdlib", "--tokenizer-model", str(work / "tokenizer"), "--save", str(folder)]
        job += ["--data-cache-path", str(work / "cache"), *words.split(), *more]
        with open(folder / "log", "w") as log:
            command = [sys.executable, *ranks(len(plan["pipelines"]), *job)]
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **rank_env()})
        if done.returncode:
            raise SystemExit(f"{folder.name} failed:\n{(folder / 'log').read_text()[-4000:]}")
        (folder / "complete").touch()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluations(lines: list[dict[str, Any]]) -> dict[int, float]:
    """Loss on held-out documents by step, in nats per token."""
    return {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}


def median_speed(lines: list[dict[str, Any]]) -> float:
    """Tokens per second."""
    rates = sorted(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
    return float(rates[len(rates) // 2])
