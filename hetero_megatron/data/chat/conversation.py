"""One record of a fine-tuning data set -> a conversation.

Read are ``messages`` (as OpenAI, TRL and Hugging Face have them), ShareGPT's ``conversations``, ``prompt`` with
``completion`` (both strings, or both lists of messages) and Alpaca's ``instruction``, ``input`` and ``output``. A
record that could be meant in two ways is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hetero_megatron.data.chat.forms import ALPACA, PROMPT, form_of, is_pair, pair_refused
from hetero_megatron.errors import UserError

_ROLES = {  # ShareGPT's ``from`` -> role
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "bard": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """Attributes:
        messages: with a role and content each; empty where the record holds text.
        tools: what the template is told that the assistant may call; None: nothing.
        text: (prompt, completion) of a record without messages, which no chat template renders.
        first: messages before this one are the prompt: assistants in them do not count in the loss."""

    messages: tuple[Mapping[str, Any], ...] = ()
    tools: Sequence[Any] | None = None
    text: tuple[str, str] | None = None
    first: int = 0


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
    # ShareGPT's turns have from and value, under whatever name; conversations may also hold OpenAI's messages.
    share = any(isinstance(turn, dict) and "from" in turn and "role" not in turn for turn in raw)
    messages = tuple(_turn(turn, f"{form}[{i}]", where, share) for i, turn in enumerate(raw))
    if is_pair(record) and messages[-1]["role"] != "assistant":  # else they hold the chosen one
        raise pair_refused(record, where)
    _require_assistant(messages, form, where)
    return Conversation(_with_system(record, messages, where), _tools(record, where))


def _with_system(
    record: Mapping[str, Any], messages: tuple[Mapping[str, Any], ...], where: str
) -> tuple[Mapping[str, Any], ...]:
    """The messages after what the record has under ``system``, beside them."""
    system = record.get("system")
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise UserError("is no text", field="system", value=_shown(system), accepted="a string", where=where)
    if messages[0]["role"] == "system":
        raise UserError(
            "the messages begin with a system message, too", field="system", value=_shown(system), where=where,
            accepted="one of them",
        )  # fmt: skip
    return ({"role": "system", "content": _text(system, "system", where)}, *messages)


def _alpaca(record: Mapping[str, Any], where: str) -> Conversation:
    """The instruction, and below it the input, if there is one, are what the user says."""
    if record.get("history"):
        raise UserError(
            "earlier turns are not read beside an instruction", field="history", value=_shown(record["history"]),
            accepted="messages", where=where,
        )  # fmt: skip
    if record.get("context"):
        source = '.context + "\\n" + .input' if record.get("input") else ".context"
        raise UserError(
            "is not read beside an instruction", field="context", value=_shown(record["context"]), where=where,
            accepted=f"input (jq -c '.input = {source} | del(.context)' makes such records)",
        )  # fmt: skip
    texts = {key: record.get(key) for key in (ALPACA, "input", "output")}
    for key, value in texts.items():
        if not isinstance(value, str) and not (key == "input" and value is None):
            raise UserError("is no text", field=key, value=_shown(value), accepted="a string", where=where)
        _text(value or "", key, where)
    if not texts["output"]:
        raise UserError("is empty", field="output", value="", accepted="text to be learned", where=where)
    asked = "\n".join(text for text in (texts[ALPACA], texts["input"]) if text)
    if not asked:
        raise UserError("is empty, and so is input", field=ALPACA, value="", accepted="what is asked", where=where)
    messages = ({"role": "user", "content": asked}, {"role": "assistant", "content": texts["output"]})
    return Conversation(_with_system(record, messages, where), _tools(record, where))


def _prompt(record: Mapping[str, Any], where: str) -> Conversation:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise UserError("is empty", field="completion", value="", accepted="text to be learned", where=where)
        _require_text_alone(record, where)
        return Conversation(text=(_text(prompt, "prompt", where), _text(completion, "completion", where)))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError(
            "one of them is a string, the other one is not", field="prompt and completion",
            accepted="two strings, or two lists of messages", where=where,
        )  # fmt: skip
    turns = tuple(_turn(t, f"prompt[{i}]", where) for i, t in enumerate(_list(prompt, "prompt", where)))
    before = _with_system(record, turns, where)
    after = [_turn(t, f"completion[{i}]", where) for i, t in enumerate(_list(completion, "completion", where))]
    _require_assistant(after, "completion", where)
    return Conversation((*before, *after), _tools(record, where), first=len(before))


def _require_text_alone(record: Mapping[str, Any], where: str) -> None:
    """A prompt that is text is no message, so no template says where the system text and the tools go."""
    for key, value in (("system", record.get("system")), ("tools", _tools(record, where))):
        if value:
            turns = 'prompt: [{role: "user", content: .prompt}], '
            turns += 'completion: [{role: "assistant", content: .completion}]'
            raise UserError(
                "is not read beside a prompt and a completion that are strings", field=key, value=_shown(value),
                accepted=f"lists of messages (jq -c '. + {{{turns}}}' makes such records)", where=where,
            )  # fmt: skip


def _list(value: Any, field: str, where: str) -> list[Any]:
    found = value
    if isinstance(value, str) and value.lstrip().startswith("["):  # as tables store it in one column
        with suppress(ValueError, RecursionError):
            found = json.loads(value)
    if isinstance(found, list) and found:
        return found
    empty = found == []
    accepted = "a list of messages" + (f" (jq -c 'select(.{field} != [])' leaves such records out)" if empty else "")
    problem = "is empty" if empty else "is not a list"
    raise UserError(problem, field=field, value=_shown(value), accepted=accepted, where=where)


def _turn(turn: Any, field: str, where: str, share: bool = False) -> Mapping[str, Any]:
    """A message with a role and content; of ShareGPT, translated."""
    if not isinstance(turn, dict):
        raise UserError("is not an object", field=field, value=_shown(turn), accepted="a message", where=where)
    if share:
        turn = {"role": turn.get("from"), "content": turn.get("value")} | {
            key: value for key, value in turn.items() if key not in ("from", "value")
        }
    role = turn.get("role")
    if share and role in _ROLES:
        turn["role"] = role = _ROLES[role]
    if not isinstance(role, str) or not role or (share and role not in _ROLES.values()):
        name, known = ("from", ", ".join(_ROLES)) if share else ("role", "user, assistant, system, tool, …")
        raise UserError("has no such role", field=f"{field}.{name}", value=_shown(role), accepted=known, where=where)
    if turn.get("weight", 1) not in (1, None):
        raise UserError(
            "turns cannot be weighted", field=f"{field}.weight", value=_shown(turn["weight"]), where=where,
            accepted="no weight; prompt and completion, where earlier turns shall not count",
        )  # fmt: skip
    content = turn.get("content")
    if isinstance(content, str):
        _text(content, f"{field}.content", where)
    elif isinstance(content, list):
        _require_text_parts(content, f"{field}.content", where)
    elif not (content is None and turn.get("tool_calls")):
        accepted = "a string (or a list of parts; or null beside tool_calls)"
        value = "missing" if "content" not in turn else _shown(content)
        name = "value" if share else "content"
        raise UserError("is no text", field=f"{field}.{name}", value=value, accepted=accepted, where=where)
    # Keys without a value (columns of a table that other rows use) are not there for a template, as in transformers.
    return {key: value for key, value in turn.items() if value is not None}


def _require_text_parts(parts: Sequence[Any], field: str, where: str) -> None:
    """Images and sounds would become marks in the text that stand for nothing."""
    for i, part in enumerate(parts):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text":
            raise UserError(
                "this version trains on text only", field=f"{field}[{i}].type", value=_shown(kind), accepted="text",
                where=where,
            )  # fmt: skip


def _require_assistant(messages: Sequence[Mapping[str, Any]], field: str, where: str) -> None:
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(str(message["role"]) for message in messages))
        raise UserError(
            "has no turn of the assistant, so nothing to learn", field=field, value=f"roles {roles}",
            accepted="at least one message with role assistant", where=where,
        )  # fmt: skip


def _tools(record: Mapping[str, Any], where: str) -> Sequence[Any] | None:
    """``tools``: a list, or its JSON text as data sets store it in one column."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise UserError("is not JSON", field="tools", value=_shown(tools), accepted="a list", where=where) from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise UserError("is not a list", field="tools", value=_shown(tools), accepted="a list of tools", where=where)
    return tools


def _text(text: str, field: str, where: str) -> str:
    try:
        text.encode()  # JSON can spell half of a surrogate pair, which no tokenizer takes
    except UnicodeEncodeError:
        raise UserError("holds half of a surrogate pair", field=field, accepted="Unicode text", where=where) from None
    return text


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)[:80]
