"""Products in 8-bit floats: what a run asks for, and which stages compute so.

``--fp8-format`` and ``--fp8-recipe`` say it for the run; ``dtype`` of a stage keeps that stage in the dtype of the
weights. No torch; the operators are in ``ops/gemm_fp8.py``, what plans may ask for in :mod:`.fp8_checks`.
"""

from __future__ import annotations

from dataclasses import dataclass

FORMATS, RECIPES = ("e4m3", "hybrid"), ("tensorwise", "blockwise")
BLOCK = 128  # elements that share a scale


@dataclass(frozen=True)
class Fp8:
    """``format``: ``e4m3``, or ``hybrid`` with gradients in e5m2; ``recipe``: ``tensorwise`` or ``blockwise``."""

    format: str
    recipe: str

    @property
    def operator(self) -> str:
        return f"gemm_fp8_{self.recipe}"

    @property
    def hybrid(self) -> bool:
        return self.format == "hybrid"

    def __str__(self) -> str:
        return f"fp8 ({self.format}, {self.recipe})"
