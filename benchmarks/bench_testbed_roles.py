"""Where a teacher goes, measured on clusters emulated by the testbed.

    python benchmarks/bench_testbed_roles.py [--only NAME …] [--links namespaces|paced] [--out FILE]

For each cluster, in one run: ``calibrate``; then steps of a student beside its teacher, as ``pretrain_gpt.py`` takes
them, under the placement that ``plan --teacher-hf`` chooses; with both models on all chips, cut by the planner and by
the best uniform plan; and with the teacher on the slow chips. A file of what the teacher says is left out of the
choice: its predicted seconds, with one pass of the teacher over the data, stand below the table. Prints predicted
beside measured seconds per step, and how many times as fast the chosen placement is. Late and overrun: of the emulated
clock, see docs/testbed.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hetero_megatron as hm
from benchmarks.common import machine
from benchmarks.testbed_run import emulated_cluster, notes, run_testbed
from hetero_megatron.api.plans import TOP_K
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.report.roles import format_placement
from hetero_megatron.planner.search.incumbent import simulate_best
from hetero_megatron.planner.search.uniform import top_uniform_plans
from hetero_megatron.planner.whatif.forward_plans import ForwardQuestion
from hetero_megatron.planner.whatif.role_placement import RolePlacement, RoleSearch
from hetero_megatron.plans import Plan
from hetero_megatron.plans.dump import dump_yaml
from hetero_megatron.plans.forward_only import role_of, words_of
from hetero_megatron.predictor.simulate.beside import predict_beside

LENGTH, DTYPE = 128, "fp32"
PLANNED, UNIFORM = "all roles on all chips, planned", "all roles on all chips, uniform"
OLD = "old chips hold the teacher"
OTHERS = (PLANNED, UNIFORM, OLD)
ROOMY = ("1 GiB", "1 GiB")
LATE, ATTEMPTS = 0.02, 3  # a run that is later than this is repeated, so often; the least late counts
SHAPES = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 128,
    "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A cluster, layers of the student and of the teacher, which is as wide, and sequences of a batch."""

    cluster: dict[str, Any]
    student: int
    teacher: int
    batch: int


def two_kinds(fast: tuple[int, float], slow: tuple[int, float], memory: tuple[str, str] = ROOMY) -> dict[str, Any]:
    """Each (chips, speed), a chip per node. All is slow, so that a machine that does other work keeps up."""
    groups = [(name, n, 1, speed, room) for name, (n, speed), room in zip(("fast", "slow"), (fast, slow), memory)]
    return emulated_cluster(groups, "50 MB/s", fast_slow="25 MB/s")


CASES = {
    "3:1, 2+2": Case(two_kinds((2, 0.18), (2, 0.06)), 8, 8, 16),
    "3:1, 2+2, large teacher": Case(two_kinds((2, 0.18), (2, 0.06), ("112 MiB", "96 MiB")), 6, 24, 16),
    "2:1, 1+3": Case(two_kinds((1, 0.16), (3, 0.08)), 8, 8, 16),
}


