"""The ``rates:`` section of a cluster file: read, merged, written without changing the rest, and as text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hetero_megatron.cluster.hosts import is_host_file, parse_host_file
from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import parse_json, read_text
from hetero_megatron.utils.outputs import write_text
from hetero_megatron.utils.yaml_document import Entry, QuotingDumper

LEAST, MOST = 1e-30, 1e30
# LayerRows of the cost model
MODEL_TABLES = (
    "layers", "embed", "head", "split_layers", "split_head", "waiting", "elementwise", "selective", "decode_layers",
    "decode_head",
)  # fmt: skip
TABLES = {  # of a chip's rates: (columns that say what was timed, columns of seconds) of a row
    "gemm": (3, 1), "gemm_backward": (3, 2), "attention": (3, 2), "optimizer": (1, 1), "visits": (3, 2),
    "newton_schulz": (2, 1),
    "experts": (2, 10), **dict.fromkeys(MODEL_TABLES, (4, 2)),
}  # fmt: skip


def read_rates(entry: Entry) -> dict[str, Any]:
    """``{chips: {name: {dtype: {…}}}, links: [{…}]}``, both optional; values are checked where they are used.

    Raises:
        UserError: another structure.
    """
    keys = entry.mapping(("chips", "links"))
    for dtypes in keys["chips"].any_mapping().values() if "chips" in keys else ():
        for rows in dtypes.any_mapping().values():
            rows.any_mapping()
    for link in keys["links"].items() if "links" in keys else ():
        link.any_mapping()
    check_numbers(entry)
    return dict(entry.plain())


def check_numbers(entry: Entry) -> None:
    """Refuse implausible measured rates, which could overflow."""
    if isinstance(entry.value, list | dict):
        for child in entry.value if isinstance(entry.value, list) else entry.value.values():
            check_numbers(child)
    elif isinstance(entry.value, int | float) and not isinstance(entry.value, bool):
        size = abs(entry.value)
        if not (size == 0 or LEAST <= size <= MOST):
            entry.fail("out of range", accepted=f"0, or a number between {LEAST:g} and {MOST:g}")


def merge_rates(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """``new`` over ``old``: by chip, dtype and key; in tables by what was timed (model, shape, TP degree), so that
    calibrations of other shapes accumulate; measured links replace links with the same ends."""
    chips = {name: dict(by_dtype) for name, by_dtype in old.get("chips", {}).items()}
    for name, by_dtype in new.get("chips", {}).items():
        for dtype, rows in by_dtype.items():
            merged = chips.setdefault(name, {})
            known_rows = merged.get(dtype, {})
            merged[dtype] = {
                **known_rows,
                **{key: _merge_value(key, known_rows.get(key), value) for key, value in rows.items()},
            }
    links = {_ends(link): link for link in [*old.get("links", []), *new.get("links", [])]}
    return {"chips": chips, **({"links": list(links.values())} if links else {})}


def _merge_value(key: str, old: Any, new: Any) -> Any:
    if key not in TABLES or not isinstance(old, list) or not isinstance(new, list):
        return new
    return list({json.dumps(row[: -TABLES[key][1]]): row for row in [*old, *new]}.values())


def _ends(link: Mapping[str, Any]) -> str:
    return json.dumps({k: link[k] for k in ("within", "between", "from", "to") if k in link}, sort_keys=True)


def write_rates(cluster_file: str | os.PathLike[str], rates: Mapping[str, Any], out: str | os.PathLike[str]) -> None:
    """Write the cluster file with a new ``rates:`` section to ``out`` (which may be the same file) atomically; comments
    and order are kept.

    Raises:
        UserError: ``out`` cannot be written.
    """
    text = read_text(cluster_file)
    if is_host_file(text):
        if Path(out).resolve() == Path(cluster_file).resolve():
            raise UserError("is a host file, which holds no rates", field="--out", value=str(out),
                            accepted="--out FILE.yaml: a cluster file with its hosts and the rates")  # fmt: skip
        text = yaml.dump(parse_host_file(text, str(cluster_file)).plain(), sort_keys=False, Dumper=QuotingDumper)
    if str(cluster_file).endswith(".json"):
        new_text = json.dumps({**parse_json(text, str(cluster_file)), "rates": rates}, indent=2) + "\n"
    else:
        new_text = _without_section(text, "rates") + _dump(rates)
    write_text(out, "--out", new_text)


def _without_section(text: str, key: str) -> str:
    """The YAML text without a top-level key and what is indented below it."""
    kept_lines, inside = [], False
    for line in text.splitlines(keepends=True):
        if re.match(rf"{key}\s*:", line):
            inside = True
        elif inside and re.match(r"[^\s#-]", line):
            inside = False
        if not inside:
            kept_lines.append(line)
    body = "".join(kept_lines)
    return body if body.endswith("\n") or not body else body + "\n"


def _dump(rates: Mapping[str, Any]) -> str:
    return str(yaml.dump({"rates": rates}, Dumper=rows_on_lines(), sort_keys=False, width=120))


def rows_on_lines() -> type[yaml.SafeDumper]:
    """A dumper that writes table rows on one line each."""

    class Dumper(QuotingDumper):
        pass

    def sequence(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
        flat = all(not isinstance(x, (list, dict)) for x in data)
        return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flat)

    Dumper.add_representer(list, sequence)
    return Dumper


def format_rates(
    rates: Mapping[str, Any], slow: Mapping[tuple[int, ...], float] = {}, clock: object | None = None
) -> str:
    """Tables of the ``rates:`` that one calibration found: stages by chip, kind of layer (in the order of the model's
    layers, where there are several), TP degree and micro-batch size, the spread of each family of rates, and links.

    Args:
        slow: stragglers, groups of ranks -> times slower than others of their chip type.
        clock: what is to be said about an emulated one.
    """
    tables = ("layers", "embed", "head", "waiting")
    lines = ["chip            tp  mbs   layer fwd   layer bwd       embed        head   wait/exchange"]
    spreads = ["spread (standard deviation, relative)"]
    for chip, rows in ((chip, rows) for chip, by_dtype in rates["chips"].items() for rows in by_dtype.values()):
        seconds_of = {(table, *row[:3]): row[-2:] for table in tables for row in rows.get(table, [])}
        kinds = list(dict.fromkeys(row[0] for row in rows.get("layers", [])))
        for kind, tp, n, *_ in rows.get("layers", []):
            layer, embed, head, waited = (seconds_of.get((table, kind, tp, n), []) for table in tables)
            seconds = "".join(f"{1e3 * s:>9.3f} ms" for s in (*layer, sum(embed), sum(head)))
            seconds += f"{5e5 * sum(waited):>13.0f} us" if waited else ""
            of_kind = f"   layers of kind {kinds.index(kind) + 1}" if len(kinds) > 1 else ""
            lines.append(f"{chip:<14}{tp:>4}{n:>5}{seconds}{of_kind}")
        if "spread" in rows:
            spreads.append(f"  {chip}: " + ", ".join(f"{family} {s:.1%}" for family, s in rows["spread"].items()))
    lines += [*spreads, "link                          latency     bandwidth   host/message   spread"]
    for row in rates["links"]:
        name = f"{row['within']} (same node)" if "within" in row else f"{row['from']} -> {row['to']}"
        speed = 1 / row["beta"] / 1e6 if row["beta"] else float("inf")
        seconds = f"{1e6 * row['alpha']:>7.0f} us{speed:>9.1f} MB/s{1e6 * row['message_seconds']:>12.0f} us"
        lines.append(f"{name:<27}{seconds}{row['spread']:>9.1%}")
    for ranks, times in slow.items():
        lines.append(f"straggler: ranks {', '.join(map(str, ranks))} {times:.2f} times slower than their chip type")
    return "\n".join([*lines, *([] if clock is None else [str(clock)])])
