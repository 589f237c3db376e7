"""Attention with a key-value cache, and linear attention with its state, applied to a plain model stage from
outside."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hetero_megatron.model.gated_delta_net import DeltaCore
from hetero_megatron.model.gpt import GPTStage
from hetero_megatron.model.layers import Context, CoreAttention
from hetero_megatron.ops import softcap


@dataclass
class Rows:
    """Where the rows of a batch are; all layers of a stage share it.

    Attributes:
        length: tokens that the cache has room for.
        filled: int64 [b], tokens of each row in the cache, those of the current call included.
        even: how many there are, where all rows have equally many; None: they differ.
        first: the current call is the first one, of whole prompts; later ones have one token per row.
    """

    length: int
    filled: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    even: int | None = None
    first: bool = True

    def begin(self, lengths: torch.Tensor) -> None:
        """Prompts of these lengths come, padded at their end."""
        self.first, self.filled = True, lengths
        self._level()

    def advance(self) -> None:
        """One more token of every row comes."""
        self.first, self.filled = False, self.filled + 1
        self._level()

    def _level(self) -> None:
        low, high = (int(bound) for bound in torch.aminmax(self.filled))
        self.even = low if low == high else None


class CachedAttention(nn.Module):
    """Keeps keys and values of one layer, [b, kv heads, length, head_dim]."""

    def __init__(self, inner: CoreAttention, rows: Rows) -> None:
        super().__init__()
        self.inner, self.rows = inner, rows
        self.keys = self.values = torch.empty(0)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """q [b, t, heads, d], k and v [b, t, kv heads, d] of the current tokens, sinks [heads] -> [b, t, heads, d]."""
        rows, count = self.rows, k.shape[1]
        if rows.first:
            shape = (k.shape[0], k.shape[2], rows.length, k.shape[3])
            self.keys, self.values = k.new_zeros(shape), v.new_zeros(shape)
            self.keys[:, :, :count], self.values[:, :, :count] = k.transpose(1, 2), v.transpose(1, 2)
            return self.inner(q, k, v, sinks, context)  # type: ignore[no-any-return]
        if rows.even is not None:
            self.keys[:, :, rows.even - 1], self.values[:, :, rows.even - 1] = k[:, 0], v[:, 0]
        else:
            row_indices = torch.arange(len(rows.filled), device=k.device)
            self.keys[row_indices, :, rows.filled - 1], self.values[row_indices, :, rows.filled - 1] = k[:, 0], v[:, 0]
        return self._attend(q, sinks)

    def _attend(self, q: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
        """One query per row and head over what its row has in the cache."""
        b, _, heads, d = q.shape
        if not heads:  # an empty share of a tensor-parallel rank
            return q
        rows, kv = self.rows, self.keys.shape[1]
        end = rows.even if rows.even is not None else int(rows.filled.max())
        keys, values = self.keys[:, :, :end], self.values[:, :, :end]
        grouped, visible = q.view(b, kv, heads // kv, d), self._seen(end)
        if self.inner.softcap is None and sinks is None:
            out = F.scaled_dot_product_attention(grouped, keys, values, visible)
            return out.reshape(b, 1, heads, d)
        scores = (grouped / math.sqrt(d)) @ keys.transpose(-1, -2)  # [b, kv, group, end]
        if self.inner.softcap is not None:
            scores = softcap(scores, self.inner.softcap)
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        wide_dtype = torch.promote_types(q.dtype, torch.float32)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(1, kv, -1, 1).expand(b, -1, -1, 1).to(scores.dtype)], dim=-1)
        weights = torch.softmax(scores, -1, dtype=wide_dtype)[..., :end].to(q.dtype)
        return (weights @ values).reshape(b, 1, heads, d)

    def _seen(self, end: int) -> torch.Tensor | None:
        """bool [b, 1, 1, end], which of the cached tokens a row's query sees; None: all."""
        rows, window, chunk = self.rows, self.inner.window, self.inner.chunk
        if rows.even is not None and end <= min(window or end, chunk or end):
            return None
        place = torch.arange(end, device=rows.filled.device)
        visible = place < rows.filled[:, None]
        if window is not None:
            visible &= place >= rows.filled[:, None] - window
        if chunk is not None:
            visible &= place >= (rows.filled[:, None] - 1) // chunk * chunk
        return visible[:, None, None]


class CachedDelta(nn.Module):
    """Keeps the state of a layer's linear attention, [b, value heads, dk, dv], and what its convolutions look back at:
    of queries, keys and values the last taps - 1 tokens."""

    def __init__(self, inner: DeltaCore, rows: Rows) -> None:
        super().__init__()
        self.inner, self.rows = inner, rows
        self.state = torch.empty(0)
        self.before: list[torch.Tensor] = []

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor | None, a: torch.Tensor,
        weights: tuple[torch.Tensor, ...], context: Context,
    ) -> torch.Tensor:  # fmt: skip
        """As :class:`~hetero_megatron.model.gated_delta_net.DeltaCore` of the current tokens."""
        count, past, rows = q.shape[1], self.inner.delta.kernel - 1, self.rows
        decay, write = self.inner.steps(b, a, weights)
        if rows.first:
            self.before = [x.new_zeros(len(x), past, x.shape[-1]) for x in (q, k, v)]
            if rows.even != count:  # what a row was filled up with neither decays its state nor is written to it
                real = (torch.arange(count, device=q.device) < rows.filled[:, None])[..., None]
                decay, write = decay * (real[..., None] if decay.dim() == 4 else real), write * real
        joined = [torch.cat(pair, 1) for pair in zip(self.before, (q, k, v), strict=True)]
        q, k, v = (x[:, past:] for x in self.inner.convolved(joined, weights, None))
        ends = rows.filled if rows.first else torch.ones_like(rows.filled)
        tail = ends[:, None] + torch.arange(past, device=q.device)  # the last tokens of each row, of what was joined
        self.before = [x.gather(1, tail[..., None].expand(-1, -1, x.shape[-1])) for x in joined]
        state = None if rows.first else self.state
        out, self.state = self.inner.rule(q, k, v, decay, write, state, context.documents)
        return self.inner.added(out, v, weights)


def apply_cache(stage: GPTStage, rows: Rows) -> None:
    """Give every layer of ``stage`` a cache."""
    for layer in (layer for layer in stage.layers() if layer.mixer is not None):
        mixer: Any = layer.mixer
        cached = CachedDelta if layer.kind.linear else CachedAttention
        mixer.core_attention = cached(mixer.core_attention, rows)


def drop_cache(stage: GPTStage) -> None:
    """Give up what the layers keep, until other prompts come."""
    for mixer in (layer.mixer for layer in stage.layers() if layer.mixer is not None):
        kept: Any = mixer.core_attention
        if isinstance(kept, CachedAttention):
            kept.keys = kept.values = torch.empty(0)
        else:
            kept.state, kept.before = torch.empty(0), []
