"""A process group of torch over MPI, for tensors in host memory.

Messages and exchanges (all-to-all, all-gather into a list) are point-to-point messages of MPI, whose sizes are checked
and whose missing senders are named; sums and the like are MPI's nonblocking collectives. Every operation returns at
once with a work to wait for.
"""

# The base class is overloaded for callers in C++; torch.distributed calls these forms only.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from mpi4py import MPI

from hetero_mpi_island import BACKEND
from hetero_mpi_island.work import MpiWork, Part
from hetero_mpi_island.world import LAUNCH, World, wait_until

_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
_NARROW = (torch.bfloat16, torch.float16)  # MPI cannot add them: gathered, added in fp32, rounded once
# torch's operation -> MPI's, and torch's function of [members, n]; an average is a sum that is divided
_OPERATIONS = (
    (dist.ReduceOp.SUM, MPI.SUM, torch.sum),
    (dist.ReduceOp.AVG, MPI.SUM, torch.sum),
    (dist.ReduceOp.PRODUCT, MPI.PROD, torch.prod),
    (dist.ReduceOp.MAX, MPI.MAX, torch.amax),
    (dist.ReduceOp.MIN, MPI.MIN, torch.amin),
)
_REFUSED = (
    "recv_anysource", "gather", "scatter", "reduce", "reduce_scatter", "allreduce_coalesced", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "monitored_barrier",
)  # fmt: skip


def create(options: Any) -> MpiProcessGroup:
    """What ``dist.new_group(ranks, backend="mpi_island")`` calls, on the members only.

    Args:
        options: torch's ``_DistributedBackendOptions``.

    Raises:
        RuntimeError: a member is in another MPI world, on every member; or one does not come within the time-out.
    """
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    world = World.open()
    absent = [rank for rank in ranks if rank not in world.ranks]
    if absent:
        names = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
        raise RuntimeError(
            f"{BACKEND}: the group {list(ranks)} cannot be made: {names} not in the MPI world of rank {world.rank}, "
            f"which has ranks {sorted(world.ranks)}; two MPI worlds cannot reach each other"
        )
    if ranks[options.group_rank] != world.rank:
        raise RuntimeError(
            f"{BACKEND}: this process is rank {ranks[options.group_rank]} of the job, but RANK was {world.rank} when "
            f"MPI started; start it by {LAUNCH}"
        )
    _meet(options, ranks)
    return MpiProcessGroup(world, ranks, options)


def _meet(options: Any, ranks: Sequence[int]) -> None:
    """Wait for all members: making a communicator has no time-out."""
    keys = [f"{BACKEND}/{rank}" for rank in ranks]
    options.store.set(keys[options.group_rank], "here")
    seconds = options.timeout.total_seconds()
    if not wait_until(lambda: bool(options.store.check(keys)), seconds):
        missing = ", ".join(str(rank) for rank, key in zip(ranks, keys) if not options.store.check([key]))
        raise RuntimeError(
            f"{BACKEND}: rank {missing} did not come to make the group {list(ranks)} within {seconds:g} s"
        )


