"""The communicator of one rank: groups, transfers, their byte counts and waiting times.

``Comm`` is created once per process and passed along. Every wait happens in :meth:`Handle.wait`, which turns a
dead or silent peer into a :class:`CommError` that says who waited for whom in which action.
"""

from __future__ import annotations

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hetero_megatron.comm.emulation import Emulation
from hetero_megatron.comm.errors import CommError
from hetero_megatron.comm.pacing import PacedWork
from hetero_megatron.errors import UserError
from hetero_megatron.platform import Platform
from hetero_megatron.platform.host_memory import keep_freed_memory


class Handle:
    """A transfer under way. ``wait`` returns the received tensor (None for a send)."""

    def __init__(
        self,
        comm: Comm,
        work: dist.Work | PacedWork | None,
        result: torch.Tensor | None,
        peers: tuple[int, ...],
        keep: torch.Tensor | None = None,
        collective: bool = False,
    ) -> None:
        self._comm, self._work, self._result, self._peers = comm, work, result, peers
        self._keep, self._collective = keep, collective  # the tensor being sent must live until then

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once; never raises."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> torch.Tensor | None:
        if self._work is not None:
            self._comm.clock.pause()
            start = time.perf_counter()
            try:
                self._work.wait()
            except RuntimeError as error:
                raise self._comm.failure(self._peers, time.perf_counter() - start, error) from error
            seconds = time.perf_counter() - start
            self._comm.seconds.add(seconds, self._collective)
            self._comm.clock.resume(seconds)
            self._work = None
        self._keep = None
        return self._result


@dataclass
class WaitSeconds:
    """Seconds blocked so far: in point-to-point transfers (pipeline neighbours) and in collectives."""

    neighbours: float = 0.0
    collectives: float = 0.0

    def add(self, seconds: float, collective: bool) -> None:
        if collective:
            self.collectives += seconds
        else:
            self.neighbours += seconds


class Comm:
    """One rank's view of the job.

    Attributes:
        rank: global rank; device: where tensors live.
        activity: what the rank is doing now, for diagnosis (set by the executor).
        sent_bytes: bytes sent so far by destination rank.
        seconds: time spent blocked in transfers so far.
        emulation, clock: the testbed's, which do nothing on real chips and links.
    """

    def __init__(
        self, rank: int, device: torch.device, timeout: timedelta, emulation: Emulation | None = None
    ) -> None:
        self.rank, self.device, self.timeout = rank, device, timeout
        self.emulation = emulation or Emulation(rank)
        self.clock = self.emulation.clock
        self.activity = "start-up"
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self.seconds = WaitSeconds()
        self._groups: dict[tuple[int, ...], list[Group]] = {}
        self._background: dict[tuple[int, ...], Group | None] = {}

    def create_groups(self, groups: Iterable[Sequence[int]]) -> None:
        """Create all groups of a plan, on every rank of the job, member or not, from the same list.

        torch numbers groups by how many a rank has made, so groups made by members only get unlike names on
        unlike ranks and never meet; hence all ranks make all of them, in sorted order. Ranks that are listed twice get
        two groups: what goes on at the same time needs one each, because the members of a group must start its
        collectives in the same order.
        """
        for key, count in sorted(Counter(tuple(sorted(ranks)) for ranks in groups).items()):
            known = self._groups.setdefault(key, [])
            while len(known) < count:
                known.append(self._create(key))

    def _create(self, key: tuple[int, ...]) -> Group:
        made = dist.new_group(list(key), timeout=self.timeout) if len(key) > 1 else None
        return Group(self, key, made if self.rank in key else None)

    def group(self, ranks: Sequence[int], lane: int = 0) -> Group:
        """The group of ``ranks``, which includes this rank and was created before; ``lane`` -1: the last one made."""
        key = tuple(sorted(ranks))
        assert self.rank in key, f"rank {self.rank} asked for the group {key} it is not in"
        if len(key) == 1:
            return Group(self, key, None)
        return self._groups[key][lane]

    def background_group(self, ranks: Sequence[int], timeout: timedelta | None = None) -> Group | None:
        """A second group of the same ranks for a thread of its own (host memory only); None on other ranks.

        Created like the others on every rank of the job: transfers of two threads on one group would mix.
        """
        key = tuple(sorted(ranks))
        if len(key) == 1 or not dist.is_initialized():
            return Group(self, key, None) if self.rank in key else None
        if key not in self._background:
            made = dist.new_group(list(key), timeout=timeout or self.timeout, backend="gloo")
            self._background[key] = Group(self, key, made) if self.rank in key else None
        return self._background[key]

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Handle:
        """Send a contiguous tensor; the tensor must not change until the handle was waited for."""
        size = tensor.numel() * tensor.element_size()
        self.sent_bytes[dst] += size
        work = self.start((dst,), lambda: dist.isend(tensor, dst, tag=tag), {dst: size})
        return Handle(self, work, None, (dst,), tensor)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Handle:
        """Receive into a contiguous tensor."""
        work = self.start((src,), lambda: dist.irecv(tensor, src, tag=tag))
        return Handle(self, work, tensor, (src,))

    def start(
        self,
        peers: tuple[int, ...],
        transfer: Callable[[], dist.Work | None],
        sizes: Mapping[int, int] | None = None,
        group: tuple[int, ...] = (),
    ) -> dist.Work | PacedWork | None:
        """Start a transfer: now, or when an emulated link would have delivered it (``sizes``: bytes by peer)."""
        self.clock.pause()
        pacer = self.emulation.pacer
        try:
            paced = pacer.submit(sizes, transfer, group) if pacer is not None and sizes is not None else None
            work = transfer() if paced is None else paced
        except RuntimeError as error:
            raise self.failure(peers, 0.0, error) from error
        self.clock.resume()
        return work

    def failure(self, peers: tuple[int, ...], seconds: float, error: Exception) -> CommError:
        names = ", ".join(map(str, peers[:8])) + (", …" if len(peers) > 8 else "")
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return CommError(
            f"rank {self.rank}, in {self.activity}, waited {seconds:.1f} s for rank {names} and got no answer "
            f"(time-out {self.timeout.total_seconds():g} s): the peer died, hangs, or runs another plan [{cause[:200]}]"
        )


