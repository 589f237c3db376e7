"""The package ``hetero_kernels`` as providers call it: imported at the first call, with the limits of this machine's
platform.

On the CPU its kernels run under Triton's interpreter, about a thousand times slower: only by request, and only where
TRITON_INTERPRET=1 was set before they were imported. So this is read from the environment here, and asked of a
signature (``supports``) before anything imports Triton.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from hetero_megatron.ops.spec import Signature
from hetero_megatron.platform.plugins import load_plugins

# As hetero_kernels reads it, which is not imported here: that would import Triton.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")


@functools.cache
def kernels() -> Any:
    """The functions of ``hetero_kernels``, with the limits of this machine's platform where it has one."""
    module = importlib.import_module("hetero_kernels")
    limits = None if INTERPRETED else _limits(module)
    if limits is None:
        return module
    offered = {name: getattr(module, name) for name in module.__all__}
    takes = {n for n, f in offered.items() if inspect.isfunction(f) and "limits" in inspect.signature(f).parameters}
    return SimpleNamespace(**offered | {n: functools.partial(offered[n], limits=limits) for n in takes})


def _limits(package: ModuleType) -> Any:
    """What Triton's driver reports, no more than the platform states; None where no one platform is here."""
    here = [a for a in load_plugins().platforms.values() if a.device_type != "cpu" and a.available()]
    if len(here) != 1:
        return None
    found, stated = package.limits_of(torch.device(here[0].device_type)), here[0].limits
    least = {name: min(getattr(found, name), getattr(stated, name)) for name in ("max_grid", "max_block", "max_warps")}
    return replace(found, **least, shared_bytes=min(found.shared_bytes, stated.shared_bytes or found.shared_bytes))


def supports(signature: Signature) -> list[str]:
    """Why these kernels do not run here; empty if they do."""
    if importlib.util.find_spec("triton") is None:
        return ["triton is not installed"]
    if signature.device == "cpu" and not INTERPRETED:
        return ["on the CPU it needs Triton's interpreter: set TRITON_INTERPRET=1 before the start"]
    if signature.device != "cpu" and INTERPRETED:
        return ["TRITON_INTERPRET is set, so that it would be interpreted, a thousand times slower: unset it"]
    return []
