"""A conversation as token ids, and which of them count in the loss: those that the assistant wrote.

Where the chat template marks them (``{% generation %}``), the marks say which. Else the conversation is rendered up to
every turn of the assistant, without and with it: the first must be how the whole begins, up to where the turn starts;
the second, up to where it ends. A template for which that does not hold is refused, never guessed about. Of turns that
the data mark not to be learned nothing counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from hetero_megatron.data.chat.arguments import as_strings, last_line, left_out, other_forms, wrongly_rendered
from hetero_megatron.data.chat.conversation import Conversation
from hetero_megatron.data.chat.keys import RECORD_READ, TURN_READ, TURNS, near
from hetero_megatron.data.chat.pieces import CALL, CALLS, FUNCTION, PART, PARTS, TOOL, TOOLS
from hetero_megatron.data.chat.records import Record
from hetero_megatron.data.chat.templates import FLAG, Rendered, Template, Templates
from hetero_megatron.data.guard import RENDER, TOKENIZE, UNLIMITED, CallLimits, Guard
from hetero_megatron.data.tokenizers import HuggingFaceTokenizer, too_costly
from hetero_megatron.errors import UserError

ASSISTANT = "assistant"
WHOLE = "tojson"  # a template with this word writes tools whole, with all of their keys
_KNOWN = {
    TURNS: TURN_READ, PARTS: PART.accepted_keys, CALLS: CALL.accepted_keys | FUNCTION.accepted_keys,
    TOOLS: TOOL.accepted_keys,
}  # fmt: skip
_Spans = list[tuple[int, int]]


class Encoded(NamedTuple):
    """``ids`` int64 [n]; ``counts`` bool [n]: the token was written by the assistant."""

    ids: np.ndarray
    counts: np.ndarray


class ChatEncoder:
    """Encodes conversations with a tokenizer and its chat template.

    Args:
        template: Jinja text, or the name of one of the tokenizer's; None: the tokenizer's own, which only records with
            messages need.
        name: of the template's file, for messages.
        everything: all tokens count, not only the assistant's.
    """

    def __init__(
        self, tokenizer: HuggingFaceTokenizer, template: str | None = None, name: str = "given",
        everything: bool = False,
    ) -> None:  # fmt: skip
        self.tokenizer, self.everything = tokenizer, everything
        self.templates = Templates(tokenizer.chat_templates, template, tokenizer.name, name)
        if not tokenizer.has_offsets:
            raise UserError(
                "a tokenizer without a fast version does not say which characters a token comes from",
                field="--tokenizer-model", value=tokenizer.name, accepted="a directory with tokenizer.json",
            )  # fmt: skip

    @property
    def fingerprint(self) -> str:
        """Changes whenever ids or masks could; part of cache keys."""
        digest = hashlib.sha256(self.templates.text.encode()).hexdigest()
        return f"{self.tokenizer.fingerprint}-{digest}-{self.everything}"

    def encode(self, conversation: Conversation, where: str, limits: CallLimits = UNLIMITED) -> Encoded:
        """Ids and mask of one conversation. UserError: the template refuses it, or its turns cannot be told apart."""
        if conversation.text is not None:
            return self._encode_text(*conversation.text, where, limits)
        template = self.templates.choose(conversation.tools is not None, where)
        turns = _Turns(template, conversation, self.tokenizer.special_tokens, where, limits, self.everything)
        spans, spared = turns.spans()
        ids, counts = self._mask(turns.text, spans, False, where, limits)
        if not counts.any() and not conversation.marks:
            raise UserError(
                "the chat template renders nothing of the assistant's", field=FLAG, value=template.name, where=where,
                accepted="a template that renders the content of assistant messages",
            )  # fmt: skip
        if self.everything:
            counts = ~self._mask(turns.text, spared, False, where, limits).counts if spared else np.ones_like(counts)
        return Encoded(ids, counts)

    def prompts(self, conversations: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[int]]:
        """Ids of the messages of each, up to where the assistant's turn begins; within limits of time and memory."""
        template = self.templates.choose(False, "")
        template_args = {"tools": None, "add_generation_prompt": True}

        def work(numbered: tuple[int, Sequence[Mapping[str, Any]]], limits: CallLimits) -> np.ndarray:
            prompt_name = f"prompt {numbered[0]}"
            text = template.render(numbered[1], template_args, self.tokenizer.special_tokens, prompt_name, limits).text
            return self.tokenizer.encode_offsets(text, False, prompt_name, limits)[0]

        def refuse(numbered: tuple[int, Sequence[Mapping[str, Any]]], call: str, why: str) -> UserError:
            return self.refuse(Record({}, f"prompt {numbered[0]}"), call, why)

        return [ids.tolist() for _, ids in Guard(work, refuse).map(enumerate(conversations))]

    def refuse(self, record: Record, call: str, why: str) -> UserError:
        """The error for a record that a template or tokenizer cannot be let go on with."""
        if call == RENDER:
            name = self.templates.names
            accepted = "a template that renders a conversation in less than a second"
            return UserError(f"the chat template {why}", field=FLAG, value=name, where=record.where, accepted=accepted)
        if call == TOKENIZE:
            return too_costly(self.tokenizer.name, why, record.where)
        return UserError(f"the record {why}", field="record", where=record.where, accepted="another record")

    def unread(self, conversation: Conversation) -> list[str]:
        """Keys of a record that neither training nor the template reads, each with the known key that is nearest."""
        if not conversation.unread and conversation.documents is None and not conversation.options:
            return []
        words: frozenset[str] = frozenset()
        if conversation.text is None:
            words = self.templates.choose(conversation.tools is not None, "").words
        record = [f"{key}{near(key, RECORD_READ)}" for kind, key in conversation.unread if not kind]
        told = words | {key for kind, key in conversation.unread if kind == TOOLS and WHOLE in words}
        inner = [f"{key} of {kind}{near(key, _KNOWN[kind])}" for kind, key in conversation.unread
                 if kind and key not in told]  # fmt: skip
        documents = ["documents"] if conversation.documents is not None and "documents" not in words else []
        return [
            *record,
            *inner,
            *documents,
            *(f"chat_template_kwargs.{key}" for key in conversation.options.keys() - words),
        ]

    def _encode_text(self, prompt: str, completion: str, where: str, limits: CallLimits) -> Encoded:
        ids, counts = self._mask(prompt + completion, [(len(prompt), len(prompt + completion))], True, where, limits)
        if self.tokenizer.eod is not None and (not len(ids) or ids[-1] != self.tokenizer.eod):
            ids, counts = np.append(ids, self.tokenizer.eod), np.append(counts, True)
        if len(counts):
            counts[-1] = True  # an end of sequence that the tokenizer added by itself
        return Encoded(ids, np.ones_like(counts) if self.everything else counts)

    def _mask(self, text: str, spans: _Spans, add_special_tokens: bool, where: str, limits: CallLimits) -> Encoded:
        """Tokens of a text, and which of them have characters in one of the intervals, as transformers counts."""
        ids, offsets = self.tokenizer.encode_offsets(text, add_special_tokens, where, limits)
        counts = np.zeros(len(ids), bool)
        starts, ends = offsets[:, 0], offsets[:, 1]
        for start, end in spans:
            counts |= (starts < end) & (ends > start)
        return Encoded(ids, counts)


