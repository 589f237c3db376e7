"""Which operators a stage of a model calls, with what sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from hetero_megatron.ops.kernel import Signature
from hetero_megatron.ops.kernel_plan import KernelPlan, resolve
from hetero_megatron.ops.operators import torch_registry
from hetero_megatron.spec import ModelSpec, Share

Dims = dict[str, tuple[int, ...]]


def stage_operators(spec: ModelSpec, share: Share, head: bool, tp: int) -> Iterator[tuple[str, Dims]]:
    """(operator, sizes) of everything that forward, backward and the update of one rank may call."""
    h, d = spec.hidden_size, spec.head_dim
    heads, kv_heads = (b - a for a, b in (share.q_heads, share.kv_heads))
    ffn, vocabulary = share.ffn[1] - share.ffn[0], share.vocab[1] - share.vocab[0]
    yield "gemm", {"inputs": (h, heads * d, ffn), "outputs": (heads * d, kv_heads * d, h, ffn)}
    rms_widths = ((h,) if spec.norm == "rms" else ()) + ((d,) if spec.qk_norm else ())
    if rms_widths:
        yield "rms_norm", {"width": rms_widths}
    if spec.norm == "rms":
        yield "add_rms_norm", {"width": (h,)}
    else:
        yield "layer_norm", {"width": (h,)}
    if spec.position == "rope":
        yield "rope", {"head_dim": (d,), "heads": (heads, kv_heads)}
    activation = {"swiglu": "swiglu", "squared_relu": "squared_relu"}.get(spec.activation, "gelu")
    yield activation, {"width": (ffn,)}
    yield "attention", {"head_dim": (d,), "heads": (heads,), "kv_heads": (kv_heads,)}
    if head:
        yield ("vocab_cross_entropy" if tp > 1 else "cross_entropy"), {"vocabulary": (vocabulary,)}
    yield "adamw", {}
    yield "l2norm", {}


def default_kernels(
    spec: ModelSpec,
    share: Share,
    head: bool,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    tp: int = 1,
    requests: Mapping[str, str] | None = None,
    field: str = "kernels",
) -> KernelPlan:
    """The kernel plan of a stage from torch's own providers, without plugins."""
    kind = torch.device(device).type
    signatures = [Signature(op, kind, dtype, dims=dims) for op, dims in stage_operators(spec, share, head, tp)]
    return resolve(torch_registry(), signatures, requests, field)
