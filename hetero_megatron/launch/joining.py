"""The agent of one host of an elastic job: how it finds the launcher, and what it does there.

It asks the launcher through its store, starts this host's processes once it is admitted, and tells the launcher how
they end. The launcher's command brings agents to the hosts that the first epoch begins with (over ssh, or as workers of
torchrun); with ``hetero-megatron run --join DIR`` a host joins later. Its processes load everything before the job
pauses for them. Over ssh it is started by

    HETERO_JOB_SECRET=... python -m hetero_megatron.launch.joining '{"job": {...}, "node": "a", "chips": 1, ...}'
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from hetero_megatron.cluster import load_cluster
from hetero_megatron.comm.epochs import SCOPE, EpochStore, JoinAnswer, JoinRequest
from hetero_megatron.comm.job_store import LastingStore, StoreGone, await_listener
from hetero_megatron.environment.launcher import JOINS, SECRET
from hetero_megatron.environment.network import gloo_towards
from hetero_megatron.errors import UserError
from hetero_megatron.launch.jobs import LocalJob, Seat, Setup
from hetero_megatron.launch.supervise import PEER_ERROR, USER_ERROR, say_code
from hetero_megatron.monitoring.log_fields import array, integer, record, require, text
from hetero_megatron.training.exit import end_process, handled, note_hang_up
from hetero_megatron.utils.files import read_json_object, read_text
from hetero_megatron.utils.text import plural

JOB_FILE = "elastic.json"
LOOK_SECONDS = 0.05
CONNECT_SECONDS = 20.0  # that the launcher may not answer
ANSWER_SECONDS = 60.0
_JOB = record({
    "host": text, "port": integer(1, 65535), "secret": text, "plan": text, "cluster": text, "words": array(text),
    "folder": text,
})  # fmt: skip


@dataclass(frozen=True)
class JobFile:
    """Where a job is met, and what its processes run.

    Attributes:
        host, port: of the launcher's store.
        plan, cluster: files; an empty ``cluster``: none.
        words: flags of pretrain_gpt.py.
        folder: in which relative paths mean what they mean to the job.
    """

    host: str
    port: int
    secret: str
    plan: str
    cluster: str
    words: list[str]
    folder: str

    def write(self, directory: Path) -> Path:
        """Only for this user's eyes: who has the secret may speak for the job."""
        path = directory / JOB_FILE
        part = path.with_name(f".{JOB_FILE}.{os.getpid()}")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(asdict(self), file)
        part.replace(path)
        return path


def read_job(directory: Path) -> JobFile:
    """UserError: no elastic job writes there, or the file is not one's."""
    path = directory / JOB_FILE
    if not path.exists():
        raise UserError(
            f"no elastic job runs there: it has no {JOB_FILE}", field="--join", value=str(directory),
            accepted="the --save directory of a job of hetero-megatron run --elastic, on a file system that both hosts "
            "share",
        )  # fmt: skip
    job_file = read_json_object(path)
    require(job_file, _JOB, "what an elastic job writes", str(path))
    return JobFile(**{name: job_file[name] for name in JobFile.__dataclass_fields__})


class HostJob(Protocol):
    """The processes of one host, by member."""

    @property
    def ranks(self) -> list[int]: ...

    def poll(self) -> dict[int, int]:
        """Exit codes of those that have ended, -N for signal N."""

    def signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


def _start(setup: Setup, job: JobFile, answer: JoinAnswer) -> HostJob:
    variables = gloo_towards(job.host) | ({} if answer.ranks else {JOINS: "1"})
    return LocalJob(
        setup, job.words, job.host, job.port, 0, None, answer.members[0], variables, job.secret, answer.ranks, True
    )


