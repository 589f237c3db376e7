"""Layer times that others measured on seven kinds of cards, against those predicted from data sheets.

    python benchmarks/bench_cards.py [--data FILE] [--chip NAME=CHIP …] [--without operators|pauses] [--by model]

What was timed is in Zorse's repository (MLSys'26, MIT; github.com/benson-guo/zorse: ``utils/runtime_estimator.py`` and
``models/llama_simple.py``): the kernels of one decoder layer of transformers' LLaMA with weights in fp32, in 16 bit
under autocast, operator by operator, on one card, after pauses of 50 ms. Products and attention are those of ours. What
the layer moves through memory beside them (:func:`moved`; ``tests/unit/planner/test_bench_cards.py`` counts it) is
priced at the rate of memory in place of what our fused operators move.

The first table has the shares of peak with which the larger of the medians, forward and backward, is least, and in fp32
how fast gradients are beside forward where that is not 1; the product's are these but for A100's, which is another's.
Then one kind is left out: its share is what the product takes of a kind that nobody measured (:func:`unmeasured`), and
what the median of the others would give. ``--chip`` says what a further kind of the data is in the catalogue: it is in
no fit. ``--without`` fits without a part of what is known of the timing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.bench_public import SCORE_BYTES
from benchmarks.common import machine
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.cluster.catalogue import CHIPS as CATALOGUE
from hetero_megatron.predictor.cost.cost_options import (
    BOARDS,
    DOUBLED_FROM,
    HALF,
    OTHER,
    OTHER_FULL,
    ShareOfPeak,
    allowance,
    share_of_peak,
)
from hetero_megatron.predictor.cost.layer_cost import CostModel, Operators
from hetero_megatron.predictor.cost.rates import ATTENTION, half_saturation
from hetero_megatron.spec.hf_config import from_hf_config

LAYERS = {  # model -> (hidden size, columns of the MLP, heads)
    "llama_tiny": (2048, 5632, 32), "llama_3b": (3200, 8640, 32), "llama_7b": (4096, 11008, 32),
    "llama_13b": (5120, 13824, 40), "llama_33b": (6656, 17920, 52), "llama_65b": (8192, 22016, 64),
}  # fmt: skip
CHIPS = {
    "a100x80": "A100-80-SXM", "a10g": "A10G", "a6000": "A6000", "l4": "L4", "t4": "T4", "p100": "P100-16-PCIe",
    "w6800": "W6800",
}  # fmt: skip
GENERATIONS = {
    "P100-16-PCIe": "Pascal", "T4": "Turing", "A100-80-SXM": "Ampere", "A10G": "Ampere", "A6000": "Ampere",
    "L4": "Ada", "W6800": "RDNA 2",
}  # fmt: skip
DOUBLED = (*DOUBLED_FROM, "L4")  # in fp32
SLOT = 75  # watts: such boards are ahead after a pause
SAILOR_LAYERS = {"OPT-350": (1024, 16), "GPT-Neo-2.7": (2560, 32)}  # hidden size, heads
SAILOR_CHIPS = {
    "V100-16": {"memory": "16 GiB", "tflops": {"fp32": 15.7}, "memory_bandwidth": "900 GB/s", "vendor": "NVIDIA"},
    "Titan-RTX": {"memory": "24 GiB", "tflops": {"fp32": 16.3}, "memory_bandwidth": "672 GB/s", "vendor": "NVIDIA"},
}
PAUSE = 0.05  # seconds, before each forward and backward that was timed
RECOVERED = 0.3  # of a pause, that a board at its limit of power is ahead by then: fitted to L4 and T4
GOAL = 0.2
# Bytes of a token per (hidden size, column of the MLP), and of a backward per parameter: a gradient is cast to fp32 and
# added.
FORWARD = {"fp16": (160, 10), "fp32": (164, 20)}
BACKWARD = {"fp16": (366, 18, 18), "fp32": (388, 36, 12)}


Errors = tuple[float, float]  # predicted / measured - 1 of forward and backward
Without = frozenset[str]  # of what was timed: "operators" that are not ours, "pauses"


@dataclass(frozen=True)
class Entry:
    model: str
    chip: str
    length: int
    dtype: str
    rows: int
    forward: float
    backward: float


Groups = Mapping[tuple[str, str], tuple[Sequence[Entry], ShareOfPeak]]  # (entries, share) by chip and dtype


def entries(path: Path, chips: Mapping[str, str]) -> Iterator[Entry]:
    """Of the kinds that ``chips`` names."""
    for model, cards in json.loads(path.read_text()).items():
        for card in cards.keys() & chips.keys():
            for length, dtypes in cards[card].items():
                for name, found in dtypes.items():
                    dtype = {"float16": "fp16", "float32": "fp32"}[name]
                    pairs = zip(found["forward_ms"] or [], found["backward_ms"] or [], strict=True)
                    for rows, (forward, backward) in enumerate(pairs, 1):
                        yield Entry(model, chips[card], int(length), dtype, rows, forward / 1e3, backward / 1e3)


@lru_cache(maxsize=256)
def operators(model: str, chip: str, length: int, dtype: str) -> Operators:
    hidden, columns, heads = LAYERS[model]
    spec = from_hf_config({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": columns, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 32000,
        "max_position_embeddings": 8192, "hidden_act": "silu",
    }, where=model)  # fmt: skip
    node = {"name": "node", "chip": chip, "chips_per_node": 1}
    return CostModel(spec, cluster_from_dict({"version": 1, "nodes": [node]}), length, dtype).operators(chip)


def moved(model: str, dtype: str, tokens: int) -> tuple[float, float]:
    """Bytes of forward and backward of transformers' layer beside products and attention."""
    hidden, columns, _ = LAYERS[model]
    parameters = hidden * (4 * hidden + 3 * columns)
    of_hidden, of_columns = FORWARD[dtype]
    again, of_both, of_parameters = BACKWARD[dtype]
    backward = tokens * (again * hidden + of_both * columns) + of_parameters * parameters
    return tokens * (of_hidden * hidden + of_columns * columns), backward


