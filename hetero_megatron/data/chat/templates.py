"""Which chat template makes text of a conversation, as transformers chooses it, and its rendering."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hetero_megatron.data.guard import RENDER, UNLIMITED, CallLimits
from hetero_megatron.errors import UserError

FLAG = "--chat-template"
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WORD = re.compile(r"\w+")
# Characters of the text that a template makes: a multiple of what it is given, and some of its own.
_LONGER, _OWN = 64, 1 << 20
_DEFAULT, _FOR_TOOLS = "default", "tool_use"


class Rendered(NamedTuple):
    """``spans``: character intervals of ``text`` that the template marks as written by the assistant."""

    text: str
    spans: list[tuple[int, int]]


@dataclass(frozen=True)
class Template:
    """Attributes:
        name: for messages; text: Jinja.
        marked: it says itself what the assistant wrote.
        words: names and other words in it: a key that is not among them has no influence."""

    name: str
    text: str
    marked: bool
    words: frozenset[str]

    @staticmethod
    def of(name: str, text: str) -> Template:
        return Template(name, text, bool(_MARK.search(text)), frozenset(_WORD.findall(text)))

    def render(
        self, messages: Sequence[Mapping[str, Any]], told: Mapping[str, Any], names: Mapping[str, Any], where: str,
        limits: CallLimits = UNLIMITED,
    ) -> Rendered:  # fmt: skip
        """The text of messages.

        Args:
            told: tools, documents and add_generation_prompt; names: what the template knows besides.

        Raises:
            UserError: whatever the template raises, or more text than ``limits`` let it make.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        limits.begin(RENDER)
        try:
            texts, spans = render_jinja_template(
                conversations=[[dict(message) for message in messages]], chat_template=self.text,
                return_assistant_tokens_mask=self.marked, **told, **names,
            )  # fmt: skip
        except MemoryError:
            raise self._failed("it needs more memory than a text may", where) from None
        except Exception as error:  # a template is a program of a stranger's: it may raise anything
            raise self._failed(_error_text(error), where) from None
        finally:
            limits.end()
        text = texts[0]
        self._check(text, messages, told, where)
        return Rendered(text, [(int(a), int(b)) for a, b in spans[0]] if self.marked else [])

    def _check(
        self, text: str, messages: Sequence[Mapping[str, Any]], told: Mapping[str, Any], where: str
    ) -> None:
        if len(text) > _OWN:
            input_length = len(str(messages)) + len(str(told))
            if len(text) > _OWN + _LONGER * input_length + len(self.text):
                raise self._failed(f"it makes {len(text):,} characters of {input_length:,}", where)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                raise self._failed("it writes half of a surrogate pair, which is no text", where) from None

    def _failed(self, said: str, where: str) -> UserError:
        return UserError(
            f"the chat template does not take this conversation: {said}", field=FLAG, value=self.name, where=where,
            accepted="what the template knows: roles and their order, tool calls, content as text or as parts",
        )  # fmt: skip


def _error_text(error: Exception) -> str:
    """What Python says of a template, without what only Python's own programs mean: addresses, its name for none."""
    message = " ".join(str(error).split())[:200] or type(error).__name__
    return re.sub(r" object at 0x[0-9a-f]+", "", message).replace("NoneType", "none")


class Templates:
    """The template that was given, or those of a tokenizer.

    Args:
        chat_templates: of the tokenizer: a text, several by name, or None.
        given: Jinja text, the name of one of several, or None.
        tokenizer, name: of the tokenizer and of the file that was given, for messages.
    """

    def __init__(
        self, chat_templates: str | Mapping[str, str] | None, given: str | None, tokenizer: str, name: str = "given"
    ) -> None:
        self._tokenizer = tokenizer
        self._single: Template | None = None
        self._several: Mapping[str, Template] = {}
        if given is not None and isinstance(chat_templates, Mapping) and given in chat_templates:
            given, name = chat_templates[given], f"{given} of {tokenizer}"
        if given is not None:
            self._single = Template.of(name, given)
        elif isinstance(chat_templates, str):
            self._single = Template.of(f"of {tokenizer}", chat_templates)
        elif chat_templates is not None:
            self._several = {key: Template.of(f"{key} of {tokenizer}", text) for key, text in chat_templates.items()}

    @property
    def names(self) -> str:
        """Of all of them, for messages."""
        return self._single.name if self._single is not None else ", ".join(t.name for t in self._several.values())

    @property
    def text(self) -> str:
        """All of it, for fingerprints."""
        if self._single is not None:
            return self._single.text
        return "".join(f"{name}\0{template.text}\0" for name, template in sorted(self._several.items()))

    def choose(self, with_tools: bool, where: str) -> Template:
        """The template for a conversation. UserError: there is none, or several and none for it."""
        if self._single is not None:
            return self._single
        if not self._several:
            raise UserError(
                "the tokenizer has no chat template, but the data has messages", field=FLAG, where=where,
                accepted="a Jinja file, a tokenizer with chat_template.jinja, or data with prompt and completion",
            )  # fmt: skip
        if with_tools and _FOR_TOOLS in self._several:
            return self._several[_FOR_TOOLS]
        if _DEFAULT not in self._several:
            names = ", ".join(sorted(self._several))
            raise UserError(
                f"{self._tokenizer} has several chat templates and none called {_DEFAULT}: {names}", field=FLAG,
                where=where, accepted="one of these names, or a Jinja file",
            )  # fmt: skip
        return self._several[_DEFAULT]
