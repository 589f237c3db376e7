"""The training loop: data, steps, evaluation, logging, stopping. One object per run, one run per process."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from hetero_megatron.checkpoint.finite import listed
from hetero_megatron.checkpoint.hf_load import HFWeights
from hetero_megatron.checkpoint.hf_save import check_target, save_hf
from hetero_megatron.cluster import Cluster
from hetero_megatron.comm import Comm, CommError, start_comm, stop_comm
from hetero_megatron.comm.device_clock import DeviceClock
from hetero_megatron.comm.hooks import Clock
from hetero_megatron.data import unigram_entropy
from hetero_megatron.data.batch import BatchOptions
from hetero_megatron.data.chat.build import show_sample
from hetero_megatron.data.loader import BatchLoader
from hetero_megatron.data.sample import Dataset
from hetero_megatron.emulation import Emulation
from hetero_megatron.errors import UserError
from hetero_megatron.launcher import SECRET, LauncherEnvironment, read_launcher
from hetero_megatron.layout import Box
from hetero_megatron.model import initial_values
from hetero_megatron.ops.optimizer_ops import adamw_aten
from hetero_megatron.out_of_memory import out_of_memory
from hetero_megatron.parallel.offload import check_offload, cpu_adam
from hetero_megatron.parallel.update import SGD, AdamW, Optimizer, OptimizerFactory
from hetero_megatron.plan import format_plan, idle_ranks, locate, stage_at
from hetero_megatron.plan.islands import format_islands
from hetero_megatron.platform import Platform, choose_platform
from hetero_megatron.platform.plugins import Plugins, load_plugins
from hetero_megatron.spec import LogicalTensor, logical_tensors
from hetero_megatron.training.adapters import adapters_of, finite
from hetero_megatron.training.agreement import check_agreement, run_facts
from hetero_megatron.training.alignment.session import Alignment
from hetero_megatron.training.checkpointing import WRITE_TIMEOUT, Checkpointing, ConsumedSamples
from hetero_megatron.training.config import OptimizerConfig, RunConfig
from hetero_megatron.training.diagnosis import say_joined
from hetero_megatron.training.exit import INTERRUPTED, ExitConditions
from hetero_megatron.training.failure import StepGuard
from hetero_megatron.training.islands import (
    check_chips,
    communicators,
    describe_islands,
    plan_for,
    transport_of,
    unlike_cluster,
)
from hetero_megatron.training.kernels import agree_on_kernels, rank_kernels
from hetero_megatron.training.node_data import NodeData
from hetero_megatron.training.profile import profiler_of
from hetero_megatron.training.report import Reporter
from hetero_megatron.training.runtime import Runtime
from hetero_megatron.training.save_directory import claim_directory, make_folders
from hetero_megatron.training.stragglers import DRIFT, FACTOR, Behind, StragglerWatch, write_drift
from hetero_megatron.words import notice_line, plural

COMPILED = (
    "--compile: weight gradients pass through autograd, so each needs memory of its own and an addition per "
    "micro-batch, and attention that torch cannot trace is a break in the graph of its layer"
)
COMPILED_MOE = "; routers and routed experts run as they are, for their rows are known only then"
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(
    config: RunConfig,
    launcher: LauncherEnvironment | None = None,
    lost: Callable[[Exception], None] | None = None,
) -> int:
    """Run ``config`` on this rank of the job that its launcher's environment describes.

    Args:
        launcher: None: this process's environment.
        lost: see :func:`~hetero_megatron.comm.start_comm`; it is to end the process.

    Returns:
        the exit code: 0, or ``DRIFT`` where the launcher is to plan again.

    Raises:
        UserError: something in the configuration, data or cluster cannot be honoured (all ranks raise it).
        CommError: a peer died or does not answer.
    """
    launcher = launcher or read_launcher()
    world = launcher.world_size
    check_world(config, world)
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
    code, everyone = 0, tuple(range(world))
    try:
        comm.create_groups([everyone])
        check_agreement(comm.group(everyone), run_facts(config))  # before anything that depends on options
        if comm.rank == 0:
            announce(config, world, platform, plugins, emulation.describe())
            for line in (*describe_islands(comm.islands), *unlike_cluster(comm.islands, config.cluster)):
                print(line, flush=True)
            if launcher.started_by:
                print(f"ranks: the tasks that {launcher.started_by} started, by their numbers", flush=True)
            if notice := open_to_others(launcher):
                print(notice_line(notice), flush=True)
        check_chips(config.plan, config.cluster, comm.islands)
        config = replace(config, plan=plan_for(config.plan, comm.islands))
        for line in communicators(comm.islands, config.compiled.groups) if comm.rank == 0 else ():
            print(line, flush=True)
        # All at once, on idle ranks too (torch wants every rank to take part): a refusal then leaves nobody waiting.
        comm.create_groups(config.compiled.groups)
        comm.background_group(config.plan.ranks, WRITE_TIMEOUT)
        if comm.rank in config.plan.ranks:
            training = Training(config, comm, platform, plugins, emulation)
            try:
                code = training.run()
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
    except (CommError, KeyboardInterrupt):
        raise  # without a farewell: taking groups down waits for transfers that will never end (a save, for hours)
    except BaseException as error:
        if isinstance(error, RuntimeError) and (found := comm.lost()) is not None:
            raise found from error
        if out_of_memory(error) is None:  # which only this rank is perhaps: then as above
            stop_comm(platform)
        raise
    stop_comm(platform)
    return code


def check_device(platform: Platform, launcher: LauncherEnvironment) -> None:
    """Several ranks must not share the first device because nothing says which one is whose."""
    if launcher.world_size > 1 and launcher.local_rank is None and platform.device.type != "cpu":
        raise UserError(
            "not set, so this rank does not know its device", field="LOCAL_RANK", where="environment",
            accepted="the rank's index on its node, as torchrun sets it",
        )  # fmt: skip


def check_graphs(config: RunConfig, platform: Platform) -> None:
    """Where layers are to run as device graphs, this rank's device has them."""
    if config.graphs_after is None:
        return
    problem = "no plugin knows it" if platform.accelerator is None else platform.accelerator.no_graphs()
    if problem:
        raise UserError(
            f"{platform.name} captures no graphs: {problem}", field="--cuda-graph-impl", value="local", accepted="none"
        )