def write_models(case: Case, folder: Path) -> None:
    """``student`` and ``teacher``, directories in Hugging Face's form with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    for name, layers in (("student", case.student), ("teacher", case.teacher)):
        LlamaForCausalLM(LlamaConfig(**SHAPES, num_hidden_layers=layers)).save_pretrained(folder / name)


def choose(case: Case, folder: Path) -> tuple[RolePlacement, dict[str, tuple[Plan, float]]]:
    """The placement that is found on the calibrated cluster; by name, the plans to run and their predicted seconds per
    step, the chosen one first."""
    cluster = hm.Cluster.read(folder / "rates.yaml").described
    student, teacher = (hm.Model(str(folder / name)).spec for name in ("student", "teacher"))
    options = SearchOptions(dtype=DTYPE)
    problem = PlanningProblem(student, cluster, LENGTH, case.batch, options)
    words = words_of("teacher", TOP_K)
    asked = ForwardQuestion("teacher", teacher, LENGTH, case.batch, DTYPE, options.costs, words)
    roles = RoleSearch(problem, asked)
    found = roles.placed()
    best = next(one for one in found.alternatives if one.way != "file")
    assert best.plan is not None, "no placement but a file"
    plans = {f"chosen: {best.way}": (best.plan, best.step_seconds)}
    for one in found.alternatives:
        if one.way == "same chips" and one.plan is not None:
            plans[PLANNED] = one.plan, one.step_seconds
    scorer = make_scorer(problem)
    uniform: list[tuple[float, Plan]] = []
    for _, template in top_uniform_plans(problem, scorer, 12)[0]:
        for simulated in simulate_best([(0.0, 0, template)], problem, scorer):
            with suppress(UserError):
                role = role_of(simulated.plan, student, "teacher", teacher, 0, cluster)
                made = predict_beside(simulated.plan, student, cluster, DTYPE, options.costs, role).require_fit()
                uniform.append((made.step_seconds, simulated.plan))
    if uniform:
        seconds, plan = min(uniform, key=lambda made: made[0])
        plans[UNIFORM] = plan, seconds
    with suppress(UserError):
        one = roles.on_ranks(frozenset(rank.rank for rank in cluster.ranks if rank.chip == "chip-slow"))
        if one.plan is not None:
            plans[OLD] = one.plan, one.step_seconds
    return found, plans


def least_late(attempt: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Of up to ``ATTEMPTS`` runs under a plan."""
    runs = list[dict[str, Any]]()
    while len(runs) < ATTEMPTS and not (runs and runs[-1]["late"] <= LATE and not runs[-1]["invalid"]):
        runs.append(attempt())
    return min(runs, key=lambda one: (one["invalid"], one["late"]))


def run(case: Case, folder: Path, name: str, plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """Steps under a plan: seconds of each but the first, and the emulated clock's own check."""
    (folder / "plan.yaml").write_text(dump_yaml(plan))
    save = Path(tempfile.mkdtemp(dir=folder))
    job: list[Any] = ["pretrain_gpt.py", "--plan", folder / "plan.yaml", "--model", folder / "student", "--mock-data",
           "--teacher-hf", folder / "teacher", "--train-iters", args.steps + 1, "--lr", "1e-4", "--eval-iters", 0,
           "--save", save, "--save-interval", 0, "--cluster", folder / "rates.yaml"]  # fmt: skip
    testbed, _ = run_testbed(name, case.cluster, "clock", args.links, job)
    return steps_of(save, testbed, 1)


def steps_of(save: Path, testbed: Mapping[str, Any], warm: int) -> dict[str, Any]:
    """Seconds of each step of a run but the first ``warm``, and the emulated clock's own check."""
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["step_seconds"] for row in rows if "step_seconds" in row][warm:]
    return {"steps": seconds, **{key: testbed.get(key, 0) for key in ("late", "overrun", "disturbed", "invalid")}}


