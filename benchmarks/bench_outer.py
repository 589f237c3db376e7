"""Loss with outer steps beside synchronous training: the same tokens, seed, schedule and inner plans.

    python benchmarks/bench_outer.py --work DIR [--size 10M] [--steps 320] [--rows 1] [--begin 0] [--only NAME …]

Two unequal islands of one rank each (3 and 1 of 4 sequences: what an island's inner plan is changes no number) train a
Llama of 1.1 or 10.8 M parameters on the standard library's sources, cut into tokens by a BPE that was trained on them,
with a tenth of the steps as warm-up and a cosine to a tenth of the learning rate. Every variant is a run of
``pretrain_gpt.py`` of its own, one after another, on the CPU in fp32, without emulation. Compared is the loss on
held-out documents (the same ones) of the global weights, every few rounds of exchanges and at the end, in nats per
token. ``synchronous, other seed`` has other initial weights and another order of samples: what chance alone does. A run
that is complete in DIR is read, not repeated.

Settings are those of the papers and were chosen before: AdamW inside; outside SGD of lr 0.7 with Nesterov momentum 0.9
(DiLoCo); the islands begin apart from the first step on, or, with ``--begin``, from a checkpoint of so many synchronous
steps, which all variants but the one with another seed share. ``outer, averages`` takes the weighted mean of the
islands' weights instead (lr 1, no momentum), which tells what the outer momentum does; ``outer, little momentum``
(lr 1, momentum 0.4) was chosen after both of these had been seen, and before it was run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine, rank_env, ranks
from hetero_megatron.data.sources.text import stdlib_files
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.outer import bytes_per_exchange
from hetero_megatron.spec.flops import parameter_count
from hetero_megatron.spec.hf_config import from_hf_config

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, LENGTH, SHARES = 2048, 128, (3, 1)
# Hidden size, layers, heads, MLP; learning rate of AdamW.
SIZES = {"1M": (128, 4, 4, 352, 2e-3), "10M": (320, 8, 5, 896, 1e-3)}
OUTER = {"every": 32, "fragments": 4}
SEED = 1234
LITTLE = {"lr": 1, "momentum": 0.4}
VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "outer": {"outer": {}},
    "outer, int4": {"outer": {"compress": "int4"}},
    "outer, int8": {"outer": {"compress": "int8"}},
    "synchronous, other seed": {"seed": SEED + 1},
    "outer, int4, beside the computing": {"outer": {"compress": "int4", "delay": 1, "mixing": 0.5}},
    "outer, averages": {"outer": {"optimizer": {"lr": 1, "momentum": 0}}},
    "outer, little momentum": {"outer": {"optimizer": LITTLE}},
    "outer, little momentum, int4": {"outer": {"optimizer": LITTLE, "compress": "int4"}},
    "outer, little momentum, int8": {"outer": {"optimizer": LITTLE, "compress": "int8"}},
}


def model_of(size: str) -> dict[str, Any]:
    hidden, layers, heads, mlp, _ = SIZES[size]
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": mlp, "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    }  # fmt: skip


def plan_of(size: str, outer: dict[str, Any] | None, rows: int) -> dict[str, Any]:
    """Each island in micro-batches of its share, ``rows`` of them."""
    layers = [0, model_of(size)["num_hidden_layers"]]
    pipelines = [
        {"micro_batch_size": share, "num_micro_batches": rows, "stages": [{"ranks": [rank], "layers": layers}]}
        for rank, share in enumerate(SHARES)
    ]
    plan = {"version": 1, "seq_length": LENGTH, "global_batch_size": rows * sum(SHARES), "pipelines": pipelines}
    return plan if outer is None else {**plan, "outer": {"islands": [0, 1], **OUTER, **outer}}


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


def run(name: str, variant: dict[str, Any], work: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl`` of a variant's run."""
    folder = work / name.replace(", ", "-").replace(" ", "_")
    begin = work / "begin" if args.begin and "seed" not in variant else None
    if begin is not None:
        train("begin", {}, begin, work, args, "--exit-interval", str(args.begin), "--save-interval", str(args.begin))
    load = ("--load", str(begin)) if begin is not None else ()
    return train(name, variant, folder, work, args, *load)


