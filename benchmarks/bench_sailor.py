"""Our planner on Sailor's published clusters, judged by rules like its simulator's.

``python benchmarks/bench_sailor.py``: OPT-350M, global batch 1024, sequences of 2048, fp32; Sailor's profiles, memory
rule, network table and constraints. Our search runs on those rules (``sailor_rules.py``), the plan is exported in
Sailor's format, read back as JSON, and scored by an independent judge (``sailor_judge.py``), which is first checked
against published and measured numbers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from benchmarks.public_data import WHERE, data
from benchmarks.sailor_judge import Judge, Verdict, spelled
from benchmarks.sailor_moves import resplit_stages
from benchmarks.sailor_rules import SPACE, SailorCosts, SailorScorer
from hetero_megatron.cluster import load_cluster
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.report.comparison import text_of
from hetero_megatron.planner.search.incumbent import Incumbent, Row
from hetero_megatron.planner.search.local_search import EFFORT, LocalSearch
from hetero_megatron.planner.search.pipeline_dp import PipelineDP
from hetero_megatron.planner.template.plan_template import place, to_plan
from hetero_megatron.plans import validate
from hetero_megatron.plans.export import sailor
from hetero_megatron.spec import load_model

CLUSTERS = Path(__file__).resolve().parent.parent / "examples" / "clusters" / "papers"
BATCH, SEQUENCE = 1024, 2048
MAKE_UPS, WAYS = 3, 60  # other TP degrees tried for each of the best make-ups
KEPT = 200  # templates that the incumbent keeps
V, A = "V100-16", "A100-40"


@dataclass(frozen=True)
class Case:
    """A cluster of the paper; iterations/s of other planners under Sailor's own simulator (run beforehand; None:
    not run there); ``goal``: a brute force over up to three uneven stages, under the same simulator."""

    a100: int
    v100: int
    amp: float
    flashflex: float
    metis: float | None
    sailor: float
    goal: float

    @property
    def file(self) -> Path:
        return CLUSTERS / f"sailor_{self.a100}_{self.v100}.yaml"


CASES = (
    Case(32, 96, 0.1316, 0.1175, 0.1243, 0.1700, 0.2015),
    Case(80, 240, 0.2062, 0.2389, None, 0.3609, 0.4004),
    Case(128, 384, 0.3125, 0.3002, None, 0.5229, 0.5490),
)
# Plans scored by Sailor's simulator itself: (layers with embedding and head, (GPU, TP) of the stages, D, b, 1/s).
KNOWN = (
    ([9, 4, 13], [(V, 4), (V, 2), (A, 2)], 16, 2, 0.2015),
    ([8, 9, 9], [(V, 4), (V, 2), (A, 2)], 16, 2, 0.1125),
    ([9, 4, 13], [(V, 4), (V, 2), (A, 2)], 40, 2, 0.4004),
    ([9, 13, 4], [(V, 4), (A, 2), (V, 2)], 64, 1, 0.5490),
)


def check_judge(judge: Judge, folder: Path) -> None:
    """The judge against Sailor's simulator (known scores) and against its measured plans."""
    print("## The judge against Sailor's simulator\n")
    print("| plan | its simulator, 1/s | this judge | \n| --- | --- | --- |")
    for layers, stages, copies, size, known in KNOWN:
        found = judge.score(spelled(layers, stages, copies, size, BATCH)).per_second
        text = ", ".join(f"{g} tp{t} [{n}]" for n, (g, t) in zip(layers, stages, strict=True))
        print(f"| {copies} x {text}, b {size} | {known:.4f} | {found:.4f} |")
    mixed = spelled([13, 13], [(V, 4), (A, 1)], 27, 2, BATCH)  # Sailor's own plan at 32 + 96
    mixed["pipeline_list"][0]["tmp_per_stage"][0][:3] = [[[[A, 1, judge.zone]], 1]] * 3
    print(f"| Sailor's own at 32 + 96 (3 A100 + 24 x 4 V100, 27 A100) | 0.1700 | {judge.score(mixed).per_second:.4f} |")
    times, memories = [], []
    for path in sorted((folder / "validation").glob("*.json")):
        given = json.loads(path.read_text())
        verdict = judge.score(given)
        times.append(abs(verdict.seconds / given["real"] - 1))
        memories.append(abs(max(verdict.memory) / given["max_mem"] - 1))
    print(
        f"\nOn the {len(times)} measured GH200 plans its mean error is {sum(times) / len(times):.1%} in time and "
        f"{sum(memories) / len(memories):.1%} in memory; Sailor's simulator has 8.9% and 5.9%.\n"
    )


