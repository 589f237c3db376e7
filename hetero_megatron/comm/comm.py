"""The communicator of one rank: groups, transfers, their byte counts and waiting times.

``Comm`` is created once per process and passed along. Every wait happens in :meth:`Work.wait`, which turns a
dead or silent peer into a :class:`CommError` that says who waited for whom in which action.
"""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from hetero_megatron.cluster import BRIDGE_STRIPES
from hetero_megatron.comm.bridge import Bridge, Copies
from hetero_megatron.comm.connectivity import Connectivity, Sockets, explain
from hetero_megatron.comm.group import Group
from hetero_megatron.comm.hooks import Capture, Hooks, TorchWork
from hetero_megatron.comm.islands import Islands
from hetero_megatron.comm.watchdog import TransferWatch
from hetero_megatron.comm.work import CommError, Waiter, Work, Works, first_line, full_memory, with_timeout
from hetero_megatron.environment.launcher import LauncherEnvironment
from hetero_megatron.errors import UserError
from hetero_megatron.platform.accelerator import Accelerator
from hetero_megatron.platform.platform import backend_of
from hetero_megatron.utils.out_of_memory import out_of_memory
from hetero_megatron.utils.text import rank_ranges

MAKING = "making a group"  # activity
T = TypeVar("T")
Channel = dist.ProcessGroup | Bridge | None  # of point-to-point messages; None: the job's gloo group


