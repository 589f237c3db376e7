"""``hetero-megatron cards contribute`` and ``check``: files of ``cluster/cards``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetero_megatron.cli.output import print_json, write_text
from hetero_megatron.cluster import CHIPS, load_cluster
from hetero_megatron.cluster.card_entries import (
    FACTS,
    REFUSED,
    SECTIONS,
    Measurement,
    card_text,
    known_card,
    read_card,
    read_facts,
    require_vendor,
)
from hetero_megatron.cluster.rates_section import read_rates
from hetero_megatron.errors import UserError
from hetero_megatron.predictor.cost.card_physics import check_card
from hetero_megatron.utils.files import read_text
from hetero_megatron.utils.text import did_you_mean, plural
from hetero_megatron.utils.yaml_document import Entry, read_document

WHERE = "the command line"


def check(files: Sequence[str], as_json: bool) -> int:
    """Read entries; UserError: of the first thing that is wrong."""
    entries_by_file = {file: _checked(read_card(Path(file)), Path(file)) for file in files}
    if as_json:
        print_json({file: len(entries) for file, entries in entries_by_file.items()})
    else:
        for file, entries in entries_by_file.items():
            print(f"{file}: {entries[0].card}, {plural(len(entries), 'measurement')}, within its data sheet")
    return 0


def _checked(entries: Sequence[Measurement], file: Path) -> Sequence[Measurement]:
    for measurement in entries:
        check_card(measurement)
    if file.stem != entries[0].card:
        raise UserError("a file is called as its card", field="FILE", value=str(file),
                        accepted=f"{entries[0].card}.yaml")  # fmt: skip
    return entries


def contribute(file: str, card: str | None, by: str | None, out: str | None, as_json: bool) -> int:
    """Write the entry of one card from the rates of a cluster file, or add it to the card's file."""
    for flag, value, accepted in (("--as", card, f"one of {', '.join(CHIPS)}"), ("--by", by, "a name, or a project")):
        if value is None:
            raise UserError("says whose entry it is", field=flag, accepted=accepted)
    name, contributor = known_card(Entry(card, "--as", WHERE)), Entry(by, "--by", WHERE).text()
    sections = _sections(file, name)
    entries = [_item(entry, name, contributor, dtype) for dtype, entry in sections.items()]
    omitted = {key for entry in sections.values() for key in entry.value if key in REFUSED} - {"measured"}
    target = Path(out or f"{name}.yaml")
    if target.stem != name:
        raise UserError("a file is called as its card", field="--out", value=out, accepted=f"{name}.yaml")
    text = card_text(name, entries, read_text(target, "--out") if target.is_file() else "", str(target))
    write_text(target, "--out", text)
    if as_json:
        print_json(
            {"file": str(target), "card": name, "dtypes": [item["dtype"] for item in entries], "left": sorted(omitted)}
        )
        return 0
    print(f"{target}: {name} in {', '.join(item['dtype'] for item in entries)}, measured by {contributor}")
    if omitted:
        print(f"left out, as it is of the cluster: {', '.join(sorted(omitted))}")
    print("a pull request adds it to hetero_megatron/cluster/cards/")
    return 0


def _item(given: Entry, card: str, by: str, dtype: str) -> Mapping[str, Any]:
    """One measurement as it is written; ``given``: rates of the dtype, with the facts of their calibration."""
    if dtype not in SECTIONS:
        given.fail(f"no such dtype{did_you_mean(dtype, SECTIONS)}", accepted=", ".join(SECTIONS))
    if "measured" not in given.value:
        accepted = f"beside the rates measured: {{{', '.join(FACTS)}}}, as calibrate writes it"
        problem = "does not say on what, when and how it was measured"
        raise UserError(problem, field=given.path, where=given.where, accepted=accepted)
    entry = given.value["measured"]
    keys = entry.mapping(tuple(FACTS))
    facts = read_facts(entry, keys)
    require_vendor(keys["vendor"], card)
    allowed = replace(given, value={key: value for key, value in given.value.items() if key not in REFUSED})
    if not allowed.value:
        raise UserError("no rates", field=given.path, where=given.where, accepted="those that calibrate wrote")
    rates = allowed.plain()
    check_card(Measurement(card, by, facts, dtype, rates, allowed, {}))
    return {"by": by, **facts, "dtype": dtype, "rates": rates}


def _sections(file: str, card: str) -> Mapping[str, Entry]:
    """By dtype, the rates that a file has of a card: those of the chip of this name, or of its only chip.

    Raises:
        UserError: a malformed file, no rates, several chips with other names, an emulated one.
    """
    document = read_document(file)
    keys = document.any_mapping()
    chips: dict[str, dict[str, Entry]] = {}
    described = keys["chips"].any_mapping() if "chips" in keys else {}
    if "nodes" in keys:
        load_cluster(file)
        for name, entry in described.items():
            if "rates" in entry.value:
                chips.setdefault(name, {}).update(entry.value["rates"].any_mapping())
    section = keys.get("rates", None if "nodes" in keys else document)
    if section is not None:
        read_rates(section)
        for name, entry in (section.value["chips"].value if "chips" in section.value else {}).items():
            chips.setdefault(name, {}).update(entry.any_mapping())
    chips = {name: {d: e for d, e in entries.items() if e.any_mapping()} for name, entries in chips.items()}
    chips = {name: entries for name, entries in chips.items() if entries}
    if not chips:
        raise UserError("holds no rates of a chip", field="FILE", value=file, accepted="a file that calibrate wrote")
    chip_name = card if card in chips else next(iter(chips))
    if chip_name != card and (len(chips) > 1 or chip_name in CHIPS):
        raise UserError(f"the file has rates of {', '.join(chips)}", field="--as", value=card, where=file,
                        accepted=f"one of these, or a file with rates of {card}")  # fmt: skip
    if "nodes" in keys and chip_name in described and "emulate" in described[chip_name].value:
        described[chip_name].value["emulate"].fail("measured on an emulated chip", accepted="rates of real cards")
    return chips[chip_name]
