"""Fused attention of torch itself on GPUs: cuDNN's and flash attention's kernels, called through aten because
``F.scaled_dot_product_attention`` does not return the log-sum-exp.

Squares go there, everything else to Triton (:mod:`hetero_megatron.ops.attention_cpu`). Neither backward adds up in a
fixed order, so deterministic runs stay with Triton. torch for ROCm answers to the same names with AMD's kernels.
"""

from __future__ import annotations

import torch

from hetero_megatron.ops.attention_cpu import SIXTEEN_BITS, FusedKernel, fused_attention
from hetero_megatron.ops.spec import Capability, Signature
from hetero_megatron.platform.plugins import PluginApi
from hetero_plugins.triton import attention_kernel

HETERO_PLUGIN_API = 1

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


def _heads_first(*tensors: torch.Tensor) -> Tensors:
    """[b, s, heads, d] as [b, heads, s, d], and back."""
    return tuple(x.transpose(1, 2) for x in tensors)


def cudnn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Tensors:
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(*_heads_first(q, k, v), None, True, 0.0, causal)
    return out.transpose(1, 2), lse.squeeze(-1)  # it has lse as [b, heads, s, 1]


def cudnn_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    causal: bool,
) -> Tensors:  # fmt: skip
    dout, q, k, v, out = _heads_first(dout, q, k, v, out)
    seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, of which there is none
    found = aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse[..., None], seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal
    )
    return _heads_first(*found)


def flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Tensors:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(*_heads_first(q, k, v), 0.0, causal)
    return out.transpose(1, 2), lse


def flash_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    causal: bool,
) -> Tensors:  # fmt: skip
    dout, q, k, v, out = _heads_first(dout, q, k, v, out)
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
    found = aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed[0]
    )
    return _heads_first(*found)


CUDNN = FusedKernel(cudnn_forward, cudnn_backward, smallest=2)
FLASH = FusedKernel(flash_forward, flash_backward)


def _sizes(signature: Signature) -> list[str]:
    odd = [d for d in signature.dims.get("head_dim", ()) if d % 8]
    return [f"head_dim {odd[0]} is no multiple of 8"] if odd else []


def _cudnn_supports(signature: Signature) -> list[str]:
    version = torch.backends.cudnn.version() or 0
    return _sizes(signature) + ([] if version >= 90_000 else [f"cuDNN {version or 'is absent'}, not 9 or later"])


def _probe(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether flash attention says that it serves this on the chip that is here: builds for ROCm have it for some.
    Where no chip is, it is taken to."""
    if not torch.cuda.is_available():
        return True
    q = torch.empty(1, 1, 128, head_dim, dtype=dtype, device="cuda")
    params = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, True, False)
    return bool(torch.backends.cuda.can_use_flash_attention(params))


def _flash_supports(signature: Signature) -> list[str]:
    out = _sizes(signature)
    if not torch.backends.cuda.is_flash_attention_available():
        out.append("this torch was built without flash attention")
    if not out and signature.platform == "amd" and signature.dtype in SIXTEEN_BITS:
        refused = [d for d in signature.dims.get("head_dim", ()) if not _probe(d, signature.dtype)]
        out += [f"this build has no flash attention for head_dim {refused[0]} on this chip"] if refused else []
    wide = [d for d in signature.dims.get("head_dim", ()) if d > 192]
    if wide and signature.platform == "nvidia" and signature.arch not in ((8, 0), (9, 0), (10, 0), (10, 3)):
        out.append(f"no backward for head_dim {wide[0]} on this chip")
    return out


def register(api: PluginApi) -> None:
    rest = attention_kernel()
    if rest is None:  # nobody would serve windows and documents
        return
    common = {"dtypes": SIXTEEN_BITS, "deterministic": False}
    cudnn = Capability(platforms=("nvidia",), arch_min=(9, 0), largest={"head_dim": 128, "heads": 65_535}, **common)  # type: ignore[arg-type]
    flash = Capability(platforms=("nvidia", "amd"), arch_min=(8, 0), largest={"head_dim": 256}, **common)  # type: ignore[arg-type]
    api.kernel(fused_attention("cudnn", CUDNN, rest, cudnn, _cudnn_supports, priority=1))
    api.kernel(fused_attention("flash", FLASH, rest, flash, _flash_supports))
