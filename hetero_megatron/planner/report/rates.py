"""Measured rates as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TABLES = ("layers", "embed", "head", "waiting")


def format_rates(
    rates: Mapping[str, Any], slow: Mapping[tuple[int, ...], float] = {}, clock: object | None = None
) -> str:
    """Tables of the ``rates:`` that one calibration found: stages by chip, TP degree and micro-batch size, the spread
    of each family of rates, and links.

    Args:
        slow: stragglers, groups of ranks -> times slower than others of their chip type.
        clock: what is to be said about an emulated one.
    """
    lines = ["chip            tp  mbs   layer fwd   layer bwd       embed        head   wait/exchange"]
    spreads = ["spread (standard deviation, relative)"]
    for chip, rows in ((chip, rows) for chip, by_dtype in rates["chips"].items() for rows in by_dtype.values()):
        parts = {(table, *row[1:3]): row[-2:] for table in TABLES for row in rows.get(table, [])}
        for _, tp, n, *_ in rows["layers"]:
            layer, embed, head, waited = (parts.get((table, tp, n), []) for table in TABLES)
            seconds = "".join(f"{1e3 * s:>9.3f} ms" for s in (*layer, sum(embed), sum(head)))
            lines.append(f"{chip:<14}{tp:>4}{n:>5}{seconds}" + (f"{5e5 * sum(waited):>13.0f} us" if waited else ""))
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
