"""A run whose processes stay when others are lost, leave, join or are cut off.

Each epoch (see :mod:`~hetero_megatron.comm.epochs`) is a job of its own as far as groups, plan and model are concerned;
what lasts is the process, with all that it has imported and compiled, and the state in the memories of its ranks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch

from hetero_megatron.comm import Comm, CommError, Group, start_comm, stop_comm, world_group
from hetero_megatron.comm.connectivity import UNREACHABLE
from hetero_megatron.comm.device_clock import DeviceClock
from hetero_megatron.comm.epochs import (
    Drifted,
    Epoch,
    EpochStore,
    EpochWatch,
    Fence,
    Speed,
    await_epoch,
    await_first_epoch,
)
from hetero_megatron.comm.hooks import Clock
from hetero_megatron.comm.job_store import StoreGone
from hetero_megatron.emulation import Emulation
from hetero_megatron.environment.launcher import LauncherEnvironment
from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.metrics import StepMetrics
from hetero_megatron.monitoring.throughput import measured_peak_flops
from hetero_megatron.platform import Platform
from hetero_megatron.platform.platform import DTYPES
from hetero_megatron.platform.plugins import Plugins, load_plugins
from hetero_megatron.training.agreement import chip_arch
from hetero_megatron.training.config import RunConfig, ScheduleConfig
from hetero_megatron.training.elastic_devices import check_abandonable, prepare, settle
from hetero_megatron.training.elastic_state import ElasticState, HandOver, Phases, Restored
from hetero_megatron.training.exit import ExitConditions
from hetero_megatron.training.held_state import Held, Holding, newest, restore
from hetero_megatron.training.loop import OnStep, Training
from hetero_megatron.training.peer_replicas import PeerReplicas
from hetero_megatron.training.rank_platform import (
    check_device,
    check_graphs,
    check_world,
    platform_at,
    position,
    sizes_follow_data,
    transport_of,
)
from hetero_megatron.training.step_numbers import StepStats
from hetero_megatron.training.train import agree, leaving, run_training, set_up
from hetero_megatron.utils.text import plural

# (plan file, cluster file or an empty string, number of ranks) -> the same run under that plan
Configure = Callable[[str, str, int], RunConfig]
PATIENCE = 600.0  # seconds for the launcher to say what comes next; a search may take long


@dataclass
class ElasticRank:
    """A member of the job, in one epoch after the other.

    Args:
        configure: the same run under another plan.

    Attributes:
        held: what this process has of the state since the epoch before.
        furthest: the last step that this rank completed.
        last: steps of the epoch before, which may be missing in the log.
        before: the run in the epoch before, for what is the same in all epochs; None: there was none.
        epoch: None: the first.
    """

    config: RunConfig
    launcher: LauncherEnvironment
    platform: Platform
    plugins: Plugins
    configure: Configure
    on_step: OnStep | None = None
    held: list[Held] = field(default_factory=list)
    furthest: int = 0
    before: _Kept | None = None
    epoch: Epoch | None = None

    def __post_init__(self) -> None:
        self.member, self.number = self.launcher.rank, self.launcher.restarts
        self.store = EpochStore.of_member(self.launcher)
        self.watch = EpochWatch(EpochStore.of_member(self.launcher))
        self.node = self.launcher.node or socket.gethostname()
        self._peak: float | None = None  # measured before the first epoch
        self._torn: list[object] = []
        self.last: list[StepMetrics] = []

    def run(self) -> int:
        """Until the run ends, or goes on without this rank. Returns its exit code."""
        try:
            return self._run()
        except StoreGone as error:
            raise CommError(f"rank {self.launcher.rank} ends: {error}", self.launcher.rank) from None

    def _run(self) -> int:
        if self.launcher.joins:
            self._peak = measured_peak_flops(self.platform, DTYPES[self.config.dtype])
            self.store.ready(self.member, self._speed(self._peak))
            self._await(await_first_epoch(self.store, self.member))
        while (code := self._one_epoch()) is None:
            self._await(self.number + 1)
        self.watch.close()
        return code

    def _speed(self, flops: float) -> Speed:
        kind = ".".join(map(str, (self.platform.name, *chip_arch(self.platform))))
        return Speed(f"{kind} in {self.config.dtype}", flops)

    def _await(self, number: int) -> None:
        """Enter epoch ``number``, once it is there."""
        epoch = await_epoch(self.store, number, PATIENCE)
        if epoch is None or self.member not in epoch.members:
            reason = "the launcher says nothing" if epoch is None else f"the job goes on without it: {epoch.event}"
            raise CommError(f"rank {self.launcher.rank} ends: {reason}", self.launcher.rank)
        self._enter(epoch)

    def _enter(self, epoch: Epoch) -> None:
        self.epoch, self.number = epoch, epoch.number
        rank, count = epoch.members.index(self.member), len(epoch.members)
        self.launcher = replace(
            self.launcher, rank=rank, world_size=count, restarts=epoch.number, local_world_size=None
        )
        config = self.configure(epoch.plan, epoch.cluster, count)
        # Its length and curves may be a checkpoint's.
        self.config = config if self.before is None else replace(config, schedule=self.before.schedule)

    def _one_epoch(self) -> int | None:
        """Exit code of this rank; None: there is a next epoch."""
        self.watch.begin(self.number)
        comm, training, failed = None, None, True
        try:
            comm, emulation = self._join()
            with leaving(comm, self.platform):
                training = self._set_up(comm, emulation)
                if training is None:
                    self.store.leave(self.member, "the plan does not use it")
                    return 0
                code = run_training(training)
                assert isinstance(training.elastic, ElasticState)
                if code == 0 and training.elastic.all_leave:  # hosts that join may go on from what was saved
                    self.store.leave(self.member, "all were told to leave")
                return code
        except (CommError, UserError) as error:
            if isinstance(error, UserError) and (training is not None or not self._newcomers_fail):
                raise
            if comm is not None:
                settle(comm)
            self._keep(training)
            if not self.watch.broken():
                print(f"elastic: {error}", flush=True)
            cut_off = [rank for rank, word in getattr(error, "states", {}).items() if word == UNREACHABLE]
            if cut_off:
                self.store.cannot_reach(self.number, self.member, cut_off)
        except HandOver as handed:
            failed = False
            if comm is not None:
                settle(comm)
            self._keep(training)
            self.held += handed.held
            if handed.leaves:
                self.store.leave(self.member, "it was told to leave")
                return 0
        self._tear_down(comm, training, failed)
        self.store.stopped(self.number, self.member, failed)
        return None

    @property
    def _newcomers_fail(self) -> bool:
        """Whether a refusal before the first step is the affair of those that join: the others go on without them."""
        return self.epoch is not None and bool(self.epoch.joined) and self.member not in self.epoch.joined

    def _join(self) -> tuple[Comm, Emulation]:
        config, self._began = self.config, time.perf_counter()
        check_world(config, self.launcher.world_size)
        place = position(config.cluster, self.launcher)
        timeout = 60 * config.distributed.timeout_minutes
        # A testbed's ranks keep their chips and cores, whatever numbers they have in this epoch.
        emulation = Emulation.of(self.launcher, self.member, timeout)
        transport = transport_of(config.distributed.transport, config.cluster)
        comm = start_comm(
            self.platform, timeout, place, self.launcher, emulation.hooks(), transport, over=self.watch.broken
        )
        if comm.accelerator is not None:
            self.watch.when_broken = comm.abandon
            if type(comm.clock) is Clock:  # a device queues its work: the host's seconds would say nothing about it
                comm.clock = DeviceClock(comm.accelerator)
        comm.fence = Fence(EpochStore.of_member(self.launcher), self.number, comm.rank).check
        return comm, emulation

    def _set_up(self, comm: Comm, emulation: Emulation) -> Training | None:
        """The run, ready for its next step; None on a rank that the plan does not use."""
        check_abandonable(comm.islands)
        config = self._same_schedule(comm)
        started_before = self.epoch is not None and not self.epoch.joined
        config = agree(config, comm, self.platform, self.plugins, emulation, started_before)
        peers = self._peers(comm, config)
        seconds, since = {"groups": time.perf_counter() - self._began}, time.perf_counter()
        all_ranks = self._host_group(comm, range(self.launcher.world_size), 0, "state")
        assert all_ranks is not None
        comm.activity = "agreeing on a step"
        holdings = all_ranks.gather_objects([held_state.said() for held_state in self.held], list[Holding])
        furthest = max(all_ranks.gather_objects(self.furthest, int))
        source = newest(holdings, config.spec)
        if source is None and self.epoch is not None and not config.checkpoint.goes_on:
            raise UserError(
                f"lost the state of every step: {self.epoch.event}, and with that the only copies", field="--elastic",
                accepted="--save DIR and --load DIR, the same, to go on from the last checkpoint then",
            )  # fmt: skip
        seconds["agree"], since = time.perf_counter() - since, time.perf_counter()
        if comm.rank not in config.plan.ranks:
            if source is not None:
                restore(source, self.held, None, config.compiled, all_ranks)
            return None
        exit, peak = (self.before.exit, self.before.peak) if self.before is not None else (None, None)
        resume = Restored(config, exit, peak, source, self.held, comm, all_ranks) if source is not None else None
        training = set_up(config, comm, self.platform, self.plugins, emulation, resume)
        training.on_step = self._on_step
        if training.stragglers is not None:
            training.stragglers.tell = self._drifted
        if exit is not None:
            training.exit.go_on_from(exit)
        if self.before is not None and resume is not None:
            training.checkpoints.source_dtypes = self.before.source_dtypes
        self.before = _Kept(
            training.config.schedule, training.exit, training.reporter.own_peak, training.checkpoints.source_dtypes
        )
        self.store.ready(self.member, self._speed(training.reporter.own_peak))
        moved = training.runtime.world.gather_objects(resume.moved if resume is not None else 0, int)
        phases = self._phases(training, resume, furthest, sum(moved))
        assert peers is not None
        elastic = ElasticState(training, self._replicas(peers, config), peers, self.node, self.watch, phases)
        training.elastic = elastic
        elastic.first_copies()
        training.reporter.complete([metrics for metrics in self.last if metrics.step <= training.step])
        self.last = []
        self.held = []
        if phases is not None:
            phases.seconds |= seconds | {"move": time.perf_counter() - since}
        elastic.begin = time.perf_counter()
        if training.step >= training.config.steps:
            elastic.tell()
        return training

    def _same_schedule(self, comm: Comm) -> RunConfig:
        """The configuration of this epoch. Those that join take over the length and the curves of the run, which may be
        a checkpoint's, and in which dtypes the checkpoint's tensors came."""
        all_ranks = tuple(range(self.launcher.world_size))
        if self.epoch is None or not self.epoch.joined:
            return self.config
        comm.create_groups([all_ranks])
        schedule_here = (self.before.schedule, self.before.source_names) if self.before is not None else None
        schedules = comm.group(all_ranks).gather_objects(schedule_here, _Told)
        first = next((schedule_of_rank for schedule_of_rank in schedules if schedule_of_rank is not None), None)
        if first is None:
            return self.config
        schedule, names = first
        if self.before is None:
            self.before = _Kept(schedule, None, self._peak, _dtypes(names))
        return replace(self.config, schedule=schedule)

    def _peers(self, comm: Comm, config: RunConfig) -> Group | None:
        """Of the ranks that hold copies for each other, and take what one leaves: the plan's, or with outer steps those
        of this rank's island, as links between islands are slow; None on a rank that the plan does not use. Called on
        all ranks of the job."""
        outer = config.plan.outer
        peers = [tuple(sorted(config.plan.ranks))] if outer is None else list(outer.islands)
        if comm.islands is None or not comm.islands.has_devices:
            comm.create_groups([p for p in peers for _ in range(max(config.compiled.groups.count(p), 1) + 1)])
        groups = [self._host_group(comm, ranks, -1, "copies") for ranks in peers]
        return next((group for group in groups if group is not None), None)

    def _replicas(self, peers: Group, config: RunConfig) -> PeerReplicas | None:
        """A rank whose island it is has copies for itself: of the moment before, where an exchange was torn."""
        assert config.elastic is not None
        if config.elastic.replicas_every is None or len(config.plan.ranks) == 1:
            return None
        return PeerReplicas(peers, config.elastic.replicas_every, self.node, config.elastic.room)

    @staticmethod
    def _host_group(comm: Comm, ranks: Sequence[int], lane: int, use: str) -> Group | None:
        """Of these ranks, for what lies in host memory: where some have devices, a group of gloo beside those of their
        libraries; None on other ranks. Called on all ranks of the job."""
        if comm.islands is not None and comm.islands.has_devices:
            return comm.background_group(ranks, use=use)
        return comm.group(ranks, lane) if comm.rank in ranks else None

    def _phases(self, training: Training, resume: Restored | None, furthest: int, moved: int) -> Phases | None:
        epoch, step = self.epoch, training.step
        if epoch is None:
            return None
        origin = "from memory" if resume is not None else "from a checkpoint, as no step is complete in memory"
        again_text = f", {plural(furthest - step, 'step')} again" if furthest > step else ""
        count = plural(len(training.config.plan.ranks), "rank")
        text = f"epoch {epoch.number}: {epoch.event}; {count} went on after step {step} {origin}{again_text}"
        text += resume.islands if resume is not None else ""
        return Phases(text, step, {"notice": epoch.notice, "plan": epoch.plan_seconds}, moved)

    def _on_step(self, step: int, stats: StepStats) -> None:
        self.furthest = max(self.furthest, step)
        if self.on_step is not None:
            self.on_step(step, stats)

    def _drifted(self, ratios: Mapping[int, float]) -> None:
        """Ranks that drifted from their rates: the launcher looks for another plan."""
        self.store.tell_drift(self.number, Drifted(self.config.dtype, {str(r): ratio for r, ratio in ratios.items()}))

    def _keep(self, training: Training | None) -> None:
        """Keep what this rank has of the state; what it has from before it is ready to train counts instead."""
        if training is not None and not self.held:
            assert isinstance(training.elastic, ElasticState)
            self.held, self.last = training.elastic.held(), training.last_metrics()

    def _tear_down(self, comm: Comm | None, training: Training | None, failed: bool) -> None:
        """Leave an epoch. What was torn is kept: gloo's groups wait, when they end, for messages that never will."""
        self._torn += [(comm, world_group())] if failed else []
        if comm is not None:
            comm.sever()
            if comm.connectivity.beacon is not None:
                comm.connectivity.beacon.close()
        if training is not None:
            with suppress(UserError, RuntimeError):  # a save that is cut off: there is an older one
                training.checkpoints.wait()
            training.checkpoints.release()
            training.reporter.close()
        stop_comm(self.platform)


