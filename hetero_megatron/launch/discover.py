"""``cluster discover``: a cluster file made by asking hosts what they have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hetero_megatron.cluster.catalogue import CHIPS, DEVICE_NAMES
from hetero_megatron.errors import UserError
from hetero_megatron.monitoring.log_fields import array, integer, mapping, number, record, require, text
from hetero_megatron.utils.files import require_text

GIB = 2**30
# What torch calls a chip, where the words of the catalogue's name do not stand in it.
_SAME = {"sxm2": "sxm", "sxm4": "sxm", "sxm5": "sxm", "hbm3": "", "hbm3e": ""}
_VIRTUAL = re.compile(r"lo|docker|veth|br-|virbr|cali|flannel|tun|tap|dummy|sit|gre|erspan|ip6|ip_|teql")
_HOST = record(
    {
        "hostname": text, "accelerator": text, "cores": integer(1, 1 << 20), "memory": number(0),
        "chips": array(record({"name": text, "memory": number(0)})), "interfaces": array(text),
    },
    {"measured": mapping(number(0))},
)  # fmt: skip


def catalogue_name(name: str, memory: float) -> str | None:
    """The chip of the catalogue that a device with this name and so many bytes is; None: none for sure.

    All words of the catalogue's name but its size must be in the device's (``NVIDIA A100-SXM4-80GB`` is A100-80-SXM),
    and its memory must be within 12 %.
    """
    for part, chip_name in DEVICE_NAMES.items():
        if part in name and _same_size(memory, chip_name):
            return chip_name
    words = _words(name)
    candidates = []
    for chip in CHIPS.values():
        name_words = {word for word in _words(chip.name) if not word.isdigit()}
        sizes = {word for word in _words(chip.name) if word.isdigit()}
        device_words = words | {str(round(chip.memory / GIB))}
        if name_words <= words and sizes <= device_words and _same_size(memory, chip.name):
            candidates.append((len(name_words) + len(sizes), chip.name))
    candidates.sort(reverse=True)
    return candidates[0][1] if candidates and (len(candidates) == 1 or candidates[0][0] > candidates[1][0]) else None


def _same_size(memory: float, chip: str) -> bool:
    """Whether a device with so many bytes may be the chip; drivers keep some."""
    return 0.88 <= memory / CHIPS[chip].memory <= 1.03


def _words(name: str) -> set[str]:
    parts = re.findall(r"[a-z]*\d+[a-z]{0,3}|[a-z]+", name.lower().replace("gb", " "))
    return {_SAME.get(word, word) for word in parts} - {""}


def cluster_document(answers: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The content of a cluster file, and what its reader should know.

    Args:
        answers: of ``launch.facts``, by address, in the order of the file.

    Raises:
        UserError: a host has no chip that a rank could use, or answers something else.
    """
    notices: list[str] = []
    nodes: list[dict[str, Any]] = []
    chips: dict[str, dict[str, Any]] = {}
    for address, host_facts in answers.items():
        require(dict(host_facts), _HOST, "what a host says of itself", address)
        chip, count = _chip(address, host_facts, chips, notices)
        interface = _interface(host_facts["interfaces"])
        last = nodes[-1] if nodes else None
        settings_of_node = {"chip": chip, "chips_per_node": count, "interface": interface}
        if last is not None and all(last.get(key) == value for key, value in settings_of_node.items()):
            last["hosts"].append(address)
            last["count"] += 1
        else:
            name = require_text(str(host_facts["hostname"]), address)
            nodes.append({"name": name, "count": 1, **settings_of_node, "hosts": [address]})
    taken_names: set[str] = set()
    for node in nodes:
        node["name"] = _name(node, taken_names)
        taken_names.add(node["name"])
        if not node["interface"]:
            del node["interface"]
    document: dict[str, Any] = {"version": 1, "nodes": nodes}
    if chips:
        document["chips"] = chips
    if len(answers) > 1:
        notices.append("links: are not in it: `hetero-megatron calibrate` on all hosts measures chips and links")
    return document, notices


def _chip(
    address: str, answer: Mapping[str, Any], chips: dict[str, dict[str, Any]], notices: list[str]
) -> tuple[str, int]:
    """(name in the cluster file, number) of a host's chips."""
    devices = answer["chips"]
    if not devices:
        name = f"cpu-{answer['cores']}-cores"
        chips.setdefault(name, _described(answer["memory"], answer))
        notices.append(f"{address} has no accelerator: one rank on its CPU")
        return name, 1
    kinds = {(device["name"], round(device["memory"] / GIB)) for device in devices}
    if len(kinds) > 1:
        kinds_text = ", ".join(sorted(f"{name} ({size} GiB)" for name, size in kinds))
        raise UserError("its chips are not alike", field="host", value=address,
                        accepted=f"hosts whose chips are of one type (here: {kinds_text})")  # fmt: skip
    first = devices[0]
    chip_name = catalogue_name(first["name"], first["memory"])
    if chip_name is not None:
        return chip_name, len(devices)
    name = re.sub(r"[^A-Za-z0-9.-]+", "-", first["name"]).strip("-") or "chip"
    if name not in chips:
        chips[name] = _described(first["memory"], answer)
        problem = "is not in the catalogue (docs/chips.md): its rates were measured in half a second"
        notices.append(f"{first['name']!r} of {address} {problem}")
    return name, len(devices)


def _described(memory: float, answer: Mapping[str, Any]) -> dict[str, Any]:
    """A chip that the catalogue lacks, by what the host measured."""
    chip: dict[str, Any] = {"memory": f"{memory / GIB:.4g} GiB"}
    measured = answer.get("measured", {})
    flops = {name: float(f"{rate / 1e12:.3g}") for name, rate in measured.items() if name != "copy" and rate}
    if flops:
        chip |= {"tflops": flops, "source": "measured by cluster discover"}
    if measured.get("copy"):
        chip["memory_bandwidth"] = f"{measured['copy'] / 1e9:.3g} GB/s"
    return chip


def _interface(interfaces: Sequence[str]) -> str:
    """The one for traffic between hosts, if there is no choice."""
    real = [name for name in interfaces if not _VIRTUAL.match(name)]
    return real[0] if len(real) == 1 else ""


def _name(node: Mapping[str, Any], taken: set[str]) -> str:
    stem = str(node["name"]) if node["count"] == 1 else str(node["chip"]).lower()
    names = (stem, *(f"{stem}.{i}" for i in range(2, 1 << 20)))
    return next(name for name in names if name not in taken)
