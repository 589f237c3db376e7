"""What a layer of Mamba-2 is (Dao and Gu, 2024): a state that forgets and is written to, without a correction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hetero_megatron.errors import UserError
from hetero_megatron.layout import cut_in_groups
from hetero_megatron.spec.gated_delta import GatedDelta, Intervals


@dataclass(frozen=True)
class StateSpace(GatedDelta):
    """The sizes of layers whose mixer is ``mamba2``, in the terms of linear attention: a value head is a head of Mamba,
    with x as its value; a key head is a group of heads with one B (its key) and one C (its query), and ``key_dim`` the
    size of the state.

    Args:
        norm_eps: of the norm of each group's output, which SiLU of a projection of the token is multiplied with before.
        conv_bias, proj_bias: the convolution, and the projections before and after, have biases.
        step_limits: between which the step size dt of a token is kept; None: no most.
    """

    conv_bias: bool = True
    proj_bias: bool = False
    step_limits: tuple[float, float | None] = (0.0, None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by_feature:
            raise UserError("a state of Mamba-2 decays as a whole", field="by_feature", value=True, accepted="false")

    @property
    def mixer(self) -> str:
        return "mamba2"

    @property
    def rule(self) -> str:
        return "state_space_rule"

    def shape(self) -> dict[str, Any]:
        return {name: value for name, value in super().shape().items() if name not in ("step_limits", "norm_eps")}

    def heads(self, tp_split: Sequence[int]) -> tuple[Intervals, Intervals]:
        """Ranks have copies of a group that has heads of several."""
        values, keys = cut_in_groups((0, self.value_heads), self.values_per_key, tp_split)
        return keys, values

    @property
    def projected(self) -> int:
        """Features that are projected of a token: B, C, x, the output's gate, and a step size per head."""
        return 2 * self.key_width + 2 * self.value_width + self.value_heads

    @property
    def state_products(self) -> int:
        """Of vectors with a state, per token and head: what is written, and what is read."""
        return 2

    @property
    def further_width(self) -> float:
        """A state of another rank adds one product with it."""
        return self.value_dim / self.state_products
