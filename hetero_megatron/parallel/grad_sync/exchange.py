"""One bucket on one rank: packing, exchanging and adding gradients; sending updated parameters back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hetero_megatron.comm import Comm, Group, Work
from hetero_megatron.layout import Box
from hetero_megatron.parallel.grad_sync.flat_memory import FlatTensors
from hetero_megatron.parallel.grad_sync.routes import HopRoutes, OwnedPiece, Parts, Slices, local_pieces
from hetero_megatron.plans.buckets import Bucket


class HopExchange:
    """One hop on one rank: arrays of ``sources`` are summed into arrays of ``targets``; back, values go from targets
    into sources.

    Args:
        sent_as: dtype in which partial sums travel; they are rounded to it for each hop, never this rank's own, and
            added up in their own dtype. None: as they are.
        fixed_order: sums are added in the order of ranks also where a device's library could add them.

    Attributes:
        runs: of its routes; None packs and unpacks also where that is not needed.
        equal_runs: they are of one size, and the group's library gathers and adds up such parts in one collective.
        fills: False for a dry run: messages and sums take their memory, and nothing is copied or added there.
    """

    fills = True

    def __init__(
        self, routes: HopRoutes, group: Group, sources: Sequence[OwnedPiece], targets: Sequence[OwnedPiece],
        sent_as: torch.dtype | None = None, fixed_order: bool = False,
    ) -> None:  # fmt: skip
        self.routes, self.group, self.me, self.sent_as = routes, group, group.comm.rank, sent_as
        self.sources, self.targets, self.runs = sources, targets, routes.runs
        sizes = {run.stop - run.start for run in routes.runs or ()}
        self.equal_runs = len(sizes) == 1 and group.size > 1 and group.has_collectives
        self._library_sums = self.equal_runs and sent_as is None and not fixed_order
        self._handle: Work | None = None
        self._dtype = torch.float32  # of what is summed
        self._used: list[torch.Tensor] = []  # by the exchange, on other streams of a device than their own
        self._queued = group.comm.accelerator is not None

    @property
    def size(self) -> int:
        """Elements that this rank sums up."""
        return self.routes.size

    @property
    def given(self) -> int:
        """Elements of partial sums that others add up, and of parameters that come back."""
        return sum(self.routes.give_counts)

    @property
    def taken(self) -> int:
        """Elements of partial sums that come from others, and of parameters that they get."""
        return sum(self.routes.take_counts)

    @property
    def arrived(self) -> bool:
        """Whether what was started would end without the host waiting."""
        return self._handle is None or self.group.in_stream_order or self._handle.done

    @property
    def packed(self) -> tuple[int, int, int]:
        """Elements copied into a message on the way to the owners, into one on the way back, and out of that."""
        return (self.given, self.taken, self.given) if self.runs is None else (0, 0, 0)

    def _counts(self, mine: int, others: int) -> list[int]:
        return [mine if r == self.me else others for r in self.group.ranks]

    def start(
        self, arrays: Sequence[torch.Tensor], empty: torch.Tensor, memory: torch.Tensor | None = None
    ) -> None:
        """Send off the parts of my partial sums that others are to add: out of ``memory``, where they lie in ``runs``,
        or packed; ``empty``: [0], of their dtype. ``arrays``: one per source, of its shape;
        ``memory``: [elements of the bucket]."""
        if self.group.size == 1:
            return
        self._dtype = empty.dtype
        if self.runs is None:
            send = empty.new_empty(self.given, dtype=self.sent_as)
            if self.fills and self.given:  # straight into the message: parts with gaps would need copies of their own
                parts = [arrays[i][index] for i, index in self.routes.given]
                rows = send.split([part.numel() for part in parts])
                torch._foreach_copy_([row.view(part.shape) for row, part in zip(rows, parts, strict=True)], parts)
            self._hold(send)
            self._handle = self.group.all_to_all(send, self.routes.give_counts, self.routes.take_counts)
            return
        assert memory is not None
        if self._library_sums:
            self._handle = self.group.reduce_scatter(memory, memory.new_empty(self.size))
            return
        counts, own_index = [x.stop - x.start for x in self.runs], self.group.index
        own_size = self.size if self._own_travels else 0
        if self.sent_as is not None:
            other_runs = [memory[run] for i, run in enumerate(self.runs) if i != own_index]
            send = memory.new_empty(len(memory) - self.size, dtype=self.sent_as)
            torch._foreach_copy_(list(send.split([len(part) for part in other_runs])), other_runs)
            self._hold(send)
        else:  # of more than two, with my own part, so that it is one piece
            send = memory if self._own_travels else memory[self.runs[1 - own_index]]
        counts[own_index] = own_size
        self._handle = self.group.all_to_all(send, counts, self._counts(own_size, self.size))

    @property
    def _own_travels(self) -> bool:
        """With ``runs``: whether this rank's own part is among what it sends and gets."""
        return self.group.size > 2 and self.sent_as is None

    def finish(
        self, arrays: Sequence[torch.Tensor | None], memory: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """The sums, one array per target, partial sums added in rank order, or to this rank's own where the first
        other one does not send all, or by the library in its own order; ``arrays`` that the routes do not keep may be
        None. ``memory``: [elements of the bucket].

        With ``runs`` the sums lie in ``memory``, where my own part was.
        """
        if self.group.size == 1:
            return [_part(arrays, i, index) for i, index in self.routes.give.get(self.me, ())]
        received = self._wait()
        self._hold(received)
        if self.runs is not None:
            assert memory is not None
            own_sums = memory[self.runs[self.group.index]]
            if self._library_sums:
                own_sums.copy_(received)
            elif self.group.size == 2:  # which of two is added to the other does not matter
                own_sums += received
            elif self.size and self._own_travels:
                torch.sum(received.view(self.group.size, self.size), 0, out=own_sums)
            elif self.size:
                own_sums += received.view(-1, self.size).sum(0, dtype=own_sums.dtype)
            return [own_sums[t.offset : t.offset + t.box.size].view(t.box.shape) for t in self.targets]
        # Who sends nothing has no chunk: of hundreds of members most may hold nothing of what is summed up here.
        senders = [r for r in self.group.ranks if r != self.me and r in self.routes.take]
        begin = senders[0] if senders and senders[0] in self.routes.sends_all else self.me
        if begin == self.me:
            total = received.new_empty(self.size, dtype=self._dtype)
            if self.size and self.me not in self.routes.sends_all:
                total.zero_()
        elif len(senders) == 1:  # its part becomes the sum; of the first two it does not matter which is added
            total = received.to(self._dtype)
        else:
            total = received[: self.size].to(self._dtype, copy=True)
        views = [total[t.offset : t.offset + t.box.size].view(t.box.shape) for t in self.targets]
        if self.fills:
            self._add_up(views, total, received, arrays, begin)
        return views

    def _add_up(
        self,
        views: list[torch.Tensor],
        total: torch.Tensor,
        received: torch.Tensor,
        arrays: Sequence[torch.Tensor | None],
        begin: int,
    ) -> None:
        """Add to ``total`` (in pieces: ``views``) what all but ``begin`` sent, and this rank's own part, which is
        copied there if it is what to begin with. ``total``: [elements of the targets]; ``received``: [elements that
        others sent]."""
        take = self.routes.take
        own_parts = [_part(arrays, i, index).to(total.device) for i, index in self.routes.give.get(self.me, ())]
        own_views = [views[to][index] for to, index in take.get(self.me, ())]
        if begin == self.me and own_views:  # one launch, however many pieces
            torch._foreach_copy_(own_views, own_parts)
        counts = {r: n for r, n in zip(self.group.ranks, self.routes.take_counts, strict=True) if n}
        chunks = dict(zip(counts, received.split(list(counts.values())), strict=True))
        for rank in self.group.ranks:
            if rank == begin or rank not in take:
                continue
            if rank == self.me:
                torch._foreach_add_(own_views, own_parts)
            elif rank in self.routes.sends_all:
                total += chunks[rank]
            else:
                self._add(views, chunks[rank], take[rank])

    @staticmethod
    def _add(views: list[torch.Tensor], chunk: torch.Tensor, parts: Parts) -> None:
        """Add ``chunk`` [elements that one rank sent] to parts of the views."""
        start = 0
        for to, index in parts:
            target = views[to][index]
            target += chunk[start : start + target.numel()].view(target.shape)
            start += target.numel()

    def start_back(
        self, arrays: Sequence[torch.Tensor], dtype: torch.dtype, memory: torch.Tensor | None = None
    ) -> None:
        """Send my targets' values (in ``dtype``) to the ranks that have them among their sources; with ``runs`` they
        are in ``memory`` already, and there what comes is written. ``arrays``: one per target, of its shape;
        ``memory``: [elements of the bucket]."""
        if self.group.size == 1:
            return
        if self.runs is None:
            device = self.group.comm.device  # masters may be in host memory
            send, offset = torch.empty(self.taken, dtype=dtype, device=device), 0
            targets: list[torch.Tensor] = []
            sources: list[torch.Tensor] = []
            for ranks, parts_wanted in self.routes.wanted if self.fills else ():
                parts = [arrays[i][index] for i, index in parts_wanted]
                size = sum(part.numel() for part in parts)
                rows, begin = send[offset : offset + ranks * size].view(ranks, size), 0
                for part in parts:  # once for each of them
                    targets.append(rows[:, begin : begin + part.numel()].view(ranks, *part.shape))
                    sources.append(part.expand(ranks, *part.shape))
                    begin += part.numel()
                offset += ranks * size
            if targets:  # one launch, however many pieces
                torch._foreach_copy_(targets, sources)
            self._handle = self.group.all_to_all(send, self.routes.take_counts, self.routes.give_counts)
            return
        assert memory is not None
        own_part, parts = memory[self.runs[self.group.index]], [memory[run] for run in self.runs]
        if self.equal_runs:
            self._handle = self.group.all_gather(own_part, memory)
        else:
            self._handle = self.group.exchange([own_part] * self.group.size, parts)

    def finish_back(self, arrays: Sequence[torch.Tensor]) -> None:
        """Write what came into my sources; the parts that are my own targets are there already. ``arrays``: one per
        source, of its shape [rows, columns]."""
        if self.group.size == 1:
            return
        if self.runs is not None:
            self._ended()
            return
        received = self._wait()
        if not self.fills:
            return
        targets = [arrays[i][index] for i, index in self.routes.given]
        if targets:  # one launch, however many pieces
            parts = received.split([t.numel() for t in targets])
            torch._foreach_copy_(targets, [part.view(t.shape) for part, t in zip(parts, targets, strict=True)])

    def _hold(self, tensor: torch.Tensor) -> None:
        """Keep a message [elements] until no stream uses it."""
        if self._queued:
            self._used.append(tensor)

    def forget(self) -> None:
        """Hold on to nothing: all streams have done what was started."""
        self._used.clear()

    def _wait(self) -> torch.Tensor:
        """What came: [elements]."""
        received = self._ended()
        assert received is not None
        return received

    def _ended(self) -> torch.Tensor | None:
        assert self._handle is not None, "finish without start"
        handle, self._handle = self._handle, None
        return handle.wait()


class BucketExchange:
    """Gradients to owners, parameters to holders, for one bucket, in one hop or two.

    What lies between two hops are boxes of this rank's own parameters, so new values need no memory on their way back.

    Args:
        boxes: of this rank's parameters in their logical tensors.
        sent_as: dtype in which gradients travel; None: as they are. fixed_order: of sums, as of :class:`HopExchange`.
        routes: routes by layouts (which live as long as the buckets do), of other buckets of this rank; added to.
        kept: pieces that this rank keeps of the bucket's tensors, where its stage divides them: sums are of these, and
            parameters come into arrays of them, which :func:`by_key` names; None: they are whole.
    """

    def __init__(
        self, bucket: Bucket, comm: Comm, boxes: Mapping[str, Box], routes: dict[tuple[object, ...], HopRoutes],
        sent_as: torch.dtype | None = None, kept: Sequence[OwnedPiece] | None = None, fixed_order: bool = False,
    ) -> None:  # fmt: skip
        self.bucket = bucket
        kept_boxes = {p.name: [q.box for q in kept if q.name == p.name] for p in kept} if kept is not None else None
        layers = [local_pieces(bucket.hops[0].sources, comm.rank, boxes, kept_boxes)]
        layers += [local_pieces(hop.targets, comm.rank, boxes, kept_boxes) for hop in bucket.hops]
        self.pieces = layers[-1]
        self.hops = []
        for hop, sources, targets in zip(bucket.hops, layers[:-1], layers[1:], strict=True):
            ranks = hop.group(comm.rank)
            key = (ranks, bucket.dense, *map(id, hop.sources.values()), *map(id, hop.targets.values()))
            if key not in routes:
                routes[key] = HopRoutes(hop, ranks, comm.rank, sources, targets, bucket.dense)
            group = comm.group(ranks, lane=-1)
            self.hops.append(HopExchange(routes[key], group, sources, targets, sent_as, fixed_order))
        self._arrays: list[torch.Tensor | None] = []
        self._memory = torch.empty(0)

    def arrived(self, hop: int) -> bool:
        """Whether finishing a hop that was started would not wait."""
        return self.hops[hop].arrived

    def start_reduce(self, hop: int, grads: FlatTensors | None = None) -> None:
        """Send partial sums a hop towards their owners; ``grads``: the bucket's, for the first hop, kept as needed.
        Of a dense bucket they are views of one memory [elements of the bucket]."""
        exchange = self.hops[hop]
        if hop == 0:
            assert grads is not None
            self._arrays = [grads.views[s.key] for s in exchange.sources]
            self._memory = grads.memory
        arrays: list[torch.Tensor] = self._arrays  # type: ignore[assignment]  # all are there until they are packed
        exchange.start(arrays, self._memory[:0], self._memory)
        self._arrays = [x if i in exchange.routes.kept else None for i, x in enumerate(self._arrays)]

    def finish_reduce(self, hop: int) -> list[torch.Tensor]:
        """The sums of the hop's targets: after the last hop, of the owned pieces. Each of its piece's shape: [rows,
        columns]."""
        sums = self.hops[hop].finish(self._arrays, self._memory)
        self._arrays = list(sums) if hop + 1 < len(self.hops) else self._arrays
        return sums

    @property
    def in_place(self) -> bool:
        """Whether the sums lie in the memory of the gradients."""
        return all(hop.group.size == 1 or hop.runs is not None for hop in self.hops)

    def forget(self) -> None:
        """Hold on to no gradients, nor to what was sent and received: all streams have done with it."""
        self._arrays, self._memory = [], torch.empty(0)
        for hop in self.hops:
            hop.forget()

    def start_spread(
        self, hop: int, masters: Sequence[torch.Tensor], params: Mapping[str, torch.Tensor], dtype: torch.dtype,
        flat: FlatTensors | None,
    ) -> None:  # fmt: skip
        """Send the updated owned pieces (or, of an earlier hop, what came of them) a hop towards their holders.

        ``dtype``: of the parameters; ``flat``: where they lie one after the other, with all owned ones up to date; for
        dense buckets.
        """
        exchange = self.hops[hop]
        last = hop + 1 == len(self.hops)
        memory = flat.memory if flat is not None else None
        exchange.start_back(masters if last else _views(exchange.targets, params), dtype, memory)

    def finish_spread(self, hop: int, params: Mapping[str, torch.Tensor]) -> None:
        """Write what came into the local parameters, [rows, columns] each."""
        exchange = self.hops[hop]
        exchange.finish_back(_views(exchange.sources, params))


def _views(pieces: Sequence[OwnedPiece], params: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Pieces inside the local parameters, [rows, columns] each."""
    return [params[p.key][p.slices] for p in pieces]


def _part(arrays: Sequence[torch.Tensor | None], index: int, at: Slices) -> torch.Tensor:
    """A part of one of them: [rows, columns]."""
    array = arrays[index]
    assert array is not None, "given up before it was summed"
    return array[at]
