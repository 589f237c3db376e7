"""YAML text as nodes with lines; size is limited before anything is expanded.

The text is read as a stream of events, so excessive depth and size are refused early (PyYAML's composer recurses, and
crashes on 100,000 brackets). Scalars follow YAML 1.2's core schema: 1.1 reads ``1:04`` as 64, ``010`` as 8 and ``on``
as true.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import MAX_DIGITS

MAX_DEPTH = 24
MAX_VALUES = 500_000  # of a document, aliases expanded; a plan with 10,240 ranks written out has 200,000
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*([eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+))")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, Any] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= {word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")}
_TAG = "tag:yaml.org,2002:"
_TAGS = {"int": int, "float": float, "bool": bool, "null": type(None), "str": str, "seq": list, "map": dict}


class NotYAML(UserError):
    """The text is not valid YAML."""


@dataclass
class Node:
    """A scalar, a list of nodes, or a mapping from keys to (line of the key, node). ``line`` counts from 1; ``size``:
    number of values in it with aliases expanded; ``depth``: levels below it."""

    value: Any
    line: int
    size: int = 1
    depth: int = 0


@dataclass
class _Open:
    """A list or mapping that is not closed yet."""

    node: Node
    anchor: str | None
    key: tuple[str, int] | None = None  # of a mapping: the key whose value comes next, and its line


@dataclass
class _TreeBuilder:
    """Builds the tree from events."""

    file: str
    open: list[_Open] = field(default_factory=list)
    anchors: dict[str, Node] = field(default_factory=dict)
    root: Node | None = None
    values: int = 0

    def refuse(self, problem: str, line: int, accepted: str = "", field: str = "") -> UserError:
        return UserError(problem, field=field, where=f"{self.file}:{line}", accepted=accepted)

    def feed(self, event: yaml.Event) -> None:
        line = event.start_mark.line + 1 if event.start_mark is not None else 0
        if isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            node = Node([] if isinstance(event, yaml.SequenceStartEvent) else {}, line)
            self._check_tag(event.tag, node)
            if self.open and isinstance(self.open[-1].node.value, dict) and self.open[-1].key is None:
                raise self.refuse("a key has to be a word", line)
            self.open.append(_Open(node, event.anchor))
            if len(self.open) > MAX_DEPTH:
                raise self.refuse("nested too deeply", line, f"at most {MAX_DEPTH} levels")
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            closed = self.open.pop()
            self._add(closed.node, closed.anchor, line)
        elif isinstance(event, yaml.ScalarEvent):
            node = Node(self._scalar(event, line), line)
            if self.open and isinstance(self.open[-1].node.value, dict) and self.open[-1].key is None:
                self._key(event.value, line)
            else:
                self._add(node, event.anchor, line)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise self.refuse(f"the alias {event.anchor!r} is not defined before, or contains itself", line)
            self._add(self.anchors[event.anchor], None, line)
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise self.refuse("a second document begins", line, "one document")

    def _key(self, key: str, line: int) -> None:
        parent = self.open[-1]
        if key in parent.node.value:
            parent.key = (key, line)
            raise self.refuse("the key is written twice", line, field=self._path())
        parent.key = (key, line)

    def _path(self) -> str:
        """Path of the open value, as in ``pipelines[0].stages[1].tp``."""
        parts = [f".{o.key[0]}" if o.key else f"[{len(o.node.value)}]" for o in self.open]
        return "".join(parts).removeprefix(".")

    def _add(self, node: Node, anchor: str | None, line: int) -> None:
        """Add a complete node to the open list or mapping."""
        if anchor is not None:
            self.anchors[anchor] = node
        if not self.open:
            self.root = node
            return
        parent = self.open[-1]
        if isinstance(parent.node.value, list):
            parent.node.value.append(node)
        elif parent.key is None:
            raise self.refuse("a key has to be a word", line)
        else:
            parent.node.value[parent.key[0]] = (parent.key[1], node)
            parent.key = None
        parent.node.size += node.size
        parent.node.depth = max(parent.node.depth, node.depth + 1)
        if parent.node.size > MAX_VALUES:
            raise self.refuse("too many values", line, f"at most {MAX_VALUES:,} in a file, aliases expanded")
        if len(self.open) + node.depth > MAX_DEPTH:
            raise self.refuse("nested too deeply", line, f"at most {MAX_DEPTH} levels")

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> Any:
        text = str(event.value)
        plain = event.style in (None, "") and event.tag is None
        if not plain and event.tag in (None, "!", _TAG + "str"):
            return text
        if text in _WORDS:
            value = _WORDS[text]
        elif _INTEGER.fullmatch(text):
            if len(text) > MAX_DIGITS:
                raise self.refuse(f"a number of {len(text):,} digits", line, field=self._path())
            value = int(text)
        elif _NOT_FINITE.fullmatch(text) or (_FLOAT.fullmatch(text) and not math.isfinite(float(text))):
            raise self.refuse(f"{text[:40]} is not finite", line, "a finite number", self._path())
        else:
            value = float(text) if _FLOAT.fullmatch(text) else text
        self._check_tag(event.tag, Node(value, line))
        return value

    def _check_tag(self, tag: str | None, node: Node) -> None:
        """An explicit tag must match the value's type."""
        if tag in (None, "!"):
            return
        kind = _TAGS.get(str(tag).removeprefix(_TAG)) if str(tag).startswith(_TAG) else None
        if kind is None or not isinstance(node.value, kind):
            name = str(tag).replace(_TAG, "!!")
            raise self.refuse(f"the tag {name[:60]} does not fit the value", node.line, "no tag", self._path())


def compose(text: str, file: str) -> Node | None:
    """The root of a document; None if it has no value.

    Raises:
        UserError: not YAML, over a limit, a duplicate key, a number that is not finite.
    """
    builder = _TreeBuilder(file)
    try:
        for event in _events(text):
            builder.feed(event)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark is not None else file
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable text"
        raise NotYAML(f"not valid YAML: {problem}", where=where) from None
    return builder.root


def _events(text: str) -> Iterator[yaml.Event]:
    events: Iterator[yaml.Event] = yaml.parse(text, Loader=_LOADER)
    return events
