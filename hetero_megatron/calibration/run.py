"""``calibrate``: all measurements of a job, as the ``rates:`` section of its cluster file."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hetero_megatron.calibration.exchange import Phase, fit_phases, observe_exchange
from hetero_megatron.calibration.expert_rates import ExpertTables, measure_experts
from hetero_megatron.calibration.fp8_products import Fp8Tables, measure_fp8
from hetero_megatron.calibration.layers import Job, StageTimes, fit_split, fit_stages, observe, stragglers
from hetero_megatron.calibration.links import LinkKind, measure_links
from hetero_megatron.calibration.measure import LEAST, robust_fit
from hetero_megatron.calibration.operators import Tables, measure_operators
from hetero_megatron.calibration.pipelines import Run, Runs, depths
from hetero_megatron.calibration.tokens import TokenTables, measure_tokens
from hetero_megatron.cluster import Cluster
from hetero_megatron.cluster.subset import tp_groups
from hetero_megatron.predictor.cost.link_model import LinkModel
from hetero_megatron.predictor.cost.rates import LinkRates, Rates
from hetero_megatron.predictor.cost.rates_document import link_document
from hetero_megatron.spec import ModelSpec
from hetero_megatron.spec.flops import layers_by_kind, linear_layers
from hetero_megatron.testbed.clocks import Kept, worst_clock

STRAGGLER = 0.1  # slower than its fellows by more than this share
# Of operators, of answers, and steps of an exchange between replicas, for each step of a pipeline.
CALLS, ANSWERS, EXCHANGES = 5, 3, 2
UPDATES = (1 << 18, 1 << 21)  # elements of an update that stand for all
# Recompute that is measured, and of which models; that of attention is measured alone.
RECOMPUTED: Mapping[str, Callable[[ModelSpec], bool]] = {
    "elementwise": lambda model: model.moe is None,
    "selective": lambda model: linear_layers(model) > 0,
}


@dataclass(frozen=True)
class CalibrationOptions:
    """What to measure; ``lengths``: at which to time attention alone; ``steps``: that count, of each pipeline."""

    seq_length: int
    dtype: str
    micro_batch_sizes: tuple[int, ...] = (1, 2)
    tp: tuple[int, ...] = (1,)
    lengths: tuple[int, ...] = ()
    steps: int = 1


@dataclass(frozen=True)
class Calibration:
    """``rates``: as in a cluster file; ``slow``: groups of ranks -> times slower; ``clock``: on a testbed."""

    rates: dict[str, Any]
    links: Mapping[LinkKind, LinkRates]
    slow: dict[tuple[int, ...], float]
    clock: Kept | None


def calibrate(
    job: Job,
    cluster: Cluster,
    spec: ModelSpec,
    options: CalibrationOptions,
    log: Callable[[str], None],
    links: Mapping[LinkKind, LinkRates] | None = None,
    fixed: Mapping[str, float] | None = None,
) -> Calibration:
    """Measure chips, and links where they are not known yet. Every rank of the cluster calls it, and gets the same
    answer. ``fixed``: seconds of an action besides its layers, by chip, where they are known."""
    comm, everyone = job.comm, tuple(range(cluster.world_size))
    comm.create_groups([everyone])
    world = comm.group(everyone)
    if links is None:
        log("links")
        links = dict(measure_links(comm, cluster))

    models = [model for model, _ in layers_by_kind(spec)]

    def runs(model: ModelSpec, tp: int, micro_batch_size: int, without: Collection[int] = ()) -> Runs:
        return Runs(cluster, model, options.seq_length, tp, micro_batch_size, tp_groups(cluster, tp, without))

    def observed(planned: Sequence[Run]) -> list[StageTimes]:
        observations = list[StageTimes]()
        for i, run in enumerate(planned, 1):
            log(f"{i} of {len(planned)}: {run.title}")
            stage_times = observe(run, cluster.ranks[comm.rank].chip, job, options.steps)
            observations += [o for o in world.gather_objects(stage_times, StageTimes | None) if o is not None]
        return observations

    slow, out, stages = _all_stages(observed, cluster, options, models, runs)
    sizes = options.micro_batch_sizes if 1 in options.tp else ()
    recomputed = {
        kind: observed([runs(model, 1, n, out).recomputing(kind) for model in models if measured(model) for n in sizes])
        for kind, measured in RECOMPUTED.items()
    }
    log("attention alone, and tokens that are generated")
    operators = world.gather_objects(measure_operators(job, spec, options.lengths, CALLS * options.steps), Tables)
    decoded = world.gather_objects(measure_tokens(job, models, ANSWERS * options.steps), TokenTables)
    if job.fp8:
        log("products in fp8")
    own_fp8 = measure_fp8(
        job, spec, options.tp, options.micro_batch_sizes, options.seq_length, CALLS * options.steps
    )
    fp8 = world.gather_objects(own_fp8, Fp8Tables)
    if spec.moe is not None:
        log("routed experts")
    most_tokens = options.seq_length * max(options.micro_batch_sizes)
    own_experts = measure_experts(job, spec, options.tp, most_tokens, CALLS * options.steps)
    experts = world.gather_objects(own_experts, ExpertTables)
    log("exchange of gradients and parameters")
    phases: list[list[Phase]] = [[] for _ in everyone]
    for run in runs(models[0], 1, 1, out).exchanges():
        phase = observe_exchange(run, job, EXCHANGES * options.steps)
        phases = [a + b for a, b in zip(phases, world.gather_objects(phase, list[Phase]), strict=True)]
    network = LinkModel(Rates(cluster, options.dtype, {}, links))
    shape = options.seq_length, options.seq_length * spec.hidden_size * job.dtype.itemsize
    chips: dict[str, Any] = {}
    for chip in dict.fromkeys(rank.chip for rank in cluster.ranks):
        ranks = [rank.rank for rank in cluster.ranks if rank.chip == chip and rank.rank not in out]
        rates = _stage_rates([o for o in stages if o.chip == chip], network, (fixed or {}).get(chip), *shape)
        for kind, again in recomputed.items():
            plain, with_recompute = ([o for o in row if o.chip == chip] for row in (stages, again))
            if rows := _recomputed(plain, with_recompute, options.seq_length):
                rates[kind] = rows
        tables, spread = operators[ranks[0]]
        of_experts, varied = experts[ranks[0]]
        if of_experts:
            tables = {**tables, "experts": of_experts}
            rates["spread"]["layers"] = max(rates["spread"]["layers"], varied)
        if exchanged := [phase for rank in ranks for phase in phases[rank]]:
            betas, spread["exchange"] = fit_phases(exchanged)
            rates |= betas
        groups = {g.name for g in cluster.nodes if g.chip == chip}
        started = [link.message_seconds or 0.0 for (source, _, _), link in links.items() if source in groups]
        rates["spread"] |= spread
        rates |= {**decoded[ranks[0]], **tables, "message_seconds": median(started or [0.0])}
        chips[chip] = {options.dtype: rates, **fp8[ranks[0]]}
    document = {"chips": chips, "links": [link_document(a, b, link) for (a, b, _), link in links.items()]}
    clock = worst_clock(dict(enumerate(world.gather_objects(comm.clock.report(), dict[str, float]))))
    return Calibration(_rounded(document), links, slow, clock)


def _all_stages(
    observed: Callable[[Sequence[Run]], list[StageTimes]], cluster: Cluster, options: CalibrationOptions,
    models: Sequence[ModelSpec], runs: Callable[..., Runs],
) -> tuple[dict[tuple[int, ...], float], set[int], list[StageTimes]]:  # fmt: skip
    """(slow groups of ranks and how slow they are, their ranks, what all others see of their stages). ``models``: of
    each kind of layer."""
    first, *other_shapes = [(m, tp, n) for m in models for tp in options.tp for n in options.micro_batch_sizes]
    survey = observed([runs(*first).alone()])
    slow = stragglers(survey, STRAGGLER)
    out = {rank for ranks in slow for rank in ranks}
    kept = [o for o in survey if not out & set(o.ranks)]
    layers_by_chip = depths(cluster, {o.chip: o.forward + o.backward for o in kept})
    planned = runs(*first, out).pipelines(layers_by_chip)
    for shape in other_shapes:
        others = runs(*shape, out)
        planned += [others.alone(1), *others.pipelines(layers_by_chip)] if others.groups else []
    return slow, out, kept + observed(planned)


def _stage_rates(
    seen: Sequence[StageTimes], network: LinkModel, fixed: float | None, length: int, size: int
) -> dict[str, Any]:
    """Rates of one chip type from its stages. ``fixed``: see :func:`calibrate`; ``length``: tokens per sequence;
    ``size``: bytes of one sequence's activations."""
    rates, spread = dict[str, Any](), dict[str, float]()
    rates["action_seconds"], by_key, residuals = fit_stages(seen, fixed)
    spread["layers"] = max(residuals, median(o.spread for o in seen))
    put_off, split, spread["split"] = fit_split(seen)
    rates["split_seconds"] = put_off if put_off > LEAST else 0.0
    for key, seconds_by_table in by_key.items():
        fingerprint, tp, rows = key
        seconds_by_table |= {f"split_{table}": split[key][table] for table in ("layers", "head")}
        if exchanged := [o for o in seen if o.tp_collectives and o.key == key]:
            links = median(network.tp_exchange(o.ranks, rows * size)[0] for o in exchanged)
            counts = [[float(o.tp_collectives)] for o in exchanged]
            ways = [robust_fit(counts, [max(o.waited[i], 0.0) for o in exchanged], relative=False) for i in (0, 1)]
            seconds_by_table["waiting"] = (ways[0][0][0] - links, ways[1][0][0] - links)  # beyond what links explain
            spread["waiting"] = max(spread.get("waiting", 0.0), *(varied for _, varied in ways))
        for table, seconds in seconds_by_table.items():
            rates.setdefault(table, []).append([fingerprint, tp, rows, length, *(max(s, LEAST) for s in seconds)])
    single = [o for o in seen if o.alone]  # replicas exchange gradients outside of their actions
    (step, element), spread["optimizer"] = robust_fit([[1.0, o.owned] for o in single], [o.outside for o in single])
    return rates | {
        "step_seconds": max(step, 1e-6),
        "optimizer": [[n, max(element * n, LEAST)] for n in UPDATES],
        "accumulate_beta": max(0.0, median(o.saved for o in single if o.parts[0])),
        "jitter": median(o.spread * (o.forward + o.backward) ** 0.5 for o in seen),
        "spread": spread,
    }


def _recomputed(
    stages: Sequence[StageTimes], recomputed: Sequence[StageTimes], length: int
) -> list[list[Any]]:
    """What a layer alone takes more with recompute, forward and backward, by model and micro-batch size."""
    rows = []
    for key in sorted({o.key for o in recomputed}):
        these, others = (
            [o for o in row if o.key == key and o.parts == recomputed[0].parts] for row in (recomputed, stages)
        )
        more = [median(getattr(o, way) for o in these) - median(getattr(o, way) for o in others)
                for way in ("forward", "backward")]  # fmt: skip
        rows.append([*key, length, *(max(s / these[0].parts[0], LEAST) for s in more)])
    return rows


def _rounded(document: Any) -> Any:
    """The same with five digits of every number."""
    return json.loads(json.dumps(document), parse_float=lambda text: float(f"{float(text):.5g}"))
