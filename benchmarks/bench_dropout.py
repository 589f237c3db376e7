"""What dropout costs on one CPU rank: forward and backward of a model with and without it, in turns.

    python benchmarks/bench_dropout.py [--turns 5]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import torch

from hetero_megatron.data.batch import Batch
from hetero_megatron.layout import Box
from hetero_megatron.model import GPTStage, initial_values
from hetero_megatron.ops.dropout import Draws
from hetero_megatron.spec import Dropout, load_model, logical_tensors, shares

LAYERS, TOKENS = 4, 512
RATES = {
    "none": Dropout(), "hidden 0.1": Dropout(hidden=0.1), "attention 0.1": Dropout(attention=0.1),
    "both 0.1": Dropout(0.1, 0.1),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    spec = replace(load_model("gpt2"), num_layers=LAYERS)
    tokens = torch.randint(0, spec.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    batch = Batch(tokens, tokens, torch.arange(TOKENS)[None], draws=Draws(1, 1, 0))
    stages = {}
    for name, rates in RATES.items():
        stage = GPTStage(spec, shares(spec, (1,))[0], range(LAYERS), True, False, dropout=rates)
        wanted = {t.name: t for t in logical_tensors(spec)}
        with torch.no_grad():
            for key, param in stage.named_parameters():
                param.copy_(initial_values(wanted[key], Box.whole(wanted[key].shape), spec, 0))
        stages[name] = stage
    best = dict.fromkeys(RATES, float("inf"))
    for _ in range(turns):
        for name, stage in stages.items():
            start = time.process_time()
            stage(tokens, batch).sum().backward()
            best[name] = min(best[name], time.process_time() - start)
    for name, seconds in best.items():
        print(f"{name:<15}{1000 * seconds:8.1f} ms  {seconds / best['none']:.3f}")


if __name__ == "__main__":
    main()
