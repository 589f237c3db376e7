"""One record of a fine-tuning data set -> a conversation.

Read are ``messages`` (as OpenAI, TRL and Hugging Face have them), ShareGPT's ``conversations`` and ``prompt`` with
``completion`` (both strings, or both lists of messages). A record that could be meant in two ways is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetero_megatron.data.sources.jsonl import shown_names
from hetero_megatron.errors import UserError

ACCEPTED = "messages, conversations (ShareGPT), or prompt and completion"
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
        UserError: not one of the three formats, or damaged; no turn of the assistant.
    """
    forms = [key for key in ("messages", "conversations", "prompt") if record.get(key) is not None]
    if not forms:
        names = f" (it has {shown_names(record)})" if record else ""
        raise UserError(f"the record is no conversation{names}", field="record", accepted=ACCEPTED, where=where)
    if len(forms) > 1:
        shown = " and ".join(forms)
        raise UserError(f"the record has {shown}", field="record", accepted=f"one of {ACCEPTED}", where=where)
    if forms == ["prompt"]:
        return _prompt(record, where)
    raw = _list(record[forms[0]], forms[0], where)
    # ShareGPT's turns have from and value; some data sets call lists of OpenAI's messages conversations.
    share = forms == ["conversations"] and any(isinstance(turn, dict) and "from" in turn for turn in raw)
    messages = tuple(_turn(turn, f"{forms[0]}[{i}]", where, share) for i, turn in enumerate(raw))
    _require_assistant(messages, forms[0], where)
    return Conversation(messages, _tools(record, where))


def _prompt(record: Mapping[str, Any], where: str) -> Conversation:
    prompt, completion = record["prompt"], record.get("completion")
    if completion is None:
        raise UserError("missing beside prompt", field="completion", accepted=ACCEPTED, where=where)
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise UserError("is empty", field="completion", value="", accepted="text to be learned", where=where)
        return Conversation(text=(_text(prompt, "prompt", where), _text(completion, "completion", where)))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise UserError(
            "one of them is a string, the other one is not", field="prompt and completion",
            accepted="two strings, or two lists of messages", where=where,
        )  # fmt: skip
    before = [_turn(t, f"prompt[{i}]", where) for i, t in enumerate(_list(prompt, "prompt", where))]
    after = [_turn(t, f"completion[{i}]", where) for i, t in enumerate(_list(completion, "completion", where))]
    _require_assistant(after, "completion", where)
    return Conversation((*before, *after), _tools(record, where), first=len(before))


def _list(value: Any, field: str, where: str) -> list[Any]:
    if isinstance(value, list) and value:
        return value
    problem = "is empty" if value == [] else "is not a list"
    raise UserError(problem, field=field, value=_shown(value), accepted="a list of messages", where=where)


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
    elif not (isinstance(content, list) or (content is None and turn.get("tool_calls"))):
        accepted = "a string (or a list of parts; or null beside tool_calls)"
        value = "missing" if "content" not in turn else _shown(content)
        name = "value" if share else "content"
        raise UserError("is no text", field=f"{field}.{name}", value=value, accepted=accepted, where=where)
    # Keys without a value (columns of a table that other rows use) are not there for a template, as in transformers.
    return {key: value for key, value in turn.items() if value is not None}


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
