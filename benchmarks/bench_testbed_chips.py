"""Testbed: how long actions last against what the emulated chips should take, and speed ratios against those asked.

    python benchmarks/bench_testbed_chips.py [--chips clock soft] [--repeats 4]

Every rank runs the same one-stage pipeline, all for the same time.
- ``action``: wall seconds of an action (median of a rank's) against its emulated seconds: for ``clock`` those of the
  nominal chip, for ``soft`` its own CPU seconds / speed; the largest error of a rank.
- ``ratio``: wall seconds of a micro-batch on one chip type against the fastest type's, less the ratio of their speeds;
  the largest error of a type. A type's seconds are the mean over its ranks and micro-batches: a rank that another one
  delayed makes it up in its next action. ``spread``: of that ratio over the repeats. Under ``soft`` both are reported
  only: a chip is as slow as the core at that moment makes it.
A row that others disturbed is measured again, up to three times; if it still is disturbed the verdict leaves it out.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_testbed import MODEL, PLANS, cluster_of
from benchmarks.common import machine
from benchmarks.testbed_run import run_job, undisturbed

SEQ_LENGTH = 512  # an action is 30 to 60 ms of CPU time, so a cache to fill after a sleep (1 ms) is little
LAYERS = 4
MICRO_BATCHES = 20  # of the slowest ranks (others get more, by their speeds): a last action that is late counts little
GOAL = 0.01  # of ``clock``


def measure(name: str, mode: str, repeats: int) -> tuple[list[Any], bool]:
    """Per rank: ``rows``, (kind, wall, emulated seconds) of each action of each repeat, and ``clock``; and
    whether others disturbed it."""
    work = {
        "model": {**MODEL, "num_layers": LAYERS}, "seq_length": SEQ_LENGTH, "micro_batches": MICRO_BATCHES,
        "repeats": repeats,
    }  # fmt: skip
    found = run_job(name, "testbed_actions.py", cluster_of(name, mode), work, mode, "none")
    return found["ranks"], found["disturbed"]


def action_error(ranks: list[Any]) -> float:
    """The largest, over ranks and kinds, of median wall seconds against median emulated seconds."""
    worst = 0.0
    for rank in ranks:
        for kind in ("F", "B"):
            rows = [row for repeat in rank["rows"] for row in repeat if row[0] == kind]
            worst = max(worst, abs(median(w for _, w, _ in rows) / median(c for _, _, c in rows) - 1))
    return worst


def ratios(name: str, ranks: list[Any]) -> tuple[float, float]:
    """(largest error of a type's ratio to the fastest type over all repeats, its spread over repeats)."""
    described = PLANS[name].cluster
    chips = [g["chip"] for g in described["nodes"] for _ in range(g["count"] * g["chips_per_node"])]
    speeds = {chip: value["emulate"]["speed"] for chip, value in described["chips"].items()}
    fastest = max(speeds, key=lambda c: speeds[c])

    def seconds(chip: str, repeats: list[int]) -> float:
        mine = [rank["rows"][i] for rank, c in zip(ranks, chips) if c == chip for i in repeats]
        return sum(mean([w for rows in mine for k, w, _ in rows if k == kind]) for kind in ("F", "B"))

    worst = spread = 0.0
    count = len(ranks[0]["rows"])
    for chip in set(speeds) - {fastest}:
        asked = speeds[fastest] / speeds[chip]
        found = [
            seconds(chip, r) / seconds(fastest, r) / asked for r in [list(range(count)), *([i] for i in range(count))]
        ]
        worst = max(worst, abs(found[0] - 1))
        spread = max(spread, (max(found[1:]) - min(found[1:])) / found[0])
    return worst, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="*", default=["clock", "soft"], choices=("clock", "soft"))
    parser.add_argument("--only", nargs="*", default=list(PLANS), choices=list(PLANS))
    parser.add_argument("--repeats", type=int, default=4, help="as many on every core")
    args = parser.parse_args()
    print(machine())
    print("\n| cluster | chips | action | ratio | spread | overrun | late | disturbed |")
    print("|---|---|---|---|---|---|---|---|")
    judged: dict[str, list[float]] = {}  # errors of rows that nobody disturbed
    for mode in args.chips:
        for name in args.only:
            found, disturbed = undisturbed(partial(measure, name, mode, args.repeats))
            ratio, spread = ratios(name, found)
            action = action_error(found)
            error = action if mode == "clock" else ratio
            judged.setdefault(mode, []).extend([] if disturbed else [error])
            clock = {k: max(rank["clock"].get(k, 0.0) for rank in found) for k in ("overrun", "late")}
            cells = [f"{action:.2%}", f"{ratio:.2%}", f"{spread:.2%}"]
            cells += [f"{clock['overrun']:.2%}", f"{clock['late']:.2%}"] if mode == "clock" else ["-", "-"]
            print(f"| {name} | {mode} | {' | '.join(cells)} | {'yes' if disturbed else 'no'} |", flush=True)
    for mode, errors in judged.items():
        print(verdict(mode, errors, len(args.only)))


def verdict(mode: str, errors: list[float], rows: int) -> str:
    """Of a mode, by the errors of those of its rows that nobody disturbed."""
    what = "action" if mode == "clock" else "ratio"
    left_out = f"; left out: {rows - len(errors)} disturbed rows of {rows}" if len(errors) < rows else ""
    if not errors:
        return f"{mode}: no verdict{left_out}"
    met = "" if mode != "clock" else f", goal {GOAL:.0%}: {'met' if max(errors) <= GOAL else 'missed'}"
    return f"{mode}: largest error ({what}) {max(errors):.2%}{met}{left_out}"


if __name__ == "__main__":
    main()
