"""Known chips with data-sheet values: dense TFLOP/s per dtype, memory, bandwidths.

These are defaults before calibration. ``source`` says where the values are from, as explained in docs/chips.md; its
table is printed by ``hetero-megatron doctor --chips``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

GIB = 2**30
DTYPES = ("fp64", "fp32", "bf16", "fp16")  # of weights
CHIP_DTYPES = (*DTYPES, "fp8")


@dataclass(frozen=True)
class CommunicatorMemory:
    """Bytes that a communication library takes on a chip for ``each`` communicator, and for each ``peer`` in it."""

    each: int = 0
    peer: int = 0
    source: str = ""

    def bytes(self, count: int, peers: int) -> int:
        return count * self.each + peers * self.peer

    @property
    def least(self) -> int:
        """What is set aside before it is known how many there will be, and at least: four, with 16 peers in all."""
        return self.bytes(4, 16)


# By vendor. Nothing here was measured: override it with ``communicators:`` of a chip.
_NCCL = CommunicatorMemory(
    64 << 20, 16 << 20, "assumed: 2 channels with buffers of NCCL_BUFFSIZE, 4 MiB by default, both ways per peer"
)
COMMUNICATORS = {
    "NVIDIA": _NCCL, "AMD": _NCCL,
    "Huawei": CommunicatorMemory(400 << 20, 0, "HCCL_BUFFSIZE, 200 MiB by default, both ways"),
}  # fmt: skip
OTHER_COMMUNICATORS = replace(_NCCL, source="assumed to be as NCCL's")


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Args:
        memory: bytes.
        flops: dense FLOP/s by dtype; may lack dtypes, or be empty when nothing is known.
        memory_bandwidth: bytes/s; None when unknown.
        link_bandwidth: bytes/s in one direction to a chip of the same node; None when unknown.
        host_bandwidth: bytes/s in one direction to its host's memory; None when unknown.
        dtypes: dtypes it computes in; ``fp8`` where this version has kernels for it.
        source: where the values are from.
        speed: emulated speed, 1.0 = one core of this machine; None: not emulated.
        memory_budget: bytes that an emulated chip may use; None: ``memory``.
        rates: measured rates, as calibration wrote them.
        cost_per_hour: in any currency, the same for all chips; None when unknown.
        communicators: memory of its communication library; None: as its vendor's (:attr:`communicator`).
        vendor: whose communication library it speaks, as platform plugins name it; "" when unknown.
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
    vendor: str = ""
    communicators: CommunicatorMemory | None = None

    @property
    def communicator(self) -> CommunicatorMemory:
        """What a communicator takes on it; nothing on emulated chips, whose transfers go by gloo."""
        if self.communicators is not None:
            return self.communicators
        if self.speed is not None:
            return CommunicatorMemory()
        return COMMUNICATORS.get(self.vendor, OTHER_COMMUNICATORS)


def _chip(
    name: str,
    half: float | None,
    gib: float,
    tb_s: float,
    link: float | None,
    source: str,
    fp32: float | None = None,
    fp64: float | None = None,
    fp8: float | None = None,
    bf16: bool = True,
) -> Chip:
    """``half``, ``fp32``, …: dense TFLOP/s in 16 bit (with ``bf16`` or without it), fp32 (not TF32), fp64 and fp8;
    ``tb_s``: memory TB/s; ``link``: GB/s in one direction inside the node."""
    rates = {"fp64": fp64, "fp32": fp32, "bf16": half if bf16 else None, "fp16": half, "fp8": fp8}
    flops = {dtype: rate * 1e12 for dtype, rate in rates.items() if rate is not None}
    recalled = " and ".join(dtype for dtype in ("fp32", "fp64", "fp8") if dtype in flops)
    if recalled and source != "recalled":
        source += f"; {recalled} recalled"
    dtypes = tuple(d for d in CHIP_DTYPES if d in flops or d in ("fp32", "fp16") or (d == "bf16" and bf16))
    link_bandwidth = None if link is None else link * 1e9
    host = next((rate for names, rate in HOST_LINKS.items() if name.startswith(names)), PCIE_4)
    vendor = next(vendor for vendor, names in VENDORS.items() if name.startswith(names))
    return Chip(name, int(gib * GIB), flops, tb_s * 1e12, link_bandwidth, host * 1e9, dtypes, source, vendor=vendor)


# GB/s in one direction of 16 lanes (PCI-SIG: 8, 16 and 32 GT/s per lane, 128 of 130 bits). Which one a chip has is from
# its data sheet where ``source`` is one, else recalled; 4.0, what most have, where neither says anything.
PCIE_3, PCIE_4, PCIE_5 = (lane * 16 * 128 / 130 / 8 for lane in (8, 16, 32))
HOST_LINKS = {
    ("V100", "T4", "P100"): PCIE_3,
    ("H100", "H800", "H200", "H20", "B200", "MI300X", "MI325X", "Gaudi3", "MTT-S"): PCIE_5,
    ("GH200",): 450,  # NVLink-C2C
}

VENDORS = {  # as the platform plugins have them, by the beginning of a chip's name
    "AMD": ("MI", "W6"), "Intel Habana": ("Gaudi",), "Huawei": ("Ascend",), "Cambricon": ("MLU3", "MLU5"),
    "Moore Threads": ("MTT",), "Hygon": ("Hygon",), "Kunlunxin": ("Kunlun",), "MetaX": ("MetaX",),
    "Iluvatar CoreX": ("Iluvatar",),
    "NVIDIA": ("A", "B", "G", "H", "L", "P1", "R", "T", "V"),
}  # fmt: skip


# Variables by which the vendors' communication libraries are told which network interfaces to use, like gloo's
# GLOO_SOCKET_IFNAME; for other vendors: ``env:`` of the cluster file.
INTERFACE_VARIABLES = {
    "NVIDIA": ("NCCL_SOCKET_IFNAME",), "AMD": ("NCCL_SOCKET_IFNAME",), "Huawei": ("HCCL_SOCKET_IFNAME",),
}  # fmt: skip
# What a chip is called as a resource in Kubernetes by its vendor's device plugin, by vendor and, where that differs, by
# the beginning of the chip's name; for others: ``resource:`` of the cluster file.
RESOURCES = {
    "NVIDIA": "nvidia.com/gpu", "AMD": "amd.com/gpu", "Intel Habana": "habana.ai/gaudi",
    "Cambricon": "cambricon.com/mlu", "Moore Threads": "mthreads.com/gpu", "Hygon": "hygon.com/dcu",
    "Kunlunxin": "kunlunxin.com/xpu", "MetaX": "metax-tech.com/gpu",
}  # fmt: skip
CHIP_RESOURCES = {
    ("Ascend-910", "Ascend910"): "huawei.com/Ascend910", ("Ascend-310", "Ascend310"): "huawei.com/Ascend310",
}  # fmt: skip
# What drivers call chips whose names in the catalogue are made of other words.
DEVICE_NAMES = {
    "H100 80GB HBM3": "H100-SXM", "H200": "H200-SXM", "B200": "B200-SXM", "RTX 4090": "RTX4090", "RTX 3090": "RTX3090",
    "Ascend910B": "Ascend-910B", "MI250X": "MI250X-GCD", "MI250": "MI250-GCD",
}  # fmt: skip

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        _chip("A100-40-SXM", 312, 40, 1.555, 300, "ml-engineering", 19.5, 19.5),
        _chip("A100-80-SXM", 312, 80, 2.04, 300, "ml-engineering", 19.5, 19.5),
        _chip("A100-80-PCIe", 312, 80, 1.94, 31, "ml-engineering", 19.5, 19.5),
        _chip("A800-80-SXM", 312, 80, 2.0, 200, "recalled", 19.5, 19.5),
        _chip("H100-SXM", 989, 80, 3.35, 450, "ml-engineering", 67, 67, 1979),
        _chip("H100-PCIe", 756, 80, 2.0, 63, "ml-engineering", 51, 51, 1513),
        _chip("H800-SXM", 989, 80, 3.35, 200, "recalled", 67, 1, 1979),
        _chip("H200-SXM", 989, 141, 4.8, 450, "ml-engineering", 67, 67, 1979),
        _chip("GH200-96", 989, 96, 4.0, 450, "ml-engineering", 67, 67, 1979),
        _chip("GH200-141", 989, 141, 4.8, 450, "ml-engineering", 67, 67, 1979),
        _chip("H20", 148, 96, 4.0, 450, "recalled", 44, 1, 296),
        _chip("B200-SXM", 2250, 180, 8.0, 900, "ml-engineering", 75, 37, 4500),
        _chip("L40S", 362, 48, 0.864, 31, "ml-engineering", 91.6, fp8=733),
        _chip("L4", 121, 24, 0.3, 31, "recalled", 30.3, fp8=242.5),
        _chip("A10", 125, 24, 0.6, 31, "recalled", 31.2),
        _chip("A10G", 70, 24, 0.6, 31, "recalled", 35),
        _chip("A6000", 154.8, 48, 0.768, 31, "recalled", 38.7),
        _chip("RTX3090", 71, 24, 0.936, 31, "recalled", 35.6),
        _chip("RTX4090", 165.2, 24, 1.008, 31, "recalled", 82.6, fp8=330.3),
        _chip("V100-16-SXM2", 125, 16, 0.9, 150, "recalled", 15.7, 7.8, bf16=False),
        _chip("V100-32-SXM2", 125, 32, 0.9, 150, "recalled", 15.7, 7.8, bf16=False),
        _chip("P100-16-PCIe", 9.3, 16, 0.732, 16, "recalled", 9.3, 4.7, bf16=False),
        _chip("T4", 65, 16, 0.32, 16, "recalled", 8.1, bf16=False),
        _chip("W6800", 17.8, 32, 0.512, 31, "recalled", 17.8),
        _chip("MI210", 181, 64, 1.6, 150, "recalled", 45.3, 45.3),
        _chip("MI250X", 383, 128, 3.28, 350, "ml-engineering", 95.7, 95.7),
        # A module has two dies, and torch shows each of them as a device, which is what a rank has.
        _chip("MI250-GCD", 181, 64, 1.64, 175, "recalled", 45.3, 45.3),
        _chip("MI250X-GCD", 191.5, 64, 1.64, 175, "recalled", 47.9, 47.9),
        _chip("MI300X", 1307, 192, 5.3, 448, "ml-engineering", 163.4, 163.4),
        _chip("MI325X", 1300, 256, 6.0, 448, "ml-engineering", 163.4, 163.4),
        _chip("Gaudi2", 432, 96, 2.46, 300, "ml-engineering"),
        _chip("Gaudi3", 1677, 128, 3.7, 600, "ml-engineering"),
        _chip("Ascend-910B", 313, 64, 1.6, 196, "recalled"),
        _chip("MLU370-X8", 96, 48, 0.6144, 100, "press", 24),
        _chip("MLU590", 314, 80, 2.0, 159, "recalled"),
        _chip("MTT-S4000", 98, 48, 0.768, 120, "press", 25),
        _chip("MTT-S5000", 500, 80, 1.6, 392, "recalled"),
        _chip("Hygon-K100", 100, 64, 0.9, 31, "recalled"),
        _chip("Hygon-K100-AI", 196, 64, 0.9, 31, "recalled"),
        _chip("Kunlun-R300", 128, 32, 0.512, 100, "recalled", bf16=False),
        _chip("MetaX-C500", 280, 64, 1.8, 31, "recalled"),
        _chip("MetaX-C550", None, 64, 1.8, None, "FlagPerf"),
        _chip("Iluvatar-BI-V100", 147, 32, 1.2, 32, "recalled", bf16=False),
        _chip("Iluvatar-BI-V150", 196.8, 64, 0.59, 92.5, "FlagPerf"),
    )
}


CARD_FOLDER = Path(__file__).resolve().parent / "cards"


def card_file(name: str) -> Path | None:
    """Where measurements of a chip of the catalogue are; None: there are none."""
    path = CARD_FOLDER / f"{name}.yaml"
    return path if name in CHIPS and path.is_file() else None


def markdown() -> str:
    """The table of docs/chips.md; a dash: unknown."""
    lines = [f"| chip | memory | {' | '.join(CHIP_DTYPES)} | memory TB/s | link GB/s | host GB/s | source |"]
    lines.append("|---" * (len(CHIP_DTYPES) + 6) + "|")
    for chip in CHIPS.values():
        cells = [f"{chip.memory / GIB:g}"]
        for dtype in CHIP_DTYPES:
            flops = chip.flops.get(dtype)
            cells.append(f"{flops / 1e12:g}" if flops else "-" if dtype in chip.dtypes else "")
        for rate, unit in ((chip.memory_bandwidth, 1e12), (chip.link_bandwidth, 1e9), (chip.host_bandwidth, 1e9)):
            cells.append(f"{rate / unit:.4g}" if rate else "-")
        lines.append(f"| {' | '.join([chip.name, *cells, chip.source])} |")
    return "\n".join(lines)
