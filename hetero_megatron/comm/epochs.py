"""Who is in a job that goes on while ranks come and go: epochs, in the launcher's store.

An epoch is a set of members (processes, numbered once and for all), each with a rank, under one plan. Its number is in
the keys of everything that its ranks exchange to find each other (``start_comm``: the round), so a member of an earlier
one never meets those of a later one. The launcher says who is in the next epoch; members say that they have stopped.
A host that wants to join asks; its processes become members once the launcher has admitted them, and are ready.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hetero_megatron.comm.job_store import KeyStore, LastingStore, Records, StoreGone
from hetero_megatron.comm.work import CommError
from hetero_megatron.environment.launcher import LauncherEnvironment

SCOPE = "elastic"
LOOK_SECONDS = 0.02  # interval at which a member looks whether the next epoch is there
WATCH_SECONDS = 0.05  # the same of its thread, whether this one is over
PATIENCE = 30.0  # seconds that the launcher's store may not answer


@dataclass(frozen=True)
class Epoch:
    """What the launcher says of one.

    Attributes:
        members: of its ranks 0, 1, 2, …
        plan, cluster: files; an empty ``cluster``: none.
        joined: members that were in none before.
        event: what happened, for people.
        notice, plan_seconds: what it took until all members that are left had stopped, and to find the plan.
    """

    number: int
    members: list[int]
    plan: str
    cluster: str
    joined: list[int]
    event: str
    notice: float
    plan_seconds: float


@dataclass(frozen=True)
class JoinRequest:
    """What a host says that wants to join.

    Attributes:
        token: of this request; two are never alike.
        node: its name in the cluster file; without one a label.
        chips: processes that it will start.
        cluster: content of a cluster file with this node in it; empty: the job's has it, or there is none.
        program: what must be alike, by what messages call it.
    """

    token: str
    node: str
    chips: int
    cluster: str
    program: dict[str, str]


@dataclass(frozen=True)
class JoinAnswer:
    """The launcher's. ``refused``: why not; empty: the host's processes are these members. ``ranks``: of the first
    epoch, which begins with them; 0: they join a later one."""

    refused: str
    members: list[int]
    ranks: int


@dataclass(frozen=True)
class Speed:
    """How fast a member's device is: FLOP/s of products, as its kind of device measures them itself."""

    kind: str
    flops: float


@dataclass(frozen=True)
class Drifted:
    """Ranks that compute more slowly than they should in ``dtype``; ``ratios``: by rank, how many times as long."""

    dtype: str
    ratios: dict[str, float]


class EpochStore:
    """The records of all epochs; the launcher's side and a member's.

    Args:
        store: the launcher's, for keys of this job only.
    """

    def __init__(self, store: KeyStore, secret: bytes) -> None:
        self._records = Records(store, secret, SCOPE)

    @staticmethod
    def of_member(launcher: LauncherEnvironment) -> EpochStore:
        """A connection of its own: a thread's waits hold up no other's."""
        return EpochStore(LastingStore(*launcher.rendezvous_address, PATIENCE, SCOPE), launcher.secret)

    def publish(self, epoch: Epoch) -> None:
        self._records.set(f"epoch/{epoch.number}", epoch)

    def find(self, number: int) -> Epoch | None:
        return self._one(f"epoch/{number}", Epoch)  # type: ignore[return-value]

    def has_begun(self, number: int) -> bool:
        return self._has(f"epoch/{number}")

    def break_off(self, number: int) -> None:
        """All members of epoch ``number`` are to stop what they do: one is lost."""
        self._records.set(f"broken/{number}", True)

    def broken(self, number: int) -> bool:
        return self._has(f"broken/{number}")

    def call_off(self, reason: str) -> None:
        """The job is to stop after the step; ``reason``: a signal's name."""
        self._records.set("stop", reason)

    def called_off(self) -> str:
        return self._one("stop", str) or ""  # type: ignore[return-value]

    def stopped(self, number: int, member: int, by_failure: bool) -> None:
        """A member has left epoch ``number``, and waits for the next."""
        self._records.set(f"stopped/{number}/{member}", by_failure)

    def has_stopped(self, number: int, members: Iterable[int]) -> dict[int, bool]:
        """By member that waits for the next epoch: whether it saw a failure."""
        failed_by_member = {m: self._one(f"stopped/{number}/{m}", bool) for m in members}
        return {m: bool(failed) for m, failed in failed_by_member.items() if failed is not None}

    def cannot_reach(self, number: int, member: int, ranks: list[int]) -> None:
        """What a member saw when it left epoch ``number``: ranks of it that it does not reach."""
        self._records.set(f"unreachable/{number}/{member}", ranks)

    def unreachable(self, number: int, member: int) -> list[int]:
        return self._one(f"unreachable/{number}/{member}", list[int]) or []  # type: ignore[return-value, arg-type]

    def leave(self, member: int, why: str) -> None:
        """A member is about to end, and has given all away that others need."""
        self._records.set(f"left/{member}", why)

    def left(self, member: int) -> str:
        return self._one(f"left/{member}", str) or ""  # type: ignore[return-value]

    def pause(self, number: int) -> None:
        """All members of epoch ``number`` are to leave it at a step's end: a host joins."""
        self._records.set(f"paused/{number}", True)

    def paused(self, number: int) -> bool:
        return self._has(f"paused/{number}")

    def tell_drift(self, number: int, drift: Drifted) -> None:
        """Of ranks of epoch ``number``; what was told before is replaced."""
        self._records.set(f"drifted/{number}", drift)

    def drifted(self, number: int) -> Drifted | None:
        return self._one(f"drifted/{number}", Drifted)  # type: ignore[return-value]

    def ask_to_join(self, request: JoinRequest) -> int:
        """Number of the request, which is written once, whoever else asks at the same time."""
        number = 0
        while True:
            key = f"request/{number}"
            sealed = self._records.store.compare_set(key, "", self._records.seal(key, request))
            if self._records.open(key, sealed, JoinRequest).token == request.token:
                return number
            number += 1

    def join_request(self, number: int) -> JoinRequest | None:
        return self._one(f"request/{number}", JoinRequest)  # type: ignore[return-value]

    def answer(self, number: int, answer: JoinAnswer) -> None:
        self._records.set(f"answer/{number}", answer)

    def join_answer(self, number: int) -> JoinAnswer | None:
        return self._one(f"answer/{number}", JoinAnswer)  # type: ignore[return-value]

    def ready(self, member: int, speed: Speed) -> None:
        """It has loaded what it needs: it trains, or waits for its first epoch."""
        self._records.set(f"ready/{member}", speed)

    def speeds(self, members: Iterable[int]) -> dict[int, Speed]:
        """Of those that are ready."""
        speeds = {m: self._one(f"ready/{m}", Speed) for m in members}
        return {m: speed for m, speed in speeds.items() if isinstance(speed, Speed)}

    def refuse(self, member: int, why: str) -> None:
        """A host that was admitted does not join after all."""
        self._records.set(f"refused/{member}", why)

    def refused(self, member: int) -> str:
        return self._one(f"refused/{member}", str) or ""  # type: ignore[return-value]

    def admit(self, member: int, number: int) -> None:
        self._records.set(f"first/{member}", number)

    def first_epoch(self, member: int) -> int | None:
        """The first epoch of a process that joins; None: it is in none yet."""
        return self._one(f"first/{member}", int)  # type: ignore[return-value]

    def ended(self, member: int, code: int) -> None:
        """A process on a host that joined has ended; ``code``: -N for signal N."""
        self._records.set(f"ended/{member}", code)

    def exit_codes(self, members: Iterable[int]) -> dict[int, int]:
        """Of those that have ended."""
        codes = {m: self._one(f"ended/{m}", int) for m in members}
        return {m: code for m, code in codes.items() if isinstance(code, int)}

    def end_job(self, code: int) -> None:
        """The job is over: nobody joins any more; ``code``: its exit code."""
        self._records.set("over", code)

    def job_code(self) -> int | None:
        """Exit code of the job; None: it goes on."""
        return self._one("over", int)  # type: ignore[return-value]

    def _has(self, key: str) -> bool:
        return bool(self._records.store.check([key]))

    def _one(self, key: str, kind: type) -> object | None:
        return self._records.get([key], kind)[0] if self._has(key) else None


