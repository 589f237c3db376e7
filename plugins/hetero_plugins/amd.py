"""AMD GPUs: torch built for ROCm, which keeps torch.cuda's and NCCL's names."""

from __future__ import annotations

import torch

from hetero_megatron.platform import Limits
from hetero_megatron.platform.plugins import PluginApi
from hetero_plugins.nvidia import CudaGraphs

HETERO_PLUGIN_API = 1
OTHERS = ("DCU", "HYGON", "K100", "Z100", "BW1")  # Hygon's


class Amd(CudaGraphs):
    name, vendor, device_type, backends = "amd", "AMD", "cuda", ("nccl",)  # RCCL answers to nccl
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    visible = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
    eager_settings = {"HIP_ENABLE_DEFERRED_LOADING": "0"}
    limits = Limits(shared_bytes=64 * 1024, max_warps=16, max_grid=2**31 - 1)

    def matches(self) -> bool:
        """Others build torch for ROCm as well; AMD's own chips do not all have its name in theirs."""
        chip = self.chip(0).upper()
        return torch.version.hip is not None and not any(word in chip for word in OTHERS)

    def arch(self, index: int = 0) -> tuple[int, ...]:
        """gfx942 -> (9, 4, 2); letters are hexadecimal digits."""
        name = str(getattr(self.module().get_device_properties(index), "gcnArchName", "")).split(":")[0]
        digits = name.removeprefix("gfx")
        if len(digits) < 3:
            return ()
        return int(digits[:-2]), int(digits[-2], 16), int(digits[-1], 16)


def register(api: PluginApi) -> None:
    api.platform(Amd())
