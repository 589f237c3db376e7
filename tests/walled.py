"""A vendor whose library is gloo behind a wall: it refuses ranks that are not its own, and notes what it carried."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from hetero_megatron.platform import CPU, Platform

BACKEND = "walled"


class Walled(CPU):
    name, vendor, library, backends = "walled", "Walled Inc.", "wccl", (BACKEND,)

    def load(self) -> None:
        if BACKEND not in dist.Backend.backend_list:
            dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Every member leaves its vendor in the store; only its own ranks make such groups."""
    store.set(f"walled/{rank}", Walled.vendor)
    store.wait([f"walled/{r}" for r in range(size)], timeout)
    return dist.ProcessGroupGloo(dist.PrefixStore("walled", store), rank, size, timeout)


def platform(name: str) -> Platform:
    if name == "cpu":
        return Platform(torch.device("cpu"), "gloo")
    assert name == "walled", name
    vendor = Walled()
    vendor.load()
    return Platform(torch.device("cpu"), BACKEND, vendor)
