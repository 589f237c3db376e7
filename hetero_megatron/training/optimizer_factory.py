"""The optimizer that a configuration names."""

from __future__ import annotations

from collections.abc import Callable

from hetero_megatron.ops.optimizer_ops import adamw_aten
from hetero_megatron.parallel.offload import cpu_adam
from hetero_megatron.parallel.update import SGD, AdamW, Optimizer, OptimizerFactory
from hetero_megatron.training.config import OptimizerConfig


def optimizer_factory(
    config: OptimizerConfig, offload: bool = False, kernel: Callable[..., object] = adamw_aten
) -> OptimizerFactory:
    """Adam with decoupled weight decay, or SGD; learning rate and weight decay are set before every step.

    Args:
        offload: Adam runs on the host, over masters and moments in host memory (fp32).
        kernel: operator ``adamw`` that updates on the device; not used where ``offload`` or SGD.

    Raises:
        UserError: by the factory, where the host's Adam cannot be compiled; see :func:`cpu_adam`.
    """

    def build(groups: list[dict[str, object]]) -> Optimizer:
        if config.name == "sgd":
            return SGD(groups, config.momentum)
        if offload:
            return cpu_adam(groups, (config.beta1, config.beta2), config.eps)
        return AdamW(groups, kernel, (config.beta1, config.beta2), config.eps)

    return build
