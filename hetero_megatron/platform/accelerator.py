"""What a vendor's adapter to PyTorch offers: the interface that platform plugins implement.

Most adapters copy torch's device module (``torch.<type>``: streams, events, memory, generators), so the base class
finds everything there, and a plugin states what differs. Nothing here imports an adapter.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.platform.direct import DirectBackend


@dataclass(frozen=True)
class Limits:
    """On-chip limits that kernels size their blocks by; None: unknown.

    Attributes:
        shared_bytes: fast memory of one block; max_warps: of one block; max_grid: programs per launch and axis;
        max_block: elements of one block of a kernel.
    """

    shared_bytes: int | None = None
    max_warps: int = 32
    max_grid: int = 65_535
    max_block: int = 65_536


class Accelerator:
    """One kind of device. Plugins subclass it, set the class attributes and override what their adapter does otherwise.

    Attributes:
        name: of the platform, unique; vendor: who makes it; device_type: torch's name of the device.
        adapter: module that registers the device with torch; empty: torch itself does.
        backends: process-group backends that move its tensors, best first.
        library: what these speak; ranks of one vendor and library reach each other. Empty: the first backend's name.
            Several vendors call theirs ``nccl``, so the vendor counts as well.
        direct: backends that also reach other vendors' chips, if both sides have them, best first.
        dtypes: it computes in.
        tested: whether this project has run on such a device.
        automatic: whether a run that names no platform may take it.
        visible: environment variables that say which devices a process may use.
        settings: environment variables that its libraries read when the device is first used, as a run wants them;
            exact_settings: further ones that equal bits in every run need (``--deterministic-mode``).
        brought: direct backends of other plugins, which serve after its own.
        eager_settings: with which its driver loads all kernels when it starts, and waits for none later.
        aborts: whether groups of its library can be abandoned while ranks wait for lost ones, see :meth:`abort`.
        abort_settings: with which the library leaves transfers whose peer is lost to :meth:`abort`.
    """

    name: ClassVar[str] = ""
    vendor: ClassVar[str] = ""
    device_type: ClassVar[str] = ""
    adapter: ClassVar[str] = ""
    backends: ClassVar[tuple[str, ...]] = ()
    library: ClassVar[str] = ""
    direct: ClassVar[tuple[str, ...]] = ()
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float32, torch.bfloat16, torch.float16)
    limits: ClassVar[Limits] = Limits()
    tested: ClassVar[bool] = False
    automatic: ClassVar[bool] = True
    visible: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    exact_settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    eager_settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    aborts: ClassVar[bool] = False
    abort_settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    brought: tuple[DirectBackend, ...] = ()

    def configure(self, deterministic: bool = False) -> tuple[str, ...]:
        """Set the environment variables, but for those that are set already. Called before the device is first used.

        Returns:
            what holds, as ``NAME=value``, for the log.
        """
        variables = {**self.settings, **(self.exact_settings if deterministic else {})}
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        return tuple(f"{name}={os.environ[name]}" for name in variables)

    def load_eagerly(self) -> tuple[str, ...]:
        """Have the driver load all kernels when it starts: set the environment variables for that, but for those that
        are set already. Called before anything asks for devices.

        Returns:
            what holds, as ``NAME=value``, for the log.
        """
        for name, value in self.eager_settings.items():
            os.environ.setdefault(name, value)
        return tuple(f"{name}={os.environ[name]}" for name in self.eager_settings)

    def reaches(self) -> tuple[str, ...]:
        """The direct backends that are here, best first."""
        return (*self.direct, *(b.name for b in self.brought if b.installed() and b.name not in self.direct))

    def load_direct(self, name: str) -> None:
        """Have one of them registered with torch; called by all ranks of an island, before their first group with it.

        Raises:
            UserError: it cannot be used here.
        """
        for backend in self.brought:
            if backend.name == name and name not in self.direct:
                backend.load()

    def installed(self) -> bool:
        """Whether its adapter is there; nothing is imported."""
        return not self.adapter or importlib.util.find_spec(self.adapter.split(".")[0]) is not None

    def load(self) -> None:
        """Import the adapter, which registers the device with torch."""
        if self.adapter:
            importlib.import_module(self.adapter)

    def module(self) -> Any:
        """``torch.<device type>``."""
        return getattr(torch, self.device_type)

    def available(self) -> bool:
        """Whether this process can use such a device; not if asking for it raises. Plugins override ``matches``."""
        return not self.absence()

    def absence(self) -> str:
        """Why this process cannot use such a device; empty if it can."""
        if not self.installed():
            return f"{self.adapter} is not installed"
        return self.failure() or ("" if self._here() else "no such device on this machine")

    def failure(self) -> str:
        """What an installed adapter raises when it is asked for its devices; empty if nothing.

        An adapter for another torch, or without its driver, may raise anything: that must not stop other vendors' runs.
        """
        try:
            if self.installed():
                self._here()
        except Exception as error:
            text = (str(error).strip().splitlines() or [""])[0]
            return f"{self.adapter or f'torch.{self.device_type}'} raised {type(error).__name__}: {text}"
        return ""

    def _here(self) -> bool:
        self.load()
        if not self.adapter and not hasattr(torch, self.device_type):
            return False  # a build of torch without such devices
        return bool(self.module().is_available()) and self.device_count() > 0 and self.matches()

    def matches(self) -> bool:
        """Whether the devices are this vendor's: several vendors call theirs by one torch name."""
        return True

    def device_count(self) -> int:
        return int(self.module().device_count())

    def device(self, index: int = 0) -> torch.device:
        """The device of one local rank, made current. Where the launcher shows this process one device only, as
        ``srun --gpus-per-task=1`` does, that one has index 0.

        Raises:
            UserError: this machine has fewer.
        """
        count = self.device_count()
        if count == 1 and any(os.environ.get(name, "").strip() for name in self.visible):
            index = 0
        if index >= count:
            raise UserError(
                f"this machine has {count} {self.name} devices", field="LOCAL_RANK", value=index,
                accepted=f"0 to {count - 1}",
            )  # fmt: skip
        self.use(index)
        return torch.device(self.device_type, index)

    def use(self, index: int) -> None:
        """Make a device the current one of the calling thread."""
        self.module().set_device(index)

    def arch(self, index: int = 0) -> tuple[int, ...]:
        """Version of the chip, comparable; () where the adapter does not say."""
        get_capability = getattr(self.module(), "get_device_capability", None)
        version = get_capability(index) if get_capability is not None else ()
        return tuple(version) if isinstance(version, Sequence) else ()  # one vendor's is a table of everything

    def chip(self, index: int = 0) -> str:
        """Name of the chip as its driver says it."""
        return str(self.module().get_device_name(index))

    def total_memory(self, index: int = 0) -> int:
        return int(self.module().get_device_properties(index).total_memory)

    def identity(self, index: int = 0) -> str:
        """What tells a device of this machine from its others; empty where the adapter does not say."""
        get_properties = getattr(self.module(), "get_device_properties", None)
        return str(getattr(get_properties(index), "uuid", "") or "") if get_properties is not None else ""

    def free_memory(self) -> tuple[int, int] | None:
        """(bytes that the current device has left, of how many); None where the adapter does not say."""
        get_memory = getattr(self.module(), "mem_get_info", None)
        return tuple(map(int, get_memory())) if get_memory is not None else None  # type: ignore[return-value]

    def peak_memory(self, index: int = 0) -> int:
        """Most bytes allocated at once so far."""
        return int(self.module().max_memory_allocated(index))

    def memory_recorder(self) -> Any:
        """torch's module that records what the allocator does (``_record_memory_history``, ``_dump_snapshot``); None
        where there is none."""
        module = getattr(self.module(), "memory", None)
        return module if hasattr(module, "_record_memory_history") else None

    def synchronize(self) -> None:
        self.module().synchronize()

    def stream(self) -> Any:
        return self.module().Stream()

    def current_stream(self) -> Any:
        return self.module().current_stream()

    def event(self, timing: bool = False) -> Any:
        return self.module().Event(enable_timing=timing)

    def used_on(self, stream: Any, *tensors: torch.Tensor) -> None:
        """Memory of these tensors, made on another stream, is not reused before ``stream`` has done what it has now."""
        for tensor in tensors:
            tensor.record_stream(stream)

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        with self.module().stream(stream):
            yield

    def no_graphs(self) -> str:
        """Why it cannot capture launches as a graph; empty if it can.

        Where a vendor's torch has graphs under another name than ``torch.accelerator.Graph``, plugins override this and
        ``begin_capture``.
        """
        from hetero_megatron.platform.torch_defaults import no_graphs

        return no_graphs()

    def begin_capture(self, pool: Any = None) -> Any:
        """Launches on the current stream, which is not the default one, are recorded from now on and run when the graph
        does. What the current thread does meanwhile must not hold up the host.

        Args:
            pool: memory of other graphs (``pool()`` of one), which this one shares: only one of them may run at a time,
                and what one of them has released, another may use. None: memory of its own.

        Returns:
            a graph with ``capture_end()``, ``replay()`` on the current stream, and ``pool()``.
        """
        from hetero_megatron.platform.torch_defaults import begin_capture

        return begin_capture(pool)

    def reach(self) -> str:
        """What ranks of this vendor and library have in common if they reach each other by it, such as the job that
        their library was started as; empty: all of them do."""
        return ""

    def stop(self) -> None:
        """End the communication library, where that needs more than taking its groups down. Every rank calls it."""

    def abort(self, groups: Sequence[Any]) -> None:
        """End what this process's device and host wait for in process groups of its library, though peers are gone,
        and give back what the groups hold of the device. Called from any thread, perhaps while another one is in the
        library; the groups are not used again. What transfers under way were to write is undefined then, whether or
        not they end with an error."""
        from hetero_megatron.platform.torch_defaults import abort

        abort(groups, torch.device(self.device_type))

    def host_memory(self, size: int) -> torch.Tensor:
        """[size] uint8 in host memory that the device copies from and to while the host goes on."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def message_options(self) -> Any:
        """``pg_options`` of groups for messages between two ranks: a waiting one should take as little of the device
        from compute as the backend allows. None: the backend has none."""
        return None

    def library_version(self) -> str:
        """Of the communication library; empty where it does not say."""
        return ""

    def forget_peak_memory(self) -> None:
        """The most bytes allocated at once are those of from now on, and what is cached is given back."""
        module = self.module()
        for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
            if (call := getattr(module, name, None)) is not None:
                call()

    def seed(self, value: int) -> None:
        self.module().manual_seed_all(value)

    def rng_state(self) -> torch.Tensor:
        return self.module().get_rng_state()  # type: ignore[no-any-return]

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.module().set_rng_state(state)


class CPU(Accelerator):
    """The processor itself, with gloo: a platform like any other, not a test mode."""

    name, vendor, device_type, backends, tested = "cpu", "any", "cpu", ("gloo",), True
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def _here(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def device(self, index: int = 0) -> torch.device:
        return torch.device("cpu")

    def arch(self, index: int = 0) -> tuple[int, ...]:
        return ()

    def chip(self, index: int = 0) -> str:
        import platform

        return platform.processor() or platform.machine()

    def total_memory(self, index: int = 0) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def identity(self, index: int = 0) -> str:
        return ""

    def free_memory(self) -> tuple[int, int] | None:
        return None

    def peak_memory(self, index: int = 0) -> int:
        """Max RSS of the process."""
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale

    def memory_recorder(self) -> Any:
        return None

    def synchronize(self) -> None:
        return None

    def stream(self) -> Any:
        return torch.Stream(device="cpu") if hasattr(torch, "Stream") else None

    def current_stream(self) -> Any:
        return self.stream()

    def event(self, timing: bool = False) -> Any:
        from hetero_megatron.platform.torch_defaults import HostEvent

        return HostEvent()

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        yield

    def no_graphs(self) -> str:
        return "the processor runs what it is told at once"

    def forget_peak_memory(self) -> None:
        """The system counts it, and does not forget."""

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)
