"""``hetero-megatron run --elastic``, which goes on without a restart, and ``run --join``, by which hosts join it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hetero_megatron.cli.arguments import refuse_empty
from hetero_megatron.cluster import load_cluster
from hetero_megatron.environment.network import gloo_towards
from hetero_megatron.errors import UserError
from hetero_megatron.launch.jobs import LocalJob, Setup
from hetero_megatron.launch.supervise import Planner
from hetero_megatron.monitoring.stragglers import diagnoses_at
from hetero_megatron.training.config import RunConfig
from hetero_megatron.training.exit import end_process

if TYPE_CHECKING:
    from hetero_megatron.checkpoint.lock import DirectoryLock
    from hetero_megatron.launch.attached import Attached
    from hetero_megatron.launch.drift import DriftPlanner
    from hetero_megatron.testbed.launch import Launcher

# torch writes a stack of C++ for each connection that closes; what that means is said in a line of ours.
QUIET = ("TORCH_CPP_LOG_LEVEL", "ERROR")
FLAGS = ("--join", "--node", "--nproc-per-node", "--cluster")
MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class ElasticLimits:
    """Epochs after a failure; seconds for ranks to stop after one; least speed of devices that join, as a share of
    others'; seconds to wait for hosts when no rank is left."""

    losses: int
    grace: float
    least_speed: float
    wait: float


def run_elastic(
    setup: Setup, words: Sequence[str], planner: Planner, limits: ElasticLimits, scratch: Path,
    log: Callable[[str], None], address: str | None, config: RunConfig, testbed: Sequence[str] | None = None,
    drift: DriftPlanner | None = None, attached: Attached | None = None,
) -> int:  # fmt: skip
    """The job of ``setup``, to its end; its exit code. The directory of its checkpoints is locked by this process: a
    rank that hangs, perhaps on another host, would keep it from those that go on.

    Args:
        config: what a rank makes of the words.
        scratch: where hosts find the job that join it.
        address: of this host, as others reach it; None: only this host's processes take part.
        testbed: kinds of chips and links of the testbed that the ranks run on (empty: by default); None: on none.
        drift: how to plan again where ranks drift from their rates; None: they stay as they are.
        attached: other hosts that the first epoch begins with; None: all ranks are this process's.
    """
    os.environ.setdefault(*QUIET)
    from hetero_megatron.launch.elastic_testbed import testbed_ranks
    from hetero_megatron.launch.in_place import ElasticJob, InPlaceSupervisor
    from hetero_megatron.launch.joining import JOB_FILE, JobFile

    def start(host: str, port: int) -> ElasticJob:
        if attached is not None:
            from hetero_megatron.launch.attached import AttachedJob

            return AttachedJob(attached, setup, words, host, port, diagnoses_at(scratch, 0))
        return LocalJob(setup, words, host, port, 0, diagnoses_at(scratch, 0), more=gloo_towards(host))

    def opened(host: str, port: int, secret: bytes) -> None:
        plan, cluster = (str(file.absolute()) if file is not None else "" for file in (setup.plan, setup.cluster))
        JobFile(host, port, secret.decode(), plan, cluster, list(words), str(Path.cwd())).write(scratch)

    machine = _testbed(setup, words, testbed, scratch) if testbed is not None else None
    address = address or (attached.agents.address if attached is not None else None)
    lock = _locked(config)
    try:
        with testbed_ranks(machine, diagnoses_at(scratch, 0)) as ranks:
            begin: Callable[[str, int], ElasticJob] = start if ranks is None else ranks.start
            code = InPlaceSupervisor(
                setup, begin, planner, limits.losses, limits.grace, scratch, log,
                opened if ranks is None else None, address, limits.least_speed, limits.wait,
                serve=None if ranks is None else ranks.serve, drift=drift,
                attached=attached.elsewhere if attached is not None else {},
            ).run()  # fmt: skip
        if machine is not None:
            machine.report(code)
        return code
    finally:
        (scratch / JOB_FILE).unlink(missing_ok=True)
        if lock is not None:
            lock.release()


def _testbed(setup: Setup, words: Sequence[str], kinds: Sequence[str], scratch: Path) -> Launcher:
    """Not opened yet. UserError: this machine cannot emulate it, or not with ranks that stay."""
    from hetero_megatron.launch.elastic_testbed import refuse_paced
    from hetero_megatron.launch.jobs import rank_command
    from hetero_megatron.testbed import machine
    from hetero_megatron.testbed.launch import Launcher, LaunchOptions
    from hetero_megatron.testbed.settings import decide

    assert setup.cluster is not None, "the command line refuses a testbed without a cluster"
    asked = dict(zip(kinds[::2], kinds[1::2], strict=True))
    chips, links = asked.get("--chips"), asked.get("--links")
    settings = decide(load_cluster(setup.cluster), machine.examine(), chips, links)
    refuse_paced(settings)
    return Launcher(settings, LaunchOptions(tuple(rank_command(setup, words)), log_dir=scratch / "testbed"))


def _locked(config: RunConfig) -> DirectoryLock | None:
    """None: the run writes no checkpoints. UserError: another one writes there."""
    from hetero_megatron.checkpoint.lock import ACCEPTED, TAKEN, DirectoryLock
    from hetero_megatron.training.save_directory import writes_checkpoints

    if not writes_checkpoints(config):
        return None
    assert config.checkpoint.save is not None
    lock = DirectoryLock(config.checkpoint.save)
    try:
        problem = "" if lock.take() else TAKEN
    except OSError as error:
        problem = f"cannot be opened: {error.strerror}"
    if problem:
        raise UserError(problem, field="--save", value=config.checkpoint.save, accepted=ACCEPTED)
    return lock


def join(argv: Sequence[str], program: Sequence[str]) -> NoReturn:
    """This host's part of a running job, with which the process ends; ``program``: what starts a rank."""
    os.environ.setdefault(*QUIET)
    from hetero_megatron.launch.joining import Joining, read_job

    options: dict[str, str] = {}
    words = list(argv)
    while words:
        name, separator, value = words.pop(0).partition("=")
        if name not in FLAGS:
            raise UserError("unknown flag beside --join", field=name, accepted=", ".join(FLAGS))
        if not separator and (not words or words[0].startswith("--")):
            raise UserError("has no value", field=name, accepted="--flag VALUE")
        options[name] = value if separator else words.pop(0)
    refuse_empty(argv)
    count = options.get("--nproc-per-node")
    if count is not None and not (count.isascii() and count.isdigit() and 0 < int(count) <= MOST_RANKS):
        accepted = f"1 to {MOST_RANKS}"
        raise UserError("is not a number of ranks", field="--nproc-per-node", value=count, accepted=accepted)
    cluster = Path(options["--cluster"]) if "--cluster" in options else None
    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    chips = int(count) if count is not None else None
    job, found = read_job(Path(options["--join"])), ("--join", options["--join"])
    end_process(Joining(job, options.get("--node"), chips, cluster, program, log, found=found).run())
