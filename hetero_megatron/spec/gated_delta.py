"""What a layer of Gated DeltaNet is (Yang et al., 2024): linear attention whose state forgets and is corrected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.layout import cut

Intervals = list[tuple[int, int]]


@dataclass(frozen=True)
class GatedDelta:
    """The sizes of layers whose mixer is ``gated_delta``, in a model that may have attention in others.

    Each value head has a state [key_dim, value_dim] that goes from token to token; ``value_heads / key_heads``
    consecutive value heads have one query and one key. Queries, keys and values go through a causal convolution over
    ``kernel`` tokens, feature by feature, and SiLU.

    Args:
        norm_eps: of the norm of each value head's output, which is multiplied by SiLU of a projection of the token.
        by_feature: every feature of a key decays by itself (Kimi Delta Attention); what says how much, and the gate of
            the output, of which the sigmoid counts instead, come from ``key_dim`` features of the token each.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    norm_eps: float = 1e-6
    by_feature: bool = False

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise UserError("must be a positive integer", field=name, value=value, accepted="1 or more")
        if self.value_heads % self.key_heads:
            raise UserError(
                f"{self.key_heads} key heads cannot serve them evenly", field="value_heads", value=self.value_heads,
                accepted=f"a multiple of {self.key_heads}",
            )  # fmt: skip

    def shape(self) -> dict[str, Any]:
        """As JSON; see ``ModelSpec.shape``."""
        return {name: value for name, value in asdict(self).items() if name != "by_feature" or value}

    @property
    def mixer(self) -> str:
        """The kind of a layer that has it."""
        return "gated_delta"

    @property
    def rule(self) -> str:
        """The operator."""
        return "gated_delta_rule"

    @property
    def state_products(self) -> int:
        """Of vectors with a state, per token and value head: with the key, of the key, and with the query."""
        return 3

    @property
    def further_width(self) -> float:
        """Features of values that the rule would have besides, for its time, where a state of another rank comes."""
        return self.key_dim

    @property
    def values_per_key(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    def heads(self, tp_split: Sequence[int]) -> tuple[Intervals, Intervals]:
        """(key heads, value heads) of each rank of a TP group, none twice."""
        keys, each = list(cut(self.key_heads, tp_split)), self.values_per_key
        return keys, [(a * each, b * each) for a, b in keys]

    @property
    def key_width(self) -> int:
        """Features of a token's queries, and of its keys."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Features of its values."""
        return self.value_heads * self.value_dim

    @property
    def decays(self) -> int:
        """Numbers of a token that say how much is forgotten: one per value head, or per feature of its key."""
        return self.value_heads * (self.key_dim if self.by_feature else 1)

    @property
    def low_rank(self) -> int:
        """Features that every rank of a TP group projects a token down to, before decays and gates are made of them."""
        return 2 * self.key_dim if self.by_feature else 0

    @property
    def projected(self) -> int:
        """Features that are projected of a token: queries, keys, values, the output's gate, how much is written to each
        value head, and how much is forgotten."""
        return 2 * self.key_width + 2 * self.value_width + self.value_heads + self.decays

    def products(self, hidden: int, share: float = 1.0) -> tuple[tuple[tuple[float, ...], float], ...]:
        """(outputs of matrices that multiply one input, its features) of a layer, on a rank with ``share`` of it."""
        out = (hidden,), share * self.value_width
        if not self.by_feature:
            return ((share * self.projected,), hidden), out
        gates = share * self.decays, share * self.value_width
        return ((share * (self.projected - self.decays - self.value_width), self.low_rank), hidden), (
            gates, self.key_dim
        ), out  # fmt: skip

    def elements(self, hidden: int) -> float:
        """Of all these matrices."""
        return sum(sum(outputs) * inputs for outputs, inputs in self.products(hidden))
