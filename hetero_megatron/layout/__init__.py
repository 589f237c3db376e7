"""Boxes, layouts and how data moves between them: pure Python and NumPy, no communication.

Everything in the project that moves between ranks is a box (a half-open n-D interval) of a logical index
space; everything that knows about uneven shapes lives here.
"""

from hetero_megatron.layout.box import Box, cut, cut_in_groups, cut_in_tiles, largest_remainder, tiles
from hetero_megatron.layout.layout import Cell, Layout, Piece, Transfer, reduction, refine, transfer
from hetero_megatron.layout.owners import assign_owners, crossing_elements, representatives

__all__ = [
    "Box",
    "Cell",
    "Layout",
    "Piece",
    "Transfer",
    "assign_owners",
    "crossing_elements",
    "cut",
    "cut_in_groups",
    "cut_in_tiles",
    "largest_remainder",
    "reduction",
    "refine",
    "representatives",
    "tiles",
    "transfer",
]
