"""Chips that are known by name, with data-sheet values: dense TFLOP/s per dtype, memory, bandwidths.

These are cold-start defaults only; calibration replaces them. ``source`` says where the values are
from: ``mlcommons`` and ``vendor`` are published data sheets, ``measured`` is a published measurement,
``recalled`` is not confirmed by a document and should be overridden in the cluster file when it matters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2**30
DTYPES = ("fp64", "fp32", "bf16", "fp16")
_MODERN = ("fp32", "bf16", "fp16")
_NO_BF16 = ("fp32", "fp16")


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Args:
        memory: bytes.
        flops: dense FLOP/s by dtype; may lack dtypes, or be empty when nothing is known.
        memory_bandwidth: bytes/s; None when unknown.
        link_bandwidth: bytes/s in one direction to a chip of the same node; None when unknown.
        host_bandwidth: bytes/s in one direction to its host's memory; None when unknown.
        dtypes: dtypes it computes in.
        source: where the values are from.
        speed: emulated speed, 1.0 = one core of this machine; None: not emulated.
        memory_budget: bytes that an emulated chip may use; None: ``memory``.
        rates: measured rates, as calibration wrote them.
        cost_per_hour: in any currency, the same for all chips; None when unknown.
    """

    name: str
    memory: int
    flops: Mapping[str, float] = field(default_factory=dict)
    memory_bandwidth: float | None = None
    link_bandwidth: float | None = None
    host_bandwidth: float | None = None
    dtypes: tuple[str, ...] = DTYPES
    source: str = ""
    speed: float | None = None
    memory_budget: int | None = None
    rates: Mapping[str, object] = field(default_factory=dict)
    cost_per_hour: float | None = None


def _chip(
    name: str,
    half: float,
    gib: float,
    tb_s: float,
    link: float,
    source: str,
    dtypes: tuple[str, ...] = _MODERN,
) -> Chip:
    """``half``: dense TFLOP/s in 16 bit; ``tb_s``: memory TB/s; ``link``: GB/s in one direction inside
    the node."""
    flops = {dtype: half * 1e12 for dtype in dtypes if dtype != "fp32"}
    host = next((rate for names, rate in HOST_LINKS.items() if name.startswith(names)), PCIE_4)
    return Chip(name, int(gib * GIB), flops, tb_s * 1e12, link * 1e9, host * 1e9, dtypes, source)


# GB/s in one direction of 16 lanes (PCI-SIG: 8, 16 and 32 GT/s per lane, 128 of 130 bits). Which one a chip has is from
# its data sheet where ``source`` is one, else recalled; 4.0, what most have, where neither says anything.
PCIE_3, PCIE_4, PCIE_5 = (lane * 16 * 128 / 130 / 8 for lane in (8, 16, 32))
HOST_LINKS = {
    ("V100", "T4"): PCIE_3,
    ("H100", "H800", "H200", "H20", "B200", "MI300X", "MI325X", "Gaudi3", "MTT-S"): PCIE_5,
}


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _chip("A100-40-SXM", 312, 40, 1.555, 300, "vendor"),
        _chip("A100-80-SXM", 312, 80, 2.04, 300, "mlcommons"),
        _chip("A100-80-PCIe", 312, 80, 1.94, 31, "mlcommons"),
        _chip("A800-80-SXM", 312, 80, 2.0, 200, "recalled"),
        _chip("H100-SXM", 989, 80, 3.35, 450, "mlcommons"),
        _chip("H100-PCIe", 756, 80, 2.0, 63, "mlcommons"),
        _chip("H800-SXM", 989, 80, 3.35, 200, "recalled"),
        _chip("H200-SXM", 989, 141, 4.8, 450, "mlcommons"),
        _chip("H20", 148, 96, 4.0, 450, "recalled"),
        _chip("B200-SXM", 2250, 180, 8.0, 900, "mlcommons"),
        _chip("L40S", 362, 48, 0.864, 31, "mlcommons"),
        _chip("L4", 121, 24, 0.3, 31, "recalled"),
        _chip("A10", 125, 24, 0.6, 31, "recalled"),
        _chip("RTX3090", 71, 24, 0.936, 31, "recalled"),
        _chip("RTX4090", 165.2, 24, 1.008, 31, "recalled"),
        _chip("V100-32-SXM2", 125, 32, 0.9, 150, "mlcommons", _NO_BF16),
        _chip("T4", 65, 16, 0.32, 16, "recalled", _NO_BF16),
        _chip("MI210", 181, 64, 1.6, 150, "recalled"),
        _chip("MI250X", 383, 128, 3.28, 350, "mlcommons"),
        _chip("MI300X", 1307, 192, 5.3, 448, "mlcommons"),
        _chip("MI325X", 1300, 256, 6.0, 448, "mlcommons"),
        _chip("Gaudi2", 432, 96, 2.46, 300, "mlcommons"),
        _chip("Gaudi3", 1677, 128, 3.7, 600, "mlcommons"),
        _chip("Ascend-910B", 313, 64, 1.6, 196, "recalled"),
        _chip("MLU370-X8", 96, 48, 0.6144, 100, "vendor"),
        _chip("MLU590", 314, 80, 2.0, 159, "recalled"),
        _chip("MTT-S4000", 98, 48, 0.768, 120, "vendor"),
        _chip("MTT-S5000", 500, 80, 1.6, 392, "recalled"),
        _chip("Hygon-K100-AI", 196, 64, 0.9, 31, "recalled"),
        _chip("Kunlun-R300", 128, 32, 0.512, 100, "recalled", _NO_BF16),
        _chip("MetaX-C500", 280, 64, 1.8, 31, "recalled"),
        _chip("Iluvatar-BI-V100", 147, 32, 1.2, 32, "recalled", _NO_BF16),
        _chip("Iluvatar-BI-V150", 196.8, 64, 0.59, 92.5, "measured"),
    )
}
