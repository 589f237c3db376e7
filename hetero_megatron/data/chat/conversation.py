"""One record of a fine-tuning data set -> a conversation.

Read are ``messages`` (as OpenAI, TRL and Hugging Face have them), ShareGPT's ``conversations``, ``prompt`` with
``completion`` (both strings, or both lists of messages) and Alpaca's ``instruction``, ``input`` and ``output``. A
record that could be meant in two ways is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hetero_megatron.data.chat.forms import ALPACA, PROMPT, form_of, is_pair, pair_refused
from hetero_megatron.data.chat.keys import (
    TURN_NAMES,
    TURN_TEXTS,
    Unread,
    refuse_record_keys,
    refuse_turn_keys,
    unread_record_keys,
    unread_turn_keys,
)
from hetero_megatron.data.chat.marks import MARKS, marks_beside, refuse_marks, shown, turn_mark
from hetero_megatron.data.chat.pieces import Pieces, unread_tool_keys
from hetero_megatron.data.chat.values import read_documents, read_options, read_tools
from hetero_megatron.errors import UserError
from hetero_megatron.utils.foreign_keys import says_nothing

_ROLES = {  # ShareGPT's ``from`` -> role
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """Attributes:
        messages: with a role and content each; empty where the record holds text.
        tools: what the template is told that the assistant may call; None: nothing. Also an empty list is told.
        documents, options: what the template is told besides.
        text: (prompt, completion) of a record without messages, which no chat template renders.
        first: messages before this one are the prompt: assistants in them do not count in the loss.
        marks: of each message, whether it counts in the loss; None: as the role says. Empty: no message has one.
        unread: keys that nothing but a template could read, and of what they are (empty: of the record).
        desired: of an answer with a label; None: it has none."""

    messages: tuple[Mapping[str, Any], ...] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    text: tuple[str, str] | None = None
    first: int = 0
    marks: tuple[bool | None, ...] = ()
    unread: tuple[Unread, ...] = ()
    desired: bool | None = None


@dataclass
class _Turns:
    """Parses turns one after another, and keeps what is not part of their messages."""

    where: str
    share: bool = False
    marks: list[bool | None] = field(default_factory=list)
    unread: dict[Unread, None] = field(default_factory=dict)

    def read(self, turns: Sequence[Any], name: str) -> tuple[Mapping[str, Any], ...]:
        """Messages of a list under ``name``."""
        return tuple(self._one(turn, f"{name}[{i}]") for i, turn in enumerate(turns))

    def _one(self, turn: Any, name: str) -> Mapping[str, Any]:
        if not isinstance(turn, dict):
            raise UserError("is not an object", field=name, value=shown(turn), accepted="a message", where=self.where)
        refuse_turn_keys(turn, name, self.where)
        pieces = Pieces(self.where)
        message = _message(turn, name, self.where, self.share, pieces)
        has_text = isinstance(message.get("content"), str) and bool(message["content"])
        self.marks.append(pieces.mark(turn_mark(turn, name, self.where), has_text, name))
        self.unread |= pieces.unread | dict.fromkeys(unread_turn_keys(message, name, self.where))
        return message


def read_conversation(record: Mapping[str, Any], where: str) -> Conversation:
    """Parse one record.

    Args:
        where: file and line, for messages.

    Raises:
        UserError: not one of the four formats, or damaged; no turn of the assistant.
    """
    form = form_of(record, where)
    if form == PROMPT:
        return _prompt(record, where)
    if form == ALPACA:
        return _alpaca(record, where)
    raw = _list(record[form], form, where)
    turns = _Turns(where, _shared(raw))
    messages = turns.read(raw, form)
    if is_pair(record) and messages[-1]["role"] != "assistant":  # else they hold the chosen one
        raise pair_refused(record, where)
    _require_assistant(messages, form, where)
    users = [str(turn.get("from", turn.get("role"))) for turn, m in zip(raw, messages) if m["role"] == "user"]
    marks = marks_beside(record, turns.marks, form, users, where)
    refuse_record_keys(record, messages[0], where)
    return _conversation(record, form, messages, marks, turns, where)


def _shared(turns: Sequence[Any]) -> bool:
    """Whether they are ShareGPT's, with from and value, under whatever name; conversations may also hold OpenAI's
    messages."""
    return any(
        isinstance(turn, dict) and turn.get("from") is not None and turn.get("role") is None for turn in turns
    )


def _conversation(
    record: Mapping[str, Any], form: str, messages: tuple[Mapping[str, Any], ...], marks: list[bool | None],
    turns: _Turns, where: str, first: int = 0,
) -> Conversation:  # fmt: skip
    """With what the record says besides its messages; ``first``: how many of them are the prompt."""
    all_messages = _with_system(record, messages, where)
    added = len(all_messages) - len(messages)
    tools = read_tools(record, where)
    unread = [*unread_record_keys(record, form, where), *turns.unread, *unread_tool_keys(tools)]
    return Conversation(
        all_messages, tools, read_documents(record, where), read_options(record, where),
        first=first + added if first else 0, unread=tuple(unread),
        marks=(*([None] * added), *marks) if any(mark is not None for mark in marks) else (),
    )  # fmt: skip


def _with_system(
    record: Mapping[str, Any], messages: tuple[Mapping[str, Any], ...], where: str
) -> tuple[Mapping[str, Any], ...]:
    """The messages after what the record has under ``system``, beside them."""
    system = record.get("system")
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise UserError("is no text", field="system", value=shown(system), accepted="a string", where=where)
    if messages[0]["role"] == "system":
        raise UserError(
            "the messages begin with a system message, too", field="system", value=shown(system), where=where,
            accepted="one of them",
        )  # fmt: skip
    return ({"role": "system", "content": _text(system, "system", where)}, *messages)


def _alpaca(record: Mapping[str, Any], where: str) -> Conversation:
    """The instruction, and below it the input, if there is one, are what the user says."""
    if record.get("history"):
        raise UserError(
            "earlier turns are not read beside an instruction", field="history", value=shown(record["history"]),
            accepted="messages", where=where,
        )  # fmt: skip
    if record.get("context"):
        source = '.context + "\\n" + .input' if record.get("input") else ".context"
        raise UserError(
            "is not read beside an instruction", field="context", value=shown(record["context"]), where=where,
            accepted=f"input (jq -c '.input = {source} | del(.context)' makes such records)",
        )  # fmt: skip
    texts = {key: record.get(key) for key in (ALPACA, "input", "output")}
    for key, value in texts.items():
        if not isinstance(value, str) and not (key == "input" and value is None):
            raise UserError("is no text", field=key, value=shown(value), accepted="a string", where=where)
        _text(value or "", key, where)
    if not texts["output"]:
        raise UserError("is empty", field="output", value="", accepted="text to be learned", where=where)
    question = "\n".join(text for text in (texts[ALPACA], texts["input"]) if text)
    if not question:
        raise UserError("is empty, and so is input", field=ALPACA, value="", accepted="what is asked", where=where)
    messages = ({"role": "user", "content": question}, {"role": "assistant", "content": texts["output"]})
    refuse_marks(record, where)
    refuse_record_keys(record, None, where)
    return _conversation(record, ALPACA, messages, [], _Turns(where), where)


def _prompt(record: Mapping[str, Any], where: str) -> Conversation:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise UserError("is empty", field="completion", value="", accepted="text to be learned", where=where)
        _require_text_alone(record, where)
        refuse_marks(record, where)
        refuse_record_keys(record, None, where)
        unread = tuple(unread_record_keys(record, PROMPT, where))
        texts = (_text(prompt, "prompt", where), _text(completion, "completion", where))
        return Conversation(text=texts, unread=unread)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError(
            "one of them is a string, the other one is not", field="prompt and completion",
            accepted="two strings, or two lists of messages", where=where,
        )  # fmt: skip
    prompt_list, completion_list = _list(prompt, "prompt", where), _list(completion, "completion", where)
    turns = _Turns(where, _shared([*prompt_list, *completion_list]))
    prompt_messages, completion_messages = turns.read(prompt_list, "prompt"), turns.read(completion_list, "completion")
    _require_assistant(completion_messages, "completion", where)
    refuse_marks(record, where)
    refuse_record_keys(record, prompt_messages[0], where)
    return _conversation(
        record, PROMPT, (*prompt_messages, *completion_messages), turns.marks, turns, where, first=len(prompt_messages)
    )


def _require_text_alone(record: Mapping[str, Any], where: str) -> None:
    """A prompt that is text is no message, so no template says where the system text and the tools go."""
    for key, value in (("system", record.get("system")), ("tools", read_tools(record, where))):
        if value:
            turns = 'prompt: [{role: "user", content: .prompt}], '
            turns += 'completion: [{role: "assistant", content: .completion}]'
            raise UserError(
                "is not read beside a prompt and a completion that are strings", field=key, value=shown(value),
                accepted=f"lists of messages (jq -c '. + {{{turns}}}' makes such records)", where=where,
            )  # fmt: skip


def _list(value: Any, field: str, where: str) -> list[Any]:
    turns = value
    if isinstance(value, str) and value.lstrip().startswith("["):  # as tables store it in one column
        with suppress(ValueError, RecursionError):
            turns = json.loads(value)
    if isinstance(turns, list) and turns:
        return turns
    empty = turns == []
    accepted = "a list of messages" + (f" (jq -c 'select(.{field} != [])' leaves such records out)" if empty else "")
    problem = "is empty" if empty else "is not a list"
    raise UserError(problem, field=field, value=shown(value), accepted=accepted, where=where)


def _one_spelling(turn: Mapping[str, Any], field: str, share: bool, where: str) -> dict[str, Any]:
    """A turn with a role and content, without marks; of ShareGPT, translated.

    A ``from`` or ``value`` that cannot be the role or the content (a speaker's name, a number) stays a key of its own.

    UserError: it says both ``content`` and ``value``, or ``role`` and ``from``, and they differ.
    """
    translated = {key: value for key, value in turn.items() if key not in MARKS}
    for old, new in (("from", "role"), ("value", "content")):
        other = translated.pop(old, None)
        if translated.get(new) is None:
            if share and other is not None:
                translated[new] = other
            continue
        meant: str | list[Any] | None = other if isinstance(other, (str, list)) else None
        if old == "from":
            meant = _ROLES.get(other) if isinstance(other, str) else None
        if meant is None:
            translated[old] = other
        elif meant != "" and translated[new] not in (other, meant):
            raise UserError(
                f"{new} beside it is {shown(translated[new])}", field=f"{field}.{old}", value=shown(other), where=where,
                accepted=f"one of {old} and {new}, or both alike",
            )  # fmt: skip
    return translated


def _message(
    turn: Mapping[str, Any], field: str, where: str, share: bool, pieces: Pieces
) -> Mapping[str, Any]:  # fmt: skip
    """A message with a role and content."""
    message = _one_spelling(turn, field, share, where)
    role = message.get("role")
    if share and isinstance(role, str) and role in _ROLES:
        message["role"] = role = _ROLES[role]
    if not isinstance(role, str) or not role or (share and role not in _ROLES.values()):
        name, roles = ("from", ", ".join(_ROLES)) if share else ("role", "user, assistant, system, tool, …")
        raise UserError("has no such role", field=f"{field}.{name}", value=shown(role), accepted=roles, where=where)
    if message.get("tool_calls"):
        message["tool_calls"] = pieces.calls(message["tool_calls"], f"{field}.tool_calls")
    content = message.get("content")
    name = f"{field}.{'value' if share else 'content'}"
    if isinstance(content, str):
        _text(content, name, where)
    elif isinstance(content, list):
        message["content"] = pieces.parts(content, name) or ""  # templates of strings would write []
    elif not (content is None and message.get("tool_calls")):
        accepted = "a string (or a list of parts; or null beside tool_calls)"
        value = "missing" if "content" not in message else shown(content)
        raise UserError("is no text", field=name, value=value, accepted=accepted, where=where)
    for key in TURN_TEXTS:
        if message.get(key, "") != "" and says_nothing(message[key]):  # [], {} and false, which templates may write
            del message[key]
        if not isinstance(message.get(key), str | None) and not (key in TURN_NAMES and type(message[key]) is int):
            raise UserError(
                "is no text", field=f"{field}.{key}", value=shown(message[key]), accepted="a string", where=where
            )
    # Keys without a value (columns of a table that other rows use) are not there for a template, as in transformers.
    return {key: value for key, value in message.items() if value is not None}


def _require_assistant(messages: Sequence[Mapping[str, Any]], field: str, where: str) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise UserError(
            "has no turn of the assistant, so nothing to learn", field=field, value=f"roles {roles}",
            accepted="at least one message with role assistant", where=where,
        )  # fmt: skip


def _text(text: str, field: str, where: str) -> str:
    try:
        text.encode()  # JSON can spell half of a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError:
        raise UserError("holds half of a surrogate pair", field=field, accepted="Unicode text", where=where) from None
    return text
