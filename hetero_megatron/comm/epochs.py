"""Who is in a job that goes on while ranks come and go: epochs, in the launcher's store.

An epoch is a set of members (processes, numbered once and for all), each with a rank, under one plan. Its number is in
the keys of everything that its ranks exchange to find each other (``start_comm``: the round), so a member of an earlier
one never meets those of a later one. The launcher says who is in the next epoch; members say that they have stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from hetero_megatron.comm.job_store import Records, connect_store
from hetero_megatron.environment.launcher import LauncherEnvironment

SCOPE = "elastic"
LOOK_SECONDS = 0.02  # interval at which a member looks whether the next epoch is there
WATCH_SECONDS = 0.05  # the same of its thread, whether this one is over
PATIENCE = timedelta(seconds=30)


@dataclass(frozen=True)
class Epoch:
    """What the launcher says of one.

    Attributes:
        members: of its ranks 0, 1, 2, …
        plan, cluster: files; an empty ``cluster``: none.
        lost: what happened, for people.
        notice, plan_seconds: what it took until all members that are left had stopped, and to find the plan.
    """

    number: int
    members: list[int]
    plan: str
    cluster: str
    lost: str
    notice: float
    plan_seconds: float


class EpochStore:
    """The records of all epochs; the launcher's side and a member's.

    Args:
        store: the launcher's, for keys of this job only.
    """

    def __init__(self, store: dist.Store, secret: bytes) -> None:
        self._records = Records(store, secret, SCOPE)

    @staticmethod
    def of_member(launcher: LauncherEnvironment) -> EpochStore:
        """A connection of its own: a thread's waits hold up no other's."""
        return EpochStore(connect_store(*launcher.meeting_point, PATIENCE, SCOPE), launcher.secret)

    def publish(self, epoch: Epoch) -> None:
        self._records.set(f"epoch/{epoch.number}", epoch)

    def find(self, number: int) -> Epoch | None:
        return self._one(f"epoch/{number}", Epoch)  # type: ignore[return-value]

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
        found = {m: self._one(f"stopped/{number}/{m}", bool) for m in members}
        return {m: bool(failed) for m, failed in found.items() if failed is not None}

    def leave(self, member: int, why: str) -> None:
        """A member is about to end, and has given all away that others need."""
        self._records.set(f"left/{member}", why)

    def left(self, member: int) -> str:
        return self._one(f"left/{member}", str) or ""  # type: ignore[return-value]

    def _has(self, key: str) -> bool:
        return bool(self._records.store.check([key]))

    def _one(self, key: str, kind: type) -> object | None:
        return self._records.get([key], kind)[0] if self._has(key) else None


class EpochWatch:
    """A member's thread that looks whether its epoch is over: whoever waits for a transfer asks it.

    Attributes:
        called_off: why the job is to stop; empty: it is not.
    """

    def __init__(self, store: EpochStore) -> None:
        self._store, self.called_off = store, ""
        self._number, self._broken, self._ended = 0, False, False
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True, name="epochs").start()

    def begin(self, number: int) -> None:
        """Epoch ``number`` is the one that counts."""
        with self._lock:
            self._number, self._broken = number, False

    def broken(self) -> bool:
        """Whether a member of this epoch is lost, as far as this process knows."""
        return self._broken

    def close(self) -> None:
        self._ended = True

    def _run(self) -> None:
        with suppress(RuntimeError):  # the launcher is gone, and this process with it
            while not self._ended:
                number = self._number
                broken = self._store.broken(number)
                self.called_off = self.called_off or self._store.called_off()
                with self._lock:
                    if number == self._number and broken:
                        self._broken = True
                time.sleep(WATCH_SECONDS)


def await_epoch(store: EpochStore, number: int, seconds: float) -> Epoch | None:
    """What the launcher says of epoch ``number``; None: nothing for so long."""
    end = time.monotonic() + seconds
    while (found := store.find(number)) is None:
        if time.monotonic() > end:
            return None
        time.sleep(LOOK_SECONDS)
    return found
