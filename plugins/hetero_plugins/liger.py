"""Norms and SwiGLU of Liger-Kernel, where it is installed: by request, ``--kernels rms_norm=liger swiglu=liger``.

They come as autograd functions, which training calls as they are. Written from the interface of version 0.6 and not
run on a device here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from hetero_megatron.ops import SPECS
from hetero_megatron.ops.spec import VENDOR, Capability, Kernel, Signature
from hetero_megatron.platform.plugins import PluginApi

HETERO_PLUGIN_API = 1


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    # "gemma": in fp32 up to one rounding at the end; "llama" rounds before the weight, too. Not in place.
    return _function("rms_norm", "LigerRMSNormFunction").apply(x, weight, eps, 0.0, "gemma", False)  # type: ignore[no-any-return]


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    return _function("layer_norm", "LigerLayerNormFunction").apply(x, weight, bias, eps)  # type: ignore[no-any-return]


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return _function("swiglu", "LigerSiLUMulFunction").apply(gate, up)  # type: ignore[no-any-return]


def _kernel(op: str, apply: Callable[..., torch.Tensor]) -> Kernel:
    """Training calls ``apply``; forward alone runs it, too, and backward alone runs it again."""
    spec = SPECS[op]
    arguments = len(spec.tensors)

    def forward(*args: Any) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return apply(*args), *spec.forward(*args)[1:]  # what backward of other providers needs, by the definition

    def backward(dy: torch.Tensor, *saved: Any) -> tuple[torch.Tensor, ...]:
        values = saved[:arguments], saved[len(spec.saves) :]
        leaves = [x.detach().requires_grad_() for x in values[0]]
        with torch.enable_grad():
            return torch.autograd.grad(apply(*leaves, *values[1]), leaves, dy.contiguous())

    capability = Capability(platforms=("nvidia", "amd", "intel"), automatic=())
    return Kernel(op, "liger", VENDOR, forward, backward, capability, _supports, apply=apply)


def _supports(signature: Signature) -> list[str]:
    return [] if importlib.util.find_spec("liger_kernel") else ["liger-kernel is not installed"]


def register(api: PluginApi) -> None:
    for op, apply in (("rms_norm", _rms_norm), ("layer_norm", _layer_norm), ("swiglu", _swiglu)):
        assert SPECS[op].saves[: len(SPECS[op].tensors)] == SPECS[op].tensors
        api.kernel(_kernel(op, apply))
