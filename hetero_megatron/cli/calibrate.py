"""``hetero-megatron calibrate``: measure the cluster that the job runs on, and write the rates into its file.

torchrun --nproc-per-node 4 -m hetero_megatron.cli.main calibrate --cluster cluster.yaml --model tiny
hetero-megatron testbed run --cluster cluster.yaml -- hetero-megatron calibrate --model tiny --seq-length 256
hetero-megatron calibrate --cluster cluster.yaml --merge profile.json
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from hetero_megatron import __version__
from hetero_megatron.cli.arguments import ArgumentParser, count
from hetero_megatron.cli.output import check_writable, print_json
from hetero_megatron.cluster import Cluster, load_cluster
from hetero_megatron.cluster.catalogue import DTYPES
from hetero_megatron.cluster.rates_section import format_rates, merge_rates, read_rates, write_rates
from hetero_megatron.environment.launcher import TESTBED, LauncherEnvironment, read_launcher
from hetero_megatron.errors import UserError
from hetero_megatron.predictor.cost.rates import given_rates, load_rates, refuse_twice
from hetero_megatron.training.exit import import_torch
from hetero_megatron.utils.files import read_json_object
from hetero_megatron.utils.text import dtype_name, notice_line, plural, printable
from hetero_megatron.utils.yaml_document import LONGEST_NAME

if TYPE_CHECKING:
    from hetero_megatron.calibration import CalibrationOptions
    from hetero_megatron.comm import Comm
    from hetero_megatron.platform.platform import Platform
    from hetero_megatron.spec import ModelSpec

TIMEOUT = 600.0  # seconds, of every transfer


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        values = tuple(int(word) for word in text.split(","))
    except ValueError:
        values = ()
    if not values or min(values) < 1:
        raise UserError("not a list of numbers", field=flag, value=text, accepted="e.g. 1,2,4")
    _refuse_repeated(values, text, flag)
    return values


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(map(dtype_name, text.split(",")))
    if unknown := [name for name in names if name not in DTYPES]:
        raise UserError("no such dtype", field="--dtype", value=unknown[0], accepted=", ".join(DTYPES))
    _refuse_repeated(names, text, "--dtype")
    return names


def _refuse_repeated(values: Sequence[object], text: str, flag: str) -> None:
    if len(set(values)) < len(values):
        raise UserError("would be measured twice", field=flag, value=text, accepted="each value once")


def _check_dtypes(names: Sequence[str], cluster: Cluster) -> None:
    """Every dtype must be supported by every chip, because pipelines over all chips are run."""
    chips = {group.chip: cluster.chips[group.chip].dtypes for group in cluster.nodes}
    common = [name for name in DTYPES if all(name in dtypes for dtypes in chips.values())]
    for name in names:
        if name not in common:
            chips_lacking = ", ".join(chip for chip, dtypes in chips.items() if name not in dtypes)
            raise UserError(
                f"{chips_lacking} does not compute in it", field="--dtype", value=name, where=cluster.file,
                accepted=", ".join(common) or "no dtype is common to all chips: give each type a cluster file",
            )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    p = ArgumentParser("calibrate", __doc__ or "")
    p.formatter_class = argparse.RawTextHelpFormatter
    p.add_argument("--cluster", help="cluster file (default: the testbed's)")
    p.add_argument("--model", help="preset, config.json or directory: whose layers to time")
    p.add_argument("--seq-length", default="", help="tokens per sequence, comma-separated (default: the model's,\n"
                   "at most 512)")  # fmt: skip
    p.add_argument("--micro-batch-sizes", default="1,2", help="comma-separated (default 1,2)")
    p.add_argument("--tp", default="", help="TP degrees, comma-separated (default: powers of 2 up to a node's chips,\n"
                   "and 2 in any case)")  # fmt: skip
    p.add_argument("--attention-lengths", default="", help="where to time attention alone (default: --seq-length)")
    p.add_argument("--dtype", default="", help="fp64, fp32, bf16, fp16, comma-separated (default fp32 on the CPU,\n"
                   "else bf16)")  # fmt: skip
    p.add_argument("--steps", type=count(1, 10**6), default=1, help="measured steps per pipeline (default 1)")
    p.add_argument("--transport", choices=("auto", "bridge"), default="auto", help="between islands (default:\n"
                   "auto, or what the cluster file says)")  # fmt: skip
    p.add_argument("--from-runs", metavar="FILE", help="fit the rates to measured runs: CSV with the columns\n"
                   "plan, model, and seconds or metrics (a metrics.jsonl); paths relative to it")  # fmt: skip
    p.add_argument("--merge", action="append", default=[], metavar="FILE", help="add rates of a file (JSON or YAML)")
    p.add_argument("--out", help="where to write the cluster file with its rates (default: in place)")
    p.add_argument("--json", action="store_true", help="print the rates as one JSON object")
    return p


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(list(argv))
    file = options.cluster or testbed_cluster()
    if file is None:
        raise UserError("says which chips and links there are", field="--cluster", accepted="a cluster file")
    cluster = load_cluster(file)
    rates: dict[str, Any] = dict(cluster.rates)
    for extra in options.merge:
        rates = merge_rates(rates, _read_rates(extra))
    out = options.out or file
    if options.from_runs is not None:
        check_writable(out, "--out")
        rates = _fit(cluster, options, rates)
    elif options.model is not None:
        import_torch()
        measured = _measure(cluster, options, rates, out)
        if measured is None:  # rank 0 writes
            return 0
        rates = measured
    elif not options.merge:
        raise UserError("nothing to measure", field="--model", accepted="a model, --from-runs FILE or --merge FILE")
    refuse_twice(cluster, rates.get("chips", {}))
    write_rates(file, rates, out)
    if options.json:
        print_json(rates)
    else:
        print(f"rates written to {out}", flush=True)
    return 0


def testbed_cluster() -> str | None:
    """The cluster file of the testbed that this process runs in; None: in none."""
    described = read_launcher(joins=False).testbed
    return str(read_json_object(described, TESTBED).get("cluster", "")) if described is not None else None


def _read_rates(file: str) -> dict[str, Any]:
    """Rates of another cluster file or of a conformance run: ``{chips: …}``, or the same under ``rates:``."""
    from hetero_megatron.utils.yaml_document import read_document

    document = read_document(file)
    keys = document.any_mapping()
    if "rates" in keys:
        return read_rates(keys["rates"])
    if "nodes" in keys or "chips" not in keys:
        raise UserError("holds no rates", field="--merge", value=file, accepted="rates: {chips: …} or {chips: …}")
    return read_rates(document)


def _fit(cluster: Cluster, options: argparse.Namespace, rates: dict[str, Any]) -> dict[str, Any]:
    """``rates`` with those that measured runs determine."""
    from hetero_megatron.predictor.measured_runs import read_runs
    from hetero_megatron.predictor.rate_fitting import fit_rates, format_fit, rates_section

    if options.model is not None:
        raise UserError("the CSV file names the models", field="--model", value=options.model, accepted="no --model")
    cluster = replace(cluster, rates=rates)
    dtype, *other_dtypes = _dtypes(options.dtype or "bf16")
    if other_dtypes:
        raise UserError("the runs had one", field="--dtype", value=options.dtype, accepted="one of them")

    def say(text: str) -> None:
        print(notice_line(text), file=sys.stderr, flush=True)

    fit = fit_rates(read_runs(options.from_runs, cluster, say), load_rates(cluster, dtype))
    if not options.json:
        print(format_fit(fit), flush=True)
    return merge_rates(rates, rates_section(fit))


def _launcher(cluster: Cluster) -> LauncherEnvironment:
    """This process's environment, of a job with a rank for each chip."""
    launcher = read_launcher()
    if launcher.world_size != cluster.world_size:
        raise UserError(
            f"the cluster has {plural(cluster.world_size, 'chip')}, one per rank", field="WORLD_SIZE",
            value=launcher.world_size,
            accepted=f"{plural(cluster.world_size, 'rank')} (torchrun, or hetero-megatron testbed run)",
        )  # fmt: skip
    return launcher


