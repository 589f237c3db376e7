"""What a host says when ``cluster discover`` asks: one JSON object. It imports torch, which knows the chips.

    python -m hetero_megatron.launch.facts
"""

from __future__ import annotations

import json
import os
import socket
import sys
from contextlib import suppress
from typing import Any

MARK = "\x1e"


def answer() -> dict[str, Any]:
    import torch

    from hetero_megatron.launch.remote import facts

    chips = []
    kind = ""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        kind = accelerator.type
        module = getattr(torch, kind)
        for index in range(torch.accelerator.device_count()):
            properties = module.get_device_properties(index)
            chips.append({"name": str(properties.name), "memory": float(properties.total_memory)})
    return {
        **facts(), "hostname": socket.gethostname(), "accelerator": kind, "chips": chips, "cores": os.cpu_count() or 1,
        "memory": float(_memory()),
    }  # fmt: skip


def _memory() -> int:
    """Bytes of this host."""
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


if __name__ == "__main__":
    print(MARK + json.dumps(answer()), flush=True)
    sys.exit(0)
