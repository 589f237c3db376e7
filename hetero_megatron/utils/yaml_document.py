"""YAML and JSON files with the line of every value, for error messages.

An :class:`Entry` is one value of the document with its path (``pipelines[0].stages[1].tp``) and line. Readers of plans
and cluster files ask it for the type that they expect; it raises :class:`UserError` otherwise.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from hetero_megatron.errors import UserError
from hetero_megatron.utils.files import parse_json, read_text
from hetero_megatron.utils.yaml_nodes import Node, NotYAML, compose

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
                near = difflib.get_close_matches(key[:LONGEST_NAME], keys, n=1)
                hint = f" (did you mean {near[0]!r}?)" if near else ""
                raise UserError(
                    f"unknown key {key[:LONGEST_NAME]!r}{hint}",
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
        value = {key: _entry(child, join(path, key), file, at) for key, (at, child) in value.items()}
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
