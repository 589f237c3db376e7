"""A communicator without peers: shapes, byte counts and message order are real, values are not.

One process can run any rank of any plan with fake tensors, to see what it would send and allocate.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from hetero_megatron.comm.comm import Comm
from hetero_megatron.comm.group import Group, decode, encode
from hetero_megatron.comm.work import Work


class FakeGroup(Group):
    """Returns uninitialised values of the right size immediately."""

    def all_to_all(
        self,
        send: torch.Tensor,
        send_counts: Sequence[int],
        recv_counts: Sequence[int],
        into: torch.Tensor | None = None,
    ) -> Work:
        if self.size == 1:
            return Work(self.comm, None, send, ())
        assert send.numel() == sum(send_counts), f"{send.numel()} elements for counts {send_counts}"
        assert into is None or into.numel() == sum(recv_counts), f"{into.numel()} elements for counts {recv_counts}"
        self.count(send, send_counts)
        recv = send.new_empty(sum(recv_counts)) if into is None else into
        return Work(self.comm, None, recv, (), send)  # alive until waited for, as in earnest

    def exchange(self, send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor]) -> Work:
        self.count(send[0], [x.numel() for x in send])
        return Work(self.comm, None, None, (), send)

    def gather_vectors(self, vector: torch.Tensor) -> torch.Tensor:
        return torch.stack([vector] * self.size)

    def gather_objects(self, value: object, kind: Any = Any) -> list[Any]:
        return [decode(encode(value), kind, f"rank {rank}") for rank in self.ranks]


class FakeComm(Comm):
    """Communicator of rank ``rank`` in a job without other ranks."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(rank, device, timedelta(0))

    def _create(self, key: tuple[int, ...]) -> Group:
        return FakeGroup(self, key, None)

    def through_host(self, peer: int) -> bool:
        return False  # what others allocate depends on the vendors

    def isend(self, tensor: torch.Tensor, dst: int, tag: int) -> Work:
        self.sent_bytes[dst] += tensor.numel() * tensor.element_size()
        return Work(self, None, None, (), tensor)

    def irecv(self, tensor: torch.Tensor, src: int, tag: int) -> Work:
        return Work(self, None, tensor, ())
