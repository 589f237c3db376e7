"""NVIDIA GPUs through torch.cuda and NCCL."""

from __future__ import annotations

import torch

from hetero_megatron.ops.kernel import VENDOR, Capability, Kernel
from hetero_megatron.ops.kernel import Signature as Sig
from hetero_megatron.platform import Accelerator, Limits
from hetero_megatron.platform.plugins import PluginApi

HETERO_PLUGIN_API = 1


class Nvidia(Accelerator):
    name, vendor, device_type, backends = "nvidia", "NVIDIA", "cuda", ("nccl",)
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    limits = Limits(shared_bytes=227 * 1024, max_warps=32, max_grid=2**31 - 1)

    def matches(self) -> bool:
        """Several vendors' builds of torch call their device cuda too."""
        return torch.version.cuda is not None and "NVIDIA" in self.chip(0).upper()


# torch's own CUDA kernels for attention return the log-sum-exp and are faster than anything written in Triton.


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: object, window: int | None, q_start: int, k_start: int
) -> tuple[torch.Tensor, ...]:
    """cuDNN's flash attention; causal, equal lengths, one document per row (``_supports`` and the model see to it)."""
    out, lse, cq, ck, mq, mk, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), None, True, 0.0, True, False
    )
    out = out.transpose(1, 2)
    return out, lse.squeeze(-1), q, k, v, out, lse, seed, offset


def _attention_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    seed: torch.Tensor, offset: torch.Tensor, documents: object, window: int | None, q_start: int, k_start: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    turned = (x.transpose(1, 2) for x in (dout, q, k, v, out))
    length = q.shape[1]
    found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *turned, lse, seed, offset, None, None, None, length, length, 0.0, True
    )
    return tuple(x.transpose(1, 2) for x in found)


def _supports(signature: Sig) -> list[str]:
    """cuDNN takes neither windows nor packed documents nor parts of a sequence, so it serves by request only."""
    return [] if signature.dims.get("head_dim", (64,))[0] % 8 == 0 else ["the head size is no multiple of 8"]


CUDNN = Kernel(
    "attention", "cudnn", VENDOR, _attention, _attention_backward, private=True, supports=_supports,
    capability=Capability(
        devices=("cuda",), platforms=("nvidia",), dtypes=(torch.bfloat16, torch.float16), arch_min=(8, 0),
        automatic=(), largest={"head_dim": 128}, deterministic=False,
    ),
)  # fmt: skip


def register(api: PluginApi) -> None:
    api.platform(Nvidia())
    api.kernel(CUDNN)
