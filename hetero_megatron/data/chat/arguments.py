"""The forms in which templates take what is no text: a call's arguments as an object or as JSON, content as parts.

transformers gives a template what the data hold. One that is made for the other form writes it all the same: a Python
dictionary, JSON in quotes. Such texts are found here, and the other form is tried.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def other_forms(messages: Messages) -> Iterator[Messages]:
    """The messages as they are; with arguments as objects, or as JSON text; the same with content that is one part of
    text as text."""
    calls = any(message.get("tool_calls") for message in messages)
    parts = any(isinstance(message.get("content"), list) for message in messages)
    for contents in (messages, _with_texts(messages)) if parts else (messages,):
        yield contents
        if calls:
            yield _with_arguments(contents, _as_object)
            yield _with_arguments(contents, _as_text)


def wrongly_rendered(messages: Messages, text: str) -> str | None:
    """What a template wrote that it was not made to take, for a message; None: nothing."""
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and content and str(content) in text:
            return f"the parts of message {i} as a list of Python"
        for arguments in _arguments(message):
            if isinstance(arguments, dict) and arguments and str(arguments) in text:
                return f"the arguments of a call of message {i} as a dictionary of Python"
            if isinstance(arguments, str) and _as_object(arguments) is not arguments and _quoted(arguments, text):
                return f"the arguments of a call of message {i} as JSON text in quotes"
    return None


def left_out(messages: Messages, text: str) -> list[int]:
    """Messages whose parts have left no trace in a text that a template made."""
    lost = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            ends = [last_line(part["text"]) for part in content]
            lost += [i] if any(ends) and not any(end in text for end in ends if end) else []
    return lost


def as_strings(messages: Messages, which: Sequence[int]) -> Messages:
    """The messages with the parts of some of them as one string."""
    return [{**message, "content": "".join(part["text"] for part in message["content"])} if i in which else message
            for i, message in enumerate(messages)]  # fmt: skip


def last_line(content: Any) -> str:
    """Of what is said after thinking, which templates leave out of earlier turns; empty of anything but text."""
    return content.split("</think>")[-1].strip().split("\n")[-1] if isinstance(content, str) else ""


def _quoted(arguments: str, text: str) -> bool:
    return any(json.dumps(arguments, ensure_ascii=ascii) in text for ascii in (False, True))


def _arguments(message: Mapping[str, Any]) -> Iterator[Any]:
    for call in message.get("tool_calls") or ():
        yield call.get("function", call).get("arguments")


def _with_arguments(messages: Messages, form: Callable[[Any], Any]) -> Messages:
    return [_changed(message, form) if message.get("tool_calls") else message for message in messages]


def _changed(message: Mapping[str, Any], form: Callable[[Any], Any]) -> Mapping[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        if isinstance(call.get("function"), dict):
            function = call["function"]
            call = {**call, "function": _with_form(function, form)}
        else:
            call = _with_form(call, form)
        calls.append(call)
    return {**message, "tool_calls": calls}


def _with_form(function: Mapping[str, Any], form: Callable[[Any], Any]) -> Mapping[str, Any]:
    return {**function, "arguments": form(function["arguments"])} if "arguments" in function else function


def _as_object(arguments: Any) -> Any:
    """The object that JSON text holds; anything else as it is."""
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
            if isinstance(parsed, dict):
                return parsed
    return arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _with_texts(messages: Messages) -> Messages:
    return [{**message, "content": _text_of(message.get("content"))} if "content" in message else message
            for message in messages]  # fmt: skip


def _text_of(content: Any) -> Any:
    """The text of content that is a single part; several parts are joined in no way that all programs share."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
        text = content[0].get("text")
        return text if isinstance(text, str) else content
    return content
