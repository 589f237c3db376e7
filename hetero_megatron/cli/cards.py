"""``hetero-megatron cards``: what is known about kinds of cards, and who measured it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from hetero_megatron.cli.arguments import ArgumentParser
from hetero_megatron.cli.output import print_json
from hetero_megatron.cluster.card_entries import (
    FACTS,
    HARMLESS,
    PRODUCTS,
    Measurement,
    measured_card,
    measured_rates,
    measurements,
)
from hetero_megatron.cluster.catalogue import CHIPS, GIB, Chip
from hetero_megatron.errors import UserError
from hetero_megatron.predictor.cost.cost_options import share_of_peak
from hetero_megatron.predictor.cost.rates import MEMORY_BANDWIDTH, half_saturation
from hetero_megatron.utils.text import plural

ASSUMED = "assumed: data sheet x share of its class"
MEASURED = "measured by"
COUNTS = {"list": (0, 0), "show": (1, 1), "compare": (2, 8), "contribute": (1, 1), "check": (1, 64)}
WORDS = {
    "list": "no card", "show": "one card", "compare": "two to eight cards",
    "contribute": "one file with rates that calibrate wrote", "check": "files of cluster/cards",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Print a table, or with --json one object; ``contribute`` writes a file, ``check`` reads some."""
    parser = ArgumentParser("cards", "Kinds of cards: data sheets, and what somebody measured of them.")
    parser.add_argument("what", choices=tuple(COUNTS))
    parser.add_argument("names", nargs="*", metavar="CARD", help="one for show, two or more for compare; a cluster\n"
                        "file with rates for contribute, files of cluster/cards for check")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--as", dest="card", metavar="CARD", help="contribute: the card of the catalogue")
    parser.add_argument("--by", metavar="NAME", help="contribute: who measured")
    parser.add_argument("--out", metavar="FILE", help="contribute: where to write (default CARD.yaml); a file of\n"
                        "the same card is added to")  # fmt: skip
    args = parser.parse_args(list(argv))
    least_names, most_names = COUNTS[args.what]
    if not least_names <= len(args.names) <= most_names:
        noun = "file" if args.what in ("contribute", "check") else "card"
        field = noun.upper()
        raise UserError(f"{plural(len(args.names), noun)} for {args.what}", field=field, accepted=WORDS[args.what])
    if args.what != "contribute" and (flag := next((f for f in ("card", "by", "out") if getattr(args, f)), None)):
        flag = "--as" if flag == "card" else f"--{flag}"
        raise UserError("is of contribute only", field=flag, accepted=f"cards {args.what} without it")
    if args.what == "contribute":
        from hetero_megatron.cli.cards_files import contribute

        return contribute(args.names[0], args.card, args.by, args.out, args.json)
    if args.what == "check":
        from hetero_megatron.cli.cards_files import check

        return check(args.names, args.json)
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
    nearest = difflib.get_close_matches(name, list(CHIPS), n=1)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    raise UserError(f"no such card{hint}", field="CARD", value=name, accepted=", ".join(CHIPS))


def facts(chip: Chip) -> dict[str, Any]:
    """What predictions take of it where nothing was calibrated; FLOP/s, bytes and bytes per second. ``measured``: what
    is in ``cluster/cards`` of it."""
    products = {dtype: _products(chip, dtype, peak) for dtype, peak in chip.flops.items()}
    memory = None if chip.memory_bandwidth is None else chip.memory_bandwidth * MEMORY_BANDWIDTH
    measured = measurements(chip, "").get("bytes_per_second")
    return {
        "memory": chip.memory, "bytes_per_second": memory if measured is None else measured.rates["bytes_per_second"],
        "memory_measured_by": None if measured is None else measured.told, "link": chip.link_bandwidth,
        "host": chip.host_bandwidth, "source": chip.source, "vendor": chip.vendor, "products": products,
        "measured": [_measurement(measurement) for measurement in measured_card(chip.name)],
    }  # fmt: skip


def _products(chip: Chip, dtype: str, peak: float) -> dict[str, Any]:
    share, measured = share_of_peak(chip.name, dtype), measurements(chip, dtype)
    rates = {key: rate for key, rate in measured_rates(chip, dtype).items() if key in PRODUCTS}
    reached = rates.get("gemm_flops", peak * share.forward)
    source = measured["gemm_flops"].told if "gemm_flops" in rates else share.source
    return {
        "peak": peak, "share": reached / peak, "reached": reached, "measured_by": source or None,
        "half_at": round(rates.get("gemm_half", half_saturation(peak * share.value))),
    }  # fmt: skip


def _measurement(one: Measurement) -> dict[str, Any]:
    return {"by": one.by, **one.facts, **one.more, "dtype": one.dtype, "rates": dict(one.rates)}


def _list(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"{'card':17} {'memory':>8} {'dtype':>5} {'TFLOP/s':>8} {'share':>5}  share of the peak measured by"]
    for name, card in rows.items():
        for i, (dtype, product) in enumerate(card["products"].items()):
            head = f"{name:17} {card['memory'] / GIB:4.0f} GiB" if i == 0 else " " * 26
            cells = f"{dtype:>5} {product['reached'] / 1e12:8.1f} {product['share']:5.2f}"
            lines.append(f"{head} {cells}  {product['measured_by'] or ASSUMED}")
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
    for name, card in rows.items():
        if card["bytes_per_second"] is not None:
            source = _source(card["memory_measured_by"], f"data sheet x {MEMORY_BANDWIDTH}")
            lines.append(f"    {name}: {source}")
    line("to a card beside it", [card["link"] for card in cards], 1e9, "GB/s")
    for dtype in dict.fromkeys(dtype for card in cards for dtype in card["products"]):
        products = [card["products"].get(dtype) for card in cards]
        line(f"products in {dtype}", [None if x is None else x["reached"] for x in products], 1e12, "TFLOP/s")
        line("  half of that at", [None if x is None else x["half_at"] for x in products], 1, "rows")
        for name, product in zip(rows, products, strict=True):
            if product is not None:
                lines.append(f"    {name}: {product['share']:.2f} of the peak, {_source(product['measured_by'])}")
    lines += [f"data sheet of {name}: {card['source']}" for name, card in rows.items()]
    for name, card in rows.items():
        lines += [line for measurement in card["measured"] for line in _told(name, measurement)]
    return "\n".join(lines)


def _source(by: str | None, otherwise: str = ASSUMED) -> str:
    return f"{MEASURED} {by}" if by else otherwise


def _told(name: str, one: dict[str, Any]) -> list[str]:
    """Who measured what on a card, where and how."""
    rates = [key + (f" ({plural(len(rate), 'row')})" if isinstance(rate, list) else "")
             for key, rate in one["rates"].items()]  # fmt: skip
    lines = [f"{name}, {one['dtype']}, {MEASURED} {one['by']}, {one['when']}: {', '.join(rates)}"]
    return lines + [f"    {key}: {one[key]}" for key in (*FACTS, *HARMLESS) if key in one and key != "when"]
