"""Huawei Ascend NPUs through torch_npu and HCCL, and their fused attention for squares. The rest goes to Triton, where
it is."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import re
from typing import Any

import torch

from hetero_megatron.ops.attention_cpu import SIXTEEN_BITS, FusedKernel, fused_attention
from hetero_megatron.ops.spec import Capability, Signature
from hetero_megatron.platform import Accelerator, Limits
from hetero_megatron.platform.plugins import PluginApi
from hetero_plugins.triton import attention_kernel

HETERO_PLUGIN_API = 1


class Ascend(Accelerator):
    name, vendor, device_type, adapter, backends = "ascend", "Huawei", "npu", "torch_npu", ("hccl",)
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    visible = ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES")
    settings = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    exact_settings = {"HCCL_DETERMINISTIC": "true"}
    # The unified buffer holds 192 KiB, and a launch has at most 65535 programs over all axes (triton-ascend).
    limits = Limits(shared_bytes=192 * 1024, max_warps=1, max_grid=65_535, max_block=16_384)

    def no_graphs(self) -> str:
        return "torch_npu has graphs for inference only (its documentation of NPUGraph)"

    def arch(self, index: int = 0) -> tuple[int, ...]:
        """Ascend910B3 -> (910, 3); torch_npu has no capability number."""
        found = re.search(r"(\d{3})[A-Z]?(\d*)", self.chip(index))
        return (int(found[1]), int(found[2] or 0)) if found else ()


MASK = 2048  # side of the triangle from which the kernel makes causal masks of any size
SPARSE_NONE, SPARSE_LEFT_UP_CAUSAL = 0, 2
LANES = 8  # in which the kernel repeats a row's maximum and sum


@functools.cache
def _triangle(device: torch.device) -> torch.Tensor:
    """True where a key is hidden."""
    return torch.ones(MASK, MASK, dtype=torch.bool, device=device).triu_(1)


def _options(q: torch.Tensor, causal: bool) -> dict[str, Any]:
    if not causal:
        return {"sparse_mode": SPARSE_NONE}
    return {"sparse_mode": SPARSE_LEFT_UP_CAUSAL, "atten_mask": _triangle(q.device)}


def fusion_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, ...]:
    torch_npu = importlib.import_module("torch_npu")
    out, top, total, *_ = torch_npu.npu_fusion_attention(
        q, k, v, q.shape[2], "BSND", scale=1 / math.sqrt(q.shape[3]), **_options(q, causal)
    )
    return out, top[..., 0] + total[..., 0].log()  # of scaled scores, [b, heads, s, 8] each


def fusion_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    causal: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """exp(score - maximum) / sum is exp(score - lse) / 1, whoever made the log-sum-exp."""
    torch_npu = importlib.import_module("torch_npu")
    top = lse[..., None].expand(*lse.shape, LANES).contiguous()
    dq, dk, dv, *_ = torch_npu.npu_fusion_attention_grad(
        q, k, v, dout, q.shape[2], "BSND", softmax_max=top, softmax_sum=torch.ones_like(top), attention_in=out,
        scale_value=1 / math.sqrt(q.shape[3]), **_options(q, causal),
    )  # fmt: skip
    return dq, dk, dv


def _supports(signature: Signature) -> list[str]:
    if importlib.util.find_spec("torch_npu") is None:
        return ["torch_npu is not installed"]
    odd = [d for d in signature.dims.get("head_dim", ()) if d % 16]
    return [f"head_dim {odd[0]} is no multiple of 16"] if odd else []


def register(api: PluginApi) -> None:
    api.platform(Ascend())
    rest = attention_kernel()
    if rest is not None:
        capability = Capability(
            platforms=("ascend",), dtypes=SIXTEEN_BITS, largest={"head_dim": 256}, deterministic=False
        )
        kernel = FusedKernel(fusion_forward, fusion_backward)
        api.kernel(fused_attention("npu_fusion", kernel, rest, capability, _supports, alone=True))