def train(
    name: str, variant: dict[str, Any], folder: Path, work: Path, args: argparse.Namespace, *more: str
) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl`` of one run of ``pretrain_gpt.py``."""
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        lr = SIZES[args.size][-1]
        (folder / "plan.json").write_text(json.dumps(plan_of(args.size, variant.get("outer"), args.rows)))
        words = (
            f"--split 90,10,0 --train-iters {args.steps} --lr {lr} --min-lr {lr / 10} "
            f"--lr-decay-style cosine --lr-warmup-iters {args.steps // 10} "
            "--weight-decay 0.1 --adam-beta2 0.95 --dtype fp32 --save-interval 0 "
            f"--seed {variant.get('seed', SEED)} --eval-interval {args.evaluate} --eval-iters {args.eval_iters}"
        )
        job = [str(ROOT / "pretrain_gpt.py"), "--model", str(work / "model"), "--plan", str(folder / "plan.json")]
        job += ["--data-path", "stdlib", "--tokenizer-model", str(work / "tokenizer"), "--save", str(folder)]
        job += ["--data-cache-path", str(work / "cache"), *words.split(), *more]
        with open(folder / "log", "w") as log:
            command = [sys.executable, *ranks(len(SHARES), *job)]
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **rank_env()})
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{(folder / 'log').read_text()[-4000:]}")
        (folder / "complete").touch()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def evaluations(lines: list[dict[str, Any]]) -> dict[int, float]:
    """Loss on held-out documents by step."""
    return {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}


def crossing(size: str, variant: dict[str, Any]) -> float:
    """Bytes that leave an island per step, each way: gradients of weights that the other owns and these weights back,
    or differences."""
    spec = from_hf_config(model_of(size))
    plan = plan_from_dict(plan_of(size, variant.get("outer"), 1), spec)
    if plan.outer is None:
        return 4.0 * parameter_count(spec)
    return sum(bytes_per_exchange(plan, spec, 4)) / plan.outer.every


def report(model: str, found: dict[str, dict[int, float]], rows: int) -> None:
    """A row per variant."""
    exact = found.get("synchronous", {})
    steps = sorted(set.intersection(*(set(losses) for losses in found.values())))
    tokens = LENGTH * sum(SHARES) * rows
    heads = " | ".join(f"{step * tokens / 1e6:.2f} M tokens" for step in steps)
    print(f"\n| variant | {heads} | bytes across per step | of synchronous |\n|{'---|' * (len(steps) + 3)}")
    for name, losses in found.items():
        cells = [
            f"{losses[step]:.4f}" + (f" ({losses[step] - exact[step]:+.4f})" if exact and losses is not exact else "")
            for step in steps
        ]
        size, whole = crossing(model, VARIANTS[name]), crossing(model, {})
        print(f"| {name} | {' | '.join(cells)} | {size / 1e3:,.0f} kB | 1/{whole / size:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="runs, tokenizer and tokens")
    parser.add_argument("--size", choices=SIZES, default="10M", help="of the model; of each a DIR of its own")
    parser.add_argument("--steps", type=int, default=320, help="of 512 x rows tokens; a multiple of 32")
    parser.add_argument("--rows", type=int, default=1, help="micro-batches of 3 and of 1 sequences in a step")
    parser.add_argument("--begin", type=int, default=0, help="synchronous steps first; a multiple of 32")
    parser.add_argument("--evaluate", type=int, default=160, help="steps between evaluations")
    parser.add_argument("--eval-iters", type=int, default=32, help="batches of an evaluation")
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=list(VARIANTS), help="some of the variants")
    args = parser.parse_args()
    if any(steps % OUTER["every"] for steps in (args.steps, args.evaluate, args.begin)):
        parser.error(f"steps: multiples of {OUTER['every']}, for global weights change at exchanges")
    args.work.mkdir(parents=True, exist_ok=True)
    make_tokenizer(args.work / "tokenizer")
    (args.work / "model").mkdir(exist_ok=True)
    (args.work / "model" / "config.json").write_text(json.dumps(model_of(args.size)))
    size = parameter_count(from_hf_config(model_of(args.size))) / 1e6
    print(f"{machine()}; {size:.1f} M parameters, {args.steps} steps of {LENGTH * sum(SHARES) * args.rows} tokens, "
          f"{args.begin} of them synchronous, "
          f"AdamW lr {SIZES[args.size][-1]:g}, outer steps {OUTER}", flush=True)  # fmt: skip
    found = {}
    for name in args.only or VARIANTS:
        lines = run(name, VARIANTS[name], args.work, args)
        found[name] = evaluations(lines)
        rates = sorted(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
        print(f"{name}: {rates[len(rates) // 2]:,.0f} tokens/s (median), held-out loss {list(found[name].values())}",
              flush=True)  # fmt: skip
    report(args.size, found, args.rows)


if __name__ == "__main__":
    main()