def open_to_others(launcher: LauncherEnvironment) -> str:
    """What to say where anybody on the network could claim a rank; empty where nobody can."""
    if launcher.world_size == 1 or launcher.one_host or launcher.secret:
        return ""
    host, port = launcher.meeting_point
    return f"{SECRET} is not set: whoever reaches {host}:{port} can claim a rank (docs/security.md)"


def position(cluster: Cluster | None, launcher: LauncherEnvironment) -> int | None:
    """This process's rank by the cluster file: node ($HETERO_NODE, else the host's name) and local index.

    Raises:
        UserError: the file has no such node or chip, or the job has fewer ranks.
    """
    if cluster is None:
        return None
    node, world = launcher.node or socket.gethostname(), launcher.world_size
    rank = cluster.find(node, launcher.device_index).rank
    if rank >= world:
        raise UserError(
            f"its chip is rank {rank} of the cluster file, but this job has {plural(world, 'rank')}",
            field="HETERO_NODE", value=node, accepted=f"the chips of ranks 0 to {world - 1}, or more ranks",
        )  # fmt: skip
    return rank


def platform_at(
    place: int | None,
    cluster: Cluster | None,
    launcher: LauncherEnvironment,
    plugins: Plugins,
    name: str | None = None,
    backend: str | None = None,
    deterministic: bool = False,
) -> Platform:
    """This process's platform: ``name``, else that of the vendor of its emulated chip, else the one that is here; see
    :func:`~hetero_megatron.platform.choose_platform`."""
    vendor = cluster.emulated_vendor(place) if cluster is not None else ""
    return choose_platform(plugins.platforms.values(), name, backend, launcher.device_index, vendor, deterministic)


def check_world(config: RunConfig, world: int) -> None:
    """The plan's ranks are there."""
    needed = max(config.plan.ranks) + 1
    if needed > world:
        raise UserError(
            f"the plan uses ranks 0 to {needed - 1}, but this job has {world}",
            field="WORLD_SIZE", value=world, accepted=f"{needed} ranks, e.g. torchrun --nproc-per-node {needed}",
        )  # fmt: skip


