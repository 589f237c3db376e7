"""Layer times that others measured on seven kinds of cards, against those predicted from data sheets.

    python benchmarks/bench_cards.py [--data ../shared/data/zorse/llama_layer_ms.json]

Zorse's layers (MLSys'26, MIT) have attention and an MLP of two products of 4 x hidden: 12 x hidden^2 parameters, as the
gated MLP of 8/3 x hidden that is predicted here. They ran under FSDP, whose backward casts, reduces and adds gradients:
16 bytes per parameter in 16 bit, 0 in fp32, at the rate of memory, are added to what is predicted.

The first table has the shares of peak of ``cluster/catalogue.py``, which were fitted to these times (A100's was
not). The second leaves one kind out: its share is the median of the other kinds of its class. The third and fourth are
the same with what the board's power allows: of boards of at most 75 W, and as a cap of all (:func:`powered`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.common import machine
from hetero_megatron.cluster import cluster_from_dict
from hetero_megatron.cluster.catalogue import CHIPS as CATALOGUE
from hetero_megatron.predictor.cost.cost_options import share_of_peak
from hetero_megatron.predictor.cost.layer_cost import CostModel
from hetero_megatron.spec.hf_config import from_hf_config

HIDDEN = {  # model -> (hidden size, heads)
    "llama_tiny": (2048, 16), "llama_3b": (2688, 32), "llama_7b": (4096, 32), "llama_13b": (5120, 40),
    "llama_33b": (6656, 52), "llama_65b": (8192, 64),
}  # fmt: skip
CHIPS = {
    "a100x80": "A100-80-SXM", "a10g": "A10G", "a6000": "A6000", "l4": "L4", "t4": "T4", "p100": "P100-16-PCIe",
    "w6800": "W6800",
}  # fmt: skip
# Kinds that are alike: in 16 bit with matrix units on boards that keep their clock, or of 70 W; without matrix units.
CLASSES = {
    "fp16": (("a100x80", "a10g", "a6000"), ("l4", "t4"), ("p100", "w6800")),
    "fp32": (("a10g", "a6000"), ("l4", "t4"), ("p100",)),
}
BOARD = {  # (watts, process in nm) of the data sheets, recalled
    "a100x80": (400, 7), "a10g": (300, 8), "a6000": (300, 8), "l4": (72, 5), "t4": (70, 12), "p100": (250, 16),
    "w6800": (250, 7),
}  # fmt: skip
SLOT_WATTS = 75  # what a PCIe slot feeds a board without a cable
GOAL = 0.2
FSDP_BYTES = {"fp16": 16, "fp32": 0}


@dataclass(frozen=True)
class Entry:
    model: str
    card: str
    length: int
    dtype: str
    rows: int
    forward: float
    backward: float


def entries(path: Path) -> Iterator[Entry]:
    for model, cards in json.loads(path.read_text()).items():
        for card, lengths in cards.items():
            for length, dtypes in lengths.items():
                for name, found in dtypes.items():
                    dtype = {"float16": "fp16", "float32": "fp32"}[name]
                    pairs = zip(found["forward_ms"] or [], found["backward_ms"] or [], strict=True)
                    for rows, (forward, backward) in enumerate(pairs, 1):
                        yield Entry(model, card, int(length), dtype, rows, forward / 1e3, backward / 1e3)


@lru_cache(maxsize=256)
def costs(model: str, card: str, length: int, dtype: str) -> CostModel:
    hidden, heads = HIDDEN[model]
    spec = from_hf_config({
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": 8 * hidden // 3, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": 32000,
        "max_position_embeddings": 8192, "hidden_act": "silu",
    }, where=model)  # fmt: skip
    node = {"name": "node", "chip": CHIPS[card], "chips_per_node": 1}
    return CostModel(spec, cluster_from_dict({"version": 1, "nodes": [node]}), length, dtype)


def errors(entry: Entry, share: float | None = None) -> tuple[float, float]:
    """(predicted / measured - 1) of forward and backward; ``share``: another share of peak than the product's."""
    chip = CHIPS[entry.card]
    operators = costs(entry.model, entry.card, entry.length, entry.dtype).operators(chip)
    rates = operators.rates
    if share is not None:
        factor = share / share_of_peak(chip, entry.dtype).value
        faster = replace(rates, gemm_flops=rates.gemm_flops * factor, attention_flops=rates.attention_flops * factor)
        operators = replace(operators, rates=faster)
    forward, backward = operators.layer(1.0, entry.rows, entry.length)
    backward += 12 * HIDDEN[entry.model][0] ** 2 * FSDP_BYTES[entry.dtype] / rates.bytes_per_second
    return forward / entry.forward - 1, backward / entry.backward - 1


