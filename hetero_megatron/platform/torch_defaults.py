"""What :class:`~hetero_megatron.platform.accelerator.Accelerator` does where a platform says nothing else, and which is
seldom asked for: graphs, leaving process groups, and the processor's events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


def no_graphs() -> str:
    """See :meth:`Accelerator.no_graphs`."""
    if not hasattr(torch.accelerator, "Graph"):
        return f"torch {torch.__version__} has no graphs for it (torch.accelerator.Graph)"
    try:
        torch.accelerator.Graph()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def begin_capture(pool: Any) -> Any:
    """See :meth:`Accelerator.begin_capture`."""
    graph = torch.accelerator.Graph(pool=pool, capture_error_mode="thread_local")
    graph.capture_begin()
    return graph


def abort(groups: Sequence[Any], device: torch.device) -> None:
    """See :meth:`Accelerator.abort`; of process groups, the backends that serve ``device``."""
    backends = [group._get_backend(device) for group in groups]
    # Of two communicators of NCCL, each may wait for kernels of the other (pytorch#119797).
    together = backends[0] if backends and hasattr(backends[0], "_group_start") else None
    if together is not None:
        together._group_start()
    for backend in backends:
        backend.abort()
    if together is not None:
        together._group_end()


class HostEvent:
    """An event of a device that is always in step with the host."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: HostEvent) -> float:
        """Milliseconds from this event to ``other``."""
        return (other.seconds - self.seconds) * 1e3
