"""Dropout rates of a training run; no part of a model, which is the same with other rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hetero_megatron.errors import UserError

# What configurations of Hugging Face models call the rates of ``Dropout``.
DROPOUT_KEYS = {
    "hidden": ("resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout", "hidden_dropout"),
    "attention": ("attention_dropout", "attn_pdrop"),
}
UNITS = 1 << 16  # rates are multiples of 1 / UNITS: eight elements share one block of random bits


@dataclass(frozen=True)
class Dropout:
    """Probabilities with which elements are set to 0 in training, and the others divided by 1 - probability.

    Attributes:
        hidden: of the embeddings, and of what attention and MLP add to the residual stream.
        attention: of attention probabilities.
    """

    hidden: float = 0.0
    attention: float = 0.0

    def __post_init__(self) -> None:
        for name in ("hidden", "attention"):
            check_rate(getattr(self, name), name)


def check_rate(rate: object, field: str) -> None:
    """UserError where ``rate`` is no probability below 1, or one so small that it would be rounded to 0."""
    number = isinstance(rate, int | float) and not isinstance(rate, bool) and math.isfinite(rate)
    if not number or not 0 <= rate < 1:  # type: ignore[operator]
        raise UserError("is no probability below 1", field=field, value=rate, accepted="0 <= rate < 1")
    if rate and not 0 < dropped_units(rate) < UNITS:  # type: ignore[arg-type]
        raise UserError(
            f"rates are multiples of 1/{UNITS}", field=field, value=rate, accepted=f"0, or 1/{UNITS} to 1 - 1/{UNITS}"
        )


def dropped_units(rate: float) -> int:
    """How many of ``UNITS`` equally likely values drop an element: the rate, rounded."""
    return round(rate * UNITS)


NO_DROPOUT = Dropout()
