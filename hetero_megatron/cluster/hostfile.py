"""A typed host file, as FlagScale and DeepSpeed write it, read as a cluster file.

    10.0.0.1 slots=8 type=A100-80-SXM
    10.0.0.2 slots=8 type=H20

``type`` is a chip of the catalogue (or of ``chips:`` in a cluster file made from it). Hosts in a row with equal slots
and types are one node group. It says nothing about links and rates: calibration adds those to a cluster file.
"""

from __future__ import annotations

import os
import re
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import read_text
from hetero_megatron.utils.yaml_document import Entry, from_data, read_document

ACCEPTED = "HOST slots=8 type=A100-80-SXM (a chip of docs/chips.md)"
_FIRST = re.compile(r"\s*(#[^\n]*\n\s*)*[^\s:{\[#]+[ \t]+(slots|type)=")


def read_cluster_document(path: str | os.PathLike[str]) -> Entry:
    """The document of a cluster file or of a host file."""
    text = read_text(path)
    return parse_host_file(text, str(path)) if is_host_file(text) else read_document(path)


def is_host_file(text: str) -> bool:
    """Whether its first line is ``HOST slots=… type=…``."""
    return _FIRST.match(text) is not None


def parse_host_file(text: str, file: str = "") -> Entry:
    """The cluster file that says the same.

    Raises:
        UserError: a line is none of a host file, or a host is there twice.
    """
    nodes: list[dict[str, Any]] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{file}:{number}" if file else f"line {number}"
        host, slots, chip = _host(words, where)
        if host in seen:
            problem = f"two hosts have this name (line {seen[host]} is the other)"
            raise UserError(problem, field="host", value=host, accepted="each host once", where=where)
        seen[host] = number
        last = nodes[-1] if nodes else None
        if last is not None and (last["chip"], last["chips_per_node"]) == (chip, slots):
            last["hosts"].append(host)
        else:
            nodes.append({"name": "", "chip": chip, "chips_per_node": slots, "hosts": [host]})
    for index, node in enumerate(nodes):
        node["count"] = len(node["hosts"])
        node["name"] = _name(node, [other["name"] for other in nodes[:index]])
    return from_data({"version": 1, "nodes": nodes}, "", file)


def _host(words: list[str], where: str) -> tuple[str, int, str]:
    """(host, slots, chip) of a line."""
    host, options = words[0], dict(word.partition("=")[::2] for word in words[1:])
    for name in options:
        if name not in ("slots", "type"):
            problem = "unknown key of a host file"
            raise UserError(problem, field=name, value=options[name], accepted=ACCEPTED, where=where)
    for name in ("slots", "type"):
        if not options.get(name):
            raise UserError(f"{name}= is missing", field="host", value=host, accepted=ACCEPTED, where=where)
    slots = options["slots"]
    if not re.fullmatch(r"[0-9]{1,6}", slots) or int(slots) < 1:
        raise UserError("is not a number of chips", field="slots", value=slots, accepted="1 or more", where=where)
    return host, int(slots), options["type"]


def _name(node: dict[str, Any], taken: list[str]) -> str:
    """Of a group: its host's, if it has one; else its chip's in small letters."""
    stem = str(node["hosts"][0] if node["count"] == 1 else node["chip"].lower())
    return next(name for name in (stem, *(f"{stem}.{i}" for i in range(2, 1 << 20))) if name not in taken)
