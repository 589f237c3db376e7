"""Where a teacher goes, measured on clusters emulated by the testbed.

    python benchmarks/bench_testbed_roles.py [--only NAME …] [--links namespaces|paced] [--out FILE]

For each cluster, in one run: ``calibrate``; then steps of a student beside its teacher, as ``pretrain_gpt.py`` takes
them, under the placement that ``plan --teacher-hf`` chooses; with both models on all chips, cut by the planner and by
the best uniform plan; and with the teacher on the slow chips. Prints predicted beside measured seconds per step, and
how many times as fast the chosen placement is. Late and overrun: of the emulated clock, see docs/testbed.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hetero_megatron as hm
from benchmarks.common import machine
from benchmarks.testbed_run import emulated_cluster, notes, run_testbed, undisturbed
from hetero_megatron.api.plans import TOP_K
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.template_score import make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.search.incumbent import simulate_best
from hetero_megatron.planner.search.uniform import top_uniform_plans
from hetero_megatron.planner.report.roles import format_placement
from hetero_megatron.planner.whatif.forward_plans import ForwardQuestion
from hetero_megatron.planner.whatif.role_placement import RolePlacement, RoleSearch
from hetero_megatron.plans import Plan
from hetero_megatron.plans.dump import dump_yaml
from hetero_megatron.plans.forward_only import role_of, words_of
from hetero_megatron.predictor.simulate.beside import predict_beside

LENGTH, DTYPE = 128, "fp32"
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


def two_kinds(fast: tuple[int, float, str], slow: tuple[int, float, str]) -> dict[str, Any]:
    """Each (chips, speed, memory), a chip per node."""
    return emulated_cluster(
        [(name, n, 1, speed, memory) for name, (n, speed, memory) in (("fast", fast), ("slow", slow))], fast_slow="25 MB/s"
    )


CASES = {
    "3:1, 2+2": Case(two_kinds((2, 0.6, "1 GiB"), (2, 0.2, "1 GiB")), 8, 8, 48),
    "3:1, 2+2, large teacher": Case(two_kinds((2, 0.6, "1 GiB"), (2, 0.2, "1 GiB")), 6, 24, 32),
    "2:1, 1+3": Case(two_kinds((1, 0.5, "1 GiB"), (3, 0.25, "1 GiB")), 8, 8, 40),
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
    plans = {f"chosen: {found.best.way}": (found.best.plan, found.best.step_seconds)}
    for one in found.alternatives:
        if one.way == "same chips" and one.plan is not None:
            plans["all chips, planned"] = one.plan, one.step_seconds
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
        plans["all chips, uniform"] = plan, seconds
    with suppress(UserError):
        one = roles.on_ranks(frozenset(rank.rank for rank in cluster.ranks if rank.chip == "chip-slow"))
        plans["old chips hold the teacher"] = one.plan, one.step_seconds
    return found, plans


def run(case: Case, folder: Path, name: str, plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """Steps under a plan: seconds of each but the first, and the emulated clock's own check."""
    (folder / "plan.yaml").write_text(dump_yaml(plan))
    save = Path(tempfile.mkdtemp(dir=folder))
    job = ["pretrain_gpt.py", "--plan", folder / "plan.yaml", "--model", folder / "student", "--mock-data",
           "--teacher-hf", folder / "teacher", "--train-iters", args.steps + 1, "--lr", "1e-4", "--eval-iters", 0,
           "--save", save, "--save-interval", 0, "--cluster", folder / "rates.yaml"]  # fmt: skip
    testbed, _ = run_testbed(name, case.cluster, "clock", args.links, job)
    rows = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["step_seconds"] for row in rows if "step_seconds" in row][1:]
    return {"steps": seconds, **{key: testbed.get(key, 0) for key in ("late", "overrun", "disturbed", "invalid")}}


def measure(name: str, case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of the table of one cluster."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_models(case, folder)
        job = ["-m", "hetero_megatron.cli.main", "calibrate", "--model", folder / "student", "--seq-length", LENGTH,
               "--out", folder / "rates.yaml"]  # fmt: skip
        calibration, _ = run_testbed(name, case.cluster, "clock", args.links, job)
        print(calibration)
        found, plans = choose(case, folder)
        print(format_placement(found, hm.Model(str(folder / "student")).spec), file=sys.stderr, flush=True)
        rows = []
        for title, (plan, predicted) in plans.items():
            print(name, title, predicted, flush=True)
            measured = run(case, folder, f"{name}, {title}", plan, args)
            rows.append({"name": title, "predicted": predicted, "measured": median(measured["steps"]), **measured})
            print(rows[-1], flush=True)
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="some of the cases")
    parser.add_argument("--links", default="namespaces", choices=("namespaces", "paced", "none"))
    parser.add_argument("--steps", type=int, default=3, help="measured, of each plan, after one that allocates (3)")
    parser.add_argument("--out", help="write everything as JSON")
    args = parser.parse_args()
    names = args.only or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"--only {unknown[0]}: not one of {', '.join(CASES)}")
    print(f"{machine()}; chips clock, links {args.links}, {args.steps} steps of {LENGTH} tokens")
    found = {}
    for name in names:
        found[name] = measure(name, CASES[name], args)


if __name__ == "__main__":
    main()
