"""Reading the fields of a plan file: kinds, ranges and names of keys, and where a value was written: its line, or its
flag."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import Any

from hetero_megatron.cluster.cluster import MAX_RANKS
from hetero_megatron.errors import UserError
from hetero_megatron.plans.canonical import Interval, Pipeline, Plan, Recompute, Stage
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
            count = plural(len(weights), "weight")
            item.fail(
                f"{count} for TP groups of {plural(len(group), 'rank')}", accepted=plural(len(group), "weight")
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
        listed: list[int] = []
        for item in entry.items():
            listed += parse_ranks(item)
            require_few_ranks(entry, len(listed))
        ranks = tuple(listed)
    elif isinstance(entry.value, str):
        ranks = ()
        for range_text in entry.value.split(","):
            match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", range_text)
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


@dataclass(frozen=True)
class Source:
    """Where the values of a canonical plan were read, for messages.

    Args:
        file: name of the file; empty for plans that were built by code.
        lines: line of each path as spelled.
        pipelines: canonical pipeline -> pipeline as spelled (they differ after ``repeat``).
        prefix: of a plan inside another one, where its pipelines are.
    """

    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    pipelines: tuple[int, ...] = ()
    prefix: str = ""

    def error(self, problem: str, path: str, value: Any = None, accepted: str = "") -> UserError:
        """A UserError about a canonical path, reported by the path and line of the spelling."""
        spelled = self.spelled(path)
        if not spelled.startswith(self.prefix):
            problem = f"in {self.prefix[:-1]}: {problem}"
        return UserError(problem, field=spelled, value=value, accepted=accepted, where=self.where(spelled))

    def spelled(self, path: str) -> str:
        match = re.match(r"pipelines\[(\d+)\]", path)
        if match and self.pipelines:
            path = f"pipelines[{self.pipelines[int(match[1])]}]" + path[match.end() :]
        return self.prefix + path if match else path

    def where(self, path: str) -> str:
        """file:line of a path, or of the nearest value around it."""
        while path and path not in self.lines:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        line = self.lines.get(path, 0)
        return f"{self.file}:{line}" if self.file and line else self.file


PATH = re.compile(r"(?:pipelines\[\d+\]\.stages\[(\d+)\]\.)?(\w+).*")


def flag_error(flag: str, value: object, problem: str, accepted: str = "") -> UserError:
    """A UserError about a flag, given by the name of its field."""
    return UserError(
        problem, field="--" + flag.replace("_", "-"), value=value, accepted=accepted, where="command line"
    )


@dataclass(frozen=True)
class Blame:
    """``flag`` (by the name of its field) with ``value`` made something of the plan; ``place``: what part of it;
    ``accepted``: what of the flag would be, where the law would say it of a plan."""

    flag: str
    value: object
    place: str = ""
    accepted: str = ""


@dataclass(frozen=True)
class FlagSource(Source):
    """Laws of ``validate`` are reported by flags: ``blame(key, stage)`` says which one made a key of a stage of every
    pipeline (as in a plan file), or of the plan (stage -1); None: none did."""

    blame: Callable[[str, int], Blame | None] = lambda key, stage: None

    def error(self, problem: str, path: str, value: Any = None, accepted: str = "") -> UserError:
        match = PATH.fullmatch(path)
        blame = self.blame(match[2], int(match[1] or -1)) if match else None
        if blame is None:
            return super().error(problem, path, value, accepted)
        text = f"{blame.place}: {problem}" if blame.place else problem
        return flag_error(blame.flag, blame.value, text, blame.accepted or accepted)


def stages(plan: Plan) -> Iterator[tuple[str, Pipeline, Stage]]:
    """(path, pipeline, stage) of all stages."""
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            yield f"pipelines[{p}].stages[{s}]", pipeline, stage
