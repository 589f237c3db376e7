"""The small spellings inside a plan: ranks, layer ranges, weights."""

from __future__ import annotations

import re
from math import gcd

from hetero_megatron.cluster.cluster import MAX_RANKS
from hetero_megatron.plan.canonical import Interval, Recompute
from hetero_megatron.utils.text import plural
from hetero_megatron.utils.yaml_document import Entry


def is_nested(entry: Entry) -> bool:
    return isinstance(entry.value, list) and any(isinstance(item.value, list) for item in entry.value)


def tp_splits(entry: Entry | None, groups: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Reduced weights per TP group; one list of weights serves all groups."""
    if entry is None:
        return [(1,) * len(group) for group in groups]
    per_group = entry.items() if is_nested(entry) else [entry] * len(groups)
    if len(per_group) != len(groups):
        entry.fail(f"{plural(len(per_group), 'list')} of weights for {plural(len(groups), 'TP group')}")
    splits = []
    for item, group in zip(per_group, groups, strict=True):
        weights = item.integers(1)
        if len(weights) != len(group):
            there = plural(len(weights), "weight")
            item.fail(
                f"{there} for TP groups of {plural(len(group), 'rank')}", accepted=plural(len(group), "weight")
            )
        splits.append(reduced(weights))
    return splits


def reduced(weights: tuple[int, ...]) -> tuple[int, ...]:
    """The same proportions without a common divisor."""
    divisor = gcd(*weights)
    return tuple(weight // divisor for weight in weights)


def parse_layers(entry: Entry) -> tuple[Interval, ...]:
    """``[a, b]``, ``[[a, b], ...]`` or ``[]`` -> ranges, ascending; an empty one counts among several only."""
    accepted = "[first, end] with end excluded, a list of such ranges, or []"
    items = entry.items()
    ranges = [item.integers() for item in items] if is_nested(entry) else [entry.integers()] if items else []
    for pair in ranges:
        if len(pair) != 2 or pair[0] > pair[1]:
            entry.fail("not a range of layers", accepted=accepted)
    return tuple(sorted((a, b) for a, b in ranges if a < b or len(ranges) > 1))


def parse_ranks(entry: Entry) -> tuple[int, ...]:
    """``"0-3"``, ``"0-3,8"``, ``5``, or a list of these -> ranks in the order written."""
    accepted = 'ranks such as 3, [0, 1, 2], "0-3" or "0-3,8"'
    if isinstance(entry.value, list):
        found: list[int] = []
        for item in entry.items():
            found += parse_ranks(item)
            require_few_ranks(entry, len(found))
        ranks = tuple(found)
    elif isinstance(entry.value, str):
        ranks = ()
        for part in entry.value.split(","):
            match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", part)
            if not match:
                entry.fail("not a range of ranks", accepted=accepted)
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                entry.fail("not a range of ranks: its end comes before its start", accepted=accepted)
            require_few_ranks(entry, len(ranks) + last + 1 - first)
            ranks += tuple(range(first, last + 1))
    else:
        ranks = (entry.integer(0),)
    if not ranks:
        entry.fail("no ranks", accepted=accepted)
    return ranks


def require_few_ranks(entry: Entry, count: int) -> None:
    """Refuse more ranks than any cluster has, before anything is built for each of them."""
    if count > MAX_RANKS:
        entry.fail("too many ranks", accepted=f"at most {MAX_RANKS:,} in a plan")


def nested_ranks(entry: Entry) -> list[tuple[int, ...]] | None:
    """``[[0, 1], [2, 3]]`` -> TP groups; None when the ranks are one flat list."""
    return [parse_ranks(item) for item in entry.items()] if is_nested(entry) else None


def first_layers(count: int, num_layers: int) -> Recompute:
    """Recompute of the first ``count`` of a stage's layers, in reduced form."""
    if count <= 0 or num_layers == 0:
        return Recompute()
    return Recompute("full") if count >= num_layers else Recompute("first", count)
