"""How the ranks of a job meet: the first rank's store, the rendezvous through it, and the communicator that each rank
starts with."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hetero_megatron.comm.comm import Comm
from hetero_megatron.comm.connectivity import PATIENCE, UNREACHABLE, Address, Connectivity, Sockets, explain, listen
from hetero_megatron.comm.group import Group
from hetero_megatron.comm.hooks import Hooks
from hetero_megatron.comm.islands import AUTO, Endpoint, Islands
from hetero_megatron.comm.job_store import Records, await_listener, open_listener, serve
from hetero_megatron.comm.work import CommError, copies_of, first_line, within
from hetero_megatron.environment.launcher import LauncherEnvironment, loopback_interface, read_launcher
from hetero_megatron.errors import UserError
from hetero_megatron.platform import Platform
from hetero_megatron.platform.platform import keep_freed_memory
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
        over: whether nobody is to wait any longer.
    """

    def __init__(
        self, launcher: LauncherEnvironment, rank: int, timeout: timedelta, over: Callable[[], bool] = lambda: False
    ) -> None:
        self.launcher, self.rank, self.timeout, self.over = launcher, rank, timeout, over
        self.others = [r for r in range(launcher.world_size) if r != rank]
        self.started = time.monotonic()
        self._records: Records | None = None

    @property
    def where(self) -> str:
        host, port = self.launcher.rendezvous_address
        return f"{host}:{port}"

    def join(self, address: Address | None) -> tuple[dist.Store, list[RankRecord]]:
        """(the store of this round, the records of all ranks).

        Raises:
            UserError: the port is taken, two processes claim one rank, or ranks expect different numbers of ranks.
            CommError: not all ranks joined.
        """
        launcher = self.launcher
        own_record = RankRecord(
            self.rank, launcher.rank, launcher.world_size, socket.gethostname(), os.getpid(), secrets.token_hex(8),
            address,
        )  # fmt: skip
        try:
            # torchrun's agent keeps one store for all rounds: without a prefix restarted ranks connect to dead peers.
            scope = f"round/{launcher.restarts}"
            store = dist.PrefixStore(scope, self._open())
            self._records = Records(store, launcher.secret, scope)
            self._claim(self._records, own_record)
            return store, self._wait(self._records, own_record)
        except RuntimeError as error:
            raise self._failed(error) from error

    def _open(self) -> dist.Store:
        launcher = self.launcher
        host, port = launcher.rendezvous_address
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
        listener = f"{first} has rank 0 as well" if first is not None else "another program listens there"
        raise UserError(
            f"rank 0 cannot open the rendezvous store at {self.where}: {listener}", field="MASTER_PORT", value=port,
            accepted="one process of each rank, and a free port, the same for all ranks", where="environment",
        )  # fmt: skip

    def _first_member(self) -> RankRecord:
        """The other process that claims rank 0, which is told to leave."""
        host, port = self.launcher.rendezvous_address
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
        claimed = records.open(key, records.store.compare_set(key, "", records.seal(key, me)), RankRecord)
        if claimed.token == me.token:
            return
        text = f"{claimed} and {me} are both rank {me.rank}"
        renumbered = (claimed.launched_as, me.launched_as) != (me.rank, me.rank)
        if renumbered:
            text += f" of the cluster file (torchrun's ranks {claimed.launched_as} and {me.launched_as})"
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
            if self.over():
                raise RuntimeError("a rank was lost meanwhile")
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
        seconds, other_ranks = time.monotonic() - self.started, self.others
        records = self._records
        joined = within(PATIENCE, lambda: self._joined_ranks(records)) if records is not None else None
        states = Connectivity(self.rank, [(joined or {}).get(r) for r in range(len(other_ranks) + 1)]).look(
            joined or ()
        )
        absent_ranks = [r for r in other_ranks if joined is not None and r not in joined]
        peers = [r for r in other_ranks if states.get(r) == UNREACHABLE] or absent_ranks or other_ranks
        if joined is None:
            reason = f"the rendezvous store at {self.where} does not answer, or not all came to it"
        elif absent_ranks and UNREACHABLE not in states.values():
            reason = f"rank {', '.join(map(str, absent_ranks[:8]))} never came"
        else:
            reason = explain(peers, states)
        return CommError(
            f"rank {self.rank}, joining the job, waited {seconds:.1f} s for {plural(len(other_ranks), 'other rank')}: "
            f"{reason} [{first_line(error)}]",
            self.rank, peers, seconds, "joining the job", states,
        )  # fmt: skip

    def _joined_ranks(self, records: Records) -> dict[int, Address | None]:
        """Addresses of the ranks that have written their record."""
        joined = [r for r in self.others if records.store.check([_key(r)])]
        return dict(zip(joined, (m.address for m in records.get([_key(r) for r in joined], RankRecord)), strict=True))