@dataclass(frozen=True)
class Group:
    """Ranks that exchange data together, ascending; ``index`` is this rank's place among them."""

    comm: Comm
    ranks: tuple[int, ...]
    _handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        return self.ranks.index(self.comm.rank)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """For torch.distributed.checkpoint, which does its own collectives; None when alone."""
        return self._handle

    def all_to_all(
        self,
        send: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        into: torch.Tensor | None = None,
    ) -> Handle:
        """Ragged exchange of a flat buffer.

        Args:
            send: [sum(send_counts)], parts for the members in group order, contiguous.
            send_counts, recv_counts: elements per member; zeros are fine. The own part goes through the buffer too.
            into: what comes is written here, [sum(recv_counts)], contiguous; None: into new memory.

        Returns:
            A handle whose result is [sum(recv_counts)], parts in group order.
        """
        if self._handle is None:
            return Handle(self.comm, None, send, ())
        self.count(send, send_counts)
        recv = send.new_empty(sum(recv_counts)) if into is None else into
        sizes = {r: n * send.element_size() for r, n in zip(self.ranks, send_counts) if r != self.comm.rank}
        work = self.comm.start(
            self._others(),
            lambda: dist.all_to_all_single(
                recv, send, list(recv_counts), list(send_counts), group=self._handle, async_op=True
            ),
            sizes,
            self.ranks,
        )
        return Handle(self.comm, work, recv, self._others(), send, collective=True)

    def count(self, send: torch.Tensor, send_counts: Sequence[int]) -> None:
        """Book the bytes that go to each other member."""
        for peer, count in zip(self.ranks, send_counts, strict=True):
            if peer != self.comm.rank:
                self.comm.sent_bytes[peer] += count * send.element_size()

    def gather_vectors(self, vector: torch.Tensor) -> torch.Tensor:
        """[n] from every member -> [members, n], same on all; for a few numbers per step."""
        if self._handle is None:
            return vector[None]
        out = [torch.empty_like(vector) for _ in self.ranks]
        sizes = dict.fromkeys(self._others(), vector.numel() * vector.element_size())
        work = self.comm.start(
            self._others(), lambda: dist.all_gather(out, vector, group=self._handle, async_op=True), sizes, self.ranks
        )
        Handle(self.comm, work, None, self._others(), collective=True).wait()
        return torch.stack(out)

    def gather_objects(self, value: object) -> list[object]:
        """Any picklable value from every member, in group order; for start-up agreement and reports only."""
        if self._handle is None:
            return [value]
        out: list[object] = [None] * self.size
        start = time.perf_counter()
        try:
            dist.all_gather_object(out, value, group=self._handle)
        except RuntimeError as error:
            raise self.comm.failure(self._others(), time.perf_counter() - start, error) from error
        return out

    def _others(self) -> tuple[int, ...]:
        return tuple(r for r in self.ranks if r != self.comm.rank)


def start_comm(platform: Platform, timeout_seconds: float, position: int | None = None) -> Comm:
    """Join the job that torchrun's environment describes (RANK, WORLD_SIZE, …), or be alone without it.

    Args:
        position: this process's rank in the plan where a cluster file fixes it: torchrun may number nodes otherwise,
            and does after a restart.

    Raises:
        UserError: two processes claim one position, or the launcher cannot renumber ranks.
    """
    if platform.device.type == "cpu":
        keep_freed_memory()
    timeout = timedelta(seconds=timeout_seconds)
    total, launched_as = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    rank = launched_as if position is None else position
    if total > 1 and not dist.is_initialized():
        if rank != launched_as and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise UserError(
                f"the cluster file makes this process rank {rank}, and only torchrun can renumber ranks",
                field="RANK", value=launched_as, accepted=f"{rank}, or torchrun",
            )  # fmt: skip
        store, _, _ = next(dist.rendezvous("env://", rank, total, timeout=timeout))
        # torchrun's agent keeps one store for all rounds: without a prefix a restarted rank dials dead peers.
        store = dist.PrefixStore(f"round/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        _claim(store, rank, launched_as)
        dist.init_process_group(platform.backend, timeout=timeout, store=store, rank=rank, world_size=total)
    return Comm(rank, platform.device, timeout, Emulation.from_environment(rank))


def _claim(store: dist.Store, rank: int, launched_as: int) -> None:
    """Two processes with one rank would wait for a third for ever; the second one to come is refused instead."""
    key = f"hetero_megatron/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/rank/{rank}"
    first = store.compare_set(key, "", str(launched_as)).decode()
    if first != str(launched_as):
        raise UserError(
            f"torchrun's ranks {first} and {launched_as} are both rank {rank} of the cluster file",
            field="HETERO_NODE", value=os.environ.get("HETERO_NODE", "not set"), accepted="one process per chip",
        )  # fmt: skip


def stop_comm() -> None:
    """Leave the job; safe to call when never started."""
    if dist.is_initialized():
        dist.destroy_process_group()
