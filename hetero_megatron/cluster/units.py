"""Quantities with units: ``80 GiB``, ``25 GB/s``, ``5 us``, ``312 TFLOP/s``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hetero_megatron.utils.text import format_bytes, format_rate

if TYPE_CHECKING:
    from hetero_megatron.utils.yaml_document import Entry

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = {prefix + "B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_BITS = {prefix + unit: factor / 8 for prefix, factor in _DECIMAL.items() for unit in ("bit", "b")}

__all__ = ["EXAMPLES", "UNITS", "format_bytes", "format_rate", "quantity"]

UNITS: dict[str, dict[str, float]] = {
    "bytes": {**_BYTES},
    "bytes/s": {f"{unit}/s": factor for unit, factor in _BYTES.items()}
    | {f"{unit}/s": factor for unit, factor in _BITS.items()}
    | {f"{prefix}bps": factor / 8 for prefix, factor in _DECIMAL.items()},
    "seconds": {"s": 1, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "flop/s": {f"{p}{unit}": f for p, f in _DECIMAL.items() for unit in ("FLOP/s", "FLOPS", "FLOPs")},
}
# Base units, both ends included: far beyond any hardware, and far from where arithmetic in fp64 overflows.
RANGES = {"bytes": (1.0, 1e18), "bytes/s": (1.0, 1e18), "seconds": (0.0, 1e6), "flop/s": (1.0, 1e24)}
EXAMPLES = {
    "bytes": "80 GiB or 512 MB",
    "bytes/s": "25 GB/s, 50 MB/s or 100 Gbit/s",
    "seconds": "5 us or 0.1 ms",
    "flop/s": "312 TFLOP/s",
}


def quantity(entry: Entry, kind: str) -> float:
    """The value in base units of ``kind`` (bytes, bytes/s, seconds, flop/s).

    Raises:
        UserError: no unit, an unknown one, not a number, or not in ``RANGES``.
    """
    accepted = EXAMPLES[kind]
    value = entry.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        entry.fail("a unit is missing", accepted)
    if not isinstance(value, str) or len(value) > 60:
        entry.fail("a quantity with its unit was expected", accepted)
    match = re.fullmatch(r"\s*([-+]?[0-9.]+(?:[eE][-+]?\d+)?)\s*([^\d\s].*?)?\s*", value)
    if not match:
        entry.fail("a quantity with its unit was expected", accepted)
    try:
        number = float(match[1])
    except ValueError:
        entry.fail(f"{match[1]!r} is not a number", accepted)
    unit = match[2]
    if unit is None:
        entry.fail("a unit is missing", accepted)
    factor = UNITS[kind].get(unit)
    if factor is None:
        entry.fail(f"{unit!r} is not a unit of {kind}", accepted)
    result = number * factor
    least, most = RANGES[kind]
    if not least <= result <= most:
        entry.fail("out of range", f"a positive quantity such as {accepted}")
    return result
