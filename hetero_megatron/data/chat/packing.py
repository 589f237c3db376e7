"""Which conversations share a sample: best-fit decreasing, as in "Fewer Truncations Improve Language Modeling" (2024).

A conversation is never cut in two. The number of packs depends on the lengths only, so every epoch has the same.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from hetero_megatron.data.sample import Sample


def best_fit(lengths: Sequence[int] | np.ndarray, capacity: int, order: np.ndarray) -> list[list[int]]:
    """Packs of items (by index) whose lengths add up to at most ``capacity``.

    Args:
        lengths: 1 to ``capacity`` each.
        order: a permutation of the items, which breaks ties; packs hold items in the order of their coming.
    """
    lengths = np.asarray(lengths, np.int64)
    decreasing = order[np.argsort(-lengths[order], kind="stable")]
    packs: list[list[int]] = []
    open_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # ascending, those that some pack has
    for item in decreasing.tolist():
        length = int(lengths[item])
        space_index = bisect.bisect_left(spaces, length)
        if space_index == len(spaces):
            pack, space = len(packs), capacity
            packs.append([])
        else:
            space = spaces[space_index]
            pack = open_by_space[space].pop()
            if not open_by_space[space]:
                del open_by_space[space]
                spaces.pop(space_index)
        packs[pack].append(item)
        if space_left := space - length:
            if space_left not in open_by_space:
                bisect.insort(spaces, space_left)
            open_by_space.setdefault(space_left, []).append(pack)
    return packs


def packed_sample(parts: Sequence[tuple[np.ndarray, np.ndarray]], seq_length: int, pad: int) -> Sample:
    """Conversations (ids, counts) one after another, each a document; what is left is padding, a document as well.

    A position counts where the *next* token does and belongs to the same conversation.
    """
    tokens = np.full(seq_length + 1, pad, np.int64)
    mask = np.zeros(seq_length, bool)
    starts, offset = [], 0
    for ids, counts in parts:
        starts.append(offset)
        tokens[offset : offset + len(ids)] = ids
        mask[offset : offset + len(ids) - 1] = counts[1:]
        offset += len(ids)
    assert offset <= seq_length
    if offset < seq_length:
        starts.append(offset)
    return Sample(tokens, np.array(starts, np.int32), mask)
