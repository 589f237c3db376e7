"""What ``hetero-megatron run`` asks when it plans again: which of the fallback plans fits, or what the planner finds
for the chips that are left, or for the rates that ranks have now."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hetero_megatron.cluster import load_cluster
from hetero_megatron.cluster.hosts import read_cluster_document
from hetero_megatron.environment.launcher import SUPERVISED
from hetero_megatron.errors import UserError
from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.launch.supervise import Planner, Replanner
from hetero_megatron.monitoring.record import expectation, expected_busy
from hetero_megatron.planner.whatif.drift import slow_nodes_text, with_slow_nodes, worst_by_node
from hetero_megatron.plans import Plan, all_ranks
from hetero_megatron.plans.dump import dump_yaml
from hetero_megatron.plans.made_for import lora_words
from hetero_megatron.plans.outer import plan_of_islands
from hetero_megatron.training.config import RunConfig
from hetero_megatron.utils.yaml_document import QuotingDumper

if TYPE_CHECKING:
    from hetero_megatron.launch.drift import DriftPlanner

WORTH = 0.03  # a new plan must save this share of the step, else the old one stays
_ENOUGH = 1 << 16  # ranks: how many there are is not asked yet


def planner_for(
    words: Sequence[str], config: RunConfig, setup: Setup, fallbacks: Sequence[Path], scratch: Path, elastic: bool
) -> Planner:
    """Of the fallback plans the first one that fits, or of an elastic job, where ranks also come, the one for the most
    ranks, which may be the first plan again. With outer steps also the same plan for the islands that are there. Where
    there are no fallback plans, the planner's for the chips that are there, if a cluster file says what they are."""
    fitting = _largest if elastic else _first
    again = [setup.plan] if elastic and (fallbacks or config.plan.outer is not None) else []

    def choose(seats: Sequence[Seat], cluster: Path | None) -> Path | None:
        islands = _islands_left(config.plan, setup, seats, scratch) if config.plan.outer is not None else []
        found = fitting(_fitting(words, [*fallbacks, *islands, *again], seats, cluster))
        if found is not None or fallbacks or cluster is None:
            return found
        return searched(words, config, scratch)(seats, cluster)

    return choose


def _first(fitting: Iterator[tuple[Path, int]]) -> Path | None:
    return next((plan for plan, _ in fitting), None)


def _largest(fitting: Iterator[tuple[Path, int]]) -> Path | None:
    """For the most ranks, the first of several."""
    return max(fitting, key=lambda plan_and_ranks: plan_and_ranks[1], default=(None, 0))[0]


def _islands_left(plan: Plan, setup: Setup, seats: Sequence[Seat], scratch: Path) -> list[Path]:
    """A file of the plan for those of its islands of which all seats are there, each with its own chips; none, where no
    island is whole, or they cannot share the batch."""
    place = {(seat.node, seat.local): rank for rank, seat in enumerate(setup.seats)}
    ranks = ((place.get((seat.node, seat.local)), i) for i, seat in enumerate(seats))
    number = {rank: i for rank, i in ranks if rank is not None}
    assert plan.outer is not None
    kept = [i for i, island in enumerate(plan.outer.islands) if number.keys() >= set(island)]
    left = plan_of_islands(plan, kept, number) if kept else None
    if left is None:
        return []
    path = scratch / f"plan-of-islands-{left.fingerprint()}.yaml"
    path.write_text(dump_yaml(left))
    return [path]


def _fitting(
    words: Sequence[str], plans: Sequence[Path], seats: Sequence[Seat], cluster: Path | None
) -> Iterator[tuple[Path, int]]:
    """Plans whose ranks and chips are available, and how many ranks they have."""
    for plan in plans:
        try:
            count = all_ranks(configured(words, plan, cluster, len(seats)).plan)[-1] + 1
        except UserError as error:
            print(f"launcher: {plan} does not fit: {error}", file=sys.stderr, flush=True)
            continue
        if count <= len(seats):
            yield plan, count


def searched(words: Sequence[str], config: RunConfig, scratch: Path) -> Planner:
    """The planner's best plan for the remaining chips, with the same batch and sequence length."""

    def choose(seats: Sequence[Seat], cluster: Path | None) -> Path | None:
        from hetero_megatron.cli.configure import configure

        fixed = ["--seq-length", str(config.plan.seq_length), "--global-batch-size", str(config.plan.global_batch_size)]
        settings = config.plan.made_for
        if settings is not None:  # the words may leave to the plan what the search needs to know
            fixed += ["--dtype", config.dtype, "--optimizer", config.optimizer.name]
            if config.fp8 is not None and "--fp8-format" not in words:
                fixed += ["--fp8-format", config.fp8.format, "--fp8-recipe", config.fp8.recipe]
            if settings.mtp_layers and "--mtp-num-layers" not in words:
                fixed += ["--mtp-num-layers", str(settings.mtp_layers)]
            if settings.lora is not None and "--load-adapter" not in words:
                fixed += lora_words(settings.lora)
            fixed += ["--model", settings.model] if not {"--model", "--load-hf", "--num-layers"} & set(words) else []
        flags = ["--auto-plan", "--cluster", str(cluster), *fixed, *words]
        try:
            plan = configure(flags, {"WORLD_SIZE": str(len(seats)), SUPERVISED: "1"}).plan
        except UserError as error:
            print(f"launcher: no plan found: {error}", file=sys.stderr, flush=True)
            return None
        path = scratch / f"plan-for-{len(seats)}-ranks.yaml"
        path.write_text(dump_yaml(replace(plan, made_for=settings)))
        return path

    return choose


