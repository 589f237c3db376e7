"""What all measurements have in common: a call that warms up, the median of several, their spread, and a robust fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
from scipy.optimize import least_squares

LEAST = 1e-9  # seconds of what took none, as far as was seen: the rates refuse 0
NORMAL = 1.4826  # standard deviation of normal values over the median of their absolute deviations
OUTLIER = 0.02  # relative residual beyond which a measurement pulls with its distance, not with its square


def relative_spread(values: Sequence[float]) -> float:
    """Standard deviation over the median, by the median of absolute deviations: single outliers do not count."""
    middle = median(values)
    return NORMAL * median(abs(v - middle) for v in values) / middle if middle > 0 else 0.0


def repeated(call: Callable[[], Sequence[float]], count: int) -> list[tuple[float, float]]:
    """(median, relative spread) of each of the seconds that ``call`` returns: of ``count`` calls, after a warm-up."""
    call()
    columns = zip(*(call() for _ in range(count)), strict=True)
    return [(median(column), relative_spread(column)) for column in columns]


def robust_fit(
    rows: Sequence[Sequence[float]], seconds: Sequence[float], relative: bool = True
) -> tuple[list[float], float]:
    """(``x >= 0`` for which ``rows @ x`` is nearest to ``seconds``; standard deviation of the relative residuals, by
    their median). Huber's loss: measurements during which the machine did other things move little. They count alike
    (``relative``), or as they last. Unknowns that no combination of rows tells apart share what they explain."""
    measured = np.asarray(seconds, float)
    floored = np.maximum(measured, max(1e-6 * measured.max(), 1e-12))
    weights = 1 / (floored if relative else np.full_like(floored, floored.max()))
    weighted = np.asarray(rows, float) * weights[:, None]
    scale = np.maximum(weighted.max(axis=0), 1e-300)
    start, *_ = np.linalg.lstsq(weighted / scale, measured * weights, rcond=1e-9)
    solution = least_squares(
        lambda x: weighted / scale @ x - measured * weights, np.maximum(start, 1e-9), lambda _: weighted / scale,
        bounds=(0, np.inf), loss="huber", f_scale=OUTLIER, xtol=1e-12, ftol=1e-12, gtol=1e-12,
    )  # fmt: skip
    return (solution.x / scale).tolist(), NORMAL * float(np.median(np.abs(solution.fun) / weights / floored))
