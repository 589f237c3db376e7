"""Faults in a running testbed: kill or freeze a rank, cut or slow a link, slow a chip.

Ranks that pace themselves (chips: clock or soft, links: paced) read ``control.json`` once a second; other faults act on
kernel objects from here.
"""

from __future__ import annotations

import os
import signal
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.testbed import namespaces, shaping
from hetero_megatron.testbed.process import alive, signal_all
from hetero_megatron.testbed.state import Testbed
from hetero_megatron.utils.text import format_rate

Node = dict[str, Any]


def kill_rank(testbed: Testbed, rank: int) -> str:
    """SIGKILL to the rank and its children."""
    signal_all([_pid(testbed, rank)], signal.SIGKILL, group=True)
    return f"rank {rank} was killed"


def freeze_rank(testbed: Testbed, rank: int) -> str:
    """SIGSTOP: the rank stays but does not answer."""
    signal_all([_pid(testbed, rank)], signal.SIGSTOP, group=True)
    return f"rank {rank} is frozen"


def thaw_rank(testbed: Testbed, rank: int) -> str:
    signal_all([_pid(testbed, rank)], signal.SIGCONT, group=True)
    return f"rank {rank} goes on"


def slow_chip(testbed: Testbed, rank: int, speed: float) -> str:
    """Change the speed of one rank (1.0 = one core)."""
    record = testbed.record()
    if not 0 < speed <= 1:
        raise UserError("out of range", field="speed", value=speed, accepted="above 0, at most 1.0 (one core)")
    _rank(record, rank)
    if record["chips"] == "none":
        raise UserError("the chips of this testbed have no emulated speed", field="--chips", value="none",
                        accepted="a testbed with --chips clock or soft")  # fmt: skip
    with testbed.control() as control:
        control["speed"][str(rank)] = speed
    return f"rank {rank} has speed {speed:g}"


def slow_link(testbed: Testbed, a: str, b: str, rate: float) -> str:
    """Change the rate of the link between two nodes (bytes/s, both directions)."""
    record, ends = _link(testbed, a, b)
    if record["links"] == "paced":
        _pace(testbed, record, ends, rate)
    else:
        for near, far in ((0, 1), (1, 0)):
            rates = ends[near]["rates"]
            if ends[far]["name"] not in rates:
                raise UserError("this link is not shaped", field="link", value=f"{a} {b}", accepted=", ".join(rates))
            if rate > max(rates.values()):
                raise UserError("faster than the node's fastest link", field="rate", value=rate,
                                accepted=f"at most {format_rate(max(rates.values()))}")  # fmt: skip
        for near, far in ((0, 1), (1, 0)):
            _in_node(ends[near], "tc", shaping.change_command(ends[far]["index"], rate))
    return f"the link between {a} and {b} carries {format_rate(rate)}"


def cut_link(testbed: Testbed, a: str, b: str) -> str:
    """Drop all packets between two nodes silently."""
    record, ends = _link(testbed, a, b)
    if record["links"] == "paced":
        _pace(testbed, record, ends, 0.0)
    else:
        for near, far in ((0, 1), (1, 0)):
            _in_node(ends[near], "ip", f"route replace blackhole {ends[far]['address']}/32")
    return f"the link between {a} and {b} is cut"


def mend_link(testbed: Testbed, a: str, b: str) -> str:
    """Undo cut and slow: the link has the cluster file's rate again."""
    record, ends = _link(testbed, a, b)
    if record["links"] == "paced":
        _pace(testbed, record, ends, None)
        return f"the link between {a} and {b} is as before"
    for near, far in ((0, 1), (1, 0)):
        try:
            _in_node(ends[near], "ip", f"route del blackhole {ends[far]['address']}/32")
        except RuntimeError as error:
            if "No such process" not in str(error):  # it was not cut
                raise
        if ends[far]["name"] in ends[near]["rates"]:
            rate = ends[near]["rates"][ends[far]["name"]]
            _in_node(ends[near], "tc", shaping.change_command(ends[far]["index"], rate))
    return f"the link between {a} and {b} is as before"


def _pace(testbed: Testbed, record: dict[str, Any], ends: list[Node], rate: float | None) -> None:
    """``rate`` None: the cluster file's."""
    ranks = [_ranks_of(record, end) for end in ends]
    pairs = [(x, y) for x in ranks[0] for y in ranks[1]] + [(y, x) for x in ranks[0] for y in ranks[1]]
    with testbed.control() as control:
        other_pairs = [entry for entry in control["rate"] if (entry[0], entry[1]) not in pairs]
        control["rate"] = other_pairs + ([] if rate is None else [[x, y, rate] for x, y in pairs])


def _rank(record: dict[str, Any], rank: int) -> dict[str, Any]:
    ranks = record.get("ranks", [])
    if not 0 <= rank < len(ranks):
        raise UserError("no such rank", field="rank", value=rank, accepted=f"0 to {len(ranks) - 1}")
    return dict(ranks[rank])


def _pid(testbed: Testbed, rank: int) -> int:
    entry = _rank(testbed.record(), rank)
    if entry["pid"] is None or not alive(entry["pid"], entry["start"]):
        raise UserError("this rank does not run (any more)", field="rank", value=rank)
    return int(entry["pid"])


def _node(record: dict[str, Any], name: str) -> Node:
    names = [node["name"] for node in record.get("nodes", [])]
    if name not in names:
        raise UserError("no such node", field="node", value=name, accepted=", ".join(names))
    return {**record["nodes"][names.index(name)], "index": names.index(name)}


def _ranks_of(record: dict[str, Any], node: Node) -> list[int]:
    return [entry["rank"] for entry in record["ranks"] if entry["node"] == node["name"]]


def _link(testbed: Testbed, a: str, b: str) -> tuple[dict[str, Any], list[Node]]:
    """(record of the testbed, the two nodes) of an emulated link."""
    record = testbed.record()
    ends = [_node(record, a), _node(record, b)]
    if a == b:
        raise UserError("a link is between two nodes", field="node", value=a)
    if record["links"] == "none":
        raise UserError("the links of this testbed are those of the machine", field="--links", value="none",
                        accepted="a testbed with --links namespaces or paced")  # fmt: skip
    return record, ends


def _in_node(node: Node, name: str, line: str) -> None:
    fd = os.open(node["namespace"], os.O_RDONLY)
    try:
        namespaces.tool(name, [line], fd)
    finally:
        os.close(fd)