def seconds(entry: Entry, share: ShareOfPeak, without: Without = frozenset()) -> tuple[float, float]:
    """Predicted seconds of forward and backward, with this share of peak."""
    ours = operators(entry.model, entry.chip, entry.length, entry.dtype)
    peak, memory = CATALOGUE[entry.chip].flops[entry.dtype], ours.rates.bytes_per_second
    rates = replace(
        ours.rates, gemm_flops=share.forward * peak, attention_flops=ATTENTION * share.value * peak,
        gemm_half=half_saturation(share.value * peak), gradient_speed=share.gradients,
    )  # fmt: skip
    tokens = entry.rows * entry.length
    forward, backward = replace(ours, rates=rates).layer(1.0, entry.rows, entry.length)
    if "operators" in without:
        return forward, backward
    small, others = ours.small_operators(1.0, tokens), moved(entry.model, entry.dtype, tokens)
    return forward + others[0] / memory - small, backward + others[1] / memory - 2 * small


def errors(entry: Entry, share: ShareOfPeak, without: Without = frozenset()) -> Errors:
    """A board of a slot's power runs as others do after a pause, until it has drawn what it saved."""
    predicted = seconds(entry, share, without)
    if in_slot(entry.chip) and "pauses" not in without:
        unlimited = seconds(entry, max(share, full_power(entry.chip, entry.dtype), key=lambda s: s.value), without)
        saved = RECOVERED * PAUSE
        predicted = max(predicted[0] - saved, unlimited[0]), max(predicted[1] - saved, unlimited[1])
    return predicted[0] / entry.forward - 1, predicted[1] / entry.backward - 1


def in_slot(chip: str) -> bool:
    return chip in BOARDS and BOARDS[chip][0] <= SLOT


@lru_cache(maxsize=64)
def fitted(rows: tuple[Entry, ...], without: Without = frozenset()) -> ShareOfPeak:
    """The share with which the larger of the medians of errors, forward and backward, is least; at most 1."""

    def larger(share: ShareOfPeak) -> float:
        found = [errors(entry, share, without) for entry in rows]
        return max(statistics.median(abs(e[part]) for e in found) for part in (0, 1))

    doubled = rows[0].chip in DOUBLED and rows[0].dtype == "fp32"
    coarse = min((ShareOfPeak(i / 20) for i in range(4, 21)), key=larger)
    near = [coarse.value + i / 100 for i in range(-4, 5) if coarse.value + i / 100 <= 1]
    speeds = [1 + i / 20 for i in range(11)] if doubled else [1.0]
    return min((ShareOfPeak(value, gradients=speed) for value in near for speed in speeds), key=larger)


