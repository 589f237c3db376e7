"""YAML and JSON files read with the line of every value, so that each complaint can say where the value
stands.

An :class:`Entry` is one value of the document together with its path (``pipelines[0].stages[1].tp``)
and its line. The readers of plans and cluster files ask it for what they expect; it raises
:class:`UserError` for anything else.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hetero_megatron.errors import UserError

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MAX_DEPTH = 24
_SCALARS = yaml.constructor.SafeConstructor()
# YAML 1.1 wants a sign in an exponent, so 1e9 and 1.5e9 would be text; every other language reads a number.
_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")


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
        """The entries of a mapping with no keys but ``keys`` and all of ``required``."""
        entries = self.any_mapping()
        for key, entry in entries.items():
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise UserError(
                    f"unknown key {key!r}{hint}",
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

    def items(self) -> list[Entry]:
        if not isinstance(self.value, list):
            self.fail(f"a list was expected, not {_kind(self.value)}")
        return list(self.value)

    def integer(self, minimum: int = 0) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.fail(
                f"an integer was expected, not {_kind(self.value)}", accepted=f"an integer >= {minimum}"
            )
        if self.value < minimum:
            self.fail("too small", accepted=f"an integer >= {minimum}")
        return self.value

    def integers(self, minimum: int = 0) -> tuple[int, ...]:
        return tuple(item.integer(minimum) for item in self.items())

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            self.fail(f"a number was expected, not {_kind(self.value)}")
        return float(self.value)

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            self.fail(f"a word was expected, not {_kind(self.value)}")
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool):
            self.fail(f"true or false was expected, not {_kind(self.value)}", accepted="true or false")
        return self.value

    def choice(self, options: Collection[str]) -> str:
        if self.value not in options:
            self.fail("unknown choice", accepted="one of " + ", ".join(options))
        return str(self.value)


def read_document(path: str | os.PathLike[str]) -> Entry:
    """Read a YAML or JSON file (JSON by its suffix); UserError when it cannot be read or parsed."""
    name = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"cannot read the file: {reason}", where=name) from None
    return parse_document(text, name)


def parse_document(text: str, file: str) -> Entry:
    """Parse the text of a YAML document, or of a JSON one when ``file`` ends in ``.json``."""
    if file.endswith(".json"):
        try:
            json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"not valid JSON: {error.msg}", where=f"{file}:{error.lineno}") from None
        text = text.replace("\t", " ")  # legal between JSON tokens, not in YAML
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark is not None else file
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "unreadable text"
        raise UserError(f"not valid YAML: {problem}", where=where) from None
    if node is None:
        raise UserError("the file is empty", where=file)
    return _entry(node, "", file, 0)


def from_data(data: Any, path: str = "", file: str = "") -> Entry:
    """Entries for plain Python data, without lines."""
    if isinstance(data, Mapping):
        return Entry({str(k): from_data(v, join(path, str(k)), file) for k, v in data.items()}, path, file)
    if isinstance(data, list | tuple):
        return Entry([from_data(item, f"{path}[{i}]", file) for i, item in enumerate(data)], path, file)
    return Entry(data, path, file)


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _entry(node: yaml.Node, path: str, file: str, depth: int) -> Entry:
    line = node.start_mark.line + 1
    if depth > _MAX_DEPTH:  # also ends an alias that contains itself
        raise UserError("nested too deeply", field=path.split("[")[0], where=f"{file}:{line}")
    if isinstance(node, yaml.SequenceNode):
        items = [_entry(child, f"{path}[{i}]", file, depth + 1) for i, child in enumerate(node.value)]
        return Entry(items, path, file, line)
    if isinstance(node, yaml.MappingNode):
        entries: dict[str, Entry] = {}
        for key_node, child in node.value:
            key, key_line = str(key_node.value), key_node.start_mark.line + 1
            where = join(path, key)
            if key in entries:
                raise UserError("the key is written twice", field=where, where=f"{file}:{key_line}")
            entry = _entry(child, where, file, depth + 1)
            # Complain about a nested value on the line of its key, which is where a reader looks for it.
            entries[key] = Entry(entry.value, entry.path, file, key_line)
        return Entry(entries, path, file, line)
    return Entry(_scalar(node), path, file, line)


def _scalar(node: yaml.Node) -> Any:
    kind = node.tag.rpartition(":")[2]
    if kind in ("int", "float", "bool", "null"):
        try:
            return getattr(_SCALARS, f"construct_yaml_{kind}")(node)
        except (ValueError, IndexError):
            return node.value
    plain = isinstance(node, yaml.ScalarNode) and node.style in (None, "")
    return float(node.value) if plain and _EXPONENT.fullmatch(node.value) else node.value


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    names = {dict: "a mapping", list: "a list", str: "text", int: "an integer", float: "a fraction"}
    return names.get(type(value), type(value).__name__)


def _brief(entry: Entry) -> Any:
    return entry.plain()
