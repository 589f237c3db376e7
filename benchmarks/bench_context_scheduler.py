"""The context scheduler on HexiSeq's clusters: simulated gain over equal Ring, Ulysses and USP, and scheduling time.

    .venv/bin/python benchmarks/bench_context_scheduler.py [--cards node|chip|both] [--quick]

Nothing runs on accelerators: seconds are those of ``planner/context/cost.py`` with data-sheet rates x default
efficiencies (``predictor/cost/rates.py``), the same for all layouts. The paper's figures stand beside for orientation;
its cost model, its 13B and 70B configurations and most of its clusters' compositions are not public.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import machine
from hetero_megatron.cluster import Cluster, load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.planner.context.cluster import problem_from_cluster
from hetero_megatron.planner.context.problem import ContextOptions, ContextProblem
from hetero_megatron.planner.context.scheduler import ContextChoice, schedule_context
from hetero_megatron.spec import ModelSpec, load_model

CLUSTERS = Path(__file__).resolve().parent.parent / "examples" / "clusters"
SIMULATIONS = {"sim 1": "hexiseq_sim1_32", "sim 2": "hexiseq_sim2_64", "sim 3": "hexiseq_sim3_128"}
PAIRS = {"sim 4": ("hexiseq_sim4_56", "hexiseq_sim4_152"), "sim 5": ("hexiseq_sim5_64", "hexiseq_sim5_168")}
MODELS = {"13B": "llama2-13b", "70B": "llama2-70b"}
LENGTHS = (131072, 262144, 524288, 1048576)
OPTIONS = ContextOptions(recompute="full", shard_states=True)  # 70B on 32 chips needs its states sharded


def model_of(name: str) -> ModelSpec:
    return replace(load_model(MODELS[name]), max_position_embeddings=LENGTHS[-1])


def cluster_of(name: str) -> Cluster:
    return load_cluster(CLUSTERS / f"{name}.yaml")


def problem_of(model: str, cluster: Cluster, length: int, shared: bool) -> ContextProblem:
    return problem_from_cluster(model_of(model), cluster, length, options=OPTIONS, cards_shared=shared)


def share_text(choice: ContextChoice) -> str:
    sizes = sorted({sum(h > 0 for h in g.heads) for g in choice.layout.groups})
    return f"{len(choice.layout.groups)} x {'/'.join(map(str, sizes))}, {choice.layout.transport}"


def gains(lengths: Sequence[int], shared: bool) -> None:
    print(
        f"\n## Gain over the best equal layout; 25 GB/s for each {'node' if shared else 'chip'}\n\n"
        "| cluster | model | tokens | best equal | its s | ours | our s | gain | share of speed bound |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    found = []
    for cluster_name, file in SIMULATIONS.items():
        cluster = cluster_of(file)
        for model in MODELS:
            for length in lengths:
                problem = problem_of(model, cluster, length, shared)
                start = f"| {cluster_name}, {cluster.world_size} chips | {model} | {length // 1024}K |"
                try:
                    choice = schedule_context(problem)
                except UserError:
                    print(f"{start} none fits | - | none fits | - | - | - |")
                    continue
                bound = choice.bound / choice.seconds
                equal, name = choice.baseline_evaluation, choice.baseline.name if choice.baseline else ""
                if equal is None or choice.gain is None:
                    print(f"{start} none fits | - | {share_text(choice)} | {choice.seconds:.2f} | - | {bound:.2f} |")
                    continue
                found.append(choice.gain)
                print(
                    f"{start} {name} | {equal.seconds:.2f} | {share_text(choice)} | {choice.seconds:.2f} | "
                    f"{choice.gain:.2f} | {bound:.2f} |"
                )
    geometric = statistics.geometric_mean(found)
    print(
        f"\nMean {statistics.mean(found):.2f} x (geometric {geometric:.2f}), most {max(found):.2f} x, least "
        f"{min(found):.2f} x over {len(found)} cases. Paper (simulated): mean 1.36 x, most 1.72 x."
    )


def matched(lengths: Sequence[int], shared: bool) -> None:
    print(
        f"\n## FLOP-matched: ours on the mixed cluster against the best equal layout on A100s; 25 GB/s for each "
        f"{'node' if shared else 'chip'}\n\n| pair | model | tokens | mixed tokens/s | A100 tokens/s | layout | "
        "ratio | per data-sheet FLOP | per assumed FLOP |\n|---|---|---|---|---|---|---|---|---|"
    )
    ratios = []
    for pair, files in PAIRS.items():
        mixed, even = (cluster_of(file) for file in files)
        for model in MODELS:
            for length in lengths:
                problems = [problem_of(model, cluster, length, shared) for cluster in (mixed, even)]
                start = f"| {pair}, {mixed.world_size} against {even.world_size} | {model} | {length // 1024}K |"
                try:
                    ours, other = (schedule_context(problem) for problem in problems)
                except UserError:
                    print(f"{start} none fits | - | - | - | - | - |")
                    continue
                if other.baseline_evaluation is None or other.baseline is None:
                    print(f"{start} {length / ours.seconds:.0f} | none fits | - | - | - | - |")
                    continue
                ratio = other.baseline_evaluation.seconds / ours.seconds
                sheets = [sum(c.chip_of(r).flops["bf16"] for r in range(c.world_size)) for c in (mixed, even)]
                rates = [sum(m.gemm_flops for m in p.members) for p in problems]
                per_sheet, per_rate = ratio * sheets[1] / sheets[0], ratio * rates[1] / rates[0]
                ratios.append((ratio, per_sheet, per_rate))
                print(
                    f"{start} {length / ours.seconds:.0f} | {length / other.baseline_evaluation.seconds:.0f} | "
                    f"{other.baseline.name} | {ratio:.3f} | {per_sheet:.3f} | {per_rate:.3f} |"
                )
    means = [statistics.mean(column) for column in zip(*ratios)]
    print(
        f"\nMean ratio {means[0]:.3f}, per data-sheet FLOP {means[1]:.3f}, per assumed FLOP {means[2]:.3f}. Paper: "
        "0.995 against its best homogeneous layout (about 0.94 per data-sheet FLOP: the mixed sides have 5.4 % more)."
    )


MEASURED = (  # (what, model, tokens, chips, tokens/s per GPU) of BurstEngine's spreadsheet; its ring, its USP
    ("BurstEngine, ring to USP", "llama2-13b", 1048576, 32, (118.4, 122.0)),
    ("BurstEngine, ring to USP", "llama2-7b", 1048576, 32, (150.2, 153.5)),
    ("BurstEngine, ring to USP", "llama2-7b", 524288, 32, (272.0, 287.0)),
    ("BurstEngine, ring", "llama2-7b", 262144, 8, (553.0, 553.0)),
)


def absolute() -> None:
    """Does the model's scale hold? Equal layouts against published measurements on A800."""
    print(
        "\n## Scale of the model: tokens/s per A800, best equal layout\n\n| measured by | model | tokens | chips | "
        "measured | computed, full recompute | computed, none |\n|---|---|---|---|---|---|---|"
    )
    cluster = cluster_of("burst_a800_32")
    for source, name, length, chips, (low, high) in MEASURED:
        rates = []
        for recompute in ("full", "none"):
            model = replace(load_model(name), max_position_embeddings=length)
            options = replace(OPTIONS, recompute=recompute)
            problem = problem_from_cluster(model, cluster, length, range(chips), options=options, cards_shared=False)
            # Time only: what is kept where nothing is recomputed would not fit.
            problem = replace(problem, members=tuple(replace(m, memory=1e15) for m in problem.members))
            found = schedule_context(problem).baseline_evaluation
            assert found is not None
            rates.append(length / found.seconds / chips)
        seen = f"{low:.0f}-{high:.0f}" if low < high else f"{low:.0f}"
        print(f"| {source} | {name} | {length // 1024}K | {chips} | {seen} | {rates[0]:.0f} | {rates[1]:.0f} |")


