"""A training run on one rank, from the launcher's environment to the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from hetero_megatron.comm import Comm, CommError, start_comm, stop_comm
from hetero_megatron.comm.device_clock import DeviceClock
from hetero_megatron.comm.hooks import Clock
from hetero_megatron.emulation import Emulation
from hetero_megatron.environment.launcher import LauncherEnvironment, read_launcher
from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.diagnosis import say_joined
from hetero_megatron.platform import Platform
from hetero_megatron.platform.plugins import Plugins, load_plugins
from hetero_megatron.training.agreement import check_agreement, run_facts
from hetero_megatron.training.announce import announce
from hetero_megatron.training.checkpointing import WRITE_TIMEOUT
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.islands import check_chips, communicators, plan_for, transport_of
from hetero_megatron.training.loop import OnStep, Training
from hetero_megatron.training.rank_platform import check_device, check_graphs, check_world, platform_at, position
from hetero_megatron.training.same_program import check_program
from hetero_megatron.training.setup import set_up
from hetero_megatron.utils.out_of_memory import out_of_memory


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
    asked = config.platform, config.distributed.backend, config.deterministic
    platform = platform_at(place, config.cluster, launcher, plugins, *asked)
    check_device(platform, launcher)
    check_graphs(config, platform)
    timeout = 60 * config.distributed.timeout_minutes
    emulation = Emulation.of(launcher, place, timeout)
    transport = transport_of(config.distributed.transport, config.cluster)
    comm = start_comm(platform, timeout, place, launcher, emulation.hooks(), transport, lost)
    say_joined(comm.rank, launcher.diagnoses)
    if comm.accelerator is not None and type(comm.clock) is Clock:  # a device queues its work: the host's seconds
        comm.clock = DeviceClock(comm.accelerator)  # would say nothing about it
    with _leaving(comm, platform):
        config = agree(config, comm, platform, plugins, emulation)
        if comm.rank not in config.plan.ranks:
            return 0
        training = set_up(config, comm, platform, plugins, emulation)
        training.on_step = on_step
        return _run(training)


def agree(
    config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, emulation: Emulation
) -> RunConfig:
    """What all ranks of the job do before those of the plan train: compare what they were told, print it, and create
    the groups in which they communicate.

    Returns:
        ``config`` with the plan as it runs over the ranks' communication libraries.

    Raises:
        UserError: on all ranks: they were told unlike things, or their chips or libraries do not fit the plan.
    """
    everyone = tuple(range(comm.launcher.world_size))
    comm.create_groups([everyone])
    check_program(comm.group(everyone), platform, plugins)  # first: others may not even name the rest alike
    check_agreement(comm.group(everyone), run_facts(config))  # before anything that depends on options
    if comm.rank == 0:
        announce(config, comm, platform, plugins, emulation)
    check_chips(config.plan, config.cluster, comm.islands)
    config = replace(config, plan=plan_for(config.plan, comm.islands))
    for line in communicators(comm.islands, config.compiled.groups) if comm.rank == 0 else ():
        print(line, flush=True)
    # All at once, on idle ranks too (torch wants every rank to take part): a refusal then leaves nobody waiting.
    comm.create_groups(config.compiled.groups)
    comm.background_group(config.plan.ranks, WRITE_TIMEOUT)
    return config


def _run(training: Training) -> int:
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
def _leaving(comm: Comm, platform: Platform) -> Iterator[None]:
    """Leave the job at the end, and after an error where no peer can be waiting for a transfer."""
    try:
        yield
    except (CommError, KeyboardInterrupt):
        raise  # without a farewell: taking groups down waits for transfers that will never end (a save, for hours)
    except BaseException as error:
        if isinstance(error, RuntimeError) and (found := comm.lost()) is not None:
            raise found from error
        if out_of_memory(error) is None:  # which only this rank is perhaps: then as above
            stop_comm(platform)
        raise
    stop_comm(platform)
