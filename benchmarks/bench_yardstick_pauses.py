"""How well work that follows pauses repeats in units of the testbed's yardstick, beside CPU time as it comes.

    python benchmarks/bench_yardstick_pauses.py [--seconds 240] [--bin 20]

Two processes on each core, which compute for 0.45 and 0.15 of the time and take turns, as ranks under ``soft`` do:
layers of three sizes, with a pause before each call. Printed per process: CPU time (median), and its standard deviation
over bins, relative to the mean, as it comes, in units of what is read in the midst of work alone, and in the
yardstick's units, which count the first milliseconds after a pause by what is read right after pauses. ``power``: of
this reading, with which CPU time goes up and down (the more, the more of it is spent on what a pause leaves cold).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_yardstick import layers
from benchmarks.common import machine
from hetero_megatron.comm.turns import Turns
from hetero_megatron.comm.yardstick import Yardstick
from hetero_megatron.testbed.usual import Unit

SHARES = (0.45, 0.15)  # of a core
SIZES = ((32, 1), (128, 2), (256, 4))  # tokens and width, layers


def observe(core: int, share: float, folder: Path, seconds: float) -> np.ndarray:
    """[rounds, sizes, 4] CPU seconds as they come, by readings in the midst of work, and by both readings; the reading
    after pauses."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    yardstick, turns = Yardstick(Unit(2e-4, 5e-4)), Turns(folder / f"turn-{core}")
    work, rows = [layers(*size) for size in SIZES], []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        row = []
        for each in work:
            with turns:
                start = time.thread_time()
                yardstick.start()
                each()
                cpu = time.thread_time() - start - yardstick.stop()
            row.append((cpu, cpu / yardstick.warm.now, yardstick.usual_seconds(cpu), yardstick.cold.now))
            time.sleep(cpu / share - cpu)
        rows.append(row)
    return np.array(rows[5:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--bin", type=float, default=20.0, help="seconds")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        core, share, folder = args.rank
        print(json.dumps(observe(int(core), float(share), Path(folder), args.seconds).tolist()))
        return
    print(f"{machine()}; {args.seconds:g} s in bins of {args.bin:g} s\n")
    print("| core | share | tokens, layers | CPU | as it comes | amid work | yardstick | power |\n|" + 8 * "---|")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [(core, share) for core in sorted(os.sched_getaffinity(0)) for share in SHARES]
        command = [sys.executable, __file__, "--seconds", str(args.seconds), "--rank"]
        running = [subprocess.Popen([*command, str(c), str(s), folder], stdout=subprocess.PIPE) for c, s in ranks]
        observed = [np.array(json.loads(process.communicate()[0])) for process in running]
    for (core, share), rounds in zip(ranks, observed):
        bins = np.array([part.mean(0) for part in np.array_split(rounds, max(2, round(args.seconds / args.bin)))])
        for size, (tokens, count) in enumerate(SIZES):
            mean, sd = bins[:, size].mean(0), bins[:, size].std(0)
            power = np.polyfit(np.log(bins[:, size, 3]), np.log(bins[:, size, 0]), 1)[0]
            cells = f"{1e3 * np.median(rounds[:, size, 0]):.1f} ms | " + " | ".join(f"{r:.1%}" for r in (sd / mean)[:3])
            print(f"| {core} | {share} | {tokens}, {count} | {cells} | {power:.2f} |")


if __name__ == "__main__":
    main()
