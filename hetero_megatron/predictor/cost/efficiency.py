"""What a cold start takes of a chip that was not calibrated: what share of a data sheet's peak large matrix products
reach (measured, by kind of chip and dtype; else by class), and where its values are from."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_megatron.cluster import Chip
from hetero_megatron.cluster.catalogue import card_file

_ML = "stas00/ml-engineering, very large products"
_FLAGPERF = "FlagPerf, very large products"
_ZORSE = "Zorse (MLSys'26), decoder layers of hidden size 2,048 to 8,192, PyTorch 2.5.1"


@dataclass(frozen=True)
class ShareOfPeak:
    """``value`` of the dense peak; ``source``: who measured it; empty: assumed."""

    value: float
    source: str = ""


# By the beginning of the chip's name (the longest counts), in 16 bit.
HALF: dict[str, ShareOfPeak] = {
    **{name: ShareOfPeak(value, _ML) for name, value in {
        "A100-80-PCIe": 0.811, "A100-40": 0.831, "A100": 0.869, "A800": 0.869, "H100": 0.803, "H800": 0.803,
        "H200": 0.803, "GH200": 0.838, "B200": 0.776, "MI300X": 0.514, "MI325X": 0.604, "Gaudi2": 0.969,
        "Gaudi3": 0.741,
    }.items()},
    "MetaX": ShareOfPeak(0.828, _FLAGPERF),
    "Iluvatar-BI-V150": ShareOfPeak(1.0, _FLAGPERF),  # the catalogue's value is itself measured
    # Boards of 70 W do not keep their clock. Pascal and RDNA 2 have no matrix units.
    **{name: ShareOfPeak(value, _ZORSE) for name, value in {
        "A10G": 0.84, "A6000": 0.65, "L4": 0.41, "T4": 0.31, "P100": 0.38, "W6800": 0.32,
    }.items()},
    "L40": ShareOfPeak(0.75),  # not an L4
}  # fmt: skip
FULL: dict[str, ShareOfPeak] = {  # in fp32
    **{name: ShareOfPeak(value, _ZORSE) for name, value in {
        "A10G": 0.58, "A6000": 0.49, "L4": 0.34, "T4": 0.49, "P100": 0.81,
    }.items()},
    # Ampere's and Ada's peak counts units that also do integers: the mean of A10G and A6000.
    **{name: ShareOfPeak(value) for name, value in {"A100": 0.869, "A100-40": 0.831, "A100-80-PCIe": 0.811}.items()},
    **{name: ShareOfPeak(0.54) for name in ("A10", "A40", "RTX30", "RTX40", "L40", "RTX-A", "RTX6000")},
}  # fmt: skip
OTHER = ShareOfPeak(0.75)  # the lower end of what was measured in 16 bit on boards that keep their clock, but MI3xx


def share_of_peak(chip: str, dtype: str) -> ShareOfPeak:
    """Of a chip, by its name; fp32 as 16 bit where nobody measured it, fp64 and fp8 as that: assumed."""
    tables = (FULL, HALF) if dtype == "fp32" else (HALF,)
    for table in tables:
        if names := [name for name in table if chip.startswith(name)]:
            share = table[max(names, key=len)]
            return share if table is FULL or dtype in ("bf16", "fp16") else ShareOfPeak(share.value)
    return OTHER


def source_of(chip: Chip, dtype: str) -> str:
    """Where the values are from that a cold start takes."""
    if chip.speed is not None:
        return "emulated: a usual core is assumed"
    measurers = _measured_by(chip, dtype)
    rates_by_measurer: dict[str, list[str]] = {}
    for rate, measurer in measurers.items():
        rates_by_measurer.setdefault(measurer, []).append(rate)
    measured = [f"{', '.join(rates)} measured by {measurer}" for measurer, rates in rates_by_measurer.items()]
    return "; ".join([*measured, f"else {chip.source}" if measured else chip.source])


def _measured_by(chip: Chip, section: str) -> dict[str, str]:
    """By rate, who measured it on such a card, and when."""
    if card_file(chip.name) is None:
        return {}
    from hetero_megatron.cluster.card_entries import measurements

    return {rate: measurement.told for rate, measurement in measurements(chip, section).items()}
