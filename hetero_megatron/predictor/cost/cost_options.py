"""What a cost model is asked: a stage without ranks, and the assumptions that are not rates; and what a cold start
takes of a chip that was not calibrated: what share of a data sheet's peak large matrix products reach (measured, by
kind of chip and dtype; else by class), and where its values are from."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetero_megatron.cluster import Chip
from hetero_megatron.cluster.catalogue import CHIPS, card_file
from hetero_megatron.plans.canonical import Recompute
from hetero_megatron.plans.fp8 import Fp8
from hetero_megatron.plans.routing import EVEN, Routing
from hetero_megatron.spec.flops import LOGITS_BYTES, PLAIN_WORDS, Words


@dataclass(frozen=True)
class StageChoice:
    """A stage, without ranks.

    Args:
        chip: chip type of all its ranks.
        tp: tensor-parallel degree (equal split).
        dp: inner data-parallel degree, which divides the micro-batch's rows.
        embed, head: the stage has the embedding; the output head and loss.
        recompute: none | selective | elementwise | full | first (the first ``first`` layers whole, the rest none).
        offload: optimizer states live in host memory.
        away: so many first layers have their activations in host memory from forward to backward.
        home: node group of the ranks, which determines links and node size; empty: the one with the chip and the
            largest nodes.
    """

    chip: str
    tp: int
    dp: int
    layers: int
    embed: bool
    head: bool
    recompute: str = "none"
    first: int = 0
    offload: bool = False
    home: str = ""
    away: int = 0

    @property
    def full(self) -> int:
        """Layers that are recomputed whole."""
        return Recompute(self.recompute, self.first).whole(self.layers)

    @property
    def cut(self) -> tuple[int, int, bool, bool]:
        """What :class:`UniformStageMemory` knows a stage by."""
        return self.tp, self.layers, self.embed, self.head


@dataclass(frozen=True)
class CostOptions:
    """Assumptions that are not rates. The last seven describe other frameworks, whose runs are predicted to validate
    the predictor.

    Args:
        margin: share of a chip's memory kept free (fragmentation, kernels' workspaces).
        moments: optimizer moments per element: 2 for Adam, 1 for SGD with momentum.
        muon: the optimizer is Muon, which keeps one moment of each matrix, ``moments`` of all others.
        routing: how tokens divide over experts; by default evenly.
        fp8: what the linear modules of stages compute in, where their ``dtype`` does not say otherwise; None: the dtype
            of the run.
        logits_bytes: of a micro-batch's logits on a rank, above which head and loss go through chunks of tokens.
        reference: how many times all pipelines run forward before every step: once for the reference of preference
            pairs, which is the base without adapters; see ``Preference.forwards``.
        loss_words: of 4 bytes, that the loss of distillation reads and writes of a token beside a cross-entropy: (for
            each token of the vocabulary, besides); see ``spec/distillation.py``.
        role_seconds: before every step, for a second model that only runs forward.
        host_bandwidth: bytes/s between chip and host memory, for offloaded optimizers (PCIe 4: 0.8 x 31 GB/s), and for
            activations where the chip's own is not known.
        host_memory_bandwidth: bytes/s of a node's own memory, shared by the updates of all its chips.
        gather_ahead: parameters come beside the next forward where they need not be unpacked (--overlap-param-gather).
        overlap: gradients are sent during the last backward, as by our runtime; False: after it.
        sharded: a rank updates what it owns, as in our runtime; False: all that it holds (an all-reduce moves the bytes
            of reduction and spread together).
        gradient_bytes: bytes per gradient element on the links; None: as in our runtime, at least 4.
        sequence_parallel: with tensor parallelism, as in our runtime; False: norms work on all tokens on every rank.
        whole_transfers: every TP rank sends whole activations to the next stage instead of its part.
        blocking: a transfer between stages keeps both ranks busy instead of overlapping with compute.
        softmax_batches: Megatron's fused softmax needs sequences x heads of a rank to be a multiple of this (4 in its
            source), else it runs unfused; 0: always fused.
    """

    margin: float = 0.06
    moments: int = 2
    muon: bool = False
    routing: Routing = EVEN
    fp8: Fp8 | None = None
    logits_bytes: int = LOGITS_BYTES
    reference: int = 0
    loss_words: Words = PLAIN_WORDS
    role_seconds: float = 0.0
    host_bandwidth: float = 25e9
    host_memory_bandwidth: float = 200e9
    gather_ahead: bool = False
    overlap: bool = True
    sharded: bool = True
    gradient_bytes: float | None = None
    sequence_parallel: bool = True
    whole_transfers: bool = False
    blocking: bool = False
    softmax_batches: int = 0


_ML = "stas00/ml-engineering, very large products"
_FLAGPERF = "FlagPerf, very large products"
_ZORSE = "Zorse (MLSys'26), decoder layers of hidden size 2,048 to 8,192, PyTorch 2.5.1"


@dataclass(frozen=True)
class ShareOfPeak:
    """``value`` of the dense peak, of products and their gradients together; ``source``: who measured it; empty:
    assumed; ``gradients``: how fast these are beside forward."""

    value: float
    source: str = ""
    gradients: float = 1.0

    @property
    def forward(self) -> float:
        """The share of products in forward, as many FLOPs as each of their two gradients."""
        return self.value * (1 + 2 / self.gradients) / 3


# By the beginning of the chip's name (the longest counts), in 16 bit.
HALF: dict[str, ShareOfPeak] = {
    **{name: ShareOfPeak(value, _ML) for name, value in {
        "A100-80-PCIe": 0.811, "A100-40": 0.831, "A100": 0.869, "A800": 0.869, "H100": 0.803, "H800": 0.803,
        "H200": 0.803, "GH200": 0.838, "B200": 0.776, "MI300X": 0.514, "MI325X": 0.604, "Gaudi2": 0.969,
        "Gaudi3": 0.741,
    }.items()},
    "MetaX": ShareOfPeak(0.828, _FLAGPERF),
    "Iluvatar-BI-V150": ShareOfPeak(1.0, _FLAGPERF),  # the catalogue's value is itself measured
    # Boards of 70 W do not keep their clock.
    **{name: ShareOfPeak(value, _ZORSE) for name, value in {
        "A10G": 0.99, "A6000": 0.86, "L4": 0.46, "T4": 0.39, "P100": 0.82, "W6800": 0.8,
    }.items()},
    "L40": ShareOfPeak(0.75),  # not an L4
}  # fmt: skip
# In fp32 the peak of Ampere and Ada without HBM counts units that also do integers: the mean of the first two. There,
# gradients of products are faster than forward: the median of three.
DOUBLED_FROM = ("A10G", "A6000")
DOUBLED = ("A10", "A40", "RTX30", "RTX40", "L40", "RTX-A", "RTX6000")
GRADIENTS = 1.25
FULL: dict[str, ShareOfPeak] = {  # in fp32
    **{name: ShareOfPeak(value, _ZORSE) for name, value in {"T4": 0.51, "P100": 0.84}.items()},
    **{name: ShareOfPeak(value, _ZORSE, GRADIENTS) for name, value in {
        "A10G": 0.60, "A6000": 0.56, "L4": 0.33,
    }.items()},
    **{name: ShareOfPeak(value) for name, value in {"A100": 0.869, "A100-40": 0.831, "A100-80-PCIe": 0.811}.items()},
    **{name: ShareOfPeak(0.58, gradients=GRADIENTS) for name in DOUBLED},
}  # fmt: skip
# (watts, process in nm) of boards whose power is too little for their clock, from data sheets, recalled. They reach
# PER_WATT x watts / (peak in TFLOP/s x nm) of their peak: the medians of the measured ones of them.
BOARDS = {"T4": (70, 12), "L4": (72, 5), "MI300X": (750, 5), "MI325X": (1000, 5), "A10": (150, 8)}
PER_WATT = {"fp16": 4.1, "fp32": 0.70}
OTHER = ShareOfPeak(0.75)  # below most of what was measured on boards that keep their clock, whose median is 0.8
OTHER_FULL = ShareOfPeak(0.84)  # in fp32, where each unit counts once: P100's; Sailor's V100 and Titan RTX reach it


def share_of_peak(chip: str, dtype: str) -> ShareOfPeak:
    """Of a chip, by its name; fp32 as 16 bit where only that was measured, fp64 and fp8 as that: assumed. Of a kind
    that nobody measured, no more than its power allows where that is known."""
    share, half = _by_name(chip, dtype), dtype in ("bf16", "fp16")
    if share.source or chip not in BOARDS or not (half or dtype == "fp32"):
        return share
    return replace(share, value=min(share.value, PER_WATT["fp16" if half else "fp32"] * allowance(chip, dtype)))


def _by_name(chip: str, dtype: str) -> ShareOfPeak:
    tables = (FULL, HALF) if dtype == "fp32" else (HALF,)
    for table in tables:
        if names := [name for name in table if chip.startswith(name)]:
            share = table[max(names, key=len)]
            return share if table is FULL or dtype in ("bf16", "fp16") else ShareOfPeak(share.value)
    return OTHER_FULL if dtype == "fp32" else OTHER


def allowance(chip: str, dtype: str) -> float:
    """Watts per TFLOP/s of a board's peak and nanometre of its process, of which it needs less."""
    watts, process = BOARDS[chip]
    return watts / (CHIPS[chip].flops[dtype] / 1e12 * process)


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
