"""Attention of some tokens to some others, tile by tile: the pieces that distributed attention is made of.

A kernel computes one tile, of which it knows only the shapes and whether it is full, causal or banded
(``layout/mask.py``); what the tiles give is accumulated here in at least fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hetero_megatron.layout.mask import BAND, Interval, Tile
from hetero_megatron.ops.dropout import ScoreDropout


def attn_merge_(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> tuple[()]:
    """Softmax over the union of two disjoint sets of keys, from the results over each, in place of ``out`` and ``lse``,
    which have at least fp32. out, other: [b, s, heads, d]; lse, other_lse: [b, heads, s]; -inf where a row saw no key.

    The weight of the new part is sigmoid(other_lse - lse), so no large exponent is ever formed. A row with
    ``other_lse`` -inf changes nothing; its ``other`` must be finite.
    """
    share = torch.sigmoid(other_lse - lse).masked_fill_(other_lse == -math.inf, 0.0)  # -inf - (-inf) is no number
    torch.logaddexp(lse, other_lse, out=lse)
    out.lerp_(other.to(out.dtype), share.transpose(1, 2)[..., None])
    return ()


RowTile = tuple[int | None, Tile]  # (batch row or None for all rows, tile)


class TileKernel(Protocol):
    """Attention of one tile. q [b, sq, heads, d]; k, v [b, sk, kv_heads, d], heads a multiple of kv_heads.

    Query i sees key j where 0 <= distance + i - j < window. ``forward`` returns out like q and lse [b, heads, sq]
    in at least fp32, natural logarithm; a row without keys has out 0 and lse -inf. ``backward`` takes the *whole*
    row's out and lse and returns this tile's share of (dq, dk, dv). ``delta`` is what backward can use of grad and out
    for all tiles of a query, [b, heads, sq], or None; where it is not given, backward finds it itself. ``dropout``: of
    the tile's probabilities.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, distance: int, window: int | None,
        dropout: ScoreDropout | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip

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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...

    def delta(self, grad: torch.Tensor, out: torch.Tensor) -> torch.Tensor | None: ...


class KeyHeads(NamedTuple):
    """How query heads find their key-value heads: ``repeat`` neighbours share one, or ``lookup`` names each one's."""

    repeat: int
    lookup: tuple[int, ...] | None = None


def key_heads(queries: Sequence[int]) -> KeyHeads:
    """From the local key-value head of every local query head."""
    count = max(queries, default=-1) + 1
    repeat = len(queries) // count if count else 1
    repeats_evenly = list(queries) == [i // repeat for i in range(len(queries))] and len(queries) == repeat * count
    return KeyHeads(repeat) if repeats_evenly else KeyHeads(1, tuple(queries))


def accumulators(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of rows that have seen no key yet: zeros like q, and -inf [b, heads, s], in at least fp32."""
    wide_dtype = torch.promote_types(q.dtype, torch.float32)
    b, s, heads, _ = q.shape
    return q.new_zeros(q.shape, dtype=wide_dtype), q.new_full((b, heads, s), -math.inf, dtype=wide_dtype)


class BlockAttention:
    """Attention of one rank's query heads to blocks of keys that come one after the other.

    Args:
        heads: how the query heads find their key-value heads in a block.
        window: a token sees itself and ``window - 1`` tokens before it; None: all.
        merge: the operator ``attn_merge``, in place.
        tokens: of the queries; what dropout needs, whose tiles are of tokens that follow each other.
    """

    def __init__(
        self, kernel: TileKernel, heads: KeyHeads, window: int | None = None, merge: Callable[..., Any] = attn_merge_,
        tokens: Sequence[Interval] = (),
    ) -> None:  # fmt: skip
        self.kernel, self.heads, self.window, self.merge, self.tokens = kernel, heads, window, merge, tokens
        self._lookup: torch.Tensor | None = None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tiles: Iterable[RowTile],
        out: torch.Tensor,
        lse: torch.Tensor,
        dropout: ScoreDropout | None = None,
    ) -> None:
        """Let the queries see the keys of ``tiles`` too: updates ``out`` and ``lse`` (see :func:`accumulators`).

        ``dropout``: of the first row and query head; its tokens do not count.
        """
        if q.numel() == 0 or k.numel() == 0:
            return
        for row, tile in tiles:
            rows, queries, keys = _slices(row, tile)
            part, part_lse = self.kernel.forward(
                q[rows, queries],
                self._spread(k[rows, keys]),
                self._spread(v[rows, keys]),
                tile.distance,
                self.window if tile.kind == BAND else None,
                self._dropout(dropout, row, tile),
            )
            self.merge(out[rows, queries], lse[rows, :, queries], part, part_lse)

    def backward(
        self,
        grad: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tiles: Iterable[RowTile],
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        delta: torch.Tensor | None = None,
        dropout: ScoreDropout | None = None,
    ) -> None:
        """Add what ``tiles`` contribute to (dq, dk, dv), which have at least fp32; out and lse are of all keys, and so
        is ``delta``, the kernel's of grad and out, which is worth making once where blocks come one by one."""
        if q.numel() == 0 or k.numel() == 0:
            return
        dq, dk, dv = grads
        for row, tile in tiles:
            rows, queries, keys = _slices(row, tile)
            parts = self.kernel.backward(
                grad[rows, queries],
                q[rows, queries],
                self._spread(k[rows, keys]),
                self._spread(v[rows, keys]),
                out[rows, queries],
                lse[rows, :, queries],
                tile.distance,
                self.window if tile.kind == BAND else None,
                None if delta is None else delta[rows, :, queries],
                self._dropout(dropout, row, tile),
            )
            dq[rows, queries] += parts[0]
            self._collect(dk[rows, keys], parts[1])
            self._collect(dv[rows, keys], parts[2])

    def _dropout(self, dropout: ScoreDropout | None, row: int | None, tile: Tile) -> ScoreDropout | None:
        """Of one tile."""
        if dropout is None:
            return None
        place, first = tile.q0, None
        for a, b in self.tokens:
            if place < b - a:
                first = a + place
                assert tile.q1 - tile.q0 <= b - first, "a tile whose tokens do not follow each other"
                break
            place -= b - a
        assert first is not None, f"{tile} beyond the tokens {self.tokens}"
        sample = dropout.sample + (row or 0)
        return dropout._replace(sample=sample, q_start=first, k_start=first - tile.distance)

    def _index(self, device: torch.device) -> torch.Tensor | None:
        """``heads.lookup`` on the device, where it stays: a list would be uploaded at every use."""
        if self._lookup is None and self.heads.lookup is not None:
            self._lookup = torch.tensor(self.heads.lookup, device=device)
        return self._lookup

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, kv_heads, d] -> the same, or one copy per query head where they do not share evenly."""
        index = self._index(x.device)
        return x if index is None else x.index_select(2, index)

    def _collect(self, total: torch.Tensor, part: torch.Tensor) -> None:
        """Adjoint of :meth:`_spread`, added to ``total``."""
        index = self._index(part.device)
        if index is None:
            total += part
        else:
            total.index_add_(2, index, part.to(total.dtype))


def _slices(row: int | None, tile: Tile) -> tuple[slice, slice, slice]:
    rows = slice(None) if row is None else slice(row, row + 1)
    return rows, slice(tile.q0, tile.q1), slice(tile.k0, tile.k1)
