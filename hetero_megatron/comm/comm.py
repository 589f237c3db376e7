"""The communicator of one rank: groups, transfers, their byte counts and waiting times.

``Comm`` is created once per process and passed along. Every wait happens in :meth:`Handle.wait`, which turns a
dead or silent peer into a :class:`CommError` that says who waited for whom in which action.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hetero_megatron.comm.errors import CommError
from hetero_megatron.comm.hooks import Hooks, Work
from hetero_megatron.comm.reach import Reach, explain
from hetero_megatron.comm.values import MAX_BYTES, decode, encode
from hetero_megatron.errors import UserError
from hetero_megatron.launcher import LauncherEnvironment
from hetero_megatron.out_of_memory import out_of_memory
from hetero_megatron.words import plural

T = TypeVar("T")


class Works:
    """Several transfers waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Handle:
    """A transfer under way. ``wait`` returns the received tensor (None for a send)."""

    def __init__(
        self,
        comm: Comm,
        work: Work | None,
        result: torch.Tensor | None,
        peers: tuple[int, ...],
        keep: object = None,
        collective: bool = False,
    ) -> None:
        self._comm, self._work, self._result, self._peers = comm, work, result, peers
        self._keep, self._collective = keep, collective  # what is being sent must live until then

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
        hooks, clock: see :mod:`~hetero_megatron.comm.hooks`; they do nothing on real chips and links.
        reach: asked what became of peers that do not answer.
        launcher: what it said of this process.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        timeout: timedelta,
        hooks: Hooks | None = None,
        reach: Reach | None = None,
        launcher: LauncherEnvironment | None = None,
    ) -> None:
        self.rank, self.device, self.timeout = rank, device, timeout
        self.hooks, self.reach = hooks or Hooks(), reach or Reach(rank)
        self.clock, self.launcher = self.hooks.clock, launcher or LauncherEnvironment(rank)
        self.activity = "start-up"
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self.seconds = WaitSeconds()
        self._groups: dict[tuple[int, ...], list[Group]] = {}
        self._background: dict[tuple[int, ...], Group | None] = {}
        self._ways: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)

    def open_ways(self) -> None:
        """Let messages to higher and to lower ranks travel in groups of their own; every rank of the job calls it.

        Needed where transfers of one pair of ranks queue up in the order of their start, as NCCL's do, and tags are
        not looked at: a receive that is posted ahead would hold up the send that its message waits for. One way,
        messages of a pair start in the same order on both sides.
        """
        self._ways = (dist.new_group(timeout=self.timeout), dist.new_group(timeout=self.timeout))

    def connect(self, peers: Iterable[int]) -> None:
        """Meet ``peers``, who do the same, both ways, where messages have ways of their own: there the first one of a
        pair makes its connection and waits for the other side, which may be waiting for a message in turn."""
        if self._ways == (None, None):
            return
        for peer in sorted(peers, key=lambda peer: (min(peer, self.rank), max(peer, self.rank))):
            for upward in (True, False):
                move = self.isend if (self.rank < peer) == upward else self.irecv
                move(torch.zeros(1, device=self.device), peer, 0).wait()

    def _way(self, src: int, dst: int) -> dist.ProcessGroup | None:
        return self._ways[src < dst]

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
        if len(key) == 1:
            return Group(self, key, None)
        with self.hooks.on_other_cores():
            made = dist.new_group(list(key), timeout=self.timeout)
        return Group(self, key, made if self.rank in key else None)

    def group(self, ranks: Sequence[int], lane: int = 0) -> Group:
        """The group of ``ranks``, which includes this rank and was created before, with its members in the order that
        is asked for; ``lane`` -1: the last one made."""
        key = tuple(sorted(ranks))
        assert self.rank in key, f"rank {self.rank} asked for the group {key} it is not in"
        if len(key) == 1:
            return Group(self, key, None)
        made = self._groups[key][lane]
        return made if key == tuple(ranks) else replace(made, ranks=tuple(ranks))

    def background_group(self, ranks: Sequence[int], timeout: timedelta | None = None) -> Group | None:
        """A second group of the same ranks for a thread of its own (host memory only); None on other ranks.

        Created like the others on every rank of the job: transfers of two threads on one group would mix.
        """
        key = tuple(sorted(ranks))
        if len(key) == 1 or not dist.is_initialized():
            return Group(self, key, None) if self.rank in key else None
        if key not in self._background:
            with self.hooks.on_other_cores():
                made = dist.new_group(list(key), timeout=timeout or self.timeout, backend="gloo")
            self._background[key] = Group(self, key, made) if self.rank in key else None
        return self._background[key]

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Handle:
        """Send a contiguous tensor; the tensor must not change until the handle was waited for."""
        size = tensor.numel() * tensor.element_size()
        self.sent_bytes[dst] += size
        work = self.start((dst,), lambda: dist.isend(tensor, dst, self._way(self.rank, dst), tag), {dst: size})
        return Handle(self, work, None, (dst,), tensor)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Handle:
        """Receive into a contiguous tensor."""
        work = self.start((src,), lambda: dist.irecv(tensor, src, self._way(src, self.rank), tag))
        return Handle(self, work, tensor, (src,))

    def start(
        self,
        peers: tuple[int, ...],
        transfer: Callable[[], Work | None],
        sizes: Mapping[int, int] | None = None,
        group: tuple[int, ...] = (),
    ) -> Work | None:
        """Start a transfer; where this rank sends (``sizes``: bytes by peer), when ``hooks.submit`` says so."""
        self.clock.pause()
        try:
            work = transfer() if sizes is None else self.hooks.submit(transfer, sizes, group)
        except RuntimeError as error:
            raise self.failure(peers, 0.0, error) from error
        self.clock.resume()
        return work

    def failure(
        self, peers: tuple[int, ...], seconds: float, error: Exception, activity: str | None = None
    ) -> CommError | UserError:
        """What to raise for a transfer that failed after ``seconds``: memory that this rank did not get, or peers that
        do not answer; looks first what became of them."""
        if (refusal := out_of_memory(error, self.rank)) is not None:
            return refusal
        activity = self.activity if activity is None else activity
        names = ", ".join(map(str, peers[:8])) + (", …" if len(peers) > 8 else "")
        reach = self.reach.look(peers)
        return CommError(
            f"rank {self.rank}, in {activity}, waited {seconds:.1f} s for rank {names} and got no answer "
            f"(time-out {self.timeout.total_seconds():g} s): {explain(peers, reach)} [{first_line(error)}]",
            self.rank, peers, seconds, activity, reach,
        )  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Ranks that exchange data together, in any order; ``index`` is this rank's place among them.

    torch numbers the members of its groups by ascending rank. Where a call has an entry per member (``exchange``,
    ``gather_vectors``), entries are in the order of ``ranks``, at no cost. A flat buffer would have to be copied for
    it, so ``all_to_all`` is for groups in ascending order, as is ``gather_objects``.
    """

    comm: Comm
    ranks: tuple[int, ...]
    _handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        return self.ranks.index(self.comm.rank)

    def _ascending(self, by_member: Sequence[T]) -> list[T]:
        """One entry per member, in torch's order of the members."""
        return [entry for _, entry in sorted(zip(self.ranks, by_member, strict=True), key=lambda pair: pair[0])]

    def all_to_all(
        self,
        send: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        into: torch.Tensor | None = None,
    ) -> Handle:
        """Ragged exchange of a flat buffer; the group's ranks ascend.

        Args:
            send: [sum(send_counts)], parts for the members in group order, contiguous.
            send_counts, recv_counts: elements per member; zeros are fine. The own part goes through the buffer too.
            into: what comes is written here, [sum(recv_counts)], contiguous; None: into new memory.

        Returns:
            A handle whose result is [sum(recv_counts)], parts in group order.
        """
        if self._handle is None:
            return Handle(self.comm, None, send, ())
        assert list(self.ranks) == sorted(self.ranks), f"parts of a flat buffer are in ascending order: {self.ranks}"
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

    def exchange(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> Handle:
        """Send part i to member i and receive member i's part into ``receive[i]``, nothing being packed.

        Parts are contiguous; this rank's own are not looked at. Host memory goes as single messages, which over gloo
        take half the time of its all-to-all (benchmarks/bench_tp.py); devices do it in one launch.
        """
        if self._handle is None:
            return Handle(self.comm, None, None, ())
        self.count(send[0], [x.numel() for x in send])
        sizes = {r: x.nbytes for r, x in zip(self.ranks, send, strict=True) if r != self.comm.rank}
        start = self._messages if self.comm.device.type == "cpu" else self._one_launch
        work = self.comm.start(self._others(), lambda: start(send, receive), sizes, tuple(sorted(self.ranks)))
        return Handle(self.comm, work, None, self._others(), send, collective=True)

    def _messages(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> Works:
        peers = [(i, rank) for i, rank in enumerate(self.ranks) if rank != self.comm.rank]
        works = [dist.irecv(receive[i], rank, self._handle) for i, rank in peers if receive[i].numel()]
        works += [dist.isend(send[i], rank, self._handle) for i, rank in peers if send[i].numel()]
        return Works([work for work in works if work is not None])

    def _one_launch(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> dist.Work | None:
        own = send[self.index].new_empty(0)
        gives = self._ascending([own if i == self.index else x for i, x in enumerate(send)])
        takes = self._ascending([own if i == self.index else x for i, x in enumerate(receive)])
        return dist.all_to_all(takes, gives, group=self._handle, async_op=True)  # type: ignore[no-any-return]

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
            self._others(),
            lambda: dist.all_gather(self._ascending(out), vector, group=self._handle, async_op=True),
            sizes,
            tuple(sorted(self.ranks)),
        )
        Handle(self.comm, work, None, self._others(), collective=True).wait()
        return torch.stack(out)

    def gather_objects(self, value: object, kind: Any = Any) -> list[Any]:
        """A value from every member, in group order; for agreement at start-up and reports only.

        Args:
            kind: of the value; see :mod:`~hetero_megatron.comm.values`.

        Raises:
            UserError: a member sent something else.
        """
        data = encode(value)
        every = [data] if self._handle is None else self._gather_bytes(data)
        return [decode(text, kind, f"rank {rank}") for rank, text in zip(self.ranks, every, strict=True)]

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """First the lengths, then the bytes, padded to the longest. Not paced: this is no part of a step."""
        on_host = "cpu:" in dist.get_backend_config(self._handle)
        device = torch.device("cpu") if on_host else self.comm.device
        length = torch.tensor([len(data)], dtype=torch.int64, device=device)
        lengths = self._gather_now(length).flatten().tolist()
        for rank, size in zip(self.ranks, lengths, strict=True):
            if not 0 <= size <= MAX_BYTES:
                problem = f"rank {rank} announced a value of {plural(size, 'byte')}"
                raise UserError(problem, accepted=f"at most {MAX_BYTES:,}")
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self._gather_now(padded).cpu().numpy()
        return [row[:size].tobytes() for row, size in zip(rows, lengths, strict=True)]

    def _gather_now(self, mine: torch.Tensor) -> torch.Tensor:
        """[n] from every member -> [members, n]."""
        out = [torch.empty_like(mine) for _ in self.ranks]
        start = time.perf_counter()
        try:
            dist.all_gather(out, mine, group=self._handle)
        except RuntimeError as error:
            raise self.comm.failure(self._others(), time.perf_counter() - start, error) from error
        return torch.stack(out)

    def _others(self) -> tuple[int, ...]:
        return tuple(r for r in self.ranks if r != self.comm.rank)


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
