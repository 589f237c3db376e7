"""Which boxes of the trained weights go from the ranks of one plan to those of another one. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hetero_megatron.layout import Piece, transfer
from hetero_megatron.plans.compile import CompiledPlan
from hetero_megatron.spec import trained_tensors


def weight_moves(source: CompiledPlan, target: CompiledPlan) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    """By logical name, in an order that is equal on all ranks. Among replicas the one sends that has sent least.

    Args:
        source, target: of the same model, on other ranks. Adapters' base does not move: it never changes.
    """
    sent = Counter[int]()
    for tensor in trained_tensors(source.spec):
        held, wanted = (compiled.holders[tensor.name] for compiled in (source, target))
        pieces = transfer(held, wanted, lambda holder, _: float(sent[holder])).pieces
        for piece in pieces:
            sent[piece.src] += piece.box.size
        yield tensor.name, pieces
