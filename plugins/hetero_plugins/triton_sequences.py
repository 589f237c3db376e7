"""Triton's kernels over sequences as operators: attention, also in parts, and the rules of linear attention.

Documents become what each kernel takes for them once for all layers.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from hetero_megatron.ops.attention_op import add_sinks, sink_gradient
from hetero_megatron.ops.dropout import ScoreDropout, dropped_units
from hetero_plugins.triton_package import kernels


def _bounds(q: torch.Tensor, documents: Any, window: int | None) -> Any:
    if documents is None or all(len(starts) <= 1 for starts in documents):
        return None
    return _intervals(tuple(map(tuple, documents)), q.shape[1], window, q.device)


@functools.lru_cache(maxsize=32)  # all layers ask for the same, and each upload would make the host wait
def _intervals(
    documents: tuple[tuple[int, ...], ...], tokens: int, window: int | None, device: torch.device
) -> Any:  # fmt: skip
    """Documents are for queries and keys over the same tokens."""
    package = kernels()
    return package.KeyIntervals(package.document_bounds(documents, tokens, device), tokens, window=window)


def _score_dropout(dropout: ScoreDropout | None) -> Any:
    if dropout is None:
        return None
    return kernels().AttentionDropout(dropped_units(dropout.rate), *dropout[1:])


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None, documents: Any = None,
    window: int | None = None, q_start: int = 0, k_start: int = 0, softcap: float | None = None,
    dropout: ScoreDropout | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    out, lse = kernels().attention_fwd(
        q, k, v, q_start=q_start, k_start=k_start, window=window, bounds=_bounds(q, documents, window),
        softcap=softcap, dropout=_score_dropout(dropout),
    )  # fmt: skip
    return (out, lse) if sinks is None else add_sinks(out, lse, sinks)


def attention_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None,
    out: torch.Tensor, lse: torch.Tensor, documents: Any = None, window: int | None = None, q_start: int = 0,
    k_start: int = 0, softcap: float | None = None, dropout: ScoreDropout | None = None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    delta = kernels().attention_delta(dout, out)
    grads = kernels().attention_bwd(
        dout, q, k, v, out, lse, q_start=q_start, k_start=k_start, window=window, bounds=_bounds(q, documents, window),
        delta=delta, softcap=softcap, dropout=_score_dropout(dropout),
    )  # fmt: skip
    return *grads, None if sinks is None else sink_gradient(delta, lse, sinks)


def attention_share(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    delta: torch.Tensor | None, window: int | None, q_start: int, k_start: int, softcap: float | None,
    dropout: ScoreDropout | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Partial gradients, unrounded: the caller adds them up."""
    return kernels().attention_bwd(  # type: ignore[no-any-return]
        dout, q, k, v, out, lse, q_start=q_start, k_start=k_start, window=window, delta=delta, grad_dtype=lse.dtype,
        softcap=softcap, dropout=_score_dropout(dropout),
    )  # fmt: skip


def attention_delta(dout: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (kernels().attention_delta(dout, out),)


def attention_merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[()]:
    _, lse = kernels().attention_merge(out_a, lse_a, out_b, lse_b, inplace=True)
    if lse is not lse_a:  # rows of a larger one, which the kernel takes side by side
        lse_a.copy_(lse)
    return ()


def _numbers(v: torch.Tensor, documents: Any) -> torch.Tensor | None:
    if documents is None or all(len(starts) <= 1 for starts in documents):
        return None
    return _document_numbers(tuple(map(tuple, documents)), v.shape[1], v.device)


@functools.lru_cache(maxsize=32)  # as bounds of attention
def _document_numbers(documents: tuple[tuple[int, ...], ...], tokens: int, device: torch.device) -> torch.Tensor:
    return kernels().document_numbers(documents, tokens, device)  # type: ignore[no-any-return]


def gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor | None,
    documents: Any, eps: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return kernels().gated_delta_fwd(  # type: ignore[no-any-return]
        q, k, v, g, beta, state, documents=_numbers(v, documents), eps=eps
    )


def gated_delta_backward(
    dout: torch.Tensor, dlast: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
    beta: torch.Tensor, state: torch.Tensor | None, documents: Any, eps: float,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    return kernels().gated_delta_bwd(  # type: ignore[no-any-return]
        dout, dlast, q, k, v, g, beta, state, documents=_numbers(v, documents), eps=eps
    )


def state_space(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, write: torch.Tensor,
    state: torch.Tensor | None, documents: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return kernels().state_space_fwd(  # type: ignore[no-any-return]
        q, k, v, g, write, state, documents=_numbers(v, documents)
    )


def state_space_backward(
    dout: torch.Tensor, dlast: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor,
    write: torch.Tensor, state: torch.Tensor | None, documents: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    return kernels().state_space_bwd(  # type: ignore[no-any-return]
        dout, dlast, q, k, v, g, write, state, documents=_numbers(v, documents)
    )
