"""``hetero-megatron schedule``: one pipeline under every schedule: step, bubble, memory, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetero_megatron.cli.arguments import ArgumentParser, Number, count
from hetero_megatron.cli.output import check_writable, print_json, write_text
from hetero_megatron.errors import UserError
from hetero_megatron.schedule import Schedule, generate, lower, schedule_names, simulate
from hetero_megatron.schedule.adaptive import search_adaptive
from hetero_megatron.schedule.adaptive_chunks import search_adaptive_chunks
from hetero_megatron.schedule.chunk_times import ChunkedTimes
from hetero_megatron.schedule.picture import Picture, svg, table
from hetero_megatron.schedule.stage_orders import LinkTimes, PipelineTimes, StageTimes
from hetero_megatron.schedule.stored import stored_orders
from hetero_megatron.utils.text import plural

# Over the chunks that interleaved has.
CHUNKED_ZERO_BUBBLE, CHUNKED_ADAPTIVE = "zero-bubble-chunks", "adaptive-chunks"
MOST_ACTIONS = 100_000  # of one schedule: pictures of more are of no use
_SECONDS = Number(float, 0, 1e9)


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(list(argv))
    check_writable(args.out, "--out")
    times = _times(args)
    pictures, stored = [], None
    chunked_too = (CHUNKED_ZERO_BUBBLE, CHUNKED_ADAPTIVE) if args.chunks > 1 else ()
    for name in args.schedules or (*schedule_names(), "adaptive", *chunked_too):
        title, costs = name, times.costs()
        if name == "adaptive":
            schedule = search_adaptive(times, args.micro_batches, args.effort).schedule
            stored = stored_orders(schedule)
        elif name == CHUNKED_ADAPTIVE:
            chunked = _cut(times, args.chunks)
            schedule = search_adaptive_chunks(chunked, args.micro_batches, args.effort).schedule
            title, costs = f"adaptive, {plural(args.chunks, 'chunk')}", chunked.costs()
        elif name == CHUNKED_ZERO_BUBBLE:
            schedule = _generated("zero-bubble", args, times, args.chunks)
            title = f"zero-bubble, {plural(args.chunks, 'chunk')}"
        else:
            schedule = _generated(name, args, times, args.chunks if name == "interleaved" else 1)
        pictures.append(Picture(title, simulate(lower(schedule), costs)))
    if args.out:
        write_text(args.out, "--out", svg(pictures))
    if args.json:
        print_json(_summary(pictures, stored))
        return 0
    print(table(pictures))
    if stored is not None:
        print("\nadaptive (F, I = B_INPUT, W, B):")
        print("\n".join(f"  stage {s}: {row}" for s, row in enumerate(stored)))
    if args.out:
        print(f"wrote {args.out}")
    return 0


def _cut(times: PipelineTimes, chunks: int) -> ChunkedTimes:
    """Every stage cut into equal chunks; the way from the last stage to the first takes no time."""
    stages = []
    for stage in times.stages:
        seconds = (stage.forward_seconds, stage.input_gradient_seconds, stage.weight_gradient_seconds)
        part = StageTimes(*(x / chunks for x in seconds), activation_bytes=1 / chunks, deferred_bytes=1 / chunks)
        stages.append((replace(part, memory_bytes=stage.memory_bytes), *[part] * (chunks - 1)))
    return ChunkedTimes(tuple(stages), (*times.links, LinkTimes()) if times.links else ())


def _generated(name: str, args: Any, times: PipelineTimes, chunks: int) -> Schedule:
    caps = [int(stage.memory_bytes) for stage in times.stages] if name == "zero-bubble" else []
    return generate(name, args.stages, args.micro_batches, chunks, caps)


def _parser() -> ArgumentParser:
    parser = ArgumentParser("schedule", "One pipeline under every schedule: step time, bubble, memory, and a picture.")
    add = parser.add_argument
    add("--stages", type=count(1, MOST_ACTIONS), required=True, metavar="P")
    add("--micro-batches", type=count(0, MOST_ACTIONS), required=True, metavar="M")
    per_stage = "one number for all stages, or one per stage"
    add("--forward", type=_SECONDS, nargs="+", default=[1.0], metavar="S", help=f"seconds of F: {per_stage} (1)")
    add("--input-gradient", type=_SECONDS, nargs="+", metavar="S", help=f"seconds of B_INPUT: {per_stage} (those of F)")
    add("--weight-gradient", type=_SECONDS, nargs="+", metavar="S", help=f"seconds of W: {per_stage} (those of F)")
    add("--link", type=_SECONDS, nargs="+", default=[0.0], metavar="S",
        help="seconds of a transfer: one number, or P - 1")  # fmt: skip
    add(
        "--in-flight",
        type=count(1, MOST_ACTIONS),
        nargs="+",
        metavar="N",
        help=f"memory of adaptive and zero-bubble, in micro-batches: {per_stage} (P)",
    )
    chunked = f"interleaved, {CHUNKED_ZERO_BUBBLE} and {CHUNKED_ADAPTIVE}"
    add("--chunks", type=count(1, MOST_ACTIONS), default=2, metavar="N",
        help=f"runs of layers per stage of {chunked} (2)")  # fmt: skip
    names = ", ".join((*schedule_names(), "adaptive", CHUNKED_ZERO_BUBBLE, CHUNKED_ADAPTIVE))
    add("--schedules", nargs="+", metavar="NAME", help=f"of {names} (all)")
    add("--effort", type=count(0, 10**12), default=1_000_000, metavar="N",
        help="actions that adaptive may time (1,000,000)")  # fmt: skip
    add("--out", metavar="FILE.svg", help="write the pictures")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _times(args: Any) -> PipelineTimes:
    if 3 * args.stages * args.micro_batches > MOST_ACTIONS:
        raise UserError(
            "is too large a schedule for a picture",
            field="--micro-batches",
            value=args.micro_batches,
            accepted=f"{MOST_ACTIONS // (3 * args.stages)} or fewer with {args.stages} stages",
        )
    forward = _each(args.forward, args.stages, "--forward")
    inputs = _each(args.input_gradient or forward, args.stages, "--input-gradient")
    weights = _each(args.weight_gradient or forward, args.stages, "--weight-gradient")
    caps = _each(args.in_flight or [args.stages], args.stages, "--in-flight")
    links = _each(args.link, args.stages - 1, "--link")
    stages = tuple(StageTimes(f, i, w, memory_bytes=c) for f, i, w, c in zip(forward, inputs, weights, caps))
    return PipelineTimes(stages, tuple(LinkTimes(s, s) for s in links))


def _each(values: Sequence[float], count: int, flag: str) -> Sequence[float]:
    if len(values) == 1:
        return list(values) * count
    if len(values) != count:
        raise UserError("is another number of values", field=flag, value=list(values), accepted=f"1 value or {count}")
    return values


def _summary(pictures: Sequence[Picture], stored: Sequence[str] | None) -> dict[str, Any]:
    schedules = [
        {
            "name": p.title,
            "step_seconds": p.timeline.step_seconds,
            "bubble": p.bubble,
            "in_flight": list(p.in_flight),
        }
        for p in pictures
    ]
    return {"schedules": schedules, "adaptive_stages": stored}