def full_power(chip: str, dtype: str) -> ShareOfPeak:
    """What the product takes of a kind that nobody measured and that power does not limit, without ``chip``: in fp32
    the mean of cards whose peak counts units twice, or P100's; P100 has nothing in fp32 to go by, so 16 bit's."""
    if dtype == "fp16":
        return OTHER
    if chip in DOUBLED:
        others = [share_of_peak(other, dtype) for other in DOUBLED_FROM if other != chip]
        return replace(others[0], value=statistics.mean(share.value for share in others))
    return OTHER if chip.startswith("P100") else OTHER_FULL


def unmeasured(chip: str, dtype: str, groups: Mapping[tuple[str, str], Sequence[Entry]]) -> ShareOfPeak:
    """What the product takes of a kind that nobody measured, without ``chip``: no more than its power allows by the
    median of others (:func:`share_of_peak`), and gradients beside forward as fast as others have them."""
    share = full_power(chip, dtype)
    if dtype == "fp32" and chip in DOUBLED:
        others = [fitted(tuple(rows)).gradients for (other, d), rows in groups.items()
                  if d == dtype and other in DOUBLED and other != chip]  # fmt: skip
        share = replace(share, gradients=statistics.median(others) if others else 1.0)
    if chip in BOARDS:
        others = [share_of_peak(one, dtype).value / allowance(one, dtype) for one in BOARDS
                  if one != chip and _measured(one, dtype)]  # fmt: skip
        share = replace(share, value=min(share.value, statistics.median(others) * allowance(chip, dtype)))
    return share


def _measured(chip: str, dtype: str) -> bool:
    return bool(share_of_peak(chip, dtype).source)


def median_of_others(chip: str) -> ShareOfPeak:
    """In place of ``OTHER`` the median of what was measured of other kinds in 16 bit."""
    family = chip.split("-")[0]
    others = {share.value for name, share in HALF.items() if share.source and not name.startswith(family)}
    return ShareOfPeak(statistics.median(others - {share_of_peak(chip, "fp16").value}))


def row(found: Sequence[tuple[Entry, Errors]]) -> str:
    def middle(part: int, few: bool | None = None) -> str:
        sizes = [abs(e[part]) for entry, e in found if few is None or (entry.rows == 1) == few]
        return f"{statistics.median(sizes):6.1%}" if sizes else "     -"

    worst = max(abs(x) for _, e in found for x in e)
    cells = [middle(0), middle(1), middle(0, True), middle(1, True), middle(0, False), middle(1, False)]
    return " ".join(cells) + f" {worst:8.0%}"


