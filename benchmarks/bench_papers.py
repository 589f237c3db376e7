"""Our planner on the clusters of papers, our predictions beside what they published.

``python benchmarks/bench_papers.py [case …]``: each case is what a user runs (``hetero-megatron plan`` with the command
that is printed, all defaults); nothing is tuned to the published numbers. Rates are from data sheets, so what can be
compared is ratios: over a uniform plan, and over what the parts of the cluster do alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from hetero_megatron.cluster import load_cluster
from hetero_megatron.errors import UserError
from hetero_megatron.planner.problem import PlanningProblem, SearchOptions
from hetero_megatron.planner.report.comparison import Comparisons, Summary, summarize, text_of
from hetero_megatron.planner.search.driver import search
from hetero_megatron.spec import load_model

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "examples/clusters/papers"


@dataclass(frozen=True)
class Case:
    """One search. Published: seconds of a step, speed-up over the best uniform plan, share of the sum of the types
    alone, model FLOPs utilisation; None: not published. ``assumed``: beside what the cluster file says."""

    name: str
    cluster: str
    model: str
    seq_length: int
    batch: int
    assumed: str
    seconds: float | None = None
    speedup: float | None = None
    ratio: float | None = None
    mfu: float | None = None

    @property
    def command(self) -> str:
        return (
            f"hetero-megatron plan --model {self.model} --cluster {FOLDER}/{self.cluster}.yaml "
            f"--seq-length {self.seq_length} --global-batch-size {self.batch}"
        )


BATCH = "global batch"
MIXES = ("ascend", "iluvatar", "metax", "mthreads", "amd")
CASES = (
    Case("hexiscale-case", "hexiscale_case", "llama2-13b", 4096, 32, BATCH, seconds=25.55, speedup=41.52 / 25.55),
    Case(
        "hexiscale-case-16bit",
        "hexiscale_case_16bit",
        "llama2-13b",
        4096,
        32,
        BATCH,
        seconds=25.55,
        speedup=41.52 / 25.55,
    ),
    Case("hexiscale-1-7b", "hexiscale_1", "llama2-7b", 4096, 256, BATCH, mfu=0.3119),
    Case("hexiscale-1-13b", "hexiscale_1", "llama2-13b", 4096, 256, BATCH, mfu=0.2723),
    Case("hexiscale-2-7b", "hexiscale_2", "llama2-7b", 4096, 256, BATCH, mfu=0.3347),
    Case("hexiscale-2-13b", "hexiscale_2", "llama2-13b", 4096, 256, BATCH, mfu=0.3139),
    Case(
        "hexiscale-3-30b", "hexiscale_3", "llama-30b", 2048, 512, f"{BATCH}; 2,048 tokens (theirs: 4,096)", mfu=0.2749
    ),
    Case("hethub-768", "hethub_768", "hethub-140b", 4096, 1536, f"{BATCH}; model shape", ratio=0.9749),
    *(
        Case(f"hethub-{mix}", f"hethub_{mix}", "llama2-70b", 4096, 512, "everything but the pair of vendors")
        for mix in MIXES
    ),
    Case("h2-1024", "h2_1024", "h2-100b", 4096, 1024, f"{BATCH}; model shape; the four chips", ratio=1.1637),
)


@dataclass(frozen=True)
class Row:
    """What came out of a case."""

    case: Case
    summary: Summary
    search_cpu: float
    all_cpu: float


def run(case: Case) -> Row:
    """Search and compare, as ``plan --compare`` does."""
    started = time.process_time()
    model, cluster = load_model(case.model), load_cluster(str(ROOT / FOLDER / f"{case.cluster}.yaml"))
    options = SearchOptions()
    result = search(PlanningProblem(model, cluster, case.seq_length, case.batch, options))
    searched = time.process_time()
    what = Comparisons(every=True)
    summary = summarize(result, PlanningProblem(model, cluster, case.seq_length, case.batch, options), what)
    return Row(case, summary, searched - started, time.process_time() - started)


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def whole_mfu(row: Row) -> float | None:
    """Model FLOPs over the peak of *all* chips of the cluster, as the papers have it (idle ones count)."""
    best = row.summary.result.best
    cluster, dtype = best.cluster, row.summary.result.scorer.costs.dtype
    peak = [cluster.chips[r.chip].flops[dtype] for r in cluster.ranks]
    used = sum(peak[r] for r in best.plan.ranks)
    mfu = best.prediction.mfu
    return None if mfu is None else mfu * used / sum(peak)


HEAD = (
    "case", "step s: theirs", "ours", "tokens/s", "over uniform: theirs", "ours",
    "over the sum of the types alone: theirs", "ours", "MFU: theirs", "ours", "of the bound", "search, CPU s",
)  # fmt: skip


def line(row: Row) -> str:
    """A line of the table."""
    case, summary = row.case, row.summary
    best = summary.result.best
    found = best.prediction
    uniform, bound = summary.uniform, summary.bound
    over = found.tokens_per_second / uniform.tokens_per_second if uniform and uniform.tokens_per_second else None
    cells = [
        case.name, f"{case.seconds:.2f}" if case.seconds else "-", f"{best.step_seconds:.2f}",
        f"{found.tokens_per_second:,.0f}", times(case.speedup), times(over) if over else "no uniform plan fits",
        share(case.ratio), share(summary.speedup_ratio), share(case.mfu), share(whole_mfu(row)),
        share(bound.seconds / best.step_seconds if bound and bound.seconds else None), f"{row.search_cpu:.1f}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def details(row: Row) -> str:
    """Command, plan, what it was compared with, what was assumed."""
    case, summary = row.case, row.summary
    result = summary.result
    lines = [f"### {case.name}", "", f"`{case.command}`", ""]
    lines.append(f"* plan: {text_of(result.best.template, [g.chip for g in result.pool.groups])}")
    if result.best.idle:
        lines.append(f"* idle: {len(result.best.idle)} chips")
    for name, baseline in [("uniform", summary.uniform), *((f"{b.chips} x {b.name} alone", b) for b in summary.alone)]:
        if baseline is None:
            continue
        if baseline.problem:
            lines.append(f"* {name}: none ({baseline.problem})")
        else:
            speed = f"{baseline.tokens_per_second:,.0f} tokens/s"
            lines.append(f"* {name}: {speed}, {baseline.step_seconds:.2f} s: {baseline.text}")
    lines.append(f"* assumed: {case.assumed}; {assumptions(case.cluster)}")
    lines.append(f"* all comparisons: {row.all_cpu:.0f} s of CPU; {result.method}, {result.evaluated} plans")
    return "\n".join(lines)


def assumptions(cluster: str) -> str:
    """What the head of the cluster file says is published and assumed."""
    text = (ROOT / FOLDER / f"{cluster}.yaml").read_text(encoding="utf-8")
    head = [x.removeprefix("#").strip() for x in text.splitlines() if x.startswith("#")]
    return " ".join(head[1:])


def main(names: Sequence[str]) -> None:
    known = {case.name: case for case in CASES}
    for name in names:
        if name not in known:
            raise SystemExit(f"no such case: {name}; there are {', '.join(known)}")
    print(f"{machine()}\n")
    print("| " + " | ".join(HEAD) + " |")
    print("|" + " --- |" * len(HEAD), flush=True)
    rows = []
    for case in [known[n] for n in names] or CASES:
        try:
            rows.append(run(case))
        except UserError as error:
            print(f"| {case.name} | {error} |", flush=True)
            continue
        print(line(rows[-1]), flush=True)
    for row in rows:
        print("\n" + details(row))


if __name__ == "__main__":
    main(sys.argv[1:])
