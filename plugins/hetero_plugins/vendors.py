"""Further vendors, as far as their public PyTorch adapters say how they are used. None of it has run on a device.

Each adapter copies torch's device module; what a row states is where that module is, whom the device belongs to
where several vendors share a torch name, and which process-group backend comes with it.
"""

from __future__ import annotations

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
    Cambricon, MooreThreads, Enflame, Sunrise, TsingMicro, Intel, Gaudi, MetaX, Iluvatar, Hygon, Kunlunxin,
)  # fmt: skip


def register(api: PluginApi) -> None:
    for accelerator in ALL:
        api.platform(accelerator())
