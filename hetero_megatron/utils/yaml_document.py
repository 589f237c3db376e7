"""YAML and JSON files with the line of every value, for error messages.

An :class:`Entry` is one value of the document with its path (``pipelines[0].stages[1].tp``) and line. Readers of plans
and cluster files ask it for the type that they expect; it raises :class:`UserError` otherwise.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

import yaml

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import MAX_DIGITS, parse_json, read_text
from hetero_megatron.utils.text import did_you_mean

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


class QuotingDumper(yaml.SafeDumper):
    """Quotes texts that this reader takes for numbers and PyYAML does not: 12e345678901, as a fingerprint may be."""


QuotingDumper.add_implicit_resolver(f"{_TAG}float", re.compile(f"(?:{_FLOAT.pattern})$"), list("-+.0123456789"))


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
        place = f"{file}:{mark.line + 1}" if mark is not None else file
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable text"
        raise NotYAML(f"not valid YAML: {problem}", where=place) from None
    return builder.root


def _events(text: str) -> Iterator[yaml.Event]:
    events: Iterator[yaml.Event] = yaml.parse(text, Loader=_LOADER)
    return events


MAX_INTEGER = 2**63 - 1
LONGEST_NAME = 200


@dataclass(frozen=True)
class Entry:
    """A value of a document.

    Args:
        value: a scalar, a list of entries, or a mapping from keys to entries.
        path: how to name it, as in ``pipelines[0].stages[1].tp``; empty for the whole document.
        file: name of the document; empty for data that was not read from a file.
        line: counted from 1; 0 when unknown.
    """

    value: Any
    path: str
    file: str = ""
    line: int = 0

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.file and self.line else self.file

    def plain(self) -> Any:
        """The value as plain Python data."""
        if isinstance(self.value, list):
            return [item.plain() for item in self.value]
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return self.value

    def fail(self, problem: str, accepted: str = "") -> NoReturn:
        """Raise a UserError about this value."""
        raise UserError(
            problem, field=self.path or "document", value=_brief(self), accepted=accepted, where=self.where
        )

    def lines(self) -> Iterator[tuple[str, int]]:
        """(path, line) of this value and of all values inside it."""
        yield self.path, self.line
        children = self.value.values() if isinstance(self.value, dict) else self.value
        if isinstance(self.value, list | dict):
            for child in children:
                yield from child.lines()

    def mapping(self, keys: Collection[str], required: Collection[str] = ()) -> dict[str, Entry]:
        """The entries of a mapping that has no keys outside ``keys`` and all of ``required``."""
        entries = self.any_mapping()
        for key, entry in entries.items():
            if key not in keys:
                raise UserError(
                    f"unknown key {key[:LONGEST_NAME]!r}{did_you_mean(key, keys)}",
                    field=entry.path,
                    accepted="one of " + ", ".join(keys),
                    where=entry.where,
                )
        for key in required:
            if key not in entries:
                path = f"{self.path}.{key}" if self.path else key
                raise UserError(f"key {key!r} is missing", field=path, where=self.where)
        return entries

    def any_mapping(self) -> dict[str, Entry]:
        if not isinstance(self.value, dict):
            self.fail(f"a mapping was expected, not {_kind(self.value)}")
        return dict(self.value)

    def section(self, key: str) -> Entry | None:
        """What a mapping has under a key, before anything else of it is read; None: nothing, or it is no mapping."""
        return self.value.get(key) if isinstance(self.value, dict) else None

    def items(self) -> list[Entry]:
        if not isinstance(self.value, list):
            self.fail(f"a list was expected, not {_kind(self.value)}")
        return list(self.value)

    def integer(self, minimum: int = 0, maximum: int = MAX_INTEGER) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.fail(
                f"an integer was expected, not {_kind(self.value)}", accepted=f"an integer >= {minimum}"
            )
        if self.value < minimum:
            self.fail("too small", accepted=f"an integer >= {minimum}")
        if self.value > maximum:
            self.fail("too large", accepted=f"an integer from {minimum} to {maximum}")
        return self.value

    def integers(self, minimum: int = 0) -> tuple[int, ...]:
        return tuple(item.integer(minimum) for item in self.items())

    def number(self, minimum: float, maximum: float) -> float:
        """A number from ``minimum`` to ``maximum``, both included and neither NaN nor infinite."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            self.fail(f"a number was expected, not {_kind(self.value)}")
        if not minimum <= self.value <= maximum:
            self.fail("out of range", accepted=f"a number from {minimum:g} to {maximum:g}")
        return float(self.value)

    def text(self) -> str:
        """A name: not empty, on one line, without control characters."""
        if not isinstance(self.value, str) or not self.value:
            self.fail(f"a word was expected, not {_kind(self.value)}")
        if not self.value.isprintable() or len(self.value) > LONGEST_NAME:
            self.fail("not a name", accepted=f"at most {LONGEST_NAME} printable characters")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            self.fail(f"true or false was expected, not {_kind(self.value)}", accepted="true or false")
        return self.value

    def choice(self, options: Collection[str]) -> str:
        if not isinstance(self.value, str) or self.value not in options:
            self.fail("unknown choice", accepted="one of " + ", ".join(options))
        return str(self.value)


def read_document(path: str | os.PathLike[str]) -> Entry:
    """Read a YAML or JSON file (JSON by its suffix); UserError when it cannot be read or parsed."""
    return parse_document(read_text(path), os.fspath(path))


def parse_document(text: str, file: str) -> Entry:
    """Parse the text of a YAML document, or of a JSON one when ``file`` ends in ``.json``."""
    if file.endswith(".json"):
        return _parse_json(text, file)
    root = compose(text, file)
    if root is None or (root.value is None and not text.strip()):
        raise UserError("the file is empty", where=file)
    return _entry(root, "", file, root.line)


def _parse_json(text: str, file: str) -> Entry:
    """Most JSON is valid YAML, whose reader knows lines; other JSON (surrogate pairs, some control characters) has
    entries without lines."""
    value = parse_json(text, file)
    with suppress(NotYAML):
        root = compose(text.replace("\t", " "), file)  # tabs are legal between JSON's tokens, not in YAML
        assert root is not None
        entry = _entry(root, "", file, root.line)
        if entry.plain() == value:
            return entry
    return from_data(value, "", file)


def from_data(data: Any, path: str = "", file: str = "") -> Entry:
    """Entries for plain Python data, without lines."""
    if isinstance(data, Mapping):
        return Entry({str(k): from_data(v, join(path, str(k)), file) for k, v in data.items()}, path, file)
    if isinstance(data, list | tuple):
        return Entry([from_data(item, f"{path}[{i}]", file) for i, item in enumerate(data)], path, file)
    return Entry(data, path, file)


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _entry(node: Node, path: str, file: str, line: int) -> Entry:
    """``line``: for a value in a mapping, the line of its key."""
    value = node.value
    if isinstance(value, list):
        value = [_entry(child, f"{path}[{i}]", file, child.line) for i, child in enumerate(value)]
    elif isinstance(value, dict):
        value = {key: _entry(child, join(path, key), file, key_line) for key, (key_line, child) in value.items()}
    return Entry(value, path, file, line)


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    names = {dict: "a mapping", list: "a list", str: "text", int: "an integer", float: "a fraction"}
    return names.get(type(value), type(value).__name__)


def _brief(entry: Entry) -> Any:
    return entry.plain()
