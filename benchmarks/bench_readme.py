"""The cheap rows of README's table of measurements again: measured here beside what is claimed.

    make bench-readme                                  # about 6 minutes
    python benchmarks/bench_readme.py [--only TEXT]    # rows whose first cell has this

Exit code 1 where a figure is outside of what its row claims. Ratios of seconds depend on the host and on what else runs
there: a row claims the range over the hosts that its figures were seen on, and a host outside of it belongs into the
row. Rows whose data is not here are named.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Claim:
    """One figure of a row.

    Attributes:
        row: how the row's first cell begins.
        command: a benchmark with its words, as few as show the figure.
        pattern: what it prints, with the figure as its only group; of several, each must hold.
        least, most: as README has them; None: no limit on this side.
        needs: a folder in ``HETERO_PUBLIC_DATA`` that it reads.
    """

    row: str
    what: str
    command: tuple[str, ...]
    pattern: str
    least: str | None
    most: str | None
    needs: str | None = None

    def holds(self, figure: float) -> bool:
        return all((
            self.least is None or figure >= float(self.least) - 10.0 ** -decimals(self.least) / 2,
            self.most is None or figure <= float(self.most) + 10.0 ** -decimals(self.most) / 2,
        ))  # fmt: skip


OPTIMAL = ("bench_planner_optimal.py", "--kind", "open", "--count", "6")
ONE_RANK = ("bench_one_rank.py", "--rounds", "1", "--case", "llama-10M")
GENERATE = ("bench_generate.py", "--rounds", "1", "--case", "llama-10M")
DDP = ("bench_ddp.py", "--rounds", "1", "--case", "llama-10M")
CLAIMS = (
    Claim("search against all plans", "% slower, worst", OPTIMAL, r"mean [\d.]+%, worst ([\d.]+)%, ", None, "0.024"),
    Claim("CPU seconds of a search", "128 chips", ("bench_planner_time.py", "--only", "128 chips of 2 types"),
          r"(?m)^128 chips of 2 types +[\d.]+ +([\d.]+) ", "0.40", "2.1"),
    Claim("peak memory of 38 ranks", "% off, worst", ("bench_memory.py", "--only", "one rank", "pp 7 + 5", "tp 3:1"),
          r"mean [\d.]+%, worst ([\d.]+)%", None, "4.2"),
    Claim("one rank against transformers", "10M, ratio of time", ONE_RANK,
          r"(?m)^llama-10M +[\d.]+ +[\d.]+ +([\d.]+) ", "0.995", "1.62"),
    Claim("one rank against transformers", "10M, ratio of memory", ONE_RANK,
          r"(?m)^llama-10M .* ([\d.]+)$", None, "0.66"),
    Claim("greedy generation", "ratio of tokens/s", GENERATE, r"(?m)^\| llama-10M \|.* ([\d.]+) \| [\d.]+ \|$",
          "0.946", "2.03"),
    Claim("greedy generation", "ratio of CPU time", GENERATE, r"(?m)^\| llama-10M \|.* ([\d.]+) \|$", "0.953", "1.28"),
    Claim("two data-parallel ranks", "10M, ratio of memory", DDP,
          r"(?m)^llama-10M +transformers, DDP .* ([\d.]+)$", None, "0.58"),
    Claim("Sailor's published clusters", "times Sailor's throughput", ("bench_sailor.py",), r"\| ([\d.]+)x \|",
          "1.09", "1.19", "sailor"),
)  # fmt: skip


def decimals(figure: str) -> int:
    return len(figure.partition(".")[2])


@cache
def printed(command: tuple[str, ...]) -> str:
    done = subprocess.run([sys.executable, str(HERE / command[0]), *command[1:]], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT")
    only, wrong = parser.parse_args().only, 0
    print(machine(), flush=True)
    for claim in (claim for claim in CLAIMS if only in claim.row):
        title, data = f"{claim.row}: {claim.what}", os.environ.get("HETERO_PUBLIC_DATA")
        if claim.needs is not None and (data is None or not (Path(data) / claim.needs).is_dir()):
            print(f"{title:<66} not run: no {claim.needs} in HETERO_PUBLIC_DATA", flush=True)
            continue
        output = printed(claim.command)
        figures = re.findall(claim.pattern, output)
        if not figures:
            raise SystemExit(f"{' '.join(claim.command)} prints nothing like {claim.pattern}:\n{output}")
        outside = [figure for figure in figures if not claim.holds(float(figure))]
        wrong += len(outside)
        claimed = f"{claim.least or '0'} to {claim.most or 'any'}"
        print(f"{title:<66} {' '.join(figures):<14} claimed {claimed}{', OUTSIDE' if outside else ''}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