def times(scales: Sequence[int], lengths: Sequence[int]) -> None:
    base = cluster_of("hexiseq_sim3_128")
    print("\n## Scheduling time\n\n| chips | model | tokens | CPU s | wall s | layouts | paper s |")
    print("|---|---|---|---|---|---|---|")
    for scale in scales:
        nodes = tuple(replace(group, count=group.count * scale) for group in base.nodes)
        cluster = replace(base, nodes=nodes)
        paper = {1: "9.0", 8: "444"}.get(scale, "-")
        for model in MODELS:
            for length in lengths:
                problem = problem_of(model, cluster, length, True)
                wall, cpu = time.perf_counter(), time.process_time()
                choice = schedule_context(problem)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                size = f"{len(problem.members)} | {model} | {length // 1024}K"
                print(f"| {size} | {cpu:.2f} | {wall:.2f} | {choice.tried} | {paper} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--cards", choices=("node", "chip", "both"), default="both", help="what has the 25 GB/s")
    parser.add_argument("--quick", action="store_true", help="fewer lengths")
    args = parser.parse_args()
    lengths = LENGTHS[1::2] if args.quick else LENGTHS
    print(machine())
    for shared in {"node": [True], "chip": [False], "both": [False, True]}[args.cards]:
        gains(lengths, shared)
        matched(lengths, shared)
    absolute()
    times((1, 8), lengths[::2] if args.quick else (262144, 1048576))


if __name__ == "__main__":
    main()
