"""Bytes of frozen weights that are stored in few bits (``ops/int8_weight.py``, ``ops/nf4_weight.py``). No torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetero_megatron.layout import Box
    from hetero_megatron.spec.tensors import LogicalTensor

NF4_BLOCK = 64  # elements that share a largest magnitude
NF4_GROUP = 256  # blocks whose magnitudes share one
NF4_TABLES = 16 + 256  # numbers that bits stand for
NF4_CHUNK = 1 << 21  # elements that are made of 4 bits at once, and what each takes then: indices, and fp32 twice
NF4_MAKING = 9
SCALE_BYTES = 4  # fp32


def nf4_blocks(start: int, stop: int) -> tuple[int, int]:
    """The blocks of a row in which some of its columns are, half-open."""
    return start // NF4_BLOCK, -(-stop // NF4_BLOCK) if stop > start else start // NF4_BLOCK


def stored_bytes(tensor: LogicalTensor, box: Box) -> int:
    """Of a rank's box of a tensor that is stored in few bits, with its scales."""
    if tensor.int8:
        return box.size + SCALE_BYTES * math.prod(box.shape[:-1])
    rows = box.hi[0] - box.lo[0]
    a, b = nf4_blocks(box.lo[1], box.hi[1])
    groups = -(-tensor.size // (NF4_BLOCK * NF4_GROUP))
    return rows * (b - a) * (NF4_BLOCK // 2 + 1) + SCALE_BYTES * (groups + 1 + NF4_TABLES)