def replanned(words: Sequence[str], scratch: Path) -> Replanner:
    """Replan with the measured rates of the ranks that drifted; keeps the plan if a new one gains little."""

    def choose(setup: Setup, drift: Mapping[str, Any], number: int) -> tuple[Setup, str]:
        assert setup.cluster is not None, "--replan-on-drift needs --cluster"
        old_cluster = load_cluster(str(setup.cluster))
        factors = worst_by_node(old_cluster.ranks, drift["ratios"])
        cluster = scratch / f"cluster-round-{number}.yaml"
        _write_slow(setup.cluster, cluster, factors, drift["dtype"])
        path = scratch / f"plan-round-{number}.yaml"
        gain = _better_plan(words, scratch, setup, cluster, path)
        slow = slow_nodes_text(factors)
        if gain is None:
            return replace(setup, plan=path, cluster=cluster), f"{slow}; the plan stays: no other is predicted to gain"
        return replace(setup, plan=path, cluster=cluster), f"{slow}; plan {path}{gain}"

    return choose


def _write_slow(file: Path, to: Path, factors: Mapping[str, float], dtype: str) -> None:
    """A cluster file with the rates that its nodes have now; see ``with_slow_nodes``."""
    document = with_slow_nodes(read_cluster_document(file).plain(), load_cluster(str(file)), factors, dtype)
    to.write_text(yaml.dump(document, sort_keys=False, Dumper=QuotingDumper))


def _better_plan(words: Sequence[str], scratch: Path, setup: Setup, cluster: Path, path: Path) -> str | None:
    """Write the plan of ``setup``, or a better one for the rates of ``cluster``, to ``path``; what that one gains, in
    words, or None."""
    count = len(setup.seats)
    config = configured(words, setup.plan, setup.cluster, count)
    path.write_text(dump_yaml(_any_chip(config.plan)))
    slowed = configured(words, path, cluster, count)
    old = _predicted(slowed)
    files = [searched(words, config, scratch)(setup.seats, cluster), _moved_between_islands(slowed, scratch)]
    predicted = {file: _predicted(configured(words, file, cluster, count)) for file in files if file is not None}
    times = {file: seconds for file, seconds in predicted.items() if seconds is not None}
    new_plan = min(times, key=times.__getitem__, default=None)
    if new_plan is None or (old is not None and times[new_plan] > (1 - WORTH) * old):
        return None
    new = times[new_plan]
    path.write_text(new_plan.read_text())
    return f", predicted {new:.3g} s per step instead of {old:.3g} s" if old is not None else ""


def _moved_between_islands(config: RunConfig, scratch: Path) -> Path | None:
    """A file of a plan with outer steps whose pipelines have shares of the batch by the rates of the cluster file."""
    plan = config.plan
    if plan.outer is None:
        return None
    busy = expected_busy(config)
    moved = plan_of_islands(
        plan, range(len(plan.outer.islands)), {rank: rank for rank in plan.ranks},
        lambda pipeline: pipeline.batch_size / max(busy[rank] for rank in pipeline.ranks),
    )  # fmt: skip
    if moved is None:
        return None
    path = scratch / "plan-moved-between-islands.yaml"
    path.write_text(dump_yaml(moved))
    return path


def drift_in_place(words: Sequence[str], scratch: Path, most: int) -> DriftPlanner:
    """How an elastic job plans again, beside the ranks."""
    from hetero_megatron.launch.drift import DriftPlanner

    def better(setup: Setup, number: int) -> Planner:
        path = scratch / f"plan-drift-{number}.yaml"

        def choose(seats: Sequence[Seat], cluster: Path | None) -> Path:
            assert cluster is not None, "--replan-on-drift needs --cluster"
            return setup.plan if _better_plan(words, scratch, setup, cluster, path) is None else path

        return choose

    return DriftPlanner(_write_slow, better, most)


def _any_chip(plan: Plan) -> Plan:
    """The plan without chip names, which change with their rates."""
    return plan.with_stages(lambda stage: replace(stage, chip=None))


def _predicted(config: RunConfig) -> float | None:
    prediction = expectation(config)[0] if config.cluster is not None else None
    return None if prediction is None else prediction.step_seconds


def configured(words: Sequence[str], plan: Path, cluster: Path | None, world: int | None) -> RunConfig:
    from hetero_megatron.cli.configure import configure

    cluster_flags = ["--cluster", str(cluster)] if cluster is not None else []
    environment = {"WORLD_SIZE": str(_ENOUGH if world is None else world), SUPERVISED: "1"}
    return configure(["--plan", str(plan), *cluster_flags, *words], environment)