class Comm:
    """One rank's communicator.

    Attributes:
        rank: global rank; device: where tensors live.
        activity: current action, for error messages (set by the executor).
        sent_bytes: bytes sent so far, by destination rank.
        hooks, clock: see :mod:`~hetero_megatron.comm.hooks`; without emulation they do nothing.
        connectivity: finds out why peers do not answer.
        launcher: the launcher's environment of this process.
        islands: which ranks share a communication library; None: all use gloo.
        copies: of this rank's device, for the bridge; None: tensors are in host memory.
        accelerator: streams, events and pinned memory of this rank's device; None: tensors are in host memory.
        watch: detects transfers that never end without blocking the host; None: all transfers block the host.
        load_direct: has a direct backend of this rank's platform registered with torch.
        sockets: the connections of its groups, where somebody may want to cut them; None: nobody.
        over: whether the job goes on without these groups, so that waiting is in vain.
        torn: they were abandoned: nothing that transfers have brought since is to be used, or told to others.
        capturing: what takes transfers while a device graph is captured.
        fence: asked before anything is written that others read; CommError where the job went on without these groups.
    """

    def __init__(
        self, rank: int, device: torch.device, timeout: timedelta, hooks: Hooks | None = None,
        connectivity: Connectivity | None = None, launcher: LauncherEnvironment | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.device, self.timeout = rank, device, timeout
        self.hooks, self.connectivity = hooks or Hooks(), connectivity or Connectivity(rank)
        self.clock, self.launcher = self.hooks.clock, launcher or LauncherEnvironment(rank)
        self.activity = "start-up"
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self.watch: TransferWatch | None = None
        self.islands: Islands | None = None
        self.copies: Copies | None = None
        self.accelerator: Accelerator | None = None
        self.load_direct: Callable[[str], None] = lambda _: None
        self.sockets: Sockets | None = None
        self.over: Callable[[], bool] = lambda: False
        self.torn, self._loss = False, cast(Exception | None, None)  # why, where this rank found out by itself
        self._library_groups: list[dist.ProcessGroup] = []
        self.fence: Callable[[], None] = lambda: None
        self.capturing: Capture | None = None
        self._waiters = threading.local()  # a thread waits for one transfer at a time
        self._groups: dict[tuple[int, ...], list[Group]] = {}
        self._background: dict[tuple[tuple[int, ...], str], Group | None] = {}
        self._channels: dict[int, tuple[Channel, Channel]] = {}  # by island of the peer: to lower ranks, to higher ones

    def join(self, store: dist.Store, total: int, patience: timedelta) -> None:
        """Make the gloo group of all ranks, all of which have come to ``store``.

        Raises:
            CommError: they did not connect within ``patience``.
        """
        connect = functools.partial(
            dist.init_process_group, "gloo", timeout=self.timeout, store=store, rank=self.rank, world_size=total
        )
        self._connected(range(total), patience, connect, "joining the job")

    def create_message_groups(self, islands: Islands, copies: Copies | None) -> None:
        """Create the groups for point-to-point messages to each island; every rank of the job calls it.

        Messages to higher and to lower ranks use separate groups. Libraries like NCCL (and the bridge) run the
        transfers of one pair in the order of their start and ignore tags, so a receive posted early would block the
        send that its message depends on. Per direction, messages of a pair start in the same order on both sides. gloo
        matches tags and accepts any order.
        """
        self.islands, self.copies = islands, copies
        island = islands.of(self.rank)
        for i, members in enumerate(islands.members):
            if len(members) > 1 and not islands.uses_gloo(i):
                options = self.accelerator.message_options() if self.accelerator is not None and i == island else None
                ways = (self._new_group(members, options)[0], self._new_group(members, options)[0])
                if i == island:
                    self._channels[i] = ways
        for i, j in itertools.combinations(range(len(islands)), 2):
            members = tuple(sorted(islands.members[i] + islands.members[j]))
            directions = (self._new_group(members), self._new_group(members))
            if island in (i, j):
                self._channels[j if island == i else i] = tuple(bridge or handle for handle, bridge in directions)  # type: ignore[assignment]

    def connect(self, peers: Iterable[int]) -> None:
        """Connect to ``peers`` in both directions, if the library connects lazily at the first message: that one would
        block for the other side, which may itself be waiting for a message. The peers call it too."""
        for peer in sorted(peers, key=lambda peer: (min(peer, self.rank), max(peer, self.rank))):
            if not isinstance(self._channel(self.rank, peer), dist.ProcessGroup):
                continue
            for upward in (True, False):
                move = self.isend if (self.rank < peer) == upward else self.irecv
                move(torch.zeros(1, device=self.device), peer, 0).wait()

    def through_host(self, peer: int) -> bool:
        """Whether messages from a rank come through host memory, and take no execution slots of this device."""
        return not isinstance(self._channel(peer, self.rank), dist.ProcessGroup)

    def _channel(self, src: int, dst: int) -> Channel:
        if self.islands is None:
            return None
        peer = dst if src == self.rank else src
        return self._channels.get(self.islands.of(peer), (None, None))[src < dst]

    def _new_group(
        self, ranks: tuple[int, ...], options: Any = None
    ) -> tuple[dist.ProcessGroup | None, Bridge | None]:
        """A group for these ranks, as (library group, bridge); (None, None) on ranks outside it. ``options``: of the
        library."""
        route = self.islands.route(ranks) if self.islands is not None else None
        backend = "gloo"
        if route is not None and not route.bridged and self.rank in ranks:
            if route.direct:
                self.load_direct(route.direct)
            backend = self._backend(route.direct)
        if backend == "gloo":
            handle = self._new_gloo_group(ranks, self.timeout)
        else:
            # The library's own watchdog must not end the process before our watch has reported the reason.
            patience = self.timeout if self.watch is None else 2 * self.timeout
            # Not in a thread: a library's calls may have to come from one (MPI), or from where its device is current.
            others, start = self._others(ranks), time.perf_counter()
            limit = self.watch.during(others, MAKING) if self.watch is not None else nullcontext()
            try:
                make = functools.partial(dist.new_group, timeout=patience, backend=backend, pg_options=options)
                with self.hooks.on_other_cores(), limit:
                    handle = self._abandonable(lambda: make(list(ranks)))
            except (RuntimeError, ValueError) as error:
                # Its death is no fault of the library.
                if others and ((gone := self.connectivity.gone(others, 0)) or self.over()):
                    peers = tuple(dict.fromkeys([*gone, *others]))
                    raise self.failure(peers, time.perf_counter() - start, error, MAKING) from error
                raise UserError(
                    f"rank {self.rank} cannot make a group of ranks {rank_ranges(ranks)} with it: {first_line(error)}",
                    field="--distributed-backend", value=backend,
                ) from error  # fmt: skip
            self._library_groups.append(handle)
            self.check()
        bridged = route is not None and route.bridged
        # On one host there is no network to fill, and its cores have better to do.
        extra_stripes = range(0 if self.launcher.one_host or not bridged else BRIDGE_STRIPES - 1)
        stripes = [handle, *(self._new_gloo_group(ranks, self.timeout) for _ in extra_stripes)]
        if self.rank not in ranks:
            return None, None
        if not bridged:
            return handle, None
        return handle, Bridge(stripes, self.copies, self.timeout.total_seconds(), near_network=self._near_network)

    @functools.cached_property
    def _near_network(self) -> Callable[[], AbstractContextManager[None]]:
        """Context in which threads start that move data over the network: on CPUs near its card."""
        if self.launcher.one_host:
            return nullcontext
        from hetero_megatron.environment.network import near_card

        return near_card(self.launcher.address)

    def _abandonable(self, call: Callable[[], T]) -> T:
        """What ``call`` returns, which makes a library's group; RuntimeError as soon as the job goes on without it. For
        that it runs in a thread, where the job may do so."""
        if self.sockets is None or self.accelerator is None:
            return call()
        accelerator, index = self.accelerator, self.device.index or 0

        def run() -> T:
            accelerator.use(index)
            return call()

        return with_timeout(2 * self.timeout.total_seconds(), run, lambda: [self.rank] if self.over() else [])

    def _new_gloo_group(self, ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
        """A gloo group for these ranks; of no use on others."""
        connect = functools.partial(dist.new_group, list(ranks), timeout=timeout, backend="gloo")
        return self._connected(ranks, timeout, connect, MAKING)

    def _others(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(r for r in ranks if r != self.rank) if self.rank in ranks else ()

    def _connected(self, ranks: Sequence[int], patience: timedelta, connect: Callable[[], T], activity: str) -> T:
        """What ``connect`` returns, which makes a gloo group of ``ranks``; CommError after ``patience``, or as soon as
        one of them is gone."""
        other_ranks, lost_ranks, turns = self._others(ranks), list[int](), itertools.count()

        def gone() -> Sequence[int]:
            lost_ranks.extend(self.connectivity.gone(other_ranks, next(turns)))
            return lost_ranks or (other_ranks if self.over() else lost_ranks)

        def run() -> T:
            with self.hooks.on_other_cores(), self._near_network():
                return connect()

        start = time.perf_counter()
        try:
            return with_timeout(patience.total_seconds(), run, gone) if other_ranks else run()
        except (RuntimeError, ValueError) as error:
            peers = tuple(dict.fromkeys([*lost_ranks, *other_ranks]))  # first those that the message is to name
            raise self.failure(peers, time.perf_counter() - start, error, activity) from error

    def _backend(self, direct: str) -> str:
        """The backend string for ``new_group``: this rank's island's, or one that reaches other islands."""
        assert self.islands is not None
        return backend_of(self.device, direct) if direct else self.islands.endpoints[self.rank].backend

    def create_groups(self, groups: Iterable[Sequence[int]]) -> None:
        """Create all groups of a plan; every rank of the job calls it with the same list.

        torch names groups by a per-process counter, so all ranks must create all groups in the same (sorted) order.
        Ranks listed twice get two groups: concurrent collectives need one each, because the members of a group must
        start its collectives in the same order.

        A device's library connects a group at its first collective, for which the host waits until all members have
        called it, and some libraries wait for a limited time only. So the first one is here, where nothing is pending
        and no rank has begun to load weights or to compile.
        """
        for key, count in sorted(Counter(tuple(sorted(ranks)) for ranks in groups).items()):
            lanes = self._groups.setdefault(key, [])
            while len(lanes) < count:
                lanes.append(self._create(key))
                if self.rank in key and lanes[-1].in_stream_order:
                    lanes[-1].connect()

    def _create(self, key: tuple[int, ...]) -> Group:
        if len(key) == 1:
            return Group(self, key, None)
        handle, bridge = self._new_group(key)
        return Group(self, key, handle, bridge, bridge is None and self.device.type != "cpu")

    def group(self, ranks: Sequence[int], lane: int = 0) -> Group:
        """The existing group of ``ranks`` (including this rank), with members in the given order; ``lane``: which one
        if these ranks have several groups (-1: the last created)."""
        key = tuple(sorted(ranks))
        assert self.rank in key, f"rank {self.rank} asked for the group {key} it is not in"
        if len(key) == 1:
            return Group(self, key, None)
        group = self._groups[key][lane]
        return group if key == tuple(ranks) else replace(group, ranks=tuple(ranks))

    def background_group(self, ranks: Sequence[int], timeout: timedelta | None = None, use: str = "") -> Group | None:
        """A further group of the same ranks, of gloo, for use by another thread (host memory only), since two threads
        must not share a group; None on other ranks. Every rank of the job calls it. ``use``: each has its own group."""
        key = tuple(sorted(ranks))
        if len(key) == 1 or not dist.is_initialized():
            return Group(self, key, None) if self.rank in key else None
        if (key, use) not in self._background:
            handle = self._new_gloo_group(key, timeout or self.timeout)
            self._background[key, use] = Group(self, key, handle) if self.rank in key else None
        return self._background[key, use]

    def destroy_groups(self) -> None:
        """Destroy the groups made by ``create_groups`` and ``background_group``, whose threads would otherwise run as
        long as this process. For a process that goes on with another plan: every rank of the job calls it, when no
        transfer in these groups is under way."""
        for group in itertools.chain(*self._groups.values(), self._background.values()):
            if group is not None:
                group.destroy()
        self._groups.clear()
        self._background.clear()

    def wait_for(self, work: TorchWork) -> None:
        """See :class:`Transport`."""
        if self.sockets is None or self.capturing is not None:
            work.wait()
            return
        if not hasattr(self._waiters, "mine"):
            self._waiters.mine = Waiter(lambda: self.torn or self.over(), self.accelerator, self.device)
        self._waiters.mine.wait(work)

    def abandon(self) -> None:
        """The job goes on without these groups: end what device and host wait for in groups of the device's library.
        From any thread, also more than once."""
        if self.torn:
            return
        self.torn = True  # before anything ends that waits: who reads a result then knows that it is none
        if self.accelerator is not None:
            self.accelerator.abort(list(self._library_groups))

    def lose(self, error: Exception) -> None:
        """The same because of a transfer that does not end, on this rank's own account."""
        self._loss = self._loss or error
        self.abandon()

    def check(self) -> None:
        """CommError where these groups were abandoned."""
        if self.torn:
            raise self._loss or CommError(f"rank {self.rank}, in {self.activity}: a rank was lost meanwhile", self.rank)

    def sever(self) -> None:
        """Cut the connections of the gloo groups, which are not used any more."""
        if self.sockets is not None:
            self.sockets.cut()

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        """Send a contiguous tensor, which must not change until the handle is complete."""
        size = tensor.numel() * tensor.element_size()
        self.sent_bytes[dst] += size
        channel = self._channel(self.rank, dst)
        if isinstance(channel, Bridge):
            work = self.start((dst,), lambda: Works(channel.isend(tensor, dst, tag)), {dst: size})
        else:
            work = self.start((dst,), lambda: dist.isend(tensor, dst, channel, tag), {dst: size})
        return Work(self, work, None, (dst,), tensor)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        """Receive into a contiguous tensor."""
        channel = self._channel(src, self.rank)
        if isinstance(channel, Bridge):
            work: TorchWork | None = self.start((src,), lambda: Works(channel.irecv(tensor, src, tag)))
        else:
            work = self.start((src,), lambda: dist.irecv(tensor, src, channel, tag))
        return Work(self, work, tensor, (src,))

    def start(
        self, peers: tuple[int, ...], transfer: Callable[[], TorchWork | None],
        sizes: Mapping[int, int] | None = None, group: tuple[int, ...] = (),
    ) -> TorchWork | None:  # fmt: skip
        """Start a transfer. Sends (``sizes``: bytes by peer) go through ``hooks.submit``."""
        self.check()
        if self.capturing is not None:
            return self.capturing.start(peers, transfer)
        self.clock.pause()
        try:
            work = transfer() if sizes is None else self.hooks.submit(transfer, sizes, group)
        except RuntimeError as error:
            raise self.failure(peers, 0.0, error) from error
        if self.watch is not None and work is not None:
            self.watch.add(work, peers, self.activity)
        self.clock.resume()
        return work

    def watch_devices(
        self, aside: Callable[[], AbstractContextManager[object]], lost: Callable[[Exception], None]
    ) -> None:
        """Watch transfers in a thread from now on; call before groups are created. See :class:`TransferWatch`."""
        self.watch = TransferWatch(self.timeout.total_seconds(), self.failure, aside)
        self.watch.start(lost)

    def lost(self) -> Exception | None:
        """After a failed device operator: the error of the transfer that it waited for, if there is one."""
        return self.watch.look() if self.watch is not None else None

    def failure(
        self, peers: tuple[int, ...], seconds: float, error: Exception, activity: str | None = None
    ) -> CommError | UserError:
        """The exception for a transfer that failed after ``seconds``: out of memory on this rank, or peers that do not
        answer, with what became of them."""
        if (refusal := out_of_memory(error, self.rank)) is not None:
            return refusal
        activity = self.activity if activity is None else activity
        names = ", ".join(map(str, peers[:8])) + (", …" if len(peers) > 8 else "")
        states, room = self.connectivity.look(peers), full_memory(self.accelerator, self.rank)
        return CommError(
            f"rank {self.rank}, in {activity}, waited {seconds:.1f} s for rank {names} and got no answer "
            f"(time-out {self.timeout.total_seconds():g} s): {explain(peers, states)}{room} "
            f"[{first_line(error)}]",
            self.rank, peers, seconds, activity, states,
        )  # fmt: skip
