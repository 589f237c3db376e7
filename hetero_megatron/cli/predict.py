"""``hetero-megatron predict``: one plan, simulated: step time, memory per rank, timeline."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from hetero_megatron.api.inputs import Cluster, Model
from hetero_megatron.api.plans import Plan, Prediction, model_name, predict
from hetero_megatron.cli.arguments import SHARE, ArgumentParser, count
from hetero_megatron.cli.flags.planned_model import (
    add_beside,
    add_fp8,
    add_lora,
    add_rollouts,
    fp8_of,
    models_beside,
    preference_of,
    rollouts_of,
    room_for_prompts,
    with_lora,
)
from hetero_megatron.cli.output import check_writable, print_json, write_text
from hetero_megatron.cli.predict_from import SIZES, read_plan
from hetero_megatron.errors import UserError
from hetero_megatron.plans.made_for import OPTIMIZERS, read_made_for
from hetero_megatron.plans.memory.of_plan import ITEM_BYTES
from hetero_megatron.plans.roles import GENERATOR, role_plan
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.spec import load_model
from hetero_megatron.spec.preference import Preference
from hetero_megatron.utils.text import dtype_name, notice_line
from hetero_megatron.utils.yaml_document import read_document


def _add_run_flags(parser: ArgumentParser) -> None:
    for flag, what in (
        ("--grad-reduce-in-bf16", "gradients travel in bf16"),
        ("--overlap-param-gather", "parameters come beside the next forward"),
    ):
        parser.add_argument(flag, action="store_true", help=f"{what}, as the run's flag says")


def main(argv: Sequence[str]) -> int:
    """Print the prediction; returns 1 if the plan does not fit into memory, which is also printed on stderr."""
    parser = ArgumentParser("predict", "Step time, memory and timeline of one plan, without running it.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--plan", metavar="FILE", help="plan file")
    source.add_argument("--from", dest="source", metavar="FILE",
                        help="launch script or flags of Megatron-LM or FlagScale, .toml of torchtitan, .json of "
                        "DeepSpeed, .yaml of Accelerate")  # fmt: skip
    for size in SIZES:
        parser.add_argument("--" + size.replace("_", "-"), type=count(), metavar="N",
                            help="where --from's file does not say it")  # fmt: skip
    parser.add_argument("--nodes", metavar="A,B", help="on which --from's file runs, in the order of their ranks (all)")
    parser.add_argument(
        "--cluster", required=True, metavar="FILE", help="cluster file; its rates are used if it has any"
    )
    parser.add_argument("--model", metavar="M",
                        help="preset, Hugging Face directory or config.json (what the plan was made for)")  # fmt: skip
    parser.add_argument("--dtype", type=dtype_name, choices=tuple(ITEM_BYTES),
                        help="of weights and activations (what the plan was made for, else bf16)")  # fmt: skip
    parser.add_argument("--optimizer", choices=OPTIMIZERS,
                        help="for its state (what the plan was made for, else adam)")  # fmt: skip
    add_fp8(parser)
    add_lora(parser)
    parser.add_argument("--memory-margin", type=SHARE, default=CostOptions.margin, metavar="X",
                        help="share of a chip's memory that stays free (%(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--html", metavar="FILE", help="write the timeline as a page")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline as a Perfetto trace (ui.perfetto.dev)")
    schedule = "also print what every stage does in a step, and which ranks meet in what"
    parser.add_argument("--schedule", action="store_true", help=schedule)
    width = "columns of the printed timeline (100)"
    parser.add_argument("--width", type=count(10, 10_000), default=100, metavar="N", help=width)
    parser.add_argument("--routing-stats", metavar="FILE",
                        help="how often experts were chosen, as a run wrote it (default: all alike)")  # fmt: skip
    parser.add_argument("--peer-replicas-every", type=count(), metavar="K",
                        help="also print what copies for --elastic cost, made every K steps")  # fmt: skip
    add_beside(parser)
    add_rollouts(parser)
    _add_run_flags(parser)
    args = parser.parse_args(list(argv))
    check_writable(args.html, "--html")
    check_writable(args.trace, "--trace")
    cluster, made_for = Cluster.read(args.cluster), None
    if args.source:
        plan = replace(read_plan(args, cluster), beside=models_beside(args))
    else:
        for name in (*SIZES, "nodes"):
            if getattr(args, name) is not None:
                raise UserError("the plan file says it", field="--" + name.replace("_", "-"), accepted="--from FILE")
        document = read_document(args.plan)
        section = document.section("made_for")
        made_for = read_made_for(section) if section is not None else None
        name = model_name(made_for, args.model)
        model = Model.of(with_lora(args, load_model(name), made_for), name)
        beside = models_beside(args) | ({GENERATOR: model} if args.grpo else {})
        plan = Plan.read(
            document, cluster, model, dtype=args.dtype, optimizer=args.optimizer, fp8=fp8_of(args),
            beside=beside, top_k=args.score_top_k,
        )  # fmt: skip
    for notice in plan.notices:
        print(notice_line(notice), file=sys.stderr)
    preference, rollouts = preference_of(args, plan.model.spec.lora is not None), rollouts_of(args)
    if rollouts is not None:
        _rollouts_fit(args, plan, preference)
    memory_error = made_for.less_memory(cluster.described, plan.ranks, args.plan) if made_for is not None else None
    if memory_error is not None:  # no refusal: what it means for this cluster is what is asked here
        print(notice_line(memory_error.problem), file=sys.stderr)
    prediction = predict(
        plan, cluster, memory_margin=args.memory_margin, routing_stats=args.routing_stats,
        reference=0 if preference is None else preference.forwards, grad_reduce_in_bf16=args.grad_reduce_in_bf16,
        overlap_param_gather=args.overlap_param_gather,
        role_forwards=2 if preference is not None and preference.estimates_kl else 1, rollouts=rollouts,
    )  # fmt: skip
    _show(args, prediction)
    if not prediction.fits:
        print(f"error: the plan does not fit: {prediction.over[0]}", file=sys.stderr)
        return 1
    return 0


def _rollouts_fit(args: Namespace, plan: Plan, preference: Preference | None) -> None:
    """UserError: what no run with --grpo has."""
    if preference is not None or args.teacher_hf is not None or args.reference_hf is not None:
        raise UserError("not known beside a teacher or --preference", field="--grpo", accepted="one of the two")
    room_for_prompts(args, plan.seq_length)
    if args.source is None and role_plan(plan.canonical, GENERATOR) is None:
        for key in ("generator_sync_every", "generator_ahead"):
            if getattr(args, key):
                problem, accepted = "has no effect where the ranks that train sample", "a plan with a generator"
                raise UserError(problem, field=f"--{key.replace('_', '-')}", accepted=accepted)


def _show(args: Namespace, prediction: Prediction) -> None:
    """Print it, and write the files that were asked for."""
    if args.html:
        write_text(args.html, "--html", prediction.page())
    if args.trace:
        write_text(args.trace, "--trace", json.dumps(prediction.trace()))
    copies = prediction.peer_copies if args.peer_replicas_every is not None else None
    if args.json:
        print_json(prediction.as_json() | ({} if copies is None else {"peer_copies": copies[1].as_json(copies[0])}))
    else:
        print(prediction.explain(args.width))
        if copies is not None:
            print(f"{copies[0].describe(args.peer_replicas_every)}; {copies[1]}")
        if args.schedule:
            print(prediction.schedule())
