"""NVIDIA GPUs through torch.cuda and NCCL."""

from __future__ import annotations

import os

import torch

from hetero_megatron.platform import Limits
from hetero_megatron.platform.plugins import PluginApi
from hetero_plugins.graphs import CudaGraphs

HETERO_PLUGIN_API = 1
ALLOCATOR = "PYTORCH_ALLOC_CONF"


class Nvidia(CudaGraphs):
    name, vendor, device_type, backends = "nvidia", "NVIDIA", "cuda", ("nccl",)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    # Blocks that grow instead of new ones: sizes that change (batch ramp-up, documents) do not fragment the memory.
    settings = {ALLOCATOR: "expandable_segments:True"}
    visible = ("CUDA_VISIBLE_DEVICES",)
    exact_settings = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # else cuBLAS may pick another algorithm each time
    eager_settings = {"CUDA_MODULE_LOADING": "EAGER"}
    limits = Limits(shared_bytes=227 * 1024, max_warps=32, max_grid=2**31 - 1)

    def configure(self, deterministic: bool = False) -> tuple[str, ...]:
        """The allocator reads its variable when CUDA is initialised, which telling vendors apart by their chips' names
        has done: it is told as well."""
        said = super().configure(deterministic)
        tell = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        if tell is not None and self.module().is_initialized():
            tell(os.environ[ALLOCATOR])
        return said

    def matches(self) -> bool:
        """Several vendors' builds of torch call their device cuda too."""
        return torch.version.cuda is not None and "NVIDIA" in self.chip(0).upper()


def register(api: PluginApi) -> None:
    api.platform(Nvidia())
