"""Adam over masters and moments in host memory: DeepSpeed's, imported and compiled only where a stage asks for it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.plans import Plan
from hetero_megatron.plans.memory.of_plan import cannot_offload, moments_of

FIELD = "optimizer.offload"
COMPILING = 900  # seconds; no compilation takes that long


def check_offload(plan: Plan, optimizer: str, dtype: str) -> None:
    """Refuse, on every rank, what CPUAdam cannot do."""
    if not any(s.optimizer.offload for p in plan.pipelines for s in p.stages):
        return
    if (problem := cannot_offload(moments_of(optimizer), dtype, optimizer == "muon")) is not None:
        raise UserError(problem[0], field=FIELD, value=True, accepted=problem[1])


def cpu_adam(groups: list[dict[str, object]], betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """DeepSpeed's CPUAdam with decoupled weight decay over fp32 tensors on the host.

    Raises:
        UserError: it is not installed, or its extension cannot be compiled here, or a lock is in the way.
    """
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        refuse_old_lock()
        built: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, lr=0.0, betas=betas, eps=eps, adamw_mode=True)
    except ImportError as error:
        raise UserError(
            "DeepSpeed is not installed", field=FIELD, value=True, accepted="pip install deepspeed, or offload: false"
        ) from error
    except (RuntimeError, OSError) as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        raise UserError(
            f"DeepSpeed's CPUAdam cannot be compiled here ({cause[:200]})", field=FIELD, value=True,
            accepted="a C++ compiler and ninja, or offload: false",
        ) from error  # fmt: skip
    return built


def refuse_old_lock() -> None:
    """torch compiles an extension under a lock, and waits for ever on one that a killed process left behind."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in [*root.glob("cpu_adam/lock"), *root.glob("*/cpu_adam/lock")]:
        if time.time() - lock.stat().st_mtime > COMPILING:
            raise UserError(
                "a process that compiled DeepSpeed's CPUAdam was killed and left its lock",
                field=FIELD,
                value=str(lock),
                accepted="remove that file",
            )  # fmt: skip
