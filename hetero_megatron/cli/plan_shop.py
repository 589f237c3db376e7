"""``hetero-megatron plan --shop``: what more cards would buy."""

from __future__ import annotations

import sys
import time
from argparse import Namespace

from hetero_megatron.api.inputs import Cluster, Model
from hetero_megatron.api.shop import shop
from hetero_megatron.cli.flags.planned_model import fp8_of
from hetero_megatron.cli.output import print_json, write_text

_ASKED = (
    "seq_length", "global_batch_size", "dtype", "optimizer", "micro_batch_size", "recompute", "context", "offload",
    "offload_activations", "memory_margin",
)  # fmt: skip


def main(args: Namespace, model: Model, cluster: Cluster) -> int:
    """Print the sets of cards, or with --json one object."""
    quiet, started = args.json or args.quiet, time.monotonic()

    def say(text: str) -> None:
        print(f"shop: {text}", file=sys.stderr, flush=True)

    cards = [name.strip() for name in args.shop.split(",")]
    question = {name: getattr(args, name) for name in _ASKED} | {"fp8": fp8_of(args)}
    sets = shop(model, cluster, cards, args.prices, args.budget, progress=None if quiet else say, **question)
    if not quiet:
        say(f"{len(sets.offers)} searches in {time.monotonic() - started:.1f} s")
    if args.html:
        write_text(args.html, "--html", sets.page())
    if args.json:
        print_json(sets.as_json())
    else:
        print(sets)
    return 0
