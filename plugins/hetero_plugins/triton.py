"""The Triton kernels of ``hetero_kernels`` as a provider for every accelerator that Triton compiles for.

On the CPU they run under Triton's interpreter, about a thousand times slower: only by request, and only where
TRITON_INTERPRET=1 was set before they were imported. Triton itself is imported at the first call.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.ops.attention_op import add_sinks, sink_gradient
from hetero_megatron.ops.cross_entropy import NO_LABEL
from hetero_megatron.ops.dropout import ScoreDropout, dropped_units
from hetero_megatron.ops.grouped_gemm import bias_gradient
from hetero_megatron.ops.spec import TRITON, Capability, Kernel, Signature
from hetero_megatron.platform.plugins import PluginApi, load_plugins, source_file

HETERO_PLUGIN_API = 1

# As hetero_kernels reads it, which is not imported here: that would import Triton.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "y", "yes")
Many = list[torch.Tensor]


@functools.cache
def _kernels() -> Any:
    """The functions of ``hetero_kernels``, with the limits of this machine's platform where it has one."""
    module = importlib.import_module("hetero_kernels")
    limits = None if INTERPRETED else _limits(module)
    if limits is None:
        return module
    offered = {name: getattr(module, name) for name in module.__all__}
    takes = {n for n, f in offered.items() if inspect.isfunction(f) and "limits" in inspect.signature(f).parameters}
    return SimpleNamespace(**offered | {n: functools.partial(offered[n], limits=limits) for n in takes})


def _limits(kernels: ModuleType) -> Any:
    """What Triton's driver reports, no more than the platform states; None where no one platform is here."""
    here = [a for a in load_plugins().platforms.values() if a.device_type != "cpu" and a.available()]
    if len(here) != 1:
        return None
    found, stated = kernels.limits_of(torch.device(here[0].device_type)), here[0].limits
    least = {name: min(getattr(found, name), getattr(stated, name)) for name in ("max_grid", "max_block", "max_warps")}
    return replace(found, **least, shared_bytes=min(found.shared_bytes, stated.shared_bytes or found.shared_bytes))


def _supports(signature: Signature) -> list[str]:
    if importlib.util.find_spec("triton") is None:
        return ["triton is not installed"]
    if signature.device == "cpu" and not INTERPRETED:
        return ["on the CPU it needs Triton's interpreter: set TRITON_INTERPRET=1 before the start"]
    if signature.device != "cpu" and INTERPRETED:
        return ["TRITON_INTERPRET is set, so that it would be interpreted, a thousand times slower: unset it"]
    return []


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    return _kernels().rms_norm_fwd(x, weight, eps)  # type: ignore[no-any-return]


def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    return _kernels().rms_norm_bwd(dy, x, weight, rstd)  # type: ignore[no-any-return]


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    return _kernels().add_rms_norm_fwd(x, residual, weight, eps)  # type: ignore[no-any-return]


def _add_rms_norm_backward(
    dy: torch.Tensor, dtotal: torch.Tensor, total: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, eps: float
) -> tuple[torch.Tensor, ...]:
    dx, dw = _kernels().add_rms_norm_bwd(dy, dtotal, total, weight, rstd)
    return dx, dx, dw


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    return _kernels().layer_norm_fwd(x, weight, bias, eps)  # type: ignore[no-any-return]


def _layer_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mean: torch.Tensor,
    rstd: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return _kernels().layer_norm_bwd(dy, x, weight, mean, rstd)  # type: ignore[no-any-return]


def _rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inplace = all(_as_tokens(x) for x in (q, k))
    return _kernels().rope_fwd(q, k, cos, sin, inplace=inplace)  # type: ignore[no-any-return]


def _as_tokens(x: torch.Tensor) -> bool:
    """Whether [b, s, heads, d] can be seen as [b s, heads, d] with features that are adjacent."""
    rows, tokens = x.shape[:2]
    return x.stride(3) == 1 and (rows == 1 or tokens == 1 or x.stride(0) == tokens * x.stride(1))


def _rope_backward(
    dq: torch.Tensor, dk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return _kernels().rope_bwd(dq, dk, cos, sin)  # type: ignore[no-any-return]


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (_kernels().swiglu_fwd(gate, up),)


def _swiglu_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _kernels().swiglu_bwd(dy, gate, up, packed=True)  # type: ignore[no-any-return]


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> tuple[torch.Tensor, ...]:
    return (_kernels().swiglu_fwd(gate, up, limit=limit, alpha=alpha, shift=1.0),)


def _clamped_swiglu_backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float
) -> tuple[torch.Tensor, ...]:
    return _kernels().swiglu_bwd(  # type: ignore[no-any-return]
        dy, gate, up, limit=limit, alpha=alpha, shift=1.0, packed=True
    )


def _gelu(x: torch.Tensor, tanh: bool) -> tuple[torch.Tensor, ...]:
    return (_kernels().gelu_fwd(x, approximate=tanh),)


def _gelu_backward(dy: torch.Tensor, x: torch.Tensor, tanh: bool) -> tuple[torch.Tensor, ...]:
    return (_kernels().gelu_bwd(dy, x, approximate=tanh),)


