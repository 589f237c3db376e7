"""NVIDIA GPUs through torch.cuda and NCCL; and what all devices called cuda have in common: graphs by torch.cuda, which
torch 2.13 does not serve through torch.accelerator.Graph, and what NCCL can be told and asked.

ROCm's builds have them by the same names. Graphs have run on one H200 (docs/results/first_run_h200.md); what NCCL is
told and asked, and all of it under ROCm, on no device yet.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from hetero_megatron.platform import Accelerator, Limits
from hetero_megatron.platform.plugins import PluginApi

MESSAGE_CTAS = 4  # thread blocks of a message: enough for a network card, and few to wait on a multiprocessor each


class CudaGraphs(Accelerator):
    aborts = True  # by torch since 2.6, and by NCCL; 2.25.1 of that hangs there (pytorch#149153)
    abort_settings = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}  # else torch's watchdog ends the process

    def message_options(self) -> Any:
        options = getattr(torch.distributed, "ProcessGroupNCCL", None)
        config = getattr(options.Options(), "config", None) if options is not None else None
        if options is None or not hasattr(config, "max_ctas"):
            return None
        made = options.Options()
        made.config.max_ctas = MESSAGE_CTAS
        return made

    def library_version(self) -> str:
        nccl = getattr(self.module(), "nccl", None)
        version = nccl.version() if nccl is not None else ""
        return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)

    def no_graphs(self) -> str:
        return "" if hasattr(self.module(), "CUDAGraph") else "this build of torch has no CUDAGraph"

    def begin_capture(self, pool: Any = None) -> Any:
        graph = self.module().CUDAGraph()
        # Other threads, such as the watchdog of the communication library, may ask for events meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        return graph


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
