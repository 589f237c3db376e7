"""Which form of conversation a record has; of forms that are not read, what they are and what makes them readable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hetero_megatron.data.sources.jsonl import shown_names
from hetero_megatron.errors import UserError

ACCEPTED = "messages, conversations (ShareGPT), prompt and completion, or instruction and output (Alpaca)"
LISTS = ("messages", "conversations", "conversation")  # keys of a list of turns
PROMPT, ALPACA = "prompt", "instruction"
_RATINGS = ("label", "kto_tag")  # TRL's and LLaMA-Factory's
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_SECOND = {PROMPT: "completion", ALPACA: "output"}
# Questions and answers under other names, which a user has to say the meaning of.
_PAIRS = (
    ("question", "answer"), ("query", "response"), ("prompt", "response"), ("prompt", "output"),
    ("instruction", "response"), ("instruction", "completion"), ("problem", "solution"), ("input", "output"),
    ("question", "response"), ("input", "target"),
)  # fmt: skip


def form_of(record: Mapping[str, Any], where: str) -> str:
    """The key that the conversation is under: one of ``LISTS``, ``PROMPT`` or ``ALPACA``.

    A prompt without completion beside a whole conversation is a copy of its beginning, as data sets have it.

    Raises:
        UserError: there is none, or more than one whole conversation, or more than text that is to be learned; where:
            file and line.
    """
    _refuse_more_than_text(record, where)
    keys = {key for key, value in record.items() if value is not None}
    forms = [key for key in LISTS if key in keys] + [key for key, second in _SECOND.items() if {key, second} <= keys]
    if len(forms) > 1:
        forms_text = " and ".join(forms)
        raise UserError(f"the record has {forms_text}", field="record", accepted=f"one of {ACCEPTED}", where=where)
    if is_pair(record) and (not forms or forms[0] not in LISTS):
        raise pair_refused(record, where)
    if not forms:
        raise _no_form(record, keys, where)
    return forms[0]


def _refuse_more_than_text(record: Mapping[str, Any], where: str) -> None:
    for key in _RATINGS:
        value = record.get(key)
        if isinstance(value, int) and value in (0, 1):  # bool, too
            selector = f".{key}" if isinstance(value, bool) else f".{key} == 1"
            raise UserError(
                "the record is rated, for preference training by single answers (KTO), which this version has not",
                field=key, value=json.dumps(value), where=where,
                accepted="the records that shall be learned from, without it "
                f"(jq -c 'select({selector}) | del(.{key})' keeps those)",
            )  # fmt: skip
    for key in _MEDIA:
        if record.get(key):
            raise UserError(
                "this version trains on text only", field=key, value=json.dumps(record[key], default=str)[:80],
                accepted="records of nothing but text", where=where,
            )  # fmt: skip


def is_pair(record: Mapping[str, Any]) -> bool:
    """Whether the record holds two answers, of which one was preferred."""
    return record.get("chosen") is not None and record.get("rejected") is not None


def pair_refused(record: Mapping[str, Any], where: str) -> UserError:
    """The refusal of a preference pair, with the jq program that makes a conversation of what was chosen."""
    turns = next((key for key in LISTS if record.get(key) is not None), None)
    if turns is not None and isinstance(record["chosen"], dict):
        jq_object = f"{{{turns}: (.{turns} + [.chosen])}}"
    elif record.get(ALPACA) is not None:
        jq_object = "{output: .chosen}"
    elif record.get(PROMPT) is not None and isinstance(record[PROMPT], type(record["chosen"])):
        jq_object = "{completion: .chosen}"
    else:
        jq_object = "{messages: .chosen}"
    return UserError(
        "the record is a preference pair (chosen, rejected)", field="record", where=where,
        accepted=f"--preference dpo (or another of its losses) to train on pairs; {ACCEPTED}; jq -c '. + {jq_object} | "
        "del(.chosen, .rejected)' keeps what was chosen",
    )  # fmt: skip


def _no_form(record: Mapping[str, Any], have: set[str], where: str) -> UserError:
    if null := [key for key in LISTS if key in record]:
        return UserError("is null", field=null[0], accepted=ACCEPTED, where=where)
    if {ALPACA, "context", "response"} <= have:
        return UserError(
            f"the record is no conversation (it has {shown_names(have)})", field="record", where=where,
            accepted=f"{ACCEPTED}; jq -c '{{instruction, input: .context, output: .response}}' makes such records",
        )  # fmt: skip
    if pair := next((pair for pair in _PAIRS if all(isinstance(record.get(key), str) for key in pair)), None):
        turns = f'[{{role: "user", content: .{pair[0]}}}, {{role: "assistant", content: .{pair[1]}}}]'
        return UserError(
            f"the record is no conversation (it has {shown_names(have)})", field="record",
            accepted=f"{ACCEPTED}; jq -c '{{messages: {turns}}}' makes such records", where=where,
        )  # fmt: skip
    for key, second in _SECOND.items():
        if key in have:
            return UserError(f"missing beside {key}", field=second, accepted=ACCEPTED, where=where)
    if len(have) == 1 and isinstance(inner := record[next(iter(have))], list) and inner and isinstance(inner[0], dict):
        key = next(iter(have))
        return UserError(
            f"a list of records under {key[:40]!r} is no record", field="record", where=where,
            accepted=f"one record per line (jq -c '.{key[:40]}[]' makes such lines)",
        )  # fmt: skip
    names = f" (it has {shown_names(have)})" if have else ""
    text = "; plain text is for hetero-megatron pretrain" if isinstance(record.get("text"), str) else ""
    accepted = ACCEPTED + text
    return UserError(f"the record is no conversation{names}", field="record", accepted=accepted, where=where)
