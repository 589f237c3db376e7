"""Keys of records and of turns: which are read, which mean nothing to training, which are refused; others are said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from hetero_megatron.data.chat.marks import LISTS, MARKS, UNCLEAR, shown
from hetero_megatron.errors import UserError

Unread = tuple[str, str]  # (of what it is: turns, parts, tool_calls, tools; empty: of the record, key)
TURNS = "turns"
FORMS = ("messages", "conversations", "conversation", "prompt", "completion", "instruction", "input", "output")
RECORD_READ = (*FORMS, "chosen", "rejected", "system", "tools", "documents", "chat_template_kwargs")
TURN_NAMES = ("name", "tool_call_id")  # of a turn, beside its content; also as integers
TURN_TEXTS = (*TURN_NAMES, "reasoning_content", "thinking", "reasoning")
TURN_READ = ("role", "content", "from", "value", "tool_calls", *TURN_TEXTS)
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# What describes a record and is of no use to a model.
HARMLESS = frozenset(
    (
        "id", "_id", "idx", "index", "uuid", "uid", "prompt_id", "conversation_id", "source", "dataset", "split", "url",
        "license", "language", "lang", "date", "timestamp", "created", "created_at", "updated_at", "category",
        "categories", "tags", "topic", "task", "domain", "model", "generator", "metadata", "meta", "num_turns",
    )
)  # fmt: skip
_TOOLS = ("functions", "available_tools", "tool_definitions", "tools_json")
_CALLS = ("function_call", "function_calls", "tool_call", "toolcalls", "toolCalls", "tool_uses")
_SYSTEMS = ("system_prompt", "system_message")
_MARK_WORDS = (*MARKS, *LISTS, *UNCLEAR)
_EMPTY: tuple[Any, ...] = (None, "", [], {})  # values of which nothing is lost
_NEAR, _LIKE = 0.8, 0.7  # how alike a key is that was meant to be a mark, or another known one


def refuse_record_keys(record: Mapping[str, Any], first: Mapping[str, Any] | None, where: str) -> None:
    """UserError for keys whose content a user would miss.

    Args:
        first: the first message, which may say the same as a text of the system beside the messages.
    """
    for key in _TOOLS:
        if record.get(key) and not record.get("tools"):
            raise _misplaced(key, "tools", record[key], where)
    for key in _SYSTEMS:
        text = record.get(key)
        is_first = first is not None and first.get("role") == "system" and first.get("content") == text
        if text and not is_first and record.get("system") != text:
            raise _misplaced(key, "system", text, where)


def refuse_turn_keys(turn: Mapping[str, Any], field: str, where: str) -> None:
    """UserError for keys whose content a user would miss, and for what looks like a mark."""
    for key in _CALLS:
        if turn.get(key):
            raise UserError(
                "is read under tool_calls only", field=f"{field}.{key}", value=shown(turn[key]),
                accepted='tool_calls: [{type: "function", function: {name, arguments}}]', where=where,
            )  # fmt: skip
    for key in MEDIA:
        if turn.get(key):
            raise UserError(
                "this version trains on text only", field=f"{field}.{key}", value=shown(turn[key]), where=where,
                accepted="turns of nothing but text",
            )  # fmt: skip


def unread_turn_keys(turn: Mapping[str, Any], field: str, where: str) -> list[Unread]:
    """Keys of a turn that only a chat template can have a use for. UserError: one that is nearly a mark."""
    unread = [key for key, value in turn.items() if value not in _EMPTY and key not in _TURN_KNOWN]
    for key in unread:
        refuse_near_mark(key, turn[key], f"{field}.{key}", where)
    return [(TURNS, key) for key in unread]


def unread_record_keys(record: Mapping[str, Any], form: str, where: str) -> list[Unread]:
    """Keys of a record that nothing reads. UserError: one that is nearly a mark."""
    unread = [key for key, value in record.items() if value not in _EMPTY and key not in _RECORD_KNOWN]
    for key in unread:
        if isinstance(record[key], list):
            refuse_near_mark(key, record[key], key, where)
    keys_beside = _BESIDE.get(form, ())
    unread += [key for key in FORMS if key not in keys_beside and record.get(key) not in (None, "")]
    return [("", key) for key in unread]


def near(key: str, known_keys: Iterable[str]) -> str:
    """`` (NAME?)`` for the other known key that is most like this one; empty if none is."""
    matches = get_close_matches(key.lower(), [name for name in known_keys if name != key], 1, _LIKE)
    return f" ({matches[0]}?)" if matches else ""


def refuse_near_mark(key: str, value: Any, field: str, where: str) -> None:
    """UserError for an unknown key that is nearly a mark, with a value that a mark may have."""
    near_marks = get_close_matches(key.lower().replace("-", "_"), _MARK_WORDS, 1, _NEAR) if _like_a_mark(value) else []
    if near_marks:
        raise UserError(
            f"no such mark: {near_marks[0]} is one", field=field, value=shown(value), where=where,
            accepted=f"{', '.join(MARKS)}",
        )  # fmt: skip


def _like_a_mark(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_like_a_mark, value))
    if isinstance(value, str):
        return value.lower() in ("true", "false", "0", "1")
    return isinstance(value, (int, float)) and 0 <= value <= 1


def _misplaced(key: str, read: str, value: Any, where: str) -> UserError:
    return UserError(
        f"is not read: {read} is", field=key, value=shown(value), where=where,
        accepted=f"{read} (jq -c '.{read} = .{key} | del(.{key})' makes such records)",
    )  # fmt: skip


_TURN_KNOWN = frozenset((*TURN_READ, *MARKS, *UNCLEAR, *MEDIA, *_CALLS)) - {"from", "value"} | HARMLESS  # if left over
_RECORD_KNOWN = (
    frozenset((*RECORD_READ, *MARKS, *LISTS, *UNCLEAR, *MEDIA, *_TOOLS, *_SYSTEMS))
    | frozenset(("label", "kto_tag", "chosen", "rejected", "history", "context"))
    | HARMLESS
)
# Form -> what is read, or is a copy of it: a prompt beside messages is their beginning.
_BESIDE = {
    "prompt": ("prompt", "completion"), "instruction": ("instruction", "input", "output"),
    **{key: (key, "prompt") for key in ("messages", "conversations", "conversation")},
}  # fmt: skip
