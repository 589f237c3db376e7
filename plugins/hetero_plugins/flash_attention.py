"""Attention by the package ``flash-attn`` (Dao), where it is installed: by request, ``--kernels attention=flash_attn``.

Written from its public interface of version 2.7 and not run on a device here.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Any

import torch

from hetero_megatron.ops.attention_cpu import SIXTEEN_BITS, FusedKernel, fused_attention
from hetero_megatron.ops.spec import Capability, Signature
from hetero_megatron.platform.plugins import PluginApi
from hetero_plugins.triton import attention_kernel

HETERO_PLUGIN_API = 1

Tensors = tuple[torch.Tensor, ...]


def _options(q: torch.Tensor, causal: bool) -> dict[str, Any]:
    return {
        "dropout_p": 0.0, "softmax_scale": 1 / math.sqrt(q.shape[3]), "causal": causal, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None,
    }  # fmt: skip


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Tensors:
    package = importlib.import_module("flash_attn.flash_attn_interface")
    out, lse, *_ = package._flash_attn_forward(q, k, v, return_softmax=False, **_options(q, causal))
    return out, lse


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    causal: bool,
) -> Tensors:  # fmt: skip
    package = importlib.import_module("flash_attn.flash_attn_interface")
    found = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    package._flash_attn_backward(dout, q, k, v, out, lse, *found, deterministic=True, **_options(q, causal))
    return found


def _supports(signature: Signature) -> list[str]:
    if importlib.util.find_spec("flash_attn") is None:
        return ["flash-attn is not installed"]
    odd = [d for d in signature.dims.get("head_dim", ()) if d % 8]
    return [f"head_dim {odd[0]} is no multiple of 8"] if odd else []


def register(api: PluginApi) -> None:
    rest = attention_kernel()
    if rest is not None:
        capability = Capability(
            platforms=("nvidia", "amd"), dtypes=SIXTEEN_BITS, automatic=(), arch_min=(8, 0), largest={"head_dim": 256}
        )
        api.kernel(fused_attention("flash_attn", FusedKernel(forward, backward), rest, capability, _supports))
