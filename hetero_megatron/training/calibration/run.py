"""``calibrate``: all measurements of a job, as the ``rates:`` section of its cluster file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

import torch

from hetero_megatron.cluster import Cluster
from hetero_megatron.comm import Comm
from hetero_megatron.parallel.update import OptimizerFactory
from hetero_megatron.planner.cost.link_model import LinkModel
from hetero_megatron.planner.cost.rates import LinkRates, Rates, link_document, model_fingerprint
from hetero_megatron.spec import ModelSpec
from hetero_megatron.testbed.clocks import Kept, worst_clock
from hetero_megatron.training.calibration.alone import Alone, AttentionRow, measure_alone
from hetero_megatron.training.calibration.chips import Job, Kernels, Observed, observe, observe_exchange
from hetero_megatron.training.calibration.links import LinkRow, measure_links
from hetero_megatron.training.calibration.runs import (
    Costs,
    Observation,
    Phase,
    all_runs,
    depths,
    exchange_runs,
    jitter,
    one_layer_runs,
    slow_ranks,
    solve,
    solve_phases,
    spread,
    stragglers,
    tp_groups,
    waiting,
)

STRAGGLER = 0.1  # slower than its fellows by more than this share
ALONE = 5  # calls of what is timed alone that count, for each step


@dataclass(frozen=True)
class CalibrationOptions:
    """What to measure.

    Args:
        lengths: at which to time attention alone.
        steps: measured per pipeline of micro-batches of 1 (a clocked testbed needs one); larger micro-batches take as
            many fewer, at least one. What is timed alone is called ``ALONE`` times as often.
    """

    seq_length: int
    dtype: str
    micro_batch_sizes: tuple[int, ...] = (1, 2)
    tp: tuple[int, ...] = (1,)
    lengths: tuple[int, ...] = ()
    steps: int = 1


@dataclass
class Calibration:
    """What was measured: ``costs`` by (chip, tp, micro-batch size), ``spreads`` alike, ``alone_spread`` by chip, links,
    ``slow`` ranks -> times slower than their chip type."""

    costs: dict[tuple[str, int, int], Costs] = field(default_factory=dict)
    spreads: dict[tuple[str, int, int], float] = field(default_factory=dict)
    waiting: dict[tuple[str, int, int], tuple[float, float]] = field(default_factory=dict)  # by the same, with TP
    step_seconds: dict[str, float] = field(default_factory=dict)
    exchange: dict[str, tuple[float, float, float, float]] = field(default_factory=dict)  # as solve_phases() returns
    saved: dict[str, float] = field(default_factory=dict)  # by a first backward, seconds per byte of weights
    jitter: dict[str, float] = field(default_factory=dict)
    optimizer: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    attention: dict[str, list[AttentionRow]] = field(default_factory=dict)
    visits: dict[str, list[AttentionRow]] = field(default_factory=dict)
    alone_spread: dict[str, float] = field(default_factory=dict)
    links: list[LinkRow] = field(default_factory=list)
    slow: dict[tuple[int, ...], float] = field(default_factory=dict)
    clock: Kept | None = None  # on a testbed
    rates: dict[str, Any] = field(default_factory=dict)

    def fixed(self) -> dict[str, tuple[float, float]]:
        """Seconds of an action besides its layers, by chip: those of the lowest TP degree, since slow ranks alone may
        have measured a higher one."""
        return {chip: costs.fixed for (chip, _, _), costs in sorted(self.costs.items(), reverse=True)}


def calibrate(
    comm: Comm,
    cluster: Cluster,
    spec: ModelSpec,
    options: CalibrationOptions,
    dtype: torch.dtype,
    optimizer: OptimizerFactory,
    log: Callable[[str], None],
    links: Sequence[LinkRow] | None = None,
    kernels: Kernels | None = None,
    fixed: Mapping[str, tuple[float, float]] | None = None,
) -> Calibration:
    """Measure chips, and links where they are not known yet; every rank of the cluster calls it, and gets the same
    answer. What slow ranks measured counts in nothing.

    Args:
        kernels: as runs would have them; None: torch's own.
        fixed: seconds of an action besides its layers, by chip, where they are known.
    """
    everyone = tuple(range(cluster.world_size))
    comm.create_groups([everyone])
    world = comm.group(everyone)
    if links is None:
        log("links")
        links = [row for rows in world.gather_objects(measure_links(comm, cluster), list[LinkRow]) for row in rows]
    found = Calibration(links=list(links))
    job = Job(comm, dtype, optimizer, kernels)
    seen, rows = _observe_pipelines(cluster, spec, options, job, log)
    log("updates of weights and attention, alone")
    alone = world.gather_objects(measure_alone(job, spec, options.lengths, ALONE * options.steps), Alone)
    _solve(found, seen, fixed or {})
    found.slow = stragglers(seen, found.costs, STRAGGLER)
    out = slow_ranks(found.slow, seen)
    seen = [o for o in seen if not out & set(o.ranks)]
    row_bytes = options.seq_length * spec.hidden_size * dtype.itemsize
    _solve(found, seen, fixed or {})
    found.waiting = _waiting(seen, cluster, links, options.dtype, row_bytes)
    log("exchange of gradients and parameters")
    chips = [rank.chip for rank in cluster.ranks]
    phases: list[Phase] = []
    for run in exchange_runs(cluster, spec, options.seq_length):
        own = observe_exchange(run, chips[comm.rank], job, 2 * options.steps)
        every = world.gather_objects(own, list[Phase])
        phases += [p for rank, theirs in enumerate(every) if rank not in out for p in theirs]
    found.exchange = {c: solve_phases([p for p in phases if p.chip == c]) for c in {p.chip for p in phases}}
    for rank, measured in enumerate(alone):
        if rank not in out:
            chip = chips[rank]
            found.optimizer.setdefault(chip, []).extend(measured.optimizer)
            found.attention.setdefault(chip, []).extend(measured.attention)
            found.visits.setdefault(chip, []).extend(measured.visits)
            found.alone_spread[chip] = max(found.alone_spread.get(chip, 0.0), measured.spread)
    for chip in {chip for chip, _, _ in found.costs}:
        _per_step(found, chip, [o for o in rows if o.observation.chip == chip and o.rank not in out])
    reports = world.gather_objects(comm.clock.report(), dict[str, float])
    found.clock = worst_clock(dict(enumerate(reports)))
    found.rates = _document(found, cluster, spec, options)
    return found


def _observe_pipelines(
    cluster: Cluster,
    spec: ModelSpec,
    options: CalibrationOptions,
    job: Job,
    log: Callable[[str], None],
) -> tuple[list[Observation], list[Observed]]:
    """What all runs of single pipelines and of replicas of one stage showed: of each stage, and, of the former, of each
    rank with layers."""
    comm, seen, rows = job.comm, list[Observation](), list[Observed]()
    world = comm.group(range(cluster.world_size))
    for tp in options.tp:
        if few := sorted({rank.chip for rank in cluster.ranks} - set(tp_groups(cluster, tp))):
            log(f"tp {tp}: not measured on {', '.join(few)}, of which there are fewer")
    many = _depths(cluster, spec, options, job)
    named = ", ".join(f"{n} on {chip}" for chip, n in many.items())
    log(f"layers of a stage, so that all chip types take about as long: {named}")
    runs = all_runs(cluster, spec, options.seq_length, options.tp, options.micro_batch_sizes, many)
    for i, run in enumerate(runs, 1):
        log(f"{i} of {len(runs)}: tp {run.tp}, micro-batch {run.micro_batch_size}: stages {run.title}")
        own = observe(run, cluster.ranks[comm.rank].chip, job, run.steps(options.steps))
        theirs = [o for o in world.gather_objects(own, Observed | None) if o is not None]
        seen += _merge([o.observation for o in theirs])
        if len(run.plan.pipelines) == 1:  # replicas also exchange gradients outside of their actions
            rows += [o for o in theirs if o.observation.layers]
    return seen, rows


def _depths(cluster: Cluster, spec: ModelSpec, options: CalibrationOptions, job: Job) -> dict[str, int]:
    """Layers of each chip type where they are to be many, by a first run; see :func:`depths`."""
    comm, found = job.comm, list[Observation]()
    for run in one_layer_runs(cluster, spec, options.seq_length, options.tp[0], options.micro_batch_sizes[0]):
        own = observe(run, cluster.ranks[comm.rank].chip, job, steps=1)
        every = comm.group(range(cluster.world_size)).gather_objects(own, Observed | None)
        found += [o.observation for o in every if o is not None]
    return depths(cluster, found)


def _per_step(found: Calibration, chip: str, rows: Sequence[Observed]) -> None:
    """What a chip type takes per step, besides its stages' actions, and how much these vary."""
    update = _medians(found.optimizer[chip])  # part of the seconds outside the actions
    found.step_seconds[chip] = max(1e-6, median(o.tail - _at(update, o.owned) for o in rows))
    found.saved[chip] = max(0.0, median(o.saved for o in rows))
    found.jitter[chip] = jitter([o.computed for o in rows])


