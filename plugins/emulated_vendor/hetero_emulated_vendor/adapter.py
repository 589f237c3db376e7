"""Registers the device ``emu`` and its backend ``emuccl`` with torch; to be imported before the device is used."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hetero_emulated_vendor import device
from hetero_emulated_vendor.extension import extension, vendor


def make_backend(options: Any, _: Any = None) -> Any:
    """The creator that ``register_backend`` asks for: ``options`` has store, rank, size and time-out of the group."""
    store, rank, size = options.store, options.group_rank, options.group_size
    extension.meet(store, vendor(), rank, size, options.timeout)
    inner = dist.ProcessGroupGloo(dist.PrefixStore("emuccl/inner/", store), rank, size, options.timeout)
    return extension.DeviceBackend(inner, rank, size)


def _register() -> None:
    torch.utils.rename_privateuse1_backend("emu")
    extension.register_device()
    torch._register_device_module("emu", device)
    torch.utils.generate_methods_for_privateuse1_backend()
    dist.Backend.register_backend("emuccl", make_backend, extended_api=True, devices=["emu"])


_register()
