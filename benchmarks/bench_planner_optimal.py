"""The planner against exhaustive search on random small clusters.

Half of the clusters have up to 4 chips and every choice open (TP, inner DP, stages, layers, micro-batch sizes and
counts, recompute, schedule, idle chips), half 2 + 2 + 2 chips with micro-batch 1 and no recompute. The reference
(tests/support/planner_reference.py) shares only the evaluation of one plan with the planner. Restricted searches of
the same reference stand for other planners: uniform layers (AMP), one TP degree everywhere (Metis' stages of equal
TP), equal shares of the batch per pipeline (Sailor's one DP degree, no unequal shares).

``--offload``: any stage may have its optimizer in host memory, of the planner's plans as of the reference's; the bound
is then the one by prices.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from hetero_megatron.errors import UserError
from hetero_megatron.planner.estimate.lower_bounds import work_bound
from hetero_megatron.planner.estimate.template_score import TemplateScorer, make_scorer
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions, SearchSpace
from hetero_megatron.planner.search.driver import search
from hetero_megatron.planner.search.incumbent import SimulatedPlan
from hetero_megatron.planner.search.uniform import top_uniform_plans
from hetero_megatron.planner.template.plan_template import PlanTemplate
from tests.support.planner_reference import Case, Exhaustive, random_case, unequal_directions


class _Restricted(Exhaustive):
    """The best plan of a restricted space; starts from no plan at all."""

    def __init__(self, case: Case, scorer, rule, best: float) -> None:  # type: ignore[no-untyped-def]
        super().__init__(case, scorer, best)
        self.rule = rule

    def _try(self, candidate: PlanTemplate) -> None:
        if self.rule(candidate):
            super()._try(candidate)


def _even_layers(candidate: PlanTemplate) -> bool:
    rows = [[s.layers for s in p.shape.stages] for p in candidate.parts]
    return all(max(row) - min(row) <= 1 for row in rows)


def _one_tp(candidate: PlanTemplate) -> bool:
    return len({s.tp for p in candidate.parts for s in p.shape.stages}) == 1


def _equal_shares(candidate: PlanTemplate) -> bool:
    return len({p.sequences for p in candidate.parts}) == 1


RULES = {"uniform layers": _even_layers, "one TP degree": _one_tp, "equal shares": _equal_shares}


def report(
    done: int,
    nowhere: int,
    wrong: int,
    below: int,
    ratios: list[float],
    gaps: list[float],
    errors: list[float],
    better: dict[str, list[float]],
) -> None:
    print(f"{done} clusters; {nowhere} on which nothing is found ({wrong} of these have a plan)")
    if not ratios:
        return
    print(f"worse than exhaustive search: mean {statistics.mean(ratios):.3%}, worst {max(ratios):.3%}, "
          f"{sum(r > 0.01 for r in ratios)} of {len(ratios)} by more than 1 %")  # fmt: skip
    print(f"bound: below the optimum's time on all but {below}; gap median {statistics.median(gaps):.2%}, "
          f"mean {statistics.mean(gaps):.2%}, worst {max(gaps):.2%}")  # fmt: skip
    print(f"estimate of judged templates against the step simulator: {len(errors)} of them, "
          f"mean error {statistics.mean(map(abs, errors)):.3%}, worst {max(errors, key=abs):+.3%}")  # fmt: skip
    for name, values in better.items():
        if values:
            print(f"against the best of {name}: {len(values)} clusters, median {statistics.median(values):.3f}x, "
                  f"best {max(values):.2f}x, worst {min(values):.4f}x")  # fmt: skip
    sys.stdout.flush()


def cases(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """(kind, seed) of every cluster."""
    if args.only:
        for name in args.only:
            kind, seed = name.split(":")
            yield kind, int(seed)
        return
    for i in range(args.count):
        yield args.kind or ("open", "fixed")[i % 2], args.first + (i if args.kind else i // 2)


def _estimate(scorer: TemplateScorer, found: SimulatedPlan) -> float:
    """Seconds of a step by which the reference's plans are compared; of a plan that no template says, its own."""
    score = scorer.score(found.template) if found.template.parts else None
    return found.step_seconds if score is None else score.step_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="clusters in all")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--kind", choices=("open", "fixed"), help="only this half")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so many seconds")
    parser.add_argument("--restricted", action="store_true", help="also the best plans of restricted spaces")
    parser.add_argument("--shares", nargs="+", type=int, default=[1], help="of optimizer states, in the reference")
    parser.add_argument("--offload", action="store_true", help="optimizers may be in host memory")
    parser.add_argument("--unequal", action="store_true", help="links measured by direction, up to 100 : 1")
    parser.add_argument("--only", nargs="+", metavar="KIND:SEED", help="these clusters alone, such as fixed:4")
    parser.add_argument("--verbose", action="store_true", help="a line for every cluster")
    args = parser.parse_args()
    print(machine(), flush=True)
    ratios: list[float] = []
    searched: list[float] = []
    gaps: list[float] = []
    errors: list[float] = []
    better: dict[str, list[float]] = {"uniform plan": [], **{name: [] for name in RULES}}
    nowhere = wrong = below = done = 0
    start, cpu = time.perf_counter(), time.process_time()
    for kind, seed in cases(args):
        if time.perf_counter() - start > args.seconds:
            break
        if done and done % 20 == 0:
            report(done, nowhere, wrong, below, ratios, gaps, errors, better)
            print(f"{time.process_time() - cpu:.0f} CPU s so far", flush=True)
        case = random_case(seed, kind)
        if args.unequal:
            case = unequal_directions(case, seed)
        scorer = make_scorer(PlanningProblem(case.model, case.cluster, case.seq_length, 1))
        sizes = (case.size,) if case.size else None
        offload = "always" if args.offload else "never"
        space = SearchSpace(sizes, case.recompute, offload=offload, more_schedules="never")
        problem = PlanningProblem(
            case.model, case.cluster, case.seq_length, case.batch, SearchOptions(space=space)
        )
        done += 1
        began = time.process_time()
        try:
            result = search(problem, scorer=scorer)
        except UserError:
            searched.append(time.process_time() - began)
            nowhere += 1
            has = math.isfinite(Exhaustive(case, scorer, math.inf, args.shares, args.offload).run())
            wrong += has
            if has:
                print(f"{kind}:{seed}: nothing found, but there is a plan", flush=True)
            continue
        searched.append(time.process_time() - began)
        judged = [(_estimate(scorer, c), c) for c in (result.best, *result.others)]
        errors += [seconds / c.step_seconds - 1 for seconds, c in judged]
        mine = min(seconds for seconds, _ in judged)
        reference = Exhaustive(case, scorer, mine, args.shares, args.offload)
        best = reference.run()
        bound = work_bound(scorer, case.model, case.batch)
        if args.verbose or mine > 1.001 * best or best < bound * (1 - 1e-9):
            print(f"{kind}:{seed}: {mine / best - 1:.3%} worse, bound {best / bound - 1:.2%} below, "
                  f"searched in {searched[-1]:.2f} CPU s, {time.process_time() - began:.1f} with the reference; "
                  f"best: {reference.found}", flush=True)  # fmt: skip
        ratios.append(mine / best - 1)
        gaps.append(best / bound - 1)
        below += gaps[-1] < -1e-9
        uniform = [s.step_seconds for _, c in top_uniform_plans(problem, scorer, 20)[0]
                   if (s := scorer.score(c)) and s.over == 0]  # fmt: skip
        if uniform:
            better["uniform plan"].append(min(uniform) / mine)
        if args.restricted and kind == "open":
            for name, rule in RULES.items():
                found = _Restricted(case, scorer, rule, math.inf if sum(scorer.pool.counts) <= 2 else 3 * mine)
                value = found.run()
                if found.found is not None:
                    better[name].append(value / mine)
    report(done, nowhere, wrong, below, ratios, gaps, errors, better)
    print(f"CPU s of a search: median {statistics.median(searched):.2f}, worst {max(searched):.2f}")


if __name__ == "__main__":
    main()
