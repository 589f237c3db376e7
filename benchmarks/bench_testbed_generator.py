"""Where answers of GRPO are sampled, measured on clusters emulated by the testbed.

    python benchmarks/bench_testbed_generator.py [--only NAME …] [--links namespaces|paced] [--out FILE]

For each cluster, in one run: ``calibrate``; then steps of ``finetune --grpo`` under the placement that ``plan --grpo
--generator-ahead`` chooses, with sampling in turn on all chips, and with a generator on the slow chips, ahead or not.
Prints predicted beside measured seconds per step, and how many times as fast the chosen placement is. Late and overrun:
of the emulated clock, see docs/testbed.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import hetero_megatron as hm
from benchmarks.bench_testbed_roles import SHAPES, least_late, print_against, print_placements, steps_of, two_kinds
from benchmarks.common import machine
from benchmarks.testbed_run import notes, run_testbed
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.whatif.forward_plans import ForwardQuestion
from hetero_megatron.planner.whatif.generator_placement import GeneratorSearch
from hetero_megatron.plans import Plan
from hetero_megatron.plans.dump import dump_yaml
from hetero_megatron.plans.roles import GENERATOR
from hetero_megatron.spec.grpo import Grpo

LENGTH, NEW, DTYPE = 64, 48, "fp32"
VOCABULARY = 512  # of the models' shapes
IN_TURN, OLD, OLD_AHEAD = "all chips, in turn", "old chips sample, before each step", "old chips sample, ahead"


@dataclass(frozen=True)
class Case:
    """A cluster, layers of the model, and answers of a step."""

    cluster: dict[str, Any]
    layers: int
    batch: int


CASES = {
    "3:1, 2+2": Case(two_kinds((2, 0.18), (2, 0.06)), 4, 16),
    "2:1, 1+3": Case(two_kinds((1, 0.16), (3, 0.08)), 4, 16),
}


def write_files(case: Case, folder: Path) -> None:
    """``base`` with random weights and a tokenizer, prompts, and a function that judges answers by their ids."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [f"w{i}" for i in range(VOCABULARY - 1)] + ["<end>"]
    single = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>"))
    single.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=single, eos_token="<end>").save_pretrained(folder / "base")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPES, num_hidden_layers=case.layers)).save_pretrained(folder / "base")
    prompts = [{"prompt": " ".join(f"w{(7 * i + j) % 500}" for j in range(LENGTH - NEW))} for i in range(32)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "rewards.py").write_text("def small(completion_ids, **_): return [-sum(ids) for ids in completion_ids]")


def choose(case: Case, folder: Path) -> dict[str, tuple[Plan, float, bool]]:
    """By name, plans to run, their predicted seconds per step, and whether the generator is ahead; the chosen one
    first."""
    cluster, spec = hm.Cluster.read(folder / "rates.yaml").described, hm.Model(str(folder / "base")).spec
    options = SearchOptions(dtype=DTYPE)
    problem = PlanningProblem(spec, cluster, LENGTH, case.batch, options)
    asked = ForwardQuestion(GENERATOR, spec, LENGTH, case.batch, DTYPE, options.costs, 0)
    slow = frozenset(rank.rank for rank in cluster.ranks if rank.chip == "chip-slow")
    search = GeneratorSearch(problem, asked, Grpo(max_new_tokens=NEW, ahead=True), None)
    placed = search.placed()
    assert placed.best.plan is not None
    made = {f"chosen: {placed.best.way}": (placed.best.plan, placed.best.step_seconds, placed.best.way == "own chips")}
    for one in placed.alternatives:
        if one.way == "same chips" and one.plan is not None:
            made[IN_TURN] = one.plan, one.step_seconds, False
    for title, ahead in ((OLD_AHEAD, True), (OLD, False)):
        with suppress(UserError):
            one = GeneratorSearch(problem, asked, Grpo(max_new_tokens=NEW, ahead=ahead), None).on_ranks(slow)
            if one.plan is not None:
                made[title] = one.plan, one.step_seconds, ahead
    return made


def run(case: Case, folder: Path, name: str, plan: Plan, ahead: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Steps under a plan: seconds of each but the first two, and the emulated clock's own check."""
    (folder / "plan.yaml").write_text(dump_yaml(plan))
    save = Path(tempfile.mkdtemp(dir=folder))
    job: list[Any] = [
        "-m", "hetero_megatron.cli.main", "finetune", "--grpo", "--plan", folder / "plan.yaml", "--load-hf",
        folder / "base", "--data-path", folder / "prompts.jsonl", "--split", "100,0,0", "--max-new-tokens", NEW,
        "--reward-function", f"{folder}/rewards.py:small", "--grpo-group-size", 4, "--train-iters", args.steps + 2,
        "--lr", "1e-4", "--save", save, "--save-interval", 0, "--cluster", folder / "rates.yaml",
        *(["--generator-ahead"] if ahead else []),
    ]  # fmt: skip
    testbed, _ = run_testbed(name, case.cluster, "clock", args.links, job)
    return steps_of(save, testbed, 2)


def measure(name: str, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """``rows`` of the table of one cluster, and how trustworthy its calibration was."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_files(case, folder)
        job: list[Any] = ["-m", "hetero_megatron.cli.main", "calibrate", "--model", folder / "base", "--tp", 1,
                          "--seq-length", LENGTH, "--out", folder / "rates.yaml"]  # fmt: skip
        began = time.monotonic()
        testbed, _ = run_testbed(name, case.cluster, "clock", args.links, job)
        took = time.monotonic() - began
        rows, known = list[dict[str, Any]](), dict[tuple[str, bool], dict[str, Any]]()
        for title, (plan, predicted, ahead) in choose(case, folder).items():
            key = dump_yaml(plan), ahead
            if key not in known:
                known[key] = least_late(partial(run, case, folder, f"{name}, {title}", plan, ahead, args))
            measured = known[key]
            rows.append({"name": title, "predicted": predicted, "measured": median(measured["steps"]), **measured})
            print(f"  {title}: {rows[-1]['predicted']:.3f} s predicted, {rows[-1]['measured']:.3f} s", flush=True)
        clock = {key: testbed.get(key, 0.0) for key in ("late", "overrun")}
        trust = {key: testbed.get(key, False) for key in ("disturbed", "invalid")}
        return {"rows": rows, "clock": clock, "calibration_seconds": took, **trust}


def report(name: str, case: Case, found: dict[str, Any]) -> dict[str, float]:
    """Print the table of one cluster; by name, how many times as long as the chosen one each other placement takes."""
    print(f"\n### {name} ({case.layers} layers, {case.batch} answers of {NEW} tokens a step; {notes(found)})\n")
    ratios = print_placements(found["rows"])
    print(flush=True)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="some of the cases")
    parser.add_argument("--links", default="namespaces", choices=("namespaces", "paced", "none"))
    parser.add_argument("--steps", type=int, default=3, help="measured, of each plan, after two that allocate (3)")
    parser.add_argument("--out", help="write everything as JSON")
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
    print()
    print_against((IN_TURN, OLD_AHEAD, OLD), ratios)


if __name__ == "__main__":
    main()
