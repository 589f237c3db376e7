"""The options of the operator attention, in the order in which kernels are given them, and which key each query sees
under them.

The model (``model/layers.py``) fills them in; providers (``ops/attention_cpu.py``, plugins) and the definition
(``ops/attention_op.py``) read them; tiles of distributed attention use the mask (``ops/tile_kernels.py``). A named
tuple, because kernels of plugins are given plain positional arguments: ``kernel(q, k, v, sinks, *options)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hetero_megatron.ops.dropout import ScoreDropout

Documents = Sequence[Sequence[int]] | None  # per batch row, ascending start offsets, the first is 0


class AttentionOptions(NamedTuple):
    """Causal attention of a part of the queries to a part of the keys: query i of a part that begins at ``q_start``
    sees key j where k_start + j <= q_start + i.

    Attributes:
        documents: start offsets per row (only for q_start = k_start = 0 and s = t): tokens see their own document.
        window: a token sees itself and ``window - 1`` tokens before it; None: all.
        softcap: scores, already scaled, become softcap x tanh(score / softcap).
        dropout: probabilities that are dropped become 0 after the softmax, the others are divided by 1 - rate; which,
            see ``ops/dropout.py``. The log-sum-exp and a sink's probability know nothing of it.
    """

    documents: Documents = None
    window: int | None = None
    q_start: int = 0
    k_start: int = 0
    softcap: float | None = None
    dropout: ScoreDropout | None = None

    @property
    def distance(self) -> int:
        """From the first key to the first query, in tokens."""
        return self.q_start - self.k_start


def visible_keys(
    start: int, stop: int, keys: int, distance: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[stop - start, keys] bool: key j is seen by query i of ``[start, stop)`` where 0 <= distance + i - j < window."""
    rows = torch.arange(start, stop, device=device)[:, None] + distance
    key_distance = rows - torch.arange(keys, device=device)[None]
    return key_distance >= 0 if window is None else (key_distance >= 0) & (key_distance < window)


def visible(q: torch.Tensor, keys: int, options: AttentionOptions) -> torch.Tensor:
    """[b or 1, s, keys] bool: which key each query of ``q`` [b, s, heads, d] sees."""
    rows, length = q.shape[0], q.shape[1]
    visible_mask = visible_keys(0, length, keys, options.distance, options.window, q.device)[None]
    if options.documents is None:
        return visible_mask
    number = torch.zeros(rows, length, dtype=torch.int64, device=q.device)  # of each token's document
    for row, starts in enumerate(options.documents):
        for start in starts[1:]:
            number[row, start:] += 1
    return visible_mask & (number[:, :, None] == number[:, None, :])
