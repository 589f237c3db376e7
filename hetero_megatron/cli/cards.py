"""``hetero-megatron cards``: what is known about kinds of cards, and who measured it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from hetero_megatron.cli.arguments import ArgumentParser
from hetero_megatron.cli.output import print_json
from hetero_megatron.cluster.catalogue import CHIPS, GIB, Chip
from hetero_megatron.errors import UserError
from hetero_megatron.predictor.cost.efficiency import share_of_peak
from hetero_megatron.predictor.cost.rates import MEMORY_BANDWIDTH, half_saturation
from hetero_megatron.utils.text import plural

ASSUMED = "assumed"


def main(argv: Sequence[str]) -> int:
    """Print a table, or with --json one object."""
    parser = ArgumentParser("cards", "Kinds of cards: data sheets, and the share of them that was measured.")
    parser.add_argument("what", choices=("list", "show", "compare"))
    parser.add_argument("names", nargs="*", metavar="CARD", help="one for show, two or more for compare")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args(list(argv))
    least, most = {"list": (0, 0), "show": (1, 1), "compare": (2, 8)}[args.what]
    if not least <= len(args.names) <= most:
        accepted = {"list": "no card", "show": "one card", "compare": "two to eight cards"}[args.what]
        raise UserError(f"{plural(len(args.names), 'card')} for {args.what}", field="CARD", accepted=accepted)
    chips = [find(name) for name in args.names] or list(CHIPS.values())
    rows = {chip.name: facts(chip) for chip in chips}
    if args.json:
        print_json(rows)
    elif args.what == "list":
        print(_list(rows))
    else:
        print(_compared(rows))
    return 0


def find(name: str) -> Chip:
    """A card of the catalogue. UserError: there is none, with the nearest."""
    if name in CHIPS:
        return CHIPS[name]
    near = difflib.get_close_matches(name, list(CHIPS), n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(f"no such card{hint}", field="CARD", value=name, accepted=", ".join(CHIPS))


def facts(chip: Chip) -> dict[str, Any]:
    """What predictions take of it where nothing was calibrated; FLOP/s, bytes and bytes per second."""
    products = {}
    for dtype, peak in chip.flops.items():
        share = share_of_peak(chip.name, dtype)
        products[dtype] = {
            "peak": peak, "share": share.value, "reached": peak * share.value, "measured_by": share.source or None,
            "half_at": round(half_saturation(peak * share.value)),
        }  # fmt: skip
    memory = None if chip.memory_bandwidth is None else chip.memory_bandwidth * MEMORY_BANDWIDTH
    return {
        "memory": chip.memory, "bytes_per_second": memory, "link": chip.link_bandwidth, "host": chip.host_bandwidth,
        "source": chip.source, "vendor": chip.vendor, "products": products,
    }  # fmt: skip


def _list(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'card':17} {'memory':>8} {'dtype':>5} {'TFLOP/s':>8} {'share':>5}  share of the peak measured by"]
    for name, card in rows.items():
        for i, (dtype, of) in enumerate(card["products"].items()):
            head = f"{name:17} {card['memory'] / GIB:4.0f} GiB" if i == 0 else " " * 26
            cells = f"{dtype:>5} {of['reached'] / 1e12:8.1f} {of['share']:5.2f}"
            lines.append(f"{head} {cells}  {of['measured_by'] or ASSUMED}")
        if not card["products"]:
            lines.append(f"{name:17} {card['memory'] / GIB:4.0f} GiB  nothing is known of its products")
    return "\n".join(lines)


def _compared(rows: dict[str, dict[str, Any]]) -> str:
    """A column for each card, the others in relation to the first."""
    lines = ["  ".join([f"{'':22}", *(f"{name:>20}" for name in rows)])]

    def line(title: str, values: list[float | None], unit: float, name: str) -> None:
        first, cells = values[0], []
        for i, value in enumerate(values):
            times = f" ({value / first:.2f}x)" if i and value and first else ""
            cells.append(f"{'-' if value is None else f'{value / unit:,.4g} {name}{times}':>20}")
        lines.append("  ".join([f"{title:22}", *cells]))

    cards = list(rows.values())
    line("memory", [card["memory"] for card in cards], GIB, "GiB")
    line("memory bandwidth", [card["bytes_per_second"] for card in cards], 1e9, "GB/s")
    line("to a card beside it", [card["link"] for card in cards], 1e9, "GB/s")
    for dtype in dict.fromkeys(dtype for card in cards for dtype in card["products"]):
        of = [card["products"].get(dtype) for card in cards]
        line(f"products in {dtype}", [None if x is None else x["reached"] for x in of], 1e12, "TFLOP/s")
        line("  half of that at", [None if x is None else x["half_at"] for x in of], 1, "rows")
        for name, found in zip(rows, of, strict=True):
            if found is not None:
                lines.append(f"    {name}: {found['share']:.2f} of the peak, {found['measured_by'] or ASSUMED}")
    return "\n".join([*lines, *(f"data sheet of {name}: {card['source']}" for name, card in rows.items())])
