"""Seconds from a kill to the next completed step: ``run --elastic`` beside ``run --on-failure replan``.

    python benchmarks/bench_elastic.py [--rounds 3] [--layers 6]
    python benchmarks/bench_elastic.py --copies [--rounds 3] [--layers 8] [--hidden-size 512]
    python benchmarks/bench_elastic.py --moved [--layers 10] [--hidden-size 640]
    python benchmarks/bench_elastic.py --testbed [--copies] [--rounds 3] [--layers 6] [--hidden-size 512]

Six ranks on this host train the tiny model in fp32 (``--layers``: another one) under a plan of three pipelines of two
stages; one is killed once 8 steps are done, and the fallback plan has five. The restart reads a checkpoint of every
step. Printed are the wall seconds until the next line of metrics.jsonl, the phases that the elastic run says, and the
CPU seconds of all processes of each run.

``--copies``: seconds per step of two ranks, each a replica of the whole model, with a copy of every rank's state sent
to the other one after each step (``--peer-replicas-every 1``) and without, in turn.

``--moved``: bytes that pass between ranks when one of six is lost, beside the least that must: for each element its
new owner, if that holds neither what it owned nor a copy of it (masters and Adam's two moments, counted by masks).

``--testbed``: the same on an emulated cluster: six nodes (two for ``--copies``) with chips under the exact clock and
links of 100 MB/s; with ``--copies`` the ratio is also predicted, before anything is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine, median
from hetero_megatron.cli.configure import configure
from hetero_megatron.cli.peer_copies import copies_in
from hetero_megatron.layout import Layout
from hetero_megatron.monitoring.record import expected_copies
from hetero_megatron.testbed.state import all_testbeds
from hetero_megatron.training.config import RunConfig

HEAD = "version: 1\nseq_length: 32\nglobal_batch_size: 6\npipelines:\n"
STEPS, KILL_AFTER, RANKS = 16, 8, 6
TINY = 6  # layers of the tiny model
TRAIN = ("--mock-data", "--lr", "1e-3", "--train-iters", str(STEPS))
CLUSTER = """version: 1
nodes: [{{name: node, count: {count}, chip: core}}]
chips: {{core: {{memory: 4 GiB, emulate: {{speed: {speed}}}}}}}
links: {{inter_node: {{bandwidth: 100 MB/s}}}}
"""
ALL_RANKS = 1.2  # cores' worth of speed that all emulated chips have together


def testbed_words(folder: Path, count: int) -> list[str]:
    """Flags of a run on a testbed of so many nodes."""
    cluster = folder / "cluster.yaml"
    cluster.write_text(CLUSTER.format(count=count, speed=round(ALL_RANKS / count, 3)))
    return ["--testbed", "--chips", "clock", "--links", "namespaces", "--cluster", str(cluster)]


def process_of_rank(job: int, rank: int, testbed: bool) -> int:
    """The process of a rank of the job that process ``job`` launched."""
    if not testbed:
        return children(job)[rank]
    mine = [job, *children(job)]
    (bed,) = [bed for bed in all_testbeds() if bed.launcher in mine]
    return int(bed.record()["ranks"][rank]["pid"])


def plans(layers: int) -> tuple[str, str]:
    """For six ranks, and for five."""
    half = layers // 2

    def pipeline(first: int, batches: int) -> str:
        stages = f"{{ranks: {first}, layers: [0, {half}]}}, {{ranks: {first + 1}, layers: [{half}, {layers}]}}"
        return f"  - {{micro_batch_size: 1, num_micro_batches: {batches}, stages: [{stages}]}}\n"

    whole = f"  - {{micro_batch_size: 1, num_micro_batches: 2, stages: [{{ranks: 4, layers: [0, {layers}]}}]}}\n"
    return HEAD + "".join(pipeline(2 * i, 2) for i in range(3)), HEAD + pipeline(0, 2) + pipeline(2, 2) + whole


def lines(path: Path) -> tuple[int, int]:
    """(which file it is, how many lines it has)."""
    try:
        return path.stat().st_ino, path.read_bytes().count(b"\n")
    except OSError:
        return 0, 0


def children(pid: int) -> list[int]:
    """Of a process, in the order in which they were started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def one_run(
    folder: Path, layers: int, elastic: bool, testbed: bool, model: Sequence[str]
) -> tuple[float, float, str]:
    """(seconds from the kill to the next step, CPU seconds, what the elastic run says). ``model``: its flags."""
    run = folder / "run"
    for path, text in zip((folder / "six.yaml", folder / "five.yaml"), plans(layers), strict=True):
        path.write_text(text)
    words = ["--elastic"] if elastic else ["--on-failure", "replan"]
    flags = ["--peer-replicas-every", "1"] if elastic else ["--save-interval", "1", "--keep-checkpoints", "2"]
    command = [
        *(sys.executable, "-m", "hetero_megatron.cli.main", "run", "--plan", str(folder / "six.yaml")),
        *(testbed_words(folder, RANKS) if testbed else ()),
        *("--fallback-plan", str(folder / "five.yaml"), *words, "--", *model, *TRAIN),
        *("--save", str(run), "--load", str(run), *flags),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            while lines(run / "metrics.jsonl")[1] < KILL_AFTER and job.poll() is None:
                time.sleep(0.01)
            assert job.poll() is None, (folder / "log").read_text()
            os.kill(process_of_rank(job.pid, RANKS - 1, testbed), signal.SIGKILL)
            begin = time.perf_counter()
            while "SIGKILL" not in (folder / "log").read_text():
                time.sleep(0.005)
            known = lines(run / "metrics.jsonl")
            while (now := lines(run / "metrics.jsonl"))[1] <= known[1] or now[0] != known[0]:
                known = now if now[0] != known[0] or now[1] < known[1] else known
                assert job.poll() is None, (folder / "log").read_text()
                time.sleep(0.005)
            seconds = time.perf_counter() - begin
            assert job.wait(timeout=600) == 0, (folder / "log").read_text()
        finally:
            job.kill()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    told = [line for line in (folder / "log").read_text().splitlines() if line.startswith("elastic: epoch")]
    return seconds, cpu, told[0] if told else ""


def masks(layout: Layout, ranks: Iterable[int]) -> dict[int, Any]:
    """By rank, which elements are in its boxes."""
    found = {rank: np.zeros(layout.shape, bool) for rank in ranks}
    for rank, boxes in layout.boxes.items():
        for box in boxes:
            found[rank][box.slices()] = True
    return found


def least_bytes(folder: Path, model: Sequence[str], lost: int) -> tuple[int, int]:
    """(bytes that must pass between ranks from the plan of six to that of five without rank ``lost``; bytes of all
    masters and moments)."""

    def config_of(plan: str, ranks: int) -> RunConfig:
        environment = {"WORLD_SIZE": str(ranks), "RANK": "0", "HETERO_LAUNCHER": "1"}
        return configure(["--plan", str(folder / plan), *model, *TRAIN, "--elastic"], environment)

    def owners(config: RunConfig) -> dict[str, Layout]:
        return {name: layout for b in config.compiled.buckets if b.onward is None for name, layout in b.owners.items()}

    six, five = config_of("six.yaml", RANKS), config_of("five.yaml", RANKS - 1)
    holders, after = copies_in(six).holders, owners(five)
    crossing = total = 0
    for name, layout in owners(six).items():
        owned = masks(layout, range(RANKS))
        held = {rank: mask.copy() for rank, mask in owned.items()}
        for rank, holder in holders.items():
            held[holder] |= owned[rank]
        stay = [rank for rank in range(RANKS) if rank != lost]
        wanted = masks(after[name], range(RANKS - 1))
        crossing += sum(int((wanted[new] & ~held[old]).sum()) for new, old in enumerate(stay))
        total += owned[0].size
    return 12 * crossing, 12 * total


def measure_moved(layers: int, hidden: int) -> None:
    model = flags_of_model(layers, hidden, 32)
    with tempfile.TemporaryDirectory(prefix="bench-elastic-") as scratch:
        folder = Path(scratch)
        _, _, told = one_run(folder, layers, True, False, model)
        events = [json.loads(line) for line in (folder / "run" / "events.jsonl").read_text().splitlines()]
        (moved,) = [event["bytes"] for event in events if event["kind"] == "elastic"]
        least, total = least_bytes(folder, model, RANKS - 1)
    print(told)
    print(json.dumps({"parameters": total // 12, "moved": moved, "least": least, "ratio": moved / least}))


def plan_for_copies(folder: Path, layers: int) -> Path:
    plan = folder / "two.yaml"
    pipeline = "  - {{micro_batch_size: 1, num_micro_batches: 4, stages: [{{ranks: {}, layers: [0, {}]}}]}}\n"
    head = "version: 1\nseq_length: 256\nglobal_batch_size: 8\npipelines:\n"
    plan.write_text(head + "".join(pipeline.format(rank, layers) for rank in (0, 1)))
    return plan


def flags_of_model(layers: int, hidden: int, length: int = 256) -> list[str]:
    return [
        *("--num-layers", str(layers), "--hidden-size", str(hidden), "--num-attention-heads", "8"),
        *("--seq-length", str(length), "--max-position-embeddings", str(length), "--vocab-size", "2048"),
    ]


def predicted_ratio(folder: Path, layers: int, hidden: int) -> float:
    """Seconds of a step with copies over those without, as a dry run says it."""
    cluster, plan = testbed_words(folder, 2)[-2:], plan_for_copies(folder, layers)
    words = ["--plan", str(plan), *cluster, *flags_of_model(layers, hidden), *TRAIN, "--elastic"]
    config = configure(words, {"WORLD_SIZE": "2", "RANK": "0", "HETERO_LAUNCHER": "1"})
    prediction = expected_copies(config, copies_in(config), {})
    assert prediction is not None
    return prediction.step_seconds / prediction.without


def seconds_per_step(folder: Path, layers: int, hidden: int, copies: bool, testbed: bool) -> float:
    """Median of all steps but the first few, which make states and the first copy."""
    run, plan = folder / "run", plan_for_copies(folder, layers)
    command = [
        *(sys.executable, "-m", "hetero_megatron.cli.main", "run", "--plan", str(plan), "--fallback-plan", str(plan)),
        *("--elastic", *(testbed_words(folder, 2) if testbed else ()), "--", *flags_of_model(layers, hidden), *TRAIN),
        *("--save", str(run), "--load", str(run), "--log-interval", "1"),
        *("--peer-replicas-every", "1" if copies else "0"),
    ]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in done.stderr.splitlines():
        if line.startswith("testbed: ") and ("load" in line or "INVALID" in line):
            print(line)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return median([line["step_seconds"] for line in metrics if "loss" in line][4:])


def measure_copies(rounds: int, layers: int, hidden: int, testbed: bool) -> None:
    predicted = {}
    if testbed:
        with tempfile.TemporaryDirectory() as scratch:
            predicted["predicted"] = predicted_ratio(Path(scratch), layers, hidden)
        print(json.dumps(predicted), flush=True)
    found: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for copies in (False, True) if number % 2 == 0 else (True, False):
            folder = Path(tempfile.mkdtemp(prefix="bench-elastic-"))
            try:
                found[copies].append(seconds_per_step(folder, layers, hidden, copies, testbed))
            finally:
                shutil.rmtree(folder)
            print(f"{'with' if copies else 'without'} copies {found[copies][-1]:.3f} s per step", flush=True)
    print(json.dumps({"with / without": median(found[True]) / median(found[False]), **predicted}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=TINY, help=f"{TINY}: the tiny model, unless --copies or --moved")
    parser.add_argument("--copies", action="store_true", help="what copies for peers cost per step")
    parser.add_argument("--moved", action="store_true", help="bytes that move after a loss, beside the least")
    parser.add_argument("--hidden-size", type=int, default=512, help="of models that are not tiny")
    parser.add_argument("--testbed", action="store_true", help="on an emulated cluster (root, Linux)")
    options = parser.parse_args()
    print(machine())
    if options.moved:
        measure_moved(options.layers, options.hidden_size)
        return
    if options.copies:
        measure_copies(options.rounds, options.layers, options.hidden_size, options.testbed)
        return
    model = ["--model", "tiny"] if options.layers == TINY else flags_of_model(options.layers, options.hidden_size, 32)
    found: dict[str, list[tuple[float, float]]] = {"elastic": [], "replan": []}
    for _ in range(options.rounds):
        for kind, of_kind in found.items():
            folder = Path(tempfile.mkdtemp(prefix="bench-elastic-"))
            try:
                seconds, cpu, told = one_run(folder, options.layers, kind == "elastic", options.testbed, model)
            finally:
                shutil.rmtree(folder)
            of_kind.append((seconds, cpu))
            print(f"{kind:8s} {seconds:6.2f} s to the next step, {cpu:6.1f} CPU seconds in all  {told}", flush=True)
    middle = {kind: median([seconds for seconds, _ in of_kind]) for kind, of_kind in found.items()}
    print(json.dumps({**middle, "times faster": middle["replan"] / middle["elastic"]}))


if __name__ == "__main__":
    main()
