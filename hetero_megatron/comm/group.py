"""Groups of ranks that exchange data, by their island's library or over the bridge."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hetero_megatron.comm.bridge import Bridge
from hetero_megatron.comm.hooks import TorchWork
from hetero_megatron.comm.work import MessageWorks, Transport, Work, Works
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import parse_json
from hetero_megatron.utils.text import plural

MAX_BYTES = 1 << 30  # of one value; the chunks of a rank's checkpoint take about 200 bytes each


class _WrongType(Exception):
    pass


def encode(value: object) -> bytes:
    """A value of one of the kinds as UTF-8 JSON. TypeError: of none of them."""
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode(data: bytes, kind: Any, source: str) -> Any:
    """The value that was encoded.

    Args:
        source: the sender, for error messages.

    Raises:
        UserError: it is not a value of this kind.
    """
    try:
        return _typed(parse_json(data, source), kind)
    except _WrongType as error:
        raise UserError(
            f"{source} sent {error}", accepted="the same version of hetero-megatron on every rank, and nobody else"
        ) from None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    raise TypeError(f"{type(value).__name__} does not travel between ranks: {value!r}")


@functools.cache
def _field_kinds(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _typed(value: Any, kind: Any) -> Any:
    if kind is Any:
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (None, type(None), bool, int, str):
        if type(value) is not (kind or type(None)):
            raise _WrongType(f"{_shown(value)} for {_name(kind)}")
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of(value, arguments, kind)
    if origin is list and isinstance(value, list):
        return [_typed(item, arguments[0]) for item in value]
    if origin is tuple and isinstance(value, list):
        if arguments[1:] == (...,):
            return tuple(_typed(item, arguments[0]) for item in value)
        if len(value) == len(arguments):
            return tuple(_typed(item, inner) for item, inner in zip(value, arguments, strict=True))
    if origin is dict and isinstance(value, dict) and (arguments[0] is str or not value):
        return {key: _typed(item, arguments[1]) for key, item in value.items()}
    if origin is dict and isinstance(value, list) and arguments[0] is not str:
        return dict(_typed(value, list[tuple[arguments]]))  # type: ignore[valid-type]
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        kinds = _field_kinds(typing.cast(type, kind))
        if value.keys() == kinds.keys():
            return kind(**{name: _typed(value[name], inner) for name, inner in kinds.items()})  # type: ignore[operator]
    raise _WrongType(f"{_shown(value)} for {_name(kind)}")


def _one_of(value: Any, kinds: tuple[Any, ...], whole: Any) -> Any:
    for kind in kinds:
        try:
            return _typed(value, kind)
        except _WrongType:
            pass
    raise _WrongType(f"{_shown(value)} for {_name(whole)}")


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)


def _shown(value: Any, limit: int = 60) -> str:
    text = json.dumps(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


MOST_MESSAGES = 8  # largest group whose all-to-all uses messages: gloo's own sends in one direction at a time
T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """A process group whose members are in any order; ``index``: this rank's position among them.

    torch orders the members of a group by ascending rank. Calls with an entry per member (``exchange``,
    ``gather_vectors``) use the order of ``ranks`` without copies. A flat buffer would have to be copied, so
    ``all_to_all`` and ``gather_objects`` require ascending ranks.

    If the members are in several islands without a common library, everything goes as messages over ``_bridge`` and
    ``_handle`` is a gloo group. ``_library``: ``_handle`` belongs to a device library. ``narrow_sums``: sums of 16-bit
    values may be that library's, which rounds after every addition.
    """

    comm: Transport
    ranks: tuple[int, ...]
    _handle: dist.ProcessGroup | None
    _bridge: Bridge | None = None
    _library: bool = False
    narrow_sums: bool = False

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def index(self) -> int:
        return self.ranks.index(self.comm.rank)

    @property
    def in_stream_order(self) -> bool:
        """Whether waiting for its transfers holds up the device's stream only, not the host."""
        return self._library

    def connect(self) -> None:
        """A collective of nothing worth moving, for which host and device wait; all members call it."""
        assert self._library and self._handle is not None
        part = torch.zeros(1, device=self.comm.device)
        parts = [torch.empty_like(part) for _ in self.ranks]
        work = self.comm.start(self._others(), lambda: dist.all_gather(parts, part, group=self._handle, async_op=True))
        Work(self.comm, work, None, self._others(), parts).wait()
        if self.comm.accelerator is not None:
            self.comm.accelerator.synchronize()

    def destroy(self) -> None:
        """End the library's group, with its threads; neither this group nor one that shares it is used afterwards."""
        if self._handle is not None:
            dist.destroy_process_group(self._handle)

    def _ascending(self, by_member: Sequence[T]) -> list[T]:
        """One entry per member, in torch's order of the members."""
        return [entry for _, entry in sorted(zip(self.ranks, by_member, strict=True), key=lambda pair: pair[0])]

    def all_to_all(
        self,
        send: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        into: torch.Tensor | None = None,
    ) -> Work:
        """Ragged all-to-all of a flat buffer; the group's ranks must be ascending.

        Args:
            send: [sum(send_counts)], parts in group order, contiguous.
            send_counts, recv_counts: elements per member, including this one; may be zero.
            into: output [sum(recv_counts)], contiguous; None: new memory.

        Returns:
            A handle whose result is [sum(recv_counts)], parts in group order.
        """
        if self._handle is None:
            return Work(self.comm, None, send, ())
        assert list(self.ranks) == sorted(self.ranks), f"parts of a flat buffer are in ascending order: {self.ranks}"
        self.count(send, send_counts)
        recv = send.new_empty(sum(recv_counts)) if into is None else into
        sizes = {r: n * send.element_size() for r, n in zip(self.ranks, send_counts) if r != self.comm.rank}

        messages = send.device.type == "cpu" and self.size <= MOST_MESSAGES

        def start() -> dist.Work | Works:
            if self._bridge is not None or messages:
                outgoing, incoming = send.split(list(send_counts)), recv.split(list(recv_counts))
                incoming[self.index].copy_(outgoing[self.index])
                return self._messages(outgoing, incoming)
            return dist.all_to_all_single(
                recv, send, list(recv_counts), list(send_counts), group=self._handle, async_op=True
            )

        work = self.comm.start(self._others(), start, sizes, self.ranks)
        return Work(self.comm, work, recv, self._others(), send, collective=True)

    def exchange(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> Work:
        """Send part i to member i and receive its part into ``receive[i]``, without packing.

        Parts are contiguous; this rank's own are ignored. In host memory single messages are used, which take half the
        time of gloo's all-to-all (benchmarks/bench_tp.py); on devices one launch.
        """
        if self._handle is None:
            return Work(self.comm, None, None, ())
        self.count(send[0], [x.numel() for x in send])
        sizes = {r: x.nbytes for r, x in zip(self.ranks, send, strict=True) if r != self.comm.rank}
        messages = self._bridge is not None or send[0].device.type == "cpu"
        start = self._messages if messages else self._one_launch
        work = self.comm.start(self._others(), lambda: start(send, receive), sizes, tuple(sorted(self.ranks)))
        return Work(self.comm, work, None, self._others(), send, collective=True)

    @property
    def has_collectives(self) -> bool:
        """Whether a device library provides :meth:`all_gather` and :meth:`reduce_scatter` for this order of ranks."""
        return self._library and list(self.ranks) == sorted(self.ranks)

    def all_gather(self, part: torch.Tensor, into: torch.Tensor) -> Work:
        """Every member's ``part`` [n] -> ``into`` [size x n] in group order; both contiguous."""
        assert self.has_collectives and into.numel() == self.size * part.numel()
        self.count(part, [part.numel()] * self.size)
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the latter until torch 2.12
        return self._collective(gather, into, part, part.nbytes)

    def reduce_scatter(self, parts: torch.Tensor, into: torch.Tensor) -> Work:
        """``parts`` [size x n], one per member -> ``into`` [n], the sum over members, in the library's order and
        precision; both contiguous."""
        assert self.has_collectives and parts.numel() == self.size * into.numel()
        self.count(parts, [into.numel()] * self.size)
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return self._collective(scatter, into, parts, into.nbytes)

    def _collective(
        self, call: Callable[..., dist.Work], into: torch.Tensor, given: torch.Tensor, size: int
    ) -> Work:
        sizes = dict.fromkeys(self._others(), size)
        # A work keeps its tensors as long as it is watched, and must not keep what autograd makes of them.
        start = functools.partial(call, into.data, given.data, group=self._handle, async_op=True)
        work = self.comm.start(self._others(), start, sizes, self.ranks)
        return Work(self.comm, work, into, self._others(), given, collective=True)

    def _messages(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> Works:
        peers = [(i, rank) for i, rank in enumerate(self.ranks) if rank != self.comm.rank]
        if self._bridge is not None:
            arriving = [w for i, rank in peers for w in self._bridge.irecv(receive[i], rank)]
            return Works(arriving + [w for i, rank in peers for w in self._bridge.isend(send[i], rank)])
        handle, works = self._handle, list[TorchWork | None]()
        works += [dist.irecv(receive[i], rank, handle) for i, rank in peers if receive[i].numel()]
        works += [dist.isend(send[i], rank, handle) for i, rank in peers if send[i].numel()]
        return MessageWorks([work for work in works if work is not None])

    def _one_launch(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> dist.Work | None:
        empty = send[self.index].new_empty(0)
        outgoing = self._ascending([empty if i == self.index else x.data for i, x in enumerate(send)])
        incoming = self._ascending([empty if i == self.index else x.data for i, x in enumerate(receive)])
        return dist.all_to_all(incoming, outgoing, group=self._handle, async_op=True)  # type: ignore[no-any-return]

    def count(self, send: torch.Tensor, send_counts: Sequence[int]) -> None:
        """Add to the byte counts of each other member."""
        for peer, count in zip(self.ranks, send_counts, strict=True):
            if peer != self.comm.rank:
                self.comm.sent_bytes[peer] += count * send.element_size()

    def gather_vectors(self, vector: torch.Tensor) -> torch.Tensor:
        """[n] from every member -> [members, n], equal on all; for a few numbers per step."""
        if self._handle is None:
            return vector[None]
        own_vector = vector if self._bridge is None else vector.cpu()
        out = [torch.empty_like(own_vector) for _ in self.ranks]
        sizes = dict.fromkeys(self._others(), vector.numel() * vector.element_size())
        work = self.comm.start(
            self._others(),
            lambda: dist.all_gather(self._ascending(out), own_vector, group=self._handle, async_op=True),
            sizes,
            tuple(sorted(self.ranks)),
        )
        Work(self.comm, work, None, self._others(), collective=True).wait()
        return torch.stack(out).to(vector.device)

    def gather_objects(self, value: object, kind: Any = Any) -> list[Any]:
        """A value from every member, in group order; for start-up and reports only.

        Args:
            kind: type of the value; see :mod:`~hetero_megatron.comm.group`.

        Raises:
            UserError: a member sent a value of another type.
        """
        data = encode(value)
        encoded = [data] if self._handle is None else self._gather_bytes(data)
        return [decode(text, kind, f"rank {rank}") for rank, text in zip(self.ranks, encoded, strict=True)]

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """Gather the lengths, then the bytes padded to the longest. Not paced by emulation: not part of a step."""
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
        self.comm.check()
        out = [torch.empty_like(mine) for _ in self.ranks]
        start = time.perf_counter()
        try:
            work = dist.all_gather(out, mine, group=self._handle, async_op=True)
            if work is not None:
                self.comm.wait_for(work)
        except RuntimeError as error:
            raise self.comm.failure(self._others(), time.perf_counter() - start, error) from error
        return torch.stack(out)

    def _others(self) -> tuple[int, ...]:
        return tuple(r for r in self.ranks if r != self.comm.rank)


@dataclass(frozen=True)
class Refusal:
    """A serialisable ``UserError``; ``value``: as shown, None if there is none."""

    problem: str
    field: str
    value: str | None
    accepted: str
    where: str

    @staticmethod
    def of(error: UserError) -> Refusal:
        value = error.value if error.value is None or isinstance(error.value, str) else repr(error.value)
        return Refusal(error.problem, error.field, value, error.accepted, error.where)

    def error(self) -> UserError:
        shown = {} if self.value is None else {"value": self.value}
        return UserError(self.problem, field=self.field, accepted=self.accepted, where=self.where, **shown)


def together(group: Group, action: Callable[[], Any], kind: Any = NoneType) -> list[Any]:
    """Run ``action`` here; returns the results (of type ``kind``) of all ranks of the group.

    Raises:
        UserError: that of the first rank whose action raised one, on all ranks.
    """
    problem, own_result = None, None
    try:
        own_result = action()
    except UserError as error:
        problem = Refusal.of(error)
    answers = group.gather_objects((problem, own_result), tuple[Refusal | None, kind | None])
    for failed, _ in answers:
        if failed is not None:
            raise failed.error()
    return [outcome for _, outcome in answers]
