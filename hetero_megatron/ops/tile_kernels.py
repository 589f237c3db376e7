"""Kernels for one tile of attention (:class:`~hetero_megatron.ops.block_attention.TileKernel`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from hetero_megatron.errors import UserError
from hetero_megatron.ops.attention_op import AttentionOptions, attn_delta, backward_sums, definition, visible_keys
from hetero_megatron.ops.block_attention import TileKernel
from hetero_megatron.ops.dropout import ScoreDropout
from hetero_megatron.ops.spec import ATEN, REFERENCE, Kernel, wide

SCORES = 1 << 24  # scores that the reference kernel materialises at once

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class FlashCpuKernel:
    """aten's flash attention for the CPU; 16-bit key-value heads are copied per query head (``ops/attention_cpu.py``).
    It knows no dropout of ours: those calls are the reference's."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, distance: int, window: int | None,
        dropout: ScoreDropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        if dropout is not None:
            return ReferenceKernel().forward(q, k, v, distance, window, dropout)
        repeat, (causal, mask) = _copies(q, k), _kind(q, k, distance, window)
        out, lse = _flash(
            q.transpose(1, 2), _repeat(k, repeat), _repeat(v, repeat), 0.0, causal, attn_mask=_bias(mask, q)
        )
        out = out.transpose(1, 2)
        if mask is not None:  # aten gives rows without keys lse 0, not -inf
            dead = ~mask.any(1)
            lse = lse.masked_fill(dead, -math.inf)
            out = out.masked_fill(dead[:, None, None], 0.0)
        return out, lse

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        distance: int,
        window: int | None,
        delta: torch.Tensor | None = None,
        dropout: ScoreDropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if dropout is not None:
            return ReferenceKernel().backward(grad, q, k, v, out, lse, distance, window, delta, dropout)
        repeat, (causal, mask) = _copies(q, k), _kind(q, k, distance, window)
        if mask is not None:  # a row that sees nothing at all: exp(-inf - 0) is 0, exp(-inf + inf) no number
            lse = lse.masked_fill(lse == -math.inf, 0.0)
        dq, dk, dv = _flash_backward(
            grad.transpose(1, 2), q.transpose(1, 2), _repeat(k, repeat), _repeat(v, repeat), out.transpose(1, 2),
            lse.contiguous(), 0.0, causal, attn_mask=_bias(mask, q),
        )  # fmt: skip
        return dq.transpose(1, 2), _sum_copies(dk, repeat), _sum_copies(dv, repeat)

    def delta(self, grad: torch.Tensor, out: torch.Tensor) -> None:
        """aten's backward makes its own."""


def _kind(q: torch.Tensor, k: torch.Tensor, distance: int, window: int | None) -> tuple[bool, torch.Tensor | None]:
    """(causal square, mask [sq, sk]): (False, None) where every query sees every key."""
    rows, columns = q.shape[1], k.shape[1]
    if window is None or distance + rows - 1 < window:
        if distance >= columns - 1:
            return False, None
        if distance == 0 and rows == columns:
            return True, None
    return False, visible_keys(0, rows, columns, distance, window, q.device)


def _copies(q: torch.Tensor, k: torch.Tensor) -> int:
    sixteen = q.dtype in (torch.float16, torch.bfloat16)
    return q.shape[2] // k.shape[2] if sixteen else 1


def _repeat(x: torch.Tensor, repeat: int) -> torch.Tensor:
    """[b, s, kv_heads, d] -> [b, kv_heads * repeat, s, d]."""
    return (x.repeat_interleave(repeat, dim=2) if repeat > 1 else x).transpose(1, 2)


def _sum_copies(x: torch.Tensor, repeat: int) -> torch.Tensor:
    """[b, kv_heads * repeat, s, d] -> [b, s, kv_heads, d], copies added in fp32."""
    x = x.transpose(1, 2)
    return x.unflatten(2, (-1, repeat)).sum(3, dtype=torch.float32) if repeat > 1 else x


def _bias(mask: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, -math.inf)


