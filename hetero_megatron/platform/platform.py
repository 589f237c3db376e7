"""One accelerator (or the CPU) as the training loop sees it: device, backend, memory, synchronisation."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sys
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.platform.accelerator import Accelerator


@dataclass(frozen=True)
class Platform:
    """``device`` computes; ``backend`` is the torch.distributed backend string for groups of such platforms.

    ``accelerator`` is the plugin that knows the device; None: only torch does. ``settings``: environment variables of
    its libraries, as they hold.
    """

    device: torch.device
    backend: str
    accelerator: Accelerator | None = None
    settings: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.accelerator.name if self.accelerator is not None else self.device.type

    @property
    def vendor(self) -> str:
        """Who makes the device; as far as torch says it, if no plugin knows it."""
        return self.accelerator.vendor if self.accelerator is not None else self.device.type

    @property
    def library(self) -> str:
        """The communication library that its backend speaks."""
        library_name = self.accelerator.library if self.accelerator is not None else ""
        return library_name or self.backend.rpartition(":")[2]

    @property
    def direct(self) -> tuple[str, ...]:
        """Backends that reach other vendors' chips, best first."""
        return self.accelerator.reaches() if self.accelerator is not None else ()

    @property
    def aborts(self) -> bool:
        """Whether groups of its library can be abandoned, see :meth:`Accelerator.abort`."""
        return self.accelerator is not None and self.accelerator.aborts

    def identity(self) -> str:
        """Host and device, as its driver tells devices apart; empty where it does not."""
        device_name = self.accelerator.identity(self.device.index or 0) if self.accelerator is not None else ""
        return f"{device_name} of {socket.gethostname()}" if device_name else ""

    def library_version(self) -> str:
        """See :meth:`Accelerator.library_version`."""
        return self.accelerator.library_version() if self.accelerator is not None else ""

    def reach(self) -> str:
        """See :meth:`Accelerator.reach`."""
        return self.accelerator.reach() if self.accelerator is not None else ""

    def chip(self) -> str:
        """Name of the device as its driver says it."""
        return self.accelerator.chip(self.device.index or 0) if self.accelerator is not None else self.device.type

    def synchronize(self) -> None:
        """Wait for the device, from any thread."""
        if self.accelerator is not None:
            if self.device.type != "cpu":  # of a new thread, the first device is the current one
                self.accelerator.use(self.device.index or 0)
            self.accelerator.synchronize()
        elif self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def memory_recorder(self) -> Any:
        """See :meth:`Accelerator.memory_recorder`."""
        return self.accelerator.memory_recorder() if self.accelerator is not None else None

    def peak_memory(self) -> int:
        """Peak bytes: of the accelerator's allocator, or of the process (max RSS) on the CPU."""
        if self.accelerator is not None:
            return self.accelerator.peak_memory(self.device.index or 0)
        if self.device.type != "cpu":
            return int(torch.accelerator.max_memory_allocated(self.device))
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def choose_platform(
    accelerators: Iterable[Accelerator], name: str | None, backend: str | None, local_rank: int, vendor: str = "",
    deterministic: bool = False, eager: bool = False,
) -> Platform:  # fmt: skip
    """The platform called ``name``, or that of ``vendor``, or the one accelerator that is here, or the CPU.

    Args:
        vendor: that the cluster file gives an emulated chip, whose platform is not to be guessed from what is here.
        backend: value of ``--distributed-backend``; None or ``auto``: the platform's best; ``gloo`` means the CPU.
        local_rank: index of the device on this node.
        deterministic: its libraries are to give equal bits in every run.
        eager: its kernels are to be loaded when its driver starts (see :meth:`Accelerator.load_eagerly`).

    Raises:
        UserError: no such platform, none of its devices here, several that could be meant, or a backend that the
            platform does not speak.
    """
    by_name = {a.name: a for a in accelerators}
    loading = {a.name: a.load_eagerly() for a in by_name.values()} if eager else {}
    if name is not None and name not in by_name:
        from hetero_megatron.ops.registry import unknown

        raise unknown("platform", name, by_name, "--platform")
    if name is None and vendor:
        its = sorted((a for a in by_name.values() if a.vendor == vendor), key=lambda a: (not a.tested, a.name))
        if not its:
            vendors = ", ".join(dict.fromkeys(a.vendor for a in by_name.values()))
            raise UserError("no plugin's platform is of this vendor", field="vendor", value=vendor, accepted=vendors)
        name = its[0].name
    if name is None:
        name = platform_here(by_name.values(), backend)
        if name is None:
            return detect_platform(backend, local_rank)
    accelerator = by_name[name]
    if not accelerator.available():
        available = ", ".join(n for n, a in by_name.items() if a.available())
        raise UserError(accelerator.absence(), field="--platform", value=name, accepted=available)
    backend_chosen = accelerator.backends[0] if backend in (None, "auto") and accelerator.backends else backend
    if backend_chosen is None or (accelerator.backends and backend_chosen not in accelerator.backends):
        raise UserError(
            f"{name} does not speak it", field="--distributed-backend", value=backend,
            accepted=" or ".join(accelerator.backends),
        )  # fmt: skip
    settings = (*accelerator.configure(deterministic), *loading.get(name, ()))
    device = accelerator.device(local_rank)
    return Platform(device, backend_of(device, backend_chosen), accelerator, settings)


