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
(lr 1, momentum 0.4) was chosen after both of these had been seen, and before it was run. ``…, an island lost``: in the
middle third of what follows the beginning, one process has gone on from a checkpoint, with all sequences and without
outer steps; then both islands go on from its checkpoint, or, ``for good``, it goes on to the end. ``…, an island
away``: the same with outer steps of the only island meanwhile, which is what an elastic run does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from benchmarks.real_text import (
    LENGTH,
    SEED,
    add_arguments,
    evaluations,
    median_speed,
    millions,
    model_of,
    pipelines_of,
    prepare,
    train,
)
from hetero_megatron.plans import plan_from_dict
from hetero_megatron.plans.outer import bytes_per_exchange
from hetero_megatron.spec.flops import parameter_count
from hetero_megatron.spec.hf_config import from_hf_config

SHARES = (3, 1)
RATES = {"1M": 2e-3, "10M": 1e-3}  # of AdamW, by size
OUTER = {"every": 32, "fragments": 4}
LITTLE = {"lr": 1, "momentum": 0.4}
VARIANTS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "outer": {"outer": {}},
    "outer, int4": {"outer": {"compress": "int4"}},
    "outer, int8": {"outer": {"compress": "int8"}},
    "synchronous, other seed": {"seed": SEED + 1000},
    "outer, int4, beside the computing": {"outer": {"compress": "int4", "delay": 1, "mixing": 0.5}},
    "outer, averages": {"outer": {"optimizer": {"lr": 1, "momentum": 0}}},
    "outer, little momentum": {"outer": {"optimizer": LITTLE}},
    "outer, little momentum, int4": {"outer": {"optimizer": LITTLE, "compress": "int4"}},
    "outer, little momentum, int8": {"outer": {"optimizer": LITTLE, "compress": "int8"}},
    "outer, little momentum, int4, beside the computing": {
        "outer": {"optimizer": LITTLE, "compress": "int4", "delay": 1, "mixing": 0.5}
    },
    "outer, little momentum, int4, beside the computing, unmixed": {
        "outer": {"optimizer": LITTLE, "compress": "int4", "delay": 1}
    },
    "outer, little momentum, an island lost": {"outer": {"optimizer": LITTLE}, "lost": "for a while"},
    "outer, little momentum, an island lost for good": {"outer": {"optimizer": LITTLE}, "lost": "for good"},
    "outer, little momentum, an island away": {"outer": {"optimizer": LITTLE}, "lost": "for a while", "alone": True},
    "outer, little momentum, an island away for good": {
        "outer": {"optimizer": LITTLE}, "lost": "for good", "alone": True
    },
}


def plan_of(size: str, outer: dict[str, Any] | None, rows: int) -> dict[str, Any]:
    """Each island in micro-batches of its share, ``rows`` of them."""
    plan = pipelines_of(size, SHARES, rows)
    return plan if outer is None else {**plan, "outer": {"islands": [0, 1], **OUTER, **outer}}


def run(name: str, variant: dict[str, Any], work: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl`` of a variant's run, after the beginning that it shares with others."""
    plan, folder = plan_of(args.size, variant.get("outer"), args.rows), work / name.replace(", ", "-").replace(" ", "_")
    load, lines = list[str](), list[dict[str, Any]]()
    if args.begin and "seed" not in variant:
        train_until(args.begin, plan_of(args.size, None, args.rows), work / "begin", variant, work, args)
        load = ["--load", str(work / "begin")]
    if "lost" in variant:
        third = (args.steps - args.begin) // 3 // OUTER["every"] * OUTER["every"]
        alone = pipelines_of(args.size, (sum(SHARES),), args.rows)
        if "alone" in variant:
            alone["outer"] = {**plan["outer"], "islands": [0]}
        parts = [("before", third, plan), ("alone", 2 * third, alone)]
        if variant["lost"] == "for good":
            parts, plan = parts[:1], alone
        for part, step, its_plan in parts:
            lines += train_until(args.begin + step, its_plan, folder / part, variant, work, args, *load)
            load = ["--load", str(folder / part)]
    return lines + train_variant(folder, plan, variant, work, args, *load)


def train_until(
    step: int, plan: dict[str, Any], folder: Path, variant: dict[str, Any], work: Path, args: argparse.Namespace,
    *more: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """The same as :func:`train_variant`, of a run that ends with a checkpoint after ``step``."""
    end = ("--exit-interval", str(step), "--save-interval", str(step))
    return train_variant(folder, plan, variant, work, args, *end, *more)


def train_variant(
    folder: Path, plan: dict[str, Any], variant: dict[str, Any], work: Path, args: argparse.Namespace, *more: str
) -> list[dict[str, Any]]:
    seed = ("--seed", str(variant.get("seed", args.seed)))
    return train(folder, work, plan, args.steps, RATES[args.size], args.evaluate, args.eval_iters, *seed, *more)


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
    add_arguments(parser)
    parser.add_argument("--steps", type=int, default=320, help="of 512 x rows tokens; a multiple of 32")
    parser.add_argument("--rows", type=int, default=1, help="micro-batches of 3 and of 1 sequences in a step")
    parser.add_argument("--begin", type=int, default=0, help="synchronous steps first; a multiple of 32")
    parser.add_argument("--evaluate", type=int, default=160, help="steps between evaluations")
    parser.add_argument("--eval-iters", type=int, default=32, help="batches of an evaluation")
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=list(VARIANTS), help="some of the variants")
    args = parser.parse_args()
    if any(steps % OUTER["every"] for steps in (args.steps, args.evaluate, args.begin)):
        parser.error(f"steps: multiples of {OUTER['every']}, for global weights change at exchanges")
    prepare(args.work, args.size)
    print(f"{machine()}; {millions(args.size):.1f} M parameters, {args.steps} steps of "
          f"{LENGTH * sum(SHARES) * args.rows} tokens, {args.begin} of them synchronous, "
          f"AdamW lr {RATES[args.size]:g}, outer steps {OUTER}, seed {args.seed}", flush=True)  # fmt: skip
    found = {}
    for name in args.only or VARIANTS:
        lines = run(name, VARIANTS[name], args.work, args)
        found[name] = evaluations(lines)
        print(f"{name}: {median_speed(lines):,.0f} tokens/s (median), held-out loss {list(found[name].values())}",
              flush=True)  # fmt: skip
    report(args.size, found, args.rows)


if __name__ == "__main__":
    main()
