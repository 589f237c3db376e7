"""Measured cards: the files of ``cluster/cards/``, one for each chip of the catalogue that somebody measured.

docs/calibrate.md says how to add one. A file holds measurements of one chip, each with its facts (who, when, on what,
with what) and rates of one dtype as a cluster file has them. What physics allows is checked by
:mod:`~hetero_megatron.predictor.cost.card_physics`, when an entry is written and by a test over all files.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from hetero_megatron.cluster.catalogue import CHIPS, DTYPES, Chip, card_file
from hetero_megatron.cluster.rates_section import TABLES, rows_on_lines
from hetero_megatron.errors import UserError
from hetero_megatron.utils.text import did_you_mean
from hetero_megatron.utils.yaml_document import Entry, join, parse_document, read_document

SECTIONS = (*DTYPES, "fp8_tensorwise", "fp8_blockwise")
PRODUCTS = ("gemm_flops", "gemm_half", "gemm", "attention_flops")  # which are told by each other

# Of a measurement, in the order in which they are written. The facts are also what ``calibrate`` writes as
# ``measured:`` beside the rates of a cluster file.
FACTS = {
    "when": "a date, as 2026-11-28", "vendor": "of the device, as docs/chips.md has its chip",
    "hardware": "the device as its driver calls it, how many, its host", "software": "versions of torch and the driver",
    "command": "that measured", "shapes": "of what was timed",
}  # fmt: skip
HARMLESS = {"source": "a page or file with more", "note": "anything"}  # printed, and nothing else
KEYS = ("by", *FACTS, *HARMLESS, "dtype", "rates")
REFUSED = {  # of what a cluster file has
    "waiting": "is of ranks that wait for each other, not of a card",
    "message_seconds": "is of a cluster's links, not of a card", "measured": "the facts stand beside the rates",
}  # fmt: skip


@dataclass(frozen=True)
class Measurement:
    """``rates``: as below ``<dtype>:`` in a cluster file; ``entry``: the same, with the place of each value."""

    card: str
    by: str
    facts: Mapping[str, str]
    dtype: str
    rates: Mapping[str, Any]
    entry: Entry
    more: Mapping[str, str]

    @property
    def told(self) -> str:
        return f"{self.by}, {self.facts['when']}"


def read_card(path: Path) -> tuple[Measurement, ...]:
    """The measurements of a file.

    Raises:
        UserError: unknown, missing or malformed keys, an unknown chip or dtype, the same rate twice.
    """
    return card_of(read_document(path))


def card_of(document: Entry) -> tuple[Measurement, ...]:
    keys = document.mapping(("card", "measured"), required=("card", "measured"))
    card = known_card(keys["card"])
    measurements = tuple(_measurement(card, entry) for entry in keys["measured"].items())
    if not measurements:
        keys["measured"].fail("no measurement", accepted="a list of them")
    _refuse_twice(measurements)
    return measurements


def known_card(entry: Entry) -> str:
    name = entry.text()
    if name not in CHIPS:
        entry.fail(f"no such card{did_you_mean(name, CHIPS)}", accepted=", ".join(CHIPS))
    return name


def read_facts(entry: Entry, keys: Mapping[str, Entry]) -> dict[str, str]:
    """The facts of a measurement, each of them given. ``entry``: that has them."""
    for name, means in FACTS.items():
        if name not in keys:
            raise UserError("a fact is missing", field=join(entry.path, name), where=entry.where, accepted=means)
    facts = {name: keys[name].text() for name in FACTS}
    try:
        iso_date = re.fullmatch(r"\d{4}-\d\d-\d\d", facts["when"], re.ASCII)
        datetime.date.fromisoformat(facts["when"] if iso_date else "")
    except ValueError:
        keys["when"].fail("no date", accepted=FACTS["when"])
    return facts


def require_vendor(entry: Entry, card: str) -> None:
    """``entry``: the vendor of the device. UserError: a processor's, or an emulated one, or another's."""
    vendor = CHIPS[card].vendor
    if entry.value != vendor:
        entry.fail(f"not measured on {card}, which is of {vendor}", accepted=f"{vendor}, measured on that card")


def _measurement(card: str, entry: Entry) -> Measurement:
    keys = entry.mapping(KEYS)
    for key in ("by", "dtype", "rates"):
        if key not in keys:
            raise UserError(f"key {key!r} is missing", field=f"{entry.path}.{key}", where=entry.where)
    facts = read_facts(entry, keys)
    require_vendor(keys["vendor"], card)
    dtype, rates = keys["dtype"].choice(SECTIONS), keys["rates"].any_mapping()
    if not rates:
        keys["rates"].fail("no rates", accepted="rates as in a cluster file")
    for key, why in REFUSED.items():
        if key in rates:
            rates[key].fail(why, accepted="rates without it")
    notes = {key: keys[key].text() for key in HARMLESS if key in keys}
    return Measurement(card, keys["by"].text(), facts, dtype, keys["rates"].plain(), keys["rates"], notes)


def _refuse_twice(card_measurements: Sequence[Measurement]) -> None:
    measured_by: dict[tuple[str, str, str], Measurement] = {}
    for measurement in card_measurements:
        for key, value in measurement.entry.value.items():
            for row in value.items() if key in TABLES else [value]:
                sizes = json.dumps([_size(cell) for cell in row.items()[: -TABLES[key][1]]]) if key in TABLES else ""
                rate = measurement.dtype, key, sizes
                if rate in measured_by:
                    row.fail(
                        f"measured twice in {measurement.dtype}, before by {measured_by[rate].told}",
                        accepted="one of the two",
                    )
                measured_by[rate] = measurement


def _size(cell: Entry) -> Any:
    return float(cell.value) if isinstance(cell.value, int) and abs(cell.value) < 2**53 else cell.plain()


@lru_cache(maxsize=256)
def measured_card(card: str) -> tuple[Measurement, ...]:
    """What is in ``cluster/cards/`` about a chip of the catalogue."""
    path = card_file(card)
    return read_card(path) if path is not None else ()


def measurements(chip: Chip, section: str) -> dict[str, Measurement]:
    """By rate, who measured it on this chip; nothing on emulated chips, and where the cluster file says that the chip
    is another than the catalogue's. Memory knows no dtype: its rate counts in all where it was measured in one."""
    dtype = "fp8" if section.startswith("fp8_") else section
    catalogued = CHIPS.get(chip.name)
    if chip.speed is not None or catalogued is None or catalogued.memory_bandwidth != chip.memory_bandwidth:
        return {}
    if catalogued.flops.get(dtype) != chip.flops.get(dtype):
        return {}
    of_card = measured_card(chip.name)
    measurers = dict[str, Measurement]()
    for measurement in of_card:
        if "bytes_per_second" in measurement.rates:
            measurers.setdefault("bytes_per_second", measurement)
    for measurement in of_card:
        if measurement.dtype == section:
            measurers |= dict.fromkeys(measurement.rates, measurement)
    return measurers


