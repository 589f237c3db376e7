"""Questions to ``hetero-megatron plan`` that are not for one model's best plan: ``--teacher-hf DIR`` (``--reference-hf
DIR``), where a model that only runs forward goes; ``--grpo``, where answers are sampled; ``--shop``, what more cards
would buy."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Collection

from hetero_megatron.api.inputs import Cluster, Model
from hetero_megatron.api.roles import place_role
from hetero_megatron.api.shop import shop
from hetero_megatron.cli.flags.planned_model import flag_of, fp8_of, models_beside, preference_of, room_for_prompts
from hetero_megatron.cli.output import check_writable, print_json, write_text
from hetero_megatron.errors import UserError
from hetero_megatron.plans.roles import GENERATOR
from hetero_megatron.spec.grpo import Grpo

_ASKED_OF_ROLES = (
    "seq_length", "global_batch_size", "dtype", "optimizer", "grad_reduce_in_bf16", "micro_batch_size", "recompute",
    "context", "offload", "offload_activations", "more_schedules", "schedule_effort", "memory_margin", "time_limit",
    "seed", "preference",
)  # fmt: skip
# What the search for a role knows nothing of, where it differs from its default.
_NOT_OF_ROLES = {
    "objective": "tokens", "runtime": None, "export": None, "fallbacks": None, "compare": False, "shop": None,
    "routing_stats": None, "fp8_format": None, "fp8_recipe": None, "without": None,
    "add": None,
}  # fmt: skip


def place_beside(args: Namespace, model: Model, cluster: Cluster, rollouts: Grpo | None) -> int:
    """Print the placement and its plan, or with --json one object; ``rollouts``: of a generator."""
    preference_of(args, model.spec.lora is not None)
    given = models_beside(args)
    if rollouts is not None:
        if given or args.preference is not None:
            raise UserError("not known beside a teacher or --preference", field="--grpo", accepted="one of the two")
        room_for_prompts(args, args.seq_length)
        given = {GENERATOR: model}
    ((role, other),) = given.items()
    for key, default in _NOT_OF_ROLES.items():
        if getattr(args, key) != default:
            beside = "--grpo" if rollouts is not None else f"--{role}-hf"
            raise UserError(f"not known beside {beside}", field=flag_of(key), accepted="one of the two")
    file = None if args.out is None else f"{args.out.removesuffix('.yaml')}.{role}.yaml"
    check_writable(file, "--out")
    quiet = args.json or args.quiet

    def say(text: str) -> None:
        print(f"search: {text}", file=sys.stderr, flush=True)

    question = {name: getattr(args, name) for name in _ASKED_OF_ROLES}
    placed = place_role(model, cluster, role, other, top_k=args.score_top_k, epochs=args.epochs,
                        progress=None if quiet else say, rollouts=rollouts, **question)  # fmt: skip
    if args.out:
        write_text(args.out, "--out", placed.file)
        if file is not None and placed.role_plan is not None:
            write_text(file, "--out", placed.role_plan.text())
    if args.html:
        write_text(args.html, "--html", placed.page())
    if args.json:
        print_json(placed.as_json())
    else:
        print(placed.explain())
    return 0


_ASKED_OF_SHOPS = (
    "seq_length", "global_batch_size", "dtype", "optimizer", "micro_batch_size", "recompute", "context", "offload",
    "offload_activations", "memory_margin",
)  # fmt: skip


# What else may stand beside: which model and cluster, and how to answer.
_BESIDE_SHOP = {
    *_ASKED_OF_SHOPS, "model", "cluster", "without", "add", "fp8_format", "fp8_recipe", "mtp_num_layers",
    "lora_rank", "lora_targets", "lora_layers", "lora_sites", "lora_dropout", "use_dora", "lora_base_dtype",
    "shop", "prices", "budget", "html", "json", "quiet",
}  # fmt: skip


def refuse_beside_shop(given: Collection[str]) -> None:
    """UserError for a flag (by its key) of which no search of many clusters knows."""
    for key in sorted(set(given) - _BESIDE_SHOP):
        raise UserError("--shop plans for many clusters", field=flag_of(key), accepted="one of the two")


def go_shopping(args: Namespace, model: Model, cluster: Cluster) -> int:
    """Print the sets of cards, or with --json one object."""
    quiet, started = args.json or args.quiet, time.monotonic()

    def say(text: str) -> None:
        print(f"shop: {text}", file=sys.stderr, flush=True)

    cards = [name.strip() for name in args.shop.split(",")]
    question = {name: getattr(args, name) for name in _ASKED_OF_SHOPS} | {"fp8": fp8_of(args)}
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
