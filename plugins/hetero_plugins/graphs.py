"""What devices called cuda have in common: graphs by torch.cuda, which torch 2.13 does not serve through
torch.accelerator.Graph, and what NCCL can be told and asked.

ROCm's builds have them by the same names. Graphs have run on one H200 (docs/results/first_run_h200.md); what NCCL is
told and asked, and all of it under ROCm, on no device yet.
"""

from __future__ import annotations

from typing import Any

import torch

from hetero_megatron.platform import Accelerator

MESSAGE_CTAS = 4  # thread blocks of a message: enough for a network card, and few to wait on a multiprocessor each


class CudaGraphs(Accelerator):
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
