"""The predictor against published measurements: ``python benchmarks/bench_public.py [vtrain-single] [sailor] …``

Prints one table per set. Nothing is fitted to what is reported as tested: the vTrain sets are split by a fixed seed,
Sailor's plans are predicted from Sailor's profile, and Megatron's times with selective recompute from a fit to those
with full one.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.public_data import (
    DEEPSPEED,
    MEGATRON,
    SAILOR,
    WHERE,
    Published,
    a100_cluster,
    data,
    megatron_plan,
    sailor_info,
    sailor_rates,
    sailor_runs,
    vtrain,
    with_optimizer_rate,
)
from hetero_megatron.predictor.cost.cost_options import CostOptions
from hetero_megatron.predictor.cost.rates import Rates, load_rates
from hetero_megatron.predictor.measured_runs import MeasuredRun
from hetero_megatron.predictor.rate_fitting import fit_rates, format_fit, predict_runs
from hetero_megatron.schedule import generate, in_flight
from hetero_megatron.spec import load_model

SEED = 0
SAILOR_OVERHEAD, SAILOR_STATES = 5.06e9, 24  # bytes; bytes per parameter in fp32: constants of Sailor's own simulator
SCORE_BYTES = 16  # eager attention reads and writes each fp16 score about eight times (mask, softmax, dropout, product)


def errors(runs: Sequence[MeasuredRun], rates: Rates, options: CostOptions) -> list[float]:
    return [p / r.seconds - 1 for p, r in zip(predict_runs(runs, rates, options), runs, strict=True)]


def with_scores(rates: Rates) -> Rates:
    """Eager attention, which both sets were measured with: no flash kernels yet."""
    chips = {n: replace(c, score_seconds=SCORE_BYTES / c.bytes_per_second) for n, c in rates.chips.items()}
    return replace(rates, chips=chips)


def summary(found: Sequence[float]) -> str:
    sizes = [abs(e) for e in found]
    return f"mean {statistics.mean(sizes):.1%}, median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}"


def split(runs: Sequence[MeasuredRun]) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
    """(to fit, to test): halves by a fixed seed."""
    order = list(runs)
    random.Random(SEED).shuffle(order)
    return order[: len(order) // 2], order[len(order) // 2 :]


def vtrain_set(kind: str) -> None:
    """Fit on half of a set, test on the other."""
    single = kind == "single"
    to_fit, to_test = split(vtrain(kind, recompute=not single))
    start = with_optimizer_rate(with_scores(load_rates(a100_cluster(1 if single else 64), "fp16")))
    print(f"vTrain {kind}-node: {len(to_fit)} runs to fit, {len(to_test)} to test")
    print(f"  data sheets only, tested half: {summary(errors(to_test, start, DEEPSPEED))}", flush=True)
    only = None if single else ("gemm_flops", "gemm_half", "score_seconds", "alpha", "beta", "optimizer")
    began = time.process_time()
    fit = fit_rates(to_fit, start, DEEPSPEED, only, steps=10)
    print(f"  fitted in {time.process_time() - began:.0f} s of CPU, {len(to_fit)} runs", flush=True)
    print(format_fit(fit))
    found = errors(to_test, fit.rates, DEEPSPEED)
    print(f"  tested half: {summary(found)}")
    if single:
        _by_kind(to_test, found)
    for i in sorted(range(len(found)), key=lambda i: -abs(found[i]))[:6]:
        run = to_test[i]
        first = run.plan.pipelines[0]
        shape = (
            f"{run.plan.world_size} GPUs, {run.model.name}, tp {first.stages[0].units[0].tp}, pp {len(first.stages)}, "
            f"micro-batch {first.micro_batch_size} x {first.num_micro_batches}"
        )
        print(f"    {run.label}: {shape}: measured {run.seconds:.3f} s, predicted {found[i]:+.1%}")


def _by_kind(runs: Sequence[MeasuredRun], found: Sequence[float]) -> None:
    """Signed mean error by TP degree, micro-batch size and hidden size: where the model of a layer is off."""
    groups: dict[tuple[int, int, int], list[float]] = {}
    for run, error in zip(runs, found, strict=True):
        pipeline = run.plan.pipelines[0]
        key = (pipeline.stages[0].units[0].tp, pipeline.micro_batch_size, run.model.hidden_size)
        groups.setdefault(key, []).append(error)
    print("  mean signed error by (tp, micro-batch, hidden):")
    cells = [f"{key}: {statistics.mean(values):+.0%} ({len(values)})" for key, values in sorted(groups.items())]
    for start in range(0, len(cells), 6):
        print("    " + "; ".join(cells[start : start + 6]))


def sailor() -> None:
    """Time and peak memory of Sailor's 15 GH200 plans."""
    given = sailor_runs()
    runs = [run for run, _ in given]
    rates = sailor_rates(max(r.plan.world_size for r in runs) // 4)
    times = predict_runs(runs, rates, SAILOR)
    print("| plan | micro-batch | measured s | predicted s | error | measured GB | predicted GB | error |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    time_errors, memory_errors = [], []
    for (run, row), seconds in zip(given, times, strict=True):
        memory = sailor_memory(run, row["mbs"])
        time_errors.append(seconds / run.seconds - 1)
        memory_errors.append(memory / row["max_mem"] - 1)
        print(
            f"| {run.label} | {row['mbs']} | {run.seconds:.3f} | {seconds:.3f} | {time_errors[-1]:+.1%} "
            f"| {row['max_mem'] / 1e9:.2f} | {memory / 1e9:.2f} | {memory_errors[-1]:+.1%} |"
        )
    print(f"\ntime: {summary(time_errors)}\nmemory: {summary(memory_errors)}")


def sailor_memory(run: MeasuredRun, micro: int) -> float:
    """Peak bytes of the worst rank: in-flight counts of the schedule, Sailor's bytes per layer, and what backward holds
    beside them: the gradients of one layer's attention scores before and after softmax, or of the logits."""
    info = sailor_info()
    pipeline = run.plan.pipelines[0]
    alive = in_flight(generate(run.plan.schedule, len(pipeline.stages), pipeline.num_micro_batches))
    worst = 0.0
    for stage, count in zip(pipeline.stages, alive, strict=True):
        ids = [i + 1 for i in stage.layer_indices()] + [0] * stage.embed + [run.model.num_layers + 1] * stage.head
        parameters = sum(info[str(i)]["params_floats"] for i in ids)
        kept = sum(info[str(i)]["act_mem_bytes"] for i in ids) * micro
        logits = stage.head * micro * run.plan.seq_length * run.model.vocab_size * 4 / stage.units[0].tp
        scores = 2 * micro * run.model.num_heads / stage.units[0].tp * run.plan.seq_length**2 * 4
        worst = max(worst, SAILOR_OVERHEAD + SAILOR_STATES * parameters + count * kept + max(logits, scores))
    return worst


def plain_seconds(row: Published, seconds: float) -> float:
    """The published time without interleaving: ``chunks`` virtual stages divide the bubble (p - 1) / m by their number
    (Narayanan et al. 2021); our schedules here are 1F1B."""
    count = row.batch // row.micro // (row.gpus // 8 // row.pp)
    return seconds * (count + row.pp - 1) / (count + (row.pp - 1) / row.chunks)


def megatron() -> None:
    """Korthikanti et al.: the full-recompute times fix one rate, the others are predicted."""
    rates = with_scores(load_rates(a100_cluster(64), "fp16"))
    # Megatron's own transfers: each TP rank sends its part (scatter-gather), not hidden behind compute.
    full = replace(DEEPSPEED, whole_transfers=False)
    selective = replace(full, sequence_parallel=True)
    sets: dict[str, tuple[list[MeasuredRun], CostOptions]] = {"full": ([], full), "selective": ([], selective)}
    for row in MEGATRON:
        model = load_model(row.model)
        for kind, seconds in (("full", row.full), ("selective", row.selective)):
            plan = megatron_plan(model, row.gpus, 2048, row.micro, row.batch, 8, row.pp, kind)
            sets[kind][0].append(MeasuredRun(plan, model, plain_seconds(row, seconds), f"{row.model} {kind}"))
    cold = {kind: errors(*_arguments(*value, rates)) for kind, value in sets.items()}
    fit = fit_rates(sets["full"][0], rates, full, ("gemm_flops",))
    fitted = {kind: errors(*_arguments(*value, fit.rates)) for kind, value in sets.items()}
    print("| model | recompute | published s | from data sheets | one rate fitted to the four full ones |")
    print("| --- | --- | --- | --- | --- |")
    for kind in sets:
        for i, row in enumerate(MEGATRON):
            print(f"| {row.model} | {kind} | {getattr(row, kind)} | {cold[kind][i]:+.1%} | {fitted[kind][i]:+.1%} |")
    for name, found in (("from data sheets", cold), ("fitted", fitted)):
        both = summary(found["full"] + found["selective"])
        print(f"\n{name}: all eight {both}; selective {summary(found['selective'])}")
    print(format_fit(fit))


def _arguments(
    runs: list[MeasuredRun], options: CostOptions, rates: Rates
) -> tuple[list[MeasuredRun], Rates, CostOptions]:
    return runs, rates, options


SETS = {
    "vtrain-single": lambda: vtrain_set("single"),
    "vtrain-multi": lambda: vtrain_set("multi"),
    "sailor": sailor,
    "megatron": megatron,
}


def main(names: Sequence[str]) -> None:
    for name in names or SETS:
        if name not in SETS:
            raise SystemExit(f"no such set: {name}; there are {', '.join(SETS)}")
        if name != "megatron" and data("vtrain" if "vtrain" in name else "sailor") is None:
            print(f"{name} is left out: {WHERE}")
            continue
        print(f"\n## {name}\n")
        SETS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
