"""What a layer of Mamba-2 is (Dao and Gu, 2024): a state that forgets and is written to, without a correction; and its
bytes per token beside those that any linear attention has (``spec/delta_bytes.py``), which are what
``model/state_space.py`` and ``ops/state_space_chunks.py`` have."""

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


CHUNK = 64  # tokens, of the state-space rule


def outside_bytes(delta: StateSpace, recompute: str, itemsize: int) -> float:
    """Of all heads, kept outside of the core: what is projected, the gated norm's input and a number of each head, and
    what the projection after it reads, which ``elementwise`` makes again."""
    values = (1 if recompute == "elementwise" else 2) * delta.value_width
    return itemsize * (delta.projected + values) + max(itemsize, 4) * delta.value_heads


def core_bytes(delta: StateSpace, itemsize: int) -> float:
    """Of the core: the convolutions' outputs, and, in at least fp32, per head, what the step size is the softplus of,
    that, and the logarithm of what the state is multiplied with."""
    return itemsize * (2 * delta.key_width + delta.value_width) + max(itemsize, 4) * 3 * delta.value_heads


def carried_token_bytes(delta: StateSpace, itemsize: int) -> tuple[float, float, float]:
    """Of all heads, of a token with a state before its run: (what its query reads of it, the query and the product of
    what multiplied the state, which are kept; bytes per run, of the state; what backward works with)."""
    heads, dk, wide = delta.value_heads, delta.key_dim, max(itemsize, 4)
    kept = itemsize * heads * dk + wide * heads + (wide * delta.key_width if itemsize < wide else 0)
    return kept, wide * heads * dk * delta.value_dim, wide * 2 * heads * dk


def beside_rule_bytes(delta: StateSpace, recompute: str, itemsize: int) -> float:
    """While backward is in the rule, gradients of its output, of the gate, and of x by D, less what the norm and the
    projection after it had kept."""
    return itemsize * delta.value_width * (2 if recompute == "elementwise" else 1)


def rule_backward_bytes(delta: StateSpace, itemsize: int, copied: float = 0.0) -> float:
    """Of backward of the state-space rule, which runs its forward again, in at least fp32, at the worst of its moments
    (``_gradients`` of ``ops/state_space_chunks.py``). In elements per head, r groups of each:

    - all the time B and C, 2 r dk; values, what is written and the output's gradient, 3 dv; two products of pairs,
      2 CHUNK; and 3;
    - one after the other the states before chunks and gradients of those after, dk dv / CHUNK each, with what they are
      made of; products with them; gradients of what is written and of pairs.

    Args:
        copied: key features beside those of the model (``copied_width`` of ``spec/delta_bytes.py``).
    """
    dk, dv, r = delta.key_dim, delta.value_dim, (delta.key_width + copied) / delta.key_dim / delta.value_heads
    states = dk * dv / CHUNK
    chunks = r * 2 * dk + 3 * dv + 2 * CHUNK + 3
    moments = (
        states + 2 * dv, 3 * states + dv + r * dk + 1, states + 2 * dv + 2 * r * dk + 1,
        3 * dv + CHUNK + 2 * r * dk + 2, dv + (2 + r) * CHUNK + 2 * r * dk + 2,
    )  # fmt: skip
    return max(itemsize, 4) * delta.value_heads * (chunks + max(moments))