@dataclass(frozen=True)
class _Kept:
    """What is the same in all epochs of a run."""

    schedule: ScheduleConfig
    exit: ExitConditions | None
    peak: float | None
    source_dtypes: dict[str, torch.dtype] | None

    @property
    def source_names(self) -> dict[str, str] | None:
        """``source_dtypes`` as ranks tell each other."""
        dtypes = self.source_dtypes
        return None if dtypes is None else {name: str(d).removeprefix("torch.") for name, d in dtypes.items()}


_Told = tuple[ScheduleConfig, dict[str, str] | None] | None


def _dtypes(names: dict[str, str] | None) -> dict[str, torch.dtype] | None:
    return None if names is None else {name: getattr(torch, dtype) for name, dtype in names.items()}


def train_elastic(
    config: RunConfig, launcher: LauncherEnvironment, configure: Configure, on_step: OnStep | None = None
) -> int:
    """As :func:`~hetero_megatron.training.train.train`, of a run that goes on when ranks are lost or leave.

    Raises:
        UserError: something cannot be honoured (all ranks raise it).
        CommError: the job goes on without this rank, or its launcher is gone.
    """
    plugins = load_plugins()
    place = position(config.cluster, launcher)
    apart = config.data is not None and (config.data.reset_attention_mask or config.data.sft)
    platform = platform_at(
        place, config.cluster, launcher, plugins, config.platform, config.distributed.backend, config.deterministic,
        sizes_follow_data(config.plan, config.spec, apart),
    )  # fmt: skip
    check_device(platform, launcher)
    check_graphs(config, platform)
    prepare(platform)
    return ElasticRank(config, launcher, platform, plugins, configure, on_step).run()
