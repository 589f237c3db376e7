"""Registers the device ``emu`` and its backend ``emuccl`` with torch; to be imported before the device is used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hetero_emulated_vendor import device
from hetero_emulated_vendor.extension import extension, vendor, version
from hetero_megatron.comm.connectivity import Sockets

MESSAGE_CTAS = 16  # execution slots of a message, unless its group was made with fewer


@dataclass
class Options:
    """What ``new_group`` takes as ``pg_options``."""

    max_ctas: int = MESSAGE_CTAS


def make_backend(options: Any, asked: Options | None = None) -> Any:
    """The creator that ``register_backend`` asks for: ``options`` has store, rank, size and time-out of the group."""
    store, rank, size = options.store, options.group_rank, options.group_size
    extension.meet(store, f"{vendor()}{version()}", rank, size, options.timeout)
    sockets = Sockets()
    inner = dist.ProcessGroupGloo(dist.PrefixStore("emuccl/inner/", store), rank, size, options.timeout)
    ctas, connections = (asked or Options()).max_ctas, sockets.connections()
    return extension.DeviceBackend(inner, store, rank, size, options.timeout, ctas, connections)


def _register() -> None:
    extension.check_habits()
    torch.utils.rename_privateuse1_backend("emu")
    extension.register_device()
    torch._register_device_module("emu", device)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("emuccl", make_backend, extended_api=True, devices=["emu"])


_register()
