"""Greedy generation on one CPU rank against transformers' generate: same model, prompts and thread; tokens per second.

    python benchmarks/bench_generate.py [--rounds 3] [--new-tokens 96] [--case llama-10M]

Goal: ratio (ours / transformers) >= 1. Both answer the same, which is checked. Loading is not in the time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_one_rank import config
from benchmarks.common import alternate, machine, median

CASES = {"llama-10M": (1, 4), "llama-50M": (1, 4)}  # of bench_one_rank, prompts at a time
PROMPT = 64  # tokens
REPEATS = 5  # answers of one process that are timed


def save(case: str, folder: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config(case))).save_pretrained(folder)


def prompts(batch: int, vocab: int) -> list[list[int]]:
    import torch

    torch.manual_seed(1)
    return torch.randint(3, vocab, (batch, PROMPT)).tolist()  # type: ignore[no-any-return]


def run_transformers(case: str, batch: int, new: int, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts(batch, config(case)["vocab_size"]))

    def answer(count: int) -> list[list[int]]:
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, pad_token_id=0
        )  # fmt: skip
        return made[:, PROMPT:].tolist()  # type: ignore[no-any-return]

    report(answer, new)


def run_ours(case: str, batch: int, new: int, folder: str) -> None:
    import torch

    from hetero_megatron.cli.configure import configure
    from hetero_megatron.comm import start_comm
    from hetero_megatron.environment.launcher import LauncherEnvironment
    from hetero_megatron.generation import Decoder, Sampling, open_weights
    from hetero_megatron.platform.plugins import load_plugins
    from hetero_megatron.training.kernels import rank_kernels
    from hetero_megatron.training.rank_platform import plan_for, platform_at, position, transport_of

    words = ["--load-hf", folder, "--seq-length", "8", "--micro-batch-size", "1", "--dry-run"]
    run = configure(words, {})
    launcher, plugins = LauncherEnvironment(), load_plugins()
    place = position(run.cluster, launcher)
    platform = platform_at(place, run.cluster, launcher, plugins, run.platform, run.distributed.backend)
    transport = transport_of(run.distributed.transport, run.cluster)
    comm = start_comm(platform, 60.0, place, launcher, None, transport)
    comm.create_groups([(0,)])
    plan = plan_for(run.plan, comm.islands)
    comm.create_groups(run.compiled.groups)
    weights = open_weights(run.spec, folder, None, None)
    kernels = rank_kernels(plan, run.spec, comm.rank, plugins.registry, platform, torch.float32)
    decoder = Decoder(plan, run.spec, comm, torch.float32, weights, PROMPT + new, kernels)
    ids = prompts(batch, run.spec.vocab_size)
    report(lambda count: decoder.generate(ids, 0, count, Sampling()), new)


def report(answer: Any, new: int) -> None:
    """Tokens per second, by the wall and by this process's CPU time: medians of ``REPEATS`` answers after one more."""
    tokens, rates, burnt = answer(new), [], []
    for _ in range(REPEATS):
        start, before = time.perf_counter(), time.process_time()
        tokens = answer(new)
        rates.append(sum(map(len, tokens)) / (time.perf_counter() - start))
        burnt.append(sum(map(len, tokens)) / (time.process_time() - before))
    print(json.dumps({"tokens": tokens, "rate": median(rates), "cpu_rate": median(burnt)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)  # (which, prompts, directory)
    args = parser.parse_args()
    if args.side:
        side = run_transformers if args.side[0] == "transformers" else run_ours
        side(args.case, int(args.side[1]), args.new_tokens, args.side[2])
        return
    print(machine())
    print("| case | prompts | transformers tokens/s | ours tokens/s | ratio | ratio by CPU time |")
    print("|---|---|---|---|---|---|")
    for case in [args.case] if args.case else CASES:
        with tempfile.TemporaryDirectory() as folder:
            save(case, folder)
            for batch in CASES[case]:
                words = [__file__, "--case", case, "--new-tokens", str(args.new_tokens), "--side"]
                sides = {name: [*words, name, str(batch), folder] for name in ("transformers", "ours")}
                seen = alternate(sides, args.rounds)
                assert len({json.dumps(one["tokens"]) for runs in seen.values() for one in runs}) == 1, "other answers"
                theirs, ours = (median([one["rate"] for one in seen[name]]) for name in sides)
                burnt = [median([one["cpu_rate"] for one in seen[name]]) for name in sides]
                cells = f"{theirs:.1f} | {ours:.1f} | {ours / theirs:.3f} | {burnt[1] / burnt[0]:.3f}"
                print(f"| {case} | {batch} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
