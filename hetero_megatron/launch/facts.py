"""What a host says when ``cluster discover`` asks: one JSON object. It imports torch, which knows the chips.

    python -m hetero_megatron.launch.facts
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
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
        **facts(), "measured": _measured(kind or "cpu"), "hostname": socket.gethostname(), "accelerator": kind,
        "chips": chips, "cores": os.cpu_count() or 1,
        "memory": float(_memory()),
    }  # fmt: skip


def _measured(device: str) -> dict[str, float]:
    """FLOP/s of matrix products by dtype, and bytes/s of a copy (read and written), within half a second: for chips
    that the catalogue lacks."""
    import torch

    host = device == "cpu"
    size, rates = 512 if host else 4096, dict[str, float]()
    half_dtypes = {"fp64": torch.float64} if host else {"bf16": torch.bfloat16, "fp16": torch.float16}
    names = {"fp32": torch.float32, **half_dtypes}
    for name, dtype in names.items():
        with suppress(RuntimeError):  # a dtype that the device lacks
            a = torch.ones(size, size, dtype=dtype, device=device)
            rates[name] = 2 * size**3 / _seconds(partial(torch.mm, a, a), device)
    big = torch.ones(16 << 20, device=device)
    rates["copy"] = 2 * big.numel() * big.element_size() / _seconds(big.clone, device)
    return rates


def _seconds(work: Callable[[], object], device: str) -> float:
    """The shortest of some calls."""
    import torch

    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        work()
        if device != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def _memory() -> int:
    """Bytes of this host."""
    with suppress(ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


if __name__ == "__main__":
    print(MARK + json.dumps(answer()), flush=True)
    sys.exit(0)
