"""Adam in host memory: masters and moments never touch the device. DeepSpeed's vectorised CPUAdam does the update."""

from __future__ import annotations

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.plan import Plan

FIELD = "optimizer.offload"


def check_offload(plan: Plan, optimizer: str, dtype: str) -> None:
    """Refuse, on every rank, what CPUAdam cannot do. It is imported and compiled only where a stage asks for it."""
    if not any(s.optimizer.offload for p in plan.pipelines for s in p.stages):
        return
    if optimizer != "adam":
        raise UserError("only Adam runs in host memory", field=FIELD, value=True, accepted="--optimizer adam")
    if dtype == "fp64":
        raise UserError("the update in host memory is fp32", field=FIELD, value=True, accepted="--bf16, --fp16 or fp32")


def cpu_adam(groups: list[dict[str, object]], betas: tuple[float, float], eps: float) -> torch.optim.Optimizer:
    """DeepSpeed's CPUAdam with decoupled weight decay over fp32 tensors on the host.

    Raises:
        UserError: it is not installed, or its extension cannot be compiled here.
    """
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

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