def plan_case(judge: Judge, case: Case) -> tuple[str, str, float, int]:
    """(the plan in Sailor's format, described, CPU seconds from the cluster file to the plan, candidates).

    The steps of ``planner.search.driver.search`` without its last one, simulation of the best plans, which would be by
    our rules.
    """
    started = time.process_time()
    model, cluster = load_model("opt-350m"), load_cluster(str(case.file))
    scorer = SailorScorer(SailorCosts(judge, model, cluster))
    options = SearchOptions("fp32", space=SPACE)
    problem = PlanningProblem(model, cluster, SEQUENCE, BATCH, options)
    incumbent = Incumbent(problem, scorer, keep=KEPT)
    PipelineDP().propose(problem, incumbent)
    for start in _first(incumbent, 2):
        LocalSearch.climb(start, SPACE, incumbent, EFFORT)
    for _, _, template in _first(incumbent, MAKE_UPS):
        resplit_stages(template, problem, incumbent, WAYS)
    chosen = incumbent.rows[0][2]
    placed = place(chosen, scorer.pool)
    assert placed is not None, "the search counts the chips"
    plan = to_plan(placed, cluster, SEQUENCE, model.num_heads)
    validate(plan, model, cluster, dtype="fp32")
    seconds = time.process_time() - started
    described = text_of(chosen, [g.chip for g in scorer.pool.groups])
    return sailor(plan, cluster), described, seconds, scorer.evaluated


def _first(incumbent: Incumbent, count: int) -> list[Row]:
    """The best of each number of pipelines, of the ``count`` best."""
    best = {row[2].pipelines: row for row in reversed(incumbent.rows)}
    return sorted(best.values(), key=lambda row: row[:2])[:count]


def main(names: Sequence[str]) -> None:
    folder = data("sailor")
    if folder is None:
        print(f"nothing to compare: {WHERE}")
        return
    print(f"{machine()}\n")
    judge = Judge(folder)
    check_judge(judge, folder)
    print("## Iterations per second as judged, and CPU seconds of the search\n")
    print("| A100 + V100 | AMP | FlashFlex | Metis | Sailor | goal | ours | over Sailor | CPU s | plans scored |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    details: list[tuple[Case, str, Verdict]] = []
    for case in CASES:
        if names and f"{case.a100}_{case.v100}" not in names:
            continue
        text, described, seconds, evaluated = plan_case(judge, case)
        verdict = judge.score(json.loads(text))
        details.append((case, described, verdict))
        others = [case.amp, case.flashflex, case.metis, case.sailor, case.goal]
        row = " | ".join("-" if x is None else f"{x:.4f}" for x in others)
        print(
            f"| {case.a100} + {case.v100} | {row} | {verdict.per_second:.4f} | {verdict.per_second / case.sailor:.2f}x "
            f"| {seconds:.2f} | {evaluated} |"
        )
    for case, described, verdict in details:
        over = f"over memory by {verdict.over:.0f} bytes" if verdict.over > 0 else "fits"
        used = ", ".join(f"{n} {gpu}" for gpu, n in sorted(verdict.used.items()))
        print(
            f"\n{case.a100} + {case.v100}: {described}; {over}; uses {used}; compute "
            f"{_milliseconds(verdict.compute)}, sending {_milliseconds(verdict.sending)} per micro-batch, sync "
            f"{verdict.sync:.3f} s; {verdict.seconds:.4f} s per iteration"
        )


def _milliseconds(seconds: Sequence[float]) -> str:
    return "/".join(f"{1e3 * x:.1f}" for x in seconds) + " ms"


if __name__ == "__main__":
    main(sys.argv[1:])