class Fence:
    """What a member asks before it writes something that outlasts it: whether its epoch is still the newest. One that
    hung, and was counted as lost, finds out when it wakes up.

    Args:
        store: a connection for this alone.
        rank: for messages.
    """

    def __init__(self, store: EpochStore, number: int, rank: int) -> None:
        self._store, self._number, self._rank, self._lock = store, number, rank, threading.Lock()

    def check(self) -> None:
        """From any thread.

        Raises:
            CommError: it is not, or there is no launcher any more to say so.
        """
        try:
            with self._lock:
                is_over = self._store.has_begun(self._number + 1)
        except StoreGone as error:
            raise CommError(f"rank {self._rank} writes nothing more: {error}", self._rank) from None
        if is_over:
            problem = f"epoch {self._number} of the job is over, and it goes on in a later one"
            raise CommError(f"rank {self._rank} writes nothing more: {problem}", self._rank)


class EpochWatch:
    """A member's thread that looks whether its epoch is over: whoever waits for a transfer asks it.

    Attributes:
        called_off: why the job is to stop; empty: it is not.
        paused: whether this epoch is to end at a step's end.
        gone: why there is no launcher any more; empty: there is.
        when_broken: called in the thread, perhaps more than once, when this epoch is.
    """

    def __init__(self, store: EpochStore) -> None:
        self._store, self.called_off, self.paused, self.gone = store, "", False, ""
        self._number, self._broken, self._ended = 0, False, False
        self.when_broken: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True, name="epochs").start()

    def begin(self, number: int) -> None:
        """Epoch ``number`` is the one that counts."""
        with self._lock:
            self._number, self._broken, self.paused, self.when_broken = number, False, False, lambda: None

    def broken(self) -> bool:
        """Whether a member of this epoch is lost, or the launcher, as far as this process knows."""
        return self._broken or bool(self.gone)

    def close(self) -> None:
        self._ended = True

    def _run(self) -> None:
        while not self._ended and not self.gone:
            number = self._number
            try:
                broken, paused = self._store.broken(number), self._store.paused(number)
                self.called_off = self.called_off or self._store.called_off()
            except StoreGone as error:
                self.gone = str(error)
                self.when_broken()
                return
            with self._lock:
                if number == self._number:
                    self._broken, self.paused = self._broken or broken, self.paused or paused
                when_broken = self.when_broken if self._broken else None
            if when_broken is not None:
                when_broken()
            time.sleep(WATCH_SECONDS)


def await_epoch(store: EpochStore, number: int, seconds: float) -> Epoch | None:
    """What the launcher says of epoch ``number``; None: nothing for so long."""
    end = time.monotonic() + seconds
    while (epoch := store.find(number)) is None:
        if time.monotonic() > end:
            return None
        time.sleep(LOOK_SECONDS)
    return epoch


def await_first_epoch(store: EpochStore, member: int) -> int:
    """Number of the first epoch of a process that joins. Whoever started it ends it when the job is over."""
    while (epoch := store.first_epoch(member)) is None:
        time.sleep(LOOK_SECONDS)
    return epoch
