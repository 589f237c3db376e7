"""Further vendors, as far as their public PyTorch adapters say how they are used. None of it has run on a device.

Each adapter copies torch's device module; what a row states is where that module is, whom the device belongs to
where several vendors share a torch name, and which process-group backend comes with it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Iterator
from typing import Any

import torch

from hetero_megatron.platform import Accelerator, Limits
from hetero_megatron.platform.plugins import PluginApi

HETERO_PLUGIN_API = 1


class Cambricon(Accelerator):
    name, vendor, device_type, adapter, backends = "cambricon", "Cambricon", "mlu", "torch_mlu", ("cncl",)
    limits = Limits(shared_bytes=512 * 1024, max_warps=1)


class MooreThreads(Accelerator):
    name, vendor, device_type, adapter, backends = "mthreads", "Moore Threads", "musa", "torch_musa", ("mccl",)


class Enflame(Accelerator):
    name, vendor, device_type, adapter, backends = "enflame", "Enflame", "gcu", "torch_gcu", ("eccl",)


class Sunrise(Accelerator):
    name, vendor, device_type, adapter, backends = "sunrise", "Sunrise", "ptpu", "torch_ptpu", ("tccl",)


class TsingMicro(Accelerator):
    name, vendor, device_type, adapter, backends = "tsingmicro", "TsingMicro", "txda", "torch_txda", ("tccl",)


class Intel(Accelerator):
    """Arc and data-centre GPUs; in torch itself."""

    name, vendor, device_type, backends = "intel", "Intel", "xpu", ("xccl",)


class Apple(Accelerator):
    """GPUs of Apple's processors; in torch itself. There is one queue, no library and no fp64: messages of ranks go by
    the bridge."""

    name, vendor, device_type, backends, library = "apple", "Apple", "mps", ("gloo",), "none"

    def use(self, index: int) -> None:
        """There is one."""

    def arch(self, index: int = 0) -> tuple[int, ...]:
        return ()

    def chip(self, index: int = 0) -> str:
        return f"Apple GPU ({platform.processor() or platform.machine()})"

    def total_memory(self, index: int = 0) -> int:
        return int(self.module().recommended_max_memory())

    def identity(self, index: int = 0) -> str:
        return "mps:0"

    def free_memory(self) -> tuple[int, int] | None:
        total = self.total_memory()
        return max(total - int(self.module().driver_allocated_memory()), 0), total

    def peak_memory(self, index: int = 0) -> int:
        """What its driver holds: it does not say the most that it held."""
        return int(self.module().driver_allocated_memory())

    def reach(self) -> str:
        return f"{socket.gethostname()} {os.getpid()}"  # nobody else

    def stream(self) -> Any:
        return _OneQueue()

    def current_stream(self) -> Any:
        return _OneQueue()

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        yield

    def used_on(self, stream: Any, *tensors: torch.Tensor) -> None:
        """What is released is used again in the order of the one queue."""

    def event(self, timing: bool = False) -> Any:
        return _QueueEvent(self.module().event.Event(enable_timing=timing))

    def no_graphs(self) -> str:
        return "torch has none for it"

    def host_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)  # host and device share it

    def seed(self, value: int) -> None:
        self.module().manual_seed(value)


class _OneQueue:
    """Everything is in order."""

    def wait_event(self, event: Any) -> None:
        """It has been recorded before what comes next."""

    def wait_stream(self, stream: Any) -> None:
        """There is no other."""

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OneQueue)

    __hash__ = None  # type: ignore[assignment]


class _QueueEvent:
    """An event that is recorded without naming a stream."""

    def __init__(self, event: Any) -> None:
        self.event = event
        self.query, self.synchronize = event.query, event.synchronize

    def record(self, stream: Any = None) -> None:
        self.event.record()

    def elapsed_time(self, other: _QueueEvent) -> float:
        return float(self.event.elapsed_time(other.event))


class Gaudi(Accelerator):
    name, vendor, device_type, adapter, backends = "gaudi", "Intel Habana", "hpu", "habana_frameworks.torch", ("hccl",)
    dtypes = (torch.float32, torch.bfloat16)


class _Cuda(Accelerator):
    """A vendor whose build of torch calls its device cuda: only the chip's name tells."""

    device_type, backends = "cuda", ("nccl",)
    words: tuple[str, ...] = ()

    def matches(self) -> bool:
        chip = self.chip(0).upper()
        return any(word in chip for word in self.words)


class MetaX(_Cuda):
    name, vendor, words = "metax", "MetaX", ("METAX", "MXC")
    limits = Limits(shared_bytes=64 * 1024, max_warps=16)


class Iluvatar(_Cuda):
    name, vendor, words = "iluvatar", "Iluvatar CoreX", ("ILUVATAR", "BI-V", "MR-V")
    limits = Limits(shared_bytes=128 * 1024, max_warps=16)


class Hygon(_Cuda):
    """DCUs: a ROCm build of torch."""

    name, vendor, words = "hygon", "Hygon", ("DCU", "HYGON", "K100", "Z100", "BW")
    limits = Limits(shared_bytes=64 * 1024, max_warps=16)

    def matches(self) -> bool:
        return torch.version.hip is not None and super().matches()


class Kunlunxin(_Cuda):
    name, vendor, words = "kunlunxin", "Kunlunxin", ("KUNLUN", "P800", "R300", "XPU")
    dtypes = (torch.float32, torch.float16, torch.bfloat16)


ALL = (
    Cambricon, MooreThreads, Enflame, Sunrise, TsingMicro, Intel, Apple, Gaudi, MetaX, Iluvatar, Hygon, Kunlunxin,
)  # fmt: skip


def register(api: PluginApi) -> None:
    for accelerator in ALL:
        api.platform(accelerator())