def left_out(card: str, dtype: str) -> float | None:
    """The share that the other kinds of its class say; None: there are none."""
    group = next((cards for cards in CLASSES[dtype] if card in cards), ())
    others = [share_of_peak(CHIPS[other], dtype).value for other in group if other != card]
    return statistics.median(others) if others else None


def powered(card: str, dtype: str) -> float | None:
    """The share that a board's power allows: k x W / (peak x nm), k of the other boards of a slot's power (median)."""

    def allowance(one: str) -> float:
        watts, process = BOARD[one]
        return watts / (CATALOGUE[CHIPS[one]].flops[dtype] / 1e12 * process)

    others = [one for one, (watts, _) in BOARD.items() if watts <= SLOT_WATTS and one != card]
    ks = [share_of_peak(CHIPS[one], dtype).value / allowance(one) for one in others]
    return statistics.median(ks) * allowance(card) if ks else None


def of_slot(card: str, dtype: str) -> float | None:
    """Left out: boards of a slot's power by it, others as their class."""
    return powered(card, dtype) if BOARD[card][0] <= SLOT_WATTS else left_out(card, dtype)


def capped(card: str, dtype: str) -> float | None:
    """Left out: all kinds at most what their power allows."""
    usual, cap = of_slot(card, dtype), powered(card, dtype)
    return usual if usual is None or cap is None else min(usual, cap)


def row(found: list[tuple[Entry, tuple[float, float]]]) -> str:
    def middle(part: int, few: bool | None = None) -> str:
        sizes = [abs(e[part]) for entry, e in found if few is None or (entry.rows == 1) == few]
        return f"{statistics.median(sizes):6.1%}" if sizes else "     -"

    worst = max(abs(x) for _, e in found for x in e)
    cells = [middle(0), middle(1), middle(0, True), middle(1, True), middle(0, False), middle(1, False)]
    return " ".join(cells) + f" {worst:8.0%}"


TABLES = {
    "shares as fitted to these": lambda card, dtype: share_of_peak(CHIPS[card], dtype).value,
    "one kind left out": left_out,
    "one kind left out, boards of a slot's power by it": of_slot,
    "one kind left out, power caps all": capped,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    shared = os.environ.get("HETERO_PUBLIC_DATA", str(Path(__file__).resolve().parents[2] / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=Path(shared) / "zorse" / "llama_layer_ms.json")
    path = parser.parse_args().data
    if not path.exists():
        print(f"nothing to compare: {path} is not there (llama layer times of Zorse's artifact)")
        return
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries(path):
        groups.setdefault((entry.card, entry.dtype), []).append(entry)
    print(machine())
    print(f"{'':26} median error of:   all     |  one sequence |  2 and more")
    print(f"{'card':13} dtype entries share  fwd    bwd    fwd    bwd    fwd    bwd     worst")
    for title, share_for in TABLES.items():
        print(title)
        held = compared = 0
        for (card, dtype), rows in sorted(groups.items()):
            share = share_for(card, dtype)
            name = f"{CHIPS[card]:13} {dtype:5} {len(rows):7}"
            if share is None:
                print(f"{name}     -  no other kind of its class")
                continue
            found = [(entry, errors(entry, share)) for entry in rows]
            held += all(statistics.median(abs(e[part]) for _, e in found) <= GOAL for part in (0, 1))
            compared += 1
            print(f"{name} {share:5.2f} {row(found)}")
        print(f"within {GOAL:.0%} forward and backward: {held} of {compared}")


if __name__ == "__main__":
    main()