def _wanted(cluster: Cluster, spec: ModelSpec, options: argparse.Namespace) -> tuple[CalibrationOptions, ...]:
    """One for each dtype (empty: the usual one) and sequence length, short ones first."""
    from hetero_megatron.calibration import CalibrationOptions
    from hetero_megatron.calibration.pipelines import degrees
    from hetero_megatron.cluster.subset import tp_groups

    tp = _numbers(options.tp, "--tp") if options.tp else degrees(cluster, spec)
    if options.tp and (large := [n for n in tp if not tp_groups(cluster, n)]):
        raise UserError("no chip type has so many chips", field="--tp", value=large[0], accepted="smaller degrees")
    lengths = _numbers(options.attention_lengths, "--attention-lengths") if options.attention_lengths else ()
    sizes = _numbers(options.micro_batch_sizes, "--micro-batch-sizes")
    tokens = _numbers(options.seq_length or str(min(512, spec.max_position_embeddings)), "--seq-length")
    if max(tokens) > spec.max_position_embeddings:
        accepted = f"at most {spec.max_position_embeddings}"
        raise UserError("the model has no such position", field="--seq-length", value=max(tokens), accepted=accepted)
    return tuple(
        CalibrationOptions(n, dtype, sizes, tp, lengths or (n,), options.steps)
        for dtype, n in product(_dtypes(options.dtype) if options.dtype else ("",), sorted(tokens))
    )


