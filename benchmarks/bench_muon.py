"""Steps that Muon takes to AdamW's loss: the same model, tokens, order of samples and schedule.

    python benchmarks/bench_muon.py --work DIR [--size 10M] [--steps 192] [--rows 4] [--seed N]
        [--adam-lr 5e-4 1e-3 2e-3 4e-3] [--muon-lr 2e-3 4e-3]

Two replicas train a Llama of 1.1 or 10.8 M parameters on the standard library's sources (``real_text.py``), with
AdamW (betas 0.9 and 0.95) and with Muon (flags' defaults: momentum 0.95, five steps of Newton-Schulz, updates as large
as AdamW's; AdamW for embeddings and norms), each at some learning rates, weight decay 0.1. Compared is the loss on
held-out documents (the same ones) along the way and at the end, and the first evaluation at which Muon is at or below
what AdamW reaches at its best learning rate in the end. Seconds of a step are of this machine and of a batch that is
small beside the matrices, whose update does not depend on it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from benchmarks.real_text import (
    LENGTH,
    add_arguments,
    evaluations,
    median_speed,
    millions,
    pipelines_of,
    prepare,
    train,
)

SHARES = (2, 2)  # sequences of a micro-batch, by replica


def report(found: dict[tuple[str, float], dict[int, float]]) -> None:
    """A row per run, and the step at which Muon has AdamW's last loss."""
    steps = sorted(set.intersection(*(set(losses) for losses in found.values())))
    print(f"\n| optimizer, lr | {' | '.join(f'step {s}' for s in steps)} |\n|{'---|' * (len(steps) + 1)}")
    for (optimizer, lr), losses in found.items():
        print(f"| {optimizer}, {lr:g} | {' | '.join(f'{losses[s]:.4f}' for s in steps)} |")
    goal, lr = min((losses[steps[-1]], lr) for (name, lr), losses in found.items() if name == "adam")
    print(f"\nAdamW's best: {goal:.4f} at lr {lr:g}, after {steps[-1]} steps")
    for (optimizer, lr), losses in found.items():
        if optimizer == "muon":
            reached = next((s for s in steps if losses[s] <= goal), None)
            when = f"by step {reached}, {reached / steps[-1]:.2f} of AdamW's" if reached else "never"
            print(f"Muon, lr {lr:g}: reached {when}; {losses[steps[-1]] - goal:+.4f} in the end")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=192, help="of 512 x rows tokens")
    parser.add_argument("--rows", type=int, default=4, help="micro-batches of a replica in a step")
    parser.add_argument("--adam-lr", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3, 4e-3], help="of AdamW alone")
    parser.add_argument("--muon-lr", type=float, nargs="+", default=[2e-3, 4e-3], help="of Muon, and AdamW beside it")
    parser.add_argument("--evaluate", type=int, default=16, help="steps between evaluations")
    parser.add_argument("--eval-iters", type=int, default=8, help="batches of an evaluation")
    args = parser.parse_args()
    prepare(args.work, args.size)
    print(f"{machine()}; {millions(args.size):.1f} M parameters, {args.steps} steps of "
          f"{LENGTH * sum(SHARES) * args.rows} tokens, seed {args.seed}", flush=True)  # fmt: skip
    plan, found = pipelines_of(args.size, SHARES, args.rows), {}
    runs = [*(("adam", lr) for lr in args.adam_lr), *(("muon", lr) for lr in args.muon_lr)]
    for optimizer, lr in runs:
        flags, folder = ("--optimizer", optimizer, "--seed", str(args.seed)), args.work / f"{optimizer}-{lr:g}"
        lines = train(folder, args.work, plan, args.steps, lr, args.evaluate, args.eval_iters, *flags)
        found[optimizer, lr] = evaluations(lines)
        print(f"{optimizer}, lr {lr:g}: {median_speed(lines):,.0f} tokens/s (median), held-out loss at the end "
              f"{list(found[optimizer, lr].values())[-1]:.4f}", flush=True)  # fmt: skip
    report(found)


if __name__ == "__main__":
    main()