class MpiProcessGroup(dist.ProcessGroup):
    """Ranks of one MPI world, with a communicator of their own. Tensors are contiguous, in host memory, of any dtype;
    those that are added up must be fp16, bf16 or what MPI knows.

    Members start collectives of one group in the same order; messages have tags. Any thread may call it.
    """

    def __init__(self, world: World, ranks: tuple[int, ...], options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._world, self._ranks, self._me = world, ranks, int(options.group_rank)
        self._seconds = options.timeout.total_seconds()
        world.longest = max(world.longest, self._seconds)
        # Only the members call this: the tag keeps groups that are made by several threads apart.
        tag = zlib.crc32(repr((options.group_id, ranks)).encode()) % 32768
        members = world.comm.group.Incl([world.ranks.index(rank) for rank in ranks])
        with world.lock:
            self._comm = world.comm.Create_group(members, tag)
            limit: int = world.comm.Get_attr(MPI.TAG_UB)
        # Tags of users, then those of exchanges: what the n-th exchange sends, only the n-th exchange receives.
        self._tags = limit // 2
        self._exchanges = itertools.count()

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Nothing: its communicator lives as long as the MPI world, which peers may still use."""

    def abort(self) -> None:
        """Nothing: works end by their time-outs."""

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> MpiWork:
        (tensor,) = tensors
        what = f"sending {tensor.nbytes} bytes to rank {self._ranks[dst]} (tag {tag})"
        return self._start(what, [tensor], lambda: [self._isend(tensor, dst, self._checked(tag))])

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> MpiWork:
        (tensor,) = tensors
        what = f"receiving {tensor.nbytes} bytes from rank {self._ranks[src]} (tag {tag})"
        return self._start(what, [tensor], lambda: [self._irecv(tensor, src, self._checked(tag))], [tensor])

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> MpiWork:
        return self._exchange("all-to-all", inputs, outputs, opts)

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int],
        opts: Any = None,
    ) -> MpiWork:  # fmt: skip
        """Rows of ``input`` to the members, ``input_sizes`` of them to each; none: equal parts."""
        _require_host([output, input])
        gives, takes = _split(input, input_sizes, self.size()), _split(output, output_sizes, self.size())
        return self._exchange("all-to-all", gives, takes, opts, [output])

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> MpiWork:
        (mine,), (every,) = inputs, outputs
        return self._exchange("all-gather", [mine] * self.size(), every, opts)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MpiWork:
        _require_size(output, self.size() * input.nbytes)
        return self._collective(
            f"all-gather of {input.nbytes} bytes", [output, input], opts,
            lambda: self._comm.Iallgather(_bytes(input), _bytes(output)), [output],
        )  # fmt: skip

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> MpiWork:
        (tensor,) = tensors
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        what = f"all-reduce of {tensor.nbytes} bytes"
        with_mpi, function = _operation(op, tensor.dtype)
        if tensor.dtype in _NARROW:
            every = tensor.new_empty(self.size(), tensor.numel())
            return self._collective(
                what, [tensor, every], opts, lambda: self._comm.Iallgather(_bytes(tensor), _bytes(every)), [tensor],
                lambda: _reduce_rows(tensor, every, function, op),
            )  # fmt: skip
        return self._collective(
            what, [tensor], opts, lambda: self._comm.Iallreduce(MPI.IN_PLACE, _typed(tensor), with_mpi), [tensor],
            lambda: _divide(tensor, op, self.size()),
        )  # fmt: skip

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> MpiWork:
        """``input``: [members, n], flat or not; ``output``: [n], this member's row of the sum."""
        _require_host([output, input])
        _require_size(input, self.size() * output.nbytes)
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        with_mpi, function = _operation(op, input.dtype)
        if input.dtype in _NARROW:
            every = input.new_empty(self.size(), output.numel())
            return self._exchange(
                "reduce-scatter", list(input.view(self.size(), -1)), list(every), opts, [output],
                lambda: _reduce_rows(output, every, function, op),
            )  # fmt: skip
        counts = [output.numel()] * self.size()
        return self._collective(
            f"reduce-scatter of {input.nbytes} bytes", [output, input], opts,
            lambda: self._comm.Ireduce_scatter(_typed(input), _typed(output), counts, with_mpi), [output],
            lambda: _divide(output, op, self.size()),
        )  # fmt: skip

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> MpiWork:
        (tensor,), root = tensors, 0 if opts is None else int(opts.rootRank)
        what = f"broadcast of {tensor.nbytes} bytes from rank {self._ranks[root]}"
        return self._collective(what, [tensor], opts, lambda: self._comm.Ibcast(_bytes(tensor), root), [tensor])

    def barrier(self, opts: Any = None) -> MpiWork:
        return self._collective("barrier", [], opts, self._comm.Ibarrier, [])

    # Names of the same in other versions of torch.
    alltoall_base = all_to_all_single
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _exchange(
        self, name: str, gives: Sequence[torch.Tensor], takes: Sequence[torch.Tensor], opts: Any,
        result: Sequence[torch.Tensor] | None = None, finish: Callable[[], None] | None = None,
    ) -> MpiWork:  # fmt: skip
        """``gives[i]`` to member i, and what member i gives this one into ``takes[i]``; parts of any size."""
        if len(gives) != self.size() or len(takes) != self.size():
            counts = f"{len(gives)} given and {len(takes)} taken"
            raise ValueError(f"{BACKEND}: {name} needs a tensor per member ({self.size()}); there are {counts}")
        _require_host([*gives, *takes])
        _require_size(takes[self._me], gives[self._me].nbytes)
        tag = self._tags + next(self._exchanges) % self._tags
        others = [i for i in range(self.size()) if i != self._me]
        if takes[self._me].numel():
            with torch.inference_mode():
                takes[self._me].copy_(gives[self._me].view_as(takes[self._me]))

        def post() -> list[Part]:
            parts = [self._irecv(takes[i], i, tag) for i in others]
            return parts + [self._isend(gives[i], i, tag) for i in others]

        what = f"{name} in the group {list(self._ranks)}"
        return self._start(what, [*gives, *takes], post, takes if result is None else result, finish, opts)

    def _collective(
        self, name: str, tensors: Sequence[torch.Tensor], opts: Any, post: Callable[[], MPI.Request],
        result: Sequence[torch.Tensor], finish: Callable[[], None] | None = None,
    ) -> MpiWork:  # fmt: skip
        """A collective of MPI, which does not say which of the other members it waits for."""
        others = tuple(rank for rank in self._ranks if rank != self._world.rank)
        what = f"{name} in the group {list(self._ranks)}"
        return self._start(what, tensors, lambda: [Part(post(), others)], result, finish, opts)

    def _start(
        self, what: str, tensors: Sequence[torch.Tensor], post: Callable[[], list[Part]],
        result: Sequence[torch.Tensor] = (), finish: Callable[[], None] | None = None, opts: Any = None,
    ) -> MpiWork:  # fmt: skip
        _require_host(tensors)
        given = opts.timeout.total_seconds() if opts is not None else 0.0  # torch's "not given" is negative
        try:
            with self._world.lock:
                parts = post()
        except MPI.Exception as error:
            raise RuntimeError(f"{BACKEND}: {what} cannot start: {error.Get_error_string()}") from error
        return MpiWork(self._world, what, parts, given if given > 0 else self._seconds, tensors, result, finish)

    def _isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Part:
        return Part(self._comm.Isend(_bytes(tensor), dst, tag), (self._ranks[dst],))

    def _irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Part:
        return Part(self._comm.Irecv(_bytes(tensor), src, tag), (self._ranks[src],), tensor.nbytes)

    def _checked(self, tag: int) -> int:
        if not 0 <= tag < self._tags:
            raise ValueError(f"{BACKEND}: tag {tag} is out of range; MPI has 0 to {self._tags - 1} here")
        return tag


def _refuse(name: str) -> Callable[..., NoReturn]:
    def refused(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{BACKEND} does not serve {name}")

    return refused


for _name in _REFUSED:  # torch's own text would blame the device
    setattr(MpiProcessGroup, _name, _refuse(_name))


def _require_host(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(f"{BACKEND} moves host memory; this tensor is on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"{BACKEND} needs contiguous tensors; this one has strides {tensor.stride()}")


def _require_size(tensor: torch.Tensor, size: int) -> None:
    if tensor.nbytes != size:
        raise ValueError(f"{BACKEND}: a tensor of {tensor.nbytes} bytes meets {size} bytes")


def _split(tensor: torch.Tensor, rows: Sequence[int], members: int) -> list[torch.Tensor]:
    """The rows of each member; no numbers: equal parts."""
    length = tensor.shape[0] if tensor.dim() else 0
    sizes = list(rows) or [length // members] * members
    if len(sizes) != members or min(sizes) < 0 or sum(sizes) != length:
        raise ValueError(f"{BACKEND}: {length} rows cannot be split into {sizes} for {members} members")
    return list(tensor.split(sizes))


def _bytes(tensor: torch.Tensor) -> list[Any]:
    """What MPI takes for a buffer of bytes; valid while the tensor lives."""
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), MPI.BYTE]


def _typed(tensor: torch.Tensor) -> list[Any]:
    return [MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes), tensor.numel(), _TYPES[tensor.dtype]]


def _operation(op: Any, dtype: torch.dtype) -> tuple[MPI.Op, Callable[..., torch.Tensor]]:
    """MPI's and torch's form of a reduction.

    Raises:
        ValueError: there is none for this operation or dtype.
    """
    if dtype not in _TYPES and dtype not in _NARROW:
        known = ", ".join(str(d).removeprefix("torch.") for d in (*_TYPES, *_NARROW))
        raise ValueError(f"{BACKEND} reduces {known}; not {dtype}")
    for known_op, with_mpi, function in _OPERATIONS:
        if op == known_op and not (op == dist.ReduceOp.AVG and not dtype.is_floating_point):
            return with_mpi, function
    raise ValueError(f"{BACKEND} does not reduce {dtype} by {op}")


def _divide(tensor: torch.Tensor, op: Any, members: int) -> None:
    if op == dist.ReduceOp.AVG:
        tensor.div_(members)


def _reduce_rows(tensor: torch.Tensor, rows: torch.Tensor, function: Callable[..., torch.Tensor], op: Any) -> None:
    """rows: [members, n] -> tensor, n elements; the same on all members."""
    total = function(rows.float(), dim=0)
    _divide(total, op, len(rows))
    tensor.view(-1).copy_(total)