def main() -> None:
    parser = argparse.ArgumentParser()
    shared = os.environ.get("HETERO_PUBLIC_DATA", str(Path(__file__).resolve().parents[2] / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=Path(shared) / "zorse" / "llama_layer_ms.json")
    parser.add_argument("--chip", action="append", default=[], metavar="NAME=CHIP", help="a further kind of the data")
    parser.add_argument("--without", choices=("operators", "pauses"), action="append", default=[])
    parser.add_argument("--by", choices=("model", "length", "rows"), help="signed median errors of the product by it")
    options = parser.parse_args()
    if not options.data.exists():
        print(f"nothing to compare: {options.data} is not there (llama layer times of Zorse's artifact)")
        return
    further = dict(pair.split("=", 1) for pair in options.chip)
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries(options.data, CHIPS | further):
        groups.setdefault((entry.chip, entry.dtype), []).append(entry)
    ours = {key: (rows, share_of_peak(*key)) for key, rows in groups.items()}
    print(machine())
    if options.by:
        by_part(ours, options.by)
        return
    print(f"{'':34} median error of:   all     |  one sequence |  2 and more")
    print(f"{'card':13} {'':7} dtype entries share  fwd    bwd    fwd    bwd    fwd    bwd     worst")
    own = {key: rows for key, rows in groups.items() if key[0] not in further.values()}
    without = frozenset(options.without)
    best = {key: (rows, fitted(tuple(rows), without)) for key, rows in own.items()}
    table("shares fitted to these", best, without)
    if without:
        return
    table("shares of the product where they are others", {
        key: pair for key, pair in ours.items() if key not in best or abs(best[key][1].value - pair[1].value) > 0.005
    })  # fmt: skip
    table("one kind left out", {key: (rows, unmeasured(*key, own)) for key, rows in own.items()})
    table("one kind left out, at the median of the others in 16 bit", {
        key: (rows, median_of_others(key[0])) for key, rows in own.items() if key[1] == "fp16"
    })  # fmt: skip
    profiles = options.data.parent.parent / "sailor" / "profiles.json"
    if profiles.exists():
        sailor(profiles)


def sailor(path: Path) -> None:
    """Sailor's layers in fp32 (SOSP'25, MIT; Megatron-DeepSpeed, scores of attention written out), one rank: boards in
    none of the fits, whose peak in fp32 counts each unit once. A100, GH200 and RTX 3090 reach their peak in fp32 there
    or more (TF32), RTX 2080 is faster than its peak and its memory together: they are left out."""
    print("Sailor's layers, in no fit:")
    for model, (hidden, heads) in SAILOR_LAYERS.items():
        spec = from_hf_config({
            "model_type": "gpt2", "n_embd": hidden, "n_layer": 2, "n_head": heads, "n_inner": 4 * hidden,
            "n_positions": 2048, "vocab_size": 50272, "activation_function": "gelu_new",
        }, where=model)  # fmt: skip
        for name, chip in SAILOR_CHIPS.items():
            measured = json.loads(path.read_text())[model].get(name, {})
            node = {"name": "node", "chip": name, "chips_per_node": 1}
            cluster = cluster_from_dict({"version": 1, "nodes": [node], "chips": {name: chip}})
            plain = CostModel(spec, cluster, 2048, "fp32").operators(name)
            for share in (OTHER.value, OTHER_FULL.value):
                rate, memory = share * cluster.chips[name].flops["fp32"], plain.rates.bytes_per_second
                rates = replace(
                    plain.rates, gemm_flops=rate, attention_flops=ATTENTION * rate, gemm_half=half_saturation(rate),
                    score_seconds=2 * SCORE_BYTES / memory,
                )  # fmt: skip
                ours, found = replace(plain, rates=rates), list[Errors]()
                for rows, by_tp in measured.items():
                    if "1" in by_tp:
                        forward, backward, _ = by_tp["1"]["10"]
                        predicted = ours.layer(1.0, int(rows), 2048)
                        found.append((predicted[0] / forward - 1, predicted[1] / backward - 1))
                if found:
                    middle = [statistics.median(abs(e[part]) for e in found) for part in (0, 1)]
                    print(f"{name:9} {model:20} fp32 {len(found):7} {share:5.2f} {middle[0]:6.1%} {middle[1]:6.1%}")


def by_part(groups: Groups, part: str) -> None:
    """Signed median errors by model, length or the number of rows."""
    for (chip, dtype), (entries, share) in sorted(groups.items()):
        parts: dict[str | int, list[Errors]] = {}
        for entry in entries:
            parts.setdefault(getattr(entry, part), []).append(errors(entry, share))
        middle = {key: [statistics.median(e[i] for e in found) for i in (0, 1)] for key, found in parts.items()}
        cells = [f"{key} {pair[0]:+.0%} {pair[1]:+.0%}" for key, pair in sorted(middle.items())]
        print(f"{chip:13} {dtype}  {'; '.join(cells)}")


def table(title: str, groups: Groups, without: Without = frozenset()) -> None:
    print(title)
    held = 0
    known = [key for chip in GENERATIONS for key in sorted(groups) if key[0] == chip]
    for chip, dtype in (*known, *sorted(groups.keys() - set(known))):
        rows, share = groups[chip, dtype]
        found = [(entry, errors(entry, share, without)) for entry in rows]
        held += all(statistics.median(abs(e[part]) for _, e in found) <= GOAL for part in (0, 1))
        name = f"{chip:13} {GENERATIONS.get(chip, ''):7} {dtype:5}"
        beside = f"  gradients x {share.gradients:.2f}" if share.gradients != 1 else ""
        print(f"{name} {len(rows):7} {share.value:5.2f} {row(found)}{beside}", flush=True)
    print(f"within {GOAL:.0%} forward and backward: {held} of {len(groups)}")


if __name__ == "__main__":
    main()