def _solve(
    found: Calibration, observations: Sequence[Observation], fixed: Mapping[str, tuple[float, float]]
) -> None:
    """Costs and spreads of every (chip, TP, micro-batch size) that was observed."""
    for chip in {o.chip for o in observations}:
        alike = [o for o in observations if o.chip == chip]
        for (tp, size), costs in solve(alike, fixed.get(chip)).items():
            found.costs[chip, tp, size] = costs
            found.spreads[chip, tp, size] = spread([o for o in alike if (o.tp, o.micro_batch_size) == (tp, size)])


def _merge(observations: Sequence[Observation]) -> list[Observation]:
    """The ranks of a TP group as one: means of their medians."""
    groups: dict[tuple[int, ...], list[Observation]] = {}
    for o in observations:
        groups.setdefault(o.ranks, []).append(o)
    merged = []
    for o, *others in groups.values():
        every = [o, *others]
        means: dict[str, Any] = {k: fmean(getattr(e, k) for e in every) for k in ("forward", "backward", "spread")}
        merged.append(replace(o, apart=(fmean(e.apart[0] for e in every), fmean(e.apart[1] for e in every)), **means))
    return merged


def _waiting(
    seen: Sequence[Observation], cluster: Cluster, links: Sequence[LinkRow], dtype: str, row_bytes: int
) -> dict[tuple[str, int, int], tuple[float, float]]:
    """What TP groups waited in one exchange beyond what it takes by these links, by (chip, TP, micro-batch size).

    Args:
        row_bytes: of one sequence's activations.
    """
    network = LinkModel(Rates(cluster, dtype, {}, {(r.source, r.target, r.same_node): _link_rates(r) for r in links}))
    found: dict[tuple[str, int, int], list[tuple[Observation, float]]] = {}
    for o in seen:
        if o.swaps:
            seconds, _ = network.tp_exchange(o.ranks, o.micro_batch_size * row_bytes)
            found.setdefault((o.chip, o.tp, o.micro_batch_size), []).append((o, seconds))
    return {key: waiting(observations) for key, observations in found.items()}


