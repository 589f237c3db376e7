"""``hetero-megatron plan``: search for the best plan of a model on a cluster."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hetero_megatron.api.inputs import Cluster, Model, positions_notice
from hetero_megatron.api.search import Found
from hetero_megatron.api.search import plan as search
from hetero_megatron.cli.arguments import SHARE, ArgumentParser, Number, count, seconds
from hetero_megatron.cli.flags.planned_model import (
    add_beside,
    add_fp8,
    add_lora,
    add_rollouts,
    flag_of,
    fp8_of,
    rollouts_of,
    with_lora,
)
from hetero_megatron.cli.output import ClusterBesidePlan, check_writable, print_json, write_text
from hetero_megatron.errors import INTERRUPTED, UserError
from hetero_megatron.planner.problem import SearchSpace
from hetero_megatron.plans import dump_yaml
from hetero_megatron.plans.export import FORMATS, export
from hetero_megatron.plans.islands import divisions
from hetero_megatron.plans.made_for import OPTIMIZERS
from hetero_megatron.plans.memory.of_plan import ITEM_BYTES
from hetero_megatron.plans.outer import MOST_STEPS
from hetero_megatron.plans.runtimes.table import RUNTIMES
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.spec import load_model
from hetero_megatron.utils.outputs import try_folder
from hetero_megatron.utils.text import WorkLine, format_seconds, notice_line, plural

SYNCING = 0.25  # part of a step for gradients and weights, or of the chips idle, above which outer steps are mentioned


def main(argv: Sequence[str]) -> int:
    """Print the plan and the report, or with --json one object."""
    if "--context-only" in argv:
        from hetero_megatron.cli.plan_context import main as context_only

        return context_only(argv)
    parser = _parser("--grpo" in argv)
    args = parser.parse_args(list(argv))
    _check(args, {key for key, value in vars(args).items() if value != parser.get_default(key)})
    beside = None
    if args.out:
        other_ranks = bool(args.without or args.add) or args.objective != "tokens"
        beside = ClusterBesidePlan(args.out, args.cluster, other_ranks)
    spec_read = load_model(args.model)
    model = Model.of(with_lora(args, spec_read), args.model).stretched(args.seq_length)
    cluster = cluster_asked = Cluster.read(args.cluster)
    if args.without:
        cluster = cluster.without(*[name for word in args.without for name in word.split(",")])
    for text in args.add or ():
        cluster = cluster.with_more(text)
    notices = [*positions_notice(Model.of(spec_read), args.seq_length), *cluster.notices]
    for notice in notices:
        print(notice_line(notice), file=sys.stderr)
    if args.allow_outer is not None and (model.spec.moe is not None or model.spec.lora is not None):
        feature = "adapters" if model.spec.lora is not None else "a mixture of experts"
        raise UserError(f"there are no outer steps for {feature}", field="--allow-outer", value=args.allow_outer,
                        accepted="the command without it")  # fmt: skip
    if args.shop:
        from hetero_megatron.cli.plan_questions import go_shopping

        return go_shopping(args, model, cluster)
    rollouts = rollouts_of(args)
    if args.teacher_hf or args.reference_hf or rollouts is not None:
        from hetero_megatron.cli.plan_questions import place_beside

        return place_beside(args, model, cluster, rollouts)
    for key in ("score_top_k", "epochs", "preference"):
        if getattr(args, key) != _parser().get_default(key):
            accepted = "--teacher-hf DIR, or --reference-hf DIR"
            raise UserError("has no effect without a second model", field="--" + key.replace("_", "-"),
                            value=getattr(args, key), accepted=accepted)  # fmt: skip
    with WorkLine("search", args.time_limit or 0.0, show=format_seconds) as line:
        say = None if args.json or args.quiet else partial(_say, line=line)
        elapsed = None if args.quiet else lambda seconds: line.add(seconds - line.done)
        planned = search(model, cluster, progress=say, elapsed=elapsed, **_question(args))
    if args.runtime:
        return _for_runtime(args, planned)
    if args.allow_outer is not None:
        return _apart(args, planned)
    if args.out:
        write_text(args.out, "--out", planned.file)
    try:  # the report may take longer than the search did
        if beside is not None:
            beside.finish(planned.cluster.text() if planned.cluster is not cluster_asked else None, quiet=args.json)
        if not args.json:
            print(_without_packed(planned.file), planned.explain(), "", sep="\n", flush=True)
        tell = None if say is None else partial(say, what="report")
        planned.compare(baselines=not args.no_baselines, every=args.compare, progress=tell)
        if tell is not None:
            tell(f"{planned.summary.seconds:.2f} s, after {planned.seconds:.2f} s of search")
        if args.fallbacks:
            _write_fallbacks(args.fallbacks, planned)
        if args.html:
            write_text(args.html, "--html", planned.page())
    except KeyboardInterrupt:
        plan_place = f"; the plan is in {args.out}" if args.out else "" if args.json else "; the plan is above"
        print(f"error: interrupted in the report{plan_place}", file=sys.stderr)
        return INTERRUPTED
    if args.json:
        print_json(planned.as_json())
    else:
        print(planned.comparisons(), flush=True)
        _tell_of_outer_steps(planned)
    if args.export:  # last: what the format cannot say is refused, and the plan and its report are there
        kind, _, name = args.export.partition(":")
        exported = planned.plan.canonical, planned.plan.model.spec, planned.cluster.described, planned.plan.dtype
        write_text(name, "--export", export(kind, *exported))
    return 0


def _without_packed(text: str) -> str:
    """A plan file for the terminal: schedules that are packed are only named, as the report says what they are."""
    return re.sub(r"stages: zlib:[\w=-]+", "stages: in the plan file (--out)", text)


def _for_runtime(args: Namespace, planned: Found) -> int:
    """The plan that ``--for`` asks for, and what it costs beside the one without its limits."""
    best = planned.best_for(args.runtime, None if args.json or args.quiet else partial(_say, what=args.runtime))
    if args.out:
        write_text(args.out, "--out", f"# {best}.\n{best.plan.text()}")
    if args.html:
        write_text(args.html, "--html", best.prediction.page())
    if args.export:
        write_text(args.export.partition(":")[2], "--export", best.file)
    if args.json:
        print_json({
            "runtime": best.runtime, "slower": best.slower, "considered": best.considered, "file": best.file,
            "plan": best.plan.text(), "without_limits": {"step_seconds": planned.step_seconds},
            **best.prediction.as_json(),
        })  # fmt: skip
    else:
        print(best.file, best.plan.explain(planned.cluster), best, sep="\n")
    return 0


def _apart(args: Namespace, planned: Found) -> int:
    """The plan that --allow-outer asks for: with outer steps where they are faster, else without."""
    apart = planned.apart(args.allow_outer, None if args.json or args.quiet else partial(_say, what="islands"))
    better = apart.pays
    file, prediction = (apart.file, apart.prediction) if better else (planned.file, planned.prediction)
    if args.out:
        write_text(args.out, "--out", file)
    if args.html:
        write_text(args.html, "--html", prediction.page())
    if args.json:
        print_json({
            "outer": better, "speedup": apart.speedup, "waiting": apart.islands.waiting, "nodes": apart.islands.nodes,
            "without_seconds": apart.without_seconds, "file": file, **prediction.as_json(),
        })  # fmt: skip
        return 0
    print(_without_packed(file), prediction.plan.explain(planned.cluster), "", sep="\n")
    said = "the loss then depends on the plan, see docs/outer_steps.md" if better else "so the plan is one without"
    print(f"{apart}; {said}")
    return 0


def _tell_of_outer_steps(planned: Found) -> None:
    """Where slow links hold steps up or leave chips idle, what could be asked."""
    parts, model, cluster = planned.result.best.prediction.parts, planned.plan.model.spec, planned.cluster.described
    share = (parts["gradients"] + parts["parameters"]) / planned.step_seconds
    idle = cluster.world_size - len(planned.plan.canonical.ranks)
    held_up = share > SYNCING or idle > SYNCING * cluster.world_size
    if held_up and model.moe is None and model.lora is None and divisions(range(cluster.world_size), cluster):
        print(f"{share:.0%} of a step passes with gradients and weights between ranks, {plural(idle, 'chip')} idle: "
              "--allow-outer N compares islands that exchange weights at most N steps after one another, under which "
              "the loss depends on the plan")  # fmt: skip


def _say(text: str, what: str = "search", line: WorkLine | None = None) -> None:
    if line is not None:
        line.clear()
    print(f"{what}: {text}", file=sys.stderr, flush=True)


def _parser(rollouts: bool = False) -> ArgumentParser:
    parser = ArgumentParser(
        "plan", "The best plan of a model on a mixed cluster, with a bound on how good any could be."
    )
    add = parser.add_argument
    add("--model", required=True, metavar="M", help="preset, Hugging Face directory or config.json")
    add("--cluster", required=True, metavar="FILE", help="cluster file; its rates are used if it has any")
    add("--seq-length", required=True, type=count(), metavar="S", help="tokens per sequence")
    add("--global-batch-size", required=True, type=count(), metavar="B", help="sequences per optimizer step")
    add("--context-only", action="store_true",
        help="only one stage on all chips: --context-only --help")  # fmt: skip
    add("--out", metavar="FILE", help="write the plan file (and FILE.cluster.yaml where it is for another cluster)")
    add("--html", metavar="FILE", help="write the report and the predicted timeline as a page")
    add("--json", action="store_true", help="print one JSON object instead")
    add("--quiet", action="store_true", help="no progress on standard error")
    add("--dtype", default="bf16", choices=tuple(ITEM_BYTES), help="of weights and activations (bf16)")
    add("--optimizer", default="adam", choices=OPTIMIZERS, help="for its state (adam)")
    add_fp8(parser)
    add("--grad-reduce-in-bf16", action="store_true", help="gradients travel in bf16, as the run's flag says")
    add_lora(parser)
    add_beside(parser)
    add_rollouts(parser, rollouts)
    add("--epochs", type=Number(float, 1e-3, 1e6), default=1.0, metavar="N",
        help="passes over the data, for scores in a file (%(default)g)")  # fmt: skip
    add("--micro-batch-size", type=count(), metavar="N", help="only this one (default: all that make sense)")
    add("--recompute", choices=("none", "selective", "elementwise", "full"),
        help="the same everywhere (default: chosen per stage)")  # fmt: skip
    add("--context", default="auto", choices=("auto", "always", "never"),
        help="context groups: where sequences are long (auto)")  # fmt: skip
    add("--routing-stats", metavar="FILE",
        help="how often experts were chosen (default: all alike)")  # fmt: skip
    add("--more-schedules", default="auto", choices=("auto", "always", "never"),
        help="adaptive schedules: up to 64 chips (auto), or as said")  # fmt: skip
    add("--schedule-effort", type=Number(float, 1e-3, 1e6), default=SearchSpace.schedule_effort, metavar="X",
        help="effort for better plans, beside the default (%(default)g)")  # fmt: skip
    add("--offload", default="auto", choices=("auto", "always", "never"),
        help="optimizers in host memory: where nothing fits without (auto), also to be faster, or never")  # fmt: skip
    add("--offload-activations", default="auto", choices=("auto", "always", "never"),
        help="activations there: of chips with known links (auto)")  # fmt: skip
    add("--memory-margin", type=SHARE, default=CostOptions.margin, metavar="X",
        help="share of a chip's memory that stays free (%(default)s)")  # fmt: skip
    add("--time-limit", type=seconds(1e9), metavar="SECONDS",
        help="end the search after this, with the best plan so far")  # fmt: skip
    add("--seed", type=count(0, 2**31 - 1), default=0, metavar="N", help="of graph partitioning")
    add("--objective", default="tokens", choices=("tokens", "cost", "deadline"),
        help="tokens per second, tokens per currency unit, or the cheapest plan that meets a deadline")  # fmt: skip
    add("--deadline-hours", type=Number(float, 1e-3, 1e9), metavar="H", help="for --objective deadline")
    add("--train-tokens", type=Number(float, 1, 1e30), metavar="T",
        help="tokens to train in all, for --objective deadline")  # fmt: skip
    add("--without", action="append", metavar="NODE", help="what if these nodes were gone (NODE or NODE,NODE)")
    add("--fallbacks", metavar="DIR",
        help="also a plan for the loss of any one node")  # fmt: skip
    add("--add", action="append", metavar="NxNODE", help="what if there were more: 2xH100-node")
    add("--compare", action="store_true",
        help="also each chip type alone, and all good uniform plans")  # fmt: skip
    add("--no-baselines", action="store_true", help="no uniform plan and single chip types for comparison")
    add("--export", metavar="FORMAT:FILE", help=f"also write the plan for others: {', '.join(FORMATS)}")
    add("--for", dest="runtime", choices=tuple(RUNTIMES),
        help="the best plan that it can express, and its file")  # fmt: skip
    add("--allow-outer", type=count(2, MOST_STEPS), metavar="N", help="also outer steps, at most N apart")
    add("--shop", metavar="CARD,CARD", help="what more of these cards would buy")
    add("--prices", metavar="FILE", help="for --shop (docs/planner.md)")
    add("--budget", type=Number(float, 1e-6, 1e15), metavar="N", help="for --shop, in the currency of --prices")
    return parser


def _check(args: Namespace, given: Collection[str]) -> None:
    """UserError for what does not go together; ``given``: keys of flags that are not at their defaults."""
    if args.shop:
        from hetero_megatron.cli.plan_questions import refuse_beside_shop

        refuse_beside_shop(given)
    has_deadline = args.objective == "deadline"
    for name in ("deadline_hours", "train_tokens"):
        if (getattr(args, name) is None) == has_deadline:
            problem = "missing beside --objective deadline" if has_deadline else "it needs --objective deadline"
            raise UserError(problem, field="--" + name.replace("_", "-"), accepted="a number above 0")
    if args.compare and args.no_baselines:
        raise UserError("it contradicts --compare", field="--no-baselines", accepted="one of the two")
    if args.export:
        _check_export(args.export)
        if args.runtime and args.export.partition(":")[0] != args.runtime:
            raise UserError("it contradicts --for", field="--export", value=args.export,
                            accepted=f"{args.runtime}:FILE")  # fmt: skip
    for flag in ("prices", "budget"):
        if bool(args.shop) != (getattr(args, flag) is not None):
            problem = "missing beside --shop" if args.shop else "it needs --shop"
            raise UserError(problem, field="--" + flag, accepted="--shop CARD,CARD --prices FILE --budget N")
    for asked, problem, flags in (
        (args.runtime, "--for has no such report", ("compare", "fallbacks", "no_baselines")),
        (args.allow_outer, "--allow-outer knows nothing of it",
         ("runtime", "compare", "fallbacks", "no_baselines", "export", "shop", "teacher_hf", "reference_hf",
          "grpo")),
    ):  # fmt: skip
        for flag in flags:
            if asked and getattr(args, flag):
                raise UserError(problem, field=flag_of(flag), accepted="one of the two")
    if args.allow_outer is not None and args.objective != "tokens":
        raise UserError("--allow-outer looks for speed", field="--objective", value=args.objective, accepted="tokens")
    check_writable(args.out, "--out")
    check_writable(args.html, "--html")
    if args.fallbacks:
        try_folder(args.fallbacks, "--fallbacks")


def _check_export(text: str) -> None:
    kind, _, name = text.partition(":")
    if kind not in FORMATS or not name:
        problem = "names no file" if kind in FORMATS else "unknown format"
        raise UserError(problem, field="--export", value=text, accepted=", ".join(f"{f}:FILE" for f in FORMATS))
    check_writable(name, "--export")


# What other tools' formats cannot say is not searched: field of the space -> its only value.
_EXPORTED: dict[str, Any] = {
    "more_schedules": "never", "context": "never", "offload": "never", "offload_activations": "never",
}


def _exportable(args: Namespace) -> dict[str, Any]:
    """The choices that ``--export``'s format leaves; flags that ask for what it cannot say are refused."""
    if not args.export or args.runtime:
        return {}
    kind = args.export.partition(":")[0]
    only_choice = _EXPORTED | ({"recompute": "none"} if kind == "sailor" else {})
    for name, value in only_choice.items():
        flag_value = getattr(args, name)
        if flag_value not in (value, "auto", None, False):
            flag = "--" + name.replace("_", "-")
            accepted = "the command without it" if value is False else str(value)
            raise UserError(f"{kind} cannot say it (--export)", field=flag, value=flag_value, accepted=accepted)
    return {"equal_pipelines": "layers" if kind == "sailor" else "copies", "shares": False, **only_choice}