class Joining:
    """This host's part of the job.

    Args:
        job: where the launcher is met, and what the processes run.
        node: its name in the cluster file; None: this host's. Without a cluster, a label.
        chips: processes; None: all chips that the cluster file gives it, one without a cluster.
        cluster: a cluster file with this node in it, where the job's has none.
        program: what starts a process.
        start: starts the processes, given what they run, the job, and the launcher's answer.
        found: flag and value by which this host found the job, for messages.
        stays: it lasts as long as the job, and ends as that does, unless it is told to leave.
    """

    def __init__(
        self, job: JobFile, node: str | None, chips: int | None, cluster: Path | None, program: Sequence[str],
        log: Callable[[str], None], start: Callable[[Setup, JobFile, JoinAnswer], HostJob] | None = None,
        found: tuple[str, str] = ("--join", ""), stays: bool = False,
    ) -> None:  # fmt: skip
        self.job, self.log, self.stays, self._found, self._signal = job, log, stays, found, 0
        self.program, self._start = tuple(program), start or _start
        file = str(cluster) if cluster is not None else self.job.cluster
        self.node = node or (socket.gethostname() if file else f"{socket.gethostname()}-{secrets.token_hex(2)}")
        self.chips = _chips(Path(file), self.node) if file else chips or 1
        if file and chips not in (None, self.chips):
            problem = f"the cluster file gives {self.node} {plural(self.chips, 'chip')}"
            raise UserError(problem, field="--nproc-per-node", value=chips, accepted=str(self.chips))
        self.cluster = cluster.absolute() if cluster is not None else None
        try:
            await_listener(self.job.host, self.job.port, timedelta(0))  # torch tries again and again
            store = LastingStore(self.job.host, self.job.port, CONNECT_SECONDS, SCOPE)
        except RuntimeError:
            raise UserError(
                f"its launcher does not answer at {self.job.host}:{self.job.port}: the job is over, or this host does "
                "not reach it", field=found[0], value=found[1], accepted="a running job, which was started with "
                "--address where hosts other than its own are to join",
            ) from None  # fmt: skip
        self.store = EpochStore(store, self.job.secret.encode())

    def run(self) -> int:
        """Until this host's processes have ended, or the job has. Returns the exit code."""
        try:
            return self._run()
        except StoreGone:
            self.log(f"{self.node}: the launcher is gone")
            return PEER_ERROR

    def _run(self) -> int:
        old_handlers = {s: signal.signal(s, self._on_signal) for s in handled(("SIGTERM", "SIGINT", "SIGHUP"))}
        job: HostJob | None = None
        try:
            answer = self._ask()
            if not answer.ranks:
                count = plural(self.chips, "process", "processes")
                self.log(f"{self.node}: admitted with {count}, which load what they need")
            seats = tuple(Seat(self.node, i, None if self._file else i) for i in range(self.chips))
            setup = Setup(Path(self.job.plan), seats, self._file, self.program)
            os.chdir(self.job.folder)
            job = self._start(setup, self.job, answer)
            code = self._watch(job, answer.ranks > 0)
            return self._await_end(code) if self.stays else code
        finally:
            if job is not None:
                job.kill()
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

    def _await_end(self, code: int) -> int:
        """Until the job is over; its exit code, or ``code`` where this host is told to leave."""
        while not self._signal:
            if (job_code := self.store.job_code()) is not None:
                return job_code
            time.sleep(LOOK_SECONDS)
        return code

    @property
    def _file(self) -> Path | None:
        """The cluster file that this host's processes read."""
        return self.cluster or (Path(self.job.cluster) if self.job.cluster else None)

    def _ask(self) -> JoinAnswer:
        from hetero_megatron.training.agreement import program_facts

        content = read_text(self.cluster) if self.cluster is not None else ""
        request = JoinRequest(secrets.token_hex(8), self.node, self.chips, content, program_facts())
        number, end = self.store.ask_to_join(request), time.monotonic() + ANSWER_SECONDS
        while (answer := self.store.join_answer(number)) is None:
            if self.store.job_code() is not None or time.monotonic() > end:
                raise UserError("the job is over", field=self._found[0], accepted="a running job")
            if self._signal:
                raise UserError("stopped before the launcher answered", field=self._found[0], value=self.node)
            time.sleep(LOOK_SECONDS)
        if answer.refused:
            raise UserError(answer.refused, field=self._found[0], value=self.node)
        return answer

    def _watch(self, job: HostJob, is_in: bool) -> int:
        """``is_in``: its processes are in the first epoch, and do not join a later one."""
        codes_told: dict[int, int] = {}
        forwarded = 0
        while len(codes_told) < len(job.ranks):
            for member, code in job.poll().items():
                if member not in codes_told:
                    codes_told[member] = code
                    self.store.ended(member, code)
            if self._signal and not forwarded:  # they hand over after the step, and leave
                forwarded = self._signal
                job.signal(signal.SIGTERM)
            if refusal := self.store.refused(job.ranks[0]):
                raise UserError(refusal, field=self._found[0], value=self.node)
            if self.store.job_code() is not None:
                if not is_in and not any(self.store.first_epoch(m) is not None for m in job.ranks):
                    self.log(f"{self.node}: the job ended before it joined")
                    return 0
                job.kill()  # as the launcher has done with its own
            time.sleep(LOOK_SECONDS)
        failed = {member: code for member, code in codes_told.items() if code}
        for member, code in failed.items():
            self.log(f"{self.node}: process {member} ended with {say_code(code)}")
        codes = [code if code > 0 else 128 - code for code in failed.values()]
        return USER_ERROR if USER_ERROR in codes else codes[0] if codes else 0

    def _on_signal(self, number: int, _: object) -> None:
        note_hang_up(number)
        self._signal = number


def _chips(cluster: Path, node: str) -> int:
    """Chips of a node. UserError: the file has no such node."""
    names = [rank.node for rank in load_cluster(cluster).ranks]
    if node not in names:
        node_names = ", ".join(list(dict.fromkeys(names))[:8])
        raise UserError(
            "the cluster file has no such node", field="--node", value=node, where=str(cluster),
            accepted=f"one of {node_names}; or --cluster FILE with all nodes, this one too",
        )  # fmt: skip
    return names.count(node)


def main(argument: str) -> int:
    """Exit code of the host's part of the job."""
    settings = json.loads(argument)
    job = JobFile(**settings["job"], secret=os.environ[SECRET])
    log = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    found, node = ("--via", "ssh"), settings["node"]
    try:
        return Joining(job, node, settings["chips"], None, settings["program"], log, found=found).run()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return USER_ERROR


if __name__ == "__main__":
    end_process(main(sys.argv[1]))