def _document(found: Calibration, cluster: Cluster, spec: ModelSpec, options: CalibrationOptions) -> dict[str, Any]:
    """The ``rates:`` section; see planner/cost/rates.py."""
    chips: dict[str, Any] = {}
    name = model_fingerprint(spec)
    for chip in dict.fromkeys(c for c, _, _ in found.costs):
        mine = {(tp, size): costs for (c, tp, size), costs in sorted(found.costs.items()) if c == chip}
        tables = {
            table: {key: getattr(costs, part) for key, costs in mine.items()}
            for table, part in (("layers", "layer"), ("embed", "embed"), ("head", "head"))
        }
        tables["waiting"] = {(tp, size): s for (c, tp, size), s in sorted(found.waiting.items()) if c == chip}
        rows: dict[str, Any] = {
            table: [
                [name, tp, size, options.seq_length, *(_digits(max(s, 1e-7)) for s in seconds)]
                for (tp, size), seconds in measured.items()
            ]
            for table, measured in tables.items()
            if measured
        }
        rows["action_seconds"] = _digits(fmean(found.fixed()[chip]))
        groups = {g.name for g in cluster.nodes if g.chip == chip}
        messages = [link.message for link in found.links if link.source in groups]
        rows["message_seconds"] = _digits(median(messages) if messages else 0.0)
        rows["step_seconds"] = _digits(found.step_seconds[chip])
        rows["accumulate_beta"] = _digits(found.saved[chip])
        rows["jitter"] = _digits(found.jitter[chip])
        rows["spread"] = _digits(max(s for (c, _, _), s in found.spreads.items() if c == chip))
        if chip in found.exchange:
            names = ("pack_beta", "add_beta", "unpack_beta", "exchange_seconds")
            rows |= {key: _digits(value) for key, value in zip(names, found.exchange[chip])}
        rows["optimizer"] = [[n, _digits(s)] for n, s in _medians(found.optimizer[chip])]
        for table in ("attention", "visits"):
            if measured := getattr(found, table).get(chip):
                rows[table] = [[*key, *map(_digits, s)] for key, s in _attention_medians(measured)]
        chips[chip] = {options.dtype: rows}
    links = [link_document(row.source, row.target, _link_rates(row)) for row in found.links]
    return {"chips": chips, "links": links}


