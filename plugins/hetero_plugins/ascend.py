"""Huawei Ascend NPUs through torch_npu and HCCL."""

from __future__ import annotations

import re

import torch

from hetero_megatron.platform import Accelerator, Limits
from hetero_megatron.platform.plugins import PluginApi

HETERO_PLUGIN_API = 1


class Ascend(Accelerator):
    name, vendor, device_type, adapter, backends = "ascend", "Huawei", "npu", "torch_npu", ("hccl",)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    settings = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    exact_settings = {"HCCL_DETERMINISTIC": "true"}
    # The unified buffer holds 192 KiB, and a launch has at most 65535 programs over all axes (triton-ascend).
    limits = Limits(shared_bytes=192 * 1024, max_warps=1, max_grid=65_535, max_block=16_384)

    def arch(self, index: int = 0) -> tuple[int, ...]:
        """Ascend910B3 -> (910, 3); torch_npu has no capability number."""
        found = re.search(r"(\d{3})[A-Z]?(\d*)", self.chip(index))
        return (int(found[1]), int(found[2] or 0)) if found else ()


def register(api: PluginApi) -> None:
    api.platform(Ascend())
