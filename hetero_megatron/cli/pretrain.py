"""``hetero-megatron pretrain`` (``pretrain_gpt.py``), ``finetune`` and ``score``: flags -> configuration -> a dry run,
a training run, or what a model says of data."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from hetero_megatron.cli.log import say_error
from hetero_megatron.cli.rank_errors import USER_ERROR, end_rank, is_lost_peer, peer_error
from hetero_megatron.environment.launcher import LauncherEnvironment, read_launcher, started_by_torchrun
from hetero_megatron.errors import UserError
from hetero_megatron.training.exit import at_once, import_torch
from hetero_megatron.utils.text import notice_line

if TYPE_CHECKING:
    from hetero_megatron.plans.memory.of_plan import MemoryBytes
    from hetero_megatron.training.config import ElasticConfig, RunConfig


def finetune(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """``hetero-megatron finetune``: as :func:`main`, on conversations (``--sft``) or pairs (``--preference``)."""
    return main(list(argv) if "--sft" in argv else ["--sft", *argv], environment, "finetune")


def score(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """``hetero-megatron score``: as :func:`main`, but it writes what the model says of the data, and trains nothing."""
    given = {word.partition("=")[0] for word in argv}
    if not given.isdisjoint({"-h", "--help", "--help-all", "--version", "--save-scores"}):
        return main(argv, environment, "score")
    error = UserError("missing: the file that is written", field="--save-scores", accepted="--save-scores FILE")
    say_error(str(error), environment)
    return USER_ERROR


def main(argv: Sequence[str], environment: Mapping[str, str] = os.environ, command: str = "pretrain") -> int:
    """Returns the exit code; an error is one line on standard error. ``command``: whose help is meant."""
    if not {"-h", "--help", "--help-all"}.isdisjoint(argv):
        from hetero_megatron.cli.flags.help import help_text

        print(help_text(command, "--help-all" in argv))
        return 0
    if "--version" in argv:
        from hetero_megatron.cli.arguments import version_line

        print(version_line())
        return 0
    launcher = LauncherEnvironment()
    try:
        launcher = read_launcher(environment, joins="--dry-run" not in argv)
        if "--elastic" in argv and started_by_torchrun(environment) and not {"--dry-run", "--write-config"} & set(argv):
            from hetero_megatron.cli.run import as_worker
            from hetero_megatron.cli.run_torchrun import run_words

            return as_worker(run_words(argv))
        with at_once(launcher.rank == 0):  # until training catches it: nothing is written before
            from hetero_megatron.cli.configure import configure

            if "--write-config" in argv:
                return write_config(argv, environment, launcher)
            config = configure(argv, environment, early=launcher.rank == 0 and "--dry-run" not in argv)
            if config.dry_run:
                return dry_run(config, launcher)
            if config.exit.file is not None:
                from hetero_megatron.cli.flags.training import exit_file_is_awaited

                exit_file_is_awaited(config.exit.file)
            # Only now: importing torch takes seconds, and a refusal should not.
            over_memory(config, launcher.rank == 0)
            if config.elastic is not None:
                from hetero_megatron.training.elastic import train_elastic

                return train_elastic(config, launcher, partial(under_plan, argv, environment))
            with _without_collector():
                from hetero_megatron.training.train import train

            return train(config, launcher, partial(_end, launcher=launcher, environment=environment))
    except (Exception, KeyboardInterrupt) as error:
        return end_rank(error, launcher, environment)


def under_plan(argv: Sequence[str], environment: Mapping[str, str], plan: str, cluster: str, ranks: int) -> RunConfig:
    """The run of ``argv`` under another plan, and cluster (files; empty: none), on so many ranks."""
    from hetero_megatron.cli.configure import configure
    from hetero_megatron.launch.supervise import without_flag

    words = without_flag(without_flag(argv, "--plan"), "--cluster")
    plan_flags = ["--plan", plan, *(["--cluster", cluster] if cluster else [])]
    single_environment = {
        key: value for key, value in environment.items() if key not in ("LOCAL_WORLD_SIZE", "LOCAL_RANK")
    }
    return configure([*plan_flags, *words], {**single_environment, "WORLD_SIZE": str(ranks), "RANK": "0"})


def write_config(argv: Sequence[str], environment: Mapping[str, str], launcher: LauncherEnvironment) -> int:
    """Check the flags, and print those that count as a file for --config (rank 0 only)."""
    from hetero_megatron.cli.configure import configure_arguments
    from hetero_megatron.cli.flags.config_file import effective
    from hetero_megatron.cli.flags.parse import parse_all
    from hetero_megatron.cli.flags.table import ALL

    args, errors = parse_all(argv)
    configure_arguments(args, errors, environment)
    if launcher.rank == 0:
        print(effective(args.values, args.given, args.places, ALL), flush=True)
    return 0


def _end(error: Exception, launcher: LauncherEnvironment, environment: Mapping[str, str]) -> None:
    """End the process from a thread, while the main thread waits for a device that waits for a peer."""
    code = USER_ERROR
    if is_lost_peer(error):
        code = peer_error(error, launcher, environment)
    else:
        say_error(str(error), environment)
    sys.stdout.flush()
    os._exit(code)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable garbage collection while torch is imported, or plans of thousands of ranks are built: millions of small
    objects without cycles, on which it would spend a sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _frozen() -> Iterator[None]:
    """Exclude existing objects from garbage collection."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def dry_run(config: RunConfig, launcher: LauncherEnvironment) -> int:
    """Print the plan, memory per rank and the notices; with --as-rank run that rank with fake tensors (rank 0 only)."""
    from hetero_megatron.plans import all_ranks, format_plan
    from hetero_megatron.plans.islands import format_islands
    from hetero_megatron.plans.memory.memory_report import format_memory
    from hetero_megatron.plans.memory.of_plan import format_communicators

    if launcher.rank != 0:
        return 0
    cluster = config.cluster
    with _without_collector():
        chips = None if cluster is None else [r.chip for r in cluster.ranks]
        print(format_plan(config.plan, config.spec, chips))
        if config.role is not None:
            from hetero_megatron.plans.dump import format_roles

            print("\n".join(format_roles(config.plan, {config.role.name: config.role.spec}, chips)))
        if config.plan.islands:
            print(format_islands(config.compiled))
        if config.plan.outer is not None:
            from hetero_megatron.plans.outer import format_outer

            print("\n".join(format_outer(config.plan, config.spec, config.dtype)))
        for sentence in config.notices:
            print(notice_line(sentence))
        memory = _memory(config)
        print(format_memory(memory), flush=True)
        for line in format_communicators(all_ranks(config.plan), cluster) if cluster is not None else ():
            print(line, flush=True)
    if config.elastic is not None and config.elastic.replicas_every is not None:
        print(_copies(config, config.elastic), flush=True)
    refuse_over_memory(config, memory, notify=True)
    if config.as_rank is not None:
        import_torch()
        from hetero_megatron.dry_run.one_rank import format_dry_run, run_rank

        with _frozen():
            print(format_dry_run(run_rank(config, config.as_rank), config), flush=True)
    return 0