_ASKED = (
    "seq_length", "global_batch_size", "dtype", "optimizer", "grad_reduce_in_bf16", "micro_batch_size", "recompute",
    "context", "offload", "offload_activations", "more_schedules", "schedule_effort", "routing_stats", "memory_margin",
    "time_limit", "seed", "objective", "deadline_hours", "train_tokens",
)  # fmt: skip


def _question(args: Namespace) -> dict[str, Any]:
    """What is asked of :func:`~hetero_megatron.api.search.plan`, but for the model and the cluster."""
    return {name: getattr(args, name) for name in _ASKED} | {"fp8": fp8_of(args)} | _exportable(args)


def _write_fallbacks(folder: str, planned: Found) -> None:
    """Plans for the loss of a node, each as ``without-NODE.yaml``."""
    losses, settings = planned.losses(), planned.plan.canonical.made_for
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"cannot be made: {error.strerror}"
        raise UserError(why, field="--fallbacks", value=folder, accepted="a folder") from None
    for loss in losses:
        if loss.plan is not None:
            head = f"# {planned.plan.model.name} without {loss.node}: {loss.step_seconds:.4g} s per step predicted.\n"
            text = head + dump_yaml(replace(loss.plan, made_for=settings))
            write_text(str(Path(folder) / f"without-{loss.node}.yaml"), "--fallbacks", text)
