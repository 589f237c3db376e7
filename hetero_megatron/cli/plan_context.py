"""``hetero-megatron plan --context-only``: divide one stage's tokens and heads over unlike ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from hetero_megatron.api.inputs import Model, positions_notice
from hetero_megatron.cli.arguments import ArgumentParser, count
from hetero_megatron.cli.output import ClusterBesidePlan, check_writable, print_json, write_text
from hetero_megatron.cluster import format_bytes, load_cluster
from hetero_megatron.cluster.catalogue import DTYPES
from hetero_megatron.errors import UserError
from hetero_megatron.planner.context.cluster import problem_from_cluster
from hetero_megatron.planner.context.problem import ContextLayout, ContextOptions, ContextProblem, one_stage_plan
from hetero_megatron.planner.context.scheduler import ContextChoice, schedule_context
from hetero_megatron.plans import dump_yaml, to_dict
from hetero_megatron.plans.canonical import Plan
from hetero_megatron.plans.validate import validate
from hetero_megatron.utils.text import dtype_name, notice_line, plural, rank_ranges


def parser() -> ArgumentParser:
    """The arguments that :func:`run_context_only` reads; the ``plan`` command has the same names."""
    new = ArgumentParser("plan --context-only", "Divide the tokens and heads of one stage over unlike chips.")
    new.add_argument("--context-only", action="store_true")
    new.add_argument("--model", required=True)
    new.add_argument("--cluster", required=True)
    new.add_argument("--seq-length", type=count(), required=True)
    new.add_argument("--global-batch-size", type=count(), default=1)
    new.add_argument("--micro-batch-size", type=count(), default=1)
    new.add_argument("--tensor-model-parallel-size", type=count(1, 1 << 16), default=1, help="ranks per context member")
    new.add_argument("--dtype", type=dtype_name, choices=DTYPES, default="bf16")
    new.add_argument("--recompute", choices=("none", "selective", "full"), default="full")
    new.add_argument("--out")
    new.add_argument("--json", action="store_true")
    return new


def main(argv: Sequence[str]) -> int:
    return run_context_only(parser().parse_args(argv))


def run_context_only(args: argparse.Namespace) -> int:
    """Schedule, print the plan and its comparisons, and write it to ``args.out``; returns the exit code.

    Raises:
        UserError: unsupported requests, before anything is printed.
    """
    check_writable(args.out, "--out")
    cluster_copy = ClusterBesidePlan(args.out, args.cluster, may_write=False)
    problem, notices = _problem(args)
    choice = schedule_context(problem)
    plan = one_stage_plan(problem, choice.layout, args.global_batch_size)
    validate(plan, problem.model)
    if args.out:
        write_text(args.out, "--out", dump_yaml(plan))
    cluster_copy.finish(None, quiet=args.json)
    if args.json:
        print_json(report(problem, choice, plan, notices))
    else:
        print(_text(problem, choice, plan, notices))
    return 0


def _problem(args: argparse.Namespace) -> tuple[ContextProblem, list[str]]:
    model_read = Model(args.model)
    model, notices = model_read.stretched(args.seq_length).spec, positions_notice(model_read, args.seq_length)
    if args.seq_length > model.max_position_embeddings:
        raise UserError(
            f"the model has {model.max_position_embeddings} learned positions", field="--seq-length",
            value=args.seq_length, accepted=f"at most {model.max_position_embeddings}",
        )  # fmt: skip
    options = ContextOptions(recompute=args.recompute, micro_batch=args.micro_batch_size)
    problem = problem_from_cluster(
        model, load_cluster(args.cluster), args.seq_length, tp=args.tensor_model_parallel_size, dtype=args.dtype,
        options=options,
    )  # fmt: skip
    return problem, notices


def report(problem: ContextProblem, choice: ContextChoice, plan: Plan, notices: Sequence[str]) -> dict[str, Any]:
    """What the command found, as JSON data; seconds of one micro-batch, bytes per member."""
    micro_batches = plan.pipelines[0].num_micro_batches
    tokens = problem.seq_length * problem.options.micro_batch
    baseline = choice.baseline
    return {
        "stage": to_dict(plan)["pipelines"][0]["stages"][0],
        "fingerprint": plan.fingerprint(),
        "micro_batch_seconds": choice.seconds,
        "num_micro_batches": micro_batches,
        "tokens_per_second": tokens / choice.seconds,
        "memory_bytes": [round(x) for x in choice.evaluation.memory],
        "memory_limit_bytes": [round(m.memory) for m in problem.members],
        "best_equal": None if baseline is None else {
            "layout": describe(baseline),
            "micro_batch_seconds": choice.baseline_evaluation.seconds if choice.baseline_evaluation else None,
        },
        "gain": choice.gain,
        "bound_seconds": choice.bound,
        "layouts_tried": choice.tried,
        "layouts_too_large": choice.rejected,
        "notices": list(notices),
    }  # fmt: skip


def describe(layout: ContextLayout) -> str:
    name = layout.name or plural(len(layout.groups), 'group')
    if layout.transport == "a2a":
        return name
    return f"{name}, {layout.transport}" + (f" of blocks of {layout.block} tokens" if layout.block else "")


def _text(problem: ContextProblem, choice: ContextChoice, plan: Plan, notices: Sequence[str]) -> str:
    rows = [("group", "ranks", "chip share", "tokens", "heads", "memory", "limit")]
    for k, group in enumerate(choice.layout.groups):
        for m, tokens, heads in zip(group.members, group.tokens, group.heads, strict=True):
            member = problem.members[m]
            used_bytes = choice.evaluation.memory[m]
            rows.append(
                (
                    str(k), rank_ranges(member.ranks), f"{tokens / problem.seq_length:.1%}", str(tokens), str(heads),
                    format_bytes(round(used_bytes)), format_bytes(round(member.memory)),
                )
            )  # fmt: skip
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in rows]
    tokens_per_second = problem.seq_length * problem.options.micro_batch / choice.seconds
    lines += [
        "",
        f"exchange between groups: {describe(choice.layout)}",
        f"micro-batch: {choice.seconds:.4g} s, {tokens_per_second:.4g} tokens/s ({choice.tried} layouts tried, "
        f"{choice.rejected} too large); no layout can take less than {choice.bound:.4g} s at these speeds",
    ]
    equal = choice.baseline_evaluation
    if choice.baseline is None or equal is None:
        lines.append("no Ring, Ulysses or USP layout with equal shards fits in memory")
    else:
        lines.append(
            f"best of equal Ring, Ulysses and USP: {describe(choice.baseline)}, {equal.seconds:.4g} s: "
            f"this plan is {choice.gain:.3f} x as fast"
        )
    lines += [notice_line(notice) for notice in notices]
    return "\n".join([*lines, "", dump_yaml(plan).rstrip()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
