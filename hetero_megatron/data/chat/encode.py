"""A conversation -> token ids, and which of them count in the loss: those that the assistant wrote.

Where the chat template marks them (``{% generation %}``), the marks say which. Else the conversation is rendered up to
every turn of the assistant, without and with it: the first must be how the whole begins, up to where the turn starts;
the second, up to where it ends. A template for which that does not hold is refused, never guessed about.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hetero_megatron.data.chat.conversation import Conversation
from hetero_megatron.data.tokenizer_files import refuse_panics
from hetero_megatron.data.tokenizers import HuggingFaceTokenizer
from hetero_megatron.errors import UserError

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TEMPLATE = "--chat-template"


class Encoded(NamedTuple):
    """``ids`` int64 [n]; ``counts`` bool [n]: the token was written by the assistant."""

    ids: np.ndarray
    counts: np.ndarray


class ChatEncoder:
    """Encodes conversations with a tokenizer and its chat template.

    Args:
        template: Jinja text; None: the tokenizer's own, which only records with messages need.
        everything: all tokens count, not only the assistant's.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, template: str | None = None, everything: bool = False) -> None:
        self.tokenizer, self.everything = tokenizer, everything
        own = tokenizer.chat_template
        self.template = template if template is not None else own
        self.marked = self.template is not None and bool(_MARK.search(self.template))
        if not tokenizer.has_offsets:
            raise UserError(
                "a tokenizer without a fast version does not say which characters a token comes from",
                field="--tokenizer-model", value=tokenizer.name, accepted="a directory with tokenizer.json",
            )  # fmt: skip

    @property
    def fingerprint(self) -> str:
        """Changes whenever ids or masks could; part of cache keys."""
        digest = hashlib.sha256((self.template or "").encode()).hexdigest()
        return f"{self.tokenizer.fingerprint}-{digest}-{self.everything}"

    def encode(self, conversation: Conversation, where: str) -> Encoded:
        """Ids and mask of one conversation. UserError: the template refuses it, or its turns cannot be told apart."""
        if conversation.text is not None:
            return self._encode_text(*conversation.text)
        if self.template is None:
            raise UserError(
                "the tokenizer has no chat template, but the data has messages", field=_TEMPLATE, where=where,
                accepted="a Jinja file, a tokenizer with chat_template.jinja, or data with prompt and completion",
            )  # fmt: skip
        text, spans = self._marked(conversation, where) if self.marked else self._compared(conversation, where)
        ids, counts = self._mask(text, spans, add_special_tokens=False)
        if not counts.any():
            raise UserError(
                "the chat template renders nothing of the assistant's", field=_TEMPLATE, where=where,
                accepted="a template that renders the content of assistant messages",
            )  # fmt: skip
        return Encoded(ids, np.ones_like(counts) if self.everything else counts)

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of messages, up to where the assistant's turn begins."""
        if self.template is None:
            raise UserError("the tokenizer has no chat template", field=_TEMPLATE, accepted="a Jinja file")
        text, _ = self._render(messages, None, "prompt", prompt=True)
        return [int(i) for i in self.tokenizer.encode_offsets(text, False)[0]]

    def _encode_text(self, prompt: str, completion: str) -> Encoded:
        ids, counts = self._mask(prompt + completion, [(len(prompt), len(prompt + completion))], True)
        if self.tokenizer.eod is not None and (not len(ids) or ids[-1] != self.tokenizer.eod):
            ids, counts = np.append(ids, self.tokenizer.eod), np.append(counts, True)
        if len(counts):
            counts[-1] = True  # an end of sequence that the tokenizer added by itself
        return Encoded(ids, np.ones_like(counts) if self.everything else counts)

    def _marked(self, conversation: Conversation, where: str) -> tuple[str, list[tuple[int, int]]]:
        text, spans = self._render(conversation.messages, conversation.tools, where)
        if conversation.first:
            prompt, _ = self._render(conversation.messages[: conversation.first], conversation.tools, where, True)
            if not text.startswith(prompt):
                raise self._not_a_prefix(conversation.first, where)
            spans = [(max(start, len(prompt)), end) for start, end in spans if end > len(prompt)]
        return text, spans

    def _compared(self, conversation: Conversation, where: str) -> tuple[str, list[tuple[int, int]]]:
        messages, tools = conversation.messages, conversation.tools
        text, _ = self._render(messages, tools, where)
        spans: list[tuple[int, int]] = []
        for i in range(conversation.first, len(messages)):
            if messages[i]["role"] != "assistant":
                continue
            before, _ = self._render(messages[:i], tools, where, prompt=True) if i else ("", [])
            after, _ = self._render(messages[: i + 1], tools, where)
            if not (text.startswith(before) and text.startswith(after) and len(before) <= len(after)):
                raise self._not_a_prefix(i, where)
            spans.append((len(before), len(after)))
        return text, spans

    def _not_a_prefix(self, turn: int, where: str) -> UserError:
        return UserError(
            f"the template renders what comes before message {turn} in another way once it is there, so the turns of "
            "the assistant cannot be told apart by comparison", field=_TEMPLATE, where=where,
            accepted="a template with {% generation %} … {% endgeneration %} around what the assistant writes",
        )  # fmt: skip

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, where: str, prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """(text, character intervals that the template marks as the assistant's)."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[[dict(message) for message in messages]], tools=list(tools) if tools else None,
                chat_template=self.template, return_assistant_tokens_mask=self.marked,
                add_generation_prompt=prompt, **self.tokenizer.special_tokens,
            )  # fmt: skip
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            said = " ".join(str(error).split())[:200]
            raise UserError(
                f"the chat template does not take this conversation: {said or type(error).__name__}",
                field=_TEMPLATE, where=where,
                accepted="what the template knows: roles and their order, tool calls, content as text or as parts",
            ) from None  # fmt: skip
        return texts[0], [(int(a), int(b)) for a, b in spans[0]] if self.marked else []

    def _mask(self, text: str, spans: Sequence[tuple[int, int]], add_special_tokens: bool) -> Encoded:
        """Tokens of a text, and which of them have characters in one of the intervals, as transformers counts."""
        with refuse_panics():
            ids, offsets = self.tokenizer.encode_offsets(text, add_special_tokens)
        counts = np.zeros(len(ids), bool)
        starts, ends = offsets[:, 0], offsets[:, 1]
        for start, end in spans:
            counts |= (starts < end) & (ends > start)
        return Encoded(ids, counts)