def announce(config: RunConfig, world: int, platform: Platform, plugins: Plugins, testbed: str) -> None:
    """Print what will run, and every choice that was made for the user; ``testbed``: what is emulated, if anything."""
    cluster = config.cluster
    chips = [cluster.chip_of(r).name for r in range(cluster.world_size)] if cluster is not None else None
    print(format_plan(config.plan, config.spec, chips), flush=True)
    if config.plan.islands:
        print(format_islands(config.compiled), flush=True)
    print(f"device: {platform.device.type}, backend {platform.backend}, {config.dtype}", flush=True)
    if platform.settings:
        print(f"settings: {', '.join(platform.settings)}", flush=True)
    if config.compile is not None:
        print(notice_line(COMPILED + (COMPILED_MOE if config.spec.moe is not None else "")), flush=True)
    if testbed:
        print(testbed, flush=True)
    for plugin in plugins.broken():
        source = f"plugin {plugin.source.name} ({plugin.source.module})"
        print(notice_line(f"{source} is broken: {plugin.error}"), flush=True)
    idle = sorted(set(range(world)) - set(config.plan.ranks))
    if config.cluster is not None:
        idle = sorted({*idle, *idle_ranks(config.plan, config.cluster)})
    if idle:
        print(f"idle ranks: {', '.join(map(str, idle))}", flush=True)
    for notice in config.notices:
        print(notice_line(notice), flush=True)


def optimizer_factory(
    config: OptimizerConfig, offload: bool = False, kernel: Callable[..., object] = adamw_aten
) -> OptimizerFactory:
    """Adam with decoupled weight decay (by ``kernel``, or ``offload``: in host memory), or SGD; rates are set before
    every step."""

    def build(groups: list[dict[str, object]]) -> Optimizer:
        if config.name == "sgd":
            return SGD(groups, config.momentum)
        if offload:
            return cpu_adam(groups, (config.beta1, config.beta2), config.eps)
        return AdamW(groups, kernel, (config.beta1, config.beta2), config.eps)

    return build


