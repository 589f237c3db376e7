"""What a turn is made of besides its own keys: parts of content, and calls of tools.

A template writes whatever it finds (``None``, a number, nothing), so a part without text and a call without a name or
arguments are refused here. Each kind has one table of keys; others are said once, with the nearest known one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_megatron.data.chat.keys import MEDIA, refuse_near_mark
from hetero_megatron.data.chat.marks import MARKS, shown, turn_mark
from hetero_megatron.data.chat.values import as_object, parsed
from hetero_megatron.errors import UserError
from hetero_megatron.utils.foreign_keys import KeyTable, by_reason
from hetero_megatron.utils.text import did_you_mean

PARTS, CALLS, TOOLS = "parts", "tool_calls", "tools"  # whose keys they are, in messages
_TOLD = "told to templates as it is"
PART = KeyTable(
    frozenset(("type", "text")), {}, by_reason({
        "where and how the text was had": "id index cache_control annotations citations logprobs",
    }),
)  # fmt: skip
_WORDS_OF_CALLS = ("id", "type", "index", "call_id")
CALL = KeyTable(frozenset(("function", "name", "arguments")), {}, by_reason({_TOLD: " ".join(_WORDS_OF_CALLS)}))
FUNCTION = KeyTable(frozenset(("name", "arguments")), {}, by_reason({_TOLD: "description strict"}))
TOOL = KeyTable(
    frozenset(("type", "function", "name", "description", "parameters")), {},
    by_reason({_TOLD: "strict return returns response required id"}),
)  # fmt: skip
# What other programs have in the place of these keys.
_OTHER_NAMES = {
    "text": ("content", "value", "input_text", "output_text", "data"),
    "name": ("tool", "tool_name", "function_name", "func", "action", "api_name"),
    "arguments": ("args", "parameters", "params", "input", "kwargs", "tool_input", "action_input", "inputs"),
}  # fmt: skip
_TEXT_KINDS = ("_text", "thinking", "reasoning", "tool_use", "tool_call", "tool_result", "refusal")  # types' ends
_CALL_ACCEPTED = '{"type": "function", "function": {"name": …, "arguments": …}}'
_PART_ACCEPTED = '{"type": "text", "text": …}, or a string'


@dataclass
class Pieces:
    """Reads the parts and calls of one turn.

    Attributes:
        where: file and line, for messages.
        marks: of each piece, whether it is marked to count in the loss.
        unread: (kind of piece, key) that nothing but a template could read.
    """

    where: str
    marks: list[bool | None] = field(default_factory=list)
    unread: dict[tuple[str, str], None] = field(default_factory=dict)

    def parts(self, content: Sequence[Any], name: str) -> list[Mapping[str, Any]]:
        """Parts of text: ``{"type": "text", "text": …}`` each, as templates take them. UserError: anything else."""
        return [self._part(part, f"{name}[{i}]") for i, part in enumerate(content)]

    def calls(self, calls: Any, name: str) -> list[Mapping[str, Any]]:
        """A list of objects, or JSON text of it, of one of them or of ``function``; arguments stay as they are
        written. UserError: a call without a name or without arguments."""
        calls = parsed(calls, name, self.where)
        if calls is None:  # JSON text of null, or blank
            return []
        if not isinstance(calls, list):
            raise UserError("is not a list", field=name, value=shown(calls), accepted="a list of calls",
                            where=self.where)  # fmt: skip
        return [self._call(call, f"{name}[{i}]") for i, call in enumerate(calls)]

    def mark(self, turn: bool | None, unmarked: bool, name: str) -> bool | None:
        """The mark of a turn, of its own one and those of its pieces: all of it counts or nothing does.

        Args:
            unmarked: the turn has text besides its pieces.
        """
        said = {mark for mark in self.marks if mark is not None}
        if not said:
            return turn
        alike = said == {True} or (said == {False} and None not in self.marks and not unmarked)
        whole = True in said
        if not alike or turn not in (None, whole):
            raise UserError(
                "marks of its parts or calls differ, or contradict the turn's own", field=name, where=self.where,
                accepted="a turn counts in the loss as a whole: one mark of the turn, or the same one in all of it",
            )  # fmt: skip
        return whole

    def _part(self, part: Any, name: str) -> Mapping[str, Any]:
        if isinstance(part, str):
            self.marks.append(None)
            return {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise UserError("is no part of a text", field=name, value=shown(part), accepted=_PART_ACCEPTED,
                            where=self.where)  # fmt: skip
        kind = part.get("type")
        if kind not in (None, "text") or (media := next((key for key in MEDIA if part.get(key)), None)):
            key = "type" if kind not in (None, "text") else str(media)
            text = key == "type" and isinstance(kind, str) and kind.endswith(_TEXT_KINDS)
            problem = "such parts are not read" if text else "this version trains on text only"
            raise UserError(problem, field=f"{name}.{key}", value=shown(part[key]), accepted=_PART_ACCEPTED,
                            where=self.where)  # fmt: skip
        self.marks.append(turn_mark(part, name, self.where))
        if not isinstance(part.get("text"), str):
            self._refuse_missing(part, "text", name, PART, _PART_ACCEPTED)
        return {"type": "text"} | self._read(part, PARTS, PART, name)

    def _call(self, call: Any, name: str) -> Mapping[str, Any]:
        call = as_object(call, name, self.where, _CALL_ACCEPTED)
        for key in _WORDS_OF_CALLS:
            if isinstance(call.get(key), dict | list):
                raise UserError("is neither text nor a number", field=f"{name}.{key}", value=shown(call[key]),
                                accepted=_CALL_ACCEPTED, where=self.where)  # fmt: skip
        mark = turn_mark(call, name, self.where)
        if call.get("function") is None:
            self._require(call, CALL, name)
            self.marks.append(mark)
            return self._read(call, CALLS, CALL, name)
        inner_name = f"{name}.function"
        inner = as_object(call["function"], inner_name, self.where, _CALL_ACCEPTED)
        self._require(inner, FUNCTION, inner_name)
        for key in FUNCTION.honoured:
            if call.get(key) not in (None, "", inner[key]):
                raise UserError(f"function.{key} beside it is {shown(inner[key])}", field=f"{name}.{key}",
                                value=shown(call[key]), accepted="one of them", where=self.where)  # fmt: skip
        inner_mark = turn_mark(inner, inner_name, self.where)
        self.marks += [call_mark for call_mark in (mark, inner_mark) if call_mark is not None] or [None]
        return self._read(call, CALLS, CALL, name) | {"function": self._read(inner, CALLS, FUNCTION, inner_name)}

    def _require(self, call: Mapping[str, Any], table: KeyTable, name: str) -> None:
        """UserError unless a call has a name and arguments."""
        if not isinstance(call.get("name"), str) or not call["name"]:
            self._refuse_missing(call, "name", name, table, _CALL_ACCEPTED)
        if not isinstance(call.get("arguments"), (dict, str)):
            accepted = f"an object, or JSON text of one; {{}} for a call without any: {_CALL_ACCEPTED}"
            self._refuse_missing(call, "arguments", name, table, accepted)

    def _refuse_missing(self, piece: Mapping[str, Any], key: str, name: str, table: KeyTable, accepted: str) -> None:
        """UserError for a key without a value that is of use; of what stands in its place, if it is there."""
        value = piece.get(key)
        if value is not None:
            raise UserError("is empty" if value == "" else "is no text" if key != "arguments" else "are no arguments",
                            field=f"{name}.{key}", value=shown(value), accepted=accepted, where=self.where)  # fmt: skip
        others = [k for k, v in piece.items() if v is not None and k not in table.accepted_keys]
        nearest = next((other for other in others if other.lower() in _OTHER_NAMES[key]), None)
        nearest = nearest or next((other for other in others if did_you_mean(other, (key,), 0.75)), None)
        if nearest is not None:
            raise UserError(f"is not read: {key} is", field=f"{name}.{nearest}", value=shown(piece[nearest]),
                            accepted=accepted, where=self.where)  # fmt: skip
        raise UserError("missing", field=f"{name}.{key}", value=shown(piece), accepted=accepted, where=self.where)

    def _read(self, piece: Mapping[str, Any], kind: str, table: KeyTable, name: str) -> dict[str, Any]:
        """Without marks and without keys that have no value."""
        kept = {key: value for key, value in piece.items() if value is not None and key not in MARKS}
        for key in kept:
            if key not in table.accepted_keys:
                refuse_near_mark(key, kept[key], f"{name}.{key}", self.where)
                self.unread[kind, key] = None
        return kept


def unread_tool_keys(tools: Sequence[Mapping[str, Any]] | None) -> list[tuple[str, str]]:
    """(kind, key) of tools that templates know by no such name."""
    unread: dict[tuple[str, str], None] = {}
    for tool in tools or ():
        for part in (tool, tool.get("function")):
            for key in TOOL.unknown(part) if isinstance(part, dict) else ():
                unread[TOOLS, key] = None
    return list(unread)
