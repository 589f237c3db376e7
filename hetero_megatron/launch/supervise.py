"""A launcher that goes on when ranks fail: restart, or drop what was lost and resume under another plan.

One process per rank on this host (a node is a label, as with ``HETERO_NODE``), with a rendezvous store here, outside
the nodes that may be lost; or on a testbed of this host, which has its own; or on the hosts of the cluster file. Which
plan fits what is left is asked of a ``Planner``: a list of fallback plans, or any callable. Checkpoints do the rest:
they are read under any plan.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import yaml

from hetero_megatron.cluster.edit import without_nodes
from hetero_megatron.cluster.hosts import read_cluster_document
from hetero_megatron.errors import UserError
from hetero_megatron.launch.jobs import LocalJob, Seat, Setup, SupervisedJob
from hetero_megatron.monitoring.record import add_event
from hetero_megatron.monitoring.stragglers import (
    DRIFT,
    DRIFT_FILE,
    cut_pairs,
    diagnoses_at,
    read_diagnoses,
    read_drift,
    take_joined,
    to_drop,
)
from hetero_megatron.training.exit import ECHO_SECONDS, handled, note_hang_up
from hetero_megatron.utils.text import plural
from hetero_megatron.utils.yaml_document import QuotingDumper

USER_ERROR, PEER_ERROR = 2, 3  # exit codes of a rank: its own refusal; a peer that died or does not answer
DRIFT_FLAG = "--replan-on-drift"

# (seats that are left, cluster file of them or None) -> a plan file for them, or None if there is none.
Planner = Callable[[Sequence[Seat], Path | None], Path | None]
# (what ran, what ``read_drift`` gives, number of the next round) -> (what runs next, a sentence about it).
Replanner = Callable[[Setup, Mapping[str, Any], int], tuple[Setup, str]]
# (setup, flags, number of the round) -> its processes.
Launch = Callable[[Setup, Sequence[str], int], SupervisedJob]


class Watch(Protocol):
    """Looks for lost nodes that are back."""

    def look(self, first: Path, lost: set[str], present: set[str]) -> set[str]:
        """Those of ``lost`` that can train again; called often. ``first``: the cluster file with all nodes."""

    def close(self) -> None: ...


@dataclass
class Round:
    """How one round of the job ended: exit codes by rank, ranks that had to be killed because they hung.

    Attributes:
        waiting: ranks that were killed while they waited for others to start: nothing is wrong with them.
        returned: lost nodes that are back, for which the ranks were stopped.
    """

    codes: dict[int, int] = field(default_factory=dict)
    hung: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    stopped: bool = False
    returned: set[str] = field(default_factory=set)

    def lost(self, seats: Sequence[Seat]) -> set[str]:
        """Nodes of ranks that died by a signal, or hung while their peers gave up."""
        dead = {r for r, code in self.codes.items() if code < 0} | self.hung
        return {seats[r].node for r in dead}


class Supervisor:
    """Runs a job to its end.

    Args:
        words: of ``pretrain_gpt.py``, without --plan and --cluster; with --save and --load.
        policy: ``stop``, ``restart`` (the same plan) or ``replan`` (drop the nodes of ranks that died or hung, and of
            nodes that cannot reach each other as few as possible).
        max_restarts: rounds after a failure.
        grace: seconds for the other ranks to say what they saw and end, after the first one failed.
        scratch: folder for the cluster files of what is left; that of --save.
        replanner: asked where ranks stopped because one drifted from its rate; at most ``max_replans`` times, then
            drift is not looked for any more.
        launch: starts the processes of a round; None: on this host.
        watch: while nodes are lost: says which are back; then the ranks save and stop, and go on with them.
    """

    def __init__(
        self,
        setup: Setup,
        words: Sequence[str],
        policy: str,
        planner: Planner,
        max_restarts: int,
        grace: float,
        scratch: Path,
        log: Callable[[str], None] = print,
        replanner: Replanner | None = None,
        max_replans: int = 2,
        launch: Launch | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.setup, self.words, self.policy, self.planner = setup, list(words), policy, planner
        self.max_restarts, self.grace, self.scratch, self._print = max_restarts, grace, scratch, log
        self.replanner, self.max_replans, self.launch, self.watch = replanner, max_replans, launch, watch
        self._whole = setup  # with every node, as far as plans were changed only by drift
        self._next: Setup | None = None  # with nodes that are back
        self._idle: set[frozenset[str]] = set()  # nodes of which no other plan uses all
        self._signalled: int | None = None  # the first signal, and when it came; whether there was another
        self._since, self._again = 0.0, False

    def log(self, text: str) -> None:
        self._print(f"launcher: {text}")
        add_event(self.scratch, "launcher", text)

    def run(self) -> int:
        """Exit code of the job: 0, or that of the round that could not be mended."""
        old_handlers = {s: signal.signal(s, self._on_signal) for s in handled(("SIGTERM", "SIGINT", "SIGHUP"))}
        try:
            return self._rounds(self.launch or _local(self.scratch))
        finally:
            if self.watch is not None:
                self.watch.close()
            for number, handler in old_handlers.items():
                signal.signal(number, handler)

    def _rounds(self, launch: Launch) -> int:
        number = restarts = replans = 0
        while True:
            with suppress(OSError):
                (self.scratch / DRIFT_FILE).unlink()  # of an earlier job
            shutil.rmtree(diagnoses_at(self.scratch, number), ignore_errors=True)
            if self._signalled is not None:  # it came between two rounds
                return 128 + self._signalled
            ended = self._round(launch(self.setup, self.words, number), diagnoses_at(self.scratch, number))
            if self._again:
                assert self._signalled is not None
                return 128 + self._signalled
            code, number = _code(ended), number + 1
            if ended.returned and code == 0 and not ended.stopped:
                self._take_back(ended.returned, number)
                continue
            if ended.stopped or code == 0:
                return 0 if code == DRIFT else code
            if code == DRIFT and self.replanner is not None and (drift := read_drift(self.scratch)) is not None:
                replans += 1
                is_whole = self.setup == self._whole
                self.setup, text = self.replanner(self.setup, drift, number)
                self._whole = self.setup if is_whole else self._whole
                self.log(f"round {number}: {text}")
                if replans == self.max_replans:
                    self.words = without_flag(self.words, DRIFT_FLAG)
                    self.log(f"drift is not looked for any more: planned again {plural(replans, 'time')}")
                continue
            if code == USER_ERROR or self.policy == "stop":
                return code
            if restarts == self.max_restarts:
                self.log(f"gave up after {plural(restarts, 'restart')}")
                return code
            restarts += 1
            self._mend(ended, number)

    def _on_signal(self, number: int, _: object) -> None:
        note_hang_up(number)
        if self._signalled is None:
            self._signalled, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > ECHO_SECONDS:  # `timeout` and terminals send one signal twice
            self._again = True

    def _round(self, job: SupervisedJob, diagnoses: Path) -> Round:
        ended, passed = Round(), False
        first_failure: float | None = None
        try:
            while len(ended.codes) + len(ended.hung) < len(job.ranks):
                if self._signalled is not None and not passed:  # the ranks save, and end with 0
                    job.signal(self._signalled)
                    ended.stopped = passed = True
                    name = signal.Signals(self._signalled).name
                    self.log(f"{name}: the ranks stop after this step, and save; a second signal kills them")
                if self._again:
                    self.log("a second signal: all ranks are killed")
                    return ended
                for rank, code in job.poll().items():
                    ended.codes[rank] = code
                    if code and first_failure is None:
                        first_failure = time.monotonic()
                        self.log(f"rank {rank} ({self._where(rank)}) ended with {say_code(code)}")
                ended.hung = job.hung()
                if not ended.returned and not passed and first_failure is None and (returned := self._back()):
                    ended.returned = returned
                    job.signal(signal.SIGTERM)
                if first_failure is not None and time.monotonic() - first_failure > self.grace:
                    ended.hung |= set(job.ranks) - ended.codes.keys()
                    break
                time.sleep(0.05)
        finally:
            job.kill()
        joined = take_joined(diagnoses)
        if PEER_ERROR not in ended.codes.values() and not joined >= set(job.ranks):
            # Nobody has given up on anybody: a rank that waits for others to start does not notice that one is gone.
            ended.waiting, ended.hung = ended.hung, set()
        for rank in sorted(ended.hung):
            self.log(f"rank {rank} ({self._where(rank)}) did not end in {self.grace:g} s: killed")
        for rank in sorted(ended.waiting):
            self.log(f"rank {rank} ({self._where(rank)}) still waited for all to start: killed")
        return ended

    def _back(self) -> set[str]:
        """Lost nodes that are back, where another plan uses them; it is what runs next."""
        present = {seat.node for seat in self.setup.seats}
        lost_nodes = {seat.node for seat in self._whole.seats} - present
        if self.watch is None or not lost_nodes or self._whole.cluster is None:
            return set()
        returned = self.watch.look(self._whole.cluster, lost_nodes, present)
        key = frozenset(present | returned)
        if not returned or key in self._idle:
            return set()
        candidate = self._with_nodes(present | returned)
        if candidate is None or candidate.plan == self.setup.plan:
            self._idle.add(key)
            self.log(f"{', '.join(sorted(returned))} can be reached again, but no other plan uses it: the job goes on")
            return set()
        self._next = candidate
        self.log(f"{', '.join(sorted(returned))} can be reached again: the ranks stop after this step, and save")
        return returned

    def _with_nodes(self, nodes: set[str]) -> Setup | None:
        """What runs on these of all nodes; None: there is no plan."""
        lost_nodes = {seat.node for seat in self._whole.seats} - nodes
        if not lost_nodes:
            return self._whole
        seats, cluster = self._left(lost_nodes, "next", self._whole)
        plan = self.planner(seats, cluster)
        return None if plan is None else replace(self._whole, plan=plan, seats=tuple(seats), cluster=cluster)

    def _take_back(self, back: set[str], number: int) -> None:
        """The next round with the nodes that are back."""
        assert self._next is not None
        self.setup = self._next
        count = plural(len(self.setup.seats), "rank")
        self.log(f"round {number}: with {', '.join(sorted(back))}, {count}, plan {self.setup.plan}")

    def _where(self, rank: int) -> str:
        seat = self.setup.seats[rank]
        return f"{seat.node}, chip {seat.local}"

    def _mend(self, ended: Round, number: int) -> None:
        """Choose what the next round runs."""
        lost = ended.lost(self.setup.seats)
        lost |= self._cut_off(lost, number - 1)
        if not lost or self.policy != "replan":
            self.log(f"round {number}: the same plan again, from the latest checkpoint")
            return
        seats, cluster = self._left(lost, number)
        plan = self.planner(seats, cluster) if seats else None
        if plan is None:
            raise UserError(
                f"no plan for the {plural(len(seats), 'rank')} that are left without {', '.join(sorted(lost))}",
                field="--fallback-plan", accepted=f"a plan for at most {plural(len(seats), 'rank')}",
            )  # fmt: skip
        self.setup = replace(self.setup, plan=plan, seats=tuple(seats), cluster=cluster)
        self.log(f"round {number}: without {', '.join(sorted(lost))}, {plural(len(seats), 'rank')} left, plan {plan}")

    def _cut_off(self, lost: set[str], number: int) -> set[str]:
        """Beside the lost nodes: those to be dropped because links between nodes carry nothing."""
        diagnoses = read_diagnoses(diagnoses_at(self.scratch, number))
        nodes = [seat.node for seat in self.setup.seats]
        pairs = cut_pairs(diagnoses, nodes, lost)
        order = list(dict.fromkeys(nodes))
        for a, b in sorted(sorted(pair, key=order.index) for pair in pairs):
            self.log(f"{a} and {b} cannot reach each other")
        if pairs or lost:
            for diagnosis in diagnoses:
                self.log(str(diagnosis))
        return to_drop(pairs, nodes)

    def _left(self, lost: set[str], number: int | str, base: Setup | None = None) -> tuple[list[Seat], Path | None]:
        """(seats, cluster file) of ``base``, the present setup, without some nodes."""
        return left_without(base or self.setup, lost, self.scratch, f"round-{number}")


def left_without(setup: Setup, lost: set[str], scratch: Path, name: str) -> tuple[list[Seat], Path | None]:
    """(seats, cluster file) of a setup without some nodes; the file is ``cluster-NAME.yaml`` in ``scratch``."""
    gone = setup.lost_with(lost)
    seats = [s for s in setup.seats if s.node not in gone]
    if setup.cluster is None or not seats:
        return seats, None
    document = without_nodes(read_cluster_document(setup.cluster).plain(), gone)
    path = scratch / f"cluster-{name}.yaml"
    path.write_text(yaml.dump(document, sort_keys=False, Dumper=QuotingDumper))
    return seats, path


def _code(ended: Round) -> int:
    """A refusal wins over what it did to the peers; then whatever a rank itself died of."""
    codes = set(ended.codes.values())
    if not codes - {0} and not ended.hung:
        return 0
    failed_codes = sorted(c if c > 0 else 128 - c for c in codes - {0, PEER_ERROR})
    return USER_ERROR if USER_ERROR in failed_codes else failed_codes[0] if failed_codes else PEER_ERROR


def say_code(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def _local(scratch: Path) -> Launch:
    """Ranks on this host; the rendezvous store is here, and serves all rounds."""
    from hetero_megatron.comm.job_store import JobStore

    store = JobStore()
    return lambda setup, words, number: LocalJob(
        setup, words, store.host, store.port, number, diagnoses_at(scratch, number)
    )


def without_flag(words: Sequence[str], flag: str) -> list[str]:
    """The words without a flag and its value, in either spelling."""
    out: list[str] = []
    words_left = list(words)
    while words_left:
        word = words_left.pop(0)
        if word == flag:
            words_left = words_left[1:]
        elif not word.startswith(flag + "="):
            out.append(word)
    return out