def _known_fixed(cluster: Cluster, rates: Mapping[str, Any], dtype: str, length: int) -> dict[str, float]:
    """Seconds of an action besides its layers, of each chip type where shorter sequences have told them: they tell it
    best, and it is the same for all rows."""
    fixed_seconds = {}
    for chip, by_dtype in rates.get("chips", {}).items():
        chip_rates = given_rates(chip, dtype, by_dtype.get(dtype, {}), cluster)
        if any(row.seq_length < length for row in chip_rates["layers"]):
            fixed_seconds[chip] = chip_rates.get("action_seconds", 0.0)
    return fixed_seconds


def _facts(
    comm: Comm, cluster: Cluster, platform: Platform, options: argparse.Namespace, one: CalibrationOptions
) -> dict[str, dict[str, str]]:
    """By chip, on what, when and how its rates were measured, as ``cards contribute`` asks for it. Every rank calls."""
    import torch

    library = f", {platform.library} {platform.library_version()}" if platform.library_version() else ""
    command = f"hetero-megatron calibrate --model {options.model} --steps {options.steps}"
    sizes, degrees = (",".join(map(str, numbers)) for numbers in (one.micro_batch_sizes, one.tp))
    shapes = f"{options.model}: {plural(one.seq_length, 'token')}, micro-batches of {sizes}, TP {degrees}"
    counts = {chip: sum(rank.chip == chip for rank in cluster.ranks) for chip in cluster.chips}
    chip = cluster.ranks[comm.rank].chip
    machine = {
        "when": datetime.date.today().isoformat(),
        "vendor": "cpu" if platform.device.type == "cpu" else platform.vendor,
        "hardware": f"{counts[chip]} x {platform.chip()}, {os.cpu_count()} cores of a host",
        "software": f"hetero-megatron {__version__}, torch {torch.__version__}{library}", "command": command,
        "shapes": shapes,
    }  # fmt: skip
    shortened = {key: printable(text)[:LONGEST_NAME] for key, text in machine.items()}
    facts_of_ranks = comm.group(tuple(range(cluster.world_size))).gather_objects(shortened, dict[str, str])
    return {rank.chip: facts for rank, facts in zip(reversed(cluster.ranks), reversed(facts_of_ranks), strict=True)}