class _Turns:
    """A conversation's text, and where each turn of it stands.

    Attributes:
        text: of the whole.
    """

    def __init__(
        self, template: Template, conversation: Conversation, names: Mapping[str, Any], where: str, limits: CallLimits,
        everything: bool,
    ) -> None:  # fmt: skip
        self._template, self._given, self._where, self._limits = template, conversation, where, limits
        self._names = {**names, **conversation.options}
        self._everything = everything
        self._messages: Sequence[Mapping[str, Any]] = conversation.messages
        self.text, self._marked = self._whole()

    def spans(self) -> tuple[_Spans, _Spans]:
        """Intervals of characters: (what counts, what must not count although all else does)."""
        conversation = self._given
        marks = conversation.marks or (None,) * len(conversation.messages)
        self._check_marks(marks)
        answers = [i for i, message in enumerate(conversation.messages) if message["role"] == ASSISTANT]
        if self._template.marked:
            spans = self._of_marks({i for i in answers if marks[i] is False})
            if conversation.first:
                spans = self._after_prompt(spans)
        else:
            spans = [self._of_turn(i) for i in answers if i >= conversation.first and marks[i] is not False]
        spared = [self._of_turn(i) for i, mark in enumerate(marks) if mark is False] if self._everything else []
        return spans, spared

    def _whole(self) -> Rendered:
        """The text of all messages; arguments and parts in the form that the template takes."""
        problem: UserError | None = None
        for messages in other_forms(self._messages):
            try:
                rendered = self._render(messages)
            except UserError as error:
                problem = problem or error
                continue
            misrendered = wrongly_rendered(messages, rendered.text) or self._lost(messages, rendered.text)
            if misrendered is None:
                self._messages = messages
                return rendered
            problem = problem or UserError(
                f"the chat template writes {misrendered}", field=FLAG, value=self._template.name, where=self._where,
                accepted="a template that takes them so, or messages in another form",
            )  # fmt: skip
        assert problem is not None
        raise problem

    def _lost(self, messages: Sequence[Mapping[str, Any]], text: str) -> str | None:
        """What a template that takes content only as a string leaves out of a text, for a message; None: nothing."""
        if not (lost := left_out(messages, text)):
            return None
        whole = as_strings(messages, lost)
        with suppress(UserError):
            rendered = self._render(whole).text
            for i in lost:
                if last_line(whole[i]["content"]) in rendered:
                    return f"nothing of the parts of message {i}"
        return None

    def _check_marks(self, marks: Sequence[bool | None]) -> None:
        for i, (message, mark) in enumerate(zip(self._messages, marks)):
            if mark and message["role"] != ASSISTANT and not self._everything:
                raise UserError(
                    f"message {i} is marked to count in the loss, but its role is {message['role']}",
                    field="messages", where=self._where,
                    accepted="marks of the assistant's turns (none, or false, elsewhere), or --sft-loss all",
                )  # fmt: skip

    def _of_marks(self, left_out: set[int]) -> _Spans:
        """The template's own intervals, without those of some turns."""
        spans = self._marked
        if not left_out:
            return spans
        answers = [i for i, message in enumerate(self._messages) if message["role"] == ASSISTANT]
        owners = self._owners(answers)
        return [span for span, owner in zip(spans, owners) if owner not in left_out]

    def _owners(self, answers: Sequence[int]) -> list[int]:
        """Whose each interval of the template is: as many as there are answers, each with its text in it, or else by
        where the turns stand."""
        spans = self._marked
        texts = [last_line(self._messages[i].get("content")) for i in answers]
        if len(spans) == len(answers) and all(
            text and text in self.text[start:end] for text, (start, end) in zip(texts, spans)
        ):
            return list(answers)
        turns = {i: self._of_turn(i) for i in answers}
        owners = [[i for i, (start, end) in turns.items() if start <= a and b <= end] for a, b in spans]
        if any(len(owned) != 1 for owned in owners):
            raise UserError(
                "the record marks turns not to be learned, and the template marks what the assistant wrote, but not so "
                "that its turns can be told apart", field=FLAG, value=self._template.name, where=self._where,
                accepted="a template with {% generation %} … {% endgeneration %} around each turn",
            )  # fmt: skip
        return [owned[0] for owned in owners]

    def _after_prompt(self, spans: _Spans) -> _Spans:
        first = self._given.first
        prompt = self._render(self._messages[:first], prompt=True).text
        if not self.text.startswith(prompt):
            raise self._not_a_prefix(first)
        return [(max(start, len(prompt)), end) for start, end in spans if end > len(prompt)]

    def _of_turn(self, i: int) -> tuple[int, int]:
        """Where a turn stands; of the assistant, what it writes after what asks for it."""
        is_answer = self._messages[i]["role"] == ASSISTANT
        before = self._render(self._messages[:i], prompt=is_answer).text if i else ""
        after = self._render(self._messages[: i + 1]).text
        if not (self.text.startswith(before) and self.text.startswith(after) and len(before) <= len(after)):
            raise self._not_a_prefix(i)
        return len(before), len(after)

    def _not_a_prefix(self, turn: int) -> UserError:
        return UserError(
            f"the template renders what comes before message {turn} in another way once it is there, so the turns of "
            "the assistant cannot be told apart by comparison", field=FLAG, value=self._template.name,
            where=self._where,
            accepted="a template with {% generation %} … {% endgeneration %} around what the assistant writes",
        )  # fmt: skip

    def _render(self, messages: Sequence[Mapping[str, Any]], prompt: bool = False) -> Rendered:
        template_args = {
            "tools": self._given.tools, "documents": self._given.documents, "add_generation_prompt": prompt,
        }  # fmt: skip
        return self._template.render(messages, template_args, self._names, self._where, self._limits)
