"""What Muon does to matrices: rates of ``--optimizer muon``. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# a, b, c of X <- a X + b (X X') X + c (X X')^2 X, step after step, again and again.
COEFFICIENTS = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}  # fmt: skip
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


@dataclass(frozen=True)
class MuonRates:
    """What Muon does to matrices.

    Attributes:
        nesterov: the update looks ahead by one step of momentum.
        steps, coefficients: of Newton-Schulz (``COEFFICIENTS``).
        scale_mode: of ``SCALES``, by which an update is multiplied; extra_scale: so is it by this.
    """

    momentum: float = 0.95
    nesterov: bool = False
    steps: int = 5
    coefficients: str = "quintic"
    scale_mode: str = "spectral"
    extra_scale: float = 0.2

    def scale(self, rows: int, columns: int) -> float:
        return self.extra_scale * SCALES[self.scale_mode](rows, columns)

    def each_step(self) -> list[tuple[float, float, float]]:
        """The coefficients of every Newton-Schulz step."""
        coefficients = COEFFICIENTS[self.coefficients]
        return [coefficients[step % len(coefficients)] for step in range(self.steps)]