def backend_of(device: torch.device, backend: str) -> str:
    """The torch.distributed backend string of groups whose device tensors go by ``backend``, and others by gloo."""
    return backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"


def platform_here(accelerators: Iterable[Accelerator], backend: str | None = None) -> str | None:
    """Name of the one accelerator that is here; ``cpu`` if there is none; None if only torch knows one.

    An adapter that raises is warned about by name, and counts as absent.

    Raises:
        UserError: several are here.
    """
    by_name = {a.name: a for a in accelerators if a.automatic}
    if backend == "gloo":
        return "cpu" if "cpu" in by_name else None
    for a in by_name.values():
        if failure := a.failure():
            warnings.warn(f"platform {a.name} cannot be used: {failure}", RuntimeWarning, stacklevel=2)
    available = [a.name for a in by_name.values() if a.device_type != "cpu" and a.available()]
    if len(available) > 1:
        raise UserError("this machine has several platforms", field="--platform", accepted=" or ".join(available))
    if available:
        return available[0]
    if torch.accelerator.is_available():
        return None  # a vendor without a plugin, whose torch build registers its device
    if backend not in (None, "auto"):
        return None  # detect_platform refuses it
    return "cpu" if "cpu" in by_name else None


def detect_platform(backend: str | None = None, local_rank: int = 0) -> Platform:
    """The accelerator of this process as torch alone knows it, or the CPU when there is none or ``backend`` is
    ``gloo``: for any vendor whose torch build registers a device, without a plugin.

    Args:
        backend: value of ``--distributed-backend``; None or ``auto`` asks torch for the device's own one.
        local_rank: index of the accelerator on this node.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True) if backend != "gloo" else None
    if accelerator is None:
        if backend not in (None, "auto", "gloo"):
            raise UserError(
                "this machine has no accelerator that speaks it",
                field="--distributed-backend", value=backend, accepted="gloo",
            )  # fmt: skip
        return Platform(torch.device("cpu"), "gloo")
    torch.accelerator.set_device_index(local_rank)
    chosen = backend if backend not in (None, "auto") else torch.distributed.get_default_backend_for_device(accelerator)
    device = torch.device(accelerator.type, local_rank)
    return Platform(device, backend_of(device, chosen))


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # parameters of glibc's mallopt
_TOP_PAD_BYTES = 16 << 20
_CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed, for the next tensors, instead of giving it back to the system.

    A step allocates and frees hundreds of MiB; a page that comes back from the system costs a fault and is zeroed.
    Without effect (False) where the C library has no ``mallopt``, and where the user has chosen by glibc's variables.
    """
    if any(name in os.environ for name in _CHOSEN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_TRIM_THRESHOLD, 2**31 - 1), (_TOP_PAD, _TOP_PAD_BYTES), (_MMAP_MAX, 0))
    return all(bool(mallopt(name, value)) for name, value in settings)


DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