def measured_rates(chip: Chip, section: str) -> dict[str, Any]:
    """The same as rates below ``<dtype>:`` of a cluster file: tables are those of all measurements together."""
    out: dict[str, Any] = {}
    for key, last in measurements(chip, section).items():
        of_rate = [
            measurement
            for measurement in measured_card(chip.name)
            if measurement.dtype == section and key in measurement.rates
        ]
        out[key] = (
            [row for measurement in of_rate for row in measurement.rates[key]] if key in TABLES else last.rates[key]
        )
    return out


def card_text(card: str, added: Sequence[Mapping[str, Any]], before: str = "", file: str = "") -> str:
    """The text of a file with these measurements, after those that ``before`` has (checked, comments kept).

    Raises:
        UserError: a rate that ``before`` has too, or another card's file.
    """
    if before:
        keys = parse_document(before, file).mapping(("card", "measured"), required=("card", "measured"))
        if keys["card"].value != card:
            keys["card"].fail(f"the file is of another card than {card}", accepted=f"a file of its own: {card}.yaml")
    begin = before if before.endswith("\n") or not before else before + "\n"
    text = (begin or f"card: {card}\nmeasured:\n") + _items(added)
    card_of(parse_document(text, file))
    return text


def _items(added: Sequence[Mapping[str, Any]]) -> str:
    """List items below ``measured:``, two columns in."""
    lines = yaml.dump(list(map(dict, added)), Dumper=rows_on_lines(), sort_keys=False, width=4096, allow_unicode=True)
    return "".join(f"  {line}\n" for line in lines.splitlines())
