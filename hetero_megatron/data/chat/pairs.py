"""One record of preference data -> two conversations with the same prompt: the chosen answer and the rejected one.

Read are the forms of TRL and LLaMA-Factory: ``chosen`` and ``rejected`` beside a ``prompt`` (all texts, or all lists of
messages), without one (what both begin with is the prompt), beside the turns before them (``messages``,
``conversations``), and beside Alpaca's ``instruction``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any

from hetero_megatron.data.chat.conversation import Conversation, read_conversation
from hetero_megatron.data.chat.forms import ALPACA, LISTS, PROMPT
from hetero_megatron.data.chat.marks import shown
from hetero_megatron.data.sources.jsonl import shown_names
from hetero_megatron.errors import UserError

SIDES = ("chosen", "rejected")
ACCEPTED = (
    "chosen and rejected: two texts or two lists of messages, with or without a prompt of the same kind; or an answer "
    "each beside messages, conversations or instruction"
)


def read_pair(record: Mapping[str, Any], where: str) -> tuple[Conversation, ...]:
    """The conversations with the chosen and with the rejected answer.

    Args:
        where: file and line, for messages.

    Raises:
        UserError: the record is no pair, or an answer is empty, or both are the same.
    """
    answers = tuple(_side(record, side, where) for side in SIDES)
    if isinstance(answers[0], str) != isinstance(answers[1], str):
        raise UserError(
            "one of them is a text, the other one is not", field="chosen and rejected", accepted=ACCEPTED, where=where
        )
    if answers[0] == answers[1]:
        raise UserError(
            "both are the same", field="chosen and rejected", value=shown(answers[0]), where=where,
            accepted="answers that differ (jq -c 'select(.chosen != .rejected)' keeps such records)",
        )  # fmt: skip
    shared_keys = {key: value for key, value in record.items() if key not in (*SIDES, "completion", "output")}
    conversations = []
    for side, side_record in zip(SIDES, _records(shared_keys, answers, where), strict=True):
        try:
            conversation = read_conversation(side_record, where)
        except UserError as error:
            raise _of_side(error, side) from None
        if not _says_something(conversation):
            raise UserError("is empty", field=side, value=shown(record[side]), accepted="an answer", where=where)
        conversations.append(conversation)
    return tuple(conversations)


LABELS = ("label", "kto_tag")  # TRL's name, LLaMA-Factory's


def read_labelled(record: Mapping[str, Any], where: str) -> tuple[Conversation, ...]:
    """The conversation of a record with a ``label``: true, its answer is desired; or of a pair both, the chosen one
    desired.

    Raises:
        UserError: the record is no such thing, or an answer is empty, or both of a pair are the same.
    """
    if any(record.get(side) is not None for side in SIDES):
        return tuple(
            replace(side, desired=desired)
            for side, desired in zip(read_pair(record, where), (True, False), strict=True)
        )
    names = [name for name in LABELS if record.get(name) is not None]
    label = record[names[0]] if names else None
    if label not in (True, False):  # also 1 and 0
        raise UserError(
            "is no label" if names else "the record has no label", field=names[0] if names else "label",
            value=shown(label) if names else "missing", where=where,
            accepted="true or false (1 or 0) beside prompt and completion (or a conversation), or chosen and rejected",
        )  # fmt: skip
    conversation = read_conversation({key: v for key, v in record.items() if key not in LABELS}, where)
    if not _says_something(conversation):
        problem = "the answer is empty"
        raise UserError(problem, field="completion", value=shown(record.get("completion")), accepted="an answer",
                        where=where)  # fmt: skip
    return (replace(conversation, desired=bool(label)),)


def _side(record: Mapping[str, Any], side: str, where: str) -> Any:
    """A text, or a list of messages."""
    value = record.get(side)
    if value is None:
        names = {key for key, other in record.items() if other is not None}
        problem = f"the record is no preference pair (it has {shown_names(names)})" if names else "the record is empty"
        raise UserError(problem, field=side, value="missing", accepted=ACCEPTED, where=where)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, str | list):
        raise UserError("is no answer", field=side, value=shown(value), accepted=ACCEPTED, where=where)
    if not value:
        raise UserError("is empty", field=side, value=shown(value), accepted="an answer", where=where)
    return value


def _records(rest: Mapping[str, Any], answers: tuple[Any, ...], where: str) -> list[Mapping[str, Any]]:
    """For each answer a record with one conversation, in a form that fine-tuning has too."""
    turns = [key for key in LISTS if rest.get(key) is not None]
    other_keys = {key: value for key, value in rest.items() if key not in (*LISTS, PROMPT)}
    prompt = rest.get(PROMPT)
    if rest.get(ALPACA) is not None and isinstance(answers[0], str):
        return [{**other_keys, "output": answer} for answer in answers]
    if isinstance(answers[0], str):
        if turns:  # the turns before a text, which is the assistant's
            answers = tuple([{"role": "assistant", "content": answer}] for answer in answers)
        elif prompt is None:
            cut = _common(*answers)
            return [{**other_keys, PROMPT: answer[:cut], "completion": answer[cut:]} for answer in answers]
    if turns and len(answers[0]) == len(answers[1]) == 1:
        history = rest[turns[0]]
        if isinstance(history, list) and history and _speaks_last(history[-1]):  # a copy of the chosen conversation
            history = history[:-1]
        return [{**other_keys, PROMPT: history, "completion": answer} for answer in answers]
    if isinstance(answers[0], list) and not isinstance(prompt, list):  # a prompt that is text is a copy of the first
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False)))
        if not common:
            raise UserError(
                "they begin with unlike messages, and there is no prompt", field="chosen and rejected", where=where,
                value=shown(answers[1][0]), accepted="messages that begin alike, or a prompt that is a list of them",
            )  # fmt: skip
        return [{**other_keys, PROMPT: answer[:common], "completion": answer[common:]} for answer in answers]
    return [{**other_keys, PROMPT: prompt, "completion": answer} for answer in answers]


def _common(first: str, second: str) -> int:
    """How many characters both begin with; a space before the place where they part belongs to the answers."""
    cut = len(os.path.commonprefix([first, second]))
    return cut - 1 if cut and first[cut - 1] == " " else cut


def _speaks_last(turn: Any) -> bool:
    return isinstance(turn, dict) and turn.get("role", turn.get("from")) in ("assistant", "gpt", "chatgpt")


def _says_something(conversation: Conversation) -> bool:
    if conversation.text is not None:
        return bool(conversation.text[1].strip())
    answers = [m for m in conversation.messages[conversation.first :] if m["role"] == "assistant"]
    return any(m.get("tool_calls") or _text_of(m.get("content")).strip() for m in answers)


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return content if isinstance(content, str) else ""


def _of_side(error: UserError, side: str) -> UserError:
    """What is wrong with a side of a pair, under its name."""
    field = error.field or ""
    for name in ("completion", "output"):
        if field == name or field.startswith((f"{name}[", f"{name}.")):
            field = side + field.removeprefix(name)
    value = {} if error.value is None else {"value": error.value}
    return UserError(error.problem, field=field, accepted=error.accepted, where=error.where, **value)
