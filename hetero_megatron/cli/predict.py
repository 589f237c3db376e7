"""``hetero-megatron predict``: one plan, simulated: step time, memory per rank, timeline."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from hetero_megatron.cli.arguments import SHARE, ArgumentParser, count, stretched
from hetero_megatron.cli.flags.adapter import add_lora, with_lora
from hetero_megatron.cli.flags.fp8 import add_fp8, fp8_of
from hetero_megatron.cli.output import check_writable, print_json, write_text
from hetero_megatron.cluster import load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.plan import load_plan
from hetero_megatron.plan.compile import CompiledPlan
from hetero_megatron.plan.islands import add_islands, format_added, format_islands
from hetero_megatron.plan.made_for import made_for_of
from hetero_megatron.plan.memory.of_plan import ITEM_BYTES, moments_of
from hetero_megatron.plan.program import format_step
from hetero_megatron.plan.routing import routing_of
from hetero_megatron.predictor.cost.layer_cost import CostModel, CostOptions
from hetero_megatron.predictor.report.prediction import as_json, format_prediction, format_question, question
from hetero_megatron.predictor.report.prediction_page import html_page
from hetero_megatron.predictor.report.timeline import format_timeline, perfetto_trace
from hetero_megatron.predictor.simulate.stage_cost import PreparedPlan
from hetero_megatron.predictor.simulate.step import predict
from hetero_megatron.spec import load_model
from hetero_megatron.utils.text import dtype_name, notice_line
from hetero_megatron.utils.yaml_document import Entry, read_document


def main(argv: Sequence[str]) -> int:
    """Print the prediction; returns 1 if the plan does not fit into memory, which is also printed on stderr."""
    parser = ArgumentParser("predict", "Step time, memory and timeline of one plan, without running it.")
    parser.add_argument("--plan", required=True, metavar="FILE", help="plan file")
    parser.add_argument(
        "--cluster", required=True, metavar="FILE", help="cluster file; its rates are used if it has any"
    )
    parser.add_argument("--model", metavar="M",
                        help="preset, Hugging Face directory or config.json (what the plan was made for)")  # fmt: skip
    parser.add_argument("--dtype", type=dtype_name, choices=tuple(ITEM_BYTES),
                        help="of weights and activations (what the plan was made for, else bf16)")  # fmt: skip
    parser.add_argument("--optimizer", choices=("adam", "sgd"),
                        help="for its state (what the plan was made for, else adam)")  # fmt: skip
    add_fp8(parser)
    add_lora(parser)
    parser.add_argument("--memory-margin", type=SHARE, default=CostOptions.margin, metavar="X",
                        help="share of a chip's memory that stays free (%(default)s)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--html", metavar="FILE", help="write the timeline as a page")
    parser.add_argument("--trace", metavar="FILE", help="write the timeline as a Perfetto trace (ui.perfetto.dev)")
    parser.add_argument("--schedule", action="store_true",
                        help="also print what every stage does in a step, and which ranks meet in what")  # fmt: skip
    parser.add_argument("--width", type=count(10, 10_000), default=100, metavar="N",
        help="columns of the printed timeline (100)")  # fmt: skip
    parser.add_argument("--routing-stats", metavar="FILE",
                        help="how often experts were chosen, as a run wrote it (default: all alike)")  # fmt: skip
    args = parser.parse_args(list(argv))
    check_writable(args.html, "--html")
    check_writable(args.trace, "--trace")
    document = read_document(args.plan)
    made = made_for_of(document)
    name = args.model or (made.known_model() if made is not None else None)
    if name is None:
        problem = "missing, and the plan names none" if made is None else f"missing, and {made.model} is not here"
        raise UserError(problem, field="--model", accepted="preset, Hugging Face directory or config.json")
    model, cluster = with_lora(args, load_model(name), made), load_cluster(args.cluster)
    if made is not None:
        made.agree_on_model(model, args.plan)
    for key, usual in (("dtype", "bf16"), ("optimizer", "adam")):
        if getattr(args, key) is None:
            setattr(args, key, usual if made is None else getattr(made, key))
        elif made is not None:
            made.agree(key, f"--{key}", getattr(args, key), args.plan)
    model, notices = stretched(model, _seq_length(document))
    for notice in notices:
        print(notice_line(notice), file=sys.stderr)
    written = load_plan(document, model, cluster, args.dtype)
    plan = add_islands(written, model, cluster)
    if plan is not written:
        print(notice_line(format_added(plan, cluster)), file=sys.stderr)
    compiled = CompiledPlan(plan, model)
    less = made.less_memory(cluster, plan.ranks, args.plan) if made is not None else None
    if less is not None:  # no refusal: what it means for this cluster is what is asked here
        print(notice_line(less.problem), file=sys.stderr)
    options = CostOptions(
        margin=args.memory_margin, moments=moments_of(args.optimizer), routing=routing_of(args.routing_stats, model),
        fp8=fp8_of(args, made, args.plan),
    )  # fmt: skip
    costs = CostModel(model, cluster, plan.seq_length, args.dtype, options)
    found = predict(plan, model, cluster, args.dtype, costs, prepared=PreparedPlan(compiled))
    asked = question(costs, plan.global_batch_size)
    if args.html:
        write_text(args.html, "--html", html_page(found, model.name, cluster, asked))
    if args.trace:
        write_text(args.trace, "--trace", json.dumps(perfetto_trace(found)))
    if args.json:
        print_json({"asked": asked.as_json(), **as_json(found)})
    else:
        print(format_question(asked), "", format_prediction(found), sep="\n")
        if plan.islands:
            print(format_islands(compiled))
        print(format_timeline(found, args.width))
        if args.schedule:
            print(format_step(plan, compiled.buckets, model))
    if found.over:
        print(f"error: the plan does not fit: {found.over[0]}", file=sys.stderr)
        return 1
    return 0


def _seq_length(document: Entry) -> int:
    """Of a plan file that is not checked yet; 0 where it says none."""
    keys = document.value if isinstance(document.value, dict) else {}
    return keys["seq_length"].integer(1) if "seq_length" in keys else 0