def _softmax(x: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, ...]:
    diagonal = x.shape[-1] - x.shape[-2] if causal else 0
    return (_kernels().softmax_fwd(x, scale=scale, causal=causal, diagonal=diagonal),)


def _softmax_backward(dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> tuple[torch.Tensor, ...]:
    return (_kernels().softmax_bwd(dy, y, scale=scale),)


# Both cross-entropies write the gradient over the logits, which nothing else needs: their saved state is their own.
def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    loss, lse = _kernels().cross_entropy_fwd(logits, labels, ignore_index=NO_LABEL)
    return loss, logits, labels, lse


def _cross_entropy_backward(
    dloss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    inplace = logits.is_contiguous()
    return (_kernels().cross_entropy_bwd(dloss, logits, labels, lse, ignore_index=NO_LABEL, inplace=inplace),)


def _vocab(logits: torch.Tensor, labels: torch.Tensor, start: int) -> tuple[torch.Tensor, ...]:
    top, total, target = _kernels().vocab_stats(logits, labels, start, ignore_index=NO_LABEL)
    here = (labels >= start) & (labels < start + logits.shape[-1])
    return top, total, torch.where(here, target - top, 0.0), logits


def _vocab_backward(
    grad: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, peak: torch.Tensor, normalizer: torch.Tensor,
    start: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    lse, inplace = peak + normalizer.log(), logits.is_contiguous()
    return (
        _kernels().vocab_stats_bwd(grad, logits, labels, start, lse, ignore_index=NO_LABEL, inplace=inplace),
    )


def _linear_cross_entropy(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return _kernels().linear_cross_entropy_fwd(x, weight, labels, ignore_index=NO_LABEL)  # type: ignore[no-any-return]


def _linear_cross_entropy_backward(
    dloss: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    dx, dw = _kernels().linear_cross_entropy_bwd(dloss, x, weight, labels, lse, ignore_index=NO_LABEL)
    return dx, dw.to(weight.dtype)


def _linear_cross_entropy_fwd_bwd(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, dloss: torch.Tensor,
    into: torch.Tensor | None = None, beta: float = 1.0,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    loss, _, dx, dw = _kernels().linear_cross_entropy_fwd_bwd(
        x, weight, labels, dloss, ignore_index=NO_LABEL, grad_weight=into, accumulate=beta != 0.0
    )
    return loss, dx, dw


def _bounds(q: torch.Tensor, documents: Any, window: int | None) -> Any:
    if documents is None or all(len(starts) <= 1 for starts in documents):
        return None
    return _intervals(tuple(map(tuple, documents)), q.shape[1], window, q.device)


@functools.lru_cache(maxsize=32)  # all layers ask for the same, and each upload would make the host wait
def _intervals(
    documents: tuple[tuple[int, ...], ...], tokens: int, window: int | None, device: torch.device
) -> Any:  # fmt: skip
    """Documents are for queries and keys over the same tokens."""
    package = _kernels()
    return package.KeyIntervals(package.document_bounds(documents, tokens, device), tokens, window=window)


def _score_dropout(dropout: ScoreDropout | None) -> Any:
    if dropout is None:
        return None
    return _kernels().AttentionDropout(dropped_units(dropout.rate), *dropout[1:])


def _dropout(
    x: torch.Tensor, tokens: torch.Tensor, rate: float, key: int, sample: int, feature: int
) -> tuple[torch.Tensor, ...]:
    """Backward too: of ``dy``."""
    return (_kernels().dropout(x, tokens, dropped=dropped_units(rate), key=key, sample=sample, feature=feature),)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None, documents: Any = None,
    window: int | None = None, q_start: int = 0, k_start: int = 0, softcap: float | None = None,
    dropout: ScoreDropout | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    out, lse = _kernels().attention_fwd(
        q, k, v, q_start=q_start, k_start=k_start, window=window, bounds=_bounds(q, documents, window),
        softcap=softcap, dropout=_score_dropout(dropout),
    )  # fmt: skip
    return (out, lse) if sinks is None else add_sinks(out, lse, sinks)


def _attention_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, documents: Any = None, window: int | None = None, q_start: int = 0,
    k_start: int = 0, softcap: float | None = None, dropout: ScoreDropout | None = None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    delta = _kernels().attention_delta(dout, out)
    grads = _kernels().attention_bwd(
        dout, q, k, v, out, lse, q_start=q_start, k_start=k_start, window=window, bounds=_bounds(q, documents, window),
        delta=delta, softcap=softcap, dropout=_score_dropout(dropout),
    )  # fmt: skip
    return *grads, None if sinks is None else sink_gradient(delta, lse, sinks)


def _attention_share(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    delta: torch.Tensor | None, window: int | None, q_start: int, k_start: int, softcap: float | None,
    dropout: ScoreDropout | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Partial gradients, unrounded: the caller adds them up."""
    return _kernels().attention_bwd(  # type: ignore[no-any-return]
        dout, q, k, v, out, lse, q_start=q_start, k_start=k_start, window=window, delta=delta, grad_dtype=lse.dtype,
        softcap=softcap, dropout=_score_dropout(dropout),
    )  # fmt: skip


def _delta(dout: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (_kernels().attention_delta(dout, out),)


def _merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[()]:
    _, lse = _kernels().attention_merge(out_a, lse_a, out_b, lse_b, inplace=True)
    if lse is not lse_a:  # rows of a larger one, which the kernel takes side by side
        lse_a.copy_(lse)
    return ()


def _adamw(
    params: Many, grads: Many, first: Many, second: Many, copies: Many, step: int, lr: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, grad_scale: float,
) -> tuple[()]:  # fmt: skip
    if len(params):
        _kernels().adamw_step(
            params, grads, first, second, lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay,
            step=step, grad_scale=grad_scale, copies=copies or None,
        )  # fmt: skip
    return ()


def _l2norm(tensors: Many) -> tuple[torch.Tensor, ...]:
    full = [x.contiguous() for x in tensors if x.numel()]
    return (_kernels().l2norm(full) if full else torch.zeros(()),)


def _grouped_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return (_kernels().grouped_gemm_fwd(x, weight, ends, bias),)


def _grouped_input(dy: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return _kernels().grouped_gemm_dx(dy, weight, ends)  # type: ignore[no-any-return]


def _grouped_weight(
    dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, into: torch.Tensor | None = None, beta: float = 1.0
) -> torch.Tensor:
    return _kernels().grouped_gemm_dw(dy, x, ends, into=into, beta=beta)  # type: ignore[no-any-return]


def _grouped_gemm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    dbias = None if bias is None else bias_gradient(dy, ends)
    return _grouped_input(dy, weight, ends), _grouped_weight(dy, x, ends), dbias


def _numbers(v: torch.Tensor, documents: Any) -> torch.Tensor | None:
    if documents is None or all(len(starts) <= 1 for starts in documents):
        return None
    return _document_numbers(tuple(map(tuple, documents)), v.shape[1], v.device)


@functools.lru_cache(maxsize=32)  # as bounds of attention
def _document_numbers(documents: tuple[tuple[int, ...], ...], tokens: int, device: torch.device) -> torch.Tensor:
    return _kernels().document_numbers(documents, tokens, device)  # type: ignore[no-any-return]


def _one_decay_per_head(g: torch.Tensor) -> None:
    if g.dim() != 3:
        raise UserError(
            "it decays whole states, not one feature of keys otherwise than another", field="gated_delta_rule: g",
            value=list(g.shape), accepted="[b, s, value heads], or another provider of it: --kernels",
        )  # fmt: skip


def _gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor | None,
    documents: Any, eps: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    _one_decay_per_head(g)
    return _kernels().gated_delta_fwd(  # type: ignore[no-any-return]
        q, k, v, g, beta, state, documents=_numbers(v, documents), eps=eps
    )


def _gated_delta_backward(
    dout: torch.Tensor, dlast: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor, state: torch.Tensor | None, documents: Any, eps: float,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    return _kernels().gated_delta_bwd(  # type: ignore[no-any-return]
        dout, dlast, q, k, v, g, beta, state, documents=_numbers(v, documents), eps=eps
    )


_PARTS: dict[str, dict[str, Callable[..., Any]]] = {
    "grouped_gemm": {"input": _grouped_input, "weight": _grouped_weight},
    "attention": {"share": _attention_share, "delta": lambda dout, out: _kernels().attention_delta(dout, out)},
    "linear_cross_entropy": {"fwd_bwd": _linear_cross_entropy_fwd_bwd},
}
# Of the operators' contracts; others: 1.
_VERSIONS = {"attention": 3, "adamw": 3, "attn_merge": 2, "linear_cross_entropy": 2, "rope": 2}
_FEATURES = {"attention": ("softcap", "sinks", "dropout")}
_LARGEST = {"gated_delta_rule": {"key_dim": 128}}  # whole columns of a state are in registers
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
    ("attention", "attention", _attention, _attention_backward),
    ("grouped_gemm", "grouped_gemm", _grouped_gemm, _grouped_gemm_backward),
    ("gated_delta_rule", "gated_delta", _gated_delta, _gated_delta_backward),
    ("dropout", "dropout", _dropout, _dropout),
    ("attn_delta", "attention", _delta, None),
    ("attn_merge", "attention", _merge, None),
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
        Capability(automatic=AUTOMATIC, features=_FEATURES.get(op, ()), largest=_LARGEST.get(op, {})), _supports,
        parts=_PARTS.get(op, {}), version=_VERSIONS.get(op, 1), interpreted=INTERPRETED,
        private="logits" in overwritten, overwrites=overwritten,
    )  # fmt: skip


def attention_kernel() -> Kernel | None:
    """For providers that leave to Triton what they do not serve."""
    return _kernel("attention", "attention", _attention, _attention_backward)


def register(api: PluginApi) -> None:
    for row in _TABLE:
        kernel = _kernel(*row)
        if kernel is not None:
            api.kernel(kernel)
