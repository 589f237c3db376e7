"""The Triton kernels of ``hetero_kernels`` as a provider for every accelerator that Triton compiles for.

Here are the operators over tokens, the optimizer's, and the table of all; those over sequences are in
``triton_sequences.py``. Triton itself is imported at the first call (``triton_package.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hetero_megatron.ops.cross_entropy import NO_LABEL
from hetero_megatron.ops.dropout import dropped_units
from hetero_megatron.ops.gated_delta import CHANNELS
from hetero_megatron.ops.grouped_gemm import bias_gradient
from hetero_megatron.ops.spec import TRITON, Capability, Kernel
from hetero_megatron.platform.plugins import PluginApi, source_file
from hetero_plugins.triton_package import INTERPRETED, kernels, supports
from hetero_plugins.triton_sequences import (
    attention,
    attention_backward,
    attention_delta,
    attention_merge,
    attention_share,
    gated_delta,
    gated_delta_backward,
    state_space,
    state_space_backward,
)

HETERO_PLUGIN_API = 1
Many = list[torch.Tensor]

def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    return kernels().rms_norm_fwd(x, weight, eps)  # type: ignore[no-any-return]


def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    return kernels().rms_norm_bwd(dy, x, weight, rstd)  # type: ignore[no-any-return]


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    return kernels().add_rms_norm_fwd(x, residual, weight, eps)  # type: ignore[no-any-return]


def _add_rms_norm_backward(
    dy: torch.Tensor, dtotal: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    dx, dw = kernels().add_rms_norm_bwd(dy, dtotal, total, weight, rstd)
    return dx, dx, dw


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    return kernels().layer_norm_fwd(x, weight, bias, eps)  # type: ignore[no-any-return]


def _layer_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor,
    rstd: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return kernels().layer_norm_bwd(dy, x, weight, mean, rstd)  # type: ignore[no-any-return]


def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inplace = all(_as_tokens(x) for x in (q, k))
    return kernels().rope_fwd(q, k, cos, sin, inplace=inplace)  # type: ignore[no-any-return]


def _as_tokens(x: torch.Tensor) -> bool:
    """Whether [b, s, heads, d] can be seen as [b s, heads, d] with features that are adjacent."""
    rows, tokens = x.shape[:2]
    return x.stride(3) == 1 and (rows == 1 or tokens == 1 or x.stride(0) == tokens * x.stride(1))


def _rope_backward(
    dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return kernels().rope_bwd(dq, dk, cos, sin)  # type: ignore[no-any-return]


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (kernels().swiglu_fwd(gate, up),)


def _swiglu_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return kernels().swiglu_bwd(dy, gate, up, packed=True)  # type: ignore[no-any-return]


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> tuple[torch.Tensor, ...]:
    return (kernels().swiglu_fwd(gate, up, limit=limit, alpha=alpha, shift=1.0),)


def _clamped_swiglu_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float
) -> tuple[torch.Tensor, ...]:
    return kernels().swiglu_bwd(  # type: ignore[no-any-return]
        dy, gate, up, limit=limit, alpha=alpha, shift=1.0, packed=True
    )


def _gelu(x: torch.Tensor, tanh: bool) -> tuple[torch.Tensor, ...]:
    return (kernels().gelu_fwd(x, approximate=tanh),)


def _gelu_backward(dy: torch.Tensor, x: torch.Tensor, tanh: bool) -> tuple[torch.Tensor, ...]:
    return (kernels().gelu_bwd(dy, x, approximate=tanh),)


def _softmax(x: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, ...]:
    diagonal = x.shape[-1] - x.shape[-2] if causal else 0
    return (kernels().softmax_fwd(x, scale=scale, causal=causal, diagonal=diagonal),)


def _softmax_backward(dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, ...]:
    return (kernels().softmax_bwd(dy, y, scale=scale),)


# Both cross-entropies write the gradient over the logits, which nothing else needs: their saved state is their own.
def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    loss, lse = kernels().cross_entropy_fwd(logits, labels, ignore_index=NO_LABEL)
    return loss, logits, labels, lse


def _cross_entropy_backward(
    dloss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    inplace = logits.is_contiguous()
    return (kernels().cross_entropy_bwd(dloss, logits, labels, lse, ignore_index=NO_LABEL, inplace=inplace),)


def _vocab(logits: torch.Tensor, labels: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
    top, total, target = kernels().vocab_stats(logits, labels, start, ignore_index=NO_LABEL)
    here = (labels >= start) & (labels < start + logits.shape[-1])
    return top, total, torch.where(here, target - top, 0.0), logits


def _vocab_backward(
    grad: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, peak: torch.Tensor, normalizer: torch.Tensor,
    start: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    lse, inplace = peak + normalizer.log(), logits.is_contiguous()
    return (
        kernels().vocab_stats_bwd(grad, logits, labels, start, lse, ignore_index=NO_LABEL, inplace=inplace),
    )


def _linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return kernels().linear_cross_entropy_fwd(x, weight, labels, ignore_index=NO_LABEL)  # type: ignore[no-any-return]


def _linear_cross_entropy_backward(
    dloss: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    dx, dw = kernels().linear_cross_entropy_bwd(dloss, x, weight, labels, lse, ignore_index=NO_LABEL)
    return dx, dw.to(weight.dtype)


def _linear_cross_entropy_fwd_bwd(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor,
    into: torch.Tensor | None = None, beta: float = 1.0,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    loss, _, dx, dw = kernels().linear_cross_entropy_fwd_bwd(
        x, weight, labels, dloss, ignore_index=NO_LABEL, grad_weight=into, accumulate=beta != 0.0
    )
    return loss, dx, dw


def _dropout(
    x: torch.Tensor, tokens: torch.Tensor, rate: float, key: int, sample: int, feature: int
) -> tuple[torch.Tensor, ...]:
    """Backward too: of ``dy``."""
    return (kernels().dropout(x, tokens, dropped=dropped_units(rate), key=key, sample=sample, feature=feature),)


def _adamw(
    params: Many, grads: Many, first: Many, second: Many, copies: Many, step: int, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, grad_scale: float,
) -> tuple[()]:  # fmt: skip
    if len(params):
        kernels().adamw_step(
            params, grads, first, second, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
            step=step, grad_scale=grad_scale, copies=copies or None,
        )  # fmt: skip
    return ()


def _l2norm(tensors: Many) -> tuple[torch.Tensor, ...]:
    full = [x.contiguous() for x in tensors if x.numel()]
    return (kernels().l2norm(full) if full else torch.zeros(()),)


def _grouped_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return (kernels().grouped_gemm_fwd(x, weight, ends, bias),)


def _grouped_input(dy: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return kernels().grouped_gemm_dx(dy, weight, ends)  # type: ignore[no-any-return]


def _grouped_weight(
    dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0
) -> torch.Tensor:
    return kernels().grouped_gemm_dw(dy, x, ends, into=into, beta=beta)  # type: ignore[no-any-return]


def _grouped_gemm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    dbias = None if bias is None else bias_gradient(dy, ends)
    return _grouped_input(dy, weight, ends), _grouped_weight(dy, x, ends), dbias


def _nf4_dequantize(
    weight: torch.Tensor, groups: torch.Tensor, mean: torch.Tensor, levels: torch.Tensor, codes: torch.Tensor,
    matrix: torch.Tensor, first: int, across: int, skip: int,
) -> tuple[()]:  # fmt: skip
    kernels().nf4_dequantize(weight, groups, mean, levels, codes, matrix, first=first, across=across, skip=skip)
    return ()


_PARTS: dict[str, dict[str, Callable[..., Any]]] = {
    "grouped_gemm": {"input": _grouped_input, "weight": _grouped_weight},
    "attention": {"share": attention_share, "delta": lambda dout, out: kernels().attention_delta(dout, out)},
    "linear_cross_entropy": {"fwd_bwd": _linear_cross_entropy_fwd_bwd},
}
# Of the operators' contracts; others: 1.
_VERSIONS = {"attention": 3, "adamw": 3, "attn_merge": 2, "linear_cross_entropy": 2, "rope": 2}
_FEATURES = {"attention": ("softcap", "sinks", "dropout"), "gated_delta_rule": (CHANNELS,)}
_STATES = {"key_dim": 128}  # whole columns of a state are in registers
_LARGEST = {"gated_delta_rule": _STATES, "state_space_rule": _STATES}
_OVERWRITTEN = {"cross_entropy": ("logits",), "vocab_cross_entropy": ("logits",), "rope": ("q", "k")}
# operator, file of hetero_kernels, forward, backward
_TABLE: tuple[tuple[str, str, Callable[..., Any], Callable[..., Any] | None], ...] = (
    ("rms_norm", "rms_norm", _rms_norm, _rms_norm_backward),
    ("add_rms_norm", "add_rms_norm", _add_rms_norm, _add_rms_norm_backward),
    ("layer_norm", "layer_norm", _layer_norm, _layer_norm_backward),
    ("rope", "rope", _rope, _rope_backward),
    ("swiglu", "swiglu", _swiglu, _swiglu_backward),
    ("clamped_swiglu", "swiglu", _clamped_swiglu, _clamped_swiglu_backward),
    ("gelu", "gelu", _gelu, _gelu_backward),
    ("softmax", "softmax", _softmax, _softmax_backward),
    ("cross_entropy", "cross_entropy", _cross_entropy, _cross_entropy_backward),
    ("vocab_cross_entropy", "vocab_parallel_cross_entropy", _vocab, _vocab_backward),
    ("linear_cross_entropy", "linear_cross_entropy", _linear_cross_entropy, _linear_cross_entropy_backward),
    ("attention", "attention", attention, attention_backward),
    ("grouped_gemm", "grouped_gemm", _grouped_gemm, _grouped_gemm_backward),
    ("gated_delta_rule", "gated_delta", gated_delta, gated_delta_backward),
    ("state_space_rule", "state_space_rule", state_space, state_space_backward),
    ("dropout", "dropout", _dropout, _dropout),
    ("nf4_dequantize", "nf4", _nf4_dequantize, None),
    ("attn_delta", "attention", attention_delta, None),
    ("attn_merge", "attention", attention_merge, None),
    ("adamw", "adamw", _adamw, None),
    ("l2norm", "l2norm", _l2norm, None),
)


# Device types that get these kernels unasked. An NPU has torch's and its vendor's, and nobody has compiled these for
# one yet: `--kernels` asks for them, after `plugins check triton` there.
AUTOMATIC = ("cuda", "xpu", "mlu", "musa", "gcu")


def _kernel(
    op: str, file: str, forward: Callable[..., Any], backward: Callable[..., Any] | None
) -> Kernel | None:
    """None where the package has no such file."""
    if source_file(f"hetero_kernels.{file}") is None:
        return None
    overwritten = _OVERWRITTEN.get(op, ())
    return Kernel(
        op, "triton", TRITON, forward, backward,
        Capability(automatic=AUTOMATIC, features=_FEATURES.get(op, ()), largest=_LARGEST.get(op, {})), supports,
        parts=_PARTS.get(op, {}), version=_VERSIONS.get(op, 1), interpreted=INTERPRETED,
        private="logits" in overwritten, overwrites=overwritten,
    )  # fmt: skip


def attention_kernel() -> Kernel | None:
    """For providers that leave to Triton what they do not serve."""
    return _kernel("attention", "attention", attention, attention_backward)


def register(api: PluginApi) -> None:
    for row in _TABLE:
        kernel = _kernel(*row)
        if kernel is not None:
            api.kernel(kernel)
