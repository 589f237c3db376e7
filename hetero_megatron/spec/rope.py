"""Rotary embeddings as data: base, stretching, and which features of a head turn."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from hetero_megatron.errors import UserError

# Kind of stretching -> its parameters. ``dynamic`` depends on the longest sequence of a batch, so that the loss would
# depend on the plan: it is refused.
SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "proportional": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor",
    ),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor", "attention_factor"),
}  # fmt: skip


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched.

    ``linear`` divides all by ``factor``; ``proportional`` too, and its features beyond ``Rope.dims`` keep their place
    in the pairs of the whole head; ``llama3`` by wavelength; ``yarn`` (Peng et al., 2023) by the number of rotations
    in the original length; ``longrope`` (Ding et al., 2024) each frequency by a factor of its own, the long ones where
    the run's sequences are longer than the original length.

    ``attention_factor`` multiplies the tables (queries and keys alike): what the family derives from the other
    parameters is resolved when a configuration is read.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in SCALINGS:
            raise UserError("unknown value", field="rope_type", value=self.kind, accepted=" | ".join(SCALINGS))


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of a layer.

    ``dims``: features of a head that turn, the first ones; None: all. ``interleaved``: feature 2i turns with 2i + 1
    (GLM), not i with i + dims / 2.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    dims: int | None = None
    interleaved: bool = False

    def turned(self, head_dim: int) -> int:
        """Features of a head that turn, in pairs."""
        return head_dim if self.dims is None else self.dims

    def width(self, head_dim: int) -> int:
        """Features of a head that pass through the rotation, some of them perhaps by an angle of zero."""
        proportional = self.scaling is not None and self.scaling.kind == "proportional"
        return head_dim if proportional else self.turned(head_dim)

    def is_long(self, seq_length: int) -> bool:
        """Whether a run with these sequences takes the long factors of ``longrope``."""
        scaling = self.scaling
        return scaling is not None and seq_length > scaling.original_max_position_embeddings

    @property
    def switch(self) -> int | None:
        """The longest sequence that takes the short factors of ``longrope``; None: there is one set of frequencies."""
        scaling = self.scaling
        return scaling.original_max_position_embeddings if scaling is not None and scaling.kind == "longrope" else None

    @property
    def attention_factor(self) -> float:
        """What its tables are multiplied with."""
        return 1.0 if self.scaling is None else self.scaling.attention_factor

    def check(self, head_dim: int) -> None:
        """UserError where heads of ``head_dim`` features cannot turn like this."""
        if self.turned(head_dim) % 2 or not 0 < self.turned(head_dim) <= head_dim:
            raise UserError(
                "rotary embedding turns pairs of a head's features", field="head_dim" if self.dims is None else "dims",
                value=self.turned(head_dim), accepted=f"an even number up to {head_dim}",
            )  # fmt: skip
        for name in ("short_factor", "long_factor"):
            factors = getattr(self.scaling, name) if self.scaling and self.scaling.kind == "longrope" else ()
            if factors and len(factors) != self.turned(head_dim) // 2:
                raise UserError(
                    "has another number of factors than pairs of features turn", field=name, value=len(factors),
                    accepted=f"{self.turned(head_dim) // 2} numbers",
                )  # fmt: skip


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What YaRN multiplies queries and keys with, unless a configuration says it."""
    if mscale and mscale_all_dim:
        return yarn_growth(factor, mscale) / yarn_growth(factor, mscale_all_dim)
    return yarn_growth(factor)


def yarn_growth(factor: float, weight: float = 1.0) -> float:
    """YaRN's 1 + 0.1 weight ln(factor), where it stretches positions at all."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original: int) -> float:
    """The same for LongRoPE."""
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def parameters(scaling: RopeScaling) -> dict[str, object]:
    """The parameters of this kind of stretching, as a configuration has them."""
    values = {f.name: getattr(scaling, f.name) for f in fields(scaling)}
    return {
        key: list(values[key]) if isinstance(values[key], tuple) else values[key] for key in SCALINGS[scaling.kind]
    }