class Training:
    """The state of a run: what is built once, and how far it has come."""

    def __init__(
        self, config: RunConfig, comm: Comm, platform: Platform, plugins: Plugins, emulation: Emulation
    ) -> None:
        self.config, self.platform, self.emulation = config, platform, emulation
        world = comm.group(config.plan.ranks)
        lock = claim_directory(config, world)
        make_folders(config, world)
        if config.save_hf is not None:
            check_target(config.save_hf, config.spec.base, world)
        self.weights = HFWeights(config.load_hf, config.spec.base) if config.load_hf is not None else None
        self.adapters = adapters_of(config, world)
        # Before weights are read and the model is built: a mistyped path is known at once.
        self.node_data = NodeData(config, comm, world)
        self.data = self.node_data.datasets
        check_agreement(world, {f"data ({name})": mark for name, mark in self.data.fingerprints.items()})
        flags = config.data
        assert flags is not None, "the command line refuses training without data"
        apart = flags.sft  # conversations that share a sample do not see each other
        options = BatchOptions(
            flags.reset_position_ids or apart, flags.reset_attention_mask or apart, flags.eod_mask_loss, self.data.eod
        )
        self._loader: Callable[[Dataset], BatchLoader] = lambda d: BatchLoader(d, options, flags.num_workers)
        dtype = DTYPES[config.dtype]
        check_offload(config.plan, config.optimizer.name, config.dtype)
        offload = stage_at(config.plan, locate(config.plan, comm.rank)).optimizer.offload
        self.alignment = Alignment(config.alignment)
        chosen = rank_kernels(
            config.plan, config.spec, comm.rank, plugins.registry, platform, dtype,
            config.compile is not None, config.deterministic, config.logits_bytes, config.fp8, config.dropout,
        )  # fmt: skip
        kernels = self.alignment.wrap(chosen, comm.rank)
        factory = optimizer_factory(config.optimizer, offload, kernels.adamw)
        self.runtime = Runtime(
            config.compiled, comm, dtype, self._initialize, factory, kernels=kernels,
            compile_backend=config.compile, logits_bytes=config.logits_bytes, balancing=config.balancing,
            dropout=config.dropout, seed=config.seed, graphs_after=config.graphs_after,
        )  # fmt: skip
        self._complete_import()
        self.alignment.follow(self.runtime)
        agree_on_kernels(self.runtime, config.logging.kernel_plan)
        source_dtypes = self.weights.dtypes() if self.weights is not None and self.adapters is None else None
        self.checkpoints = Checkpointing(config, self.runtime, self.data, platform.synchronize, lock, source_dtypes)
        config, start, self.loss_scale = self.checkpoints.load()
        self.config = config
        self.step, self.consumed = start.step, start.consumed
        self.trained = start.step >= config.steps  # whether there was nothing to do, or a step of this run was taken
        # Where there is something to save, being told to stop means saving first.
        asked = config.exit.signal or ("SIGTERM" if self.checkpoints.active else "SIGINT")
        signals = {asked, "SIGINT", *(("SIGHUP",) if asked == "SIGTERM" else ())}
        first = comm.launcher.rank == 0
        self.exit = ExitConditions(config.exit.minutes, config.exit.interval, signals, first)
        self.reporter = Reporter(config, self.runtime, platform, self.step + 1, emulation)
        check_grad = config.check_nan and config.dtype != "fp16"  # there it is the loss scale's affair
        failure = config.failure
        self.guard = StepGuard(config.check_nan, check_grad, failure.check_spikes, failure.rerun, self.say)
        self.profiler = profiler_of(config, self.runtime, platform)
        self.stragglers = self._watch()
        self.drift: list[Behind] = []
        self.drift_reason = ""
        if config.deterministic:
            torch.use_deterministic_algorithms(True)

    def _watch(self) -> StragglerWatch | None:
        failure, plan = self.config.failure, self.config.plan
        if not (failure.stragglers or failure.replan_on_drift):
            return None
        if not self.reporter.speaks:
            return None
        factor = failure.replan_on_drift or FACTOR
        chips, expected = self.reporter.chips, self.reporter.expected_busy
        return StragglerWatch(plan.ranks, chips, expected, factor, plan.global_batch_size)

    def _look_for_stragglers(self, busy: Sequence[float], size: int) -> None:
        """On the rank that speaks: name ranks that fall behind; stop for a new plan where that was asked for."""
        assert self.stragglers is not None
        new = self.stragglers.step(busy, size)
        for behind in new:
            self.say(notice_line(f"step {self.step}: {behind}"))
            self.reporter.event("straggler", str(behind), step=self.step, rank=behind.rank, ratio=behind.ratio)
        steady = [b for b in self.stragglers.behind() if b.steady]
        if self.config.failure.replan_on_drift and not self.exit.reason and steady:
            self.drift = steady
            ranks = ", ".join(str(b.rank) for b in self.drift)
            self.exit.reason = self.drift_reason = f"rank {ranks} drifted from its rate"

    def say(self, text: str) -> None:
        if self.reporter.speaks:
            print(text, flush=True)

    def _initialize(self, tensor: LogicalTensor, box: Box) -> torch.Tensor:
        if self.adapters is not None and tensor.trained:
            return self.adapters.initialize(tensor, box, self._initialize)
        if self.weights is not None:
            found = self.weights.read(tensor, box)
            return finite(tensor, found) if tensor.int8 else found
        return initial_values(tensor, box, self.config.spec, self.config.seed)

    def _complete_import(self) -> None:
        """Master weights as exact as the files are, and what a user should know about these."""
        assert self.runtime.optimizer is not None
        if self.adapters is not None:
            self.adapters.complete(self.runtime)
        if self.weights is None:
            return
        if self.adapters is None:
            self.weights.read_masters(self.runtime.optimizer.owned(), self.runtime.dtype)
        world = self.runtime.world
        ranks: list[Any] = world.gather_objects(list(self.weights.nonfinite))
        nonfinite = [name for names in ranks for name in names]
        found = [f"NaN or Inf in {listed(nonfinite)}"] if nonfinite else []
        masters = torch.promote_types(self.runtime.dtype, torch.float32)
        wide = [name for name, dtype in self.weights.dtypes().items() if torch.promote_types(dtype, masters) != masters]
        if wide:
            found.append(f"float64 is rounded to the float32 of this run (--fp64 keeps it) in {listed(wide)}")
        if world.index == 0:
            for notice in [*self.weights.notices, *found]:
                print(notice_line(f"--load-hf {self.config.load_hf}: {notice}"), flush=True)

    def run(self) -> int:
        """Returns the exit code of this rank."""
        config = self.config
        if not config.skip_train:
            assert self.data.train is not None
            if self.reporter.speaks and not self.step:  # a stream would have to go back to its beginning
                self._describe_data(self.data.train)
            self.emulation.started()
            with self._loader(self.data.train) as loader:
                self._train(loader)
            if not self.trained:
                self.say(notice_line("every step of this run was skipped: the weights are those that it began with"))
            self.checkpoints.save(ConsumedSamples(self.step, self.consumed), self.loss_scale)
        if config.evaluation.iterations:
            self._evaluate("validation")
            if self.data.test is not None and (config.skip_train or self.step == config.steps):
                self._evaluate("test")
        self._export()
        self.checkpoints.wait()
        self.reporter.finish(self.step, self.exit.reason)
        if self.drift and self.exit.reason == self.drift_reason and self.step < config.steps:
            write_drift(config, self.step, self.drift)
            return DRIFT
        return INTERRUPTED if self.exit.interrupted and not self.checkpoints.active else 0

    def _export(self) -> None:
        """Write --save-hf and --save-adapter, unless the run was stopped to go on later."""
        config, adapters = self.config, self.adapters
        wanted = {"--save-hf": config.save_hf, "--save-adapter": config.adapter.save}
        if self.checkpoints.active and self.step < config.steps:  # stopped: the directories must be free then
            for flag, directory in wanted.items():
                if directory is not None:
                    self.say(notice_line(f"{flag} {directory} is written at the end of training, step {config.steps}"))
            return
        if adapters is not None and config.adapter.save is not None:
            self.say(adapters.save(self.runtime))
        if config.save_hf is None:
            return
        assert self.runtime.optimizer is not None
        dtypes = self.checkpoints.source_dtypes
        if adapters is not None:
            dtypes = self.weights.dtypes() if self.weights is not None else None
        if config.save_hf_dtype is not None or dtypes is None:
            names = [tensor.name for tensor in logical_tensors(config.spec.base)]
            dtypes = dict.fromkeys(names, DTYPES[config.save_hf_dtype or config.dtype])
        along = self.checkpoints.companions
        if adapters is not None:
            self.say(adapters.save_merged(self.runtime, dtypes, along))
        else:
            owned = self.runtime.optimizer.owned()
            self.say(save_hf(config.save_hf, config.spec, owned, dtypes, self.runtime.world, along))

    def _describe_data(self, data: Dataset) -> None:
        assert self.config.data is not None
        if self.config.data.sft:
            print(show_sample(data[0], self.data.tokenizer), flush=True)
            return
        entropy = unigram_entropy(data, num_samples=64)
        print(f"data: unigram entropy {entropy:.3f} nats, the loss of counting tokens alone", flush=True)

    def _train(self, loader: BatchLoader) -> None:
        config, stop = self.config, False
        while self.step < config.steps and not stop:
            start = time.perf_counter()
            size = config.batch_size.at(self.consumed)
            lr, decay = config.learning_rate.at(self.consumed), config.weight_decay.at(self.consumed)
            with self.profiler.step(self.step + 1):
                stats = self.guard.step(
                    self.runtime, loader, self.step + 1, self.consumed, size, lr, decay,
                    config.optimizer.clip_grad, self.loss_scale.scale,
                    stop=self.exit.check(self.step + 1) or self.checkpoints.failed,
                )  # fmt: skip
            if not stats.stop and self.step + 1 < config.steps:
                loader.advance(size)
            self.alignment.after_step(self.step + 1, self.runtime)
            self.step, self.consumed, stop = self.step + 1, self.consumed + size, stats.stop
            scale, self.loss_scale = self.loss_scale, self.loss_scale.update(stats.skipped)
            if self.stragglers is not None:
                self._look_for_stragglers(stats.busy, size)
            seconds = time.perf_counter() - start
            self.reporter.step(self.step, self.consumed, size, lr, scale.scale, stats, seconds)
            if told := self.profiler.after(self.step, stats.actions, seconds, stop or self.step == config.steps):
                self.say(told)
            self.trained |= not stats.skipped
            if config.dtype == "fp16":
                self.loss_scale.check(self.step, (stop or self.step == config.steps) and not self.trained)
            every = config.evaluation
            if self.checkpoints.due(self.step):
                self.reporter.flush()  # a run that is killed goes on from here, and its logs with it
                self.checkpoints.save(ConsumedSamples(self.step, self.consumed), self.loss_scale)
            if every.iterations and self.step % every.interval == 0 and self.step < config.steps and not stop:
                self._evaluate("validation")

    def _evaluate(self, split: str) -> None:
        """Mean loss over the batches of validation or test; the same batches every time."""
        data = self.data.valid if split == "validation" else self.data.test
        assert data is not None
        size, total, tokens = self.config.plan.global_batch_size, 0.0, 0
        with self._loader(data) as loader:
            for i in range(self.config.evaluation.iterations):
                loss_sum, count = self.runtime.evaluate(loader, i * size, size)
                if i + 1 < self.config.evaluation.iterations:
                    loader.advance(size)
                total, tokens = total + loss_sum, tokens + count
        loss = total / max(tokens, 1)
        if self.config.check_nan and not math.isfinite(loss):
            raise UserError(
                f"the {split} loss is {loss} after step {self.step}: nothing is saved or exported after it",
                accepted="weights without NaN or Inf (an earlier checkpoint), other data, or more range than fp16 has",
            )
        self.reporter.evaluated(self.step, loss, split)
