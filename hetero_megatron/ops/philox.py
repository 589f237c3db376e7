"""Philox 4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011).

A block cipher as random generator: 128 bits of output are a function of a key of 64 bits and a counter of 128, so that
any part of a random tensor can be computed anywhere, in any order, without a state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

ROUNDS = 10
WORD = 0xFFFFFFFF
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
LANES = 8  # numbers of 16 bits that a block has
_CHUNK = 1 << 14  # counters that are worked on at once: they stay in the cache


def philox(counter: Sequence[Any], key: tuple[Any, Any], rounds: int = ROUNDS) -> tuple[Any, ...]:
    """Four words of 32 bits from four; integers, or int64 tensors that broadcast (their products may wrap around)."""
    (a, b, c, d), (x, y) = counter, key
    for _ in range(rounds):
        # b and d are only ever xored, and what is above their 32 bits is masked with the result.
        p, q = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = ((q >> 32) ^ b ^ x) & WORD, q, ((p >> 32) ^ d ^ y) & WORD, p
        x, y = (x + WEYL[0]) & WORD, (y + WEYL[1]) & WORD
    return a, b & WORD, c, d & WORD


def words(key: Any) -> tuple[Any, Any]:
    """A key of 64 bits, an integer or int64 tensors, as two words, the low one first."""
    return key & WORD, key >> 32 & WORD


def derived_key(key: int, *counter: int) -> int:
    """The key of 64 bits of one of 2**128 independent streams: four words of 32 bits say which."""
    low, high, _, _ = philox(counter, words(key))
    return int(low | high << 32)


def kept(
    key: int | torch.Tensor, dropped: int, columns: tuple[int, int], rows: Sequence[torch.Tensor | int],
    shape: Sequence[int], device: torch.device | str = "cpu",
) -> torch.Tensor:  # fmt: skip
    """bool [*shape, columns]: which elements stay of those that are dropped with probability ``dropped`` / 2**16.

    An element's random number of 16 bits is a function of the key, its row's three counters and its column's number:
    lane ``column % 8`` of block ``column // 8``, low halves of the words first. It stays if its number is at least
    ``dropped``.

    Args:
        key: an integer, or int64 [].
        columns: their numbers, half-open.
        rows: three counters of 32 bits, integers or int64 tensors that broadcast to ``shape``.
    """
    first, end = columns[0] // LANES, max(-(-columns[1] // LANES), columns[0] // LANES)
    groups = torch.arange(first, end, device=device)
    flat = [x if isinstance(x, int) else x.expand(shape).reshape(-1, 1) for x in rows]
    count = math.prod(shape)
    out = torch.empty(count, end - first, LANES, dtype=torch.bool, device=device)
    step = max(_CHUNK // max(end - first, 1), 1) if out.device.type == "cpu" else max(count, 1)
    for a in range(0, count, step):
        part = [x if isinstance(x, int) else x[a : a + step] for x in flat]
        for i, word in enumerate(philox((groups, *part), words(key))):
            torch.ge(word & 0xFFFF, dropped, out=out[a : a + step, :, 2 * i])
            torch.ge(word, dropped << 16, out=out[a : a + step, :, 2 * i + 1])
    whole = out.view(*shape, (end - first) * LANES)
    return whole[..., columns[0] - first * LANES : columns[1] - first * LANES]
