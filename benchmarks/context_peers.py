"""Attention over a divided sequence by others, for bench_context_peers.py: torch's ring, DeepSpeed's Ulysses layer."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import _attention as torch_context
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # [b, own tokens, heads, d] each
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One process, all tokens; [b, s, heads, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> tuple[torch.Tensor, ...]:
    return _flash(query, key, value, 0.0, is_causal)  # type: ignore[no-any-return]


def _backward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, out: torch.Tensor, logsumexp: torch.Tensor,
    is_causal: bool, grad_out: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    return _flash_backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)  # type: ignore[no-any-return]


class _TorchRing(torch.autograd.Function):
    """torch's own loop over the ring, with the CPU's flash kernel where its table has only CUDA's."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, method: str) -> torch.Tensor:
        torch_context.set_rotate_method(method)
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        out, lse = torch_ring._templated_ring_attention(group, 2, _forward, q, k, v, is_causal=True)  # type: ignore[arg-type]
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.method = group, method
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        torch_context.set_rotate_method(ctx.method)
        q, k, v, out, lse = ctx.saved_tensors
        grads = torch_ring._templated_ring_attention_backward(  # its type wants names that it never passes
            ctx.group, 2, _backward,  # type: ignore[arg-type]
            grad.transpose(1, 2).contiguous(), "grad_out", q, k, v, out, lse, True
        )
        return *(x.transpose(1, 2) for x in grads[:3]), None, None


def torch_ring_attention(group: Any, method: str) -> Attention:
    """``method``: allgather | alltoall, how keys and values reach the next rank."""
    return lambda q, k, v: _TorchRing.apply(q, k, v, group, method)


def public_api(mesh: DeviceMesh, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """What ``context_parallel`` itself does on this device: the error's first line, or "" where it runs."""
    whole = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    try:
        with torch_context.context_parallel(mesh, buffers=whole, buffer_seq_dims=[2, 2, 2]):
            a, b, c = (x.clone().requires_grad_() for x in whole)
            torch.nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return ""


def deepspeed_ulysses(group: Any) -> Attention:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    # Its all-reduce through shared memory is compiled at first use, which waits for ever on a lock that a killed
    # process left; all-to-all does not use it.
    vars(import_module("deepspeed.comm.torch"))["build_shm_op"] = lambda: None
    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    layer = DistributedAttention(causal, group, scatter_idx=2, gather_idx=1)  # type: ignore[arg-type]
    return lambda q, k, v: layer(q, k, v, 0)


def torch_places(rank: int, world: int, length: int) -> list[tuple[int, int]]:
    """Tokens of a rank in torch's head-tail order."""
    size = length // (2 * world)
    return [(rank * size, (rank + 1) * size), (length - (rank + 1) * size, length - rank * size)]
