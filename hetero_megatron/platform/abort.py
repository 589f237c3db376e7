"""Abandoning process groups of a device's library, as torch's own backends do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def abort_backends(groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Abort the backends of process groups that serve ``device``, together where the library knows that: of two
    communicators of NCCL, each may wait for kernels of the other (pytorch#119797)."""
    backends: list[Any] = [group._get_backend(device) for group in groups]
    together = backends[0] if backends and hasattr(backends[0], "_group_start") else None
    if together is not None:
        together._group_start()
    for backend in backends:
        backend.abort()
    if together is not None:
        together._group_end()