def _measure(
    cluster: Cluster, options: argparse.Namespace, rates: dict[str, Any], out: str
) -> dict[str, Any] | None:
    """``rates`` with what all ranks of the job measure, on its first rank; None on others.

    Raises:
        UserError: on the first rank, where a core could not keep up with its emulated chip.
    """
    from hetero_megatron.calibration import Job, calibrate
    from hetero_megatron.comm import start_comm, stop_comm
    from hetero_megatron.emulation import Emulation
    from hetero_megatron.platform.platform import DTYPES as TORCH_DTYPES
    from hetero_megatron.platform.plugins import load_plugins
    from hetero_megatron.spec import load_model
    from hetero_megatron.training.config import OptimizerConfig
    from hetero_megatron.training.kernels import fp8_kernels, rank_kernels
    from hetero_megatron.training.rank_platform import platform_at, position, transport_of
    from hetero_megatron.training.train import optimizer_factory

    spec = load_model(options.model)
    launcher = _launcher(cluster)
    runs = _wanted(cluster, spec, options)
    _check_dtypes([run.dtype for run in runs if run.dtype], cluster)  # before this rank's place is looked for
    plugins = load_plugins()
    rank = position(cluster, launcher)
    platform = platform_at(rank, cluster, launcher, plugins)
    if not runs[0].dtype:
        runs = tuple(replace(run, dtype="fp32" if platform.device.type == "cpu" else "bf16") for run in runs)
        _check_dtypes([runs[0].dtype], cluster)
    refuse_twice(cluster, {chip: {run.dtype: {} for run in runs} for chip in cluster.chips})
    if rank == 0:
        check_writable(out, "--out")
    emulation = Emulation.of(launcher, rank, TIMEOUT)
    transport = transport_of(options.transport, cluster)
    comm = start_comm(platform, TIMEOUT, rank, launcher, emulation.hooks(), transport)
    start = time.perf_counter()

    def log(text: str) -> None:
        if comm.rank == 0:
            print(f"[{time.perf_counter() - start:6.1f} s] {text}", file=sys.stderr, flush=True)

    try:
        emulation.started()
        gc.freeze()  # what imports made is there to stay; looking through it takes a tenth of a second
        if platform.device.type != "cpu":
            comm.clock.synchronize = platform.synchronize
        links = None
        for run in runs:
            log(f"{run.dtype}, {plural(run.seq_length, 'token')}")
            kind = TORCH_DTYPES[run.dtype]
            kernels = partial(rank_kernels, rank=comm.rank, registry=plugins.registry, platform=platform, dtype=kind)
            # Its rates are not told apart by the dtype of the weights: that of the first counts.
            measures_fp8 = "fp8" in cluster.chips[cluster.ranks[comm.rank].chip].dtypes and run.dtype == runs[0].dtype
            fp8 = fp8_kernels(plugins.registry, platform, kind) if measures_fp8 else {}
            job = Job(comm, kind, optimizer_factory(OptimizerConfig()), kernels, fp8)
            fixed = _known_fixed(cluster, rates, run.dtype, run.seq_length)
            outcome = calibrate(job, cluster, spec, run, log, links, fixed)
            facts = _facts(comm, cluster, platform, options, run)
            for chip, by_dtype in outcome.rates["chips"].items():
                for rows in by_dtype.values():
                    rows["measured"] = facts[chip]
            rates, links = merge_rates(rates, outcome.rates), outcome.links
            if comm.rank == 0 and not options.json:
                text = format_rates(outcome.rates, outcome.slow, outcome.clock)
                print(f"{run.dtype}, {plural(run.seq_length, 'token')}\n{text}", flush=True)
    finally:
        stop_comm(platform)
    if comm.rank != 0:
        return None
    if outcome.clock is not None and outcome.clock.invalid:
        chip = cluster.ranks[outcome.clock.worst_rank].chip
        raise UserError(
            f"rank {outcome.clock.worst_rank}'s core did not keep up with its emulated chip, so nothing was written",
            field=f"chips.{chip}.emulate.speed", value=cluster.chips[chip].speed, accepted="a lower speed",
            where=cluster.file,
        )  # fmt: skip
    return rates