def measure(name: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """``rows`` of the table of one cluster, and how trustworthy its calibration was."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_models(case, folder)
        job: list[Any] = ["-m", "hetero_megatron.cli.main", "calibrate", "--model", folder / "student", "--tp", 1,
                          "--seq-length", LENGTH, "--out", folder / "rates.yaml"]  # fmt: skip
        began = time.monotonic()
        testbed, _ = run_testbed(name, case.cluster, "clock", args.links, job)
        took, rows = time.monotonic() - began, list[dict[str, Any]]()
        found, plans = choose(case, folder)
        if args.verbose:
            print(format_placement(found, hm.Model(str(folder / "student")).spec), flush=True)
        known = dict[str, dict[str, Any]]()  # two placements may be one plan
        for title, (plan, predicted) in plans.items():
            key = dump_yaml(plan)
            if key not in known:
                known[key] = least_late(partial(run, case, folder, f"{name}, {title}", plan, args))
            measured = known[key]
            rows.append({"name": title, "predicted": predicted, "measured": median(measured["steps"]), **measured})
            if args.verbose:
                print(rows[-1], flush=True)
        clock = {"late": testbed.get("late", 0.0), "overrun": testbed.get("overrun", 0.0)}
        trust = {key: testbed.get(key, False) for key in ("disturbed", "invalid")}
        in_file = next(one.step_seconds for one in found.alternatives if one.way == "file")
        return {"rows": rows, "file": in_file, "clock": clock, "calibration_seconds": took, **trust}


def print_placements(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The table of one cluster, whose first row is the chosen placement, and a line without an end: by name, how many
    times as long as that one each other takes."""
    print("| placement | predicted s | measured s | spread | late | overrun | error |\n|---|---|---|---|---|---|---|")
    ratios = dict[str, float]()
    for row in rows:
        spread = (max(row["steps"]) - min(row["steps"])) / row["measured"]
        quality = f"{spread:.1%} | {row['late']:.1%} | {row['overrun']:.1%}"
        error = f"{row['predicted'] / row['measured'] - 1:+.1%}{', DISTURBED' if row['disturbed'] else ''}"
        print(f"| {row['name']} | {row['predicted']:.3f} | {row['measured']:.3f} | {quality} | {error} |")
        ratios[row["name"]] = row["measured"] / rows[0]["measured"]
    print("\n" + "; ".join(f"{title}: {ratio:.2f}x" for title, ratio in list(ratios.items())[1:]), end="")
    return ratios


def report(name: str, case: Case, found: dict[str, Any]) -> dict[str, float]:
    """Print the table of one cluster; by name, how many times as long as the chosen one each other placement takes."""
    shapes = f"student of {case.student} layers, teacher of {case.teacher}, batch {case.batch}"
    print(f"\n### {name} ({shapes}; {notes(found)})\n")
    ratios = print_placements(found["rows"])
    print(f"; predicted with a file: {found['file']:.3f} s", flush=True)
    return ratios


def print_against(titles: Sequence[str], ratios: Mapping[str, Mapping[str, float]]) -> None:
    """Means over all clusters."""
    print("| the chosen placement against | clusters | geometric mean | least |\n|---|---|---|---|")
    for title in titles:
        if row := [of[title] for of in ratios.values() if title in of]:
            print(f"| {title} | {len(row)} | {geometric_mean(row):.2f}x | {min(row):.2f}x |")


def summarise(found: dict[str, dict[str, Any]], ratios: dict[str, dict[str, float]]) -> None:
    """Errors of all predictions, and geometric means over all clusters."""
    errors = [abs(r["predicted"] / r["measured"] - 1) for each in found.values() for r in each["rows"]]
    print(f"\n{len(errors)} placements on {len(found)} clusters: mean error {sum(errors) / len(errors):.1%}, worst "
          f"{max(errors):.1%}\n")  # fmt: skip
    print_against(OTHERS, ratios)
    both = [of[title] for of in ratios.values() for title in (UNIFORM, OLD) if title in of]
    better = [min(of[title] for title in OTHERS if title in of) for of in ratios.values() if len(of) > 1]
    print(f"| {UNIFORM}, and {OLD} | {len(ratios)} | {geometric_mean(both):.2f}x | {min(both):.2f}x |")
    print(f"| the best of all | {len(better)} | {geometric_mean(better):.2f}x | {min(better):.2f}x |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="some of the cases")
    parser.add_argument("--links", default="namespaces", choices=("namespaces", "paced", "none"))
    parser.add_argument("--steps", type=int, default=3, help="measured, of each plan, after one that allocates (3)")
    parser.add_argument("--out", help="write everything as JSON")
    parser.add_argument("--verbose", action="store_true", help="also what the search says of each placement")
    args = parser.parse_args()
    names = args.only or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--only {unknown[0]}: not one of {', '.join(CASES)}")
    print(f"{machine()}; chips clock, links {args.links}, {args.steps} steps of {LENGTH} tokens")
    found, ratios = dict[str, dict[str, Any]](), dict[str, dict[str, float]]()
    for name in names:
        found[name] = measure(name, CASES[name], args)
        ratios[name] = report(name, CASES[name], found[name])
        if args.out:
            Path(args.out).write_text(json.dumps(found, indent=1))
    summarise(found, ratios)


if __name__ == "__main__":
    main()
