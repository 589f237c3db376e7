"""The predictor and the planner against measurement, on clusters emulated by the testbed.

    python benchmarks/bench_testbed.py [--cases plans|bound|hybrid] [--chips clock|soft] [--links namespaces|paced]
                                       [--only NAME …] [--out FILE]

For each cluster, in one run: chips and links are calibrated; the planner's plan, the two best uniform plans (of all),
the best plan of each chip type alone, and two plans that nobody chose run for some steps. Prints predicted beside
measured step times, and the planner's plan beside the uniform ones, the ceiling mean(speed) / min(speed), and the sum
of the chip types alone (HETHUB's bound). Under ``clock`` errors are schedule + communication errors. Late: how far a
rank was behind its emulated chip when it next waited for others, the worst one's sum as a share of its steps.

``--cases bound``: only the planner's plan and each type alone, where HETHUB's bound can be asked for: replicas side
by side with a step of at least 40 x the exposed synchronisation, a model that has to be cut across chip types, and H2's
superlinear case, a chip type short of memory.

``--cases hybrid``: a model with three layers of Gated DeltaNet for each one with attention, over tokens so many that
these cost unlike much; beside the planner's plan, pipelines with equal numbers of layers and with layers by speed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from benchmarks.testbed_run import emulated_cluster, notes, run_job, speed_ceiling

MODEL = {
    "name": "bench", "hf_model_type": "llama", "num_layers": 8,
    "hidden_size": 128, "ffn_hidden_size": 352, "num_heads": 8,
    "num_kv_heads": 4, "head_dim": 16, "vocab_size": 257, "max_position_embeddings": 2048,
}  # fmt: skip
HYBRID = {
    "model_type": "qwen3_next", "num_hidden_layers": 8, "hidden_size": 128, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 352, "vocab_size": 257,
    "max_position_embeddings": 2048, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip
SEQ_LENGTH = 128  # under an emulated clock, whose nominal seconds are long


@dataclass(frozen=True)
class Case:
    """A cluster and what it trains.

    Attributes:
        layers, batch: multiples of the number of chips, so that uniform plans are a fair baseline, and batches that can
            be divided by speed.
        kinds: of plans to run besides the planner's and each type alone.
        long: the cluster where sequences are long (``MODES``), if its memory is not to be the same.
        alone_memory: bytes that each chip of a type alone may use, where it could not hold the model.
        goal: least share of the sum of the types alone.
        hf_config: of another model than ``MODEL``.
        seq_length: other than the mode's.
    """

    cluster: dict[str, Any]
    layers: int = 8
    batch: int = 48
    kinds: tuple[str, ...] = ("uniform", "other", "tp")
    long: dict[str, Any] | None = None
    alone_memory: int | None = None
    goal: float | None = None
    hf_config: dict[str, Any] | None = None
    seq_length: int | None = None


def two_types(
    fast: tuple[int, int, float, str], slow: tuple[int, int, float, str], between: str, inter: str = "50 MB/s"
) -> dict[str, Any]:
    """Each (nodes, chips per node, speed, memory); ``inter``: between nodes of a type."""
    return emulated_cluster([("fast", *fast), ("slow", *slow)], inter, fast_slow=between)


PLANS = {
    "3:1, 2+2": Case(two_types((2, 1, 0.6, "1 GiB"), (2, 1, 0.2, "1 GiB"), "25 MB/s")),
    "2:1, 1+3": Case(two_types((1, 1, 0.5, "1 GiB"), (3, 1, 0.25, "1 GiB"), "25 MB/s"), batch=80),
    "3:1, 2+4": Case(two_types((2, 1, 0.45, "1 GiB"), (4, 1, 0.15, "1 GiB"), "20 MB/s"), layers=6, batch=60),
    "4:2:1, 1+2+2": Case(
        emulated_cluster(
            [("a", 1, 1, 0.6, "1 GiB"), ("b", 2, 1, 0.3, "1 GiB"), ("c", 2, 1, 0.15, "1 GiB")],
            a_b="40 MB/s", b_c="20 MB/s",
        ), layers=5, batch=40,
    ),
    "3:1, nodes of 2": Case(two_types((1, 2, 0.5, "1 GiB"), (1, 2, 0.17, "1 GiB"), "25 MB/s")),
    "3:1, 2+2, small memory": Case(
        two_types((2, 1, 0.6, "101 MiB"), (2, 1, 0.2, "92 MiB"), "25 MB/s"),
        long=two_types((2, 1, 0.6, "136 MiB"), (2, 1, 0.2, "88 MiB"), "25 MB/s"),
    ),
    "2:1, 2+6": Case(two_types((2, 1, 0.3, "1 GiB"), (6, 1, 0.15, "1 GiB"), "25 MB/s"), batch=80),
}  # fmt: skip
BOUNDS = {
    "side by side, 3:1": Case(
        two_types((2, 1, 0.6, "1 GiB"), (2, 1, 0.2, "1 GiB"), "50 MB/s", "100 MB/s"),
        batch=160, kinds=(), goal=0.975,
    ),
    # The slow chips hold no replica, however they are cut; 64 micro-batches of 2.
    "cut across types, 3:1": Case(
        two_types((2, 1, 0.6, "1 GiB"), (2, 1, 0.2, "82 MiB"), "50 MB/s", "100 MB/s"),
        batch=128, kinds=(), alone_memory=1 << 30, goal=0.9,
    ),
    # The fast chips alone hold the model only if they recompute all of it, in micro-batches of 1.
    "superlinear, 3:1": Case(
        two_types((2, 1, 0.6, "83 MiB"), (2, 1, 0.2, "1 GiB"), "50 MB/s", "100 MB/s"),
        batch=64, kinds=(), goal=1.05,
    ),
}  # fmt: skip
EQUAL = ("uniform", "equal", "other")
HYBRIDS = {
    "hybrid, 3:1, 2+2": Case(
        two_types((2, 1, 0.6, "1 GiB"), (2, 1, 0.2, "1 GiB"), "25 MB/s"), batch=16, kinds=EQUAL, hf_config=HYBRID,
        seq_length=256,
    ),
    # No chip holds the whole model with its states: it has to be cut, and where matters.
    "hybrid, 3:1, 2+2, small memory": Case(
        two_types((2, 1, 0.6, "64 MiB"), (2, 1, 0.2, "64 MiB"), "25 MB/s"), batch=16, kinds=EQUAL, hf_config=HYBRID,
        seq_length=256,
    ),
    "hybrid, four alike": Case(
        emulated_cluster([("a", 4, 1, 0.4, "64 MiB")]), batch=16, kinds=EQUAL, hf_config=HYBRID, seq_length=256
    ),
}
CASES = {"plans": PLANS, "bound": BOUNDS, "hybrid": HYBRIDS}
# Where CPU time counts, sequences are longer and batches smaller: a layer of 128 tokens takes 1 ms, most of it in small
# operators, and such a millisecond repeats within 10 %. Chips are slower, so that a core which is slower than usual can
# keep up. And what real work takes does not grow with the micro-batch as a clock's nominal seconds do.
MODES: dict[str, dict[str, Any]] = {
    "clock": {
        "seq_length": SEQ_LENGTH, "speed": 1.0, "batch_divisor": 1, "steps": 2, "long_steps": 1,
        "calibration_steps": 1, "sizes": [1, 2],
    },
    "soft": {
        "seq_length": 512, "speed": 0.75, "batch_divisor": 2, "steps": 5, "long_steps": 2, "calibration_steps": 3,
        "sizes": [1, 3], "warm_up": 1,
    },
}  # fmt: skip


def adapted(case: Case, mode: dict[str, Any]) -> Case:
    """The case as it runs in a mode."""
    cluster = case.long if case.long and mode["seq_length"] > SEQ_LENGTH else case.cluster
    speeds = {name: round(mode["speed"] * chip["emulate"]["speed"], 4) for name, chip in cluster["chips"].items()}
    chips = {name: {**chip, "emulate": {"speed": speeds[name]}} for name, chip in cluster["chips"].items()}
    return replace(case, cluster={**cluster, "chips": chips}, batch=case.batch // mode["batch_divisor"])


def cluster_of(name: str, chips: str) -> dict[str, Any]:
    """One of ``PLANS``, as it is with such chips."""
    return adapted(PLANS[name], MODES[chips]).cluster


def measure(case: Case, name: str, args: argparse.Namespace) -> dict[str, Any]:
    work = {
        "model": {**MODEL, "num_layers": case.layers}, "batch": case.batch, "kinds": case.kinds,
        "alone_memory": case.alone_memory, **MODES[args.chips],
    }  # fmt: skip
    work |= {k: v for k in ("hf_config", "seq_length") if (v := getattr(case, k)) is not None}
    return run_job(name, "testbed_job.py", case.cluster, work, args.chips, args.links, args.verbose)


def error_of(chips: str) -> str:
    """What an error of predictions is called."""
    return "schedule + communication error" if chips == "clock" else "prediction error"


def report(case: Case, name: str, found: dict[str, Any], chips: str) -> dict[str, float]:
    """Print the table of one cluster; its key figures."""
    print(f"\n### {name} ({case.layers} layers, batch {case.batch}; {notes(found)})\n")
    print(f"| plan | predicted s | measured s | spread | late | {error_of(chips)} |")
    print("|---|---|---|---|---|---|")
    errors, best = list[float](), dict[str, float]()
    for row in found["rows"]:
        error = row["predicted"] / row["measured"] - 1
        errors.append(abs(error))
        spread = (max(row["steps"]) - min(row["steps"])) / row["measured"]
        best[row["kind"]] = min(best.get(row["kind"], math.inf), row["measured"])
        times = f"{row['predicted']:.3f} | {row['measured']:.3f} | {spread:.1%} | {row['late']:.1%}"
        print(f"| {row['name']} | {times} | {error:+.1%} |")
    ceiling = speed_ceiling(case.cluster)
    alone = [row["measured"] for row in found["rows"] if row["kind"] == "alone"]
    figures = {"mean": sum(errors) / len(errors), "worst": max(errors), "plans": len(errors)}
    planned = next(row for row in found["rows"] if row["kind"] == "planner")
    exposed = planned["predicted"] - planned["parts"]["pipelines"] - planned["parts"]["jitter"]
    figures["exposed"] = planned["predicted"] / exposed if exposed > 0 else math.inf
    if "uniform" in best:
        figures["uniform"] = best["uniform"] / best["planner"]
        figures["ceiling"] = figures["uniform"] / ceiling
    if alone:
        figures["type alone"] = min(alone) / best["planner"]
        figures["hethub"] = 1 / best["planner"] / sum(1 / s for s in alone)
    share, total = figures.get("ceiling", 0), len(case.cluster["chips"])
    text = {
        "uniform": f"best uniform {figures.get('uniform', 0):.2f}x slower ({share:.0%} of the ceiling {ceiling:.2f})",
        "type alone": f"best type alone {figures.get('type alone', 0):.2f}x slower",
        "hethub": f"{figures.get('hethub', 0):.1%} of the sum of the types alone ({len(alone)} of {total} types can)",
    }
    print("\n" + "; ".join(text[k] for k in text if k in figures), flush=True)
    return figures


def summarise(cases: dict[str, Case], figures: dict[str, dict[str, float]]) -> None:
    """One table over all clusters."""
    print("| cluster | best uniform | share of the ceiling | best type alone | of the sum of the types | goal | "
          "step / exposed sync |\n|---|---|---|---|---|---|---|")  # fmt: skip
    for name, f in figures.items():
        goal = cases[name].goal
        cells = [
            f"{f['uniform']:.2f}x" if "uniform" in f else "", f"{f['ceiling']:.0%}" if "ceiling" in f else "",
            f"{f['type alone']:.2f}x" if "type alone" in f else "", f"{f['hethub']:.1%}" if "hethub" in f else "",
            f"{goal:.1%}" if goal else "", f"{f['exposed']:.0f}",
        ]  # fmt: skip
        print(f"| {name} | {' | '.join(cells)} |")
    ratios = [f["uniform"] for f in figures.values() if "uniform" in f]
    if ratios:
        geometric = geometric_mean(ratios)
        shares = [f["ceiling"] for f in figures.values() if "ceiling" in f]
        print(f"\nplanner / best uniform: {geometric:.2f}x (geometric mean), {sum(shares) / len(shares):.0%} of the "
              f"ceiling (mean), worst {min(shares):.0%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", default="clock", choices=("clock", "soft"))
    parser.add_argument("--links", default="namespaces", choices=("namespaces", "paced", "none"))
    parser.add_argument("--cases", default="plans", choices=tuple(CASES))
    parser.add_argument("--only", nargs="*", metavar="NAME", help="some of the cases")
    parser.add_argument("--out", help="write everything as JSON")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    chosen = CASES[args.cases]
    cases = {name: adapted(case, MODES[args.chips]) for name, case in chosen.items()}
    names = args.only or list(cases)
    if unknown := [name for name in names if name not in cases]:
        parser.error(f"--only {unknown[0]}: not one of {', '.join(cases)}")
    often = "{steps} steps ({long_steps} where one takes over 5 s)".format(**MODES[args.chips])
    print(f"{machine()}; chips {args.chips}, links {args.links}, {often}")
    print(f"model of hidden size {MODEL['hidden_size']}, {MODES[args.chips]['seq_length']} tokens")
    found, figures = {}, {}
    for name in names:
        found[name] = measure(cases[name], name, args)
        figures[name] = report(cases[name], name, found[name], args.chips)
        if args.out:
            Path(args.out).write_text(json.dumps(found, indent=1))
    count = sum(f["plans"] for f in figures.values())
    mean = sum(f["mean"] * f["plans"] for f in figures.values()) / count
    worst = max(f["worst"] for f in figures.values())
    what = error_of(args.chips)
    print(f"\n{int(count)} plans on {len(figures)} clusters: {what} mean {mean:.1%}, worst {worst:.1%}\n")
    summarise(cases, figures)


if __name__ == "__main__":
    main()
