"""A stand-in for FlagCX's torch plugin, after its sources: importing it registers the backend, for the device that it
was built for, and renames devices in the keys of stores. Here the device is the processor, and gloo moves the memory.

Attributes:
    made: (rank, size) of every group so far.
    renamed: what stores were given as prefixes, and what became of it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

made: list[tuple[int, int]] = []
renamed: list[tuple[str, str]] = []
_DEVICES = ("cuda", "mlu", "npu", "musa", "txda", "cpu")


class _Group(dist.ProcessGroupGloo):
    """What FlagCX refuses is refused."""

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        if len({part.shape for part in outputs[-1]}) > 1:
            raise RuntimeError("flagcx only support same size allgather operation")
        return super().allgather(outputs, inputs)

    def recv_anysource(self, *_: Any) -> Any:
        raise RuntimeError("flagcxBackend does not support recvAnysource")


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    made.append((rank, size))
    return _Group(store, rank, size, timeout)


def _rename(prefix: str) -> str:
    for name in _DEVICES:
        prefix = prefix.replace(name, "flagcx_dev")
    return prefix


_set_up = dist.distributed_c10d.PrefixStore.__init__


def _init(self: Any, prefix: str, store: dist.Store) -> None:
    renamed.append((prefix, _rename(prefix)))
    _set_up(self, _rename(prefix), store)


dist.distributed_c10d.PrefixStore.__init__ = _init  # type: ignore[method-assign]
dist.Backend.register_backend("flagcx", _create, devices=["cpu"])
