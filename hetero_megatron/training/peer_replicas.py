"""Copies of what each rank owns, in its own and in another rank's host memory: what survives a lost host.

After every K-th step each rank packs what it owns and sends it to its holder, while the next step computes. Two moments
are kept: the newest one counts only once all ranks have what they hold of it, which each knows when it has passed the
next step's exchange of losses; until then the one before is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hetero_megatron.comm import Group
from hetero_megatron.comm.work import Work
from hetero_megatron.layout import Box
from hetero_megatron.plans.memory.replicas import choose_holders
from hetero_megatron.training.held_state import Boxed, Held, Moment, as_bytes

ALIGNED = 8  # bytes: any element may begin there


@dataclass(frozen=True)
class PackedBox:
    """One box in a packed copy."""

    name: str
    box: Box
    dtype: str

    @property
    def bytes(self) -> int:
        return self.box.size * getattr(torch, self.dtype).itemsize

    @property
    def padded(self) -> int:
        return -(-self.bytes // ALIGNED) * ALIGNED


def entries_of(tensors: Boxed) -> list[PackedBox]:
    return [
        PackedBox(name, box, str(values.dtype).removeprefix("torch."))
        for name, parts in tensors.items()
        for box, values in parts
    ]


def pack(tensors: Boxed, entries: Sequence[PackedBox], into: torch.Tensor) -> None:
    offset = 0
    values = (values for parts in tensors.values() for _, values in parts)
    for entry, value in zip(entries, values, strict=True):
        into[offset : offset + entry.bytes].copy_(as_bytes(value))
        offset += entry.padded


def unpack(entries: Sequence[PackedBox], flat: torch.Tensor) -> Boxed:
    """Views of a packed copy."""
    tensors: Boxed = {}
    offset = 0
    for entry in entries:
        values = flat[offset : offset + entry.bytes].view(getattr(torch, entry.dtype)).view(entry.box.shape)
        tensors.setdefault(entry.name, []).append((entry.box, values))
        offset += entry.padded
    return tensors


@dataclass
class PackedState:
    """Packed copies of one moment: this rank's own and those of others.

    Attributes:
        entries: by index in the group; index: this rank's.
        moment: None: nothing is in them yet.
        complete: all that others send has come.
    """

    entries: list[list[PackedBox]]
    index: int
    local_buffer: torch.Tensor
    others: Mapping[int, torch.Tensor]
    moment: Moment | None = None
    complete: bool = False

    @property
    def bytes(self) -> int:
        return self.local_buffer.nbytes + sum(flat.nbytes for flat in self.others.values())

    def held(self, with_local: bool = True) -> list[Held]:
        """What can be gone on from."""
        if self.moment is None:
            return []
        held_states = [Held(self.moment, unpack(self.entries[self.index], self.local_buffer))] if with_local else []
        if self.complete:
            held_states += [Held(self.moment, unpack(self.entries[i], flat)) for i, flat in self.others.items()]
        return held_states


@dataclass
class CopyExchange:
    """Who sends what to whom; made by all ranks of ``group``, at the end of a step.

    Args:
        group: ascending ranks; nobody else uses it while copies travel.
        node: this rank's.
        tensors: what this rank wants to be copied.
        leaving: this rank will hold nothing, because it is about to end.
        room: by node, bytes of host memory for all copies there; see ``choose_holders``.
    """

    group: Group
    node: str
    tensors: Boxed
    leaving: bool = False
    room: Mapping[str, float] = field(default_factory=dict)
    entries: list[list[PackedBox]] = field(init=False)  # by index in the group
    holders: list[int] = field(init=False)

    def __post_init__(self) -> None:
        packed_of_ranks = self.group.gather_objects(
            (self.node, self.leaving, entries_of(self.tensors)), tuple[str, bool, list[PackedBox]]
        )
        self.entries = [entries for _, _, entries in packed_of_ranks]
        sizes = [self.size(i) for i in range(len(packed_of_ranks))]
        nodes, stays = [node for node, _, _ in packed_of_ranks], [not leaves for _, leaves, _ in packed_of_ranks]
        self.holders = choose_holders(nodes, sizes, stays, self.room)

    def size(self, index: int) -> int:
        return sum(entry.padded for entry in self.entries[index])

    @property
    def held(self) -> list[int]:
        """Whose copies this rank holds, beside its own."""
        own_index = self.group.index
        return [i for i, holder in enumerate(self.holders) if holder == own_index != i]

    def memory(self) -> PackedState:
        own_index = self.group.index
        copies = {i: torch.empty(self.size(i), dtype=torch.uint8) for i in self.held}
        return PackedState(self.entries, own_index, torch.empty(self.size(own_index), dtype=torch.uint8), copies)

    def start(self, copies: PackedState, moment: Moment, tensors: Boxed) -> Work:
        """Pack ``tensors``, with boxes as in ``entries``, and send them."""
        own_index, empty = self.group.index, torch.empty(0, dtype=torch.uint8)
        copies.moment, copies.complete = moment, False
        pack(tensors, self.entries[own_index], copies.local_buffer)
        to = self.holders[own_index]
        send = [copies.local_buffer if i == to != own_index else empty for i in range(self.group.size)]
        receive = [copies.others.get(i, empty) for i in range(self.group.size)]
        return self.group.exchange(send, receive)


def hand_over(group: Group, node: str, moment: Moment, tensors: Boxed, leaving: bool) -> list[Held]:
    """Ranks that are about to end give what they own to others. Called on all ranks of ``group``.

    Returns:
        what this rank was given.
    """
    exchange = CopyExchange(group, node, tensors if leaving else {}, leaving)
    copies = exchange.memory()
    exchange.start(copies, moment, tensors if leaving else {}).wait()
    copies.complete = True
    return copies.held(with_local=False)


class PeerReplicas:
    """The copies that a run keeps.

    Args:
        group: of the plan's ranks, or of those of an island; only for this.
        every: steps between copies.
        node: this rank's host.
        room: by node, bytes of host memory for all copies there; see ``choose_holders``.
    """

    def __init__(self, group: Group, every: int, node: str, room: Mapping[str, float] | None = None) -> None:
        self.group, self.every, self.node, self.room = group, every, node, room or {}
        self._exchange: CopyExchange | None = None
        self._slots: list[PackedState] = []
        self._form: tuple[bool, ...] = ()
        self._under_way: Work | None = None

    @property
    def bytes(self) -> int:
        """Host memory of all copies here."""
        return sum(slot.bytes for slot in self._slots)

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def start(self, moment: Moment, tensors: Boxed, form: tuple[bool, ...]) -> None:
        """Begin to copy. Called on all ranks, with none under way.

        Args:
            form: of what there may be tensors: another one than before where there are others; equal on all ranks.
        """
        assert self._under_way is None
        if self._exchange is None or form != self._form:
            self._exchange = CopyExchange(self.group, self.node, tensors, room=self.room)
        self._form = form
        older = self._slots[0] if len(self._slots) == 2 else None
        same_layout = older is not None and older.entries is self._exchange.entries
        self._slots = [*self._slots[-1:], older if older is not None and same_layout else self._exchange.memory()]
        self._under_way = self._exchange.start(self._slots[-1], moment, tensors)

    def wait(self) -> None:
        """Until the copies that this rank holds are here, and its own is gone."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way, self._slots[-1].complete = None, True

    def held(self) -> list[Held]:
        """What is in this rank's memory."""
        return [state for slot in self._slots for state in slot.held()]
