"""A training run on one rank, from the launcher's environment to the exit code.

``set_up`` builds what the loop works with (runtime, data, checkpoints, reporter) from the configuration, in an order
in which every refusal comes before what takes long; ``training/loop.py`` then runs the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from hetero_megatron.comm import Comm, CommError, start_comm, stop_comm
from hetero_megatron.comm.device_clock import DeviceClock
from hetero_megatron.comm.hooks import Clock
from hetero_megatron.emulation import Emulation
from hetero_megatron.environment.launcher import LauncherEnvironment, read_launcher
from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.reporter import Reporter
from hetero_megatron.monitoring.stragglers import StragglerReport, say_joined
from hetero_megatron.ops.optimizer_ops import adamw_aten
from hetero_megatron.parallel.optimizer import SGD, AdamW, Optimizer, OptimizerFactory
from hetero_megatron.pipeline.stage_model import Initialize
from hetero_megatron.plans import all_ranks, locate, stage_at
from hetero_megatron.platform import Platform
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.platform.plugins import Plugins, load_plugins
from hetero_megatron.training.agreement import check_agreement, check_program, run_facts
from hetero_megatron.training.alignment.session import Alignment
from hetero_megatron.training.checkpointing import WRITE_TIMEOUT, Checkpointing, ConsumedSamples
from hetero_megatron.training.config import OptimizerConfig, RunConfig
from hetero_megatron.training.exit import ExitConditions
from hetero_megatron.training.failure import ReplicaCheck, StepGuard
from hetero_megatron.training.initial_weights import InitialWeights
from hetero_megatron.training.kernels import agree_on_kernels, check_kernels, rank_kernels
from hetero_megatron.training.loop import OnStep, RunProgress, Training, updates_of
from hetero_megatron.training.lr_schedule import LossScale
from hetero_megatron.training.node_data import NodeData
from hetero_megatron.training.rank_platform import (
    announce,
    check_chips,
    check_device,
    check_graphs,
    check_world,
    communicators,
    plan_for,
    platform_at,
    position,
    sizes_follow_data,
    transport_of,
)
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.runtime_options import RuntimeOptions
from hetero_megatron.training.save_directory import claim_directory, make_folders
from hetero_megatron.utils.out_of_memory import out_of_memory

if TYPE_CHECKING:
    from hetero_megatron.training.profile import Profiler
    from hetero_megatron.training.role_client import RoleMeetings


def optimizer_factory(
    config: OptimizerConfig, offload: bool = False, kernel: Callable[..., object] = adamw_aten
) -> OptimizerFactory:
    """Adam with decoupled weight decay, also beside Muon, or SGD; rate and weight decay are set before every step.

    Args:
        offload: Adam runs on the host, over masters and moments in host memory (fp32).
        kernel: operator ``adamw`` that updates on the device; not used where ``offload`` or SGD.

    Raises:
        UserError: by the factory, where the host's Adam cannot be compiled (``parallel/host_adam.py``).
    """

    def build(groups: list[dict[str, object]]) -> Optimizer:
        if config.name == "sgd":
            return SGD(groups, config.momentum)
        if config.name == "muon":
            from hetero_megatron.parallel.muon import Muon

            assert config.muon is not None
            adam = partial(AdamW, kernel=kernel, betas=(config.beta1, config.beta2), eps=config.eps)
            return Muon(groups, config.muon, adam)
        if offload:
            from hetero_megatron.parallel.host_adam import cpu_adam

            return cpu_adam(groups, (config.beta1, config.beta2), config.eps)
        return AdamW(groups, kernel, (config.beta1, config.beta2), config.eps)

    return build


class Resume(Protocol):
    """A run that goes on in this process, from what ranks have in their memories.

    Attributes:
        exit, peak: of this process, where it has them: what it was told, and its device's FLOP/s.
    """

    exit: ExitConditions | None
    peak: float | None

    def load(self, checkpoints: Checkpointing, runtime: Runtime) -> tuple[RunConfig, ConsumedSamples, LossScale]:
        """In place of :meth:`Checkpointing.load`."""


def set_up(
    config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, emulation: Emulation,
    resume: Resume | None = None, client: RoleMeetings | None = None,
) -> Training:  # fmt: skip
    """The run of this rank, up to its first step: model built, checkpoint loaded. Called on all ranks of the plan.

    Args:
        comm: in which the groups of ``config.compiled`` are created.
        resume: None: the weights are those of the seed, of --load-hf or of a checkpoint.
        client: of a role on ranks of its own.

    Raises:
        UserError: something in the configuration cannot be honoured; all ranks raise it.
        CommError: a peer is gone.
    """
    world = comm.group(config.plan.ranks)
    lock = claim_directory(config, world)
    make_folders(config, world)
    if config.save_hf is not None:
        from hetero_megatron.checkpoint.hf_save import check_target

        check_target(config.save_hf, config.spec.base, world)
    weights = InitialWeights(config, world)
    # Before weights are read and the model is built: a mistyped path is known at once.
    node_data = NodeData(config, comm, world)
    data = node_data.datasets
    check_agreement(
        world, {f"data ({name})": f"{mark} {data.corpora[name]}" for name, mark in data.fingerprints.items()}
    )
    scored_by, known_samples = "", None
    if config.teacher_scores is not None:
        from hetero_megatron.training.score import use_scores

        scored_by, known_samples = use_scores(config, comm, node_data)
    if config.plan.offloading:
        from hetero_megatron.parallel.host_adam import check_offload

        check_offload(config.plan, config.optimizer.name, config.dtype)
    alignment = Alignment(config.alignment) if config.alignment.asked else None
    initialize = weights.values if resume is None else weights.blank
    reference = None
    if config.reference_hf is not None and client is None:
        from hetero_megatron.training.reference import logps_of_another_model

        build = partial(build_runtime, comm=comm, platform=platform, plugins=plugins)
        reference = logps_of_another_model(config, world, build, node_data)
    runtime = build_runtime(config, comm, platform, plugins, initialize, alignment)
    if resume is None:
        weights.complete(runtime)
    if config.distillation is not None and client is None:
        from hetero_megatron.training.teacher import add_teacher

        add_teacher(config, runtime, platform, plugins, data.tokenizer)
    if alignment is not None:
        alignment.follow(runtime)
    agree_on_kernels(runtime, config.logging.kernel_plan)
    source_dtypes = weights.dtypes if weights.adapters is None else None
    if config.preference is not None:
        from hetero_megatron.training.reference import use_reference

        known_samples = use_reference(config, runtime, node_data, reference)
    if config.grpo is not None:
        from hetero_megatron.training.rollouts import add_rollouts

        add_rollouts(config, runtime, node_data, client)
    checkpoints = Checkpointing(config, runtime, data, platform.synchronize, lock, source_dtypes, scored_by)
    config, done, loss_scale = checkpoints.load() if resume is None else resume.load(checkpoints, runtime)
    if known_samples is not None and not config.skip_train:
        _refuse_unknown(config, done, known_samples)
    exit = resume.exit if resume is not None else None
    exit = exit or _exit_conditions(config, comm, checkpoints.active)
    peak = resume.peak if resume is not None else None
    reporter = Reporter(config, runtime, platform, done.step + 1, emulation, peak)
    check_grad = config.check_nan and config.dtype != "fp16"  # there it is the loss scale's affair
    failure = config.failure
    training = Training(
        config, runtime, node_data, weights, checkpoints, reporter,
        guard=StepGuard(config.check_nan, check_grad, failure.check_spikes, failure.rerun, reporter.say),
        exit=exit,
        replicas=ReplicaCheck(runtime, failure.replica_interval),
        stragglers=_stragglers(config, reporter, exit),
        profiler=_profiler(config, runtime, platform),
        alignment=alignment, emulation=emulation,
        progress=RunProgress(done.step, done.consumed, loss_scale, updates_of(runtime)),
    )  # fmt: skip
    if config.deterministic:
        torch.use_deterministic_algorithms(True)
    if client is not None:
        client.begin(training)
    return training


def _refuse_unknown(config: RunConfig, done: ConsumedSamples, known_samples: int) -> None:
    """UserError where a run that goes on, perhaps with batches of another size, comes to training samples after those
    of which is known what another model says."""
    last = config.batch_size.samples_after(max(config.steps - done.step, 0), done.consumed)
    if last > known_samples and config.steps > done.step:
        raise UserError(
            f"the run goes on to training sample {last:,}, and what its teacher or reference says is known of the "
            f"first {known_samples:,}", field="--train-iters", value=config.steps,
            accepted="as many as are left, --train-samples, or a file of more samples (hetero-megatron score)",
        )  # fmt: skip


def build_runtime(
    config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, initialize: Initialize,
    alignment: Alignment | None = None,
) -> Runtime:  # fmt: skip
    """The model's stage, its kernels and its optimizer; ``alignment`` sees what the kernels are given."""
    plan, dtype = config.plan, DTYPES[config.dtype]
    options = RuntimeOptions.of(config)
    chosen = rank_kernels(
        plan, config.spec, comm.rank, plugins.registry, platform, dtype, options, config.deterministic
    )
    if config.failure.check_kernels:
        check_kernels(chosen, comm.group(plan.ranks), platform)
    kernels = alignment.wrap(chosen, comm.rank) if alignment is not None else chosen
    offload = stage_at(plan, locate(plan, comm.rank)).optimizer.offload
    optimizer = optimizer_factory(config.optimizer, offload, kernels.adamw)
    return Runtime(config.compiled, comm, dtype, initialize, optimizer, kernels, options)


