"""How much time and memory a call of code may take that came with a model: see :mod:`hetero_megatron.data.guard`."""

from __future__ import annotations

from typing import Protocol

RENDER, TOKENIZE = "the chat template", "the tokenizer"  # kinds of calls


class CallLimits(Protocol):
    """Told of by the work that they limit."""

    def begin(self, what: str) -> None:
        """A call begins that may take as long and as much memory as the limits say; ``what``: its kind."""
        ...

    def end(self) -> None:
        """It ended."""
        ...


class _Unlimited:
    def begin(self, what: str) -> None:
        """Nothing is limited here."""

    def end(self) -> None:
        """Nothing is limited here."""


UNLIMITED: CallLimits = _Unlimited()
