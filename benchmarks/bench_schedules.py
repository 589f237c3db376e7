"""Adaptive schedules against an exact solver, against the other schedules, and the CPU seconds of making large ones.

``--exact N``: N random pipelines of 2 to 4 stages and 2 to 8 micro-batches, against the exact solver
(tests/support/exact_schedule.py: CP-SAT where OR-Tools can be imported, else HiGHS).
``--random N``: N random pipelines of 2 to 8 stages, against 1F1B and the other schedules in the same memory, counted
in micro-batches; a schedule that needs more is left out of its row.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from hetero_megatron.errors import UserError
from hetero_megatron.schedule import Action, Schedule, generate, in_flight, lower, simulate, with_synchronisation
from hetero_megatron.schedule.adaptive import search_adaptive
from hetero_megatron.schedule.adaptive_chunks import search_adaptive_chunks
from hetero_megatron.schedule.chunk_times import ChunkedTimes
from hetero_megatron.schedule.generators import schedule_names
from hetero_megatron.schedule.stage_orders import LinkTimes, PipelineTimes, StageTimes
from hetero_megatron.schedule.stored import stored_orders
from tests.support.exact_schedule import cp_sat_installed, exact_seconds
from tests.support.pipelines import random_times

IN_CHUNKS = "adaptive, two chunks"


def against_exact(cases: int, seed: int, limit: float) -> None:
    draw = random.Random(seed)
    gaps, plain, seconds, open_cases = [], [], [], 0
    for case in range(cases):
        times, count = random_times(draw, draw.randint(2, 4)), draw.randint(2, 8)
        begin = time.process_time()
        found = search_adaptive(times, count)
        seconds.append(time.process_time() - begin)
        best, bound = exact_seconds(times, count, found.seconds, limit)
        open_cases += bound < best - 0.5
        least = min(bound, best) if bound < best - 0.5 else best
        gaps.append(found.seconds / least - 1)
        plain.append(found.one_f_one_b_seconds / least - 1)
        if gaps[-1] > 1e-6:
            print(
                f"  case {case}: {len(times.stages)} x {count}: {found.seconds:g} s, exact {best:g} (bound {bound:g})"
            )
    solver = "CP-SAT" if cp_sat_installed() else "HiGHS"
    print(f"{cases} small pipelines against {solver}, {open_cases} not solved in {limit:g} s (compared with its bound)")
    print(f"  adaptive over the optimum: mean {statistics.mean(gaps):.3%}, worst {max(gaps):.3%}; "
          f"optimal {sum(g < 1e-6 for g in gaps)} of {cases}")  # fmt: skip
    print(f"  1F1B over the optimum: mean {statistics.mean(plain):.1%}, worst {max(plain):.1%}")
    print(f"  CPU s of a search: median {statistics.median(seconds):.3f}, worst {max(seconds):.3f}")


def simulated_seconds(schedule: Schedule, times: PipelineTimes) -> float:
    tail: list[tuple[list[Action], list[Action]]] = [([Action("REDUCE", 0)], []) for _ in times.stages]
    return simulate(with_synchronisation(lower(schedule), tail), times.costs()).step_seconds


def against_others(cases: int, seed: int, spread: float, more: int) -> None:
    """``spread``: how unlike the stages are; ``more``: micro-batches in flight beyond 1F1B's, on every stage; adaptive
    and zero-bubble may use them."""
    draw = random.Random(seed)
    speeds: dict[str, list[float]] = {}
    slower, above, worse, seconds, chunk_seconds = 0, 0, 0, [], []
    beaten: Counter[str] = Counter()
    for _ in range(cases):
        count = draw.randint(2, 8)
        drawn = random_times(draw, count, spread=spread)
        stages = tuple(replace(s, memory_bytes=count - i + more) for i, s in enumerate(drawn.stages))
        times, micro_batches = replace(drawn, stages=stages), count * draw.choice((2, 4))
        plain = simulated_seconds(generate("1f1b", count, micro_batches), times)
        begin = time.process_time()
        found = search_adaptive(times, micro_batches)
        seconds.append(time.process_time() - begin)
        made = {"adaptive": found.schedule}
        for name in schedule_names():
            made |= in_memory(name, times, micro_batches, 2 if name == "interleaved" else 1)
        made |= in_memory("zero-bubble", times, micro_batches, 2)
        taken = {name: simulated_seconds(schedule, times) for name, schedule in made.items()}
        begin = time.process_time()
        taken[IN_CHUNKS] = search_adaptive_chunks(in_chunks(times), micro_batches).seconds
        chunk_seconds.append(time.process_time() - begin)
        others = [taken[name] for name, schedule in made.items() if schedule.chunks > 1]
        worse += taken[IN_CHUNKS] > min(others, default=math.inf) * (1 + 1e-9)
        for name, step in taken.items():
            speeds.setdefault(name, []).append(plain / step)
        slower += taken["adaptive"] > plain
        best = min(taken["adaptive"], taken[IN_CHUNKS])
        speeds.setdefault("the better of the two", []).append(plain / best)
        beaten.update(name for name, step in taken.items() if step < best * (1 - 1e-9))
        above += any(n > s.memory_bytes for n, s in zip(in_flight(found.schedule), stages, strict=True))
    print(
        f"{cases} pipelines of 2 to 8 stages of +-{spread:.0%}, 2 or 4 micro-batches per stage, memory of 1F1B + {more}"
    )
    for name, values in speeds.items():
        print(f"  {name:22} speed of 1F1B x {statistics.mean(values):.3f} mean, {statistics.median(values):.3f} median "
              f"({min(values):.3f} to {max(values):.3f}), in {len(values)} pipelines")  # fmt: skip
    print(f"  adaptive slower than 1F1B: {slower}; above the cap: {above}; over chunks slower than interleaved or "
          f"zero-bubble over them: {worse}; both slower than another: {dict(beaten)}")  # fmt: skip
    for name, values in (("one chunk", seconds), ("two chunks", chunk_seconds)):
        print(f"  CPU s of a search, {name}: median {statistics.median(values):.3f}, worst {max(values):.3f}")


def in_chunks(times: PipelineTimes, chunks: int = 2) -> ChunkedTimes:
    """Every stage cut into equal chunks; from the last stage to the first nothing takes time, as for interleaved."""
    stages = []
    for s in times.stages:
        seconds = (s.forward_seconds, s.input_gradient_seconds, s.weight_gradient_seconds)
        sizes = {"activation_bytes": s.activation_bytes / chunks, "deferred_bytes": s.deferred_bytes / chunks}
        part = StageTimes(*(x / chunks for x in seconds), **sizes)
        first = replace(part, memory_bytes=s.memory_bytes, tail_seconds=s.tail_seconds)
        stages.append((first, *[part] * (chunks - 1)))
    return ChunkedTimes(tuple(stages), (*times.links, LinkTimes()) if times.links else ())


def in_memory(name: str, times: PipelineTimes, micro_batches: int, chunks: int) -> dict[str, Schedule]:
    """The generated schedule under its name, where it keeps the memory."""
    caps = [int(stage.memory_bytes) for stage in times.stages]
    try:
        schedule = generate(name, len(caps), micro_batches, chunks, caps if name == "zero-bubble" else ())
    except UserError:
        return {}
    fits = all(n <= chunks * cap for n, cap in zip(in_flight(schedule), caps, strict=True))
    return {f"{name}, two chunks" if chunks > 1 and name == "zero-bubble" else name: schedule} if fits else {}


def large(num_stages: int, micro_batches: int) -> None:
    draw = random.Random(1)
    forward = [draw.uniform(0.9, 1.1) for _ in range(num_stages)]
    stages = tuple(
        StageTimes(f, 1.1 * f, 0.9 * f, draw.uniform(0, 2), memory_bytes=num_stages - s + 1)
        for s, f in enumerate(forward)
    )
    times = PipelineTimes(stages, (LinkTimes(0.1, 0.1, 0.01),) * (num_stages - 1))
    begin = time.process_time()
    found = search_adaptive(times, micro_batches)
    seconds = time.process_time() - begin
    text = sum(map(len, stored_orders(found.schedule)))
    print(f"{num_stages} stages x {micro_batches} micro-batches: {seconds:.2f} CPU s, "
          f"{found.timed_actions:,} actions timed; "
          f"{found.one_f_one_b_seconds / found.seconds:.3f} x 1F1B, {found.seconds / found.bound_seconds - 1:.1%} over "
          f"the lower bound; stored in {text:,} characters")  # fmt: skip
    plain = generate("interleaved", num_stages, micro_batches, 2)
    caps = [most / 2 for most in in_flight(plain)]  # a micro-batch in one of two chunks counts half
    stages = tuple(replace(s, memory_bytes=cap) for s, cap in zip(stages, caps, strict=True))
    begin = time.process_time()
    cut = search_adaptive_chunks(in_chunks(replace(times, stages=stages)), micro_batches)
    seconds = time.process_time() - begin
    text = sum(map(len, stored_orders(cut.schedule)))
    print(f"  in two chunks and the memory of interleaved: {seconds:.2f} CPU s, {cut.timed_actions:,} actions timed; "
          f"{cut.interleaved_seconds / cut.seconds:.3f} x interleaved, {cut.seconds / cut.bound_seconds - 1:.1%} over "
          f"the lower bound; stored in {text:,} characters")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exact", type=int, default=100)
    parser.add_argument("--random", type=int, default=200)
    parser.add_argument("--more", type=int, nargs="+", default=[0, 1], help="micro-batches in flight beyond 1F1B's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of the exact solver per case")
    args = parser.parse_args()
    print(f"{machine()}, load {os.getloadavg()[0]:.1f}")
    if args.exact:
        against_exact(args.exact, args.seed, args.limit)
    if args.random:
        for spread, more in itertools.product((0.1, 0.3, 0.6), args.more):
            against_others(args.random, args.seed, spread, more)
    for num_stages, micro_batches in ((8, 64), (32, 256)):
        large(num_stages, micro_batches)


if __name__ == "__main__":
    main()