def _key(rank: int) -> str:
    return f"hetero_megatron/member/{rank}"


# Ranks take long and varying times to start (imports, a busy host), whatever the timeout of transfers.
START_UP = timedelta(seconds=60)


def start_comm(
    platform: Platform,
    timeout_seconds: float,
    position: int | None = None,
    launcher: LauncherEnvironment | None = None,
    hooks: Hooks | None = None,
    transport: str = AUTO,
    lost: Callable[[Exception], None] | None = None,
    over: Callable[[], bool] | None = None,
) -> Comm:
    """Join the job described by the launcher's environment (RANK, WORLD_SIZE, …), or run alone without it.

    Args:
        timeout_seconds: of every transfer; waiting for other ranks to start takes at least ``START_UP``.
        position: this process's rank in the plan, if fixed by a cluster file; torchrun may number nodes differently,
            e.g. after a restart.
        launcher: None: from this process's environment.
        hooks: None: no emulation.
        transport: ``auto``, or ``bridge``: islands only communicate by the bridge.
        lost: called in a thread when a device waits for a transfer that does not end; the host may hang anywhere.
        over: whether the job goes on without these ranks; then they must be able to be torn from what they wait for
            (``Comm.sever``). None: it never does.

    Raises:
        UserError: two processes claim one position, or the launcher cannot renumber ranks (torchrun and srun can).
        CommError: not all ranks joined, or some could not connect.
    """
    if platform.device.type == "cpu":
        keep_freed_memory()
    launcher = launcher or read_launcher()
    timeout, total = timedelta(seconds=timeout_seconds), launcher.world_size
    rank = launcher.rank if position is None else position
    hooks, connectivity, store = hooks or Hooks(), Connectivity(rank), None
    if total > 1 and not dist.is_initialized():
        if rank != launcher.rank and not (launcher.agent_store or launcher.started_by):
            raise UserError(
                f"the cluster file makes this process rank {rank}, and only torchrun and srun can renumber ranks",
                field="RANK", value=launcher.rank, accepted=f"{rank}, or torchrun",
            )  # fmt: skip
        if launcher.one_host:
            _gloo_on_loopback()
        beacon = listen(launcher.address, launcher.one_host)
        rendezvous = Rendezvous(launcher, rank, max(timeout, START_UP), over or (lambda: False))
        store, members = rendezvous.join(beacon.address if beacon is not None else None)
        connectivity = Connectivity(rank, [member.address for member in members], beacon, hooks.cut_ranks)
    comm = Comm(rank, platform.device, timeout, hooks, connectivity, launcher)
    if over is not None:
        comm.sockets, comm.over = Sockets(), over
    if store is not None:
        comm.join(store, total, max(timeout, START_UP))
    copies = copies_of(platform)
    comm.accelerator = copies.accelerator if copies is not None else None
    if platform.accelerator is not None:
        comm.load_direct = platform.accelerator.load_direct
    if total > 1:
        if copies is not None and (lost is not None or over is not None):
            comm.watch_devices(copies.aside, lost or comm.lose)
        all_ranks = Group(comm, tuple(range(total)), dist.group.WORLD)
        endpoint = Endpoint.of(platform, torch.__version__, transport)
        islands = Islands(all_ranks.gather_objects(endpoint, Endpoint))
        comm.create_message_groups(islands, copies)
    return comm


def _gloo_on_loopback() -> None:
    """Make gloo listen on the loopback interface, which is only possible by the environment."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())


def stop_comm(platform: Platform | None = None) -> None:
    """Leave the job; safe to call when never started."""
    if dist.is_initialized():
        dist.destroy_process_group()
        if platform is not None and platform.accelerator is not None:
            platform.accelerator.stop()


def world_group() -> object:
    """torch's group of all ranks; None: it was not made."""
    return dist.group.WORLD if dist.is_initialized() else None