def _exit_conditions(config: RunConfig, comm: Comm, saves: bool) -> ExitConditions:
    """Where there is something to save, being told to stop means saving first."""
    asked = config.exit.signal or ("SIGTERM" if saves or config.elastic is not None else "SIGINT")
    signals = {asked, "SIGINT", *(("SIGHUP",) if asked == "SIGTERM" else ())}
    first = comm.launcher.rank == 0
    return ExitConditions(config.exit.minutes, config.exit.interval, signals, first, config.exit.file)


def _stragglers(config: RunConfig, reporter: Reporter, exit: ExitConditions) -> StragglerReport | None:
    if not config.failure.stragglers and config.failure.replan_on_drift is None:
        return None
    return StragglerReport(config, reporter, exit)


def _profiler(config: RunConfig, runtime: Runtime, platform: Platform) -> Profiler | None:
    logging = config.logging
    if logging.profile is None:
        return None
    from hetero_megatron.training.profile import Profiler

    return Profiler(logging.profile, runtime.world, platform, logging.save or ".", runtime.comm.rank)


def train(
    config: RunConfig,
    launcher: LauncherEnvironment | None = None,
    lost: Callable[[Exception], None] | None = None,
    on_step: OnStep | None = None,
) -> int:
    """Run ``config`` on this rank of the job that its launcher's environment describes.

    Args:
        launcher: None: this process's environment.
        lost: see :func:`~hetero_megatron.comm.start_comm`; it is to end the process.
        on_step: told of every step of this rank.

    Returns:
        the exit code: 0, ``INTERRUPTED``, or ``DRIFT`` where the launcher is to plan again.

    Raises:
        UserError: something in the configuration, data or cluster cannot be honoured (all ranks raise it).
        CommError: a peer died or does not answer.
    """
    launcher = launcher or read_launcher()
    check_world(config, launcher.world_size)
    plugins = load_plugins()
    place = position(config.cluster, launcher)
    apart = config.data is not None and (config.data.reset_attention_mask or config.data.sft)
    eager = sizes_follow_data(config.plan, config.spec, apart)
    asked = config.platform, config.distributed.backend, config.deterministic, eager
    platform = platform_at(place, config.cluster, launcher, plugins, *asked)
    check_device(platform, launcher)
    check_graphs(config, platform)
    timeout = 60 * config.distributed.timeout_minutes
    emulation = Emulation.of(launcher, place, timeout)
    transport = transport_of(config.distributed.transport, config.cluster)
    comm = start_comm(platform, timeout, place, launcher, emulation.hooks(), transport, lost)
    if launcher.diagnoses is not None:
        say_joined(comm.rank, launcher.diagnoses)
    if comm.accelerator is not None and type(comm.clock) is Clock:  # a device queues its work: the host's seconds
        comm.clock = DeviceClock(comm.accelerator)  # would say nothing about it
    with leaving(comm, platform), _memory_history(config.logging.memory_snapshot, platform, comm.rank):
        config = agree(config, comm, platform, plugins, emulation)
        if comm.rank not in config.plan.ranks:
            return _other_role(config, comm, platform, plugins, emulation)
        if config.scores is not None:
            from hetero_megatron.training.score import score

            return score(config, comm, platform, plugins, build_runtime)

        def run(client: RoleMeetings | None = None) -> int:
            training = set_up(config, comm, platform, plugins, emulation, client=client)
            training.on_step = on_step
            return run_training(training)

        if not config.plan.roles:
            return run()
        from hetero_megatron.training.beside_role import beside_role

        return beside_role(config, comm, run)


