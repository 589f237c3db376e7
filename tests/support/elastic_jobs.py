"""Elastic runs with ranks forked from a process that has imported torch, and events at chosen moments in them."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hetero_megatron.checkpoint.boxes import BoxedTensor
from hetero_megatron.checkpoint.native import open_checkpoint
from hetero_megatron.cli.run_plans import configured, planner_for
from hetero_megatron.comm import Comm
from hetero_megatron.comm.job_store import JobStore
from hetero_megatron.errors import UserError
from hetero_megatron.launch.in_place import InPlaceSupervisor
from hetero_megatron.launch.jobs import Seat, Setup
from hetero_megatron.launch.joining import JobFile
from hetero_megatron.layout import Box
from tests.support.paths import ROOT
from tests.support.pool import PRELOAD
from tests.support.programs import ENVIRONMENT

DEADLINE = 240.0


@dataclass(frozen=True)
class Happening:
    """Something that a member does to itself.

    Attributes:
        member: who.
        when: ``step``: its step ``at`` is complete; ``update``: its optimizer has taken step ``at``, and sent nothing;
            ``copy``: a copy of step ``at`` is about to travel; ``hashes``, ``save`` and ``evaluation``: it begins what
            follows step ``at``; ``join`` and ``move``: it connects, and moves state, in epoch ``at``; ``await``: it
            waits for epoch ``at``, whose plan is being looked for.
            ``exchange``: it is about to send its part of an exchange of outer steps after the update of step ``at``.
            ``publish``: its checkpoint of step ``at`` is about to appear. ``message`` and ``reduce``: in step ``at`` it
            is about to send a message to another stage, and its part of a sum of gradients.
        what: ``kill``, ``leave`` (SIGTERM), ``freeze``, ``doze``: freeze, and go on when others have done two steps
            more, or ``wait``: until a host is about to join.
    """

    member: int
    when: str
    at: int
    what: str = "kill"

    def happen(self, metrics: Path) -> None:
        if self.what == "doze":
            _wake(os.getpid(), metrics, self.at + 2)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "leave": signal.SIGTERM}.get(self.what, signal.SIGSTOP))


def _wake(process: int, metrics: Path, step: int) -> None:
    """Somebody who lets a process go on once this step is done."""
    if os.fork():
        return
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end and not any(line.get("step", 0) >= step for line in _lines(metrics)):
        time.sleep(0.02)
    os.kill(process, signal.SIGCONT)
    os._exit(0)


def _instrument(mine: Sequence[Happening], run: Path) -> Callable[[int, Any], None]:
    """Make them happen in this process; returns what is to be told of every step."""
    from hetero_megatron.checkpoint.directory import CheckpointDirectory
    from hetero_megatron.parallel.grad_sync.exchange import BucketExchange
    from hetero_megatron.parallel.optimizer import ShardedOptimizer
    from hetero_megatron.parallel.outer_steps import OuterSteps
    from hetero_megatron.training import checkpointing, elastic, failure, held_state, peer_replicas
    from hetero_megatron.training.runtime import Runtime

    waits = [one for one in mine if one.what == "wait"]

    def due(when: str, at: int) -> None:
        for one in mine:
            if (one.when, one.at) == (when, at) and one.what != "wait":
                one.happen(run / "metrics.jsonl")
            elif (one.when, one.at) == (when, at) and one in waits:  # once, though steps may be done again
                waits.remove(one)
                while not progress["rank"].watch.paused:
                    time.sleep(0.01)

    progress: dict[str, Any] = {"step": 0, "epoch": 0}
    gather, move, start, join, wait = (
        ShardedOptimizer.all_gather, held_state._move, peer_replicas.PeerReplicas.start, elastic.ElasticRank._join,
        elastic.ElasticRank._await,
    )  # fmt: skip

    def all_gather(self: Any, *arguments: bool) -> None:
        if self.updates:  # not when state is restored
            due("update", progress["step"] + 1)
        gather(self, *arguments)

    def moving(*arguments: Any) -> int:
        due("move", progress["epoch"])
        return move(*arguments)

    def copying(self: Any, moment: Any, *more: Any) -> None:
        due("copy", moment.step)
        start(self, moment, *more)
        print(f"copies after step {moment.step}: rank {self.group.comm.rank} has {self.bytes}")

    def joining(self: Any) -> Any:
        progress.update(epoch=self.number, rank=self)
        due("join", self.number)
        return join(self)

    def awaiting(self: Any, number: int) -> None:
        due("await", number)
        wait(self, number)

    def on_step(step: int, _: Any) -> None:
        progress["step"] = step
        due("step", step)

    def after(owner: type, name: str, when: str) -> None:
        """What this method does comes after a step."""
        method = getattr(owner, name)

        def wrapped(*arguments: Any) -> Any:
            due(when, progress["step"])
            return method(*arguments)

        setattr(owner, name, wrapped)

    publish = CheckpointDirectory.publish

    def publishing(self: CheckpointDirectory, step: int) -> None:
        due("publish", step)
        publish(self, step)

    def before(owner: type, name: str, when: str) -> None:
        """This method is called in a step."""
        method = getattr(owner, name)

        def wrapped(*arguments: Any, **named: Any) -> Any:
            due(when, progress["step"] + 1)
            return method(*arguments, **named)

        setattr(owner, name, wrapped)

    before(OuterSteps, "_start", "exchange")
    before(Comm, "isend", "message")
    before(BucketExchange, "start_reduce", "reduce")
    CheckpointDirectory.publish = publishing  # type: ignore[method-assign]
    after(failure.ReplicaCheck, "after_step", "hashes")
    after(checkpointing.Checkpointing, "save", "save")
    after(Runtime, "evaluate_pairs", "evaluation")
    ShardedOptimizer.all_gather = all_gather  # type: ignore[method-assign]
    held_state._move, peer_replicas.PeerReplicas.start = moving, copying  # type: ignore[assignment, method-assign]
    elastic.ElasticRank._join = joining  # type: ignore[method-assign]
    elastic.ElasticRank._await = awaiting  # type: ignore[method-assign]
    return on_step


@dataclass(frozen=True)
class Host:
    """A host that joins once ``step`` steps are done, with so many processes; ``what``: happens in them; ``words``:
    flags that only they have."""

    node: str
    step: int
    chips: int = 1
    what: tuple[Happening, ...] = ()
    words: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def run(self, directory: str, log: str) -> None:
        """In a process of its own: what ``hetero-megatron run --join`` does, with forked ranks."""
        from hetero_megatron.launch.joining import Joining, read_job

        end = time.monotonic() + DEADLINE
        job, steps = (Path(directory) / name for name in ("elastic.json", "metrics.jsonl"))
        while not job.exists() or len(_lines(steps)) < self.step:
            assert time.monotonic() < end, "the step never came"
            time.sleep(0.02)
        said = open(log, "a", buffering=1)  # noqa: SIM115
        joining = Joining(
            read_job(Path(directory)), self.node, self.chips, None, (), lambda text: print(text, file=said),
            lambda setup, job, answer: ForkedHere(setup, job, answer.members[0], self, log),
        )  # fmt: skip
        try:
            code = joining.run()
        except UserError as error:
            print(f"{self.node} was refused: {error}", file=said, flush=True)
            code = 2
        print(f"{self.node} ended with {code}", file=said, flush=True)


class ForkedHere:
    """Ranks forked from this process; see :class:`~hetero_megatron.launch.joining.HostJob`."""

    def __init__(self, setup: Setup, job: JobFile, first: int, host: Host, log: str) -> None:
        self.ranks = [first + i for i in range(len(setup.seats))]
        self._pids: dict[int, int] = {}
        self._codes: dict[int, int] = {}
        for index, member in enumerate(self.ranks):
            environment = {
                **ENVIRONMENT, **dict(host.environment), "WORLD_SIZE": str(first + len(setup.seats)),
                "RANK": str(member), "MASTER_ADDR": job.host, "MASTER_PORT": str(job.port),
                "HETERO_JOB_SECRET": job.secret,
                "TORCHELASTIC_USE_AGENT_STORE": "True", "HETERO_LAUNCHER": "1", "TORCHELASTIC_RESTART_COUNT": "0",
                "LOCAL_RANK": str(index), "HETERO_NODE": setup.seats[index].node, "HETERO_JOINS": "1",
            }  # fmt: skip
            self._pids[member] = pid = os.fork()
            if pid == 0:
                mine = [one for one in host.what if one.member == index]
                _rank(["--plan", job.plan, *job.words, *host.words], environment, log, mine)

    def poll(self) -> dict[int, int]:
        for member, pid in self._pids.items():
            if member not in self._codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                self._codes[member] = os.waitstatus_to_exitcode(ended[1])
        return dict(self._codes)

    def signal(self, number: int) -> None:
        for member, pid in self._pids.items():
            if member not in self._codes:
                os.kill(pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)


def _rank(words: list[str], environment: dict[str, str], output: str, mine: Sequence[Happening]) -> None:
    """In a forked process: what ``hetero-megatron pretrain`` does."""
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(1, 2)
    sys.path += environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    os.chdir(ROOT)
    from hetero_megatron.cli.configure import configure
    from hetero_megatron.cli.pretrain import under_plan
    from hetero_megatron.cli.rank_errors import end_rank
    from hetero_megatron.environment.launcher import read_launcher
    from hetero_megatron.training.elastic import train_elastic
    from hetero_megatron.training.train import train

    launcher = read_launcher()
    try:
        config = configure(words, environment)
        if config.elastic is None:
            code = train(config, launcher)
        else:
            on_step = _instrument(mine, Path(config.checkpoint.save or "."))
            code = train_elastic(config, launcher, partial(under_plan, words, environment), on_step)
    except Exception as error:
        code = end_rank(error, launcher, environment)
    sys.stdout.flush()
    os._exit(code)


# By rank, the flags that choose its device, and the environment that this needs; empty: all are processors.
Devices = Sequence[tuple[Sequence[str], Mapping[str, str]]]


class ForkedRanks:
    """See :class:`~hetero_megatron.launch.in_place.ElasticJob`."""

    def __init__(
        self, words: list[str], ranks: int, happenings: Sequence[Happening], log: Path, host: str, port: int,
        devices: Devices = (),
    ) -> None:  # fmt: skip
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        secret = secrets.token_hex(32)
        self.secret, self.deadline = secret.encode(), time.monotonic() + DEADLINE
        shared = {
            "WORLD_SIZE": str(ranks), "MASTER_ADDR": host, "MASTER_PORT": str(port), "HETERO_JOB_SECRET": secret,
            "TORCHELASTIC_USE_AGENT_STORE": "True", "HETERO_LAUNCHER": "1", "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
        self.processes = []
        for rank in range(ranks):
            mine = [one for one in happenings if one.member == rank]
            own, more = devices[rank] if devices else ((), {})
            environment = {**ENVIRONMENT, **more, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment["HETERO_NODE"] = f"rank{rank}"
            process = context.Process(target=_rank, args=([*words, *own], environment, str(log), mine), daemon=True)
            process.start()
            self.processes.append(process)

    def poll(self) -> dict[int, int]:
        assert time.monotonic() < self.deadline, "the run hangs"
        return {i: p.exitcode for i, p in enumerate(self.processes) if p.exitcode is not None}

    def end(self, rank: int) -> None:
        self.processes[rank].kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@dataclass(frozen=True)
class ElasticRun:
    """How a run went.

    Attributes:
        code: of its launcher; output: of ranks and launcher.
        steps: of metrics.jsonl, in order; epochs: (text, steps that were done when it began) of the elastic events.
    """

    code: int
    output: str
    steps: list[dict[str, Any]]
    epochs: list[tuple[str, int]]


def run_elastic(
    directory: Path, plans: Sequence[Path], words: Sequence[str], ranks: int, happenings: Sequence[Happening],
    fits: Callable[[int], Path | None] | None, grace: float = 30.0, losses: int = 10, hosts: Sequence[Host] = (),
    devices: Devices = (), islands: Sequence[Sequence[int]] = (),
) -> ElasticRun:  # fmt: skip
    """A run that begins with ``plans[0]``, to its end.

    Args:
        fits: the plan for so many ranks; None: the command's own choice.
        hosts: join it.
        devices: of the ranks that it begins with; islands: those that are lost together.
    """
    log, said = directory / "output", list[str]()
    flags = ["--plan", str(plans[0]), *words, "--elastic"]
    together = tuple(frozenset(f"rank{r}" for r in island) for island in islands)
    setup = Setup(plans[0], tuple(Seat(f"rank{r}", 0, device=r) for r in range(ranks)), together=together)
    (directory / "run").mkdir(exist_ok=True)
    run = directory / "run"
    elastic = [*words, "--elastic"]
    config = configured(elastic, plans[0], None, ranks)
    chosen = planner_for(elastic, config, setup, plans[1:], run, True) if fits is None else None
    supervisor = InPlaceSupervisor(
        setup, lambda host, port: ForkedRanks(flags, ranks, happenings, log, host, port, devices),
        chosen or (lambda seats, _: fits(len(seats))), losses, grace, run, said.append,
        lambda host, port, secret: JobFile(
            host, port, secret.decode(), str(plans[0]), "", flags[2:], str(ROOT)
        ).write(run) and None,
        least_speed=0.0, wait=60.0 if hosts else 0.0,
    )  # fmt: skip
    context = mp.get_context("forkserver")
    joining = [context.Process(target=host.run, args=(str(run), str(log))) for host in hosts]
    for process in joining:
        process.start()
    code = supervisor.run()
    for process in joining:
        process.join(10)
        process.kill()
    steps, events = (_lines(directory / "run" / name) for name in ("metrics.jsonl", "events.jsonl"))
    epochs = [(e["text"], e["step"]) for e in events if e["kind"] == "elastic"]
    output = (log.read_text() if log.exists() else "") + "\n".join(said)
    return ElasticRun(code, output, [s for s in steps if "loss" in s], epochs)


def run_segments(
    directory: Path, words: Sequence[str], segments: Sequence[tuple[Path, int, int]],
    devices_by_count: Mapping[int, Devices] = MappingProxyType({}),
) -> list[dict[str, Any]]:  # fmt: skip
    """The same run without an event, metrics of its steps: each (plan, its ranks, last step) begins anew, from the
    checkpoint of the one before."""
    for i, (plan, ranks, last) in enumerate(segments):
        flags, store = ["--plan", str(plan), *words, "--exit-interval", str(last)], JobStore()
        job = ForkedRanks(
            flags, ranks, (), directory / f"output-{i}", store.host, store.port, devices_by_count.get(ranks, ())
        )
        try:
            while len(codes := job.poll()) < ranks:
                time.sleep(0.02)
            assert set(codes.values()) == {0}, (directory / f"output-{i}").read_text()
        finally:
            job.kill()
    return [s for s in _lines(directory / "run" / "metrics.jsonl") if "loss" in s]


def final_state(directory: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the latest checkpoint, whole."""
    found = open_checkpoint(str(directory / "run"), None)
    assert found is not None
    shapes = {name: found.shape(name) for name in found.metadata.state_dict_metadata}
    tensors = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in shapes.items() if shape}
    boxed = {n: BoxedTensor(tuple(t.shape), [(Box.whole(tuple(t.shape)), t)]) for n, t in tensors.items()}
    found.read_into(boxed, Comm(0, torch.device("cpu"), timedelta(seconds=1)).group([0]))
    return tensors


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