def _copies(config: RunConfig, elastic: ElasticConfig) -> str:
    """What copies of optimizer states in peers' memory take, and their seconds where there are rates."""
    from hetero_megatron.cli.peer_copies import copies_in
    from hetero_megatron.monitoring.record import expected_copies

    assert elastic.replicas_every is not None
    copies = copies_in(config, elastic.room)
    text, prediction = copies.describe(elastic.replicas_every), expected_copies(config, copies, elastic.room or {})
    return f"{text}; {prediction}" if prediction else text


def _memory(config: RunConfig) -> Mapping[int, MemoryBytes]:
    """What every rank needs, by formula."""
    from hetero_megatron.plans.memory.of_plan import estimate_memory, moments_of, with_communicators

    moments = moments_of(config.optimizer.name)
    buckets = config.compiled.buckets
    memory = estimate_memory(
        config.plan, config.spec, config.dtype, moments, buckets, config.logits_bytes, fp8=config.fp8,
        graphs=config.graphs_after is not None,
    )  # fmt: skip
    if config.cluster is not None:
        memory = with_communicators(memory, config.plan, config.spec, buckets, config.cluster, config.dtype)
    if config.forward_role is None and config.grpo is None:
        return memory
    from hetero_megatron.plans.memory.forward_only import with_role, with_sampling

    if config.forward_role is None:
        assert config.grpo is not None
        return with_sampling(memory, config.plan, config.spec, config.dtype, config.grpo.rows)
    return with_role(memory, config.plan, config.forward_role, config.dtype, config.logits_bytes, config.cluster)


def over_memory(config: RunConfig, notify: bool) -> None:
    """:func:`refuse_over_memory` before a run."""
    refuse_over_memory(config, _memory(config), notify)


def refuse_over_memory(config: RunConfig, memory: Mapping[int, MemoryBytes], notify: bool) -> None:
    """UserError for a plan with ranks that need more memory than their chips have, or that was made for larger chips;
    all are named. With --allow-over-memory a notice, given to ``notify``."""
    if config.cluster is None:
        return
    made_for = config.plan.made_for
    errors = [_over_memory(config, memory)]
    errors += [made_for.less_memory(config.cluster, config.plan.ranks, "--plan") if made_for is not None else None]
    for error in filter(None, errors):
        if not config.allow_over_memory:
            raise error
        if notify:
            print(notice_line(error.problem), flush=True)


def _over_memory(config: RunConfig, memory: Mapping[int, MemoryBytes]) -> UserError | None:
    from hetero_megatron.cluster import format_bytes
    from hetero_megatron.utils.text import rank_ranges

    assert config.cluster is not None
    excess_of_chip: dict[str, dict[int, int]] = {}
    for rank, needs in memory.items():
        chip = config.cluster.chip_of(rank)
        if needs.total > chip.memory:
            excess_of_chip.setdefault(chip.name, {})[rank] = needs.total - chip.memory
    if not excess_of_chip:
        return None
    chip_texts = [
        f"{rank_ranges(sorted(excess_of_rank))} ({chip_name}) by up to {format_bytes(max(excess_of_rank.values()))}"
        for chip_name, excess_of_rank in excess_of_chip.items()
    ]
    return UserError(
        f"in {config.dtype}, ranks need more than the memory of their chips: {'; '.join(chip_texts)}", field="memory",
        accepted="a plan that fits (hetero-megatron plan), another dtype, or --allow-over-memory to go on",
    )  # fmt: skip