def _other_role(config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, emulation: Emulation) -> int:
    """The run of a rank that trains nothing; returns its exit code."""
    if comm.rank not in all_ranks(config.plan):
        return 0
    from hetero_megatron.training.role_ranks import run_role

    exit = _exit_conditions(config, comm, config.checkpoint.save is not None)
    return run_role(config, comm, platform, plugins, emulation, exit)


def _memory_history(path: str | None, platform: Platform, rank: int) -> AbstractContextManager[None]:
    if path is None:
        return nullcontext()
    from hetero_megatron.training.profile import recorded_memory

    return recorded_memory(path, platform, rank)


def agree(
    config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, emulation: Emulation,
    programs_compared: bool = False,
) -> RunConfig:
    """What all ranks of the job do before those of the plan train: compare what they were told, print it, and create
    the groups in which they communicate.

    Args:
        programs_compared: these processes have compared their programs before.

    Returns:
        ``config`` with the plan as it runs over the ranks' communication libraries.

    Raises:
        UserError: on all ranks: they were told unlike things, or their chips or libraries do not fit the plan.
    """
    everyone = tuple(range(comm.launcher.world_size))
    comm.create_groups([everyone])
    if not programs_compared:
        check_program(comm.group(everyone), platform, plugins)  # first: others may not even name the rest alike
    check_agreement(comm.group(everyone), run_facts(config))  # before anything that depends on options
    if comm.rank == 0:
        announce(config, comm, platform, plugins, emulation)
    check_chips(config.plan, config.cluster, comm.islands)
    config = replace(config, plan=plan_for(config.plan, comm.islands))
    for line in communicators(comm.islands, config.compiled.groups) if comm.rank == 0 else ():
        print(line, flush=True)
    # All at once, on idle ranks too (torch wants every rank to take part): a refusal then leaves nobody waiting.
    comm.create_groups(config.groups)
    comm.background_group(config.plan.ranks, WRITE_TIMEOUT)
    if config.plan.roles:
        from hetero_megatron.training.role_messages import meeting_group

        meeting_group(config, comm)
    return config


def run_training(training: Training) -> int:
    """Train; whatever ends it, what is reported and saved is whole."""
    try:
        return training.run()
    except UserError as error:  # of all ranks alike: a checkpoint on its way is still finished
        training.node_data.close(error)
        with suppress(UserError):  # a full disk must not hide what was wrong
            training.reporter.event("error", str(error), step=training.step)
        with suppress(UserError, RuntimeError):
            training.checkpoints.wait()
        raise
    finally:
        training.node_data.close()
        training.reporter.flush()


@contextmanager
def leaving(comm: Comm, platform: Platform) -> Iterator[None]:
    """Leave the job at the end, and after an error where no peer can be waiting for a transfer."""
    try:
        yield
    except (CommError, KeyboardInterrupt):
        raise  # without a farewell: taking groups down waits for transfers that will never end (a save, for hours)
    except BaseException as error:
        if isinstance(error, Exception):
            comm.check()  # what computes on results that never came may raise anything
        if isinstance(error, RuntimeError) and (lost_peer := comm.lost()) is not None:
            raise lost_peer from error
        if out_of_memory(error) is None:  # which only this rank is perhaps: then as above
            stop_comm(platform)
        raise
    stop_comm(platform)