class ReferenceKernel:
    """The definition, on any device; works through the queries in runs, so that scores stay few.

    Args:
        softcap: scores become softcap x tanh(score / softcap).
    """

    def __init__(self, softcap: float | None = None) -> None:
        self.softcap = softcap

    def _options(self, start: int, distance: int, window: int | None, dropout: ScoreDropout | None) -> AttentionOptions:
        """Of the queries from ``start`` on."""
        part_dropout = None if dropout is None else dropout.of(0, start, 0)
        return AttentionOptions(None, window, distance + start, 0, self.softcap, part_dropout)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, distance: int, window: int | None,
        dropout: ScoreDropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        options = [(slice(a, b), self._options(a, distance, window, dropout)) for a, b in _runs(q, k)]
        parts = [definition(q[:, run], k, v, None, *run_options) for run, run_options in options]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts], 2)

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, distance: int, window: int | None, delta: torch.Tensor | None = None,
        dropout: ScoreDropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
        delta = self.delta(grad, out) if delta is None else delta
        dq, dk, dv = [], torch.zeros_like(k, dtype=wide(k.dtype)), torch.zeros_like(v, dtype=wide(v.dtype))
        for a, b in _runs(q, k):
            options = self._options(a, distance, window, dropout)
            part = backward_sums(grad[:, a:b], q[:, a:b], k, v, lse[:, :, a:b], delta[:, :, a:b], options)
            dq.append(part[0])
            dk += part[1]
            dv += part[2]
        return torch.cat(dq, 1), dk, dv

    def delta(self, grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return attn_delta(grad, out)[0]


def _runs(q: torch.Tensor, k: torch.Tensor) -> list[tuple[int, int]]:
    rows = max(SCORES // max(q.shape[0] * q.shape[2] * k.shape[1], 1), 1)
    return [(a, min(a + rows, q.shape[1])) for a in range(0, q.shape[1], rows)]


class OperatorKernel:
    """The attention operator of a kernel plan as a tile kernel, without sinks: they are merged when all keys were seen.

    Args:
        parts: the kernel may have ``share(grad, q, k, v, out, lse, delta, window, q_start, k_start, softcap,
            dropout)``, a backward whose gradients are in at least fp32, because they are added up, and
            ``delta(grad, out)`` for it.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        parts: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
        softcap: float | None = None,
    ) -> None:
        self._forward, self._backward, self._parts, self._softcap = forward, backward, parts, softcap

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, distance: int, window: int | None,
        dropout: ScoreDropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        starts = (max(distance, 0), max(-distance, 0))
        return self._forward(  # type: ignore[no-any-return]
            q, k, v, None, None, window, *starts, self._softcap, dropout
        )

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        distance: int,
        window: int | None,
        delta: torch.Tensor | None = None,
        dropout: ScoreDropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        starts = (max(distance, 0), max(-distance, 0))
        if "share" in self._parts:
            return self._parts["share"](  # type: ignore[no-any-return]
                grad, q, k, v, out, lse, delta, window, *starts, self._softcap, dropout
            )
        gradients = self._backward(grad, q, k, v, None, out, lse, None, window, *starts, self._softcap, dropout)
        return gradients[:3]  # type: ignore[no-any-return]

    def delta(self, grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None:
        return self._parts["delta"](grad, out) if "delta" in self._parts else None


def tile_kernel(device: torch.device, chosen: Kernel | None = None, softcap: float | None = None) -> TileKernel:
    """The tile kernel that goes with a stage's choice for the operator ``attention``.

    Args:
        softcap: scores become softcap x tanh(score / softcap).
        chosen: None, torch's own or the reference: aten's flash kernel on the CPU, the reference elsewhere.

    Raises:
        UserError: the chosen kernel's backward takes only what its own forward saved, not a merged result.
    """
    if chosen is None or chosen.kind in (ATEN, REFERENCE):
        return FlashCpuKernel() if device.type == "cpu" and softcap is None else ReferenceKernel(softcap)
    if chosen.private or chosen.backward is None:
        raise UserError(
            f"{chosen} keeps state of its own between forward and backward, so parts cannot be merged",
            field="kernels.attention", value=chosen.provider, accepted="another provider beside context groups",
        )  # fmt: skip
    return OperatorKernel(chosen.forward, chosen.backward, chosen.parts, softcap)