def _at(rows: Sequence[tuple[int, float]], elements: int) -> float:
    """Seconds of an update of so many elements, on the line through the first and last measured ones."""
    (a, s), (b, t) = rows[0], rows[-1]
    return s + (t - s) * (elements - a) / (b - a)


def _medians(rows: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(n, median(s for m, s in rows if m == n)) for n in sorted({m for m, _ in rows})]


def _attention_medians(rows: Sequence[AttentionRow]) -> list[tuple[tuple[int, ...], tuple[float, float]]]:
    keys = sorted({row[:3] for row in rows})
    return [(k, (median(r[3] for r in rows if r[:3] == k), median(r[4] for r in rows if r[:3] == k))) for k in keys]


def _link_rates(row: LinkRow) -> LinkRates:
    single, together, exchange = (
        (_digits(alpha), _digits(beta, 5)) for alpha, beta in ((row.alpha, row.beta), row.all_to_all, row.exchange)
    )
    return LinkRates(*single, _digits(row.message), together, row.same_node, True, exchange)


def _digits(value: float, count: int = 4) -> float:
    return float(f"{value:.{count}g}")


def format_calibration(found: Calibration) -> str:
    """Tables of what was measured."""
    lines = ["chip            tp  mbs   layer fwd   layer bwd       embed        head   spread   wait/exchange"]
    for (chip, tp, size), costs in sorted(found.costs.items()):
        values = (*costs.layer, sum(costs.embed), sum(costs.head))
        lines.append(
            f"{chip:<14}{tp:>4}{size:>5}"
            + "".join(f"{1e3 * v:>9.3f} ms" for v in values)
            + f"{found.spreads[chip, tp, size]:>9.1%}"
            + (f"{1e6 * fmean(found.waiting[chip, tp, size]):>13.0f} us" if (chip, tp, size) in found.waiting else "")
        )
    lines.append("link                          latency     bandwidth   host/message   spread")
    for row in found.links:
        name = f"{row.source} -> {row.target}" + (" (same node)" if row.same_node else "")
        rate = 1 / row.beta / 1e6 if row.beta else float("inf")
        times = f"{1e6 * row.alpha:>7.0f} us{rate:>9.1f} MB/s{1e6 * row.message:>12.0f} us"
        lines.append(f"{name:<27}{times}{row.spread:>9.1%}")
    for chip, varied in sorted(found.alone_spread.items()):
        lines.append(f"{chip}: calls of what is timed alone differ by up to {varied:.1%} of their median")
    for ranks, slower in found.slow.items():
        lines.append(f"straggler: ranks {', '.join(map(str, ranks))} {slower:.2f} times slower than their chip type")
    if found.clock is not None:
        lines.append(str(found.clock))
    return "\n".join(lines)
