"""Device graphs by torch.cuda, which torch 2.13 does not serve through torch.accelerator.Graph.

ROCm's builds have them by the same names. None of it has run on a device.
"""

from __future__ import annotations

from typing import Any

from hetero_megatron.platform import Accelerator


class CudaGraphs(Accelerator):
    def no_graphs(self) -> str:
        return "" if hasattr(self.module(), "CUDAGraph") else "this build of torch has no CUDAGraph"

    def begin_capture(self, pool: Any = None) -> Any:
        graph = self.module().CUDAGraph()
        # Other threads, such as the watchdog of the communication library, may ask for events meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        return graph
