"""One accelerator (or the CPU) as the training loop sees it: device, backend, memory, synchronisation.

Built on ``torch.accelerator``, so any vendor whose torch build registers a device works without a line here;
vendor plugins refine it.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

from hetero_megatron.errors import UserError


@dataclass(frozen=True)
class Platform:
    """``device`` computes; ``backend`` is the torch.distributed backend string that can move its tensors."""

    device: torch.device
    backend: str

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def peak_memory(self) -> int:
        """Peak bytes: of the accelerator's allocator, or of the process (max RSS) on the CPU."""
        if self.device.type != "cpu":
            return int(torch.accelerator.max_memory_allocated(self.device))
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def detect_platform(backend: str | None = None, local_rank: int = 0) -> Platform:
    """The accelerator of this process, or the CPU when there is none or ``backend`` is ``gloo``.

    Args:
        backend: value of ``--distributed-backend``; None or ``auto`` asks torch for the device's own one.
        local_rank: index of the accelerator on this node.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True) if backend != "gloo" else None
    if accelerator is None:
        if backend not in (None, "auto", "gloo"):
            raise UserError(
                "this machine has no accelerator that speaks it",
                field="--distributed-backend", value=backend, accepted="gloo",
            )  # fmt: skip
        return Platform(torch.device("cpu"), "cpu:gloo")
    torch.accelerator.set_device_index(local_rank)
    own = backend if backend not in (None, "auto") else torch.distributed.get_default_backend_for_device(accelerator)
    return Platform(torch.device(accelerator.type, local_rank), f"cpu:gloo,{accelerator.type}:{own}")
