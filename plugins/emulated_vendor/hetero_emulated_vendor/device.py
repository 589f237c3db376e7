"""``torch.emu``: devices, streams, events, memory and random numbers, by the names that ``torch.cuda`` has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from hetero_emulated_vendor.extension import extension, vendor

VISIBLE = "HETERO_EMULATED_VISIBLE"  # environment variable: numbers of the devices that this process may use
Device = torch.device | int | str | None
_DEVICE_TYPE = torch._C._autograd.DeviceType.PrivateUse1.value


def _index(device: Device = None) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def init() -> None:
    """Nothing is left to do."""


def device_count() -> int:
    visible = os.environ.get(VISIBLE)
    return int(extension.device_count()) if visible is None else len(visible.split(","))


def current_device() -> int:
    return int(extension.current_device())


def set_device(device: Device) -> None:
    extension.set_device(_index(device))


@contextlib.contextmanager
def device(index: Device) -> Iterator[None]:
    before = current_device()
    set_device(index)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: Device = None) -> str:
    return f"emulated device of the vendor {vendor()}"


def get_device_properties(device: Device = None) -> SimpleNamespace:
    return SimpleNamespace(name=get_device_name(device), total_memory=int(extension.total_memory()))


def get_device_capability(device: Device = None) -> tuple[int, int]:
    return 1, 0


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


class Stream(torch.Stream):
    """A new stream of a device, or one of torch's."""

    def __new__(cls, device: Device = None, priority: int = 0, **known: Any) -> Stream:
        if known:  # stream_id, device_index, device_type
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("emu", _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """A new event. No class of its own: torch compares the times of events of exactly its class."""
    if interprocess:
        raise RuntimeError("events of the emulated device belong to one process")
    return torch.Event("emu", enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Device = None) -> torch.Stream:
    index = _index(device)
    return Stream(stream_id=extension.current_stream(index), device_index=index, device_type=_DEVICE_TYPE)


def default_stream(device: Device = None) -> torch.Stream:
    return Stream(stream_id=0, device_index=_index(device), device_type=_DEVICE_TYPE)


def set_stream(stream: torch.Stream) -> None:
    extension.set_stream(stream.device_index, stream.stream_id)


@contextlib.contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    """Make a stream, and its device, the current one."""
    if chosen is None:
        yield
        return
    device_before, before = current_device(), current_stream(chosen.device_index)
    set_stream(chosen)
    try:
        yield
    finally:
        set_stream(before)
        set_device(device_before)


def synchronize(device: Device = None) -> None:
    """Wait for all streams of a device."""
    extension.synchronize(_index(device))


def memory_allocated(device: Device = None) -> int:
    return int(extension.memory(_index(device))[0])


def max_memory_allocated(device: Device = None) -> int:
    return int(extension.memory(_index(device))[1])


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated


def reset_peak_memory_stats(device: Device = None) -> None:
    extension.reset_peak_memory(_index(device))


def empty_cache() -> None:
    """Nothing is cached."""


def mem_get_info(device: Device = None) -> tuple[int, int]:
    total = int(extension.total_memory())
    return total - memory_allocated(device), total


def manual_seed(seed: int) -> None:
    extension.default_generator(current_device()).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        extension.default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    return int(extension.default_generator(current_device()).initial_seed())


def get_rng_state(device: Device = None) -> torch.Tensor:
    return extension.default_generator(_index(device)).get_state()  # type: ignore[no-any-return]


def set_rng_state(state: torch.Tensor, device: Device = None) -> None:
    extension.default_generator(_index(device)).set_state(state)


def check_host_read(tensor: torch.Tensor) -> None:
    """Raise RuntimeError if an asynchronous copy into this host tensor has not been waited for."""
    extension.check_host_read(tensor)


def findings() -> list[str]:
    """Races found where nothing could be raised (memory that was released too early), which the next call on the
    device would raise; they are forgotten."""
    return list(extension.findings())


def host_waits() -> dict[str, int]:
    """How often the host of this process was held up so far until the device had done what was queued, by what held it
    up: an operator that tells the host a value or needs one for a shape, a copy that is not asynchronous or not of
    pinned memory, a synchronisation."""
    return dict(extension.host_waits())


def communicators() -> int:
    """How many communicators this process has made so far: of groups, at their first collective, and of pairs."""
    return int(extension.communicators())


def launches() -> dict[str, int]:
    """How many operators, copies and graphs the host of this process launched so far, by name. Views are none; what a
    graph holds is counted neither when it is captured nor when it runs."""
    return dict(extension.launches())


def loaded_kernels() -> list[str]:
    """The kernels that this process has used so far, by operator and dtypes, in the order of their first use."""
    return list(extension.loaded_kernels())
