"""Rendezvous of a job's ranks in its store, with reasons for failures.

Every rank writes one record: its identity, the expected number of ranks, its address. Duplicate ranks and different
expected numbers are detected here, and the other ranks are told why the job ends.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from hetero_megatron.comm.comm import first_line
from hetero_megatron.comm.connectivity import PATIENCE, UNREACHABLE, Address, Reach, explain
from hetero_megatron.comm.errors import CommError
from hetero_megatron.comm.store import Records, await_listener, open_listener, serve
from hetero_megatron.comm.timeouts import within
from hetero_megatron.environment.launcher import LauncherEnvironment
from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import plural

LOOK_SECONDS = 0.5  # longest interval between two reads of the records
REFUSED = "hetero_megatron/refused"


@dataclass(frozen=True)
class RankRecord:
    """A rank's record. ``launched_as``: its rank by the launcher; ``address``: None where it cannot listen."""

    rank: int
    launched_as: int
    world_size: int
    host: str
    pid: int
    token: str
    address: Address | None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Rendezvous:
    """One rank's joining of the job.

    Args:
        rank: in the plan; a cluster file may have changed the launcher's.
        timeout: for all ranks to join.
    """

    def __init__(self, launcher: LauncherEnvironment, rank: int, timeout: timedelta) -> None:
        self.launcher, self.rank, self.timeout = launcher, rank, timeout
        self.others = [r for r in range(launcher.world_size) if r != rank]
        self.started = time.monotonic()
        self._records: Records | None = None

    @property
    def where(self) -> str:
        host, port = self.launcher.meeting_point
        return f"{host}:{port}"

    def join(self, address: Address | None) -> tuple[dist.Store, list[RankRecord]]:
        """(the store of this round, the records of all ranks).

        Raises:
            UserError: the port is taken, two processes claim one rank, or ranks expect different numbers of ranks.
            CommError: not all ranks joined.
        """
        launcher = self.launcher
        me = RankRecord(
            self.rank, launcher.rank, launcher.world_size, socket.gethostname(), os.getpid(), secrets.token_hex(8),
            address,
        )  # fmt: skip
        try:
            # torchrun's agent keeps one store for all rounds: without a prefix restarted ranks connect to dead peers.
            scope = f"round/{launcher.restarts}"
            store = dist.PrefixStore(scope, self._open())
            self._records = Records(store, launcher.secret, scope)
            self._claim(self._records, me)
            return store, self._wait(self._records, me)
        except RuntimeError as error:
            raise self._failed(error) from error

    def _open(self) -> dist.Store:
        launcher = self.launcher
        host, port = launcher.meeting_point
        if launcher.agent_store or launcher.rank != 0:
            await_listener(host, port, self.timeout)
            return dist.TCPStore(host, port, is_master=False, timeout=self.timeout)
        try:
            return serve(open_listener(launcher), host, self.timeout)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                problem, accepted = f"rank 0 cannot listen there: {error.strerror}", "an address of rank 0's host"
                raise UserError(problem, field="MASTER_ADDR", value=self.where, accepted=accepted) from None
        first = within(PATIENCE, self._first_member)
        whose = f"{first} has rank 0 as well" if first is not None else "another program listens there"
        raise UserError(
            f"rank 0 cannot open the rendezvous store at {self.where}: {whose}", field="MASTER_PORT", value=port,
            accepted="one process of each rank, and a free port, the same for all ranks", where="environment",
        )  # fmt: skip

    def _first_member(self) -> RankRecord:
        """The other process that claims rank 0, which is told to leave."""
        host, port = self.launcher.meeting_point
        scope = f"round/{self.launcher.restarts}"
        client = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=PATIENCE))
        records = Records(dist.PrefixStore(scope, client), self.launcher.secret, scope)
        (first,) = records.get([_key(0)], RankRecord)
        assert isinstance(first, RankRecord)
        records.set(REFUSED, f"process {os.getpid()} on {socket.gethostname()} and {first} are both rank 0")
        return first

    def _claim(self, records: Records, me: RankRecord) -> None:
        """Refuse the second process with the same rank; otherwise both would wait forever."""
        key = _key(me.rank)
        found = records.open(key, records.store.compare_set(key, "", records.seal(key, me)), RankRecord)
        if found.token == me.token:
            return
        text = f"{found} and {me} are both rank {me.rank}"
        renumbered = (found.launched_as, me.launched_as) != (me.rank, me.rank)
        if renumbered:
            text += f" of the cluster file (torchrun's ranks {found.launched_as} and {me.launched_as})"
        records.set(REFUSED, text)
        if renumbered:
            node = self.launcher.node or "not set"
            raise UserError(text, field="HETERO_NODE", value=node, accepted="one process per chip")
        raise UserError(text, field="RANK", value=me.rank, accepted="one process of each rank", where="environment")

    def _wait(self, records: Records, me: RankRecord) -> list[RankRecord]:
        keys = [_key(rank) for rank in range(me.world_size)]
        pause = 0.01  # asked again and again: torch's own waiting cannot be interrupted, and warns when it is over
        while not records.store.check(keys):
            self._look(records, me)
            if time.monotonic() - self.started > self.timeout.total_seconds():
                raise RuntimeError("not all ranks came")
            time.sleep(pause)
            pause = min(1.5 * pause, LOOK_SECONDS)
        self._look(records, me)
        members = records.get(keys, RankRecord)
        for member in members:
            self._same_size(member, me)
        return members

    def _look(self, records: Records, me: RankRecord) -> None:
        """Raise if another rank has ended the job or expects another number of ranks."""
        if records.store.check([REFUSED]):
            (text,) = records.get([REFUSED], str)
            raise UserError(text, field="RANK", value=me.rank, accepted="one process of each rank", where="environment")
        if records.store.check([_key(0)]):
            (first,) = records.get([_key(0)], RankRecord)
            self._same_size(first, me)

    def _same_size(self, other: RankRecord, me: RankRecord) -> None:
        if other.world_size != me.world_size:
            raise UserError(
                f"rank {other.rank} ({other}) was told of {other.world_size} ranks, rank {me.rank} ({me}) of "
                f"{me.world_size}", field="WORLD_SIZE", value=me.world_size, accepted="the same number for all ranks",
                where="environment",
            )  # fmt: skip

    def _failed(self, error: Exception) -> CommError:
        """The error for a failed join: ranks that did not join, or that cannot be reached."""
        seconds, others = time.monotonic() - self.started, self.others
        records = self._records
        came = within(PATIENCE, lambda: self._joined_ranks(records)) if records is not None else None
        reach = Reach(self.rank, [(came or {}).get(r) for r in range(len(others) + 1)]).look(came or ())
        absent = [r for r in others if came is not None and r not in came]
        peers = [r for r in others if reach.get(r) == UNREACHABLE] or absent or others
        if came is None:
            why = f"the rendezvous store at {self.where} does not answer, or not all came to it"
        elif absent and UNREACHABLE not in reach.values():
            why = f"rank {', '.join(map(str, absent[:8]))} never came"
        else:
            why = explain(peers, reach)
        return CommError(
            f"rank {self.rank}, joining the job, waited {seconds:.1f} s for {plural(len(others), 'other rank')}: "
            f"{why} [{first_line(error)}]",
            self.rank, peers, seconds, "joining the job", reach,
        )  # fmt: skip

    def _joined_ranks(self, records: Records) -> dict[int, Address | None]:
        """Addresses of the ranks that have written their record."""
        came = [r for r in self.others if records.store.check([_key(r)])]
        return dict(zip(came, (m.address for m in records.get([_key(r) for r in came], RankRecord)), strict=True))


def _key(rank: int) -> str:
    return f"hetero_megatron/member/{rank}"
